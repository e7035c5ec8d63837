"""Read the boxes of stored arrays that leaves need, and build the leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

from ckptcore.context import Context
from ckptcore.errors import CorruptCheckpointError, InsufficientMemoryError, PluginError, UnsupportedLeafError
from ckptcore.io.memory import allocate, free
from ckptcore.matching.options import Matched
from ckptcore.model.arrays import AbstractArray, ArraySpec, Box, HostArray, name_of_dtype
from ckptcore.model.metadata import ArrayRecord, ValueRecord
from ckptcore.model.transfer import ReadItem, ReadPlan
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint, naming_additional
from ckptcore.plugins import Plugins
from ckptcore.progress import ByteProgress
from ckptcore.protocols import LeafHandler
from ckptcore.runtime import runtime_of
from ckptcore.tree.flattening import PLACEHOLDER

_NO_PARTS: Final[Mapping[int, Sequence[Box]]] = {}

_MAX_GROWTH: Final = 1 << 16
"""Maximum ratio of array bytes to stored bytes. zstd compresses zeros by a factor of about 30,000."""


@dataclass(frozen=True, slots=True, eq=False)
class LeafRead:
    """One stored array that is read and built once, for one or more leaves.

    Attributes:
        leaf, record: its number in the stored tree, and its record.
        handler, abstract: the handler that builds it, and the requested abstract leaf.
        positions: for each leaf that is built, its position in the loaded value.
        boxes: the boxes to read.
        nbytes: the bytes to read.
        array: a 0-dimensional array that was built from a stored number; None for an array that is read.
    """

    leaf: int
    record: ArrayRecord
    handler: LeafHandler
    abstract: object
    positions: list[int]
    boxes: Sequence[Box]
    nbytes: int
    array: HostArray | None = None


def default_handlers(registry: Plugins) -> tuple[LeafHandler, LeafHandler]:
    """Return the handlers that build arrays and values if there is no abstract tree."""
    array, value = registry.dispatch(AbstractArray((), "bool")).leaf, registry.dispatch("").leaf
    if array is None or value is None:
        raise PluginError("no plugin builds NumPy arrays and values: the built-in plugin is missing")
    return array, value


def read_leaf(checkpoint: Checkpoint, leaf: int, context: Context) -> object:
    """Read and build a leaf as if there were no abstract tree."""
    array, value = default_handlers(runtime_of(context).registry)
    handler = array if isinstance(checkpoint.tree.leaves[leaf], ArrayRecord) else value
    reading = plan_leaf_reads(checkpoint, Matched([leaf], [handler], leaves=[None]))
    read_tree(reading, context)
    return reading.leaves[0]


def plan_leaf_reads(checkpoint: Checkpoint, matched: Matched, progress: ByteProgress | None = None) -> TreeRead:
    """Plan the boxes of arrays to read, and build values from the metadata. Reads no array.

    Args:
        checkpoint: the checkpoint.
        matched: the stored leaf for each leaf.
        progress: counts the bytes of arrays that are built.
    """
    tree, filled = checkpoint.tree, matched.filled
    leaves: list[object] = [PLACEHOLDER] * len(matched.numbers)
    leaf_reads: list[LeafRead] = []
    tied: dict[tuple[object, ...], LeafRead] = {}
    requested = zip(matched.numbers, matched.handlers, matched.leaves, strict=True)
    for position, (number, handler, abstract) in enumerate(requested):
        if handler is None:
            leaves[position] = matched.kept.get(position, PLACEHOLDER)
            continue
        if number is None:
            leaves[position] = abstract  # a requested None that is not stored
            continue
        record, array = tree.leaves[number], matched.arrays.get(position)
        boxes: Sequence[Box] = ()
        nbytes = 0
        try:
            if array is not None:
                record = ArrayRecord(ArraySpec((), name_of_dtype(array.dtype)))
                boxes = handler.wanted(abstract, record)
            elif isinstance(record, ValueRecord):
                leaves[position] = handler.build(abstract, record, ())
                continue
            else:
                boxes = handler.wanted(abstract, record)
                nbytes = sum([box.size for box in boxes]) * record.spec.numpy_dtype.itemsize
        except (CorruptCheckpointError, UnsupportedLeafError) as error:
            raise _naming_leaf(checkpoint, number, error) from error
        original = tree.aliases.get(number, number)
        leaf_read = LeafRead(original, record, handler, abstract, [position], boxes, nbytes, array)
        if tree.aliases:
            # Leaves that are tied in the checkpoint and in the request are built once, unless they differ in type, as a
            # parameter and its data do. In a target, only leaves that share memory are filled together.
            shared = None if abstract is None else handler.identity(abstract)
            if shared is None and abstract is not None:
                shared = id(abstract) if filled is None else position
            built_type = handler.built_type(abstract) if filled is None else None
            key = (original, id(handler), built_type, tuple(boxes), shared)
            if (same := tied.setdefault(key, leaf_read)) is not leaf_read:
                same.positions.append(position)
                continue
        leaf_reads.append(leaf_read)
    if matched.first is None:
        return TreeRead(checkpoint, leaf_reads, leaves, filled, progress)
    parts: tuple[list[LeafRead], list[LeafRead]] = ([], [])
    for leaf_read in leaf_reads:
        parts[matched.first.isdisjoint(leaf_read.positions)].append(leaf_read)
    first = TreeRead(checkpoint, parts[0], leaves, filled, progress)
    return TreeRead(checkpoint, parts[1], leaves, filled, progress, first)


@dataclass(frozen=True, slots=True)
class TreeRead:
    """The planned reads of a checkpoint, and their results.

    Attributes:
        checkpoint: the checkpoint.
        leaf_reads: the arrays to read.
        leaves: the leaves of the value; arrays are added as they are built.
        filled: for a target that is filled in place, True for each leaf that needs no replacement; None if the load
            builds a new value.
        progress: counts the bytes of arrays that are built.
        first: the plan for objects that may refuse their state; None: there are no such objects. It runs before this
            plan. Both plans share `leaves` and `filled`.
    """

    checkpoint: Checkpoint
    leaf_reads: Sequence[LeafRead]
    leaves: list[object]
    filled: list[bool] | None = None
    progress: ByteProgress | None = None
    first: TreeRead | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements that are read."""
        return sum([leaf_read.nbytes for leaf_read in self.leaf_reads])

    def buffers_of(self, leaf_read: LeafRead) -> list[HostArray]:
        """Return the memory for the boxes of an array; for an array that is not read, the array itself.

        Raises:
            InsufficientMemoryError, PluginError
        """
        if leaf_read.array is not None:
            return [leaf_read.array for _ in leaf_read.boxes]  # a 0-dimensional array has one box at most
        handler, abstract, record = leaf_read.handler, leaf_read.abstract, leaf_read.record
        buffers = []
        for box in leaf_read.boxes:
            buffer = None if self.filled is None else handler.destination(abstract, record, box)
            if buffer is None:
                spec = record.spec
                # Most boxes are whole arrays, by `Box.whole`.
                spec = spec if box is Box.whole(spec.shape) else ArraySpec(box.shape, spec.dtype)
                buffer = allocate_for(self.checkpoint, leaf_read.leaf, spec)
            elif not _fits(buffer, box, record):
                raise PluginError(
                    f"{type(handler).__name__}.destination returned {buffer.dtype}{buffer.shape} for {record.spec}: "
                    "expected contiguous writable memory with the dtype and shape of the box"
                )
            buffers.append(buffer)
        return buffers

    def finish_leaf(self, leaf_read: LeafRead, buffers: Sequence[HostArray]) -> None:
        """Build the leaf of an array that has been read, or fill it in place."""
        boxes = list(zip(leaf_read.boxes, buffers, strict=True))
        try:
            if self.filled is not None and leaf_read.handler.fill(leaf_read.abstract, leaf_read.record, boxes):
                for position in leaf_read.positions:
                    self.filled[position] = True
                built = leaf_read.abstract
            else:
                built = leaf_read.handler.build(leaf_read.abstract, leaf_read.record, boxes)
        except UnsupportedLeafError as error:
            raise _naming_leaf(self.checkpoint, leaf_read.leaf, error) from error
        for position in leaf_read.positions:
            self.leaves[position] = built
        if self.progress is not None:
            self.progress.complete(leaf_read.nbytes)


