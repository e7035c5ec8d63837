"""Transforms change loaded trees as documented, and raise errors if they do not fit a tree."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing import assert_same_tree
from ckptcore_testing.strategies import Point
from ckptcore_transforms import (
    Apply,
    Average,
    Cast,
    Default,
    Drop,
    Fuse,
    IfPresent,
    MergeLora,
    Pad,
    Refuse,
    Rename,
    RenameTable,
    Reshape,
    Slice,
    Split,
    Stack,
    Transform,
    Transpose,
    Unstack,
    describe,
    inverse,
)

import ckptcore
from ckptcore import AbstractArray
from ckptcore.errors import CorruptCheckpointError, TransformError, TreeMismatchError

_numbers = itertools.count()


def _array(*shape: int, dtype: str = "float32") -> Any:
    rng = np.random.default_rng(len(shape))
    return rng.integers(0, 100, shape).astype(dtype)


def _layers(count: int = 3) -> dict[str, Any]:
    """Return arrays in one dict, named as other software names them."""
    named = {"embed.weight": _array(10, 4)}
    for number in range(count):
        named[f"layers.{number}.q.weight"] = _array(4, 4) + number
        named[f"layers.{number}.q.bias"] = _array(4) + number
    return named


def _load(state: object, *transforms: Transform, abstract: Any = None) -> Any:
    location = f"memory://transforms/{next(_numbers)}"
    ckptcore.save(location, state)
    try:
        return ckptcore.load(location, abstract, transforms=transforms)
    finally:
        ckptcore.delete(location)


def test_leaves_are_renamed_by_the_fields_of_a_pattern() -> None:
    state = _layers(1)
    assert_same_tree(
        _load(
            state,
            Rename("layers.{i}.{name}.weight", "blocks/{i}/{name}/kernel"),
            Rename(re.compile(r"layers\.(?P<i>\d+)\.(?P<rest>.*)"), "blocks/{i}/{rest}"),
            Rename("embed.{rest...}", "tables/{rest}"),
        ),
        {
            "tables": {"weight": state["embed.weight"]},
            "blocks": {"0": {"q": {"kernel": state["layers.0.q.weight"]}, "q.bias": state["layers.0.q.bias"]}},
        },
    )


def test_unchanged_keys_keep_their_types_and_containers() -> None:
    state = {"model": [{"w": 1, "b": (2, {})}, {"w": 3, "b": (4, {})}], 7: {"a/b": 5}}
    assert _load(state, Rename("model/{rest...}", "params/{rest}"), Rename("7/{rest...}", "seven/{rest}")) == {
        "params": state["model"],
        "seven": {"a/b": 5},
    }
    assert _load([1, 2, 3], Rename("{i}", "{i}/x"), Rename("0/x", "0/y")) == [{"y": 1}, {"x": 2}, {"x": 3}]
    assert _load({"a": {"x": 1}}, Rename("a/x", "list/{{0}}")) == {"list": {"{0}": 1}}
    assert _load({"l.0": 1, "l.1": 2}, Rename("l.{i}", "l/{i:d}")) == {"l": [1, 2]}


def test_a_table_can_swap_two_names() -> None:
    assert _load({"a": 1, "b": 2, "c": 3}, RenameTable({"a": "b", "b": "a"})) == {"b": 1, "a": 2, "c": 3}


def test_tied_arrays_stay_tied() -> None:
    table = _array(5, 3)
    loaded = _load({"embed": table, "head": table}, Rename("head", "lm_head"), Cast("*", "float64"))
    assert loaded["embed"] is loaded["lm_head"]


def test_leaves_are_dropped_and_added() -> None:
    state: dict[str, Any] = {"params": {"w": _array(3)}, "opt": [{"mu": _array(3)}, {}], "step": 4}
    default = np.ones((2, 2), np.int8)
    loaded = _load(state, Drop("opt/**"), Default("step", 1), Default("params/b", default), Default("name", "run"))
    assert_same_tree(loaded, {"params": {"w": state["params"]["w"], "b": default}, "step": 4, "name": "run"})


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Cast("w", "bfloat16"), lambda w: w.astype(ml_dtypes.bfloat16)),
        (Transpose("w"), lambda w: w.swapaxes(-1, -2)),
        (Transpose("w", (2, 0, 1)), lambda w: w.transpose(2, 0, 1)),
        (Reshape("w", (6, -1), stored=(2, 3, -1)), lambda w: w.reshape(6, 4)),
        (Slice("w", 1, 3, axis=1), lambda w: w[:, 1:3]),
        (Pad("w", 6, axis=-1, value=2), lambda w: np.pad(w, ((0, 0), (0, 0), (0, 2)), constant_values=2)),
        (Apply("w", lambda w: w * 2), lambda w: w * 2),
        (
            Apply("w", lambda w: w.sum(0), lambda abstract: AbstractArray(abstract.shape[1:], abstract.dtype)),
            lambda w: w.sum(0),
        ),
    ],
)
def test_single_arrays_are_changed(transform: Transform, expected: Any) -> None:
    state = {"w": _array(2, 3, 4), "v": _array(2)}
    assert_same_tree(_load(state, transform), {"w": expected(state["w"]), "v": state["v"]})
    into = {"w": np.zeros_like(expected(state["w"])), "v": np.zeros_like(state["v"])}
    ckptcore.save(location := f"memory://transforms/{next(_numbers)}", state)
    ckptcore.load_into(location, into, transforms=[transform])
    assert_same_tree(into, {"w": expected(state["w"]), "v": state["v"]})
    abstract = ckptcore.metadata(location, transforms=[transform]).abstract
    assert_same_tree(ckptcore.load_async(location, abstract, transforms=[transform]).result(), into)


def test_layers_are_stacked_and_unstacked() -> None:
    state = _layers()
    to: list[Transform] = [
        Stack("layers.{i}.{rest...}", "layers/{rest}", axis=0),
        Rename("layers/q.{name}", "layers/q/{name}"),
    ]
    loaded = _load(state, *to)
    assert list(loaded) == ["embed.weight", "layers"]
    expected = np.stack([state[f"layers.{number}.q.weight"] for number in range(3)])
    assert_same_tree(loaded["layers"]["q"]["weight"], expected)
    assert_same_tree(_load(loaded, *inverse(to)), dict(sorted(state.items(), key=_order)))
    across = _load({f"a{number}": _array(2, 3) for number in range(11)}, Stack("a{i}", "a", axis=1))["a"]
    assert across.shape == (2, 11, 3)
    assert _load({"m": [_array(2), _array(2)]}, Stack("m/{i}", "m"), Unstack("m", "n/{i:d}"))["n"][1].shape == (2,)


def _order(item: tuple[str, Any]) -> tuple[int, str, str]:
    parts = item[0].split(".")
    return (0, "", "") if parts[0] == "embed" else (1, "1" if parts[-1] == "bias" else "0", parts[1])


def test_arrays_are_split_and_fused() -> None:
    state = {"b.qkv": _array(12, 4), "c.qkv": _array(12, 2)}
    to: list[Transform] = [Split("{block}.qkv", ["{block}/q", "{block}/k", "{block}/v"], sizes=[8, 2, 2])]
    loaded = _load(state, *to)
    assert_same_tree(loaded["b"]["k"], state["b.qkv"][8:10])
    assert_same_tree(_load(loaded, *inverse(to)), state)
    fused = _load({"up": _array(2, 3), "gate": _array(2, 3) + 1}, Fuse(["gate", "up"], "gate_up", axis=-1))
    assert_same_tree(fused["gate_up"], np.concatenate([_array(2, 3) + 1, _array(2, 3)], 1))


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    base = {f"model.layers.{i}.{name}.weight": _array(6, 5) for i, name in itertools.product(range(2), "qk")}
    adapter: dict[str, Any] = {}
    for number in range(2):
        adapter[f"base.model.layers.{number}.q.lora_A.weight"] = _array(2, 5) + number
        adapter[f"base.model.layers.{number}.q.lora_B.weight"] = _array(6, 2) - number
    ckptcore.save(tmp_path / "base", base)
    ckptcore.save(tmp_path / "adapter", adapter)
    merge = MergeLora(
        "{name...}.weight", "base.{name...}.lora_B.weight", "base.{name...}.lora_A.weight", 0.5, tmp_path / "adapter"
    )
    loaded = ckptcore.load(tmp_path / "base", transforms=[merge])
    delta = adapter["base.model.layers.1.q.lora_B.weight"] @ adapter["base.model.layers.1.q.lora_A.weight"]
    assert_same_tree(loaded["model.layers.1.q.weight"], base["model.layers.1.q.weight"] + np.float32(0.5) * delta)
    assert_same_tree(loaded["model.layers.1.k.weight"], base["model.layers.1.k.weight"])
    inside = {"w": _array(6, 5), "w.A": _array(2, 5), "w.B": _array(6, 2)}
    assert list(_load(inside, MergeLora("{name}", "{name}.B", "{name}.A", 1.0))) == ["w"]
    ckptcore.save(tmp_path / "adapter", {**adapter, "base.other.lora_A.weight": _array(1, 1)}, overwrite=True)
    with pytest.raises(TransformError, match=r"other.weight.* has only a down"):
        ckptcore.load(tmp_path / "base", transforms=[merge])


def test_checkpoints_are_averaged(tmp_path: Path) -> None:
    states = [{"w": _array(4, 4) * factor, "step": factor, "ids": np.arange(3) * factor} for factor in (1, 2, 6)]
    for number, state in enumerate(states):
        ckptcore.save(tmp_path / str(number), state)
    others = [tmp_path / "1", tmp_path / "2"]
    loaded = ckptcore.load(tmp_path / "0", transforms=[Average(others), Transpose("w")])
    assert_same_tree(loaded, {"w": (_array(4, 4) * np.float32(3)).T, "step": 1, "ids": np.arange(3)})
    weighted = ckptcore.load(tmp_path / "0", transforms=[Average(others, [2, 1, 1])])
    assert_same_tree(weighted["w"], _array(4, 4) * np.float32(2.5))
    ckptcore.save(tmp_path / "2", {**states[2], "w": _array(4)}, overwrite=True)
    with pytest.raises(TransformError, match=r"float32\[4\] at w; expected float32\[4, 4\]"):
        ckptcore.load(tmp_path / "0", transforms=[Average(others)])


def test_replacing_an_averaged_checkpoint_during_the_load_is_an_error(tmp_path: Path) -> None:
    for name in "ab":
        ckptcore.save(tmp_path / name, {"w": _array(4), "v": _array(4)})

    def replace(array: Any) -> Any:
        ckptcore.save(tmp_path / "b", {"w": _array(4), "v": _array(4)}, overwrite=True)
        return array

    with pytest.raises(CorruptCheckpointError, match="was replaced while its arrays were combined"):
        ckptcore.load(tmp_path / "a", transforms=[Average([tmp_path / "b"]), Apply("w", replace)])


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (Rename("embed.wieght", "x"), "'embed.wieght' matches nothing.*'embed.weight'"),
        (Rename("layers.{i}.q.weight", "w"), "two leaves would have the path w"),
        (Rename("embed.weight", "{name}"), "the unknown field 'name'"),
        (Rename("{", "x"), "an invalid field"),
        (Rename("layers.{i}.q.bias", "embed.weight/{i}"), "would be both a leaf and a container"),
        (Drop("opt/**"), "matches nothing"),
        (Cast("embed.weight", "S3"), "both dtypes must be numeric"),
        (Cast("embed.weight", "int8", stored="float16"), "expected the stored dtype float16, found float32"),
        (Cast("step", "int8"), "step is not an array of numbers but a int"),
        (Transpose("layers.0.q.bias"), "fewer than two axes"),
        (Reshape("embed.weight", (7, -1)), "cannot be reshaped"),
        (Reshape("embed.weight", (40,), stored=(4, 10)), "expected the shape"),
        (Slice("embed.weight", 2, 11), "has no range 2:11 along axis 0"),
        (Pad("embed.weight", 9), "expected an extent of at most 9"),
        (Pad("embed.weight", 12, stored=11), "expected an extent of 11"),
        (Stack("layers.{i}.q.weight", "{i}"), "one field that"),
        (Stack("{name}.weight", "all"), "is 'embed'; expected a number|matches nothing"),
        (Split("embed.weight", ["a", "b", "c"]), "cannot split .* into 3 parts along axis 0, equal"),
        (Split("embed.weight", ["a", "a"]), "two of its parts"),
        (Fuse(["layers.{i}.q.weight", "layers.{i}.k.weight"], "layers.{i}.qk"), "k.weight' matches nothing"),
        (Fuse(["layers.0.q.weight", "embed.weight"], "x"), "expected parts of equal sizes"),
        (IfPresent(Fuse(["layers.{i}.q.weight", "layers.{i}.k.weight"], "x.{i}")), "k.weight' matches nothing"),
        (
            Apply("embed.weight", lambda w: w[0]),
            r"embed.weight.* could not be computed.*\[4\]; expected float32\[10, 4\]",
        ),
        (Apply("step", lambda w: w), "not an array"),
        (RenameTable({"step": "s", "spte": "t"}), "matches nothing"),
        (MergeLora("{name}", "{name}.B", "{name}.A", 1.0), "matches nothing"),
        (Refuse("layers.0.*"), r"no transform handles .*layers\.0\.q\.weight.* and 1 other: put Rename, or Drop"),
        (Refuse("step"), "no transform handles step"),
        (Default("x", object()), "no installed plugin handles"),
    ],
)
def test_a_transform_that_does_not_fit_the_tree_is_an_error(transform: Transform, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        _load({**_layers(), "step": 3}, transform)


def test_an_error_names_a_missing_layer() -> None:
    state = _layers()
    del state["layers.1.q.weight"]
    with pytest.raises(
        TransformError, match=r"transform 1 of 1 \(stack .*array 1 of a stack of 2, numbered up to 2, is missing"
    ):
        _load(state, Stack("layers.{i}.{rest...}", "layers/{rest}"))


def test_the_number_of_unstacked_parts_is_limited() -> None:
    with pytest.raises(TransformError, match="has 70000 parts; expected 1 to 65536"):
        _load({"w": np.zeros((70000, 0), np.int8)}, Unstack("w", "w/{i}"))


def test_if_present_ignores_missing_arrays() -> None:
    state = _layers(1)
    loaded = _load(state, IfPresent(Drop("lm_head.weight")), IfPresent(Fuse(["a", "b"], "c")))
    assert_same_tree(loaded, state)


def test_matching_applies_to_transformed_arrays() -> None:
    with pytest.raises(TreeMismatchError, match="missing: w is not stored"):
        _load({"w": _array(2)}, Rename("w", "v"), abstract={"w": AbstractArray((2,), "float32")})
    with pytest.raises(TreeMismatchError, match=r"float64\[2\] is stored"):
        _load({"w": _array(2)}, Cast("w", "float64"), abstract={"w": AbstractArray((2,), "float32")})


def test_refuse_changes_nothing_if_no_leaf_matches() -> None:
    refuse = Refuse("**.inv_freq")
    assert_same_tree(_load(_layers(1), refuse), _layers(1))
    assert inverse([refuse]) == [refuse] and describe([refuse]) == "1. expect nothing at '**.inv_freq'"


def test_transforms_are_described_without_a_load() -> None:
    assert describe([Stack("l.{i}", "l"), IfPresent(Drop(re.compile("opt.*"))), Cast("*", "bfloat16")]) == (
        "1. stack 'l.{i}' along axis 0 as 'l'\n2. drop /opt.*/, if present\n3. cast '*' to bfloat16"
    )


def test_patterns_match_attributes_by_their_names() -> None:
    state = {"opt": Point(_array(2), _array(3))}
    loaded = _load(
        state, Rename("opt/x", "opt/z"), Drop("opt/y"), abstract={"opt": {"z": AbstractArray((2,), "float32")}}
    )
    assert_same_tree(loaded["opt"]["z"], state["opt"].x)
    abstract = {"opt": Point(AbstractArray((2,), "float16"), AbstractArray((3,), "float32"))}
    assert_same_tree(_load(state, Cast("opt/x", "float16"), abstract=abstract)["opt"].y, state["opt"].y)
