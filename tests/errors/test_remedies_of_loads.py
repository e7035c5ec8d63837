"""Remedies in errors about loads. Each test follows the text of a remedy."""

from __future__ import annotations

import collections
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_testing import ThreadJob
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value
from safetensors.numpy import save_file

import ckptcore
from ckptcore import PLACEHOLDER, ArrayShard, Checkpointer, CheckpointReader, Context, PerProcess, ShardedArray
from ckptcore.context import IOOptions, JobOptions
from ckptcore.errors import (
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    NotMappableError,
    TargetUndefinedError,
    TreeMismatchError,
)
from ckptcore.model import Box
from ckptcore.protocols import Coordinator
from tests.errors.refusals import ONE, TWO

BOTH = {"model": {"w": ONE}, "data": {"position": 3}}


class Tokens:
    """An object that writes its own files."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def save(self, directory: Path) -> None:
        """Write the text."""
        (directory / "text").write_text(self.text)

    def load(self, directory: Path) -> None:
        """Read the text."""
        self.text = (directory / "text").read_text()


class Counter:
    """An object with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the count."""
        self.count = state["count"]


# --- several checkpointables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [True, False])
def test_a_member_that_was_replaced(several: bool, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", BOTH)
    if several:
        ckptcore.save_checkpointables(tmp_path / "another", {"model": {"w": TWO}})
        source, advice = tmp_path / "another" / "model", "Load the others by their names, load another checkpoint"
    else:
        ckptcore.save(tmp_path / "another", {"w": TWO})
        source, advice = tmp_path / "another", "load it by its own location, and the others by their names"
    shutil.rmtree(tmp_path / "c" / "model")
    shutil.copytree(source, tmp_path / "c" / "model")
    refused(lambda: ckptcore.load_checkpointables(tmp_path / "c"), f"{tmp_path}/c/model", advice)
    assert same_value(ckptcore.load_checkpointables(tmp_path / "c", ["data"]), {"data": BOTH["data"]})
    assert same_value(ckptcore.load(source if several else tmp_path / "c" / "model"), {"w": TWO})


def test_a_composite_that_lost_its_root(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", BOTH)
    root = (tmp_path / "c" / "checkpoint.json").read_bytes()
    (tmp_path / "c" / "checkpoint.json").unlink()
    advice = (
        "restore that from a copy, load another checkpoint, or copy one of its directories elsewhere to load it alone"
    )
    for load in (ckptcore.load, ckptcore.load_checkpointables):
        refused(lambda load=load: load(tmp_path / "c"), advice, error=CorruptCheckpointError)  # type: ignore[misc]  # the lambda has a default
    shutil.copytree(tmp_path / "c" / "model", tmp_path / "model")
    assert same_value(ckptcore.load(tmp_path / "model"), {"w": ONE})
    (tmp_path / "c" / "checkpoint.json").write_bytes(root)
    assert same_value(ckptcore.load_checkpointables(tmp_path / "c"), BOTH)


def test_a_step_without_some_names(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_checkpointables(1, BOTH)
    ckptcore.delete(tmp_path / "run" / "1" / "model")
    with CheckpointReader(tmp_path / "run") as reader:
        advice = "Request the names that you need, or load this checkpoint explicitly to get the remaining objects"
        refused(reader.load_checkpointables, "model was saved, and deleted or lost later", advice)
        assert same_value(reader.load_checkpointables(abstract=["data"]), {"data": BOTH["data"]})
        assert same_value(reader.load_checkpointables(1), {"data": BOTH["data"]})


def test_metadata_of_several_checkpointables(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", BOTH)
    metadata = ckptcore.metadata(tmp_path / "c")
    text = refused(lambda: metadata.tree, "use metadata.checkpointables[", error=CompositeCheckpointError)
    member = eval(text.partition("use ")[2], {"metadata": metadata})
    assert member.nbytes in (ONE.nbytes, 0)


def test_requests_for_objects_without_a_target(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"counter": Counter(3), "tokens": Tokens("abc")})
    load: Any = ckptcore.load_checkpointables
    refused(lambda: load(tmp_path / "c", into={"counter": None}), "pass the object to restore", error=TypeError)
    assert load(tmp_path / "c", abstract=["counter"]) == {"counter": {"count": 3}}
    counter = Counter()
    refused(
        lambda: load(tmp_path / "c", {"counter": counter}),
        "pass it as into={'counter': ...} to restore it in place, or ckptcore.abstract(...) of it to load its state",
        error=TypeError,
    )
    assert load(tmp_path / "c", {"counter": ckptcore.abstract(counter)}) == {"counter": {"count": 3}}
    load(tmp_path / "c", into={"counter": counter})
    assert counter.count == 3
    advice = "pass an object like the one that was saved, or None to load the files as bytes"
    refused(lambda: load(tmp_path / "c", into={"tokens": counter}), advice, error=TreeMismatchError)
    refused(
        lambda: load(tmp_path / "c", {"tokens": ckptcore.LoadAs(None, select=ckptcore.select.names("a"))}),
        "request it without LoadAs, which is only for trees",
        error=TreeMismatchError,
    )
    assert load(tmp_path / "c", {"tokens": None}) == {"tokens": {"text": b"abc"}}
    tokens = Tokens()
    load(tmp_path / "c", into={"tokens": tokens})
    assert tokens.text == "abc"


def test_files_of_an_object_as_a_tree(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"tokens": Tokens("abc")})
    refused(
        lambda: ckptcore.load(tmp_path / "c" / "tokens", {"text": ""}),
        "use load_checkpointables with an object like the one that was saved, or load() without other arguments",
        error=TreeMismatchError,
    )
    assert ckptcore.load(tmp_path / "c" / "tokens") == {"text": b"abc"}
    tokens = Tokens()
    ckptcore.load_checkpointables(tmp_path / "c", into={"tokens": tokens})
    assert tokens.text == "abc"


# --- jobs of another size ---------------------------------------------------------------------------------------------


def _context(coordinator: Coordinator) -> Context:
    return Context(job=JobOptions(coordinator=coordinator))


def test_states_of_two_processes_in_one(tmp_path: Path) -> None:
    def save(coordinator: Coordinator) -> None:
        state = {"w": ONE, "position": PerProcess(coordinator.rank)}
        ckptcore.save(tmp_path / "c", state, context=_context(coordinator))
        data = {"data": PerProcess({"position": coordinator.rank})}
        ckptcore.save_checkpointables(tmp_path / "several", data, context=_context(coordinator))

    ThreadJob(2).run(save)
    text = refused(
        lambda: ckptcore.load(tmp_path / "c", {"w": ONE, "position": PerProcess(7)}),
        "Request the values that this process needs as a dict by rank, such as {0: ...}",
        error=TreeMismatchError,
    )
    assert "a separate value for each of 2 processes, but this job has 1" in text
    loaded = ckptcore.load(tmp_path / "c", {"w": ONE, "position": {0: 7, 1: 7}})
    assert same_value(loaded, {"w": ONE, "position": {0: 0, 1: 1}})
    text = refused(
        lambda: ckptcore.load_checkpointables(tmp_path / "several"),
        "Load the state that each process needs by its own location, such as ",
        error=TreeMismatchError,
    )
    location = text.partition("such as ")[2].split()[0].rstrip(".,;")
    assert ckptcore.load(location) == {"position": 0}


# --- bases ------------------------------------------------------------------------------------------------------------


def test_a_base_in_another_directory(tmp_path: Path) -> None:
    """The save and the load raise the same error."""
    ckptcore.save(tmp_path / "a" / "base", {"w": ONE, "v": ONE})
    update = ckptcore.Update(base=tmp_path / "a" / "base")
    location = tmp_path / "b" / "update"
    text = refused(lambda: ckptcore.save(location, {"w": TWO}, strategy=update), error=InvalidLocationError)
    code = text.partition("pass context=")[2].partition(", or ask the author for a copy by ckptcore.copy")[0]
    context = eval(code, {"Context": Context, "IOOptions": IOOptions})
    ckptcore.save(location, {"w": TWO}, strategy=update, context=context)
    assert refused(lambda: ckptcore.load(location), error=InvalidLocationError) == text
    expected = {"w": TWO, "v": ONE}
    assert same_value(ckptcore.load(location, context=context), expected)
    ckptcore.copy(location, tmp_path / "copy", context=context)
    assert same_value(ckptcore.load(tmp_path / "copy"), expected)


def test_a_base_in_another_storage(tmp_path: Path) -> None:
    base = f"memory://{uuid.uuid4().hex}/base"
    ckptcore.save(base, {"w": ONE, "v": TWO})
    state = {"w": ONE * 2, "v": TWO}
    refused(
        lambda: ckptcore.save(tmp_path / "update", state, strategy=ckptcore.Update(base=base)),
        "save to the same storage, or save the whole state with ckptcore.save",
        error=InvalidLocationError,
    )
    ckptcore.save(tmp_path / "update", state)
    ckptcore.save(f"{base}2", state, strategy=ckptcore.Update(base=base))
    for location in (tmp_path / "update", f"{base}2"):
        assert same_value(ckptcore.load(location), state)


def test_a_base_that_was_removed(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "base", {"w": ONE, "v": TWO})
    state = {"w": ONE * 2, "v": TWO}
    ckptcore.save(tmp_path / "update", {"w": ONE * 2}, strategy=ckptcore.Update(base=tmp_path / "base"))
    ckptcore.copy(tmp_path / "update", tmp_path / "copy")
    (tmp_path / "base").rename(tmp_path / "moved")
    advice = "restore it, or load another checkpoint. Copies by ckptcore.copy need no base"
    refused(lambda: ckptcore.load(tmp_path / "update"), "which was deleted", advice, error=CorruptCheckpointError)
    assert same_value(ckptcore.load(tmp_path / "copy"), state)
    (tmp_path / "moved").rename(tmp_path / "base")
    assert same_value(ckptcore.load(tmp_path / "update"), state)


# --- targets and arrays -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "reason"), [("memory", "not on a local disk"), ("file", "is compressed or in several pieces")]
)
def test_arrays_that_cannot_be_mapped(scheme: str, reason: str, tmp_path: Path) -> None:
    location = f"{tmp_path}/b" if scheme == "file" else f"memory://{uuid.uuid4().hex}/c"

    def save(coordinator: Coordinator) -> None:
        rank = coordinator.rank
        half = ShardedArray((6,), "float64", [ArrayShard(Box((3 * rank,), (3 * rank + 3,)), (ONE, TWO)[rank])])
        ckptcore.save(location, {"w": half}, layout="dcp", context=_context(coordinator))

    ThreadJob(2).run(save)
    with ckptcore.open(location) as checkpoint:
        array: Any = checkpoint["w"]
        advice = "Read it by indexing, such as array[...], or convert the checkpoint to safetensors on a local disk"
        refused(array.memory_map, "w of ", reason, advice, error=NotMappableError)
        assert same_value(array[...], np.arange(6.0))
    ckptcore.copy(location, tmp_path / "c", layout="safetensors")
    with ckptcore.open(tmp_path / "c") as checkpoint:
        assert checkpoint["w"].memory_map().tolist() == list(range(6))


def test_a_load_that_stops_in_the_middle(tmp_path: Path) -> None:
    for name in ("c", "sound"):
        ckptcore.save(tmp_path / name, {"a": np.arange(1000.0), "w": np.arange(1 << 18) + 0.5}, layout="zarr3")
    file = next(path for path in (tmp_path / "c").rglob("*") if path.is_file() and "/w/c/" in str(path))
    file.write_bytes(bytes(file.stat().st_size))
    target = {"a": np.zeros(1000), "w": np.zeros(1 << 18)}
    context = Context(memory=ckptcore.context.MemoryOptions(load_bytes=1))
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", target, context=context),
        "which now has a mix of old and loaded data. Before using it, load a sound checkpoint into it, or create it "
        "again",
        error=TargetUndefinedError,
    )
    again = {"a": np.zeros(1000), "w": np.zeros(1 << 18)}
    for whole in (target, again):
        ckptcore.load_into(tmp_path / "sound", whole)
        assert same_value(whole, {"a": np.arange(1000.0), "w": np.arange(1 << 18) + 0.5})


def test_a_selection_that_selects_nothing(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"params": {"w": ONE}, "opt_state": TWO})
    load: Any = ckptcore.load
    text = refused(lambda: load(tmp_path / "c", select="params"), "such as ", error=TypeError)
    for code in text.partition("such as ")[2].split(" or "):
        selection = eval(code, {"select": ckptcore.select})
        assert same_value(load(tmp_path / "c", select=selection), {"params": {"w": ONE}})
    nothing = ckptcore.select.glob("param")
    refused(
        lambda: load(tmp_path / "c", select=nothing),
        "Correct the selection: metadata(location).abstract is the stored tree. Nothing was read",
        error=TreeMismatchError,
    )
    name = next(iter(ckptcore.metadata(tmp_path / "c").abstract))
    assert same_value(
        load(tmp_path / "c", select=ckptcore.select.names(name)), {name: {"params": {"w": ONE}}.get(name, TWO)}
    )


class Refuses(Counter):
    """A counter that refuses counts below its limit."""

    def __init__(self, count: int = 0, limit: int = 0) -> None:
        super().__init__(count)
        self.limit = limit

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the count, or refuse it."""
        if state["count"] < self.limit:
            raise ValueError(f"expected at least {self.limit}")
        self.count = state["count"]


