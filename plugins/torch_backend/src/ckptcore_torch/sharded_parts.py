"""`ShardedParts`: the inner tensors of a DTensor's local tensors, as parts of arrays over all processes.

An inner tensor is stored in one of four forms:

- as a DTensor with the placements of the whole tensor, if both have the same shape;
- as a grid of blocks, if each of its elements belongs to a block of the tensor and no shard boundary
  is inside a block. The grid is a DTensor with the same placements. It loads on every mesh whose shard
  boundaries are between blocks;
- as tiles, one for each shard, if a shard boundary is inside a block. Tiles load only on a mesh that
  divides the tensor in the same way;
- unchanged, if it is a single number or a table. Both are equal on all processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ckptcore.errors import UnsupportedLeafError
from ckptcore_torch.placements import DTensorPlacement, sharding_cuts
from ckptcore_torch.stored_parts import flat_shape

_TABLES: Final = ("qmap",)
"""Names of tables that are equal on all processes."""


class ShardedParts:
    """The division of a DTensor, which also determines how its inner tensors are stored.

    Attributes:
        leaf: the DTensor.
    """

    def __init__(self, leaf: Any) -> None:
        """Find the axes that its placements divide.

        Raises:
            UnsupportedLeafError: for partial sums and unknown placements.
        """
        self.leaf = leaf
        self._mesh = leaf.device_mesh
        self._shape: tuple[int, ...] = tuple(leaf.shape)
        self._local: tuple[int, ...] = tuple(leaf._local_tensor.shape)
        extents = tuple(self._mesh.shape)
        placed = DTensorPlacement(self._shape, extents, tuple(leaf.placements))
        self._cuts = sharding_cuts(placed) or ((),) * len(self._shape)
        self._placements: list[Placement] = [
            Replicate() if extent == 1 else placement
            for extent, placement in zip(extents, leaf.placements, strict=True)
        ]
        self._divided = {axis for axis, cuts in enumerate(self._cuts) if cuts}

    def stored(self, name: str, part: torch.Tensor, *, is_flat: bool) -> tuple[torch.Tensor, Sequence[int]]:
        """Return the stored form of an inner tensor, and the number of tiles along each sharding axis of the mesh.

        The numbers are empty if it is not stored as tiles.

        Args:
            name: name of the inner tensor.
            part: the inner tensor of this process.
            is_flat: True if each of its elements belongs to a run of elements of the whole tensor
                in row-major order.

        Raises:
            UnsupportedLeafError: if it must be stored as tiles, but the shards have different
                sizes.
        """
        if part.shape == self._local and not is_flat:
            return self._as_dtensor(part, self._shape), ()
        if (part.numel() == 1 and not is_flat) or name in _TABLES:
            return part, ()
        parts = self._flat(part) if is_flat else self._grid(tuple(part.shape))
        if parts is not None:
            shape, local = parts
            return self._as_dtensor(part.view(local), shape), ()
        return self._tiles(name, part)

    def _grid(self, part: tuple[int, ...]) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return the shapes of a grid with one element per block: of the whole grid, and of this process's part."""
        if len(part) != len(self._local) or 0 in part:
            return None
        shape = []
        for axis, (blocks, extent) in enumerate(zip(part, self._local, strict=True)):
            block = extent // blocks
            if axis not in self._divided:
                shape.append(blocks)
            elif block and block * blocks == extent and self._fits(axis, block):
                shape.append(self._shape[axis] // block)
            else:
                return None
        return shape, part

    def _flat(self, part: torch.Tensor) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return the shapes of a flat part: the shape over all processes, and the shape on this process."""
        block = math.prod(self._local) // part.numel()
        whole = flat_shape(self._shape, block)
        if whole is None:
            return None if self._divided else (part.shape, part.shape)
        if len(whole) == len(self._shape) and whole[:-1] == self._shape[:-1]:  # blocks within the last axis
            local = (*self._local[:-1], self._local[-1] // block)
            return (whole, local) if self._fits(len(whole) - 1, block) else None
        if self._divided - {0}:
            return None
        row = math.prod(self._shape[1:])
        if len(whole) == 2:
            return whole, (self._local[0], row // block)
        return (whole, tuple(part.shape)) if self._fits(0, block // row) else None

    def _fits(self, axis: int, block: int) -> bool:
        """Return True if the end of an axis and all cuts between shards are at block boundaries."""
        return not any(cut % block for cut in (*self._cuts[axis], self._shape[axis]))

    def _tiles(self, name: str, part: torch.Tensor) -> tuple[torch.Tensor, Sequence[int]]:
        for axis in self._divided:
            widths = {stop - start for start, stop in _ranges(self._cuts[axis], self._shape[axis])}
            if len(widths) > 1:
                raise UnsupportedLeafError(
                    f"its part {name!r} has blocks that the mesh cuts, and shards of different sizes: axis {axis} of "
                    f"{list(self._shape)} is divided at {list(self._cuts[axis])}. Choose a size that the mesh "
                    "divides evenly, or a block size that divides the shards"
                )
        tiled = [not isinstance(placement, Replicate) for placement in self._placements]
        tiles = [extent for extent, is_tiled in zip(self._mesh.shape, tiled, strict=True) if is_tiled]
        axes = iter(range(len(tiles)))
        placements: list[Placement] = [Shard(next(axes)) if is_tiled else Replicate() for is_tiled in tiled]
        made = _dtensor(part.view((1,) * len(tiles) + part.shape), self._mesh, placements, (*tiles, *part.shape))
        return made, tiles

    def _as_dtensor(self, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return _dtensor(part, self._mesh, self._placements, shape)


def around(like: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor like `like`, but with another local tensor of the same class."""
    names, context = like.__tensor_flatten__()
    inner = {**{name: getattr(like, name) for name in names}, "_local_tensor": local}
    made: torch.Tensor = DTensor.__tensor_unflatten__(  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        inner, context, like.size(), like.stride()
    )
    return made


def _ranges(cuts: Sequence[int], extent: int) -> Sequence[tuple[int, int]]:
    bounds = [0, *cuts, extent]
    return list(itertools.pairwise(bounds))


def _dtensor(local: torch.Tensor, mesh: Any, placements: Sequence[Placement], shape: Sequence[int]) -> torch.Tensor:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))
