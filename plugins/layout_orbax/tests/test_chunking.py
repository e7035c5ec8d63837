"""Shapes of write chunks for shards, their division into read chunks, and the bytes that another mesh reads."""

from __future__ import annotations

import itertools
from math import gcd, prod

import numpy as np
import pytest
from ckptcore_orbax.zarr.chunking import iter_chunks, read_chunk_shape, write_chunk_shape
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.model import ArraySpec, Box
from ckptcore.planning import cuts_of

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[ArraySpec, tuple[tuple[int, ...], ...] | None]:
    """Draw an array and its shard boundaries: at arbitrary positions, or at equal steps."""
    shape = draw(SHAPES)
    cuts: list[tuple[int, ...]] = []
    for extent in shape:
        if draw(st.booleans()):
            cuts.append(tuple(range(draw(st.integers(1, 40)), extent, draw(st.integers(1, 40)))))
        else:
            places = st.integers(1, max(1, extent - 1))
            cuts.append(tuple(sorted(draw(st.sets(places, max_size=4)))) if extent > 1 else ())
    return ArraySpec(shape, draw(st.sampled_from(["uint8", "float32"]))), tuple(cuts) if any(cuts) else None


@pytest.mark.parametrize(
    ("shape", "cuts", "size", "expected"),
    [
        ((), None, 1, ()),
        ((8, 0), None, 4, (8, 1)),
        ((8, 6), None, 4, (8, 6)),
        ((8, 6), ((2, 4, 6), ()), 4, (2, 6)),
        ((8, 6), ((2, 4, 6), (3,)), 8, (2, 3)),
        ((10,), ((3, 6, 9),), 4, (3,)),  # the last shard is shorter, as in torch
        ((10,), ((3, 5, 8),), 1, (3,)),
        ((10,), ((3, 5, 8),), 4, (1,)),
        ((10,), ((4, 6),), 2, (2,)),
        ((10,), ((2,),), 1, (8,)),
        ((10,), ((2,),), 2, (2,)),
    ],
)
def test_shapes_of_write_chunks(
    shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...] | None, size: int, expected: tuple[int, ...]
) -> None:
    assert write_chunk_shape(ArraySpec(shape, "float32"), cuts, size) == expected


@given(cut_arrays(), st.integers(2, 9))
def test_no_shard_boundary_is_inside_a_chunk(
    array: tuple[ArraySpec, tuple[tuple[int, ...], ...] | None], size: int
) -> None:
    spec, cuts = array
    chunk = write_chunk_shape(spec, cuts, size)
    assert len(chunk) == len(spec.shape) and all(extent >= 1 for extent in chunk)
    for boundaries, extent in zip(cuts or (), chunk, strict=False):
        assert all(boundary % extent == 0 for boundary in boundaries)


@given(cut_arrays(), st.integers(1, 4), st.integers(1, 5000))
def test_read_chunks_divide_write_chunks_to_the_requested_size(
    array: tuple[ArraySpec, tuple[tuple[int, ...], ...] | None], size: int, chunk_bytes: int
) -> None:
    spec, cuts = array
    whole = write_chunk_shape(spec, cuts, size)
    inner = read_chunk_shape(spec, whole, cuts, chunk_bytes)
    itemsize = spec.numpy_dtype.itemsize
    assert all(part >= 1 and extent % part == 0 for extent, part in zip(whole, inner, strict=True))
    assert prod(inner) * itemsize <= max(chunk_bytes, itemsize)
    if prod(whole) * itemsize <= chunk_bytes:
        assert inner == whole
    if all(extent & (extent - 1) == 0 for extent in whole) and inner != whole:
        assert 2 * prod(inner) > chunk_bytes // itemsize


@pytest.mark.parametrize(
    ("shape", "cuts", "chunk_bytes", "expected"),
    [
        # Divide along the axis with most shards.
        ((4096, 4096), (tuple(range(256, 4096, 256)), (1024, 2048, 3072)), 1 << 16, (16, 1024)),
        ((4096, 4096), ((1024, 2048, 3072), tuple(range(256, 4096, 256))), 1 << 16, (1024, 16)),
        # Divide that axis into 64 pieces, and then the next axis.
        ((4096, 4096), (tuple(range(256, 4096, 256)), (1024, 2048, 3072)), 1 << 12, (4, 256)),
        # Divide the leading axis if no axis is sharded, into any number of pieces.
        ((4096, 4096), None, 1 << 14, (1, 4096)),
        ((4096, 4096), None, 1 << 12, (1, 1024)),
        # Divide into 8 pieces instead of 7, although 7 pieces would be closer to the target.
        ((896, 16), None, 896 * 16 * 4 // 7, (112, 16)),
        # Divide into 3 pieces if no power of two is near the target.
        ((6, 100), None, 1000, (2, 100)),
        # Divide the next axis if an axis cannot be divided to a size near the target.
        ((7, 8), None, 128, (7, 4)),
        ((7, 11), None, 200, (1, 11)),
        # A chunk has at least one element.
        ((4, 4), None, 1, (1, 1)),
    ],
)
def test_shapes_of_read_chunks(
    shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...] | None, chunk_bytes: int, expected: tuple[int, ...]
) -> None:
    spec = ArraySpec(shape, "float32")
    assert read_chunk_shape(spec, write_chunk_shape(spec, cuts, 4), cuts, chunk_bytes) == expected


