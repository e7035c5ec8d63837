"""Reading: the boxes of stored arrays that leaves need, and the leaves that are built from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.context import Context
from ckptcore.errors import CorruptCheckpointError, PluginError, UnsupportedLeafError
from ckptcore.io.memory import allocate
from ckptcore.loading.checkpoint import Checkpoint, naming_further
from ckptcore.loading.matching import Matched
from ckptcore.model.arrays import AbstractArray, ArraySpec, Box, HostArray, name_of_dtype
from ckptcore.model.metadata import ArrayRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import format_path
from ckptcore.planning import plan_read
from ckptcore.plugins import Plugins
from ckptcore.protocols import Executor, LeafHandler, WantedLeaf
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import PLACEHOLDER

__all__ = [
    "LeafRead",
    "Reading",
    "abstract_leaves",
    "allocate_for",
    "check_sizes",
    "perform",
    "plan_reading",
    "read_leaves",
    "unread",
]

_MOST_GROWTH: Final = 1 << 16
"""Largest ratio of the bytes of an array to those of all objects. zstd compresses zeros to a 30,000th."""


@dataclass(frozen=True, slots=True, eq=False)
class LeafRead:
    """One stored array that is read and built once, for one or more leaves.

    Attributes:
        leaf, record: its number in the stored tree, and its record.
        handler, abstract: the handler that builds it, and the leaf that is asked for.
        positions: the positions in the value of the leaves that get it.
        boxes: the boxes to read.
        nbytes: the bytes to read; for an array that workers read, the most bytes of one worker.
        array: the array without axes for a number that is stored in place of it; None for an array that is read.
        at_workers: True if the workers of this controller read and build it.
    """

    leaf: int
    record: ArrayRecord
    handler: LeafHandler
    abstract: object
    positions: list[int]
    boxes: Sequence[Box]
    nbytes: int
    array: HostArray | None = None
    at_workers: bool = False


def abstract_leaves(registry: Plugins) -> tuple[LeafHandler, LeafHandler]:
    """Return the handlers that build arrays and values if no abstract tree is given."""
    array, value = registry.dispatch(AbstractArray((), "bool")).leaf, registry.dispatch("").leaf
    if array is None or value is None:
        raise PluginError("no plugin builds NumPy arrays and values; the built-in plugin is missing")
    return array, value


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
        numbers: the stored leaves; None for a leaf that is not loaded and stays as its abstract leaf is.
        handlers, abstracts: for each, the handler that builds it, and the abstract leaf.
        context: its limit on memory is kept.
    """
    matched = Matched(numbers, handlers, leaves=abstracts)
    reading = plan_reading(opened, matched, runtime_of(context).workers())
    perform(reading, context)
    return reading.leaves


def plan_reading(opened: Checkpoint, matched: Matched, executor: Executor[Any, Any] | None) -> Reading:
    """Plan the boxes to read, and build the values, which need none. Reads nothing, and changes no target.

    Args:
        opened: the checkpoint.
        matched: the stored leaf for each leaf.
        executor: the workers of this controller, if there are any.
    """
    tree, filled = opened.tree, matched.filled
    leaves: list[object] = [PLACEHOLDER] * len(matched.numbers)
    units: list[LeafRead] = []
    tied: dict[tuple[object, ...], LeafRead] = {}
    asked = zip(matched.numbers, matched.handlers, matched.leaves, strict=True)
    for position, (number, handler, abstract) in enumerate(asked):
        if handler is None:
            continue
        if number is None:
            leaves[position] = abstract  # None is asked for, and nothing is stored
            continue
        record, array = tree.leaves[number], matched.arrays.get(position)
        maker: LeafHandler | Executor[Any, Any] = handler
        boxes: Sequence[Box] = ()
        nbytes = 0
        try:
            if array is not None:
                record = ArrayRecord(ArraySpec((), name_of_dtype(array.dtype)))
                boxes = handler.wanted(abstract, record)
            elif isinstance(record, ValueRecord):
                leaves[position] = handler.build(abstract, record, ())
                continue
            elif executor is not None and executor.makes(abstract):
                maker, nbytes = executor, executor.read_bytes(abstract, record)
            else:
                boxes = handler.wanted(abstract, record)
                nbytes = sum([box.size for box in boxes]) * record.spec.numpy_dtype.itemsize
        except UnsupportedLeafError as error:
            raise _naming_leaf(tree, number, error) from error
        original, at_workers = tree.aliases.get(number, number), maker is executor
        unit = LeafRead(original, record, handler, abstract, [position], boxes, nbytes, array, at_workers)
        if tree.aliases:
            # Leaves that were tied are built once and tied again; those of a target only if their memory is the same.
            memory = None if filled is None else maker.identity(abstract) or position
            key = (original, id(handler), tuple(boxes), _request(maker, abstract), memory)
            if (same := tied.setdefault(key, unit)) is not unit:
                same.positions.append(position)
                continue
        units.append(unit)
    return Reading(opened, units, leaves, filled)


