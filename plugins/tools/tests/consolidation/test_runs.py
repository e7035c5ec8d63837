"""Cutting of arrays into runs of elements."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from ckptcore_tools.copies.streaming import cut_flat_ranges
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.io.elements import flat_range
from ckptcore.model import ArraySpec, Box

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def elements_of(shape: tuple[int, ...], box: Box) -> list[int]:
    """Return the flat indices of the elements of a box, computed by NumPy."""
    elements: list[int] = np.arange(prod(shape)).reshape(shape)[box.slices].ravel().tolist()
    return elements


@given(SHAPES, st.lists(st.integers(-1, 9), max_size=4), st.integers(1, 200), st.integers(0, 200))
def test_runs_are_consecutive_and_cover_the_array(
    shape: tuple[int, ...], bands: list[int], most_bytes: int, band_bytes: int
) -> None:
    boxes = cut_flat_ranges(ArraySpec(shape, "int16"), bands, most_bytes=most_bytes, band_bytes=band_bytes)
    parts = [elements_of(shape, box) for box in boxes]
    assert [element for part in parts for element in part] == list(range(prod(shape)))
    assert len(boxes) == 1 or all(parts)
    for box, part in zip(boxes, parts, strict=True):
        assert flat_range(shape, box) == ((part[0], part[-1] + 1) if part else (0, 0))
        assert 2 * len(part) <= max(most_bytes, 2) or 2 * len(part) <= band_bytes


@given(SHAPES.filter(all), st.data())
def test_a_box_is_one_run_if_its_elements_are_consecutive(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    stop = tuple(data.draw(st.integers(low + 1, extent)) for low, extent in zip(start, shape, strict=True))
    elements = elements_of(shape, Box(start, stop))
    one_run = elements == list(range(elements[0], elements[-1] + 1))
    assert flat_range(shape, Box(start, stop)) == ((elements[0], elements[-1] + 1) if one_run else None)


def test_bands_within_the_limit_are_not_cut() -> None:
    spec = ArraySpec((100, 4), "uint8")
    boxes = cut_flat_ranges(spec, (10, 20, 30, 90), most_bytes=90, band_bytes=0)
    bounds = [(box.start[0], box.stop[0]) for box in boxes]
    assert bounds == [(0, 20), (20, 30), (30, 50), (50, 70), (70, 90), (90, 100)]


def test_band_bytes_keeps_larger_bands_whole() -> None:
    boxes = cut_flat_ranges(ArraySpec((100, 4), "uint8"), (10, 60), most_bytes=90, band_bytes=200)
    assert [(box.start[0], box.stop[0]) for box in boxes] == [(0, 10), (10, 60), (60, 100)]


def test_a_band_is_not_cut_into_halves() -> None:
    """If the whole band has one checksum, a reader of either half would read the whole band."""
    boxes = cut_flat_ranges(ArraySpec((100,), "uint8"), (), most_bytes=60, band_bytes=0)
    assert len(boxes) == 3 and max(box.size for box in boxes) < 50


@pytest.mark.parametrize("shape", [(1 << 60,), (1 << 30, 1 << 30)])
def test_the_number_of_runs_of_a_huge_array_is_limited(shape: tuple[int, ...]) -> None:
    assert len(cut_flat_ranges(ArraySpec(shape, "uint8"), (), most_bytes=1 << 20, band_bytes=0)) <= 3 << 16
