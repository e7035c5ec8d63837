"""Remedies in errors of the core: each test follows the text, and must get the saved values back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value
from ckptcore_transforms import Rename

import ckptcore
from ckptcore import PLACEHOLDER, Checkpointer, CheckpointReader, Matching, PerProcess
from ckptcore.errors import (
    CheckpointNotFoundError,
    CompositeCheckpointError,
    TargetUndefinedError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from tests.errors.refusals import ONE, TWO

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
    """The error does not propose `missing` and `unexpected`, because the load would then restore nothing."""
    ckptcore.save(tmp_path / "c", stored)
    text = refused(lambda: ckptcore.load_into(tmp_path / "c", asked), 'Matching(keys="text")', error=TreeMismatchError)
    assert "keep" not in text
    ckptcore.load_into(tmp_path / "c", asked, matching=Matching(keys="text"))
    values = asked.values() if isinstance(asked, dict) else asked
    values = [inner for value in values for inner in (value.values() if isinstance(value, dict) else [value])]
    assert same_value(list(values), [ONE, TWO])


@pytest.mark.parametrize(("stored", "asked"), [([ONE, TWO], ONE * 0), (ONE, [ONE * 0, TWO * 0]), ({"a": ONE}, TWO)])
def test_a_container_in_place_of_a_leaf(tmp_path: Path, stored: Any, asked: Any) -> None:
    """No option is proposed, because each would drop the container."""
    ckptcore.save(tmp_path / "c", {"v": stored, "w": ONE})
    text = refused(lambda: ckptcore.load(tmp_path / "c", {"v": asked, "w": TWO}), "v: kind:", "PLACEHOLDER")
    assert "matching=" not in text
    assert same_value(
        ckptcore.load(tmp_path / "c", ckptcore.metadata(tmp_path / "c").abstract), {"v": stored, "w": ONE}
    )
    assert same_value(ckptcore.load(tmp_path / "c", {"v": PLACEHOLDER, "w": TWO})["w"], ONE)
    present: dict[str, Any] = {"v": PLACEHOLDER, "w": TWO * 0}
    ckptcore.load_into(tmp_path / "c", present)
    assert same_value(present["w"], ONE)


def test_leaves_with_other_names(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"model": {"weight_g": ONE, "weight_v": TWO}})
    asked = {"model": {"original0": ONE * 0, "original1": TWO * 0}}
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", asked),
        "No requested leaf is stored",
        "transforms=[Rename(stored, requested)]",
    )
    names = {"model/weight_g": "model/original0", "model/weight_v": "model/original1"}
    ckptcore.load_into(tmp_path / "c", asked, transforms=[Rename(stored, to) for stored, to in names.items()])
    assert same_value(asked, {"model": {"original0": ONE, "original1": TWO}})


def test_missing_and_unexpected_leaves(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE, "old": TWO})
    asked = {"w": TWO * 0, "new": TWO}
    remedy = 'matching=Matching(missing="keep", unexpected="ignore")'
    refused(lambda: ckptcore.load_into(tmp_path / "c", asked), remedy)
    ckptcore.load_into(tmp_path / "c", asked, matching=Matching(missing="keep", unexpected="ignore"))
    assert same_value(asked, {"w": ONE, "new": TWO})
    abstract = {"w": ONE, "new": ckptcore.AbstractArray((2,), "int8")}
    ignore = Matching(missing="keep", unexpected="ignore")
    refused(lambda: ckptcore.load(tmp_path / "c", abstract, matching=ignore), 'missing="placeholder"')
    loaded = ckptcore.load(tmp_path / "c", abstract, matching=Matching(missing="placeholder", unexpected="ignore"))
    assert same_value(loaded["w"], ONE)
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
    """The text names the losses."""
    ckptcore.save(tmp_path / "c", {"w": stored})
    text = refused(lambda: ckptcore.load(tmp_path / "c", {"w": asked}), f"={remedy})", loss)
    code = text.rpartition("matching=")[2].partition(": ")[0]
    loaded = ckptcore.load(tmp_path / "c", {"w": asked}, matching=eval(code, {"Matching": Matching}))
    assert loaded["w"].tolist() == expected
    assert loss or text.endswith(code)


@pytest.mark.parametrize(("stored", "asked"), [(np.arange(4.0), np.zeros(0)), (np.zeros(0), np.ones(3))])
def test_an_empty_array_is_not_a_part_of_another(tmp_path: Path, stored: Any, asked: Any) -> None:
    """The error proposes neither `truncate`, which would drop all elements, nor `pad`, which would replace them."""
    ckptcore.save(tmp_path / "c", {"w": stored})
    assert "matching=" not in refused(lambda: ckptcore.load(tmp_path / "c", {"w": asked}), "w: shape:")
    assert same_value(ckptcore.load(tmp_path / "c", ckptcore.metadata(tmp_path / "c").abstract), {"w": stored})


def test_a_tuple_in_place_of_a_list(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"v": [ONE, TWO]})
    asked = {"v": (ONE * 0, TWO * 0)}
    refused(lambda: ckptcore.load(tmp_path / "c", asked), 'Matching(sequences="either")')
    assert same_value(ckptcore.load(tmp_path / "c", asked, matching=Matching(sequences="either")), {"v": (ONE, TWO)})


# --- targets ----------------------------------------------------------------------------------------------------------


def test_a_target_with_shared_memory(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": ONE, "b": TWO})
    both = np.zeros(3)
    refused(lambda: ckptcore.load_into(tmp_path / "c", {"a": both, "b": both}), "Use load(), or a target without")
    assert both.tolist() == [0, 0, 0]
    assert same_value(ckptcore.load(tmp_path / "c", {"a": both, "b": both}), {"a": ONE, "b": TWO})
    apart = {"a": both, "b": both.copy()}
    assert same_value(ckptcore.load_into(tmp_path / "c", apart), {"a": ONE, "b": TWO})


def test_a_leaf_that_cannot_be_filled(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", (3, ONE))
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", (0, ONE * 0)), "Use the result of load(), or put the leaf into a"
    )
    assert same_value(ckptcore.load(tmp_path / "c", (0, ONE * 0)), (3, ONE))
    ckptcore.save(tmp_path / "d", ({"step": 3}, ONE))
    target = ({"step": 0}, ONE * 0)
    ckptcore.load_into(tmp_path / "d", target)
    assert same_value(target, ({"step": 3}, ONE))


def test_placeholders_in_a_target(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    target = {"w": ONE * 0, "new": TWO}
    as_placeholder = Matching(missing="placeholder")
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", target, matching=as_placeholder), 'missing="keep"', error=ValueError
    )
    assert same_value(
        ckptcore.load_into(tmp_path / "c", target, matching=Matching(missing="keep")), {"w": ONE, "new": TWO}
    )


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
    assert same_value(target["w"], ONE * 0)
    created: dict[str, Any] = {"object": Picky(3), "w": ONE * 0}
    ckptcore.load_into(tmp_path / "c", created)
    assert created["object"].values.tolist() == [1, 1, 1]
    ckptcore.load_into(tmp_path / "c", {**target, "object": PLACEHOLDER})
    assert same_value(target["w"], ONE)


def test_a_target_with_a_mix_of_states(tmp_path: Path) -> None:
    """The text says to load a sound checkpoint, because a damaged checkpoint never loads."""
    for name, factor in (("old", 1.0), ("damaged", 2.0)):
        ckptcore.save(tmp_path / name, {"w": np.full(2**19, factor), "v": np.full(2**19, factor)})
    (file,) = list((tmp_path / "damaged").rglob("*.safetensors"))
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


def test_functions_for_one_tree_and_for_several_checkpointables(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": {"w": ONE}, "data": {"position": 3}})
    text = refused(lambda: ckptcore.load(tmp_path / "c"), "load_checkpointables", error=CompositeCheckpointError)
    assert same_value(ckptcore.load(text.rpartition("such as ")[2]), {"w": ONE})
    assert same_value(ckptcore.load_checkpointables(tmp_path / "c")["model"], {"w": ONE})
    refused(lambda: ckptcore.metadata(tmp_path / "c").layout, "metadata.checkpointables['model'].layout")
    assert ckptcore.metadata(tmp_path / "c").checkpointables["model"].layout == "safetensors"
    ckptcore.save(tmp_path / "one", {"w": ONE})
    refused(lambda: ckptcore.load_checkpointables(tmp_path / "one"), "one tree and has no names: use load")
    assert same_value(ckptcore.load(tmp_path / "one"), {"w": ONE})


def test_a_directory_of_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        ckptcore.save(tmp_path / f"step_{step}", {"step": step})
    text = refused(lambda: ckptcore.load(tmp_path), "load a step by its own location", error=CheckpointNotFoundError)
    named, code = text.rpartition("such as ")[2].split(", or the newest with ")
    assert ckptcore.load(named) == {"step": 2}
    assert eval(code, {"CheckpointReader": CheckpointReader}) == {"step": 2}


def test_wrong_arguments_of_loads(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": {"w": ONE}})
    ckptcore.save(tmp_path / "one", {"w": ONE})
    load: Any = ckptcore.load_checkpointables
    refused(lambda: load(tmp_path / "c", "model"), "['model']", error=TypeError)
    assert same_value(load(tmp_path / "c", ["model"]), {"model": {"w": ONE}})
    refused(lambda: load(tmp_path / "c", into={"model": None}), "abstract=['model']", error=TypeError)
    refused(lambda: load(tmp_path / "c", ["mode"]), "Existing names: model")
    into = {"model": {"w": ONE * 0}}
    assert same_value(load(tmp_path / "c", into=into), {"model": {"w": ONE}})
    refused(lambda: load(tmp_path / "c", {"model": {"w": ONE}}, into=into), "pass it in one of them", error=ValueError)
    state = {"model": {"object": Picky(3)}}
    ckptcore.save_checkpointables(tmp_path / "objects", state)
    refused(lambda: load(tmp_path / "objects", state), "pass it as into={'model': ...}", error=TypeError)
    assert load(tmp_path / "objects", into=state)["model"]["object"] is state["model"]["object"]
    selected: Any = "w"
    refused(lambda: ckptcore.load(tmp_path / "one", select=selected), "select.names", error=TypeError)
    assert same_value(ckptcore.load(tmp_path / "one", select=ckptcore.select.names("w")), {"w": ONE})
    refused(lambda: ckptcore.load(tmp_path / "one", select=ckptcore.select.names("x")), "metadata(location).abstract")


# --- leaves that cannot be saved --------------------------------------------------------------------------------------


def test_masked_arrays_are_saved_as_data_and_mask(tmp_path: Path) -> None:
    masked = np.ma.masked_array([1, 2], [False, True])
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": masked}), "save its .data and .mask", error=UnsupportedLeafError
    )
    ckptcore.save(tmp_path / "c", {"data": masked.data, "mask": masked.mask})
    again = np.ma.masked_array(**ckptcore.load(tmp_path / "c"))
    assert again.tolist() == masked.tolist() == [1, None]
    assert again.data.tolist() == [1, 2]


@pytest.mark.parametrize("kind", [np.asarray, lambda value: value.view(np.recarray)])
def test_structured_arrays_are_saved_as_their_fields(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    value = kind(np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", "f8")]))
    text = refused(lambda: ckptcore.save(tmp_path / "c", {"w": value}))
    if "np.asarray(value)" in text:
        text = refused(lambda: ckptcore.save(tmp_path / "c", {"w": np.asarray(value)}))
    assert "save a dict of its fields, such as value['a']" in text
    ckptcore.save(tmp_path / "c", {name: np.asarray(value[name]) for name in value.dtype.names})
    assert same_value(ckptcore.load(tmp_path / "c"), {"a": np.array([1, 3], "i4"), "b": np.array([2.5, 4.5])})


def test_arrays_of_objects_are_saved_as_lists(tmp_path: Path) -> None:
    value = np.array([None, "a", [1]], object)
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": value}), "save value.tolist()")
    ckptcore.save(tmp_path / "c", {"w": value.tolist()})
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": [None, "a", [1]]})


def test_dtypes_that_differ_between_platforms(tmp_path: Path) -> None:
    value = np.array([1, 2], np.longdouble) / 3
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": value}), "save value.view('uint8'), which keeps all bits")
    ckptcore.save(tmp_path / "c", {"w": value.view("uint8")})
    assert (ckptcore.load(tmp_path / "c")["w"].view(np.longdouble) == value).all()


# --- runs and destinations --------------------------------------------------------------------------------------------


def test_the_only_step_of_a_run_cannot_be_deleted(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_blocking(1, {"w": ONE})
        refused(lambda: checkpointer.delete(1) or checkpointer.wait(), "save another one first")  # type: ignore[func-returns-value]  # None
        checkpointer.save_blocking(2, {"w": TWO})
        checkpointer.delete(1)
        checkpointer.wait()
        assert list(checkpointer.steps) == [2]
        assert same_value(checkpointer.load(), {"w": TWO})


def test_a_closed_checkpointer_cannot_save(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.close()
    refused(lambda: checkpointer.save(1, {"w": ONE}), "is closed; create a new one")
    with Checkpointer(tmp_path / "run") as another:
        another.save_blocking(1, {"w": ONE})
        refused(lambda: another.save_blocking(1, {"w": TWO}), "pass overwrite=True to replace it")
        another.save_blocking(1, {"w": TWO}, overwrite=True)
        assert same_value(another.load(), {"w": TWO})


def test_a_directory_that_another_checkpointer_uses(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as owner:
        owner.save_blocking(1, {"w": ONE})
        refused(lambda: Checkpointer(tmp_path / "run"), "Close that Checkpointer", "a CheckpointReader can read here")
        with CheckpointReader(tmp_path / "run") as reader:
            assert same_value(reader.load(), {"w": ONE})
    with Checkpointer(tmp_path / "run") as another:
        assert same_value(another.load(), {"w": ONE})


def test_a_checkpoint_in_place_of_a_run(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "run" / "1", {"w": ONE})
    refused(lambda: Checkpointer(tmp_path / "run" / "1"), "pass the directory that contains it")
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert same_value(checkpointer.load(), {"w": ONE})


def test_locations_that_already_have_files(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": TWO}), "save to another location, or pass overwrite=True")
    ckptcore.save(tmp_path / "c", {"w": TWO}, overwrite=True)
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": TWO})
    refused(lambda: ckptcore.save(tmp_path / "c" / "inner", {"w": ONE}), "save outside it")
    (tmp_path / "file").write_text("mine")
    refused(
        lambda: ckptcore.save(tmp_path / "file", {}, overwrite=True), "save to another location, or remove the file"
    )
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "mine").write_text("mine")
    refused(lambda: ckptcore.save(tmp_path / "directory", {}, overwrite=True), "save to another location, or remove")
    for name in ("file", "directory/mine"):
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    for name in ("file", "directory", "other"):
        ckptcore.save(tmp_path / name, {"w": ONE})
        assert same_value(ckptcore.load(tmp_path / name), {"w": ONE})


def test_urls_that_lost_a_slash() -> None:
    text = refused(
        lambda: ckptcore.save(Path("memory://remedies/c"), {"w": ONE}), "give 'memory://remedies/c' as a str"
    )
    ckptcore.save("memory://remedies/c", {"w": ONE})
    assert same_value(ckptcore.load("memory://remedies/c"), {"w": ONE})
    assert "memory:/remedies" in text
    refused(lambda: ckptcore.save("memory://remedies", {}), "give a directory below it")


def test_a_base_is_deleted_after_its_updates(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "base", {"w": ONE, "v": TWO})
    ckptcore.save(tmp_path / "update", {"w": ONE * 2}, strategy=ckptcore.Update(base=tmp_path / "base"))
    expected = ckptcore.load(tmp_path / "update")
    refused(lambda: ckptcore.delete(tmp_path / "base"), "delete it first. A copy by ckptcore.copy needs no base")
    ckptcore.copy(tmp_path / "update", tmp_path / "copy")
    ckptcore.delete(tmp_path / "update")
    ckptcore.delete(tmp_path / "base")
    assert same_value(ckptcore.load(tmp_path / "copy"), expected)


def test_keys_of_another_type(tmp_path: Path) -> None:
    refused(lambda: ckptcore.save(tmp_path / "c", {("a", 1.5): ONE}), "bool, str or tuples of them: convert it")
    ckptcore.save(tmp_path / "c", {("a", "1.5"): ONE})
    assert same_value(ckptcore.load(tmp_path / "c"), {("a", "1.5"): ONE})


def test_an_abstract_array_in_place_of_an_array(tmp_path: Path) -> None:
    abstract = ckptcore.AbstractArray((3,), "float64")
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": abstract}), "pass the array itself")
    ckptcore.save(tmp_path / "c", {"w": ONE})
    assert same_value(ckptcore.load(tmp_path / "c", {"w": abstract}), {"w": ONE})


def test_metadata_that_is_not_json(tmp_path: Path) -> None:
    save: Any = ckptcore.save
    for wrong in ({1: 2}, {"a": float("nan")}, {"a": {1, 2}}):
        refused(lambda wrong=wrong: save(tmp_path / "c", {}, metadata=wrong), "must be JSON", error=Exception)  # type: ignore[misc]  # the lambda has a default
    save(tmp_path / "c", {}, metadata={"1": 2, "a": [1, 2]})
    assert ckptcore.metadata(tmp_path / "c").custom == {"1": 2, "a": [1, 2]}


def test_a_per_process_value_within_another(tmp_path: Path) -> None:
    nested = {"data": PerProcess({"position": PerProcess(3)})}
    refused(lambda: ckptcore.save_checkpointables(tmp_path / "c", nested), "remove this inner PerProcess")
    ckptcore.save_checkpointables(tmp_path / "c", {"data": PerProcess({"position": 3})})
    assert ckptcore.load_checkpointables(tmp_path / "c") == {"data": {"position": 3}}


# --- open checkpoints -------------------------------------------------------------------------------------------------


def test_reads_from_open_checkpoints(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    with ckptcore.open(tmp_path / "c") as checkpoint:
        array: Any = checkpoint["w"]
        refused(lambda: np.array(array, copy=False), "do not pass copy=False, or use memory_map()", error=ValueError)
        assert np.array(array).tolist() == array.memory_map().tolist() == ONE.tolist()
        text = refused(lambda: array[[0, 2]], "and index the result", error=IndexError)
        assert "array[2:9]" in text
        assert array[0:3][[0, 2]].tolist() == [0, 2]
    refused(lambda: array[:], "open it again, or read before the end of its with block", error=ValueError)
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert checkpoint["w"][:].tolist() == ONE.tolist()
    ckptcore.save(tmp_path / "c", {"w": TWO}, overwrite=True)
    with ckptcore.open(tmp_path / "c") as checkpoint:
        ckptcore.save(tmp_path / "c", {"w": ONE}, overwrite=True)
        refused(lambda: checkpoint["w"][:], "was replaced or deleted after it was opened: open it again")
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert checkpoint["w"][:].tolist() == ONE.tolist()


def test_options_with_wrong_values(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    matching: Any = Matching
    text = refused(lambda: matching(cast="yes"), "expected one of", error=ValueError)
    for choice in eval(f"({text.rpartition('expected one of ')[2]})"):
        assert same_value(ckptcore.load(tmp_path / "c", {"w": TWO}, matching=matching(cast=choice)), {"w": ONE})
    text = refused(lambda: matching(shapes="pad"), "expected a set of", error=ValueError)
    choices = set(eval(f"({text.rpartition('expected a set of ')[2]})"))
    assert same_value(ckptcore.load(tmp_path / "c", {"w": TWO}, matching=matching(shapes=choices)), {"w": ONE})
    load: Any = ckptcore.load
    refused(lambda: load(tmp_path / "c", matching="safe"), 'such as Matching(cast="safe")', error=TypeError)
    refused(lambda: load(tmp_path / "c", transforms=Rename("w", "v")), "transforms=[Rename(...)", error=TypeError)
    assert same_value(load(tmp_path / "c", transforms=[Rename("w", "v")]), {"v": ONE})
