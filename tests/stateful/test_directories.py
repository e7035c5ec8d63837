"""Objects that save themselves to a directory: their detection, and the threads that run their phases."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import threading
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ckptcore_orbax import SavesToDirectoryAsyncHandler
from ckptcore_orbax.orbax.asynchronous_objects import AwaitableDirectory, run
from etils import epath  # type: ignore[import-untyped]  # ships no types

from ckptcore.errors import PluginError
from ckptcore.handlers import SavesToDirectoryHandler, StateDictHandler
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StatefulCheckpointable

PLAIN, ASYNC = SavesToDirectoryHandler(), SavesToDirectoryAsyncHandler()


class Plain:
    """An object that saves itself."""

    def __init__(self) -> None:
        self.value = 1

    def save(self, directory: Path) -> None:
        """Write one file."""
        (directory / "value").write_text(str(self.value))

    def load(self, directory: Path) -> None:
        """Read the file."""
        self.value = int((directory / "value").read_text())


class PlainWithStateDict(Plain):
    """An object that also has a state dict."""

    def state_dict(self) -> dict[str, int]:
        """Return the value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the value."""
        self.value = state["value"]


class PlainWithOptions(Plain):
    """An object whose methods have optional parameters."""

    def save(self, directory: Path, indent: int = 0, *, sync: bool = True) -> None:
        """Write one file."""
        super().save(directory)


def logged(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


class Decorated:
    """An object with decorated asynchronous methods."""

    @logged
    async def save(self, directory: Any) -> None:
        """Do nothing."""

    @logged
    async def load(self, directory: Any) -> None:
        """Do nothing."""


class Threads:
    """An object that records the threads of its phases, and writes the captured value."""

    def __init__(self) -> None:
        self.value = 1
        self.threads: list[int] = []

    async def save(self, directory: Any) -> Awaitable[None]:
        """Capture the value, and return the second phase."""
        self.threads.append(threading.get_ident())
        assert isinstance(directory.path, epath.Path)
        return self._write(directory, self.value)

    async def _write(self, directory: Any, value: int) -> None:
        self.threads.append(threading.get_ident())
        parts = await (directory / "parts").await_creation()
        await asyncio.to_thread(parts.mkdir)
        await asyncio.gather(*[asyncio.to_thread((parts / str(part)).write_text, str(value)) for part in range(3)])

    async def load(self, directory: Any) -> Awaitable[None]:
        """Read."""
        assert isinstance(directory, epath.Path)

        async def read() -> None:
            self.value = int((directory / "parts" / "2").read_text())

        return read()


class OnePhase:
    """An object that writes in the first phase, and has no second phase."""

    value = 0

    async def save(self, directory: Any) -> None:
        """Write."""
        path = await directory.await_creation()
        (path / "value").write_text("7")

    async def load(self, directory: Any) -> None:
        """Read."""
        self.value = int((directory / "value").read_text())


class OtherName:
    """An object with another parameter name, whose meaning is unknown."""

    def save(self, path: Path) -> None:
        """Do nothing."""

    def load(self, path: Path) -> None:
        """Do nothing."""


class Constructs:
    """An object whose `load` is a class method that returns a new object."""

    def save(self, directory: Path) -> None:
        """Write."""

    @classmethod
    def load(cls, directory: Path) -> Constructs:
        """Return a new object."""
        return cls()


class NeedsMore(Plain):
    """An object whose `save` requires another positional argument."""

    def save(self, directory: Path, step: int) -> None:  # type: ignore[override]  # the signature is wrong on purpose
        """Write."""


class NeedsAName(Plain):
    """An object whose `save` requires another keyword argument."""

    def save(self, directory: Path, *, step: int) -> None:  # type: ignore[override]  # the signature is wrong on purpose
        """Write."""


class OnlySaves:
    """An object without `load`."""

    def save(self, directory: Path) -> None:
        """Write."""


class HalfAwaited(Plain):
    """An object of which only `save` is a coroutine function."""

    async def save(self, directory: Any) -> None:  # type: ignore[override]  # the signature is wrong on purpose
        """Write."""


class AnyArguments:
    """An object whose methods accept any arguments."""

    def save(self, *args: object, **kwargs: object) -> None:
        """Write."""

    load = save


@pytest.mark.parametrize(
    ("value", "handler"),
    [
        (Plain(), SavesToDirectoryHandler),
        (PlainWithOptions(), SavesToDirectoryHandler),
        (Threads(), SavesToDirectoryAsyncHandler),
        (OnePhase(), SavesToDirectoryAsyncHandler),
        (Decorated(), SavesToDirectoryAsyncHandler),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_objects_that_save_themselves_are_detected(value: object, handler: type) -> None:
    assert type(installed_plugins().dispatch_named(value).files) is handler
    assert installed_plugins().dispatch(value).files is None, "files need a name of their own"


@pytest.mark.parametrize(
    "value",
    [OtherName(), Constructs(), NeedsMore(), NeedsAName(), OnlySaves(), HalfAwaited(), AnyArguments(), Plain]
    + [{}, [], 1, "text", None, object()],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_other_objects_are_not_detected(value: object) -> None:
    assert installed_plugins().dispatch_named(value).files is None


def test_files_are_preferred_to_a_state_dict_only_under_a_name() -> None:
    value = PlainWithStateDict()
    assert type(installed_plugins().dispatch_named(value).files) is SavesToDirectoryHandler
    assert type(installed_plugins().dispatch(value).checkpointable) is StateDictHandler
    chosen = installed_plugins().with_plugins([], {PlainWithStateDict: StateDictHandler()})
    assert type(chosen.dispatch_named(value).checkpointable) is StateDictHandler


def test_plain_methods_satisfy_the_protocol() -> None:
    assert isinstance(Plain(), StatefulCheckpointable)


def test_an_awaitable_without_an_await_is_refused(tmp_path: Path) -> None:
    class Hides(Plain):
        def save(self, directory: Path) -> Any:
            async def write() -> None:
                pass

            return write()

    with pytest.raises(PluginError, match="Write it as `async def save`"):
        PLAIN.save(Hides(), tmp_path)


def test_the_first_phase_runs_in_the_calling_thread(tmp_path: Path) -> None:
    value = Threads()
    rest = ASYNC.save(value, tmp_path)
    assert rest is not None
    assert list(tmp_path.iterdir()) == []
    value.value = 2
    background = threading.Thread(target=rest)
    background.start()
    background.join()
    assert value.threads[0] == threading.get_ident()
    assert value.threads[1] != threading.get_ident()
    assert ASYNC.load(value, tmp_path) is value
    assert value.value == 1


def test_an_object_without_a_second_phase_returns_no_continuation(tmp_path: Path) -> None:
    assert ASYNC.save(OnePhase(), tmp_path) is None
    target = OnePhase()
    ASYNC.load(target, tmp_path)
    assert target.value == 7


def test_errors_of_all_phases_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ASYNC.load(Threads(), tmp_path)

    async def program() -> None:
        with pytest.raises(FileNotFoundError):
            ASYNC.load(Threads(), tmp_path)

    asyncio.run(program())
    rest = ASYNC.save(Threads(), tmp_path / "not there")
    assert rest is not None
    with pytest.raises(FileNotFoundError):
        rest()


def test_an_abandoned_save_causes_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest = ASYNC.save(Threads(), tmp_path)
        del rest
        gc.collect()


class LeavesTasks:
    """An object that starts a task in the first phase. `rest` turns the task into the result of `save`."""

    def __init__(self, rest: Callable[[asyncio.Task[None]], Any]) -> None:
        self.rest = rest

    async def save(self, directory: Any) -> Any:
        """Start to write in a task."""
        task = asyncio.create_task(self._write(await directory.await_creation()))
        await asyncio.sleep(0)
        return self.rest(task)

    async def _write(self, path: Any) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        (path / "value").write_text("written")

    async def load(self, directory: Any) -> None:
        """Start a task, and do not await it."""
        self.task = asyncio.create_task(self._write(directory))


async def _without_it() -> None:
    await asyncio.sleep(0)


def test_the_second_phase_may_await_a_task_of_the_first(tmp_path: Path) -> None:
    for rest in (lambda task: task, lambda task: asyncio.wait_for(task, None)):
        rest_of_it = ASYNC.save(LeavesTasks(rest), tmp_path)
        assert rest_of_it is not None
        background = threading.Thread(target=rest_of_it)
        background.start()
        background.join()
        assert (tmp_path / "value").read_text() == "written"
        (tmp_path / "value").unlink()


def test_a_task_without_an_await_is_refused(tmp_path: Path) -> None:
    told = r"tasks were still running .* LeavesTasks\._write"
    with pytest.raises(PluginError, match=told):
        ASYNC.save(LeavesTasks(lambda task: None), tmp_path)
    rest = ASYNC.save(LeavesTasks(lambda task: _without_it()), tmp_path)
    assert rest is not None
    with pytest.raises(PluginError, match=told):
        rest()
    with pytest.raises(PluginError, match=told):
        ASYNC.load(LeavesTasks(lambda task: task), tmp_path)

    async def program() -> None:
        with pytest.raises(PluginError, match=told):
            ASYNC.save(LeavesTasks(lambda task: None), tmp_path)

    asyncio.run(program())
    assert not (tmp_path / "value").exists()


def test_cancelled_and_short_tasks_are_no_error(tmp_path: Path) -> None:
    async def ends_soon() -> None:
        await asyncio.sleep(0)

    def stop(task: asyncio.Task[None]) -> None:
        task.cancel()
        task.get_loop().create_task(ends_soon())

    assert ASYNC.save(LeavesTasks(stop), tmp_path) is None


def test_an_abandoned_save_does_not_report_its_tasks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest = ASYNC.save(LeavesTasks(lambda task: task), tmp_path)
        del rest
        gc.collect()
    assert caplog.records == []


def test_the_event_loop_of_the_calling_thread_is_kept(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        rest = ASYNC.save(Threads(), tmp_path)
        assert rest is not None
        rest()
        assert asyncio.get_event_loop() is loop
        assert not loop.is_closed()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_no_thread_remains_after_a_save(tmp_path: Path) -> None:
    before = threading.active_count()
    rest = ASYNC.save(Threads(), tmp_path)
    assert rest is not None
    rest()
    assert threading.active_count() == before


def test_methods_see_context_variables() -> None:
    """If an event loop runs in the calling thread, another thread runs the methods. It must see the variables, too."""
    import contextvars

    variable = contextvars.ContextVar("variable", default=0)

    async def read() -> int:
        return variable.get()

    async def program() -> int:
        variable.set(3)
        return run(read)

    assert asyncio.run(program()) == 3


def test_an_awaitable_directory_has_the_interface_of_orbax(tmp_path: Path) -> None:
    from orbax.checkpoint._src.path.types import PathAwaitingCreation  # type: ignore[import-untyped]  # no types

    directory = AwaitableDirectory(tmp_path)
    assert isinstance(directory, PathAwaitingCreation)
    assert directory.path == tmp_path
    assert (directory / "below").path == tmp_path / "below"
    assert run(directory.await_creation) == tmp_path


def test_orbax_and_ckptcore_support_the_same_objects(tmp_path: Path) -> None:
    """Orbax and ckptcore both save and load the object, with the same result."""
    import orbax.checkpoint.experimental.v1 as ocp  # type: ignore[import-untyped]  # ships no types

    value = Threads()
    assert isinstance(value, ocp.StatefulCheckpointable)
    value.value = 5
    ocp.save_checkpointables(tmp_path / "orbax", {"threads": value})
    theirs = Threads()
    ocp.load_checkpointables(tmp_path / "orbax", {"threads": theirs})
    (tmp_path / "ours").mkdir()
    rest = ASYNC.save(value, tmp_path / "ours")
    assert rest is not None
    rest()
    ours = Threads()
    ASYNC.load(ours, tmp_path / "ours")
    assert ours.value == theirs.value == 5
    assert json.loads((tmp_path / "ours" / "parts" / "0").read_text()) == 5
