"""Verification of checkpoints: reads and checks every block of every object."""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ckptcore.builtin.files import empty_directories
from ckptcore.commit.location import AnyLocation
from ckptcore.commit.references import stored_leaves
from ckptcore.commit.root import ROOT_KEY, Root
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InsufficientMemoryError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedLeafError,
    UnsupportedVersionError,
)
from ckptcore.inspection.completeness import Problem, missing_members
from ckptcore.inspection.left_out import left_out_of
from ckptcore.io.reader import ObjectReader
from ckptcore.io.requests import requests_of
from ckptcore.io.threads import for_each
from ckptcore.loading.reading import allocate_for, check_sizes, default_handlers, incomplete_read, read_leaves
from ckptcore.model.adapters import adapter_gaps
from ckptcore.model.arrays import ArraySpec, Box
from ckptcore.model.metadata import BLOCK_BYTES, ArrayRecord, ObjectRecord, unreadable_error
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import (
    Checkpoint,
    CompositeCheckpoint,
    arrays_at,
    extents_of,
    file_pieces,
    naming_arrays,
)
from ckptcore.opening.open_checkpoints import (
    ConsistentRead,
    existing_members,
    open_directory,
    open_either,
    open_tree,
)
from ckptcore.planning import plan_read
from ckptcore.progress import ByteProgress, ProgressCallback
from ckptcore.runtime import runtime_of

_READ_BYTES: Final = 1 << 24
"""Limit of the bytes that are read at once of an array in a base, or of one that is larger than memory."""

_MAX_READS: Final = 1 << 16
"""Limit of the parts of an array that is larger than memory."""

_PIECE_BLOCKS: Final = 8


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The results of `verify`.

    Attributes:
        problems: all problems, in no particular order.
        objects: the number of objects that were checked, including the root and its parts.
        nbytes: bytes checked, including those of arrays in bases.
        unverified: keys of objects without checksums, which were only read.
        deleted: names of checkpointables that do not exist any more. Each is a problem, unless ckptcore deleted it.
        unused: by object, the names of arrays that other software stored and does not load, because its index names
            other copies of them, or does not name them. They are not read, and not reported as a problem.
        unsupported: paths of leaves of other software that this installation cannot read. They may be sound or damaged.
        left_out: files with state, and tensors of files, in the directory of a checkpoint of other software that are no
            part of it. They are not checked, and copies in another layout do not have them.
        unjudged: statements about what may be complete or not, such as an adapter of a method that is not known.
    """

    problems: tuple[Problem, ...]
    objects: int
    nbytes: int
    unverified: tuple[str, ...]
    deleted: tuple[str, ...] = ()
    unused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if there are no problems. See `state` for whether checksums were compared."""
        return not self.problems

    @property
    def state(self) -> Literal["sound", "complete", "damaged"]:
        """ "sound": every byte has its checksum. "complete": all that can be read here was read, but some of it has no
        checksums, so that a changed byte may not be found. "damaged": there are problems."""
        if self.problems:
            return "damaged"
        judged = self.objects and not (self.unverified or self.unsupported or self.unjudged)
        return "sound" if judged else "complete"


def verify_checkpoint(location: AnyLocation, context: Context, report: ProgressCallback | None = None) -> VerifyReport:
    """Check the root, its parts, every block of every object, and the arrays that bases store.

    Damage is reported as a problem, not raised. Progress is passed to `report`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        StorageError: the storage failed, or an object cannot be read here, so that it is not known if it is damaged.
    """
    progress = ByteProgress(report)

    def verify(found: Checkpoint | CompositeCheckpoint) -> VerifyReport:
        if isinstance(found, Checkpoint):
            progress.plan(_bytes_to_check(found))
            checked = _Verification(found, context, progress).run()
        else:
            checked = _verify_composite(found, location, context, progress)
        return replace(checked, left_out=left_out_of(found, location, context)) if found.root is None else checked

    try:
        result = ConsistentRead(location, context, open_either).retry_if_replaced(verify)
    except CorruptCheckpointError as error:
        result = VerifyReport((_problem(error),), 1, 0, ())
    progress.end()
    return result