def _request(maker: LeafHandler | Executor[Any, Any], abstract: object) -> object:
    """Return a key that is equal for two abstract leaves only if one leaf can be built for both, with its placement."""
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
    """The planned reads of a checkpoint, and their results.

    Attributes:
        opened: the checkpoint.
        units: the arrays to read.
        leaves: the leaves of the value; those of units are added as they are built.
        filled: for a target that is filled in place, True for each leaf that needs no replacement; None for a new
            value.
    """

    opened: Checkpoint
    units: Sequence[LeafRead]
    leaves: list[object]
    filled: list[bool] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements that are read."""
        return sum([unit.nbytes for unit in self.units])

    def buffers_of(self, unit: LeafRead) -> list[HostArray]:
        """Return the memory that the boxes of a unit are read into; for an array that is not read, the array itself.

        Raises:
            MemoryError, PluginError
            CorruptCheckpointError: if other software wrote the checkpoint, and an array does not fit in memory.
        """
        if unit.array is not None:
            return [unit.array for _ in unit.boxes]  # an array without axes has one box at most
        buffers = []
        for box in unit.boxes:
            buffer = None if self.filled is None else unit.handler.destination(unit.abstract, unit.record, box)
            if buffer is None:
                buffer = allocate_for(self.opened, unit.leaf, ArraySpec(box.shape, unit.record.spec.dtype))
            elif not _fits(buffer, box, unit.record):
                raise PluginError(
                    f"{type(unit.handler).__name__}.destination gave memory of {buffer.dtype}{buffer.shape} for "
                    f"{unit.record.spec}; it must be of the stored dtype, of the box's shape, contiguous and writable"
                )
            buffers.append(buffer)
        return buffers

    def place(self, unit: LeafRead, buffers: Sequence[HostArray]) -> None:
        """Build the leaf of a unit that has been read, or fill it in place."""
        boxes = list(zip(unit.boxes, buffers, strict=True))
        try:
            if self.filled is not None and unit.handler.fill(unit.abstract, unit.record, boxes):
                for position in unit.positions:
                    self.filled[position] = True
                built = unit.abstract
            else:
                built = unit.handler.build(unit.abstract, unit.record, boxes)
        except UnsupportedLeafError as error:
            raise _naming_leaf(self.opened.tree, unit.leaf, error) from error
        for position in unit.positions:
            self.leaves[position] = built


def perform(reading: Reading, context: Context) -> None:
    """Read and build all leaves."""
    limit = context.memory.load_bytes
    for batch in [reading.units] if limit is None else _batches(reading.units, limit):
        at_workers = [unit for unit in batch if unit.at_workers]
        _read(reading, [unit for unit in batch if not unit.at_workers] if at_workers else batch)
        if at_workers:
            _read_at_workers(reading, at_workers, context)


def _read_at_workers(reading: Reading, units: Sequence[LeafRead], context: Context) -> None:
    """Read and build the leaves of units at the workers of this controller."""
    executor = runtime_of(context).workers()
    assert executor is not None  # the units were planned with it
    check_sizes(reading.opened, {unit.leaf for unit in units})
    wanted = [WantedLeaf(unit.leaf, unit.abstract, unit.record) for unit in units]
    for unit, leaf in zip(units, executor.read(reading.opened, wanted, context), strict=True):
        for position in unit.positions:
            reading.leaves[position] = leaf


def _naming_leaf(tree: TreeMetadata, leaf: int, error: UnsupportedLeafError) -> UnsupportedLeafError:
    """Return the error of a handler with the path of its leaf."""
    return UnsupportedLeafError(f"{format_path(tree.paths[leaf])}: {error}")


def _batches(units: Sequence[LeafRead], limit: int) -> Iterator[Sequence[LeafRead]]:
    """Cut units into batches of at most `limit` bytes; a single larger unit is a batch of its own."""
    batch: list[LeafRead] = []
    held = 0
    for unit in units:
        if batch and held + unit.nbytes > limit:
            yield batch
            batch, held = [], 0
        batch.append(unit)
        held += unit.nbytes
    yield batch


def _read(reading: Reading, units: Sequence[LeafRead]) -> None:
    """Read units in this process, and place each once it is complete."""
    opened = reading.opened
    check_sizes(opened, {unit.leaf for unit in units})
    read: list[LeafRead] = []
    held: list[list[HostArray]] = []
    owners: list[int] = []
    for unit in units:
        buffers = reading.buffers_of(unit)
        if unit.array is not None or not buffers:
            reading.place(unit, buffers)
            continue
        owners.extend([len(read)] * len(buffers))
        read.append(unit)
        held.append(buffers)
    missing = [len(buffers) for buffers in held]
    plan = plan_read(opened.tree, [(unit.leaf, unit.boxes) for unit in read])
    for number in opened.read(plan, [buffer for buffers in held for buffer in buffers]):
        owner = owners[number]
        missing[owner] -= 1
        if not missing[owner]:
            reading.place(read[owner], held[owner])
    for unit, count in zip(read, missing, strict=True):
        if count > 0:
            raise unread(opened, unit.leaf)


def unread(opened: Checkpoint, leaf: int) -> CorruptCheckpointError:
    """Return the error for a layout that did not read an array completely."""
    return CorruptCheckpointError(
        f"the layout {opened.layout.name} did not read {format_path(opened.tree.paths[leaf])} whole"
    )


def allocate_for(opened: Checkpoint, leaf: int, spec: ArraySpec) -> HostArray:
    """Allocate memory for an array of a checkpoint.

    Raises:
        MemoryError: if ckptcore wrote the checkpoint: its shapes were compared with its objects.
        CorruptCheckpointError: if other software wrote it: a few hostile bytes may state any shape.
    """
    try:
        return allocate(spec)
    except MemoryError as error:
        if opened.root is not None:
            raise
        raise CorruptCheckpointError(
            f"{format_path(opened.tree.paths[leaf])} of {opened.location.display} is said to be {spec}, "
            f"{spec.nbytes} bytes, and there is no memory for that; if it is as large, load a part of it, or where "
            "there is more memory, and else the checkpoint is damaged"
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
        return  # its layout compared the shapes with its files
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
    # Real sizes, not those of the root: an object may be truncated, and a hostile root may state anything.
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
                f"{format_path(opened.tree.paths[leaf])} would end at byte {stop} of {key}, which has {sizes[key]} "
                "bytes",
                key=key, start=min(sizes[key], stop), stop=stop,
            )  # fmt: skip
