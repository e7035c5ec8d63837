"""Each transform has a description, and an inverse or an error."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ckptcore_transforms
import numpy as np
import pytest
from ckptcore_testing import assert_same_tree
from ckptcore_transforms import (
    Apply,
    Average,
    Cast,
    Default,
    Dequantize,
    DequantizeAsConfigured,
    DequantizeMxfp4,
    Drop,
    Fuse,
    IfPresent,
    MergeAxes,
    MergeLora,
    Pad,
    Refuse,
    Rename,
    RenameTable,
    Reshape,
    Scale,
    Slice,
    Split,
    SplitAxis,
    Stack,
    Transform,
    Transpose,
    TreeTransform,
    Unstack,
    describe,
    inverse,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptcore
from ckptcore.errors import TransformError

_numbers = itertools.count()


def _array(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).integers(0, 100, shape).astype(np.float32)


def _layers() -> dict[str, Any]:
    """Return arrays in one dict, named as other software names them."""
    named = {"embed.weight": _array(10, 4), "norm": _array(4)}
    for number in range(3):
        named[f"layers.{number}.q.weight"] = _array(4, 4) + number
        named[f"layers.{number}.q.bias"] = _array(4) + number
        named[f"layers.{number}.k.weight"] = _array(4, 4) - number
    return named


_ONE_WAY: list[Transform] = [
    Drop("a"),
    Default("a", 1),
    Cast("a", "int8"),
    Reshape("a", (1,)),
    Slice("a", 0, 1),
    Pad("a", 4),
    Scale("a", 3),
    Average(["x"]),
    MergeLora("a", "b", "c", 1.0),
    Apply("a", abs),
    Dequantize("a", "b", (1, 1)),
    DequantizeMxfp4("a", "b", "c"),
    DequantizeAsConfigured(),
    Rename("*", "{x}"),
    Rename("{a}.{b}", "{a}"),
    RenameTable({"a": "c", "b": "c"}),
]


@pytest.mark.parametrize("transform", _ONE_WAY)
def test_a_transform_without_an_inverse_raises_an_error(transform: Transform) -> None:
    for one_way in (transform, IfPresent(transform)):
        with pytest.raises(TransformError, match="has no inverse"):
            inverse([one_way])


_INVERTIBLE: list[Transform] = [
    Rename("layers.{i}.{rest...}", "layers/{i:d}/{rest}"),
    Rename("layers/{i:d}/{rest...}", "blocks.{i}/{rest}"),
    Rename("{name...}.weight", "{name}.kernel"),
    RenameTable({"embed.weight": "table", "norm": "embed.weight"}),
    Stack("layers.{i}.{rest...}", "stacked/{rest}"),
    Stack("layers.{i}.{rest...}", "stacked/{rest}", axis=1),
    Fuse(["layers.{i}.q.weight", "layers.{i}.k.weight"], "layers.{i}.qk.weight"),
    Fuse(["layers.{i}.q.weight", "layers.{i}.k.weight"], "layers.{i}.qk.weight", axis=-1),
    Split("embed.weight", ["low", "high"]),
    Split("embed.weight", ["low", "high"], sizes=[3, 7]),
    Transpose("embed.weight"),
    Transpose("{any...}.q.weight", (1, 0)),
    Reshape("embed.weight", (5, 2, -1), stored=(10, 4)),
    Pad("embed.weight", 16, stored=10),
    Cast("**weight", "float64", stored="float32"),
    Apply("norm", np.negative, undo=np.negative),
    Scale("norm", 0.5),
    SplitAxis("embed.weight", -1, (2, 2)),
    SplitAxis("layers.{i}.q.bias", 0, (2, -1)),
    MergeAxes("layers.{i}.q.weight", 0, (4, -1)),
    Unstack("layers.{i}.k.weight", "rows/{i}/{row}", -1),
    Refuse("**.inv_freq"),
    IfPresent(Transpose("lm_head.weight")),
]


def test_every_transform_has_a_distinct_description_and_a_case_here() -> None:
    kinds = {getattr(ckptcore_transforms, name) for name in ckptcore_transforms.__all__}
    listed = [*_INVERTIBLE, *_ONE_WAY]
    assert {type(transform) for transform in listed} == {kind for kind in kinds if hasattr(kind, "inverse")} - {
        TreeTransform
    }
    lines = describe(listed).splitlines()
    assert len(lines) == len(listed) == len(set(lines)), "two descriptions are equal"
    for line, transform in zip(lines, listed, strict=True):
        written = [value for value in _texts(transform) if value.isalpha()]
        assert all(value in line for value in written), "an argument is missing in the description"


def _texts(transform: Transform) -> list[str]:
    """Return the texts in a transform: patterns, paths and dtypes."""
    if isinstance(transform, IfPresent):
        return _texts(transform.transform)
    fields = [getattr(transform, field.name) for field in dataclasses.fields(transform)]  # type: ignore[arg-type]
    return [value for value in fields if isinstance(value, str)]


@settings(max_examples=60, deadline=None)
@given(picked=st.lists(st.sampled_from(_INVERTIBLE), min_size=1, max_size=5))
def test_inverses_restore_the_tree(picked: list[Transform]) -> None:
    state = _layers()
    location = f"memory://transforms/inverses-{next(_numbers)}"
    ckptcore.save(location, state)
    applied: list[Transform] = []
    for transform in picked:  # apply only the transforms that fit the tree
        try:
            ckptcore.metadata(location, transforms=[*applied, transform])
        except TransformError:
            continue
        applied.append(transform)
    made = ckptcore.load(location, transforms=applied)
    there = f"memory://transforms/inverses-{next(_numbers)}"
    ckptcore.save(there, made)
    back = ckptcore.load(there, transforms=inverse(applied))
    assert_same_tree({name: back[name] for name in state}, state)
    both = ckptcore.load(location, transforms=[*applied, *inverse(applied)])
    assert_same_tree({name: both[name] for name in state}, state)
    if any(isinstance(step, Pad) for step in applied):
        return  # the inverse of a padding is a slice, which has no inverse
    again = inverse(inverse(applied))
    assert_same_tree(ckptcore.load(location, transforms=again), made)
    assert inverse(inverse(again)) == again and len(describe(again).splitlines()) == len(applied)