def _verify_composite(
    composite: CompositeCheckpoint, location: AnyLocation, context: Context, progress: ByteProgress
) -> VerifyReport:
    """Verify every checkpointable that exists. Keys in the report begin with its directory."""
    root = composite.root
    problems: list[Problem] = []
    existing: dict[str, list[str]] = {}
    opened: list[tuple[str, Checkpoint]] = []
    for name, directories in existing_members(composite):
        for directory in directories:
            existing.setdefault(name, []).append(directory)
            try:
                opened.append((directory, open_directory(composite, name, directory, location, context)))
            except CorruptCheckpointError as error:
                problems.append(_in_directory(directory, _problem(error)))
            except CheckpointError as error:
                _raise_unjudged(error)
                key = directory if root is None else f"{directory}/{ROOT_KEY}"
                problems.append(Problem(key, None, None, (), str(error)))
    deleted, missing = missing_members(composite, existing)
    problems.extend(missing)
    objects, done = 0 if root is None else 1 + len(root.parts), 0
    progress.plan(sum(_bytes_to_check(one) for _, one in opened))
    unverified: list[str] = []
    unused: dict[str, Sequence[str]] = {}
    unsupported: list[str] = []
    unjudged: list[str] = []
    for directory, one in opened:
        if root is not None and (one.root is None or one.root.role != "member" or one.root.save_id != root.save_id):
            message = f"{directory} was replaced by another save"
            problems.append(Problem(f"{directory}/{ROOT_KEY}", None, None, (), message))
        report = _Verification(one, context, progress).run()
        problems.extend(_in_directory(directory, problem) for problem in report.problems)
        unverified.extend(f"{directory}/{key}" for key in report.unverified)
        unused.update({f"{directory}/{key}": names for key, names in report.unused.items()})
        unsupported.extend(f"{directory}: {path}" for path in report.unsupported)
        unjudged.extend(f"{directory}: {statement}" for statement in report.unjudged)
        objects += report.objects
        done += report.nbytes
    return VerifyReport(
        tuple(problems), objects, done, tuple(unverified), deleted, unused, tuple(unsupported), tuple(unjudged)
    )


_DAMAGE: Final = frozenset({errno.EIO, errno.ELOOP, errno.EBADMSG, errno.ENODATA, getattr(errno, "EUCLEAN", errno.EIO)})
"""Errors of a file that cannot be read, of a damaged file system, and of a link in place of a file."""


def _raise_unjudged(error: Exception) -> None:
    """Raise an error that says nothing about the bytes, such as a missing permission or a newer version: no damage."""
    is_damage = isinstance(error, ObjectNotFoundError) or (isinstance(error, OSError) and error.errno in _DAMAGE)
    if isinstance(error, UnsupportedVersionError) or (isinstance(error, StorageError) and not is_damage):
        raise error


def _bytes_to_check(opened: Checkpoint) -> int:
    """Return the bytes of all objects, and of arrays in bases. Without objects, those of all arrays."""
    in_bases = [] if opened.root is None else [opened.tree.leaves[leaf] for leaf in opened.root.references.leaf]
    nbytes = sum(record.size for record in opened.objects.values())
    return nbytes + sum(one.spec.nbytes for one in in_bases if isinstance(one, ArrayRecord)) or opened.tree.nbytes


def _in_directory(directory: str, problem: Problem) -> Problem:
    arrays = tuple([f"{directory}: {array}" for array in problem.arrays])
    key = directory if problem.key is None else f"{directory}/{problem.key}"
    return replace(problem, key=key, arrays=arrays)


def _problem(error: CorruptCheckpointError, opened: Checkpoint | None = None) -> Problem:
    arrays = () if opened is None else tuple(arrays_at(opened, error.key, error.start, error.stop))
    return Problem(error.key, error.start, error.stop, arrays, str(error))


