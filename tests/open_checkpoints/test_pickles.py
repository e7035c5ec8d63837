"""Pickles and copies of open checkpoints, readers, options, policies and errors."""

from __future__ import annotations

import copy
import inspect
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_dcp.layouts import DcpEntries, DcpLayout
from ckptcore_tools.step_statistics import StepStatisticsObserver

import ckptcore
from ckptcore import Checkpointer, CheckpointReader, Context, errors, policies, select
from ckptcore.context import IOOptions, JobOptions, SingleProcess
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, TreeMismatchError
from ckptcore.events import Event
from ckptcore.model import Box
from ckptcore.runtime import runtime_of

WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
}
TREE = {"a": {"w": np.arange(6.0).reshape(2, 3), "n": 3}, "list": [np.ones(2), {"deep": np.zeros(1)}], "name": "x"}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return WAYS[request.param]


# --- open checkpoints


def test_an_open_checkpoint_is_copied(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    ckptcore.save(tmp_path / "x", TREE)
    with ckptcore.open(tmp_path / "x") as checkpoint:
        checkpoint["a/w"][0], checkpoint.metadata  # the pickle does not contain elements that were read
        copied = way(checkpoint)
    assert not copied.is_closed
    assert list(copied) == ["a", "list", "name"]
    assert copied["a/w"][1].tolist() == [3, 4, 5]
    assert copied["list", 1, "deep"][...].tolist() == [0]
    assert copied["name"] == "x"
    assert copied.metadata.digest == ckptcore.metadata(tmp_path / "x").digest
    assert len(list(copied.iter_boxes())) == 3
    assert way(copied)["a", "n"] == 3  # a copy of a copy
    copied.close()
    assert way(copied).is_closed


@pytest.mark.parametrize("path", ["a", "list", ("list", 1), ()])
def test_a_container_of_an_open_checkpoint_is_copied(tmp_path: Path, way: Callable[[Any], Any], path: Any) -> None:
    ckptcore.save(tmp_path / "x", TREE)
    with ckptcore.open(tmp_path / "x") as checkpoint:
        expected = checkpoint[path]
        copied = way(expected)
        assert copied.path == expected.path
        assert repr(copied) == repr(expected) or path == ()
        for name in expected:
            assert np.array_equal(copied[name], expected[name]) or hasattr(copied[name], "keys")


def test_arrays_and_checkpoints_of_one_array_are_copied(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    ckptcore.save(tmp_path / "x", TREE)
    ckptcore.save(tmp_path / "one", np.arange(4))
    with ckptcore.open(tmp_path / "x") as checkpoint, ckptcore.open(tmp_path / "one") as array_checkpoint:
        array = checkpoint["a/w"]
        array[:]
        copied = way(array)
        assert (copied.path, copied.shape, copied.dtype) == (array.path, array.shape, array.dtype)
        assert np.array_equal(copied, array)
        assert way(array_checkpoint)[()][2] == 2


def test_a_pickle_has_the_location_and_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ckptcore.save("x", {f"w{number}": np.ones(1000) for number in range(100)})
    with ckptcore.open("x") as checkpoint:
        checkpoint["w3"][:]
        pickled = pickle.dumps([checkpoint, checkpoint["w3"]])
    assert len(pickled) < 2000
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again, array = pickle.loads(pickled)
    assert again["w3"][0] == array[1] == 1
    again.close()
    with pytest.raises(ValueError, match="closed"):
        array[0]  # both still share one open checkpoint


def test_another_save_at_the_location_is_an_error(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    ckptcore.save(tmp_path / "x", TREE)
    with ckptcore.open(tmp_path / "x") as checkpoint:
        checkpoint["a/w"][0]
        copied, used = way(checkpoint), way(checkpoint)
        array = way(checkpoint["a/w"])
        assert used["a/w"][0, 1] == 1
        ckptcore.save(tmp_path / "x", TREE, overwrite=True)
        for read in (lambda: copied["a/w"], lambda: len(copied), lambda: array[0]):
            with pytest.raises(CheckpointNotFoundError, match="x was replaced or deleted after it was opened"):
                read()
        assert used["a/w"][0, 2] == 2  # this copy was opened before the replacement
        shutil.rmtree(tmp_path / "x")
        with pytest.raises(CheckpointNotFoundError):
            way(checkpoint)["a/w"]


def test_an_open_checkpoint_of_other_software_is_copied(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    ckptcore.save(tmp_path / "x", {"w": np.ones(3)})
    shutil.copy(next((tmp_path / "x").glob("*.safetensors")), tmp_path / "plain.safetensors")
    with ckptcore.open(tmp_path / "plain.safetensors") as checkpoint:
        name = next(iter(checkpoint))
        assert np.array_equal(way(checkpoint)[name], checkpoint[name])


def test_new_files_next_to_checkpoint_of_other_software_are_ignored(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    """An example is the log of a running training."""
    ckptcore.save(tmp_path / "x", {"w": np.ones(3)}, layout="dcp")
    (tmp_path / "x" / "checkpoint.json").unlink()
    with ckptcore.open(tmp_path / "x") as checkpoint:
        copied, gone = way(checkpoint), way(checkpoint)
        (tmp_path / "x" / "train.log").write_text("step 1")
        assert copied["w"][0] == 1
        next((tmp_path / "x").glob("*.distcp")).rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointNotFoundError, match="was replaced or deleted"):
            gone["w"]


def test_observers_and_jobs_are_not_pickled(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    """A worker reads alone, and cannot use locks or connections of this process."""
    seen: list[Any] = []
    lock = threading.Lock()

    class Job(SingleProcess):
        """A job with something that cannot be pickled."""

        def __init__(self) -> None:
            self.connection = lock

    observers: list[Callable[[Event], None]] = [lambda event: seen.append((event, lock)), StepStatisticsObserver()]
    context = Context(
        job=JobOptions(coordinator=Job(), reads="broadcast"), observers=observers, io=IOOptions(threads=1)
    )
    with Checkpointer(tmp_path / "run", context=context) as checkpointer:
        checkpointer.save_blocking(1, {"w": np.ones(3)})
    with ckptcore.open(tmp_path / "run" / "1", context=context) as checkpoint:
        assert way(checkpoint)["w"][0] == way(checkpoint["w"])[0] == 1
    reader = way(CheckpointReader(tmp_path / "run", context=context))
    assert reader.steps == (1,)
    assert reader.load()["w"].tolist() == [1, 1, 1]


class OtherContext(Context):
    """A context of another class."""


def test_subclasses_keep_their_types() -> None:
    assert type(pickle.loads(pickle.dumps(OtherContext(durability="none")))) is OtherContext
    assert type(OtherContext(observers=[print]).of_another_process()) is OtherContext
    layout = DcpEntries(items=frozenset({"a"})).with_own_names("tag")
    assert type(pickle.loads(pickle.dumps(layout))) is DcpEntries
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_every_registered_layout_is_copied(way: Callable[[Any], Any]) -> None:
    layouts = runtime_of(Context()).registry.layouts()
    assert {"dcp", "pickle", "safetensors"} <= {layout.name for layout in layouts}
    assert [way(layout) for layout in layouts] == list(layouts)


@pytest.mark.parametrize("layout", [ckptcore.SafetensorsLayout, DcpLayout])
def test_the_tag_of_a_layout_is_not_a_positional_argument(layout: Any) -> None:
    assert list(inspect.signature(layout).parameters.values())[-1].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(TypeError, match="positional"):
        layout(*range(len(inspect.signature(layout).parameters)))


# --- other objects


def test_used_contexts_and_readers_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[Any], Any]
) -> None:
    context = Context(durability="none", storage={"s3": {"secret": "x"}})
    with Checkpointer(tmp_path / "run", context=context) as checkpointer:
        checkpointer.save_blocking(3, {"w": np.ones(2)})
    copied = way(context)
    assert (copied.durability, copied.storage) == ("none", context.storage)
    ckptcore.load(tmp_path / "run" / "3", context=copied)
    monkeypatch.chdir(tmp_path)
    relative = CheckpointReader("run", context=context)
    monkeypatch.chdir("/")
    reader = way(relative)
    assert reader.steps == (3,)
    assert list(reader.load()["w"]) == [1, 1]
    ckptcore.load(tmp_path / "run" / "3")
    assert way(ckptcore.context.default_context()) is ckptcore.context.default_context()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_objects_of_one_process_are_refused(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(TypeError, match="one object owns the directory.*CheckpointReader"):
            copied(checkpointer)
        handle = ckptcore.save_async(tmp_path / "x", {"w": 1})
        with pytest.raises(TypeError, match=r"the save to .*x: wait for its result\(\)"):
            copied(handle)
        handle.result()
        with pytest.raises(TypeError, match=r"a load: wait for its result\(\)"):
            copied(ckptcore.load_async(tmp_path / "x"))


def examples(directory: Path) -> dict[str, Any]:
    """Return an object for each public name that creates or returns one, other than those of the tests above."""
    ckptcore.save(directory / "x", TREE)
    shard = ckptcore.ArrayShard(Box.whole((2,)), np.ones(2))
    return {
        "abstract": ckptcore.abstract(TREE),
        "metadata": ckptcore.metadata(directory / "x"),
        "verify": ckptcore.verify(directory / "x"),
        "SafetensorsLayout": ckptcore.SafetensorsLayout(max_file_bytes=100),
        "ArrayShard": shard,
        "ShardedArray": ckptcore.ShardedArray((2,), "float64", [shard]),
        "LoadAs": ckptcore.LoadAs({"w": 1}, matching=ckptcore.Matching(missing="keep")),
        "Matching": ckptcore.Matching(unexpected="ignore"),
        "AbstractArray": ckptcore.AbstractArray((3,), "float32"),
        "PlainSave": ckptcore.PlainSave(),
        "PLACEHOLDER": ckptcore.PLACEHOLDER,
        "PerProcess": ckptcore.PerProcess(3),
        "CheckpointError": CheckpointError("text"),
        "select": select.names("a") & ~select.glob("b*"),
        "plan": ckptcore.plan(TREE),
        "partial": ckptcore.partial(directory / "partial"),
    }


ELSEWHERE = {"Context", "CheckpointReader", "Checkpointer", "open", "save_async", "load_async", "load", "load_into"}
WITHOUT_OBJECTS = {
    "check",
    "check_checkpointables",
    "delete",
    "hookimpl",
    "load_checkpointables",
    "save",
    "save_checkpointables",
    "save_checkpointables_async",
    "StatefulCheckpointable",
}


def test_every_public_object_is_copied(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    made = examples(tmp_path)
    assert set(vars(ckptcore)["__all__"]) <= made.keys() | ELSEWHERE | WITHOUT_OBJECTS
    for name, value in made.items():
        assert type(way(value)) is type(value), name


def test_policies_are_copied(way: Callable[[Any], Any]) -> None:
    for policy in (
        policies.LatestN(3),
        policies.BestN(2, "loss", "min"),
        policies.EveryNSteps(4),
        policies.PreserveAll(),
    ):
        assert way(policy) == policy


ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_keep_their_text_attributes_and_notes(kind: type[CheckpointError], way: Callable[[Any], Any]) -> None:
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[name] = 7
        elif name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
            arguments.append(["one", "two"] if arguments else "the message")
    error = kind(*arguments, **keywords)
    error.add_note("a note")
    if isinstance(error, OSError):
        error.errno = 5
    copied = way(error)
    assert type(copied) is kind
    assert (str(copied), copied.args, copied.__dict__) == (str(error), error.args, error.__dict__)
    assert getattr(copied, "errno", None) == getattr(error, "errno", None)


def test_raised_errors_are_copied(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    ckptcore.save(tmp_path / "x", TREE)
    with pytest.raises(TreeMismatchError) as mismatch:
        ckptcore.load(tmp_path / "x", {"other": 1})
    assert way(mismatch.value).differences == mismatch.value.differences
    file = next((tmp_path / "x").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8] + b"12345678")
    with pytest.raises(CorruptCheckpointError) as damaged:
        ckptcore.load(tmp_path / "x")
    assert (way(damaged.value).key, way(damaged.value).start) == (damaged.value.key, damaged.value.start)
