"""Creating a transform with an invalid argument is an error that names the argument and the expected type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptcore
from ckptcore import transforms

t: Any = transforms  # without types, because users may pass wrong types


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: t.Rename(3, "a"), r"Rename\(pattern=3\): expected a str, or a compiled regular expr"),
        (lambda: t.Rename(re.compile(b"a"), "a"), r"Rename\(pattern=.*expected a str, or a compiled regular expr"),
        (lambda: t.Rename("a", None), r"Rename\(to=None\): expected a str"),
        (lambda: t.RenameTable([("a", "b")]), r"RenameTable\(.*expected a mapping of str"),
        (lambda: t.RenameTable({"a": 1}), r"RenameTable\(.*expected a mapping of str"),
        (lambda: t.Drop(["a"]), r"Drop\(pattern="),
        (lambda: t.Refuse(None), r"Refuse\(pattern=None\)"),
        (lambda: t.Default(("a",), 1), r"Default\(path=\('a',\)\): expected a str"),
        (lambda: t.Cast("a", "float33"), r"Cast\(dtype='float33'\): expected a dtype of NumPy or ml_dtypes, or its"),
        (lambda: t.Cast("a", None, "flaot"), r"Cast\(stored='flaot'\)"),
        (lambda: t.Transpose("a", 1), r"Transpose\(axes=1\): expected a list of integers"),
        (lambda: t.Transpose("a", (0.0, 1)), r"Transpose\(axes="),
        (lambda: t.Reshape("a", "23"), r"Reshape\(shape='23'\)"),
        (lambda: t.Reshape("a", (1, True)), r"Reshape\(shape="),
        (lambda: t.SplitAxis("a", 0, ()), r"SplitAxis\(sizes=\(\)\): expected a list of at least 1 integers"),
        (lambda: t.SplitAxis("a", None, (1,)), r"SplitAxis\(axis=None\): expected an integer"),
        (lambda: t.MergeAxes("a", 0, []), r"MergeAxes\(sizes=\[\]\)"),
        (lambda: t.Scale("a", "2"), r"Scale\(factor='2'\): expected a finite number"),
        (lambda: t.Scale("a", float("nan")), r"Scale\(factor=nan\): expected a finite number"),
        (lambda: t.Scale("a", 2, float("inf")), r"Scale\(undo=inf\)"),
        (lambda: t.Slice("a", None, 1), r"Slice\(start=None\): expected an integer"),
        (lambda: t.Slice("a", 0, 1.0), r"Slice\(stop=1.0\)"),
        (lambda: t.Pad("a", "5"), r"Pad\(size='5'\)"),
        (lambda: t.Apply("a", None), r"Apply\(function=None\): expected a function"),
        (lambda: t.Apply("a", abs, (2, 3)), r"Apply\(result=\(2, 3\)\): expected a function"),
        (lambda: t.Stack(re.compile("a"), "b"), r"Stack\(pattern=.*expected a str"),
        (lambda: t.Unstack("a", 3), r"Unstack\(to=3\)"),
        (lambda: t.Split("a", "xy"), r"Split\(to='xy'\): expected a nonempty list of str"),
        (lambda: t.Split("a", []), r"Split\(to=\[\]\)"),
        (lambda: t.Split("a", ["b"], sizes=3), r"Split\(sizes=3\)"),
        (lambda: t.Fuse("ab", "c"), r"Fuse\(patterns='ab'\)"),
        (lambda: t.Fuse([], "c"), r"Fuse\(patterns=\[\]\)"),
        (lambda: t.MergeLora("a", "b", "c", "x"), r"MergeLora\(scale='x'\)"),
        (lambda: t.Average("run/1"), r"Average\(others='run/1'\): expected locations in a list"),
        (lambda: t.Average([]), r"Average\(others=\[\]\)"),
        (lambda: t.Average(["a"], "12"), r"Average\(weights='12'\)"),
        (lambda: t.Dequantize(re.compile("a"), "b"), r"Dequantize\(pattern=.*expected a str"),
        (lambda: t.Dequantize("a", None), r"Dequantize\(scales=None\): expected a str"),
        (lambda: t.Dequantize("a", "b", 128), r"Dequantize\(block=128\): expected a list of at least 1 integers"),
        (lambda: t.Dequantize("a", "b", None, "flaot"), r"Dequantize\(dtype='flaot'\)"),
        (lambda: t.DequantizeMxfp4("a", "b", 3), r"DequantizeMxfp4\(to=3\): expected a str"),
        (lambda: t.DequantizeMxfp4("a", "b", "c", 8), r"DequantizeMxfp4\(dtype=8\)"),
        (lambda: t.DequantizeAsConfigured("bfloat17"), r"DequantizeAsConfigured\(dtype='bfloat17'\)"),
        (lambda: t.IfPresent(t.Drop), r"IfPresent\(.*expected a transform"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("given", [t.Drop("a"), "abc", [t.Drop], ["a"], 3])
def test_a_value_that_is_not_a_list_of_transforms_is_refused(given: Any) -> None:
    ckptcore.save("memory://transforms/arguments", {"a": 1}, overwrite="non-atomic")
    for use in (
        lambda: ckptcore.load("memory://transforms/arguments", transforms=given),
        lambda: ckptcore.load_into("memory://transforms/arguments", {"a": 1}, transforms=given),
        lambda: ckptcore.metadata("memory://transforms/arguments", transforms=given),
        lambda: ckptcore.copy(
            "memory://transforms/arguments", "memory://transforms/to", layout="safetensors", transforms=given
        ),
        lambda: t.describe(given),
        lambda: t.inverse(given),
    ):
        with pytest.raises(TypeError, match="expected a list of transforms|is not a transform"):
            use()


def test_dtypes_and_numbers_of_numpy_are_accepted() -> None:
    assert t.Cast("a", ml_dtypes.bfloat16).dtype == "bfloat16" and t.Cast("a", "int4", np.int8).stored == "int8"
    assert t.Slice("a", np.int64(0), np.int32(3)).stop == 3 and t.Scale("a", np.float32(2)).factor == 2


def test_elements_are_padded_with_any_value_of_their_dtype() -> None:
    for value in (float("-inf"), float("nan"), True):
        assert repr(t.Pad("a", 5, value=value).value) == repr(value)
    ckptcore.save("memory://transforms/pad", {"mask": np.zeros(2), "used": np.zeros(2, bool)}, overwrite="non-atomic")
    loaded = ckptcore.load(
        "memory://transforms/pad",
        transforms=[t.Pad("mask", 3, value=float("-inf")), t.Pad("used", 3, value=True)],
    )
    assert loaded["mask"].tolist() == [0, 0, float("-inf")] and loaded["used"].tolist() == [False, False, True]