class _Verification:
    """Verification of one tree, or of the files of an object."""

    def __init__(self, opened: Checkpoint, context: Context, progress: ByteProgress) -> None:
        self._opened = opened
        self._context = context
        self._threads = runtime_of(context).io_threads
        self._store = ObjectReader(opened.location.store, opened.objects, self._threads, verify=True)
        self._progress = progress
        self._done = 0
        self._problems: list[Problem] = []
        self._unsupported: list[str] = []
        self._readable: dict[str, int] = {}
        self._lock = threading.Lock()

    def run(self) -> VerifyReport:
        """Check everything."""
        opened, root = self._opened, self._opened.root
        unjudged = self._check_adapter()
        if root is None:
            unverified = self._read_files() if opened.is_files else self._read_arrays()
            keys = {key for _, key, _, _ in extents_of(opened)}.union(unverified)
            return VerifyReport(
                tuple(self._problems), len(keys), self._done, unverified,
                unused=opened.origin.unused, unsupported=tuple(self._unsupported), unjudged=unjudged,
            )  # fmt: skip
        parallelism = requests_of(opened.location.store).concurrency  # small objects cost mostly latency
        for_each(self._threads, opened.objects.values(), self._check_size, parallelism=parallelism)
        for_each(self._threads, self._pieces(), self._check_piece, parallelism=parallelism)
        if opened.is_files:
            self._check_table_of_files()
        elif not self._problems:
            self._find_unstored(root)
        self._read_from_bases(root)
        unverified = tuple(record.key for record in opened.objects.values() if record.size and not record.checksums)
        objects = len(opened.objects) + 1 + len(root.parts)
        return VerifyReport(tuple(self._problems), objects, self._done, unverified, unjudged=unjudged)

    def _check_adapter(self) -> tuple[str, ...]:
        """Report parameters that the config of an adapter needs. Return what its config does not decide."""
        config = self._opened.origin.custom.get("adapter_config")
        if not isinstance(config, Mapping):
            return ()
        gaps = adapter_gaps(config, [".".join(map(str, path)) for path in self._opened.tree.paths])
        if gaps.lacking:
            found = "; ".join(gaps.lacking)
            message = f"the adapter lacks {found}: save it again from the trained model, or use another copy"
            self._problems.append(Problem("adapter_config.json", None, None, (), message))
        return tuple([f"adapter_config.json: {statement}" for statement in gaps.unjudged])

    def _add(self, error: CorruptCheckpointError) -> None:
        problem = _problem(error, self._opened)
        with self._lock:
            self._problems.append(problem)

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
        self._progress.complete(nbytes)

    def _check_size(self, record: ObjectRecord) -> None:
        """Check the size of an object."""
        try:
            found = self._opened.location.store.size(record.key)
        except CheckpointError as error:
            _raise_unjudged(error)
            self._add(CorruptCheckpointError(str(error), key=record.key, start=0, stop=record.size))
            return
        if found != record.size:
            self._add(
                CorruptCheckpointError(
                    f"{record.key} has {found} bytes instead of {record.size}",
                    key=record.key, start=min(found, record.size), stop=max(found, record.size),
                )
            )  # fmt: skip
        # Skip a truncated block, which is already reported. A hostile root may state any size.
        whole = found >= record.size
        self._readable[record.key] = record.size if whole else found // BLOCK_BYTES * BLOCK_BYTES

    def _pieces(self) -> Sequence[tuple[str, int, int]]:
        """Return all objects in pieces of a few blocks: the key, start and stop of each."""
        return [
            (key, start, min(start + _PIECE_BLOCKS * BLOCK_BYTES, readable))
            for key, readable in self._readable.items()
            for start in range(0, readable, _PIECE_BLOCKS * BLOCK_BYTES)
        ]

    def _check_piece(self, piece: tuple[str, int, int]) -> None:
        """Check the blocks of a piece."""
        key, start, stop = piece
        try:
            self._read(key, start, stop)
        except (CheckpointError, OSError):
            for block in range(start, stop, BLOCK_BYTES):  # find the damaged ones
                self._check_block(key, block, min(block + BLOCK_BYTES, stop))
        self._advance(stop - start)

    def _check_block(self, key: str, start: int, stop: int) -> None:
        try:
            self._read(key, start, stop)
        except (CheckpointError, OSError) as error:
            _raise_unjudged(error)
            if not isinstance(error, CorruptCheckpointError):
                error = CorruptCheckpointError(str(error), key=key, start=start, stop=stop)
            self._add(error)

    def _read(self, key: str, start: int, stop: int) -> None:
        data = self._store.get(key, start, stop)
        if len(data) != stop - start:
            raise CorruptCheckpointError(
                f"{key} ends at byte {start + len(data)} instead of {stop}",
                key=key, start=start + len(data), stop=stop,
            )  # fmt: skip

    def _check_table_of_files(self) -> None:
        """Report directories that cannot be made."""
        try:
            for key in empty_directories(self._opened.state):
                parts = key.split("/")
                for stop in range(1, len(parts) + 1):
                    if (file := "/".join(parts[:stop])) in self._opened.objects:
                        raise CorruptCheckpointError(
                            f"{file!r} is listed as a file, and also as a directory; load another checkpoint"
                        )
        except CorruptCheckpointError as error:
            self._problems.append(Problem(ROOT_KEY, None, None, (), str(error)))

    def _find_unstored(self, root: Root) -> None:
        """Report arrays that are larger than their stored bytes."""
        opened = self._opened
        arrays = [leaf for leaf in stored_leaves(opened.tree, root.references) if leaf not in opened.tree.aliases]
        try:
            check_sizes(opened, arrays)
        except CheckpointError as error:
            _raise_unjudged(error)
            self._problems.append(Problem(ROOT_KEY, None, None, (), str(error)))

    def _read_from_bases(self, root: Root) -> None:
        """Read the arrays that bases store. Checks no other data of the bases."""
        checked, tree = self._opened, self._opened.tree
        if root.references.leaf and not self._context.io.verify:
            verifying = replace(self._context, io=replace(self._context.io, verify=True))
            checked = open_tree(checked.location, checked.version, verifying)
        for leaf in root.references.leaf:
            record = tree.leaves[leaf]
            assert isinstance(record, ArrayRecord)  # references were checked
            try:
                _read_in_pieces(checked, leaf, record.spec)
            except InsufficientMemoryError:
                raise  # nothing is known about the array
            except CheckpointError as error:
                _raise_unjudged(error)
                self._problems.append(Problem(None, None, None, (format_path(tree.paths[leaf]),), str(error)))
            self._advance(record.spec.nbytes)

    def _read_arrays(self) -> tuple[str, ...]:
        """Read every array of a checkpoint of other software, which has no recorded checksums of blocks.

        Returns the keys of the objects in which the format has no checksums, or not of all bytes.

        Raises:
            InsufficientMemoryError: not even a part of an array can be read. It may be sound or damaged.
        """
        opened, unverified = self._opened, set[str]()
        array, _ = default_handlers(runtime_of(self._context).registry)
        for number, record in enumerate(opened.tree.leaves):
            path = format_path(opened.tree.paths[number])
            error = unreadable_error(record)
            if isinstance(error, CorruptCheckpointError):
                self._problems.append(Problem(error.key, None, None, (path,), f"{path}: {error}"))
            elif error is not None:
                self._unsupported.append(path)
            if isinstance(record, ArrayRecord) and number not in opened.tree.aliases:
                try:
                    with naming_arrays(opened):
                        try:
                            read_leaves(opened, [number], [array], [None], self._context)
                            unverified.update(opened.index.unverified(number, opened.store))
                        except InsufficientMemoryError:
                            _read_in_pieces(opened, number, record.spec)
                            unverified.update([key for key, _, _ in opened.index.extents(number)])
                except CorruptCheckpointError as damage:
                    self._add(damage)
                except UnsupportedLeafError:
                    self._unsupported.append(path)
                self._advance(record.spec.nbytes)
        return tuple(sorted(unverified))

    def _read_files(self) -> tuple[str, ...]:
        """Read every file of an object that other software saved. Returns the keys."""
        for key, record in self._opened.objects.items():
            try:
                for piece in file_pieces(self._opened, record):
                    self._advance(len(piece))
            except CheckpointError as error:
                _raise_unjudged(error)
                self._problems.append(Problem(key, None, None, (), str(error)))
        return tuple(self._opened.objects)


