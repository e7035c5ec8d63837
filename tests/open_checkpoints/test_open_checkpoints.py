"""Open checkpoints as mappings from paths to arrays, values and trees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import (
    CheckpointNotFoundError,
    CompositeCheckpointError,
    UnknownPathError,
)
from ckptcore.results import StoredArray, StoredTree


class Pair(NamedTuple):
    mu: Any
    nu: Any


@dataclasses.dataclass
class State:
    step: int
    pair: Pair


@pytest.fixture
def location(tmp_path: Path) -> Path:
    tree = {
        "a/b": np.zeros(1),
        "a": {"b": np.ones(2), "c/d": {"e": np.ones(3)}},
        "layers": [{"w": np.full(2, number)} for number in range(3)],
        3: np.zeros(5),
        "s": State(9, Pair(np.zeros(6), None)),
        "text": "é" * 20_000,
        "empty": {},
    }
    ckptcore.save(tmp_path / "c", tree)
    return tmp_path / "c"


def test_paths_are_keys_or_text(location: Path) -> None:
    with ckptcore.open(location) as checkpoint:
        assert checkpoint["a/b"].shape == (1,)  # a key with a slash is preferred to a path
        assert checkpoint["a"]["b"].shape == checkpoint["a", "b"].shape == (2,)
        assert (
            checkpoint["a/c/d/e"].shape == checkpoint["a", "c/d", "e"].shape == checkpoint[["a", "c/d/e"]].shape == (3,)
        )
        assert checkpoint["layers/1/w"][0] == checkpoint["layers", 1]["w"][0] == checkpoint["layers"][1]["w"][0] == 1
        assert checkpoint[3].shape == checkpoint["3"].shape == (5,)
        assert (
            checkpoint["s/step"] == 9
            and checkpoint["s"]["pair"]["nu"] is None
            and checkpoint["s/pair/mu"].shape == (6,)
        )
        assert checkpoint["text"] == "é" * 20_000
        assert checkpoint[()]["a/b"].shape == (1,)


def test_trees_are_mappings(location: Path) -> None:
    with ckptcore.open(location) as checkpoint:
        assert list(checkpoint) == ["a/b", "a", "layers", 3, "s", "text", "empty"] and len(checkpoint) == 7
        layers = checkpoint["layers"]
        assert isinstance(layers, StoredTree) and list(layers) == [0, 1, 2]
        assert dict(checkpoint["s"])["step"] == 9 and checkpoint["a"].path == ("a",)
        assert "a/c/d" in checkpoint and "a/x" not in checkpoint and 1.5 not in checkpoint
        assert checkpoint.get("nothing") is None and len(checkpoint["empty"]) == 0
        assert repr(layers) == "<StoredTree layers: list of 3>"
        assert all(isinstance(layer["w"], StoredArray) for layer in layers.values())


@pytest.mark.parametrize(
    "path", ["x", "a/x", "a/b/x", ("layers", 3), ("layers", -1), "s/step/x", ("a", "c", "d"), True]
)
def test_an_unknown_path_is_an_error(location: Path, path: Any) -> None:
    with ckptcore.open(location) as checkpoint, pytest.raises(UnknownPathError, match="is not in"):
        checkpoint[path]


def test_the_error_lists_existing_keys(location: Path) -> None:
    with ckptcore.open(location) as checkpoint, pytest.raises(KeyError) as caught:
        checkpoint["layer/0"]
    assert str(caught.value).endswith("'empty'; did you mean 'layers'?")


def test_a_single_leaf_is_at_the_empty_path(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", np.arange(4))
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert checkpoint[()][1:].tolist() == checkpoint[""][1:].tolist() == [1, 2, 3] and len(checkpoint) == 0


def test_tied_arrays_are_at_all_their_paths(tmp_path: Path) -> None:
    shared = np.arange(6)
    ckptcore.save(tmp_path / "c", {"a": shared, "b": shared})
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert checkpoint["b"][2:4].tolist() == [2, 3] and checkpoint["b"].memory_map()[5] == 5


def test_a_file_of_other_software_is_opened(tmp_path: Path) -> None:
    import safetensors.numpy

    safetensors.numpy.save_file({"model.w": np.arange(12.0).reshape(3, 4)}, tmp_path / "m.safetensors")
    with ckptcore.open(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint["model.w"][1:, 2].tolist() == [6, 10]
        assert checkpoint["model.w"].memory_map()[2, 3] == 11


def test_missing_and_composite_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.open(tmp_path / "nothing")
    ckptcore.save_checkpointables(tmp_path / "c", {"model": {"w": np.zeros(2)}, "data": {"n": 1}})
    with pytest.raises(CompositeCheckpointError):
        ckptcore.open(tmp_path / "c")
    with ckptcore.open(tmp_path / "c" / "model") as checkpoint:
        assert checkpoint["w"].shape == (2,)
