"""Verifying a checkpoint: every block of every object read and checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from ckptcore.builtin.files import FilesLayout
from ckptcore.commit.location import Place, Within
from ckptcore.commit.references import stored_leaves
from ckptcore.commit.root import ROOT_KEY
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.reader import ObjectReader
from ckptcore.io.requests import requests_of
from ckptcore.io.threads import run_each
from ckptcore.loading.checkpoint import (
    Checkpoint,
    CompositeCheckpoint,
    arrays_at,
    extents_of,
    file_pieces,
    naming_arrays,
)
from ckptcore.loading.opening import (
    ConsistentRead,
    is_deleted,
    open_checkpoint,
    open_either,
    open_member,
    open_tree,
    present_members,
)
from ckptcore.loading.reading import allocate_for, check_sizes, read_leaves, unread
from ckptcore.loading.stored_trees import abstract_leaves
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.objects import BLOCK_BYTES, ObjectRecord
from ckptcore.model.tree import format_path
from ckptcore.planning import plan_read
from ckptcore.runtime import runtime_of

__all__ = ["Problem", "ProgressCallback", "VerifyReport", "has_its_sizes", "verify_checkpoint"]

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_REFERRED_BYTES: Final = 1 << 24
"""Of an array in another checkpoint that is read at once."""

_PIECE_BLOCKS: Final = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a checkpoint.

    Attributes:
        key: the object (file).
        start, stop: the half-open range of its bytes, or None where it is the whole object.
        arrays: the paths of the arrays that have bytes there.
        message: what was expected and found.
    """

    key: str | None
    start: int | None
    stop: int | None
    arrays: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        problems: everything that is wrong, in no particular order.
        objects: how many objects were checked, the root and its parts included.
        nbytes: bytes checked.
        unverified: keys of objects of which no checksums are kept: they were only read.
        deleted: names of checkpointables that were saved and are not there: deleted since, or lost, which cannot be told apart.
            No problem, since the others are sound.
    """

    problems: tuple[Problem, ...]
    objects: int
    nbytes: int
    unverified: tuple[str, ...]
    deleted: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_checkpoint(location: Place, context: Context, progress: ProgressCallback | None) -> VerifyReport:
    """Check the root, its parts and every block of every object.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
    """

    def verify(found: Checkpoint | CompositeCheckpoint) -> VerifyReport:
        if isinstance(found, Checkpoint):
            return _verify(found, context, progress)
        return _verify_composite(found, location, context, progress)

    try:
        return ConsistentRead(location, context, open_either).retry_if_replaced(verify)
    except CorruptCheckpointError as error:
        return VerifyReport((Problem(error.key, error.start, error.stop, (), str(error)),), 1, 0, ())


def has_its_sizes(location: Place, context: Context) -> bool:
    """Whether every object of a checkpoint is there with the size that it was written with. Reads roots and no array.

    Raises:
        CheckpointError: if a root cannot be read.
    """

    def fits(found: Checkpoint | CompositeCheckpoint) -> bool:
        if isinstance(found, Checkpoint):
            return _sizes_fit(found)
        present = present_members(found)
        return present.keys() == found.members.keys() and all(
            _sizes_fit(_open_directory(found, name, directory, location, context))
            for name, directories in present.items()
            for directory in directories
        )

    return ConsistentRead(location, context, open_either).retry_if_replaced(fits)


def _open_directory(
    composite: CompositeCheckpoint, name: str, directory: str, location: Place, context: Context
) -> Checkpoint:
    """Open what stands in a directory of a composite; whether it belongs there is for the caller to see."""
    if composite.root is None:
        return open_member(composite, name, directory, location, context)
    return open_checkpoint(Within(location, directory), context)


def _sizes_fit(opened: Checkpoint) -> bool:
    try:
        present = opened.store.stored_sizes(opened.objects)
        bases = () if opened.derived is None else opened.derived.sources[1:]
        return all(present[key] == record.size for key, record in opened.objects.items()) and all(
            map(_sizes_fit, bases)
        )
    except ObjectNotFoundError:
        return False


def _verify_composite(
    composite: CompositeCheckpoint, location: Place, context: Context, progress: ProgressCallback | None
) -> VerifyReport:
    """Verify every checkpointable that is still there; keys begin with its directory."""
    problems: list[Problem] = []
    unverified: list[str] = []
    root = composite.root
    objects, done = 0 if root is None else 1 + len(root.parts), 0
    directories = []
    deleted = []
    present = present_members(composite)
    for name in composite.members:
        there = [directory for directory in present.get(name, ()) if not is_deleted(composite, directory)]
        directories.extend([(name, directory) for directory in there])
        if not there:
            deleted.append(name)
        processes = composite.members[name].processes or 1
        if there and len(there) < processes:
            message = f"{name!r} has a state for each of {processes} processes, and only {len(there)} are there"
            problems.append(Problem(name, None, None, (), message))
    opened: list[tuple[str, Checkpoint]] = []
    for name, directory in directories:
        try:
            opened.append((directory, _open_directory(composite, name, directory, location, context)))
        except CorruptCheckpointError as error:
            problems.append(_within(directory, Problem(error.key, error.start, error.stop, (), str(error))))
        except CheckpointError as error:
            key = directory if root is None else f"{directory}/{ROOT_KEY}"
            problems.append(Problem(key, None, None, (), str(error)))
    total = sum(_bytes_to_check(one) for _, one in opened)
    for directory, one in opened:
        before = done

        def moved(there: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + there, total)

        ours = one.root
        if root is not None and (ours is None or ours.role != "member" or ours.save_id != root.save_id):
            problems.append(
                Problem(f"{directory}/{ROOT_KEY}", None, None, (), f"{directory} was replaced by another save")
            )
        report = _verify(one, context, moved)
        problems.extend(_within(directory, problem) for problem in report.problems)
        unverified.extend(f"{directory}/{key}" for key in report.unverified)
        objects += report.objects
        done += report.nbytes
    return VerifyReport(tuple(problems), objects, done, tuple(unverified), tuple(deleted))


def _bytes_to_check(opened: Checkpoint) -> int:
    return sum(record.size for record in opened.objects.values()) or opened.tree.nbytes


def _within(directory: str, problem: Problem) -> Problem:
    arrays = tuple([f"{directory}: {array}" for array in problem.arrays])
    key = directory if problem.key is None else f"{directory}/{problem.key}"
    return replace(problem, key=key, arrays=arrays)


def _verify(opened: Checkpoint, context: Context, progress: ProgressCallback | None) -> VerifyReport:
    if opened.root is None:
        read = _read_foreign_files if opened.layout.name == FilesLayout.name else _read_foreign
        return read(opened, context, progress)
    check = _Check(opened, context, progress)
    parallelism = requests_of(opened.location.store).concurrency  # of small objects each is waited for
    run_each(runtime_of(context).io_threads, opened.objects.values(), check.size, parallelism=parallelism)
    run_each(runtime_of(context).io_threads, check.pieces(), check.piece, parallelism=parallelism)
    unverified = tuple(record.key for record in opened.objects.values() if record.size and not record.checksums)
    objects = len(opened.objects) + 1 + len(opened.root.parts)
    problems = list(check.problems)
    problems.extend(_find_unstored(opened, problems))
    referred = _read_referred(opened, opened.root.references.leaf, context, problems)
    return VerifyReport(tuple(problems), objects, check.done + referred, unverified)


def _find_unstored(opened: Checkpoint, known: Sequence[Problem]) -> Sequence[Problem]:
    """Find an array that is larger than its stored bytes. Returns nothing if other problems are known."""
    if known or opened.root is None:
        return ()
    arrays = [leaf for leaf in stored_leaves(opened.tree, opened.root.references) if leaf not in opened.tree.aliases]
    try:
        check_sizes(opened, arrays)
    except CheckpointError as error:
        return (Problem(ROOT_KEY, None, None, (), str(error)),)
    return ()


def _read_referred(opened: Checkpoint, leaves: Sequence[int], context: Context, problems: list[Problem]) -> int:
    """Read the arrays that are in other checkpoints, a piece after the other; their bytes. What those have beside is not looked at."""
    reading = context if context.io.verify else replace(context, io=replace(context.io, verify=True))
    checked = opened if reading is context else open_tree(opened.location, opened.mark, reading)
    done = 0
    for leaf in leaves:
        record = opened.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # references were checked
        try:
            _read_in_pieces(checked, leaf, record.spec)
        except CheckpointError as error:
            problems.append(Problem(None, None, None, (format_path(opened.tree.paths[leaf]),), str(error)))
        done += record.spec.nbytes
    return done


def _read_in_pieces(opened: Checkpoint, leaf: int, spec: ArraySpec) -> None:
    """Read an array, of which little is in memory at a time.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    check_sizes(opened, [leaf])
    assert opened.derived is not None  # it is in another checkpoint
    for box in opened.derived.pieces(leaf, _REFERRED_BYTES) if spec.size else ():
        plan = plan_read(opened.tree, [(leaf, (box,))])
        buffer = allocate_for(opened, leaf, ArraySpec(box.shape, spec.dtype))
        if not list(opened.read(plan, [buffer])):
            raise unread(opened, leaf)