def _read_in_pieces(opened: Checkpoint, leaf: int, spec: ArraySpec) -> None:
    """Read an array of a base, or one that is larger than memory, a small part at a time.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    check_sizes(opened, [leaf])
    for box in _pieces(opened, leaf, spec) if spec.size else ():
        plan = plan_read(opened.tree, [(leaf, (box,))])
        buffer = allocate_for(opened, leaf, ArraySpec(box.shape, spec.dtype))
        if not list(opened.read(plan, [buffer])):
            raise incomplete_read(opened, leaf)


def _pieces(opened: Checkpoint, leaf: int, spec: ArraySpec) -> Sequence[Box]:
    """Return boxes that together are an array. Each has whole chunks, or few bytes.

    The first element comes first: what is decoded for it may show that no chunk has the size that its metadata states.
    """
    if opened.derived is not None:
        return opened.derived.pieces(leaf, _READ_BYTES)
    whole = Box.whole(spec.shape)
    rows = opened.index.chunk_rows(opened.tree.aliases.get(leaf, leaf)) or 1
    step = max(1, _READ_BYTES * spec.shape[0] // spec.nbytes // rows) * rows if spec.shape else 1
    # A few bytes may state any shape, so a limit is needed for elements that are not stored.
    bands = whole.bands(0, step) if spec.shape and spec.shape[0] <= step * _MAX_READS else [whole]
    return [Box((0,) * len(spec.shape), (1,) * len(spec.shape)), *bands]
