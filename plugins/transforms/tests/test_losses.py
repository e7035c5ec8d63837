"""Transforms do not lose data silently. Dropped data, overflow and ambiguous matches are errors."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing import assert_same_tree
from ckptcore_transforms import (
    Average,
    Default,
    Fuse,
    MergeAxes,
    MergeLora,
    Pad,
    Rename,
    Scale,
    SplitAxis,
    Stack,
    Transform,
    Unstack,
    inverse,
)

import ckptcore
from ckptcore.errors import TransformError

_numbers = itertools.count()
ONES = np.ones(2, np.float32)


def _save(state: Any) -> str:
    location = f"memory://transforms/losses-{next(_numbers)}"
    ckptcore.save(location, state)
    return location


def _load(state: Any, *transforms: Transform) -> Any:
    return ckptcore.load(_save(state), transforms=transforms)


@pytest.mark.parametrize(
    ("state", "transform", "message"),
    [
        ({"a": 1, "b": 2}, Rename("a", ""), "<root> would be both a leaf and a container of b"),
        ({"a": 1}, Default("", 3), "<root> would be both a leaf and a container of a"),
        ({"a": 1}, Default("a/b", 3), "memory://.*a would be both a leaf and a container of a/b"),
        ({f"{x}.{y}": ONES for x in "ab" for y in "qk"}, Fuse(["*.q", "*.k"], "qk"), r"a\.q.* and .*b\.q.* both match"),
        ({"w": ONES[:0]}, Unstack("w", "l.{i}"), "has 0 parts; expected 1"),
        ({"l.٠": ONES}, Stack("l.{i}", "l"), "expected a number"),
        (
            {
                "w": np.ones((2, 2), "f4"),
                **{f"{x}.w.{y}": np.ones(s, "f4") for x in "ab" for y, s in (("A", (1, 2)), ("B", (2, 1)))},
            },
            MergeLora("{n}", "*.{n}.B", "*.{n}.A", 1.0),
            r"a\.w\.B.* and .*b\.w\.B.* both belong to w",
        ),
        (
            {"w": np.ones((2, 2), "i1"), "w.A": np.ones((1, 2)), "w.B": np.ones((2, 1))},
            MergeLora("{n}", "{n}.B", "{n}.A", 0.3),
            r"w: cannot add fractions to the integers of int8\[2, 2\]",
        ),
    ],
)
def test_lost_or_ambiguous_data_is_an_error(state: Any, transform: Transform, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        _load(state, transform)


def test_an_empty_key_is_a_key() -> None:
    assert _load({"a": 1}, Rename("a", "b//c")) == {"b": {"": {"c": 1}}}
    assert _load({"a": {"": {"b": 1}, "c": 2}}, Rename("a/{rest...}", "d/{rest}")) == {"d": {"": {"b": 1}, "c": 2}}
    assert _load({"a": 5}, Rename("a", "")) == 5 and _load(5, Rename("", "a")) == {"a": 5}


def test_negative_axes_have_inverses() -> None:
    state = {"w": np.arange(6).reshape(2, 3)}
    for transform in (Unstack("w", "l.{i}", -1), SplitAxis("w", -1, (3, 1)), MergeAxes("w", -2, (2, 3))):
        assert_same_tree(_load(state, transform, *inverse([transform])), state)
    stacked = _load({f"l.{number}": np.arange(4.0).reshape(2, 2) for number in range(3)}, Stack("l.{i}", "l", -1))
    assert stacked["l"].shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("array", "transform", "message"),
    [
        (np.array([100], np.int8), Scale("w", 2), r"200 is out of range for int8 \(-128 to 127\)"),
        (np.array([1], np.uint8), Scale("w", -1), "-1 is out of range for uint8"),
        (np.array([60000], np.float16), Scale("w", 4), "240000.0 is out of range for float16"),
        (np.array([400], ml_dtypes.float8_e4m3fn), Scale("w", 4), "1536.0 is out of range for float8_e4m3fn"),
        (np.array([1e38], np.float32), Scale("w", 1e9), "is out of the range of float32, in which it is computed"),
        (np.zeros(2, np.float16), Pad("w", 3, value=1e10), "float16 cannot represent 10000000000"),
        (np.ones(2, ml_dtypes.float8_e8m0fnu), Pad("w", 3), "float8_e8m0fnu cannot represent 0"),
        (np.ones(2, ml_dtypes.float4_e2m1fn), Pad("w", 3, value=float("nan")), "cannot represent nan"),
        (np.ones(2, ml_dtypes.bfloat16), Pad("w", 3, value=257), "cannot represent 257"),
        (np.ones(2, np.bool_), Pad("w", 3, value=2), "bool cannot represent 2"),
        (np.ones(2, np.int32), Pad("w", 3, value=0.5), "float64 values are not cast to int32"),
    ],
)
def test_overflow_is_an_error(array: Any, transform: Transform, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        _load({"w": array}, transform)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["bool", "int4", "uint64", "bfloat16", "float8_e4m3fn", "complex64"])
def test_padding_with_zeros_gives_no_warning(dtype: str) -> None:
    array = np.ones(2, ckptcore.AbstractArray((), dtype).dtype)
    padded = _load({"w": array}, Pad("w", 3))["w"]
    assert padded.dtype == array.dtype and [complex(element) for element in padded] == [1, 1, 0]


def test_infinite_elements_stay_infinite() -> None:
    loaded = _load({"w": np.array([np.inf, np.nan, 2], np.float16)}, Scale("w", 2))["w"]
    assert [str(element) for element in loaded] == ["inf", "nan", "4.0"]


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        ({"w": ONES}, {"w": ONES, "v": ONES}, "has v, unlike the first checkpoint"),
        ({"w": ONES, "ids": np.ones(2, int)}, {"w": ONES}, "lacks ids, unlike the first checkpoint"),
        ({"w": ONES.astype("c8")}, {"w": ONES.astype("c8")}, r"w: complex64\[2\] is not an array of real numbers"),
        ({"w": (ONES * 60000).astype("f2")}, {"w": (ONES * -60000).astype("f2")}, "180000.0 is out of range"),
    ],
)
def test_an_average_of_different_trees_is_an_error(first: Any, other: Any, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        _load(first, Average([_save(other)], [2, -1]))
    with pytest.raises(TransformError, match="expected 2 weights"):
        _load(first, Average([_save(other)], [1, -1]))