class _Check:
    def __init__(self, opened: Checkpoint, context: Context, progress: ProgressCallback | None) -> None:
        self._opened = opened
        self._store = ObjectReader(opened.location.store, opened.objects, runtime_of(context).io_threads, verify=True)
        self._progress = progress
        self._total = sum(record.size for record in opened.objects.values())
        self._there: dict[str, int] = {}
        self._lock = threading.Lock()
        self.problems: list[Problem] = []
        self.done = 0

    def size(self, record: ObjectRecord) -> None:
        """Check the size of an object."""
        try:
            found = self._opened.location.store.size(record.key)
        except CheckpointError as error:
            self._add(CorruptCheckpointError(str(error), key=record.key, start=0, stop=record.size))
            return
        if found != record.size:
            self._add(
                CorruptCheckpointError(
                    f"{record.key} has {found} bytes, where {record.size} were written",
                    key=record.key, start=min(found, record.size), stop=max(found, record.size),
                )
            )  # fmt: skip
        # A block that is cut off is wrong already; and a hostile root may state any size.
        self._there[record.key] = record.size if found >= record.size else found // BLOCK_BYTES * BLOCK_BYTES

    def pieces(self) -> Sequence[tuple[str, int, int]]:
        """What is there of the objects, in pieces of a few blocks: the key, start and stop of each."""
        return [
            (key, start, min(start + _PIECE_BLOCKS * BLOCK_BYTES, there))
            for key, there in self._there.items()
            for start in range(0, there, _PIECE_BLOCKS * BLOCK_BYTES)
        ]

    def piece(self, piece: tuple[str, int, int]) -> None:
        """Check the blocks of a piece."""
        key, start, stop = piece
        try:
            self._read(key, start, stop)
        except (CheckpointError, OSError):
            # Something is wrong in the piece: find out which of its blocks.
            for block in range(start, stop, BLOCK_BYTES):
                self._block(key, block, min(block + BLOCK_BYTES, stop))
        with self._lock:
            self.done += stop - start
            if self._progress is not None:
                self._progress(self.done, self._total)

    def _block(self, key: str, start: int, stop: int) -> None:
        try:
            self._read(key, start, stop)
        except (CheckpointError, OSError) as error:
            if not isinstance(error, CorruptCheckpointError):
                error = CorruptCheckpointError(str(error), key=key, start=start, stop=stop)
            self._add(error)

    def _read(self, key: str, start: int, stop: int) -> None:
        data = self._store.get(key, start, stop)
        if len(data) != stop - start:
            raise CorruptCheckpointError(
                f"{key} ends at byte {start + len(data)}, where {stop} are expected",
                key=key, start=start + len(data), stop=stop,
            )  # fmt: skip

    def _add(self, error: CorruptCheckpointError) -> None:
        arrays = tuple(arrays_at(self._opened, error.key, error.start, error.stop))
        with self._lock:
            self.problems.append(Problem(error.key, error.start, error.stop, arrays, str(error)))


