"""Indices of stored arrays. They equal NumPy's basic indexing, and other indices are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ckptcore.on_demand.indexing import index_box, rows_of


@st.composite
def indexed_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
    return shape, draw(arrays.basic_indices(shape, max_dims=6, allow_newaxis=True))


@settings(deadline=None)
@given(indexed_shapes())
def test_box_steps_and_local_index_give_the_result_of_numpy(drawn: tuple[tuple[int, ...], Any]) -> None:
    shape, index = drawn
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    indexed = index_box(index, shape)
    box, expected = indexed.box, array[index]
    assert all(0 <= start <= stop <= extent for start, stop, extent in zip(box.start, box.stop, shape, strict=True))
    wanted = array[box.slices][tuple([slice(None, None, step) for step in indexed.steps])]
    assert wanted.shape == indexed.counts
    np.testing.assert_array_equal(wanted[indexed.local], expected)
    assert indexed.shape == np.shape(expected)
    assert not indexed.is_plain or np.array_equal(wanted, expected)
    assert indexed.is_box == (wanted.size == box.size) or not wanted.size


@settings(deadline=None)
@given(indexed_shapes())
def test_the_rows_of_an_index_contain_all_selected_elements(drawn: tuple[tuple[int, ...], Any]) -> None:
    shape, index = drawn
    extent = shape[0] if shape else 0
    rows = rows_of(index, extent)
    if rows is None:
        return
    start, stop = rows
    assert 0 <= start < stop <= extent
    number_of_row = np.broadcast_to(np.arange(extent).reshape(-1, *[1] * (len(shape) - 1)), shape)
    assert np.all((start <= number_of_row[index]) & (number_of_row[index] < stop))


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(2, 5), (2, 5)),
        (slice(None), (0, 9)),
        (slice(-3, None, 2), (6, 9)),
        ((slice(4, 100), slice(0, 0)), (4, 9)),
        (3, (3, 4)),
        ((-1, 0), (8, 9)),
        (9, None),
        (-10, None),
        (slice(5, 2), None),
        (slice(5, 2, -1), None),
        ((), None),
        (..., None),
        ((None, 3), None),
        (True, None),
        ((3, True), None),
        ([3], None),
        ((3, [0]), None),
        (np.int64(3), None),
    ],
)
def test_only_integers_and_slices_have_rows(index: object, rows: tuple[int, int] | None) -> None:
    assert rows_of(index, 9) == rows


def test_integers_of_other_libraries_are_accepted() -> None:
    assert index_box((np.int64(-1), np.array(2)), (4, 5)).box.start == (3, 2)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (4, "out of bounds for axis 0 with size 4"),
        ((0, -6), "out of bounds for axis 1 with size 5"),
        ((0, 0, 0), "the array has 2 axes, but 3 were indexed"),
        ((..., ...), "single ellipsis"),
        ([0, 1], "not with a list"),
        (np.array([0, 1]), "not with a ndarray"),
        (True, "not with a bool"),
        (np.bool_(True), "not with a bool"),
        ("w", "not with a str"),
        (1.0, "not with a float"),
    ],
)
def test_other_than_basic_indices_are_refused(index: object, words: str) -> None:
    with pytest.raises(IndexError, match=words):
        index_box(index, (4, 5))


def test_a_step_of_zero_is_refused_as_numpy_does() -> None:
    with pytest.raises(ValueError, match="step cannot be zero"):
        index_box(slice(0, 2, 0), (4,))
