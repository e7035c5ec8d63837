"""Boxes of DTensors, compared with the shards that torch computes. No process group is needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from ckptcore_torch.placements import DTensorPlacement, divides_chunks, local_part, sharding_cuts
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import ArraySpec, Box
from ckptcore.planning import cuts_of, uncovered


def _by_torch(placed: DTensorPlacement, coordinate: Sequence[int]) -> torch.Tensor:
    """Return the local tensor that torch computes for a tensor whose elements are their own global indices."""
    local = torch.arange(torch.Size(placed.shape).numel()).reshape(placed.shape)
    for position, extent, placement in zip(coordinate, placed.mesh_shape, placed.placements, strict=True):
        if not isinstance(placement, Replicate):
            try:
                parts, _ = placement._split_tensor(local, extent, with_padding=False)  # type: ignore[attr-defined]
            except AssertionError:  # PyTorch 2.7 does not split uneven strided shards
                assume(False)
            local = parts[position]
    return local


@st.composite
def _placings(draw: st.DrawFn) -> DTensorPlacement:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axes = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda axis, factor: _StridedShard(axis, split_factor=factor), axes, st.integers(1, 4))
    any_placement = st.one_of(st.just(Replicate()), st.builds(Shard, axes), strided)
    placements: list[Placement] = [draw(any_placement) for _ in mesh_shape]
    return DTensorPlacement(shape, mesh_shape, tuple(placements))


@given(_placings())
def test_local_parts_equal_those_of_torch(placed: DTensorPlacement) -> None:
    whole = torch.arange(torch.Size(placed.shape).numel()).reshape(placed.shape)
    owned: list[Box] = []
    every: list[Box] = []
    for coordinate in itertools.product(*map(range, placed.mesh_shape)):
        expected = _by_torch(placed, coordinate)
        try:
            part = local_part(placed, coordinate)
        except UnsupportedLeafError:  # older versions of PyTorch split strided shards in another way
            assert not divides_chunks()
            return
        assert part.shape == tuple(expected.shape)
        assert bool(part.boxes) == bool(expected.numel())
        assert sum(box.size for box in part.boxes) == expected.numel()
        for box, slices in part.boxes.items():
            assert torch.equal(whole[box.slices], expected[slices])
        every.extend(part.boxes)
        if part.replica == 0:
            owned.extend(part.boxes)
        assert 0 <= part.replica < part.replicas
    assert uncovered(ArraySpec(placed.shape, "float32"), owned) is None
    assert sharding_cuts(placed) == cuts_of(placed.shape, every) or 0 in placed.shape


def test_a_strided_shard_that_is_split_again_is_one_box() -> None:
    """In FSDP2 with tensor parallelism, the second axis of the mesh divides the rows before the first axis does."""
    placed = DTensorPlacement((8, 8), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    boxes = {place: tuple(local_part(placed, place).boxes) for place in itertools.product(range(2), range(2))}
    rows = {(0, 0): 0, (0, 1): 4, (1, 0): 2, (1, 1): 6}
    assert boxes == {place: (Box((row, 0), (row + 2, 8)),) for place, row in rows.items()}


def test_a_strided_shard_alone_is_several_boxes() -> None:
    part = local_part(DTensorPlacement((8,), (2,), (_StridedShard(0, split_factor=2),)), (1,))
    assert part.boxes == {Box((2,), (4,)): (slice(0, 2),), Box((6,), (8,)): (slice(2, 4),)}


def test_replicas_are_numbered() -> None:
    placed = DTensorPlacement((4,), (2, 2, 3), (Replicate(), Shard(0), Replicate()))
    numbers = [local_part(placed, (first, 0, last)).replica for first in range(2) for last in range(3)]
    assert sorted(numbers) == list(range(6))
    assert local_part(placed, (0, 0, 0)).replicas == 6


def test_partial_sums_are_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"partial sums.*redistribute"):
        local_part(DTensorPlacement((4,), (2,), (Partial(),)), (0,))


def test_cuts_of_large_meshes_are_computed_quickly() -> None:
    """The cuts of one axis depend only on the mesh axes that shard it, not on all 64 x 64 processes."""
    cuts = sharding_cuts(DTensorPlacement((4096, 4096), (64, 64), (Shard(0), Shard(1))))
    assert cuts is not None and [len(axis) for axis in cuts] == [63, 63]
