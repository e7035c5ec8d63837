"""Distances between arrays, and division of arrays into boxes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_tools.elements import SAME, Distance, Tolerance, boxes_within, distance
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.model import ArraySpec, Box, HostArray

EXACT = Tolerance()
NUMBERS = [
    np.dtype(name)
    for name in ("bool", "int8", "int64", "uint8", "uint64", "float16", "float32", "float64", "complex64", "complex128")
] + [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")]


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_one_element_that_differs(dtype: np.dtype[Any]) -> None:
    a = np.zeros((3, 5), dtype)
    b = a.copy()
    b[1, 2] = 1
    assert distance(a, a.copy(), EXACT) == SAME
    assert distance(a, b, EXACT) == Distance(1, 1.0)
    assert distance(b, a, EXACT) == Distance(1, 1.0)
    assert distance(a, b, Tolerance(absolute=1.0)) == SAME


def test_bits_are_compared_without_a_tolerance() -> None:
    zeros, negative = np.zeros(3), -np.zeros(3)
    assert distance(zeros, negative, EXACT) == Distance(3, 0.0)
    assert distance(zeros, negative, Tolerance(absolute=1e-300)) == SAME
    quiet = np.array([0x7FC00000], np.uint32).view(np.float32)
    payload = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert distance(quiet, payload, EXACT) == Distance(1, 0.0)
    assert distance(quiet, payload, Tolerance(absolute=1.0)) == SAME


def test_infinities_and_nan() -> None:
    a = np.array([np.inf, np.inf, 1.0])
    assert distance(a, np.array([np.inf, -np.inf, 1.0]), EXACT) == Distance(1, math.inf)
    apart = distance(a, np.array([np.inf, np.inf, np.nan]), Tolerance(absolute=5))
    assert apart.differing == 1
    assert apart.largest is not None
    assert math.isnan(apart.largest)


def test_integers_are_exact_where_float64_is_not() -> None:
    assert distance(np.array([2**63 - 1]), np.array([2**63 - 2]), EXACT) == Distance(1, 1.0)
    assert distance(np.array([-(2**63)]), np.array([2**63 - 1]), EXACT) == Distance(1, float(2**64 - 1))
    assert distance(np.array([0], np.uint64), np.array([2**64 - 1], np.uint64), EXACT) == Distance(1, float(2**64 - 1))


def test_dtypes_may_differ() -> None:
    assert distance(np.ones(4, ml_dtypes.bfloat16), np.ones(4), EXACT) == SAME
    assert distance(np.array([1, 2]), np.array([1.0, 2.5]), EXACT) == Distance(1, 0.5)
    assert distance(np.array([1]), np.array([2**63], np.uint64), EXACT).differing == 1
    assert distance(np.array(["a"]), np.array([1]), EXACT) == Distance(1, None)


def test_text_and_times_differ_without_a_number() -> None:
    assert distance(np.array(["ab", "cd"]), np.array(["ab", "ce"]), EXACT) == Distance(1, None)
    assert distance(np.array([b"ab"]), np.array([b"ab"]), EXACT) == SAME
    assert distance(np.array(["ab", "c"]), np.array(["ab", "cde"]), EXACT) == Distance(1, None)
    assert distance(np.array(["ab"], "U2"), np.array(["ab"], "U7"), EXACT) == SAME
    times = np.array(["2026-01-01", "NaT"], "datetime64[s]")
    assert distance(times, times + np.timedelta64(1, "s"), EXACT) == Distance(1, None)


def test_no_elements() -> None:
    assert distance(np.ones((0, 3)), np.ones((0, 3)), EXACT) == SAME
    assert distance(np.ones((0, 3)), np.ones((0, 3), np.int8), EXACT) == SAME


def test_more_than_one_step() -> None:
    a = np.zeros((1 << 20) + 3, np.int8)
    b = a.copy()
    b[[0, 1 << 20, -1]] = [1, 2, 3]
    assert distance(a, b, EXACT) == Distance(3, 3.0)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=20),
    st.lists(st.floats(width=32), min_size=20, max_size=20),
    st.floats(0, 10),
    st.floats(0, 1),
)
def test_tolerances_agree_with_isclose(left: list[float], right: list[float], absolute: float, relative: float) -> None:
    a = np.array(left, np.float32)
    b = np.array(right[: len(left)], np.float32)
    if absolute == 0 and relative == 0:
        expected: HostArray = a.view(np.uint32) == b.view(np.uint32)
    else:
        with np.errstate(all="ignore"):
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            expected = np.isclose(wide_a, wide_b, rtol=relative, atol=absolute, equal_nan=True)
    assert distance(a, b, Tolerance(absolute, relative)).differing == int((~expected).sum())


@given(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.sampled_from(["int8", "float32", "complex128"]),
    st.integers(1, 200),
)
def test_boxes_cover_an_array(shape: tuple[int, ...], dtype: str, max_bytes: int) -> None:
    spec = ArraySpec(shape, dtype)
    seen = np.zeros(shape, np.int64)
    order = np.arange(spec.size).reshape(shape)
    last = -1
    for box in boxes_within(spec, max_bytes):
        seen[box.slices] += 1
        assert box.size * spec.numpy_dtype.itemsize <= max(max_bytes, spec.numpy_dtype.itemsize)
        if box.size:
            assert order[box.slices].min() > last  # boxes are in C order, so that files are read from front to back
            last = int(order[box.slices].max())
    assert (seen == 1).all()


def test_the_worst_elements_and_the_norm() -> None:
    a = np.zeros((4, 300_000), np.float32)
    b = a.copy()
    b[1, 2], b[3, 299_999], b[0, 0] = -3.0, 4.0, 1.0
    measured = distance(a, b, EXACT)
    assert [(element.position, element.a, element.b, element.error) for element in measured.worst] == [
        ((3, 299_999), 0.0, 4.0, 4.0),
        ((1, 2), 0.0, -3.0, 3.0),
        ((0, 0), 0.0, 1.0, 1.0),
    ]
    assert measured.norm == math.sqrt(26)
    assert [element.position for element in measured.within(Box((5, 7), (9, 300_007))).worst] == [
        (8, 300_006),
        (6, 9),
        (5, 7),
    ]


def test_the_ten_worst_elements_with_nan_first() -> None:
    b = np.arange(50.0)
    b[7] = np.nan
    measured = distance(np.zeros(50), b, EXACT)
    assert [element.position for element in measured.worst] == [(7,), *((number,) for number in range(49, 40, -1))]
    assert math.isnan(measured.worst[0].error)
    assert math.isnan(measured.norm or 0.0)


def test_the_worst_element_of_a_scalar_and_of_complex_numbers() -> None:
    assert distance(np.array(1, np.int64), np.array(2, np.int64), EXACT).worst == (((), 1, 2, 1.0),)
    assert distance(np.array([1j]), np.array([3 + 1j]), EXACT).worst == (((0,), 1j, 3 + 1j, 3.0),)


def test_text_has_no_norm_and_no_worst_elements() -> None:
    measured = distance(np.array(["ab"]), np.array(["cd"]), EXACT)
    assert (measured.norm, measured.worst) == (None, ())