def test_extents_with_large_prime_factors_are_divided() -> None:
    spec = ArraySpec((2 * 1_000_003, 3), "uint8")
    assert read_chunk_shape(spec, spec.shape, None, 1_500_000 * 3) == (1_000_003, 3)
    assert read_chunk_shape(spec, spec.shape, None, 1000) == (2, 3)


@given(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.data())
def test_iter_chunks_yields_the_chunks_that_overlap_a_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    chunk = tuple(data.draw(st.integers(1, extent + 2)) for extent in shape)
    bounds = [sorted(data.draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))) for extent in shape]
    box = Box(tuple(bound[0] for bound in bounds), tuple(bound[1] for bound in bounds))
    owner = np.zeros(shape, np.int64)
    boxes: dict[tuple[int, ...], Box] = {}
    for index in itertools.product(*[range(-(-extent // size)) for extent, size in zip(shape, chunk, strict=True)]):
        start = tuple(number * size for number, size in zip(index, chunk, strict=True))
        boxes[index] = Box(start, tuple(begin + size for begin, size in zip(start, chunk, strict=True)))
        owner[boxes[index].slices] = len(boxes)
    numbers = np.unique(owner[box.slices])
    assert list(iter_chunks(chunk, box)) == [list(boxes.items())[number - 1] for number in numbers if number]


HIDDEN, FFN, HEADS, KEY_HEADS, HEAD, VOCABULARY = 512, 1792, 4, 1, 128, 16032
"""Sizes of Llama 3.1 8B (4096, 14336, 32 and 8 heads of 128, 128256), divided by eight."""

WEIGHTS = [
    ((VOCABULARY, HIDDEN), ("tp", "fsdp")),
    ((HIDDEN, HEADS * HEAD), ("fsdp", "tp")),
    ((HIDDEN, KEY_HEADS * HEAD), ("fsdp", "tp")),
    ((HEADS * HEAD, HIDDEN), ("tp", "fsdp")),
    ((HIDDEN, FFN), ("fsdp", "tp")),
    ((FFN, HIDDEN), ("tp", "fsdp")),
    ((HIDDEN, VOCABULARY), ("fsdp", "tp")),
]


def _boxes(shape: tuple[int, ...], axes: tuple[str, ...], mesh: dict[str, int]) -> list[Box]:
    """Return the shards of an array on a mesh, divided evenly as in JAX."""
    ranges = []
    for extent, axis in zip(shape, axes, strict=True):
        assert extent % mesh[axis] == 0
        step = extent // mesh[axis]
        ranges.append([(start, start + step) for start in range(0, extent, step)])
    return [
        Box(tuple(start for start, _ in spans), tuple(stop for _, stop in spans))
        for spans in itertools.product(*ranges)
    ]


def _read_amplification(old: dict[str, int], new: dict[str, int], pieces: int | None) -> float:
    """Return the number of elements that the new mesh reads, divided by the number that it needs."""
    read = needed = 0
    for shape, axes in WEIGHTS:
        spec = ArraySpec(shape, "bfloat16")
        cuts = cuts_of(shape, _boxes(shape, axes, old))
        chunk = write_chunk_shape(spec, cuts, 8)
        inner = chunk if pieces is None else read_chunk_shape(spec, chunk, cuts, prod(chunk) * 2 // pieces)
        for box in _boxes(shape, axes, new):
            read += sum(1 for _ in iter_chunks(inner, box)) * prod(inner)
            needed += box.size
    return read / needed


TRANSITIONS = [
    ({"fsdp": 16, "tp": 4}, {"fsdp": 64, "tp": 1}),
    ({"fsdp": 16, "tp": 4}, {"fsdp": 16, "tp": 1}),
    ({"fsdp": 8, "tp": 4}, {"fsdp": 128, "tp": 1}),
    ({"fsdp": 2, "tp": 1}, {"fsdp": 16, "tp": 1}),
]


@pytest.mark.parametrize("pieces", [16, 32, 64])
@pytest.mark.parametrize(("old", "new"), TRANSITIONS)
def test_another_mesh_reads_hardly_more_than_it_needs(old: dict[str, int], new: dict[str, int], pieces: int) -> None:
    assert _read_amplification(old, new, pieces) <= 1.1


def test_without_subdivision_another_mesh_reads_whole_shards() -> None:
    amplifications = [round(_read_amplification(old, new, None), 3) for old, new in TRANSITIONS]
    assert amplifications == [4.0, 1.0, 16.0, 8.0]


def test_chunk_extents_are_the_gcd_of_all_boundaries() -> None:
    assert write_chunk_shape(ArraySpec((100,), "int8"), ((12, 30, 54),), 4) == (gcd(12, 30, 54),)
