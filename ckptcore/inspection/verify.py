"""Verification of checkpoints: reads and checks every block of every object."""

from __future__ import annotations

import errno
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ckptcore.builtin.files import empty_directories
from ckptcore.commit.location import AnyLocation
from ckptcore.commit.root import ROOT_KEY, Root, stored_leaves
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
from ckptcore.inspection.completeness import Problem, members_by_name, missing_members, open_members
from ckptcore.inspection.left_out import left_out_of
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import for_each, requests_of
from ckptcore.loading.reading import (
    allocate_for,
    check_sizes,
    incomplete_read,
    read_leaf,
)
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
from ckptcore.opening.members import open_directory
from ckptcore.opening.open_checkpoints import ConsistentRead, open_either, open_tree
from ckptcore.planning import plan_read
from ckptcore.progress import ByteProgress, ProgressCallback
from ckptcore.runtime import runtime_of

_READ_BYTES: Final = 1 << 24
"""Maximum bytes of one read, for arrays in bases and for arrays that are larger than memory."""

_MAX_READS: Final = 1 << 16
"""Maximum number of parts in which an array is read. An array that would need more parts is read as a whole."""

_PIECE_BLOCKS: Final = 8


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The results of `verify`.

    Attributes:
        problems: all problems, in no particular order.
        objects: the number of objects that were checked, including the root and its parts.
        nbytes: bytes checked, including those of arrays in bases.
        unverified: keys of objects with bytes that have no checksum. These bytes were only read. Those of a base of
            other software begin with ``../`` and its name.
        deleted: names of checkpointables that no longer exist. Each is a problem, unless ckptcore deleted it.
        unused: by object, the names of stored arrays that the other software does not load, because the index of the
            checkpoint names other copies of the arrays, or does not name them. The arrays are not read, and not
            reported as a problem.
        unsupported: paths of leaves of other software that this installation cannot read. They may be sound or damaged.
        left_out: files with state, and tensors of files, that are in the directory of a checkpoint of other software
            but not part of it. They are not checked, and copies in another layout do not have them.
        unjudged: statements about parts whose completeness is unknown, such as an adapter of an unknown method.
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
        """State of the checkpoint: "sound", "complete" or "damaged".

        - "sound": every byte matches its checksum.
        - "complete": everything that can be read here was read, but some bytes have no checksums, or some parts cannot
          be read or judged. A changed byte in such data may not be found.
        - "damaged": there are problems.
        """
        if self.problems:
            return "damaged"
        judged = self.objects and not (self.unverified or self.unsupported or self.unjudged)
        return "sound" if judged else "complete"


def verify_checkpoint(location: AnyLocation, context: Context, report: ProgressCallback | None = None) -> VerifyReport:
    """Check the root, its parts, every block of every object, and the arrays that bases store.

    Damage is reported as a problem, not raised. Progress is passed to `report`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        StorageError: the storage failed, or an object cannot be read here, so that damage cannot be excluded.
        UnsupportedVersionError: a newer version of ckptcore wrote a root.
        InsufficientMemoryError: a part of an array does not fit into memory. The array may be sound or damaged.
    """
    progress = ByteProgress(report)

    def verify(checkpoint: Checkpoint | CompositeCheckpoint) -> VerifyReport:
        if isinstance(checkpoint, Checkpoint):
            progress.plan(_bytes_to_check(checkpoint))
            checked = _Verification(checkpoint, context, progress).run()
        else:
            checked = _verify_composite(checkpoint, location, context, progress)
        return replace(checked, left_out=left_out_of(checkpoint, location, context))

    try:
        result = ConsistentRead(location, context, open_either).retry_if_replaced(verify)
    except CorruptCheckpointError as error:
        result = VerifyReport((_problem(error),), 1, 0, ())
    progress.end()
    return result


