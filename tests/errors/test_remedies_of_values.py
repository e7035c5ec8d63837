"""Remedies in errors about values and objects: each test follows the text of a remedy."""

from __future__ import annotations

import asyncio
import collections
import datetime
import sys
import zoneinfo
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_orbax import SavesToDirectoryAsyncHandler
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import PLACEHOLDER, Context
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.context import PluginOptions
from ckptcore.errors import (
    PluginError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from tests.errors.refusals import ONE, TWO


def saved(tmp_path: Path, value: Any, name: str = "c") -> Any:
    """Save a value, and return what a load returns."""
    ckptcore.save(tmp_path / name, value)
    return ckptcore.load(tmp_path / name)


# --- values that cannot be saved --------------------------------------------------------------------------------------


def test_a_placeholder_cannot_be_saved(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE, "v": TWO})
    partly = ckptcore.load(tmp_path / "c", {"w": ONE, "v": PLACEHOLDER})
    refused(
        lambda: ckptcore.save(tmp_path / "d", partly),
        "v is a ",
        "load the leaf, or remove it from the tree, and the checkpoint will not have it",
        error=UnsupportedLeafError,
    )
    whole = {**partly, "v": ckptcore.load(tmp_path / "c", {"w": PLACEHOLDER, "v": TWO})["v"]}
    assert same_value(saved(tmp_path, whole, "d"), {"w": ONE, "v": TWO})
    del partly["v"]
    assert same_value(saved(tmp_path, partly, "e"), {"w": ONE})


def test_an_iterator_is_created_again(tmp_path: Path) -> None:
    numbers = iter(np.random.default_rng(7).integers(0, 100, 10))
    before = [next(numbers) for _ in range(3)]
    advice = "save what makes it again, such as a seed and a count"
    refused(lambda: ckptcore.save(tmp_path / "c", {"data": numbers}), advice, error=UnsupportedLeafError)
    loaded = saved(tmp_path, {"data": {"seed": 7, "count": len(before)}})["data"]
    again = iter(np.random.default_rng(loaded["seed"]).integers(0, 100, 10))
    for _ in range(loaded["count"]):
        next(again)
    assert list(again) == list(numbers)


class OnlyGives:
    """An object that returns its state, but cannot restore it."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}


class Takes(OnlyGives):
    """The class with the missing method."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position."""
        self.position = state["position"]


def test_an_object_without_a_setter(tmp_path: Path) -> None:
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"data": OnlyGives(3)}),
        "add load_state_dict to its class, or save its state_dict()",
        error=UnsupportedLeafError,
    )
    assert saved(tmp_path, {"data": OnlyGives(3).state_dict()}) == {"data": {"position": 3}}
    ckptcore.save(tmp_path / "d", {"data": Takes(4)})
    target = {"data": Takes()}
    ckptcore.load_into(tmp_path / "d", target)
    assert target["data"].position == 4


@pytest.mark.parametrize("code", [print, lambda: 1, Takes])
def test_code_is_removed_from_the_tree(code: object, tmp_path: Path) -> None:
    state = {"w": ONE, "function": code}
    refused(lambda: ckptcore.save(tmp_path / "c", state), "function is a ", "remove it from the tree")
    del state["function"]
    assert same_value(saved(tmp_path, state), {"w": ONE})


class Directory:
    """An object that writes its own files."""

    def __init__(self, text: str = "", directories: tuple[str, ...] = (), file: str = "") -> None:
        self.text, self.directories, self.file = text, directories, file

    def save(self, directory: Path) -> None:
        """Write the text and the directories. If `file` is set, write a file with this name into each directory."""
        (directory / "text").write_text(self.text)
        for name in self.directories:
            (directory / name).mkdir(parents=True)
            if self.file:
                (directory / name / self.file).write_text(name[:1])

    def load(self, directory: Path) -> None:
        """Read the text and the directories."""
        self.text = (directory / "text").read_text()
        self.directories = tuple(sorted(path.name for path in directory.iterdir() if path.is_dir()))


