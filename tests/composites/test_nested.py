"""Objects with a state inside a tree that is saved under a name."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError
from tests.composites.objects import Counter, Files, Linear


class Train(NamedTuple):
    """An immutable container."""

    model: Linear
    step: Any


def test_objects_in_a_tree_are_restored_in_place(place: str) -> None:
    saved = {
        "model": Linear(3), "more": [Counter(2), (Linear(4), 5)], "step": 7, "w": np.arange(3),
        "v": np.ones(2, np.int8),
    }  # fmt: skip
    ckptcore.save_checkpointables(place + "/c", {"train": saved, "params": {"w": np.arange(3)}})
    model, counter, other = Linear(0), Counter(0), Linear(0)
    train: dict[str, Any] = {
        "model": model, "more": [counter, (other, 0)], "step": 0, "w": np.zeros(3, np.int64),
        "v": ckptcore.AbstractArray((2,), "int8"),
    }  # fmt: skip
    params = {"w": ckptcore.AbstractArray((3,), "int64")}
    loaded = ckptcore.load_checkpointables(place + "/c", {"params": params}, into={"train": train})
    assert loaded["train"] is train and train["model"] is model
    assert train["more"][0] is counter and train["more"][1][0] is other
    assert (train["step"], train["more"][1][1]) == (7, 5)
    assert train["w"].tolist() == [0, 1, 2] and train["v"].tolist() == [1, 1]
    assert model.bias.tolist() == Linear(3).bias.tolist() and other.bias.tolist() == Linear(4).bias.tolist()
    assert counter.position == 2
    assert loaded["params"] is not params and loaded["params"]["w"].tolist() == [0, 1, 2]
    assert isinstance(params["w"], ckptcore.AbstractArray)  # a tree without objects is not changed in place


def test_an_immutable_leaf_next_to_an_object_is_refused(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {"train": Train(Linear(3), 7)})
    model = Linear(0)
    with pytest.raises(TreeMismatchError, match=r"step.*its own name"):
        ckptcore.load_checkpointables(place + "/c", into={"train": Train(model, 0)})
    assert model.bias.tolist() == Linear(0).bias.tolist()
    loaded = ckptcore.load_checkpointables(place + "/c", into={"train": Train(model, ckptcore.PLACEHOLDER)})["train"]
    assert loaded.model is model and model.bias.tolist() == Linear(3).bias.tolist()


def test_a_mismatch_in_a_tree_of_objects_changes_nothing(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {"train": {"model": Linear(3), "step": 7}, "z": {"model": Linear(3)}})
    train: dict[str, Any] = {"model": Linear(0), "other": 0}
    before = copy.deepcopy(train)
    first = {"model": Linear(0)}
    with pytest.raises(TreeMismatchError, match="other"):
        ckptcore.load_checkpointables(place + "/c", into={"z": first, "train": train})
    assert train["model"].bias.tolist() == before["model"].bias.tolist() and train["other"] == 0
    assert first["model"].bias.tolist() == Linear(0).bias.tolist()


def test_an_error_of_an_object_in_a_tree_is_raised(place: str) -> None:
    class Broken(Counter):
        def set_state(self, state: dict[str, Any]) -> None:
            raise KeyError("position")

    ckptcore.save_checkpointables(place + "/c", {"train": {"data": Counter(3)}})
    with pytest.raises(TreeMismatchError, match="train: data, a .*Broken, refused its stored state"):
        ckptcore.load_checkpointables(place + "/c", into={"train": {"data": Broken()}})


@pytest.mark.parametrize("save", [ckptcore.save, ckptcore.save_checkpointables])
def test_an_object_that_writes_files_is_refused_in_a_tree(save: Any, place: str) -> None:
    with pytest.raises(
        UnsupportedLeafError, match=r"it is a .*Files, .*under a separate name with save_checkpointables"
    ):
        save(place + "/c", {"train": {"it": Files({"a": b"1"})}})


def test_an_object_that_writes_files_is_refused_as_a_tree(place: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"under a separate name with save_checkpointables"):
        ckptcore.save(place + "/c", Files({"a": b"1"}))