def _verify_composite(
    composite: CompositeCheckpoint, location: AnyLocation, context: Context, progress: ByteProgress
) -> VerifyReport:
    """Verify every checkpointable that exists. Keys in the report begin with the directory of the checkpointable."""
    root, existing = composite.root, members_by_name(composite)
    problems: list[Problem] = []
    members: list[tuple[str, Checkpoint]] = []

    def open_one(name: str, directory: str) -> Checkpoint:
        return open_directory(composite, name, directory, location, context)

    for directory, member in open_members(existing, open_one):
        if isinstance(member, Checkpoint):
            members.append((directory, member))
        elif isinstance(member, CorruptCheckpointError):
            problems.append(_in_directory(directory, _problem(member)))
        else:
            _raise_unjudged(member)
            key = directory if root is None else f"{directory}/{ROOT_KEY}"
            problems.append(Problem(key, None, None, (), str(member)))
    deleted, missing = missing_members(composite, existing)
    problems.extend(missing)
    objects, done = 0 if root is None else 1 + len(root.parts), 0
    progress.plan(sum(_bytes_to_check(member) for _, member in members))
    unverified: list[str] = []
    unused: dict[str, Sequence[str]] = {}
    unsupported: list[str] = []
    unjudged: list[str] = []
    for directory, checkpoint in members:
        own = checkpoint.root
        if root is not None and (own is None or (own.role, own.save_id) != ("member", root.save_id)):
            message = f"{directory} was replaced by another save"
            problems.append(Problem(f"{directory}/{ROOT_KEY}", None, None, (), message))
        report = _Verification(checkpoint, context, progress).run()
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
"""Error numbers of a file that cannot be read, of a damaged file system, and of a link in place of a file."""


def _raise_unjudged(error: Exception) -> None:
    """Raise an error that does not show damage, such as a missing permission or a newer version of the format."""
    is_damage = isinstance(error, ObjectNotFoundError) or (isinstance(error, OSError) and error.errno in _DAMAGE)
    is_unknown = isinstance(error, UnsupportedVersionError | InsufficientMemoryError)
    if is_unknown or (isinstance(error, StorageError) and not is_damage):
        raise error


def _bytes_to_check(checkpoint: Checkpoint) -> int:
    """Return the bytes of all objects and of arrays in bases; if there are neither, the bytes of all arrays."""
    derived, nbytes = checkpoint.derived, sum(record.size for record in checkpoint.objects.values())
    if checkpoint.root is not None and derived is not None:
        nbytes += sum(derived.derivations[leaf].spec.nbytes for leaf in derived.leaves_from_bases)
    return nbytes or checkpoint.tree.nbytes


def _in_directory(directory: str, problem: Problem) -> Problem:
    arrays = tuple([f"{directory}: {array}" for array in problem.arrays])
    key = directory if problem.key is None else f"{directory}/{problem.key}"
    return replace(problem, key=key, arrays=arrays)


def _problem(error: CorruptCheckpointError, checkpoint: Checkpoint | None = None) -> Problem:
    arrays = () if checkpoint is None else tuple(arrays_at(checkpoint, error.key, error.start, error.stop))
    return Problem(error.key, error.start, error.stop, arrays, str(error))