def test_an_object_that_refuses_its_stored_state(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"counter": Refuses(3), "w": ONE})
    target: dict[str, Any] = {"counter": Refuses(limit=9), "w": ONE * 0}
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", target),
        "counter, a ",
        "Refuses, refused its stored state: ValueError: expected at least 9",
        "or put PLACEHOLDER in its place to load everything else",
        error=TreeMismatchError,
    )
    assert same_value(target["w"], ONE * 0)
    others = {**target, "counter": PLACEHOLDER}
    ckptcore.load_into(tmp_path / "c", others)
    assert same_value(others["w"], ONE)


class Outer:
    """An object that creates an inner object at its first step."""

    def __init__(self) -> None:
        self.count = 1
        self.inner: Counter | None = None

    def step(self) -> None:
        """Create the inner object, if it does not exist."""
        self.inner = self.inner or Counter(7)

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the inner object."""
        return {"count": self.count} | ({} if self.inner is None else {"inner": self.inner})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the count. The load restores the inner object."""
        self.count = state["count"]


def test_an_inner_object_that_does_not_exist_yet(tmp_path: Path) -> None:
    stored = Outer()
    stored.step()
    ckptcore.save(tmp_path / "c", {"outer": stored})
    target = Outer()
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", {"outer": target}),
        "which the target does not have there yet. Create that object before the load, for example by the step of the "
        "program that creates it. Nothing was changed",
        error=TreeMismatchError,
    )
    target.step()
    assert target.inner is not None
    target.inner.count = 0
    ckptcore.load_into(tmp_path / "c", {"outer": target})
    assert target.inner.count == 7