def test_an_object_that_writes_files(tmp_path: Path) -> None:
    state = {"w": ONE, "tokens": Directory("abc")}
    advice = "save it under a separate name with save_checkpointables"
    refused(lambda: ckptcore.save(tmp_path / "c", state), "tokens is a ", advice, error=UnsupportedLeafError)
    ckptcore.save_checkpointables(tmp_path / "c", {"state": {"w": ONE}, "tokens": Directory("abc")})
    target = Directory()
    loaded = ckptcore.load_checkpointables(tmp_path / "c", ["state"], into={"tokens": target})
    assert same_value(loaded["state"], {"w": ONE})
    assert target.text == "abc"


@pytest.mark.parametrize(
    ("directories", "problem", "fewer"),
    [
        (
            tuple([f"{'a/' * 199}{number}" for number in range(656)]),
            "their paths have 131200 directories, where 131072 are",
            ("1", "2"),
        ),
        (("a/" * 200 + "b",), "one of them is 201 directories deep, where 200 are", ("a",)),
    ],
)
def test_empty_directories_of_an_object(
    directories: tuple[str, ...], problem: str, fewer: tuple[str, ...], tmp_path: Path
) -> None:
    def save(value: Directory) -> None:
        context = Context(durability="none")
        ckptcore.save_checkpointables(tmp_path / "c", {"tokens": value}, overwrite=True, context=context)

    refused(lambda: save(Directory("a", directories)), problem, "write fewer, or a file into each")
    for followed in (Directory("a", fewer), Directory("a", directories, file="kept")):
        save(followed)
        target = Directory()
        ckptcore.load_checkpointables(tmp_path / "c", into={"tokens": target})
        assert target.text == "a"
        assert set(target.directories) == {name.partition("/")[0] for name in followed.directories}
        assert ckptcore.verify(tmp_path / "c").ok


class Tasks:
    """An object that writes in a task. It awaits the task in `save`, in its second phase, or not at all."""

    def __init__(self, finish: str, text: str = "") -> None:
        self.finish, self.text = finish, text

    async def save(self, directory: Any) -> Any:
        """Begin to write."""
        task = asyncio.create_task(self._write(await directory.await_creation()))
        await asyncio.sleep(0)
        if self.finish == "await":
            await task
        return self._rest(task) if self.finish == "rest" else None

    async def _write(self, directory: Path) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        (directory / "text").write_text(self.text)

    async def _rest(self, task: asyncio.Task[None]) -> None:
        await task

    async def load(self, directory: Any) -> Any:
        """Read the text."""
        self.text = (Path(directory) / "text").read_text()


def test_tasks_without_an_await(tmp_path: Path) -> None:
    handlers = Context(plugins=PluginOptions(handlers={Tasks: SavesToDirectoryAsyncHandler()}))

    def save(finish: str) -> None:
        ckptcore.save_checkpointables(tmp_path / finish, {"data": Tasks(finish, "written")}, context=handlers)

    refused(
        lambda: save("leave"),
        "Tasks._write; their results would be lost",
        "Await them, or return from the first phase a coroutine that awaits them",
        error=PluginError,
    )
    for finish in ("await", "rest"):
        save(finish)
        target = Tasks(finish)
        ckptcore.load_checkpointables(tmp_path / finish, into={"data": target}, context=handlers)
        assert target.text == "written"


class Model:
    """A model that is compiled before it has an optimizer, like models of Keras."""

    def __init__(self, *weights: Any) -> None:
        self.weights = list(weights)
        self.optimizer: str | None = None

    def compile(self, optimizer: str) -> None:
        """Set the optimizer."""
        self.optimizer = optimizer

    def get_weights(self) -> list[Any]:
        """Return the weights."""
        return self.weights

    def set_weights(self, weights: list[Any]) -> None:
        """Replace the weights."""
        self.weights = weights

    def get_state_tree(self) -> dict[str, Any]:
        """Return the weights by number."""
        return {str(number): weight for number, weight in enumerate(self.weights)}

    def set_state_tree(self, tree: dict[str, Any]) -> None:
        """Replace the weights."""
        self.weights = list(tree.values())