class _Verification:
    """Verification of one tree, or of the files of an object."""

    def __init__(self, checkpoint: Checkpoint, context: Context, progress: ByteProgress) -> None:
        self._checkpoint = checkpoint
        self._context = context
        self._threads = runtime_of(context).io_threads
        self._store = ObjectReader(checkpoint.location.store, checkpoint.objects, self._threads, verify=True)
        self._progress = progress
        self._done = 0
        self._problems: list[Problem] = []
        self._unsupported: list[str] = []
        self._readable: dict[str, int] = {}
        self._lock = threading.Lock()

    def run(self) -> VerifyReport:
        """Check everything."""
        checkpoint, root = self._checkpoint, self._checkpoint.root
        unjudged = self._check_adapter()
        if root is None:
            unverified = self._read_files() if checkpoint.is_files else self._read_arrays()
            keys = {key for _, key, _, _ in extents_of(checkpoint)}.union(unverified)
            return VerifyReport(
                tuple(self._problems), len(keys), self._done, unverified,
                unused=checkpoint.origin.unused, unsupported=tuple(self._unsupported), unjudged=unjudged,
            )  # fmt: skip
        parallelism = requests_of(checkpoint.location.store).concurrency  # small objects cost mostly latency
        for_each(self._threads, checkpoint.objects.values(), self._check_size, parallelism=parallelism)
        for_each(self._threads, self._pieces(), self._check_piece, parallelism=parallelism)
        if checkpoint.is_files:
            self._check_table_of_files()
        elif not self._problems:
            self._find_unstored(root)
        own = [record.key for record in checkpoint.objects.values() if record.size and not record.checksums]
        unverified = (*own, *sorted(self._read_from_bases()))
        objects = len(checkpoint.objects) + 1 + len(root.parts)
        return VerifyReport(tuple(self._problems), objects, self._done, unverified, unjudged=unjudged)

    def _check_adapter(self) -> tuple[str, ...]:
        """Report missing parameters that the config of an adapter requires.

        Returns statements about parts whose completeness the config does not determine.
        """
        config = self._checkpoint.origin.custom.get("adapter_config")
        if not isinstance(config, Mapping):
            return ()
        gaps = adapter_gaps(config, [".".join(map(str, path)) for path in self._checkpoint.tree.paths])
        if gaps.lacking:
            lacking = "; ".join(gaps.lacking)
            message = f"the adapter lacks {lacking}: save it again from the trained model, or use another copy"
            self._problems.append(Problem("adapter_config.json", None, None, (), message))
        return tuple([f"adapter_config.json: {statement}" for statement in gaps.unjudged])

    @contextmanager
    def _reporting(self, key: str | None, *arrays: str) -> Iterator[None]:
        """Report damage that the body finds as a problem of an object, or of arrays."""
        try:
            yield
        except CheckpointError as error:
            _raise_unjudged(error)
            self._problems.append(Problem(key, None, None, arrays, str(error)))

    def _add(self, error: CorruptCheckpointError) -> None:
        problem = _problem(error, self._checkpoint)
        with self._lock:
            self._problems.append(problem)

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
        self._progress.complete(nbytes)

    def _check_size(self, record: ObjectRecord) -> None:
        """Check the size of an object, and keep the number of bytes that can be read for the check of its blocks."""
        try:
            size = self._checkpoint.location.store.size(record.key)
        except CheckpointError as error:
            _raise_unjudged(error)
            self._add(CorruptCheckpointError(str(error), key=record.key, start=0, stop=record.size))
            return
        if size != record.size:
            self._add(
                CorruptCheckpointError(
                    f"{record.key} has {size} bytes instead of {record.size}",
                    key=record.key, start=min(size, record.size), stop=max(size, record.size),
                )
            )  # fmt: skip
        # Read only bytes that exist, because a hostile root may state any size. A truncated block is not read, because
        # the wrong size is already reported.
        whole = size >= record.size
        self._readable[record.key] = record.size if whole else size // record.block_bytes * record.block_bytes

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
            step = self._checkpoint.objects[key].block_bytes
            for block in range(start, stop, step):  # find the damaged blocks
                self._check_block(key, block, min(block + step, stop))
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
        data = self._store.get_blocks(key, start, stop)
        if len(data) != stop - start:
            raise CorruptCheckpointError(
                f"{key} ends at byte {start + len(data)} instead of {stop}",
                key=key, start=start + len(data), stop=stop,
            )  # fmt: skip

    def _check_table_of_files(self) -> None:
        """Report directories that cannot be created, because a file has the same path."""
        with self._reporting(ROOT_KEY):
            for key in empty_directories(self._checkpoint.state):
                parts = key.split("/")
                for stop in range(1, len(parts) + 1):
                    if (file := "/".join(parts[:stop])) in self._checkpoint.objects:
                        raise CorruptCheckpointError(
                            f"{file!r} is listed as a file, and also as a directory; load another checkpoint"
                        )

    def _find_unstored(self, root: Root) -> None:
        """Report arrays that are larger than their stored bytes."""
        tree = self._checkpoint.tree
        arrays = [leaf for leaf in stored_leaves(tree, root.references) if leaf not in tree.aliases]
        with self._reporting(ROOT_KEY):
            check_sizes(self._checkpoint, arrays)

    def _read_from_bases(self) -> Collection[str]:
        """Read the arrays that bases store, or that are computed from bases. Checks no other data of the bases.

        Returns the objects of bases of other software that do not have checksums for all of their bytes.
        """
        checked, derived, unverified = self._checkpoint, self._checkpoint.derived, set[str]()
        if derived is None:
            return unverified
        if not self._context.io.verify:
            verifying = replace(self._context, io=replace(self._context.io, verify=True))
            checked = open_tree(checked.location, checked.version, verifying)
        for leaf in derived.leaves_from_bases:
            spec = derived.derivations[leaf].spec
            with self._reporting(None, format_path(checked.tree.paths[leaf])):
                _read_in_pieces(checked, leaf, spec)
                unverified.update(_unverified(checked, leaf))
            self._advance(spec.nbytes)
        return unverified

    def _read_arrays(self) -> tuple[str, ...]:
        """Read every array of a checkpoint of other software, which has no recorded checksums of blocks.

        Returns the keys of the objects that do not have checksums for all of their bytes.

        Raises:
            InsufficientMemoryError: not even a part of an array can be read. It may be sound or damaged.
        """
        checkpoint, unverified = self._checkpoint, set[str]()
        for number, record in enumerate(checkpoint.tree.leaves):
            path = format_path(checkpoint.tree.paths[number])
            error = unreadable_error(record)
            if isinstance(error, CorruptCheckpointError):
                self._problems.append(Problem(error.key, None, None, (path,), f"{path}: {error}"))
            elif error is not None:
                self._unsupported.append(path)
            if isinstance(record, ArrayRecord) and number not in checkpoint.tree.aliases:
                try:
                    with naming_arrays(checkpoint):
                        try:
                            read_leaf(checkpoint, number, self._context)
                            unverified.update(_unverified(checkpoint, number))
                        except InsufficientMemoryError:
                            _read_in_pieces(checkpoint, number, record.spec)
                            for directory, source, leaf in _of_other_software(checkpoint, number):
                                unverified.update([directory + key for key, _, _ in source.index.extents(leaf)])
                except CorruptCheckpointError as damage:
                    if damage.key is None:  # an array that is computed from a base
                        self._problems.append(Problem(None, None, None, (path,), str(damage)))
                    else:
                        self._add(damage)
                except UnsupportedLeafError:
                    self._unsupported.append(path)
                self._advance(record.spec.nbytes)
        return tuple(sorted(unverified))

    def _read_files(self) -> tuple[str, ...]:
        """Read every file of an object that other software saved. Returns the keys."""
        for key, record in self._checkpoint.objects.items():
            with self._reporting(key):
                for piece in file_pieces(self._checkpoint, record):
                    self._advance(len(piece))
        return tuple(self._checkpoint.objects)


