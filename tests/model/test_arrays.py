"""Boxes, specs and names of dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model.arrays import AbstractArray, ArraySpec, Box, dtype_from_name, name_of_dtype

RANGES = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)
BOXES = st.lists(RANGES, min_size=2, max_size=2).map(
    lambda axes: Box(tuple(axis[0] for axis in axes), tuple(axis[1] for axis in axes))
)

NAMES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int2", "uint2", "int4", "uint4",
    "datetime64[ns]", "datetime64[25s]", "timedelta64[D]", "S7", "U3",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_has_one_name(name: str) -> None:
    assert name_of_dtype(dtype_from_name(name)) == name


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">U3", ">M8[ns]"])
def test_the_byte_order_is_not_in_the_name(dtype: str) -> None:
    name = name_of_dtype(np.dtype(dtype))
    assert dtype_from_name(name) == np.dtype(dtype).newbyteorder("=")


@pytest.mark.parametrize(
    "name",
    [
        "object",
        "O",
        "V8",
        "f4,i4",
        "S0",
        "U99999999",
        "float32\0",
        "datetime64[fortnight]",
        "",
        "longdouble",
        "S-1",
        "S٣",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedLeafError, match="dtype name"):
        dtype_from_name(name)


@pytest.mark.parametrize("dtype", ["O", "f4,i4", "V8", np.longdouble, "S0"])
def test_other_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(UnsupportedLeafError, match="cannot be stored"):
        name_of_dtype(np.dtype(dtype))  # type: ignore[call-overload]  # NumPy accepts other spellings of dtypes


@given(BOXES, BOXES)
def test_an_intersection_contains_the_elements_of_both_boxes(first: Box, second: Box) -> None:
    marks = np.zeros((6, 6), int)
    marks[first.slices] += 1
    marks[second.slices] += 1
    both = first.intersect(second)
    expected = int((marks == 2).sum())
    assert (0 if both is None else both.size) == expected
    if both is not None:
        assert (marks[both.slices] == 2).all()
        assert first.contains(both) and second.contains(both)
        part = np.arange(36).reshape(6, 6)[first.slices]
        assert (part[both.within(first)] == np.arange(36).reshape(6, 6)[both.slices]).all()


@given(BOXES, st.integers(0, 1), st.integers(1, 7))
def test_bands_in_order_make_up_the_box(box: Box, axis: int, step: int) -> None:
    bands = box.bands(axis, step)
    assert all(band.shape[axis] == step for band in bands[:-1])
    marks = np.arange(36).reshape(6, 6)
    joined = np.concatenate([marks[band.slices] for band in bands], axis) if bands else marks[:0]
    assert joined.tobytes() == marks[box.slices].tobytes()


def test_a_zero_dimensional_box_has_one_element() -> None:
    assert Box.whole(()).size == 1
    assert np.array(5)[Box.whole(()).slices] == 5


def test_specs_count_bytes() -> None:
    assert ArraySpec((3, 4), "bfloat16").nbytes == 24
    assert ArraySpec((0, 4), "float64").nbytes == 0
    assert str(ArraySpec((3, 4), "bfloat16")) == "bfloat16[3, 4]"


def test_abstract_arrays_accept_any_spelling_of_a_dtype() -> None:
    assert AbstractArray((2,), "bfloat16") == AbstractArray((2,), ml_dtypes.bfloat16)
    assert AbstractArray((np.int64(2),), np.float32).shape == (2,)  # type: ignore[arg-type]  # NumPy ints are accepted