def _read_foreign(opened: Checkpoint, context: Context, progress: ProgressCallback | None) -> VerifyReport:
    """Other software keeps no checksums: everything is read, array by array, and only that can be said."""
    array, _ = abstract_leaves(runtime_of(context).registry)
    problems: list[Problem] = []
    done = 0
    for number, record in enumerate(opened.tree.leaves):
        if not isinstance(record, ArrayRecord):
            continue
        try:
            with naming_arrays(opened):
                read_leaves(opened, [number], [array], [None], context)
        except CorruptCheckpointError as error:
            arrays = tuple(arrays_at(opened, error.key, error.start, error.stop))
            problems.append(Problem(error.key, error.start, error.stop, arrays, str(error)))
        done += record.spec.nbytes
        if progress is not None:
            progress(done, opened.tree.nbytes)
    keys = sorted({key for _, key, _, _ in extents_of(opened)})
    return VerifyReport(tuple(problems), len(keys), done, tuple(keys))


def _read_foreign_files(opened: Checkpoint, context: Context, progress: ProgressCallback | None) -> VerifyReport:
    """Files that an object wrote through other software: they are read, and only that can be said."""
    problems: list[Problem] = []
    done, total = 0, _bytes_to_check(opened)
    for key, record in opened.objects.items():
        try:
            for piece in file_pieces(opened, record):
                done += len(piece)
                if progress is not None:
                    progress(done, total)
        except CheckpointError as error:
            problems.append(Problem(key, None, None, (), str(error)))
    return VerifyReport(tuple(problems), len(opened.objects), done, tuple(opened.objects))