def read_tree(reading: TreeRead, context: Context) -> None:
    """Read and build all leaves in this process."""
    limit = context.memory.load_bytes
    for batch in [reading.leaf_reads] if limit is None else batches(reading.leaf_reads, limit):
        _read_batch(reading, batch)


def _naming_leaf(
    checkpoint: Checkpoint, leaf: int, error: CorruptCheckpointError | UnsupportedLeafError
) -> CorruptCheckpointError | UnsupportedLeafError:
    """Add the path of the leaf to an error of its handler."""
    return type(error)(f"{_name(checkpoint, leaf)}: {error}")


def batches(leaf_reads: Sequence[LeafRead], limit: int) -> Iterator[Sequence[LeafRead]]:
    """Divide reads into batches of at most `limit` bytes. A single larger array is a batch by itself."""
    batch: list[LeafRead] = []
    held = 0
    for leaf_read in leaf_reads:
        if batch and held + leaf_read.nbytes > limit:
            yield batch
            batch, held = [], 0
        batch.append(leaf_read)
        held += leaf_read.nbytes
    yield batch


def _read_batch(reading: TreeRead, leaf_reads: Sequence[LeafRead]) -> None:
    """Read arrays in this process, and build each once it is complete."""
    checkpoint = reading.checkpoint
    if reading.progress is not None and checkpoint.derived is None:  # derived arrays differ in size from stored ones
        checkpoint.store.progress = reading.progress.move
    parts: dict[int, list[Box]] = {}
    if len(checkpoint.store.objects) > 1:
        for leaf_read in leaf_reads:
            parts.setdefault(checkpoint.tree.aliases.get(leaf_read.leaf, leaf_read.leaf), []).extend(leaf_read.boxes)
    check_sizes(checkpoint, {leaf_read.leaf for leaf_read in leaf_reads}, parts)
    read: list[LeafRead] = []
    held: list[list[HostArray]] = []
    owners: list[int] = []
    for leaf_read in leaf_reads:
        buffers = reading.buffers_of(leaf_read)
        if leaf_read.array is not None or not buffers:
            reading.finish_leaf(leaf_read, buffers)
            continue
        owners.extend([len(read)] * len(buffers))
        read.append(leaf_read)
        held.append(buffers)
    missing = [len(buffers) for buffers in held]
    plan = ReadPlan(
        checkpoint.tree, tuple([ReadItem(leaf_read.leaf, box) for leaf_read in read for box in leaf_read.boxes])
    )
    for number in checkpoint.read(plan, [buffer for buffers in held for buffer in buffers]):
        owner = owners[number]
        missing[owner] -= 1
        if not missing[owner]:
            reading.finish_leaf(read[owner], held[owner])
            is_filled = reading.filled is not None and reading.filled[read[owner].positions[0]]
            if not is_filled and not read[owner].handler.keeps_memory(read[owner].abstract):
                for buffer in held[owner]:
                    free(buffer)
    for leaf_read, count in zip(read, missing, strict=True):
        if count > 0:
            raise incomplete_read(checkpoint, leaf_read.leaf)


