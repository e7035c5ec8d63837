"""Verifying a checkpoint: every block of every object read and checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.context import Context
from ckptcore.engine.reader import ObjectReader
from ckptcore.errors import CheckpointError, CorruptCheckpointError, StorageError
from ckptcore.loading import abstract_leaves, read_leaves
from ckptcore.locations import LocationLike
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.objects import BLOCK_BYTES, ObjectRecord
from ckptcore.opening import Opened, arrays_at, naming_arrays, while_unchanged

__all__ = ["Problem", "ProgressCallback", "VerifyReport", "verify_checkpoint"]

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

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
    """

    problems: tuple[Problem, ...]
    objects: int
    nbytes: int
    unverified: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_checkpoint(location: LocationLike, context: Context, progress: ProgressCallback | None) -> VerifyReport:
    """Check the root, its parts and every block of every object.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
    """
    try:
        return while_unchanged(location, context, lambda opened: _verify(opened, context, progress))
    except CorruptCheckpointError as error:
        return VerifyReport((Problem(error.key, error.start, error.stop, (), str(error)),), 1, 0, ())


def _verify(opened: Opened, context: Context, progress: ProgressCallback | None) -> VerifyReport:
    if opened.root is None:
        return _read_foreign(opened, context, progress)
    check = _Check(opened, context, progress)
    pieces = [
        (record, first)
        for record in opened.objects.values()
        for first in range(0, max(record.blocks, 1), _PIECE_BLOCKS)
    ]
    for future in [context.io_threads.submit(check.worker(iter_shared)) for iter_shared in _shared(pieces)]:
        future.result()
    unverified = tuple(record.key for record in opened.objects.values() if record.size and not record.checksums)
    objects = len(opened.objects) + 1 + len(opened.root.parts)
    return VerifyReport(tuple(check.problems), objects, check.done, unverified)


def _shared(pieces: Sequence[tuple[ObjectRecord, int]]) -> Sequence[Sequence[tuple[ObjectRecord, int]]]:
    """Pieces dealt to as many workers as are worth their while."""
    workers = min(4, len(pieces))
    return [pieces[worker::workers] for worker in range(workers)]


class _Check:
    def __init__(self, opened: Opened, context: Context, progress: ProgressCallback | None) -> None:
        self._opened = opened
        self._store = ObjectReader(opened.location.store, opened.objects, context.io_threads, verify=True)
        self._progress = progress
        self._total = sum(record.size for record in opened.objects.values())
        self._lock = threading.Lock()
        self.problems: list[Problem] = []
        self.done = 0

    def worker(self, pieces: Sequence[tuple[ObjectRecord, int]]) -> Callable[[], None]:
        def run() -> None:
            for record, first in pieces:
                self._piece(record, first)

        return run

    def _piece(self, record: ObjectRecord, first: int) -> None:
        start, stop = first * BLOCK_BYTES, min((first + _PIECE_BLOCKS) * BLOCK_BYTES, record.size)
        try:
            if first == 0:
                self._check_size(record)
            self._read(record.key, start, stop)
        except (CheckpointError, OSError):
            # Something is wrong in the piece: find out which of its blocks.
            for block in range(start, max(stop, start + 1), BLOCK_BYTES):
                self._block(record, block, min(block + BLOCK_BYTES, record.size))
        with self._lock:
            self.done += stop - start
            if self._progress is not None:
                self._progress(self.done, self._total)

    def _check_size(self, record: ObjectRecord) -> None:
        found = self._opened.location.store.size(record.key)
        if found != record.size:
            self._add(
                CorruptCheckpointError(
                    f"{record.key} has {found} bytes, where {record.size} were written",
                    key=record.key, start=min(found, record.size), stop=max(found, record.size),
                )
            )  # fmt: skip

    def _block(self, record: ObjectRecord, start: int, stop: int) -> None:
        try:
            self._read(record.key, start, stop)
        except (CorruptCheckpointError, StorageError) as error:
            if not isinstance(error, CorruptCheckpointError):
                error = CorruptCheckpointError(str(error), key=record.key, start=start, stop=stop)
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


def _read_foreign(opened: Opened, context: Context, progress: ProgressCallback | None) -> VerifyReport:
    """Other software keeps no checksums: everything is read, array by array, and only that can be said."""
    array, _ = abstract_leaves(context.registry)
    problems: list[Problem] = []
    done = 0
    for number, record in enumerate(opened.tree.leaves):
        if not isinstance(record, ArrayRecord):
            continue
        try:
            with naming_arrays(opened):
                read_leaves(opened, [number], [array], [None], context)
        except CorruptCheckpointError as error:
            problems.append(Problem(error.key, error.start, error.stop, (), str(error)))
        done += record.spec.nbytes
        if progress is not None:
            progress(done, opened.tree.nbytes)
    keys = sorted({key for _, key, _, _ in opened.layout.extents(opened.tree, opened.state)})
    return VerifyReport(tuple(problems), len(keys), done, tuple(keys))