def test_a_load_that_restores_only_some_objects(tmp_path: Path) -> None:
    for name in ("c", "sound"):
        ckptcore.save_checkpointables(tmp_path / name, {"a": {"w": ONE}, "b": {"v": np.arange(3000.0)}})
    file = tmp_path / "c" / "b" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    for follow in ("load", "create"):
        into = {"a": {"w": ONE * 0}, "b": {"v": np.zeros(3000)}}
        refused(
            lambda into=into: ckptcore.load_checkpointables(tmp_path / "c", into=into),  # type: ignore[misc]  # the lambda has a default
            "loading 'b' failed after a had been restored",
            "Before using them, load a sound checkpoint into all of them, or create them again",
            error=TargetUndefinedError,
        )
        if follow == "create":
            into = {"a": {"w": ONE * 0}, "b": {"v": np.zeros(3000)}}
        ckptcore.load_checkpointables(tmp_path / "sound", into=into)
        assert same_value(into, {"a": {"w": ONE}, "b": {"v": np.arange(3000.0)}})


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    for name, value in (("one", ONE), ("two", TWO)):
        torch.save({"w": torch.from_numpy(value)}, tmp_path / f"{name}.bin")
    text = refused(lambda: ckptcore.load(tmp_path), "Load each of them by its own location, such as ")
    assert ckptcore.load(text.rpartition("such as ")[2])["w"].tolist() in (ONE.tolist(), TWO.tolist())


