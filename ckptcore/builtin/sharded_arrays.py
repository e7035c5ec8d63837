"""Sharded arrays without a framework: each process of a job holds some boxes of an array as NumPy arrays."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np

from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model.arrays import ArraySpec, Box, HostArray, Shard, StridedMemory, dtype_from_name, name_of_dtype
from ckptcore.model.metadata import ArrayRecord, LeafRecord, ValueRecord
from ckptcore.model.transfer import Pending, Ready
from ckptcore.protocols import HostBytes, HostMemory, LeafHandler, Priority
from ckptcore.records import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class ArrayShard:
    """A box of an array that this process holds, or requests.

    Attributes:
        box: its position in the array.
        elements: the elements of the box; None in a request.
        replica: the number of this replica of the box, from 0.
        replicas: the number of replicas in the job.
    """

    box: Box
    elements: HostArray | None = None
    replica: int = 0
    replicas: int = 1

    def with_elements(self, elements: HostArray | None) -> ArrayShard:
        """Return the same box and replica with other elements."""
        return ArrayShard(self.box, elements, self.replica, self.replicas)


@dataclass(frozen=True, slots=True, eq=False, init=False, weakref_slot=True)
class ShardedArray:
    """An array that is divided between the processes of a job. This process holds some of its boxes.

    In a save, every process passes the same shape and dtype, and the boxes of all processes make up the array. In a
    load, a process requests the boxes that it needs, which may differ from the saved boxes. The load returns a
    `ShardedArray` with their elements.

    Attributes:
        shape: the shape of the whole array, in elements.
        dtype: the dtype of the elements.
        shards: the boxes that this process holds. They do not overlap.
        cuts: for each axis, the inner boundaries at which shards of any process meet, in elements. Layouts that store a
            regular grid of chunks (zarr, OCDBT) need them. None if unknown.
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
            shape: the shape of the whole array.
            dtype: anything that `numpy.dtype` takes, or a name such as ``bfloat16``.
            shards: the boxes that this process holds.
            cuts: the boundaries at which shards meet.

        Raises:
            ValueError: a box or a cut is not within the array, shards overlap, elements do not fit their box, or a
                replica number is not below the number of replicas.
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
        """Return a sharded array with one box in this process.

        Args:
            elements: the elements of the box.
            start: the start of the box along each axis.
            shape: the shape of the whole array.
            replica, replicas: the number of this replica of the box, and the number of replicas.
            cuts: the boundaries at which shards meet.
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
                raise ValueError(
                    f"ShardedArray: the box {box} has the replica {shard.replica}; expected 0 to {shard.replicas - 1}"
                )
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
    """Handler of `ShardedArray`."""

    priority = Priority.EXACT

    def describe(self, leaf: ShardedArray) -> LeafRecord:
        """Return the shape, dtype and cuts of the whole array."""
        notes = {} if leaf.dtype.isnative else {"converted": "byte order"}
        return ArrayRecord(ArraySpec(leaf.shape, name_of_dtype(leaf.dtype)), cuts=leaf.cuts, notes=notes)

    def abstract(self, leaf: ShardedArray) -> object:
        """Return the same boxes, replicas and cuts without elements."""
        self.describe(leaf)  # refuses dtypes that cannot be stored
        if all(shard.elements is None for shard in leaf.shards):
            return leaf
        shards = [shard.with_elements(None) for shard in leaf.shards]
        return ShardedArray(leaf.shape, leaf.dtype, shards, cuts=leaf.cuts)

    def identity(self, leaf: ShardedArray) -> Hashable | None:
        """Return the memory address of every shard, and its box."""
        parts = []
        for shard in leaf.shards:
            elements = shard.elements
            if elements is None or not elements.size:
                return None
            parts.append((shard.box, elements.__array_interface__["data"][0], elements.strides))
        return (leaf.shape, leaf.dtype, tuple(parts)) if parts else None

    def shards(self, leaf: ShardedArray, rank: int, size: int) -> Sequence[Shard]:
        """Return the boxes of the array."""
        if any(shard.elements is None for shard in leaf.shards):
            raise UnsupportedLeafError("a ShardedArray without elements is a request for a load; it cannot be saved")
        return [Shard(shard.box, shard.replica, shard.replicas) for shard in leaf.shards]

    def shards_of(self, leaf: ShardedArray, process: int | None, rank: int, size: int) -> Sequence[Shard]:
        """Return the boxes of the array, even if they have no elements. An array has the boxes of one process only."""
        return [Shard(shard.box, shard.replica, shard.replicas) for shard in leaf.shards]

    def host_bytes(self, leaf: ShardedArray, boxes: Sequence[Box]) -> HostBytes:
        """Return zero for views, because elements are in host memory."""
        return HostBytes(0, sum([box.size for box in boxes]) * leaf.dtype.itemsize)

    def copy_to_host(
        self, leaf: ShardedArray, boxes: Sequence[Box], memory: HostMemory
    ) -> Sequence[Pending[HostArray]]:
        """Copy boxes, because the caller may change an array at any time."""
        return [memory.copy(_elements(leaf, box)) for box in boxes]

    def view_on_host(self, leaf: ShardedArray, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Return views."""
        return [Ready(_elements(leaf, box)) for box in boxes]

    def wanted(self, abstract: ShardedArray, stored: ArrayRecord) -> Sequence[Box]:
        """Return the boxes of the request."""
        return [shard.box for shard in abstract.shards]

    def destination(self, abstract: ShardedArray, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Return the elements of the shard if a read can fill them directly; None otherwise."""
        for shard in abstract.shards:
            elements = shard.elements
            if shard.box == box and elements is not None:
                fits = elements.flags.c_contiguous and elements.flags.writeable
                return elements if fits and elements.dtype == stored.spec.numpy_dtype else None
        return None

    def build(self, abstract: ShardedArray, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> ShardedArray:
        """Return the same boxes with elements."""
        if isinstance(stored, ValueRecord):
            raise PluginError("a ShardedArray cannot be built from a value")
        elements_of = dict(boxes)
        shards = [shard.with_elements(elements_of[shard.box]) for shard in abstract.shards]
        return ShardedArray(abstract.shape, stored.spec.numpy_dtype, shards, cuts=abstract.cuts)

    def fill(self, target: ShardedArray, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy into the elements; False if a shard has none, or is read-only."""
        parts = {shard.box: shard.elements for shard in target.shards}
        if isinstance(stored, ValueRecord) or any(part is None or not part.flags.writeable for part in parts.values()):
            return False
        for box, elements in boxes:
            part = parts[box]
            if part is not None and not np.may_share_memory(part, elements):
                np.copyto(part, elements, casting="equiv")
        return True

    def memory_to_fill(self, target: ShardedArray) -> Sequence[StridedMemory] | None:
        """Return the memory of the shards; None if a shard has no elements or is read-only."""
        memory = []
        for shard in target.shards:
            if shard.elements is None or not shard.elements.flags.writeable:
                return None
            memory.append(StridedMemory.of(shard.elements))
        return memory


HANDLER: Final = ShardedArrayHandler()
"""The handler that the plugin of the core returns."""


def _elements(leaf: ShardedArray, box: Box) -> HostArray:
    """Return the elements of a box within one of the shards."""
    for shard in leaf.shards:
        if shard.elements is not None and shard.box.contains(box):
            return shard.elements[box.within(shard.box)]
    raise PluginError(f"the box {box} is in no shard of a ShardedArray of shape {leaf.shape}")
