"""Reading: what of a checkpoint is read for which leaves, and built of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from ckptcore.context import Context
from ckptcore.errors import CorruptCheckpointError, PluginError, UnsupportedLeafError
from ckptcore.io.memory import allocate
from ckptcore.loading.checkpoint import Checkpoint, naming_further
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import format_path
from ckptcore.planning import plan_read
from ckptcore.protocols import Executor, LeafHandler, WantedLeaf
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import PLACEHOLDER
from ckptcore.tree.scalars import are_interchangeable, array_of, value_of

__all__ = [
    "LeafRead",
    "Reading",
    "allocate_for",
    "check_sizes",
    "other_form",
    "perform",
    "plan_reading",
    "read_leaves",
    "unread",
]

_MOST_GROWTH: Final = 1 << 16
"""Largest ratio of the bytes of an array to those of all objects. zstd compresses zeros to a 30,000th."""


@dataclass(slots=True)
class LeafRead:
    """One stored array that is read and built once, for one or more leaves.

    Attributes:
        leaf: its number in the stored tree.
        handler, abstract: who builds it, and as what.
        positions: of the leaves that get it, in the value.
        boxes: the boxes it is read by.
        number: the array without axes, where a number is stored in its place and nothing is to be read.
        kind: the kind of number that is built of the array; None where an array is.
        buffers: the memory they are read into.
        waiting: how many boxes are still to come.
        worker_bytes: the most bytes that one worker of this controller reads of it; None if this process reads it.
    """

    leaf: int
    record: ArrayRecord
    handler: LeafHandler
    abstract: object
    positions: list[int]
    boxes: Sequence[Box]
    number: HostArray | None = None
    kind: str | None = None
    buffers: list[HostArray] = field(default_factory=list)
    waiting: int = 0
    worker_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are read for it."""
        if self.number is not None:
            return 0
        if self.worker_bytes is not None:
            return self.worker_bytes
        return sum(box.size for box in self.boxes) * self.record.spec.numpy_dtype.itemsize


def read_leaves(
    opened: Checkpoint,
    numbers: Sequence[int | None],
    handlers: Sequence[LeafHandler | None],
    abstracts: Sequence[object],
    context: Context,
) -> list[object]:
    """Read and build leaves.

    Args:
        opened: the checkpoint.
        numbers: of stored leaves; None for what is not loaded and stays as its abstract is.
        handlers, abstracts: for each, who builds it and as what.
        context: its bound on memory is kept.
    """
    reading = plan_reading(opened, numbers, handlers, abstracts, runtime_of(context).workers())
    perform(reading, context)
    return reading.leaves


def plan_reading(
    opened: Checkpoint,
    numbers: Sequence[int | None],
    handlers: Sequence[LeafHandler | None],
    abstracts: Sequence[object],
    executor: Executor[Any, Any] | None,
    *,
    filled: list[bool] | None = None,
) -> Reading:
    """What is to be read, with the leaves, of which values are there already. Reads nothing and changes nothing.

    Args:
        opened, numbers, handlers, abstracts: as for `read_leaves`.
        executor: the workers of this controller, if it has some.
        filled: where `abstracts` are a target to be filled in place, which of its leaves stay as they are.
    """
    tree = opened.tree
    leaves: list[object] = [PLACEHOLDER] * len(numbers)
    units: list[LeafRead] = []
    tied: dict[tuple[object, ...], LeafRead] = {}
    for position, (number, handler, abstract) in enumerate(zip(numbers, handlers, abstracts, strict=True)):
        if handler is None:
            continue
        if number is None:
            leaves[position] = abstract  # None is asked for, and nothing is stored
            continue
        record, array = tree.leaves[number], None
        asked = other_form(opened, number, handler, abstract)
        kind = asked.kind if isinstance(asked, ValueRecord) else None
        if isinstance(record, ValueRecord):
            if not isinstance(asked, ArrayRecord):
                with _naming(tree, number):
                    leaves[position] = handler.build(abstract, record, ())
                continue
            array = array_of(record, asked.spec)
            record = ArrayRecord(asked.spec)
        there = executor if executor is not None and array is None and executor.makes(abstract) else None
        maker = handler if there is None else there
        worker_bytes: int | None = None
        boxes: Sequence[Box] = ()
        with _naming(tree, number):
            if kind is not None:
                boxes = (Box.whole(record.spec.shape),)
            elif there is not None:
                worker_bytes = there.read_bytes(abstract, record)
            else:
                boxes = handler.wanted(abstract, record)
        original = tree.aliases.get(number, number)
        memory: object = None
        if filled is not None:
            memory = maker.identity(abstract) or position
        unit = LeafRead(original, record, handler, abstract, [position], boxes, array, kind, worker_bytes=worker_bytes)
        if not tree.aliases:
            units.append(unit)
            continue
        # Leaves that were tied are built once and tied again. What is filled in place is one only if its memory is.
        key = (original, id(handler), tuple(boxes), _request(maker, abstract), memory)
        if key in tied:
            tied[key].positions.append(position)
            continue
        tied[key] = unit
        units.append(unit)
    return Reading(opened, units, leaves, filled)