def test_members_that_no_plugin_reads(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", BOTH)
    shutil.rmtree(tmp_path / "c" / "model")
    text = refused(lambda: ckptcore.load_checkpointables(tmp_path / "c", ["model"]), "Existing names: ")
    names = text.partition("Existing names: ")[2].split(", ")
    assert same_value(ckptcore.load_checkpointables(tmp_path / "c", names), {"data": BOTH["data"]})


class OneWay(Counter):
    """A counter that accepts only higher counts, so a load cannot restore its old state."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set a higher count."""
        if state["count"] < self.count:
            raise ValueError("expected a higher count")
        self.count = state["count"]


def test_an_old_state_that_cannot_be_restored(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"first": OneWay(3), "second": Refuses(3), "w": ONE})
    target: dict[str, Any] = {"first": OneWay(), "second": Refuses(limit=9), "w": ONE * 0}
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", target),
        "The load stopped after it changed first",
        "whose old state cannot be put back: create new objects before loading again. Nothing else was changed",
        error=TargetUndefinedError,
    )
    assert same_value(target["w"], ONE * 0)
    target |= {"first": OneWay(), "second": Refuses()}
    ckptcore.load_into(tmp_path / "c", target)
    assert (target["first"].count, target["second"].count) == (3, 3)
    assert same_value(target["w"], ONE)


def test_a_damaged_model_of_a_pipeline(tmp_path: Path) -> None:
    for name, value in (("vae", ONE), ("unet", TWO)):
        (tmp_path / name).mkdir()
        save_file({"w": value}, tmp_path / name / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "Pipeline", "vae": ["diffusers", "Autoencoder"], "unet": ["diffusers", "UNet"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError) as caught:
        ckptcore.load_checkpointables(tmp_path)
    (note,) = caught.value.__notes__
    assert note.startswith("to load the others without it, pass their names to load_checkpointables: ")
    names = note.partition(": ")[2].split(", ")
    assert same_value(ckptcore.load_checkpointables(tmp_path, names), {"unet": {"w": TWO}})


@pytest.mark.parametrize("like", [collections.deque([1]), {1}])
def test_another_kind_of_collection(like: Any, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"x": {"a": 1, "b": ONE}})
    refused(lambda: ckptcore.load(tmp_path / "c", {"x": like}), "request what is stored", error=TreeMismatchError)
    stored = ckptcore.metadata(tmp_path / "c").abstract
    assert same_value(ckptcore.load(tmp_path / "c", stored), {"x": {"a": 1, "b": ONE}})
