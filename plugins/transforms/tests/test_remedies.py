"""Remedies in the errors of transforms. Each test follows the text of an error, and checks the result."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_transforms import (
    Apply,
    Cast,
    Dequantize,
    Drop,
    Fuse,
    IfPresent,
    MergeAxes,
    Pad,
    Refuse,
    Rename,
    Reshape,
    Scale,
    Slice,
    Split,
    Stack,
    Transform,
    Transpose,
    Unstack,
    inverse,
)
from ckptcore_transforms.maps import find_map

import ckptcore
from ckptcore.errors import TransformError

EIGHT = np.arange(8.0).reshape(4, 2)
FOUR = np.arange(4.0).reshape(2, 2)
STATE = {"a": EIGHT, "b": FOUR, "c": np.arange(3.0), "a.x": EIGHT, "{d}": FOUR}


def refused(call: Callable[[], object], text: str, error: type[Exception] = TransformError) -> str:
    """Return the message of the error that a call raises. The message must contain the text."""
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
    return str(caught.value)


def checkpoint(directory: Path, state: object = STATE) -> Path:
    """Save a tree, and return its location."""
    ckptcore.save(directory / "c", state)
    return directory / "c"


@pytest.mark.parametrize(
    ("wrong", "text", "right", "path", "expected"),
    [
        (Fuse(["a", "b"], "x"), "found [4, 2]; set Fuse(..., sizes=)",
         Fuse(["a", "b"], "x", sizes=[4, 2]), "x", np.concatenate([EIGHT, FOUR])),
        (Fuse(["a", "b"], "x", sizes=[2, 4]), "expected parts of [2, 4] along axis 0, found [4, 2]; set Fuse(..., siz",
         Fuse(["a", "b"], "x", sizes=[4, 2]), "x", np.concatenate([EIGHT, FOUR])),
        (Rename("{d", "x"), "write braces in text as {{ and }}", Rename("{{d}}", "x"), "x", FOUR),
        (Rename("{d-}.x", "x"), "use {name}, {name:d} or {name...}", Rename("{name}.x", "x"), "x", EIGHT),
        (Rename("a", "x*"), "use a template without '*'", Rename("a", "xy"), "xy", EIGHT),
        (Rename("{name}.x", "{nam}"), "the unknown field 'nam'; the fields are 'name'",
         [Drop("a"), Rename("{name}.x", "{name}")], "a", EIGHT),
        (Rename("a", "{name}"), "the unknown field 'name'; there are no fields", Rename("{name}.x", "x"), "x", EIGHT),
        (Rename("bb", "x"), "the tree has 5 leaves, such as 'b'", Rename("b", "x"), "x", FOUR),
        (Rename("b", "a"), "drop or rename one of them first", [Drop("a"), Rename("b", "a")], "a", FOUR),
        (Rename("b", "a"), "drop or rename one of them first", [Rename("a", "y"), Rename("b", "a")], "y", EIGHT),
        (Rename("b", "a/b"), "a would be both a leaf and a container of a/b; rename one of them",
         [Rename("b", "a/b"), Rename("a", "a/a")], "a/b", FOUR),
        (Refuse("a.x"), "put Rename, or Drop if it is not needed, first in the transforms of ckptcore.load",
         [Rename("a.x", "x"), Refuse("a.x")], "x", EIGHT),
        (Refuse("a.x"), "no transform handles ['a.x']: put Rename, or Drop", [Drop("a.x"), Refuse("a.x")], "a", EIGHT),
        (Slice("a", 2, 5), "float64[4, 2] has no range 2:5 along axis 0", Slice("a", 2, 4), "a", EIGHT[2:]),
        (Split("a", ["x", "y"], sizes=[3, 3]), "cannot split float64[4, 2] into 2 parts along axis 0, [3, 3]",
         Split("a", ["x", "y"], sizes=[3, 1]), "y", EIGHT[3:]),
        (Stack("{i}", "x"), "expected a number",
         [Rename("b", "n/0"), Rename("{{d}}", "n/1"), Stack("n/{i}", "x")], "x", np.stack([FOUR, FOUR])),
        (Unstack("a", "x"), "exactly one field that 'a' lacks", Unstack("a", "x/{i}"), "x/3", EIGHT[3]),
        (MergeAxes("a", 0, (3, -1)), "expected [3, -1] from axis 0 on, found float64[4, 2]",
         MergeAxes("a", 0, (4, -1)), "a", EIGHT.reshape(8)),
    ],
)  # fmt: skip
def test_a_transform_that_does_not_fit(
    tmp_path: Path, wrong: Transform, text: str, right: Transform | list[Transform], path: str, expected: Any
) -> None:
    location = checkpoint(tmp_path)
    refused(lambda: ckptcore.load(location, transforms=[wrong]), text)
    transforms = right if isinstance(right, list) else [right]
    loaded = ckptcore.load(location, transforms=transforms)
    for key in path.split("/"):
        loaded = loaded[int(key) if isinstance(loaded, list) else key]
    assert np.array_equal(loaded, expected)


def test_a_field_replaces_wildcards_that_match_several_parts(tmp_path: Path) -> None:
    location = checkpoint(tmp_path, {f"{layer}.{part}": FOUR + layer for layer in range(2) for part in "qk"})
    refused(
        lambda: ckptcore.load(location, transforms=[Fuse(["*.q", "*.k"], "qk")]), "use fields such as {name} instead"
    )
    loaded = ckptcore.load(location, transforms=[Fuse(["{name}.q", "{name}.k"], "qk.{name}")])
    assert list(loaded) == ["qk.0", "qk.1"]
    assert np.array_equal(loaded["qk.1"], np.concatenate([FOUR + 1, FOUR + 1]))


def test_an_error_suggests_no_sizes_for_arrays_that_cannot_be_joined(tmp_path: Path) -> None:
    """No sizes can help if other extents or the number of axes differ."""
    location = checkpoint(tmp_path)
    for axis in (0, 1):
        text = refused(lambda: ckptcore.load(location, transforms=[Fuse(["a", "c"], "x", axis)]), "be concatenated")  # noqa: B023
        assert "sizes=" not in text


@pytest.mark.parametrize(
    ("transform", "advice", "right"),
    [
        (Cast("a", "float32"), "set Cast(..., stored=)", Cast("a", "float32", stored="float64")),
        (Scale("a", 3), "set Scale(..., undo=) if that is acceptable", Scale("a", 3, undo=1 / 3)),
        (Pad("a", 5), "set Pad(..., stored=)", Pad("a", 5, stored=4)),
        (Reshape("a", (8,)), "set Reshape(..., stored=)", Reshape("a", (8,), stored=(4, 2))),
        (Apply("a", np.negative), "set Apply(..., undo=) without result=", Apply("a", np.negative, undo=np.negative)),
        (
            Apply("a", np.negative, lambda array: array, np.negative),
            "set Apply(..., undo=) without result=",
            Apply("a", np.negative, undo=np.negative),
        ),
    ],
)
def test_an_option_that_an_error_names_gives_an_inverse(
    tmp_path: Path, transform: Transform, advice: str, right: Transform
) -> None:
    refused(lambda: inverse([transform]), advice)
    changed = ckptcore.load(checkpoint(tmp_path), transforms=[right])
    assert not np.array_equal(changed["a"], EIGHT) or changed["a"].dtype != EIGHT.dtype
    ckptcore.save(tmp_path / "changed", changed)
    back = ckptcore.load(tmp_path / "changed", transforms=inverse([right]))
    assert back["a"].dtype == EIGHT.dtype
    assert np.allclose(back["a"], EIGHT, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("make", "expected", "right"),
    [
        (lambda: Rename(3, "x"), "expected a str, or a compiled regular", Rename(re.compile("b"), "x")),  # type: ignore[arg-type]
        (lambda: Rename("b", 3), "Rename(to=3): expected a str", Rename("b", "x")),  # type: ignore[arg-type]
        (lambda: Fuse("b", "x"), "Fuse(patterns='b'): expected a nonempty list of str", Fuse(["b"], "x")),
        (lambda: Slice("b", 0.0, 2), "Slice(start=0.0): expected an integer", Slice("b", 0, 2)),  # type: ignore[arg-type]
        (lambda: Transpose("b", 1), "expected a list of integers", Transpose("b", [0, 1])),  # type: ignore[arg-type]
        (lambda: MergeAxes("b", 0, []), "a list of at least 1 integers", MergeAxes("b", 0, [2])),
        (lambda: Scale("b", float("nan")), "Scale(factor=nan): expected a finite number", Scale("b", 1)),
        (lambda: Apply("b", 3), "Apply(function=3): expected a function", Apply("b", np.abs)),  # type: ignore[arg-type]
        (lambda: Cast("b", "f"), "a dtype of NumPy or ml_dtypes, or its name", Cast("b", np.float64)),  # type: ignore[arg-type]
        (lambda: Cast("b", "f"), "a dtype of NumPy or ml_dtypes, or its name", Cast("b", "float64")),
        (lambda: IfPresent("b"), "expected a transform", IfPresent(Drop("zz"))),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type(tmp_path: Path, make: Callable[[], object], expected: str, right: Transform) -> None:
    """The error names an accepted type, and a value of this type works."""
    refused(make, expected, TypeError)
    loaded = ckptcore.load(checkpoint(tmp_path), transforms=[right])
    assert np.array_equal(loaded.get("b", loaded.get("x")), FOUR)


def test_names_and_options_of_maps() -> None:
    text = refused(lambda: find_map("lama-to-scanned"), "did you mean 'llama-to-scanned'? Maps: ")
    assert find_map("llama-to-scanned")
    options: dict[str, dict[str, Any]] = {
        "llama-to-maxtext": {"head_dim": 4, "rope_type": "default"},
        "qwen-to-maxtext": {"head_dim": 4},
    }
    for name in text.partition("Maps: ")[2].split(", "):
        own = options.get(name, options.get("-to-".join(reversed(name.split("-to-"))), {}))
        assert find_map(name, **own)
    for name, needed in options.items():
        refused(lambda: find_map(name), "requires head_dim: set the number of elements of a head, as in")  # noqa: B023
        assert find_map(name, **needed)
    refused(lambda: find_map("llama-to-scanned", 4), "does not use head_dim=4: remove it")


def test_zero_points_are_never_ignored(tmp_path: Path) -> None:
    """The error for an unsupported ``quantization_config`` names `Dequantize`, which must not ignore data either."""
    values, scales = np.array([[1, 2], [3, 4]], "int8"), np.array([[2], [4]], "float32")
    stored = {"a.weight": values, "a.weight_scale": scales}
    transforms = [Dequantize("{n...}.weight", "{n}.weight_scale", dtype="float32")]
    expected = [[2, 4], [12, 16]]
    assert ckptcore.load(checkpoint(tmp_path, stored), transforms=transforms)["a.weight"].tolist() == expected
    ckptcore.save(tmp_path / "asymmetric", {**stored, "a.weight_zero_point": np.array([[1], [1]], "int8")})
    refused(
        lambda: ckptcore.load(tmp_path / "asymmetric", transforms=transforms),
        "['a.weight']: unsupported data for this array: 'a.weight_zero_point'",
    )


def test_scales_that_do_not_determine_blocks(tmp_path: Path) -> None:
    values, scales = np.ones((4, 6), np.int8), np.array([[1, 2], [3, 4]], "float32")
    location = checkpoint(tmp_path, {"w": values, "w_scale": scales})
    refused(
        lambda: ckptcore.load(location, transforms=[Dequantize("w", "w_scale")]),
        "do not determine the blocks of int8[4, 6]: expected one scale, or along each axis 1 or its extent; set the "
        "extents of a block",
    )
    loaded = ckptcore.load(location, transforms=[Dequantize("w", "w_scale", block=(2, 3), dtype="float32")])
    assert np.array_equal(loaded["w"], np.repeat(np.repeat(scales, 2, 0), 3, 1))
    for good in (np.float32(2), np.full((4, 1), np.float32(2)), np.full((1, 6), np.float32(2))):
        ckptcore.save(location, {"w": values, "w_scale": good}, overwrite=True)
        loaded = ckptcore.load(location, transforms=[Dequantize("w", "w_scale", dtype="float32")])
        assert np.array_equal(loaded["w"], values * np.float32(2))


def test_dtypes_of_scales(tmp_path: Path) -> None:
    values = np.ones((2, 2), np.int8)
    location = checkpoint(tmp_path, {"w": values, "w_scale": np.array([[2], [2]], "float64")})
    transform = Dequantize("w", "w_scale", dtype="float32")
    text = refused(
        lambda: ckptcore.load(location, transforms=[transform]), "the scales are float64[2, 1]; expected one of "
    )
    for dtype in text.partition("expected one of ")[2].partition("\n")[0].split(", "):
        loaded = ckptcore.load(location, transforms=[Cast("w_scale", dtype), transform])
        assert np.array_equal(loaded["w"], values * np.float32(2))
