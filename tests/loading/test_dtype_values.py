"""Casts value by value. A cast is safe if the target dtype has every value; narrowing takes the nearest or refuses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ckptcore.derivations import Stored, narrow
from ckptcore.derivations.dtypes import has_all_values_of, is_narrowing
from ckptcore.model import ArraySpec, Box, HostArray, dtype_from_name

BITS = {
    "bool": 1, "int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4,
    "float6_e2m3fn": 6, "float6_e3m2fn": 6,
}  # fmt: skip
NUMBERS = [
    *BITS, "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
    "float64", "bfloat16",
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip
SMALL = [name for name in NUMBERS if dtype_from_name(name).itemsize <= 2]


def values_of(name: str) -> HostArray:
    """Return every value of a dtype of up to 16 bits, or some values of a wider dtype."""
    dtype = dtype_from_name(name)
    if dtype.itemsize > 2:
        largest = np.iinfo(dtype).max if dtype.kind in "iu" else np.finfo(dtype).max
        return np.array([0, 1, 3, 100, 300, 70000, largest], dtype)
    bits = BITS.get(name, 8 * dtype.itemsize)
    patterns = np.arange(1 << bits, dtype=np.uint8 if dtype.itemsize == 1 else np.uint16)
    if name.startswith("int") and bits < 8:
        return (patterns.astype(np.int8) - (1 << bits >> 1)).astype(dtype)
    return patterns.astype(np.bool_) if name == "bool" else patterns.view(dtype)


def as_float64(array: HostArray) -> HostArray:
    with np.errstate(all="ignore"):
        return array.astype(np.float64)


def loses_nothing(values: HostArray, dtype: np.dtype[Any]) -> bool:
    with np.errstate(all="ignore"):
        try:
            there = values.astype(dtype)
        except TypeError:  # a dtype of ml_dtypes; float32 has all of its values
            there = values.astype(np.float32).astype(dtype)
        before, after = as_float64(values), as_float64(there)
        same = (before == after) & (np.signbit(before) == np.signbit(after))
        return bool((same | (np.isnan(before) & np.isnan(after))).all())


@pytest.mark.parametrize("stored", SMALL)
def test_a_cast_is_safe_exactly_if_every_value_survives(stored: str) -> None:
    values = values_of(stored)
    for asked in NUMBERS:
        expected = loses_nothing(values, dtype_from_name(asked)) and (asked != "bool" or stored == "bool")
        assert has_all_values_of(asked, stored) == expected, asked


@pytest.mark.parametrize(
    ("asked", "stored", "expected"),
    [
        ("float64", "float32", True), ("float32", "float64", False), ("float64", "int32", True),
        ("float64", "int64", False),
        ("float64", "uint32", True), ("float32", "int32", False), ("int64", "uint32", True), ("int64", "uint64", False),
        ("uint64", "int64", False), ("int32", "float32", False), ("complex64", "float32", True),
        ("complex64", "float64", False),
        ("complex128", "complex64", True), ("complex64", "complex128", False), ("float32", "complex64", False),
        ("complex64", "complex64", True), ("U3", "U3", True), ("U4", "U3", False), ("int64", "datetime64[s]", False),
        ("datetime64[ns]", "datetime64[s]", False), ("bool", "int8", False), ("int32", "int64", False),
    ],
)  # fmt: skip
def test_casts_of_wider_dtypes(asked: str, stored: str, expected: bool) -> None:
    assert has_all_values_of(asked, stored) == expected
    assert not (expected and is_narrowing(asked, stored))


def narrowed(values: HostArray, stored: str, asked: str) -> HostArray | None:
    """Return the cast values, or None if the cast is refused."""
    out = np.empty(values.shape, dtype_from_name(asked))
    try:
        narrow(Stored(ArraySpec(values.shape, stored), 0), asked).make(Box.whole(values.shape), [values], out)
    except ValueError:
        return None
    return out


def check_narrowing(stored: str, asked: str, values: HostArray) -> None:
    """Assert that each value becomes the nearest one, or is refused if it is out of range."""
    there = as_float64(values_of(asked))
    finite = np.sort(there[np.isfinite(there)])
    for number in range(len(values)):
        before, made = float(values[number]), narrowed(values[number : number + 1], stored, asked)
        if made is None:
            beyond = not finite[0] <= before <= finite[-1] or (asked == "float8_e8m0fnu" and before <= 0)
            assert beyond, f"{before} was refused"  # NaN and the infinities also count as out of range
            continue
        after = float(made[0])
        if not np.isfinite(before):
            assert str(before) == str(after)
        else:
            assert np.isfinite(after) and abs(after - before) <= np.abs(finite - before).min() * (1 + 1e-12), before


PAIRS = [(stored, asked) for stored, asked in itertools.product(NUMBERS, SMALL) if is_narrowing(asked, stored)]


@pytest.mark.parametrize(("stored", "asked"), PAIRS[::11])
def test_a_narrowing_rounds_to_the_nearest(stored: str, asked: str) -> None:
    values = values_of(stored)
    check_narrowing(stored, asked, values[:: max(1, len(values) // 60)])


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "asked"), PAIRS)
def test_every_narrowing_rounds_to_the_nearest(stored: str, asked: str) -> None:
    values = values_of(stored)
    check_narrowing(stored, asked, values if len(values) <= 256 else values[::97])


@pytest.mark.parametrize("shape", [(), (3,), (1 << 20, 3), (2, 1 << 20)])
@pytest.mark.parametrize("wrong", [False, True])
def test_the_last_element_of_a_large_array_is_checked(shape: tuple[int, ...], wrong: bool) -> None:
    values = np.ones(shape, np.float32)
    values[(-1,) * len(shape)] = 1e6 if wrong else 0.1
    made = narrowed(values, "float32", "float16")
    assert made is None if wrong else np.array_equal(made, values.astype(np.float16))  # type: ignore[arg-type]  # an array
