"""The leaf handler: describes quantities, copies their elements to the host, and builds new ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import (
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    LeafRecord,
    Pending,
    Ready,
    Shard,
    StridedMemory,
    name_of_dtype,
)
from ckptcore.protocols import HostMemory, LeafHandler, Priority
from ckptcore_example.quantities import Quantity, QuantitySpec

__all__ = ["QuantityHandler"]


class QuantityHandler(LeafHandler):
    """Saves a quantity as an array, with its unit in the notes."""

    priority = Priority.EXACT

    # --- describe

    def describe(self, leaf: Quantity | QuantitySpec) -> LeafRecord:
        """Return the shape, dtype and notes that the checkpoint keeps."""
        spec = leaf if isinstance(leaf, QuantitySpec) else leaf.spec
        if spec.dtype.hasobject:
            raise UnsupportedLeafError("a quantity of Python objects cannot be stored: convert it to a numeric dtype")
        # The kind is that of any array, so that quantities load as arrays of other frameworks, and these as quantities.
        return ArrayRecord(ArraySpec(spec.shape, name_of_dtype(spec.dtype)), notes={"unit": spec.unit})

    def abstract(self, leaf: Quantity | QuantitySpec) -> QuantitySpec:
        """Return the leaf of an abstract tree that asks for such a quantity."""
        self.describe(leaf)  # refuses dtypes that cannot be stored
        return leaf if isinstance(leaf, QuantitySpec) else leaf.spec

    def identity(self, leaf: Quantity | QuantitySpec) -> Hashable | None:
        """Two quantities with the same array are stored once."""
        return id(leaf.values) if isinstance(leaf, Quantity) else None

    # --- save

    def shards(self, leaf: Quantity | QuantitySpec, rank: int, size: int) -> Sequence[Shard]:
        """Every process has the whole array; the replica of rank 0 is written."""
        if isinstance(leaf, QuantitySpec):
            raise UnsupportedLeafError("a QuantitySpec has no values to save: pass the Quantity")
        return (Shard(Box.whole(leaf.values.shape), replica=rank, replicas=size),)

    def copy_to_host(self, leaf: Quantity, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """For asynchronous saves: a copy, because the array may change."""
        return [memory.copy(part_of(leaf, box)) for box in boxes]

    def view_on_host(self, leaf: Quantity, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """For blocking saves: the array itself."""
        return [Ready(part_of(leaf, box)) for box in boxes]

    # --- load

    def wanted(self, abstract: Quantity | QuantitySpec, stored: ArrayRecord) -> Sequence[Box]:
        """Read the whole array. A sharded array would return the boxes of its devices."""
        return (Box.whole(stored.spec.shape),)

    def build(
        self, abstract: Quantity | QuantitySpec, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]
    ) -> object:
        """Return a new quantity. No one else uses the arrays, so they need no copy."""
        if not isinstance(stored, ArrayRecord):
            raise UnsupportedLeafError(f"expected an array for a Quantity, found a stored {stored.kind}")
        [(_, values)] = boxes
        return Quantity(values, str(stored.notes.get("unit", abstract.unit)))

    # --- load in place

    def destination(self, abstract: Quantity | QuantitySpec, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Return the memory of the target, if elements can be read directly into it."""
        if not isinstance(abstract, Quantity):
            return None
        values = abstract.values
        fits = values.shape == box.shape and values.dtype == stored.spec.numpy_dtype
        return values if fits and values.flags.c_contiguous and values.flags.writeable else None

    def fill(self, target: Quantity | QuantitySpec, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy elements into the target. Return False if it cannot be changed."""
        if not isinstance(target, Quantity) or not isinstance(stored, ArrayRecord) or not target.values.flags.writeable:
            return False
        for box, elements in boxes:
            part = part_of(target, box)
            if not np.shares_memory(part, elements):  # elements read into `destination` are in place already
                part[...] = elements
        target.unit = str(stored.notes.get("unit", target.unit))
        return True

    def memory_to_fill(self, target: Quantity | QuantitySpec) -> Sequence[StridedMemory] | None:
        """Return the memory that `fill` changes, so that overlapping targets are found; None if nothing changes."""
        if not isinstance(target, Quantity) or not target.values.flags.writeable:
            return None
        return [StridedMemory.of(target.values)]


def part_of(leaf: Quantity, box: Box) -> HostArray:
    """Return a view of the elements in a box."""
    return leaf.values[(*box.slices, ...)]