def _of_other_software(checkpoint: Checkpoint, leaf: int) -> Iterator[tuple[str, Checkpoint, int]]:
    """Yield the stored arrays without recorded checksums that an array is read from, or computed from.

    Yields the directory of the array relative to the checkpoint, empty or ending with ``/``, the checkpoint that stores
    it, and its number there.
    """
    if (derived := checkpoint.derived) is None:
        if checkpoint.root is None:
            yield "", checkpoint, leaf
        return
    for number, leaves in derived.stored((leaf,)).items():
        source = derived.sources[number]
        for stored in leaves:
            for directory, of_source, its_leaf in _of_other_software(source, stored):
                yield directory or (f"../{source.location.name}/" if number else ""), of_source, its_leaf


def _unverified(checkpoint: Checkpoint, leaf: int) -> Iterator[str]:
    """Yield the objects of other software in which damage of an array may go undetected."""
    for directory, source, stored in _of_other_software(checkpoint, leaf):
        for key in source.index.unverified(stored, source.store):
            yield directory + key


def _read_in_pieces(checkpoint: Checkpoint, leaf: int, spec: ArraySpec) -> None:
    """Read an array of a base, or an array that is larger than memory, a small part at a time.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    check_sizes(checkpoint, [leaf])
    for box in _pieces(checkpoint, leaf, spec) if spec.size else ():
        plan = plan_read(checkpoint.tree, [(leaf, (box,))])
        buffer = allocate_for(checkpoint, leaf, ArraySpec(box.shape, spec.dtype))
        if not list(checkpoint.read(plan, [buffer])):
            raise incomplete_read(checkpoint, leaf)


def _pieces(checkpoint: Checkpoint, leaf: int, spec: ArraySpec) -> Sequence[Box]:
    """Return boxes that together cover an array. Each box has whole chunks, or few bytes.

    The first box has only the first element. Its read decodes one chunk, which may show that chunks do not have the
    size that the metadata states.
    """
    if checkpoint.derived is not None:
        return checkpoint.derived.pieces(leaf, _READ_BYTES)
    whole = Box.whole(spec.shape)
    rows = checkpoint.index.chunk_rows(checkpoint.tree.aliases.get(leaf, leaf)) or 1
    step = max(1, _READ_BYTES * spec.shape[0] // spec.nbytes // rows) * rows if spec.shape else 1
    # A few bytes of metadata may state any shape. Limit the number of reads, because elements may not be stored.
    bands = whole.bands(0, step) if spec.shape and spec.shape[0] <= step * _MAX_READS else [whole]
    return [Box((0,) * len(spec.shape), (1,) * len(spec.shape)), *bands]