def other_form(opened: Checkpoint, number: int, handler: LeafHandler, abstract: object) -> LeafRecord | None:
    """What is asked for, where that is a number of Python and an array without axes is stored, or the other way round; else None.

    A checkpoint of ours tells one from the other: it was not matched if this differs.
    """
    stored = opened.tree.leaves[number]
    if opened.root is not None or abstract is None or (isinstance(stored, ArrayRecord) and stored.spec.shape):
        return None
    asked = handler.describe(abstract)
    return asked if are_interchangeable(asked, stored) else None


def _request(maker: LeafHandler | Executor[Any, Any], abstract: object) -> object:
    """Equal for two abstract leaves only if one leaf can be built for both: placement and all else included."""
    if abstract is None:
        return None
    identity = maker.identity(abstract)
    if identity is not None:
        return identity
    try:
        hash(abstract)
    except TypeError:
        return id(abstract)
    return (type(abstract), abstract)


@dataclass(frozen=True, slots=True)
class Reading:
    """What is to be read of a checkpoint, and where it goes.

    Attributes:
        opened: the checkpoint.
        units: what is read.
        leaves: of the value; those of units are put here as they are built.
        filled: where what can be filled in place is to be, and by leaf whether it was; None: all is built anew.
    """

    opened: Checkpoint
    units: Sequence[LeafRead]
    leaves: list[object]
    filled: list[bool] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of elements that are read into memory of this process."""
        return sum([unit.nbytes for unit in self.units])

    def take_memory(self, unit: LeafRead) -> None:
        """Give a unit the memory that it is read into.

        Raises:
            MemoryError, PluginError
            CorruptCheckpointError: if other software states an array for which there is no memory.
        """
        unit.waiting = 0
        if unit.number is not None:
            unit.buffers = [unit.number for _ in unit.boxes]  # an array without axes has one box at most
            return
        dtype = unit.record.spec.dtype
        unit.buffers = []
        for box in unit.boxes:
            buffer = None if self.filled is None else unit.handler.destination(unit.abstract, unit.record, box)
            if buffer is None:
                buffer = allocate_for(self.opened, unit.leaf, ArraySpec(box.shape, dtype))
            elif not _fits(buffer, box, unit.record):
                raise PluginError(
                    f"{type(unit.handler).__name__}.destination gave memory of {buffer.dtype}{buffer.shape} for "
                    f"{unit.record.spec}; it must be of the stored dtype, of the box's shape, contiguous and writable"
                )
            unit.buffers.append(buffer)
        unit.waiting = len(unit.boxes)

    def place(self, unit: LeafRead) -> None:
        """Make leaves of a unit that has been read, and let its memory go."""
        with _naming(self.opened.tree, unit.leaf):
            boxes = list(zip(unit.boxes, unit.buffers, strict=True))
            unit.buffers = []
            made = self._made(unit, boxes)
            for position in unit.positions:
                self.leaves[position] = made

    def _made(self, unit: LeafRead, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        if unit.kind is not None:
            ((_, array),) = boxes
            return unit.handler.build(unit.abstract, value_of(array, unit.kind), ())
        if self.filled is not None and unit.handler.fill(unit.abstract, unit.record, boxes):
            for position in unit.positions:
                self.filled[position] = True
            return unit.abstract
        return unit.handler.build(unit.abstract, unit.record, boxes)


def perform(reading: Reading, context: Context) -> None:
    """Read all that is to be read, and put it in its place."""
    for batch in _batches(reading.units, context.memory.load_bytes):
        at_workers = [unit for unit in batch if unit.worker_bytes is not None]
        for unit in _read(reading, [unit for unit in batch if unit.worker_bytes is None] if at_workers else batch):
            reading.place(unit)
        if at_workers:
            _read_at_workers(reading, at_workers, context)


def _read_at_workers(reading: Reading, units: Sequence[LeafRead], context: Context) -> None:
    """Let the workers of this controller read and make the leaves of units."""
    executor = runtime_of(context).workers()
    assert executor is not None  # the units were planned with it
    check_sizes(reading.opened, {unit.leaf for unit in units})
    wanted = [WantedLeaf(unit.leaf, unit.abstract, unit.record) for unit in units]
    for unit, leaf in zip(units, executor.read(reading.opened, wanted, context), strict=True):
        for position in unit.positions:
            reading.leaves[position] = leaf


class _naming:  # a context manager, written as a class because it is entered for every leaf
    """Lets a handler's refusal say which leaf it refuses."""

    __slots__ = ("_leaf", "_tree")

    def __init__(self, tree: TreeMetadata, leaf: int) -> None:
        self._tree = tree
        self._leaf = leaf

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UnsupportedLeafError):
            raise UnsupportedLeafError(f"{format_path(self._tree.paths[self._leaf])}: {error}") from error