def test_a_model_without_an_optimizer(tmp_path: Path) -> None:
    model = Model(ONE, TWO)
    refused(
        lambda: ckptcore.save(tmp_path / "c", model),
        "compile it first, or save the list get_weights(), which set_weights takes",
        error=UnsupportedLeafError,
    )
    ckptcore.save(tmp_path / "c", model.get_weights())
    other = Model(ONE * 0, TWO * 0)
    other.set_weights(ckptcore.load(tmp_path / "c", other.get_weights()))
    assert same_value(other.weights, [ONE, TWO])
    model.compile("adam")
    ckptcore.save(tmp_path / "d", model)
    other = Model(ONE * 0, TWO * 0)
    other.compile("adam")
    ckptcore.load_into(tmp_path / "d", other)
    assert same_value(other.weights, [ONE, TWO])


class Zone(datetime.tzinfo):
    """A time zone of a program."""

    def utcoffset(self, moment: datetime.datetime | None) -> datetime.timedelta:
        """Return two hours."""
        return datetime.timedelta(hours=2)

    def tzname(self, moment: datetime.datetime | None) -> str:
        """Return a name that only this program knows."""
        return "here"

    def dst(self, moment: datetime.datetime | None) -> datetime.timedelta:
        """Return no daylight saving time."""
        return datetime.timedelta()


class Marked(np.ndarray):
    """An array with additional data."""

    mark = "abc"


MOMENT = datetime.datetime(2024, 1, 2, 3, tzinfo=Zone())
TIME = datetime.time(3, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
ORDER = np.dtype(np.int32).newbyteorder(">" if sys.byteorder == "little" else "<")

REFUSED: dict[str, tuple[Any, str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "set": ({(1, 2), Path("a")}, "save a list of its elements", list, set),
    "frozenset": (frozenset({b"a", 1}), "save list(value)", list, frozenset),
    "datetime": (
        MOMENT, "save value.astimezone(datetime.timezone.utc)",
        lambda value: value.astimezone(datetime.UTC), lambda loaded: loaded,
    ),
    "time": (
        TIME, "save the time and the name of its zone", lambda value: [value.replace(tzinfo=None), value.tzinfo.key],
        lambda loaded: loaded[0].replace(tzinfo=zoneinfo.ZoneInfo(loaded[1])),
    ),
    "dtype": (ORDER, "is saved as text: str(dtype.str)", lambda value: str(value.str), np.dtype),
    "keys": ({(1, 2.5): 3}, "convert it, or save list(value.items())", lambda value: list(value.items()), dict),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_are_saved_in_another_form(name: str, tmp_path: Path) -> None:
    value, advice, follow, restore = REFUSED[name]
    refused(lambda: ckptcore.save(tmp_path / "c", {"x": value}), "x", advice)
    assert not (tmp_path / "c").exists()
    form = {"x": follow(value)}
    ckptcore.save(tmp_path / "c", form)
    assert restore(ckptcore.load(tmp_path / "c", form)["x"]) == value


def test_subclasses_of_arrays_with_additional_data(tmp_path: Path) -> None:
    value = ONE.view(Marked)
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"x": value}),
        "save np.asarray(value) and its other data, or pass a handler for it in "
        "Context(plugins=PluginOptions(handlers=...))",
        error=UnsupportedLeafError,
    )
    assert same_value(saved(tmp_path, {"x": np.asarray(value), "mark": value.mark}), {"x": ONE, "mark": "abc"})

    class Handler(HostArrayHandler):
        """A handler of `Marked` that a user writes."""

        def describe(self, leaf: Any) -> Any:
            """Describe the elements."""
            return super().describe(np.asarray(leaf))

        def shards(self, leaf: Any, rank: int, size: int) -> Any:
            """Return the shards of the elements."""
            return super().shards(np.asarray(leaf), rank, size)

    context = Context(plugins=PluginOptions(handlers={Marked: Handler()}))
    ckptcore.save(tmp_path / "d", {"x": value}, context=context)
    assert same_value(ckptcore.load(tmp_path / "d"), {"x": ONE})


