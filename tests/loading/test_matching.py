"""Matching of abstract and stored leaves. Keys of our checkpoints match strictly, those of other software by text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptcore
from ckptcore import PLACEHOLDER, AbstractArray, Matching
from ckptcore.errors import TreeMismatchError
from ckptcore.matching.leaf_matching import match_leaves
from ckptcore.model import TreeMetadata, format_path
from ckptcore.plugins import installed_plugins
from ckptcore.tree.flattening import flatten

ONE, TWO = np.ones(1), np.ones(2)


class Empty(NamedTuple):
    pass


class Pair(NamedTuple):
    mu: Any
    nu: Any


def matched(abstract: Any, stored: Any, *, foreign: bool = True) -> dict[str, str | None]:
    """Return the path of the stored leaf for the path of each requested leaf, or None."""
    registry = installed_plugins()
    kept = flatten(stored, registry)
    records = [handler.describe(leaf) for handler, leaf in zip(kept.handlers, kept.leaves, strict=True) if handler]
    tree = TreeMetadata(kept.skeleton, tuple(records))
    flat = flatten(abstract, registry, placeholders=True)
    numbers = match_leaves(flat, tree, "here", by_name=foreign, matching=Matching(values="error")).numbers
    return {
        format_path(path): None if number is None else format_path(tree.paths[number])
        for path, number in zip(flat.paths(), numbers, strict=True)
    }


def differences(abstract: Any, stored: Any, *, foreign: bool = True) -> list[str]:
    with pytest.raises(TreeMismatchError) as caught:
        matched(abstract, stored, foreign=foreign)
    return sorted(caught.value.differences)


@pytest.mark.parametrize(
    ("abstract", "stored", "expected"),
    [
        ({1: ONE, -2: TWO}, {"1": ONE, "-2": TWO}, {"[1]": "['1']", "[-2]": "['-2']"}),
        ({"1": ONE}, {1: ONE}, {"['1']": "[1]"}),
        ([ONE, TWO], {"0": ONE, "1": TWO}, {"[0]": "['0']", "[1]": "['1']"}),
        ({"0": ONE, "1": TWO}, [ONE, TWO], {"['0']": "[0]", "['1']": "[1]"}),
        ((ONE, (TWO,)), [ONE, [TWO]], {"[0]": "[0]", "[1][0]": "[1][0]"}),
        (Pair(ONE, TWO), {"mu": ONE, "nu": TWO}, {"mu": "mu", "nu": "nu"}),
        ({"a": {7: [Pair(ONE, TWO)]}}, {"a": {"7": {"0": {"mu": ONE, "nu": TWO}}}}, {
            "a[7][0].mu": "a['7']['0']/mu", "a[7][0].nu": "a['7']['0']/nu"
        }),
        ({1: {"w": ONE}}, {"1.w": ONE}, {"[1]/w": "['1.w']"}),
    ],
)  # fmt: skip
def test_keys_match_by_their_text(abstract: Any, stored: Any, expected: dict[str, str]) -> None:
    assert matched(abstract, stored) == expected


@pytest.mark.parametrize("abstract", [{1: ONE}, [np.zeros(0), ONE]])
def test_keys_of_our_checkpoints_match_strictly(abstract: Any) -> None:
    stored = {"1": ONE} if isinstance(abstract, dict) else {"0": np.zeros(0), "1": ONE}
    assert any(text.startswith("key: [1] is requested") for text in differences(abstract, stored, foreign=False))
    assert matched(abstract, stored)


def test_equal_keys_match_before_keys_of_equal_text() -> None:
    assert matched({1: ONE, "1": TWO}, {"1": TWO, 1: ONE}) == {"[1]": "[1]", "['1']": "['1']"}


def test_keys_with_the_same_text_match_nothing() -> None:
    assert differences({1: ONE, "1": ONE}, {"1": ONE}) == ["missing: [1] is not stored"]
    # Neither requested key has the dot of the stored key.
    assert differences({"a": {1: ONE, "1": ONE}}, {"a.1": ONE}) == [
        "missing: a['1'] is not stored; did you mean ['a.1']?",
        "missing: a[1] is not stored",
        "unexpected: ['a.1'] is stored and not requested",
    ]
    # "01" is another key than 1.
    assert differences({1: ONE}, {"01": ONE}) == [
        "missing: [1] is not stored; did you mean ['01']?",
        "unexpected: ['01'] is stored and not requested",
    ]


def test_leaves_whose_keys_match_by_text_must_have_equal_shapes() -> None:
    assert differences({1: ONE}, {"1": TWO}) == ["[1]: shape: float64[1] is requested, float64[2] is stored"]


@pytest.mark.parametrize("empty", [(), [], {}, Empty(), {"a": Empty()}])
def test_a_stored_none_is_an_empty_container(empty: Any) -> None:
    assert matched({0: empty, "w": ONE}, {"0": None, "w": ONE}) == {"w": "w"}
    assert matched(empty, None) == {}
    assert differences({0: empty, "w": ONE}, {0: None, "w": ONE}, foreign=False) == [
        "unexpected: [0] is stored and not requested"
    ]


def test_nested_empty_containers_match() -> None:
    assert matched({"x": {"inner": Empty()}}, {"x": {"inner": None}}) == {}


def test_only_none_is_an_empty_container() -> None:
    assert differences({"a": Empty()}, {"a": 0}) == ["unexpected: a is stored and not requested"]
    assert matched({"a": Empty()}, {"a": None, "b": None}) == {}
    assert differences({"a": ()}, {"a": {"b": ONE}}) == ["unexpected: a/b is stored and not requested"]


@pytest.mark.parametrize("stored", [{"w": ONE}, {"w": ONE, "a": {}}, {"w": ONE, "a": [[], ()]}])
def test_none_may_be_requested_if_nothing_is_stored(stored: Any) -> None:
    assert matched({"a": None, "w": ONE}, stored) == {"a": None, "w": "w"}
    assert differences({"a": None, "w": ONE}, stored, foreign=False) == ["missing: a is not stored"]


def test_none_is_loaded_if_nothing_is_stored(tmp_path: Path) -> None:
    save_file({"w": TWO}, tmp_path / "model.safetensors")
    loaded = ckptcore.load(tmp_path, {"w": TWO, "bias": None, "skip": PLACEHOLDER})
    assert loaded["bias"] is None and loaded["skip"] is PLACEHOLDER and loaded["w"].tolist() == [1, 1]
    target = {"w": np.zeros(2), "bias": None}
    ckptcore.load_into(tmp_path, target)
    assert target["bias"] is None and target["w"] is not None and target["w"].tolist() == [1, 1]
    fixed = (Pair(np.zeros(2), None),)
    save_file({"0.mu": TWO}, tmp_path / "model.safetensors")
    ckptcore.load_into(tmp_path, fixed)
    assert fixed[0].mu.tolist() == [1, 1] and fixed[0].nu is None


def test_none_does_not_match_arrays_or_containers() -> None:
    assert differences({"a": None}, {"a": ONE}) == ["a: kind: none is requested, array float64[1] is stored"]
    assert differences({"a": None}, {"a": {"b": ONE}}) == ["unexpected: a/b is stored and not requested"]
    assert differences({"a": ONE}, {"a": None}) == ["a: kind: array float64[1] is requested, none is stored"]


def test_placeholders_match_keys_by_their_text() -> None:
    stored = {"1": {"a": ONE, "b": TWO}, "2": ONE}
    assert matched({1: PLACEHOLDER, 2: ONE}, stored) == {"[1]": None, "[2]": "['2']"}
    assert differences({1: PLACEHOLDER, 2: ONE}, stored, foreign=False) != []


def zero_d(dtype: str) -> AbstractArray:
    return AbstractArray((), dtype)


@pytest.mark.parametrize(
    ("stored", "dtypes"),
    [
        (True, ["bool"]),
        (5, ["int32", "uint8", "int4", "int64", "float32", "bfloat16", "float64", "float8_e4m3fn"]),
        (-8, ["int4", "int8", "float16"]),
        (2**31 - 1, ["int32", "uint32", "int64", "float64"]),
        (2**64 - 1, ["uint64"]),
        (2**40, ["int64", "uint64", "float32", "bfloat16"]),
        (0.5, ["float32", "bfloat16", "float16", "float8_e5m2", "float4_e2m1fn"]),
        (0.1, ["float64"]),
        (-0.0, ["float32", "bfloat16", "float8_e4m3fn"]),
        (1e300, ["float64"]),
        (float("nan"), ["float32", "bfloat16", "float8_e4m3fn"]),
        (float("-inf"), ["float32", "bfloat16", "float16", "float8_e5m2"]),
    ],
)
def test_a_stored_number_matches_zero_dimensional_arrays_that_can_hold_it(stored: Any, dtypes: list[str]) -> None:
    for dtype in dtypes:
        assert matched({"n": zero_d(dtype)}, {"n": stored}) == {"n": "n"}
        assert differences({"n": zero_d(dtype)}, {"n": stored}, foreign=False)[0].startswith("n: kind: ")


@pytest.mark.parametrize(
    ("stored", "dtypes"),
    [
        (8, ["int4", "bool"]),
        (-1, ["uint8", "uint64"]),
        (2**40, ["int32", "float16"]),
        (2**24 + 1, ["float32"]),
        (2**53 + 1, ["float64"]),
        (2**64, ["uint64", "int64"]),
        pytest.param(1 << 20000, ["int64", "float64"], id="of more digits than Python prints"),
        (0.1, ["float32", "bfloat16"]),
        (1e300, ["float32", "bfloat16"]),
        (5.0, ["int32"]),
        (-0.0, ["float8_e4m3fnuz"]),
        (float("nan"), ["float4_e2m1fn"]),
        (float("inf"), ["float8_e4m3fn"]),
        (0.5, ["complex64", "bool", "datetime64[s]"]),
        (True, ["int32", "float32"]),
        (1, ["bool", "S1"]),
        (1j, ["complex128"]),
        ("5", ["int32"]),
    ],
)
def test_a_number_does_not_match_arrays_that_would_change_it(stored: Any, dtypes: list[str]) -> None:
    for dtype in dtypes:
        (told,) = differences({"n": zero_d(dtype)}, {"n": stored})
        assert f"{dtype}[] is requested" in told and len(told) < 150


def test_the_error_tells_which_number_cannot_be_represented() -> None:
    asked = {name: zero_d(dtype) for name, dtype in (("a", "int32"), ("b", "float32"), ("c", "int32"), ("d", "int8"))}
    assert differences(asked, {"a": 2**40, "b": 0.1, "c": 5.0, "d": 1 << 200}) == [
        "a: value: int32[] is requested, and cannot represent the stored int exactly: 1099511627776",
        "b: value: float32[] is requested, and cannot represent the stored float exactly: 0.1",
        "c: kind: array int32[] is requested, float is stored",
        "d: value: int8[] is requested, and cannot represent the stored int exactly: of 201 bits",
    ]


@pytest.mark.parametrize(
    ("asked", "dtypes"),
    [
        (0, ["int4", "int32", "uint8", "int64", "uint64"]),
        (0.0, ["float32", "float64", "bfloat16", "float8_e4m3fn", "int32", "uint32", "int4"]),
        (False, ["bool"]),
    ],
)
def test_a_zero_dimensional_array_matches_a_number(asked: Any, dtypes: list[str]) -> None:
    for dtype in dtypes:
        assert matched({"n": asked}, {"n": np.ones((), zero_d(dtype).dtype)}) == {"n": "n"}
        assert differences({"n": asked}, {"n": np.ones((), zero_d(dtype).dtype)}, foreign=False)


@pytest.mark.parametrize(
    ("asked", "dtypes"),
    [
        (0, ["float32", "bfloat16", "bool", "complex64"]),
        (0.0, ["int64", "uint64", "bool", "complex64"]),
        (False, ["int32", "uint8", "float32"]),
        (0j, ["complex64"]),
        ("", ["int32"]),
    ],
)
def test_an_array_does_not_match_numbers_that_would_change_it(asked: Any, dtypes: list[str]) -> None:
    for dtype in dtypes:
        stored = np.zeros((), zero_d(dtype).dtype)
        assert differences({"n": asked}, {"n": stored}) == [
            f"n: kind: {type(asked).__name__} is requested, array {dtype}[] is stored"
        ]


def test_only_zero_dimensional_arrays_match_numbers() -> None:
    assert differences({"n": 0}, {"n": np.zeros(1, np.int32)}) == [
        "n: kind: int is requested, array int32[1] is stored"
    ]
    assert differences({"n": np.zeros(1, np.int32)}, {"n": 0}) == [
        "n: kind: array int32[1] is requested, int is stored"
    ]


@pytest.mark.parametrize("asked", [np.zeros((), np.float32), np.float32(0), AbstractArray((), "float32")])
def test_arrays_of_other_dtypes_are_not_cast(asked: Any) -> None:
    told = ["n: dtype: float32[] is requested, float64[] is stored; casts are not allowed by default"]
    assert differences({"n": asked}, {"n": np.zeros(())}) == told


def test_zero_dimensional_arrays_load_as_numbers(tmp_path: Path) -> None:
    stored = {"i": np.array(-3, np.int8), "f": np.array(0.1, np.float32), "b": np.ones((), np.bool_), "w": TWO}
    save_file(dict[str, Any](stored), tmp_path / "model.safetensors")
    asked = {"i": 0, "f": 0.0, "b": False, "w": np.zeros(2)}
    expected = [("i", int, -3), ("f", float, float(np.float32(0.1))), ("b", bool, True)]
    for loaded in (ckptcore.load(tmp_path, asked), ckptcore.load_into(tmp_path, asked)):
        for name, kind, number in expected:
            assert type(loaded[name]) is kind and loaded[name] == number
        assert loaded["w"].tolist() == [1, 1]
    assert ckptcore.load(tmp_path, {**asked, "f": np.float32(0)})["f"] == np.float32(0.1)


def test_a_number_in_an_immutable_container_is_refused_before_the_target_changes(tmp_path: Path) -> None:
    save_file({"0.mu": TWO, "0.nu": np.array(7)}, tmp_path / "model.safetensors")
    target = (Pair(np.zeros(2), 0),)
    with pytest.raises(TreeMismatchError, match="cannot be filled in place") as caught:
        ckptcore.load_into(tmp_path, target)
    assert "nu" in caught.value.differences[0] and target[0].mu.tolist() == [0, 0]
    assert ckptcore.load(tmp_path, target)[0].nu == 7