def incomplete_read(checkpoint: Checkpoint, leaf: int) -> CorruptCheckpointError:
    """Return the error for a layout that did not read an array completely."""
    return CorruptCheckpointError(
        f"{_name(checkpoint, leaf)}: the layout {checkpoint.layout.name} did not read all of its elements"
    )


def allocate_for(checkpoint: Checkpoint, leaf: int, spec: ArraySpec) -> HostArray:
    """Allocate memory for an array of a checkpoint.

    Raises:
        InsufficientMemoryError
    """
    try:
        return allocate(spec)
    except MemoryError as error:
        raise InsufficientMemoryError(
            f"{_name(checkpoint, leaf)} of {checkpoint.location.display}: not enough memory for {spec}, "
            f"{spec.nbytes} bytes. If the array is really this large, load a part of it, or use a machine with more "
            "memory; otherwise the checkpoint is damaged"
        ) from error


def _fits(buffer: HostArray, box: Box, record: ArrayRecord) -> bool:
    whole = buffer.shape == box.shape and buffer.dtype == record.spec.numpy_dtype
    return whole and buffer.flags.c_contiguous and buffer.flags.writeable


def check_sizes(
    checkpoint: Checkpoint, wanted: Collection[int], parts: Mapping[int, Sequence[Box]] = _NO_PARTS
) -> None:
    """Check that arrays are stored completely, before memory is allocated: a hostile root may state any shape.

    Args:
        checkpoint: the checkpoint.
        wanted: numbers of leaves.
        parts: by array, the boxes for which memory is allocated, if these are not all. The storage is only asked for
            the sizes of objects with elements of them; for other objects, the root states the size. In a job whose
            processes read their own parts, each of them would otherwise ask for the objects of all.

    Raises:
        CorruptCheckpointError: an array is not stored completely. Names the first such array.
    """
    if checkpoint.derived is not None:
        for number, stored in checkpoint.derived.stored(sorted(wanted)).items():
            source = checkpoint.derived.sources[number]
            with naming_additional(source) if number else nullcontext():
                check_sizes(source, stored)
        return
    tree, index = checkpoint.tree, checkpoint.index
    originals = sorted({tree.aliases.get(leaf, leaf) for leaf in wanted})
    arrays = [leaf for leaf in originals if isinstance(tree.leaves[leaf], ArrayRecord)]
    index.check(arrays)
    if checkpoint.root is None:
        return  # its layout compared shapes with files
    held = sum([record.size for record in checkpoint.store.objects.values()])
    for leaf in sorted(wanted):
        record = checkpoint.tree.leaves[leaf]
        if isinstance(record, ArrayRecord) and record.spec.nbytes > _MAX_GROWTH * held:
            raise CorruptCheckpointError(
                f"{_name(checkpoint, leaf)} of {checkpoint.location.display} is recorded as {record.spec}, "
                f"{record.spec.nbytes} bytes, but all objects together have {held} bytes: the root is damaged. Load "
                "another checkpoint"
            )
    extents: list[tuple[int, str, int, int]] = []
    asked: dict[str, None] = {}
    for leaf in arrays:
        needed = _objects_of(checkpoint, leaf, parts[leaf]) if leaf in parts else None
        for key, start, stop in index.extents(leaf):
            if stop and key not in checkpoint.store.objects:  # fail early: hostile shapes may state millions of objects
                raise _truncated(checkpoint, leaf, key, stop, 0)
            extents.append((leaf, key, start, stop))
            if stop and (needed is None or key in needed):
                asked[key] = None
    # Use actual sizes, not those of the root: an object may be truncated, and a hostile root may state any size.
    sizes = checkpoint.store.size_limits(asked)
    if parts:
        sizes = {key: record.size for key, record in checkpoint.store.objects.items()} | sizes
    taken: dict[str, int] = {}
    for leaf, key, start, stop in extents:
        # Arrays do not share bytes, so the sum of their sizes is limited by the object as well.
        taken[key] = taken.get(key, 0) + stop - start
        if max(stop, taken[key]) > sizes.get(key, 0):
            raise _truncated(checkpoint, leaf, key, stop, sizes.get(key, 0))


def _objects_of(checkpoint: Checkpoint, leaf: int, boxes: Sequence[Box]) -> Collection[str] | None:
    """Return the objects with elements of boxes of an array; None if these are all, or if metadata do not state it."""
    record, index = checkpoint.tree.leaves[leaf], checkpoint.index
    assert isinstance(record, ArrayRecord)  # values have no boxes
    if leaf in index.stored_specs or sum([box.size for box in boxes]) >= Box.whole(record.spec.shape).size:
        return None
    objects: set[str] = set()
    for box in boxes:
        for chunk in index.boxes(leaf, box):
            if not chunk.is_exact:
                return None
            objects.add(chunk.key)
    return objects


def _name(checkpoint: Checkpoint, leaf: int) -> str:
    return format_path(checkpoint.tree.paths[leaf])


def _truncated(checkpoint: Checkpoint, leaf: int, key: str, stop: int, nbytes: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{_name(checkpoint, leaf)} would end at byte {stop} of {key}, which has {nbytes} bytes: the file "
        "is truncated. Restore it, or load another checkpoint",
        key=key, start=min(nbytes, stop), stop=stop,
    )  # fmt: skip
