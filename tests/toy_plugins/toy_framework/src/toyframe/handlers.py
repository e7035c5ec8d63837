"""Handlers that save and load grids and crates."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import (
    ArrayRecord,
    ArraySpec,
    Attribute,
    Box,
    HostArray,
    LeafRecord,
    Pending,
    Ready,
    Shard,
    StridedMemory,
    ValueRecord,
    dtype_from_name,
)
from ckptcore.protocols import ContainerHandler, Flattened, HostMemory, LeafHandler, Priority
from toyframe.grids import Crate, Grid, Sketch

DTYPES = {
    "truth": "bool",
    "tiny": "uint8",
    "short": "int16",
    "whole": "int32",
    "long": "int64",
    "real": "float32",
    "fine": "float64",
    "rough": "bfloat16",
}
"""The dtype in checkpoints of each sort of element."""


def cells_of(grid: Grid) -> HostArray:
    """Return the elements of a grid as an array that shares its memory."""
    return np.frombuffer(grid.cells, dtype_from_name(DTYPES[grid.sort])).reshape(grid.shape)


class GridHandler(LeafHandler):
    """The handler of grids, and of sketches that request them."""

    priority = Priority.FRAMEWORK

    def describe(self, leaf: Grid | Sketch) -> LeafRecord:
        return ArrayRecord(ArraySpec(leaf.shape, DTYPES[leaf.sort]))

    def abstract(self, leaf: Grid | Sketch) -> Sketch:
        return leaf if isinstance(leaf, Sketch) else Sketch(leaf.shape, leaf.sort)

    def identity(self, leaf: Any) -> Hashable | None:
        return id(leaf.cells) if isinstance(leaf, Grid) and leaf.cells else None

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        if isinstance(leaf, Sketch):
            raise UnsupportedLeafError("a Sketch has no cells to save; save the Grid")
        return (Shard(Box.whole(leaf.shape), rank, size),)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        return [memory.copy(part.result()) for part in self.view_on_host(leaf, boxes)]

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        whole = cells_of(leaf)
        return [Ready(np.asarray(whole[box.slices])) for box in boxes]

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        return (Box.whole(stored.spec.shape),)

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        if not isinstance(abstract, Grid) or abstract.shape != box.shape or DTYPES[abstract.sort] != stored.spec.dtype:
            return None
        return cells_of(abstract)

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        ((_, elements),) = self._only(stored, boxes)
        dtype = dtype_from_name(DTYPES[abstract.sort])
        if elements.dtype != dtype and elements.dtype.kind in "SUmMc":
            raise UnsupportedLeafError(
                f"{elements.dtype} cannot be made {dtype}, which is asked for; ask for another sort"
            )
        with np.errstate(all="ignore"):
            return Grid(tuple(stored.spec.shape), abstract.sort, bytearray(elements.astype(dtype).tobytes()))  # type: ignore[union-attr]  # `_only` has refused values

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        if not isinstance(target, Grid):
            return False
        whole = cells_of(target)
        for box, elements in self._only(stored, boxes):
            whole[box.slices] = elements
        return True

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        return [StridedMemory.of(cells_of(target))] if isinstance(target, Grid) else None

    def _only(self, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> Sequence[tuple[Box, HostArray]]:
        if isinstance(stored, ValueRecord):
            raise UnsupportedLeafError(f"a {stored.kind} was saved, and a grid is asked for; ask for what was saved")
        return boxes


class CrateHandler(ContainerHandler):
    """The handler of crates."""

    priority = Priority.FRAMEWORK

    def flatten(self, value: Crate) -> Flattened:
        keys = [Attribute(label) for label in value.contents]
        return Flattened("object", keys, list(value.contents.values()), "toyframe.grids.Crate")

    def unflatten(self, like: Crate, children: Sequence[object]) -> object:
        return Crate(**dict(zip(like.contents, children, strict=True)))