def _batches(units: Sequence[LeafRead], limit: int | None) -> Iterator[Sequence[LeafRead]]:
    if limit is None:
        yield units
        return
    batch: list[LeafRead] = []
    held = 0
    for unit in units:
        if batch and held + unit.nbytes > limit:
            yield batch
            batch, held = [], 0
        batch.append(unit)
        held += unit.nbytes
    yield batch


def _read(reading: Reading, units: Sequence[LeafRead]) -> Iterator[LeafRead]:
    """Fill the memory of units; yields each as it is complete."""
    opened = reading.opened
    check_sizes(opened, {unit.leaf for unit in units})
    owners: list[LeafRead] = []
    for unit in units:
        reading.take_memory(unit)
        owners.extend([unit] * unit.waiting)
        if not unit.waiting:
            yield unit
    buffers = [buffer for unit in units if unit.number is None for buffer in unit.buffers]
    wanted = [(unit.leaf, unit.boxes) for unit in units if unit.number is None]
    for number in opened.read(plan_read(opened.tree, wanted), buffers):
        unit = owners[number]
        unit.waiting -= 1
        if unit.waiting == 0:
            yield unit
    late = [unit for unit in units if unit.waiting > 0]
    if late:
        raise unread(opened, late[0].leaf)


def unread(opened: Checkpoint, leaf: int) -> CorruptCheckpointError:
    """What to raise where a layout has ended before it gave all of an array."""
    return CorruptCheckpointError(
        f"the layout {opened.layout.name} did not read {format_path(opened.tree.paths[leaf])} whole"
    )


def allocate_for(opened: Checkpoint, leaf: int, spec: ArraySpec) -> HostArray:
    """Memory for what a checkpoint states.

    Raises:
        MemoryError: for what ckptcore saved, and has compared with its objects.
        CorruptCheckpointError: for what other software did: a few hostile bytes may state any shape.
    """
    try:
        return allocate(spec)
    except MemoryError as error:
        if opened.root is not None:
            raise
        raise CorruptCheckpointError(
            f"{format_path(opened.tree.paths[leaf])} of {opened.location.display} is said to be {spec}, {spec.nbytes} bytes, and there "
            "is no memory for that; if it is as large, load a part of it, or where there is more memory, and else the checkpoint "
            "is damaged"
        ) from error


def _fits(buffer: HostArray, box: Box, record: ArrayRecord) -> bool:
    whole = buffer.shape == box.shape and buffer.dtype == record.spec.numpy_dtype
    return whole and buffer.flags.c_contiguous and buffer.flags.writeable


def check_sizes(opened: Checkpoint, wanted: Collection[int]) -> None:
    """Refuse arrays that are not stored whole, before memory is allocated: a hostile root may state any shape.

    Args:
        opened: the checkpoint.
        wanted: numbers of leaves.

    Raises:
        CorruptCheckpointError: names the first such array.
    """
    if opened.derived is not None:
        for checkpoint, stored in opened.derived.stored(sorted(wanted)).items():
            with naming_further(opened.derived.sources[checkpoint]) if checkpoint else nullcontext():
                check_sizes(opened.derived.sources[checkpoint], stored)
        return
    tree, index = opened.tree, opened.index
    originals = sorted({tree.aliases.get(leaf, leaf) for leaf in wanted})
    arrays = [leaf for leaf in originals if isinstance(tree.leaves[leaf], ArrayRecord)]
    index.check(arrays)
    if opened.root is None:
        return  # its layout has looked at its files itself
    held = sum([record.size for record in opened.store.objects.values()])
    for leaf in sorted(wanted):
        record = opened.tree.leaves[leaf]
        if isinstance(record, ArrayRecord) and record.spec.nbytes > _MOST_GROWTH * held:
            raise CorruptCheckpointError(
                f"{format_path(opened.tree.paths[leaf])} of {opened.location.display} is said to be {record.spec}, "
                f"{record.spec.nbytes} bytes, but all objects together have {held} bytes; the root is damaged: load "
                "another checkpoint"
            )
    extents = [(leaf, *extent) for leaf in arrays for extent in index.extents(leaf)]
    # Not what the root states, or only a little of it: an object may be cut off, and a hostile root may state anything.
    keys = dict.fromkeys([key for _, key, _, _ in extents])
    sizes = {
        **dict.fromkeys(keys, 0),
        **opened.store.size_limits([key for key in keys if key in opened.store.objects]),
    }
    taken: dict[str, int] = {}
    for leaf, key, start, stop in extents:
        # No two arrays share bytes, so together they are no larger than the object either.
        taken[key] = taken.get(key, 0) + stop - start
        if max(stop, taken[key]) > sizes[key]:
            raise CorruptCheckpointError(
                f"{format_path(opened.tree.paths[leaf])} would end at byte {stop} of {key}, which has {sizes[key]} bytes",
                key=key, start=min(sizes[key], stop), stop=stop,
            )  # fmt: skip
