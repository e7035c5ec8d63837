"""Remedies in error texts of the core: each is followed as the text says, and what was saved must come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_transforms import Rename

import ckptcore
from ckptcore import PLACEHOLDER, CheckpointReader, Matching, PerProcess
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    TargetUndefinedError,
    TreeMismatchError,
    UnsupportedLeafError,
)

ONE, TWO = np.arange(3.0), np.arange(3.0, 6.0)


def refused(call: Callable[[], object], *texts: str, error: type[Exception] = CheckpointError) -> str:
    """Return the message of an error, which has some texts."""
    with pytest.raises(error) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)
    return str(caught.value)


def same(loaded: Any, saved: Any) -> bool:
    """Compare trees with their types, and arrays by their elements."""
    if isinstance(saved, np.ndarray):
        return isinstance(loaded, np.ndarray) and loaded.dtype == saved.dtype and np.array_equal(loaded, saved)
    if isinstance(saved, dict):
        return list(loaded) == list(saved) and all(same(loaded[key], value) for key, value in saved.items())
    if isinstance(saved, list | tuple):
        return type(loaded) is type(saved) and len(loaded) == len(saved) and all(map(same, loaded, saved))
    return type(loaded) is type(saved) and bool(loaded == saved)


# --- trees that differ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ({1: ONE, 2: TWO}, {"1": ONE * 0, "2": TWO * 0}),
        ({"1": ONE, "2": TWO}, {1: ONE * 0, 2: TWO * 0}),
        ([ONE, TWO], {"0": ONE * 0, "1": TWO * 0}),
        ({"0": ONE, "1": TWO}, [ONE * 0, TWO * 0]),
        ({"a.b": ONE, "a.c": TWO}, {"a": {"b": ONE * 0, "c": TWO * 0}}),
    ],
)
def test_keys_with_the_same_text(tmp_path: Path, stored: Any, asked: Any) -> None:
    """Not `missing` and `unexpected`, with which nothing would be loaded."""
    ckptcore.save(tmp_path / "c", stored)
    text = refused(lambda: ckptcore.load_into(tmp_path / "c", asked), 'Matching(keys="text")', error=TreeMismatchError)
    assert "keep" not in text
    ckptcore.load_into(tmp_path / "c", asked, matching=Matching(keys="text"))
    values = asked.values() if isinstance(asked, dict) else asked
    values = [inner for value in values for inner in (value.values() if isinstance(value, dict) else [value])]
    assert same(list(values), [ONE, TWO])


@pytest.mark.parametrize(("stored", "asked"), [([ONE, TWO], ONE * 0), (ONE, [ONE * 0, TWO * 0]), ({"a": ONE}, TWO)])
def test_a_container_in_the_place_of_a_leaf(tmp_path: Path, stored: Any, asked: Any) -> None:
    """No option is proposed, because each would drop the container."""
    ckptcore.save(tmp_path / "c", {"v": stored, "w": ONE})
    text = refused(lambda: ckptcore.load(tmp_path / "c", {"v": asked, "w": TWO}), "v: kind:", "PLACEHOLDER")
    assert "matching=" not in text
    assert same(ckptcore.load(tmp_path / "c", ckptcore.metadata(tmp_path / "c").abstract), {"v": stored, "w": ONE})
    assert same(ckptcore.load(tmp_path / "c", {"v": PLACEHOLDER, "w": TWO})["w"], ONE)
    present: dict[str, Any] = {"v": PLACEHOLDER, "w": TWO * 0}
    ckptcore.load_into(tmp_path / "c", present)
    assert same(present["w"], ONE)


def test_leaves_with_other_names(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"model": {"weight_g": ONE, "weight_v": TWO}})
    asked = {"model": {"original0": ONE * 0, "original1": TWO * 0}}
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", asked),
        "missing leaves keep their present values, unexpected leaves are not loaded",
        "transforms=[Rename(stored, requested)]",
    )
    names = {"model/weight_g": "model/original0", "model/weight_v": "model/original1"}
    ckptcore.load_into(tmp_path / "c", asked, transforms=[Rename(stored, to) for stored, to in names.items()])
    assert same(asked, {"model": {"original0": ONE, "original1": TWO}})


def test_missing_and_unexpected(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE, "old": TWO})
    asked = {"w": TWO * 0, "new": TWO}
    remedy = 'matching=Matching(missing="keep", unexpected="ignore")'
    refused(lambda: ckptcore.load_into(tmp_path / "c", asked), remedy)
    ckptcore.load_into(tmp_path / "c", asked, matching=Matching(missing="keep", unexpected="ignore"))
    assert same(asked, {"w": ONE, "new": TWO})
    abstract = {"w": ONE, "new": ckptcore.AbstractArray((2,), "int8")}
    ignore = Matching(missing="keep", unexpected="ignore")
    refused(lambda: ckptcore.load(tmp_path / "c", abstract, matching=ignore), 'missing="placeholder"')
    loaded = ckptcore.load(tmp_path / "c", abstract, matching=Matching(missing="placeholder", unexpected="ignore"))
    assert same(loaded["w"], ONE)
    assert loaded["new"] is PLACEHOLDER


@pytest.mark.parametrize(
    ("stored", "asked", "remedy", "loss", "expected"),
    [
        (np.arange(4.0), np.zeros(6), '{"pad"}', "not stored become pad_value", [0, 1, 2, 3, 0, 0]),
        (np.arange(4.0), np.zeros(2), '{"truncate"}', "outside of the requested shape are not loaded", [0, 1]),
        (np.arange(4.0), np.zeros((2, 2)), '{"reshape"}', "", [[0, 1], [2, 3]]),
        (np.array([1.5]), np.zeros(1, "int8"), '"truncating"', "fractions are dropped", [1]),
        (np.array([0.1]), np.zeros(1, "f4"), '"narrowing"', "numbers are rounded", [np.float32(0.1)]),
        (np.array([1], "f4"), np.zeros(1), '"safe"', "", [1]),
    ],
)
def test_arrays_of_another_form(
    tmp_path: Path, stored: Any, asked: Any, remedy: str, loss: str, expected: list[Any]
) -> None:
    """The text says what is lost."""
    ckptcore.save(tmp_path / "c", {"w": stored})
    text = refused(lambda: ckptcore.load(tmp_path / "c", {"w": asked}), f"={remedy})", loss)
    code = text.rpartition("matching=")[2].partition(": ")[0]
    loaded = ckptcore.load(tmp_path / "c", {"w": asked}, matching=eval(code, {"Matching": Matching}))
    assert loaded["w"].tolist() == expected
    assert loss or text.endswith(code)


@pytest.mark.parametrize(("stored", "asked"), [(np.arange(4.0), np.zeros(0)), (np.zeros(0), np.ones(3))])
def test_an_empty_array_is_no_part_of_another(tmp_path: Path, stored: Any, asked: Any) -> None:
    """Neither `truncate`, which would drop the whole array, nor `pad`, which would replace all elements."""
    ckptcore.save(tmp_path / "c", {"w": stored})
    assert "matching=" not in refused(lambda: ckptcore.load(tmp_path / "c", {"w": asked}), "w: shape:")
    assert same(ckptcore.load(tmp_path / "c", ckptcore.metadata(tmp_path / "c").abstract), {"w": stored})


def test_lists_and_tuples(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"v": [ONE, TWO]})
    asked = {"v": (ONE * 0, TWO * 0)}
    refused(lambda: ckptcore.load(tmp_path / "c", asked), 'Matching(sequences="either")')
    assert same(ckptcore.load(tmp_path / "c", asked, matching=Matching(sequences="either")), {"v": (ONE, TWO)})


# --- targets ----------------------------------------------------------------------------------------------------------


def test_memory_that_is_shared(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": ONE, "b": TWO})
    both = np.zeros(3)
    refused(lambda: ckptcore.load_into(tmp_path / "c", {"a": both, "b": both}), "Use load(), or a target without")
    assert both.tolist() == [0, 0, 0]
    assert same(ckptcore.load(tmp_path / "c", {"a": both, "b": both}), {"a": ONE, "b": TWO})
    apart = {"a": both, "b": both.copy()}
    assert same(ckptcore.load_into(tmp_path / "c", apart), {"a": ONE, "b": TWO})


def test_a_leaf_that_cannot_be_filled(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", (3, ONE))
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", (0, ONE * 0)), "Use the result of load(), or put the leaf into a"
    )
    assert same(ckptcore.load(tmp_path / "c", (0, ONE * 0)), (3, ONE))
    ckptcore.save(tmp_path / "d", ({"step": 3}, ONE))
    target = ({"step": 0}, ONE * 0)
    ckptcore.load_into(tmp_path / "d", target)
    assert same(target, ({"step": 3}, ONE))


def test_placeholders_in_a_target(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    target = {"w": ONE * 0, "new": TWO}
    as_placeholder = Matching(missing="placeholder")
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", target, matching=as_placeholder), 'missing="keep"', error=ValueError
    )
    assert same(ckptcore.load_into(tmp_path / "c", target, matching=Matching(missing="keep")), {"w": ONE, "new": TWO})


class Picky:
    """An object that accepts only a state of its own size."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size)

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return {"values": self.values, "size": len(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept values of the same size."""
        if state["size"] != len(self.values):
            raise ValueError(f"expected {len(self.values)} values")
        self.values = state["values"]


def test_an_object_that_refuses_its_state(tmp_path: Path) -> None:
    saved = Picky(3)
    saved.values += 1
    ckptcore.save(tmp_path / "c", {"object": saved, "w": ONE})
    target: dict[str, Any] = {"object": Picky(2), "w": ONE * 0}
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", target),
        "Create it with the options that it had when it was saved",
        "PLACEHOLDER",
    )
    assert same(target["w"], ONE * 0)
    created: dict[str, Any] = {"object": Picky(3), "w": ONE * 0}
    ckptcore.load_into(tmp_path / "c", created)
    assert created["object"].values.tolist() == [1, 1, 1]
    ckptcore.load_into(tmp_path / "c", {**target, "object": PLACEHOLDER})
    assert same(target["w"], ONE)


def test_a_target_with_a_mix_of_states(tmp_path: Path) -> None:
    """A damaged checkpoint never loads again, so the text names another one."""
    for name, factor in (("old", 1.0), ("damaged", 2.0)):
        ckptcore.save(tmp_path / name, {"w": np.full(2**19, factor), "v": np.full(2**19, factor)})
    (file,) = [path for path in (tmp_path / "damaged").rglob("*.safetensors")]
    content = bytearray(file.read_bytes())
    content[-8:] = bytes(8)
    file.write_bytes(content)
    target = {"w": np.zeros(2**19), "v": np.zeros(2**19)}
    for _ in range(2):
        refused(
            lambda: ckptcore.load_into(tmp_path / "damaged", target),
            "load a sound checkpoint into it",
            error=TargetUndefinedError,
        )
    ckptcore.load_into(tmp_path / "old", target)
    assert (target["w"] == 1).all()
    assert (target["v"] == 1).all()


# --- locations --------------------------------------------------------------------------------------------------------


def test_several_checkpointables(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": {"w": ONE}, "data": {"position": 3}})
    text = refused(lambda: ckptcore.load(tmp_path / "c"), "load_checkpointables", error=CompositeCheckpointError)
    assert same(ckptcore.load(text.rpartition("such as ")[2]), {"w": ONE})
    assert same(ckptcore.load_checkpointables(tmp_path / "c")["model"], {"w": ONE})
    refused(lambda: ckptcore.metadata(tmp_path / "c").layout, "metadata.checkpointables['model'].layout")
    assert ckptcore.metadata(tmp_path / "c").checkpointables["model"].layout == "safetensors"
    ckptcore.save(tmp_path / "one", {"w": ONE})
    refused(lambda: ckptcore.load_checkpointables(tmp_path / "one"), "one tree and has no names: use load")
    assert same(ckptcore.load(tmp_path / "one"), {"w": ONE})


def test_a_directory_of_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        ckptcore.save(tmp_path / f"step_{step}", {"step": step})
    text = refused(lambda: ckptcore.load(tmp_path), "load a step by its own location", error=CheckpointNotFoundError)
    named, code = text.rpartition("such as ")[2].split(", or the newest with ")
    assert ckptcore.load(named) == {"step": 2}
    assert eval(code, {"CheckpointReader": CheckpointReader}) == {"step": 2}


def test_wrong_arguments(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": {"w": ONE}})
    ckptcore.save(tmp_path / "one", {"w": ONE})
    load: Any = ckptcore.load_checkpointables
    refused(lambda: load(tmp_path / "c", "model"), "['model']", error=TypeError)
    assert same(load(tmp_path / "c", ["model"]), {"model": {"w": ONE}})
    refused(lambda: load(tmp_path / "c", into={"model": None}), "abstract=['model']", error=TypeError)
    refused(lambda: load(tmp_path / "c", ["mode"]), "Existing names: model")
    into = {"model": {"w": ONE * 0}}
    assert same(load(tmp_path / "c", into=into), {"model": {"w": ONE}})
    refused(lambda: load(tmp_path / "c", {"model": {"w": ONE}}, into=into), "pass it in one of them", error=ValueError)
    state = {"model": {"object": Picky(3)}}
    ckptcore.save_checkpointables(tmp_path / "objects", state)
    refused(lambda: load(tmp_path / "objects", state), "pass it as into={'model': ...}", error=TypeError)
    assert load(tmp_path / "objects", into=state)["model"]["object"] is state["model"]["object"]
    selected: Any = "w"
    refused(lambda: ckptcore.load(tmp_path / "one", select=selected), "select.names", error=TypeError)
    assert same(ckptcore.load(tmp_path / "one", select=ckptcore.select.names("w")), {"w": ONE})
    refused(lambda: ckptcore.load(tmp_path / "one", select=ckptcore.select.names("x")), "metadata(location).abstract")


# --- leaves that cannot be saved --------------------------------------------------------------------------------------


def test_masked_arrays(tmp_path: Path) -> None:
    masked = np.ma.masked_array([1, 2], [False, True])
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": masked}), "save its .data and .mask", error=UnsupportedLeafError
    )
    ckptcore.save(tmp_path / "c", {"data": masked.data, "mask": masked.mask})
    again = np.ma.masked_array(**ckptcore.load(tmp_path / "c"))
    assert again.tolist() == masked.tolist() == [1, None]
    assert again.data.tolist() == [1, 2]


def test_keys_of_another_type(tmp_path: Path) -> None:
    refused(lambda: ckptcore.save(tmp_path / "c", {("a", 1): ONE}), "keys are int or str: convert it")
    ckptcore.save(tmp_path / "c", {str(("a", 1)): ONE})
    assert same(ckptcore.load(tmp_path / "c"), {str(("a", 1)): ONE})


def test_abstract_arrays(tmp_path: Path) -> None:
    abstract = ckptcore.AbstractArray((3,), "float64")
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": abstract}), "pass the array itself")
    ckptcore.save(tmp_path / "c", {"w": ONE})
    assert same(ckptcore.load(tmp_path / "c", {"w": abstract}), {"w": ONE})


def test_metadata_and_metrics(tmp_path: Path) -> None:
    save: Any = ckptcore.save
    for wrong in ({1: 2}, {"a": float("nan")}, {"a": {1, 2}}):
        refused(lambda wrong=wrong: save(tmp_path / "c", {}, metadata=wrong), "must be JSON", error=Exception)  # type: ignore[misc]  # of a default
    save(tmp_path / "c", {}, metadata={"1": 2, "a": [1, 2]})
    assert ckptcore.metadata(tmp_path / "c").custom == {"1": 2, "a": [1, 2]}


def test_a_state_of_each_process_within_another(tmp_path: Path) -> None:
    nested = {"data": PerProcess({"position": PerProcess(3)})}
    refused(lambda: ckptcore.save_checkpointables(tmp_path / "c", nested), "remove this inner PerProcess")
    ckptcore.save_checkpointables(tmp_path / "c", {"data": PerProcess({"position": 3})})
    assert ckptcore.load_checkpointables(tmp_path / "c") == {"data": {"position": 3}}