@pytest.mark.parametrize("other", ["PCG64", "PCG64DXSM", "SFC64", "MT19937"])
def test_generators_of_another_kind(other: str, tmp_path: Path) -> None:
    """The error proposes no option of the load, because it would mix the states of two kinds of generators."""
    stored = np.random.Generator(np.random.Philox(3) if other != "PCG64DXSM" else np.random.PCG64(3))
    ckptcore.save(tmp_path / "c", {"random": stored})
    target = {"random": np.random.Generator(getattr(np.random, other)())}
    text = refused(lambda: ckptcore.load_into(tmp_path / "c", target), "as it was saved", error=TreeMismatchError)
    assert "matching=" not in text
    kind = text.partition("Create the generator with ")[2].partition(",")[0]
    target["random"] = np.random.Generator(getattr(np.random, kind)())
    ckptcore.load_into(tmp_path / "c", target)
    assert target["random"].random() == stored.random()


class Returns:
    """An object whose `save` is a function that returns a coroutine."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def save(self, directory: Any) -> Any:
        """Return a coroutine."""
        return self._write(directory)

    async def _write(self, directory: Any) -> None:
        path = await directory.await_creation() if hasattr(directory, "await_creation") else directory
        (path / "text").write_text(self.text)

    def load(self, directory: Any) -> Any:
        """Return a coroutine."""
        return self._read(directory)

    async def _read(self, directory: Any) -> None:
        self.text = (Path(directory) / "text").read_text()


class Awaits(Returns):
    """The object, written as the error advises."""

    async def save(self, directory: Any) -> Any:
        """Write the text."""
        await self._write(directory)

    async def load(self, directory: Any) -> Any:
        """Read the text."""
        await self._read(directory)


def test_a_save_that_returns_a_coroutine(tmp_path: Path) -> None:
    refused(
        lambda: ckptcore.save_checkpointables(tmp_path / "c", {"x": Returns("abc")}),
        "Write it as `async def save` and `async def load`, or pass "
        "Context(plugins=PluginOptions(handlers={type: SavesToDirectoryAsyncHandler()}))",
        error=PluginError,
    )
    handlers = Context(plugins=PluginOptions(handlers={Returns: SavesToDirectoryAsyncHandler()}))
    for kind, context in ((Awaits, Context()), (Returns, handlers)):
        ckptcore.save_checkpointables(tmp_path / kind.__name__, {"x": kind("abc")}, context=context)
        target = kind()
        ckptcore.load_checkpointables(tmp_path / kind.__name__, into={"x": target}, context=context)
        assert target.text == "abc"


def test_a_deque_that_is_too_short(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"losses": collections.deque([1, 2, 3, 4, 5])})
    short = {"losses": collections.deque([0], maxlen=3)}
    text = refused(lambda: ckptcore.load(tmp_path / "c", short), "maxlen=5 or more", error=TreeMismatchError)
    refused(lambda: ckptcore.load_into(tmp_path / "c", short), "maxlen=5 or more", error=TreeMismatchError)
    assert list(short["losses"]) == [0], text
    for maxlen in (5, 6):
        losses: collections.deque[int] = collections.deque(maxlen=maxlen)
        ckptcore.load_into(tmp_path / "c", {"losses": losses})
        assert losses == collections.deque([1, 2, 3, 4, 5])
        assert losses.maxlen == maxlen


class UnfilledHandler(HostArrayHandler):
    """A handler that claims to fill arrays, but does not."""

    def fill(self, target: Any, record: Any, boxes: Any) -> bool:
        """Return that the array was not filled."""
        return False


def test_a_leaf_that_its_handler_does_not_fill(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", (ONE,))
    context = Context(plugins=PluginOptions(handlers={np.ndarray: UnfilledHandler()}))
    target = (ONE * 0,)
    refused(lambda: ckptcore.load_into(tmp_path / "c", target, context=context), "use load() and keep its result")
    assert same_value(ckptcore.load(tmp_path / "c", target, context=context), (ONE,))
