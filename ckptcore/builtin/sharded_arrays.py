"""Sharded arrays: NumPy arrays of which each process of a job holds a part, as it says itself."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model.arrays import ArraySpec, Box, HostArray, Shard, StridedMemory, dtype_from_name, name_of_dtype
from ckptcore.model.metadata import ArrayRecord, LeafRecord, ValueRecord
from ckptcore.model.transfer import Pending, Ready
from ckptcore.protocols import HostBytes, HostMemory, LeafHandler, Priority

__all__ = ["ArrayShard", "ShardedArray", "ShardedArrayHandler"]


@dataclass(frozen=True, slots=True, eq=False)
class ArrayShard:
    """A box of an array that this process holds, or asks for.

    Attributes:
        box: where it is in the array.
        elements: those of the box; None in what is asked for.
        replica: which of the equal copies of the box this one is; each has a number of its own, from 0 on.
        replicas: how many copies there are in the job.
    """

    box: Box
    elements: HostArray | None = None
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True, slots=True, eq=False, init=False)
class ShardedArray:
    """An array of which this process holds boxes, and others of the job hold the rest.

    In a save every process gives the same shape and dtype, and the different boxes of all make up the array. In a load
    a process asks for the boxes that it needs, whichever were saved; what is loaded is a `ShardedArray` with the
    elements of these.

    Attributes:
        shape: of the whole array, elements along each axis.
        dtype: of the elements.
        shards: what this process holds; their boxes do not overlap.
        cuts: per axis, the inner boundaries at which shards of any process meet, in elements. Layouts that store a
            regular grid of chunks (zarr, OCDBT) need them; None where nothing is known.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: tuple[ArrayShard, ...]
    cuts: tuple[tuple[int, ...], ...] | None

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        shards: Sequence[ArrayShard],
        *,
        cuts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Describe an array.

        Args:
            shape: of the whole array.
            dtype: anything that `numpy.dtype` takes, or a name such as ``bfloat16``.
            shards: what this process holds of it.
            cuts: where shards meet.

        Raises:
            ValueError: if a box is not within the array, shards overlap, or elements are not those of their box.
        """
        object.__setattr__(self, "shape", tuple(map(operator.index, shape)))
        object.__setattr__(self, "dtype", dtype_from_name(dtype) if isinstance(dtype, str) else np.dtype(dtype))
        object.__setattr__(self, "shards", tuple(shards))
        object.__setattr__(self, "cuts", None if cuts is None else tuple([tuple(sorted(axis)) for axis in cuts]))
        self._check()

    @classmethod
    def part(
        cls,
        elements: HostArray,
        start: Sequence[int],
        shape: Sequence[int],
        *,
        replica: int = 0,
        replicas: int = 1,
        cuts: Sequence[Sequence[int]] | None = None,
    ) -> ShardedArray:
        """An array of which this process holds one box.

        Args:
            elements: those of the box.
            start: where the box begins along each axis.
            shape: of the whole array.
            replica, replicas: which of the equal copies of the box this one is, and how many there are.
            cuts: where shards meet.
        """
        stop = tuple([first + extent for first, extent in zip(start, elements.shape, strict=True)])
        shard = ArrayShard(Box(tuple(start), stop), elements, replica, replicas)
        return cls(shape, elements.dtype, (shard,), cuts=cuts)

    def _check(self) -> None:
        whole = Box.whole(self.shape)
        for number, shard in enumerate(self.shards):
            box = shard.box
            if (
                len(box.start) != len(self.shape)
                or not whole.contains(box)
                or not box.contains(Box(box.start, box.start))
            ):
                raise ValueError(f"ShardedArray of shape {self.shape}: the box {box} is not within it")
            if shard.elements is not None and (shard.elements.shape, shard.elements.dtype) != (box.shape, self.dtype):
                raise ValueError(
                    f"ShardedArray of {self.dtype}: the box {box} has elements of {shard.elements.dtype} and the shape "
                    f"{shard.elements.shape}; expected {box.shape}"
                )
            if not 0 <= shard.replica < shard.replicas:
                raise ValueError(f"ShardedArray: {shard.replica} is none of {shard.replicas} replicas of the box {box}")
            for other in self.shards[:number]:
                if other.box.intersect(box) is not None:
                    raise ValueError(f"ShardedArray of shape {self.shape}: the boxes {other.box} and {box} overlap")
        if self.cuts is not None:
            inside = len(self.cuts) == len(self.shape) and all(
                0 < cut < extent for axis, extent in zip(self.cuts, self.shape, strict=True) for cut in axis
            )
            if not inside:
                raise ValueError(f"ShardedArray of shape {self.shape}: the cuts {self.cuts} are not within it")


class ShardedArrayHandler(LeafHandler):
    """`ShardedArray`."""

    priority = Priority.EXACT

    def describe(self, leaf: ShardedArray) -> LeafRecord:
        """Shape, dtype and cuts of the whole array."""
        notes = {} if leaf.dtype.isnative else {"converted": "byte order"}
        return ArrayRecord(ArraySpec(leaf.shape, name_of_dtype(leaf.dtype)), cuts=leaf.cuts, notes=notes)

    def abstract(self, leaf: ShardedArray) -> object:
        """The same boxes, replicas and cuts, without elements."""
        self.describe(leaf)  # refuses dtypes that cannot be stored
        if all(shard.elements is None for shard in leaf.shards):
            return leaf
        shards = [ArrayShard(shard.box, None, shard.replica, shard.replicas) for shard in leaf.shards]
        return ShardedArray(leaf.shape, leaf.dtype, shards, cuts=leaf.cuts)

    def identity(self, leaf: ShardedArray) -> Hashable | None:
        """The place in memory of every part, and where it is in the array."""
        parts = []
        for shard in leaf.shards:
            elements = shard.elements
            if elements is None or not elements.size:
                return None
            parts.append((shard.box, elements.__array_interface__["data"][0], elements.strides))
        return (leaf.shape, leaf.dtype, tuple(parts)) if parts else None

    def shards(self, leaf: ShardedArray, rank: int, size: int) -> Sequence[Shard]:
        """As the array says."""
        if any(shard.elements is None for shard in leaf.shards):
            raise UnsupportedLeafError("a ShardedArray without elements asks for some, and has none to save")
        return [Shard(shard.box, shard.replica, shard.replicas) for shard in leaf.shards]

    def shards_of(self, leaf: ShardedArray, process: int | None, rank: int, size: int) -> Sequence[Shard]:
        """As the array says, also without elements. It tells of one process: each gives one of its own."""
        return [Shard(shard.box, shard.replica, shard.replicas) for shard in leaf.shards]

    def host_bytes(self, leaf: ShardedArray, boxes: Sequence[Box]) -> HostBytes:
        """None for views: elements are in host memory, or would be."""
        return HostBytes(0, sum([box.size for box in boxes]) * leaf.dtype.itemsize)

    def copy_to_host(
        self, leaf: ShardedArray, boxes: Sequence[Box], memory: HostMemory
    ) -> Sequence[Pending[HostArray]]:
        """Copies: the caller may change an array at any time."""
        return [memory.copy(_elements(leaf, box)) for box in boxes]

    def view_on_host(self, leaf: ShardedArray, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Views."""
        return [Ready(_elements(leaf, box)) for box in boxes]

    def wanted(self, abstract: ShardedArray, stored: ArrayRecord) -> Sequence[Box]:
        """The boxes that it names."""
        return [shard.box for shard in abstract.shards]

    def destination(self, abstract: ShardedArray, stored: ArrayRecord, box: Box) -> HostArray | None:
        """The elements of the shard, where they lie as they are stored."""
        for shard in abstract.shards:
            elements = shard.elements
            if shard.box == box and elements is not None:
                fits = elements.flags.c_contiguous and elements.flags.writeable
                return elements if fits and elements.dtype == stored.spec.numpy_dtype else None
        return None

    def build(self, abstract: ShardedArray, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> ShardedArray:
        """The same boxes, with elements."""
        if isinstance(stored, ValueRecord):
            raise PluginError("a ShardedArray was to be built of a value")
        found = dict(boxes)
        shards = [ArrayShard(shard.box, found[shard.box], shard.replica, shard.replicas) for shard in abstract.shards]
        return ShardedArray(abstract.shape, stored.spec.numpy_dtype, shards, cuts=abstract.cuts)

    def fill(self, target: ShardedArray, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy into its elements; False where one has none, or cannot be written."""
        parts = {shard.box: shard.elements for shard in target.shards}
        if isinstance(stored, ValueRecord) or any(part is None or not part.flags.writeable for part in parts.values()):
            return False
        for box, elements in boxes:
            part = parts[box]
            if part is not None and not np.may_share_memory(part, elements):
                np.copyto(part, elements, casting="equiv")
        return True

    def memory_to_fill(self, target: ShardedArray) -> Sequence[StridedMemory] | None:
        """The memory of its shards; None if one has no elements or is read-only."""
        found = []
        for shard in target.shards:
            if shard.elements is None or not shard.elements.flags.writeable:
                return None
            found.append(StridedMemory.of(shard.elements))
        return found


def _elements(leaf: ShardedArray, box: Box) -> HostArray:
    """Those of a box within one of its shards."""
    for shard in leaf.shards:
        if shard.elements is not None and shard.box.contains(box):
            return shard.elements[box.within(shard.box)]
    raise PluginError(f"the box {box} is in no shard of a ShardedArray of shape {leaf.shape}")
