"""Recipes in errors about unsupported values. Each test follows the recipe, and must get the whole value back."""

from __future__ import annotations

import argparse
import array
import collections
import enum
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]  # has no stubs
import pydantic
import pytest
import scipy.sparse  # type: ignore[import-untyped]  # has no stubs

import ckptcore
from ckptcore.errors import UnsupportedLeafError


class Settings(pydantic.BaseModel):
    rate: float = 0.1
    names: list[str] = ["a"]


class Config:
    """A configuration class like those of transformers."""

    def __init__(self, **entries: Any) -> None:
        self.__dict__.update(entries)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Image:
    """A replacement of an image of PIL, which may not be installed. It has the same interface to NumPy."""

    def __init__(self, elements: Any) -> None:
        self.__array_interface__ = np.ascontiguousarray(elements).__array_interface__
        self._elements = elements


Image.__module__, Image.__qualname__ = "PIL.Image", "Image"

FRAME = pd.DataFrame({"loss": [0.5, 0.25], "step": [1, 2], "name": ["a", "b"]})
MATRIX = scipy.sparse.random(5, 4, density=0.4, random_state=0, format="csr")
PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)

RECIPES: dict[str, tuple[Any, str, Callable[[Any], Any], Callable[[Any], bool]]] = {
    # name: (value, text of the recipe, function that follows it, check that a load has the whole value)
    "namespace of argparse": (
        argparse.Namespace(lr=0.1, layers=[1]), r"save vars\(value\)", vars,
        lambda loaded: argparse.Namespace(**loaded) == argparse.Namespace(lr=0.1, layers=[1]),
    ),
    "simple namespace": (
        types.SimpleNamespace(lr=0.1), r"save vars\(value\)", vars,
        lambda loaded: types.SimpleNamespace(**loaded) == types.SimpleNamespace(lr=0.1),
    ),
    "image": (Image(PIXELS), r"save np.asarray\(value\)", np.asarray, lambda loaded: np.array_equal(loaded, PIXELS)),
    "frame": (
        FRAME, r"column.to_numpy\(\) .* column.to_list\(\) for columns of text",
        lambda value: {
            name: column.to_list() if name == "name" else column.to_numpy() for name, column in value.items()
        },
        lambda loaded: pd.DataFrame(loaded).equals(FRAME),
    ),
    "series": (
        FRAME["loss"], r"save value.to_numpy\(\)", lambda value: value.to_numpy(),
        lambda loaded: pd.Series(loaded, name="loss").equals(FRAME["loss"]),
    ),
    "index": (
        pd.Index(["a", "b"]), r"value.to_list\(\) for text", lambda value: value.to_list(),
        lambda loaded: pd.Index(loaded).equals(pd.Index(["a", "b"])),
    ),
    "timestamp": (
        pd.Timestamp("2024-01-02T03:04:05.000000007"), r"value.isoformat\(\)", lambda value: value.isoformat(),
        lambda loaded: pd.Timestamp(loaded) == pd.Timestamp("2024-01-02T03:04:05.000000007"),
    ),
    "timedelta": (
        pd.Timedelta(7, "ns"), r"value.isoformat\(\)", lambda value: value.isoformat(),
        lambda loaded: pd.Timedelta(loaded) == pd.Timedelta(7, "ns"),
    ),
    "sparse matrix": (
        MATRIX, r"row, col, data and shape of its .tocoo\(\)",
        lambda value: {name: getattr(value.tocoo(), name) for name in ("row", "col", "data", "shape")},
        lambda loaded: not (
            scipy.sparse.coo_matrix((loaded["data"], (loaded["row"], loaded["col"])), loaded["shape"]) != MATRIX
        ).nnz,
    ),
    "pydantic": (
        Settings(rate=0.2), r"save value.model_dump\(\)", lambda value: value.model_dump(),
        lambda loaded: Settings(**loaded) == Settings(rate=0.2),
    ),
    "to_dict": (
        Config(rate=0.2), r"save value.to_dict\(\)", lambda value: value.to_dict(),
        lambda loaded: loaded == {"rate": 0.2},
    ),
    "mapping": (types.MappingProxyType({"a": 1}), r"save dict\(value\)", dict, lambda loaded: loaded == {"a": 1}),
    "chain": (
        collections.ChainMap({"a": 1}, {"b": 2}), r"save dict\(value\)", dict, lambda loaded: loaded == {"a": 1, "b": 2}
    ),
    "user dict": (collections.UserDict(a=1), r"save dict\(value\)", dict, lambda loaded: loaded == {"a": 1}),
    "user list": (collections.UserList([1, 2]), r"save list\(value\)", list, lambda loaded: loaded == [1, 2]),
    "values": ({"a": 1}.values(), r"save list\(value\)", list, lambda loaded: loaded == [1]),
    "slice": (
        slice(1, None, 2), r"save \[value.start, value.stop, value.step\]",
        lambda value: [value.start, value.stop, value.step], lambda loaded: slice(*loaded) == slice(1, None, 2),
    ),
    "memory": (
        memoryview(b"ab"), r"save np.asarray\(value\)", np.asarray, lambda loaded: loaded.tobytes() == b"ab"
    ),
    "array": (
        array.array("d", [1.5, 2]), r"save np.asarray\(value\)", np.asarray,
        lambda loaded: array.array("d", loaded) == array.array("d", [1.5, 2]),
    ),
    "partial": (
        functools.partial(max, 1, key=2), r"value.args and value.keywords",
        lambda value: [value.args, value.keywords], lambda loaded: loaded == [(1,), {"key": 2}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.brings("`Namespace`, pandas, PIL and others", "Python", "refused")
def test_the_recipe_of_a_value_keeps_it(name: str, tmp_path: Path) -> None:
    value, advice, follow, has_all = RECIPES[name]
    with pytest.raises(UnsupportedLeafError, match=rf"^state/x is a .*which no installed plugin handles: .*{advice}"):
        ckptcore.save(tmp_path / "c", {"state": {"x": value}})
    assert not (tmp_path / "c").exists()
    saved = follow(value)
    ckptcore.save(tmp_path / "c", {"state": {"x": saved}})
    assert has_all(ckptcore.load(tmp_path / "c")["state"]["x"])
    assert has_all(ckptcore.load(tmp_path / "c", {"state": {"x": saved}})["state"]["x"])


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (iter([1]), "its position is not known"),
        (..., "PLACEHOLDER represents a leaf that was not loaded"),
        (print, "code is not saved"),
        (Color, "code is not saved"),
        (object(), "convert it to arrays, numbers, text or containers"),
    ],
)
def test_values_that_cannot_be_kept_are_named(value: Any, advice: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match=f"^x is a .*{advice}"):
        ckptcore.save(tmp_path / "c", {"x": value})
