"""Coroutines of objects that save themselves asynchronously, run to their end on threads that have no event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from ckptcore.errors import PluginError

__all__ = ["AwaitedLater", "DirectoryToAwait", "path_for_others", "run", "run_first_phase"]

T = TypeVar("T")

_LAST_TURNS: Final = 10
"""Turns of the event loop in which tasks may end that have nothing left to wait for."""

_TASKS_TOLD: Final = 5


class DirectoryToAwait:
    """A directory, where an object expects one that may not be there yet. This one is."""

    def __init__(self, path: Any) -> None:
        self._path = path

    @property
    def path(self) -> Any:
        """Where it is."""
        return self._path

    def __truediv__(self, name: Any) -> DirectoryToAwait:
        return DirectoryToAwait(self._path / name)

    async def await_creation(self) -> Any:
        """Its path, at once."""
        return self._path


class AwaitedLater:
    """A continuation that awaits what a first phase returned, in the event loop of that phase.

    One that is not called in the end closes the coroutine and the loop.
    """

    def __init__(self, loop: _Loop, rest: Awaitable[object]) -> None:
        self._loop = loop
        self._rest: Awaitable[object] | None = rest

    def __call__(self) -> None:
        """Await it. The thread is blocked until it is done.

        Raises:
            PluginError: if tasks of either phase go on after it.
        """
        rest, self._rest = self._rest, None
        if rest is not None:
            self._loop.run_last(lambda: rest)

    def __del__(self) -> None:
        # A save that fails elsewhere drops its continuations, which is no fault of whoever wrote the coroutine.
        if self._rest is not None:
            if inspect.iscoroutine(self._rest):
                self._rest.close()
            self._loop.drop()


def path_for_others(directory: Path) -> Any:
    """A path of etils where that is imported: objects that save themselves asynchronously are written for it."""
    make = getattr(sys.modules.get("etils.epath"), "Path", Path)
    return make(directory)


def run(begin: Callable[[], Awaitable[T]]) -> T:
    """Await what `begin` gives, in an event loop of its own, on this thread unless a loop runs in it already.

    Blocks until it is done. The event loop that a thread has set as its own stays as it is.

    Raises:
        PluginError: if tasks go on after it: what they do would be lost.
    """
    return _Loop().run_last(begin)


def run_first_phase(begin: Callable[[], Awaitable[object]]) -> AwaitedLater | None:
    """Await what `begin` gives as `run` does. Where that is something to await itself, the continuation awaits it.

    Tasks of the first phase wait until the continuation is called, and go on then.

    Raises:
        PluginError: if there is nothing to await, and tasks go on nevertheless.
    """
    loop = _Loop()
    rest = loop.run(begin)
    if inspect.isawaitable(rest):
        return AwaitedLater(loop, rest)
    loop.end()
    return None


class _Loop:
    """An event loop that threads may run one after the other. It ends with the first error."""

    def __init__(self) -> None:
        # Not asyncio.run, which takes away the event loop that the thread has.
        self._loop = asyncio.new_event_loop()

    def run(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Await what `begin` gives."""
        try:
            return _where_no_loop_runs(lambda: self._loop.run_until_complete(_awaited(begin)))
        except BaseException:
            _where_no_loop_runs(self._stop)
            raise

    def run_last(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Await what `begin` gives, and end.

        Raises:
            PluginError: as `end`.
        """
        result = self.run(begin)
        self.end()
        return result

    def end(self) -> None:
        """Wait for its threads, and close it.

        Raises:
            PluginError: if tasks are left. They are cancelled.
        """
        if left := _where_no_loop_runs(self._stop):
            more = f" and {len(left) - _TASKS_TOLD} more" if len(left) > _TASKS_TOLD else ""
            raise PluginError(
                "tasks were still running when the object said that it was done: "
                f"{', '.join(left[:_TASKS_TOLD])}{more}; what they do would be lost, so they were cancelled. Await "
                "them, or return from the first phase a coroutine that does"
            )

    def drop(self) -> None:
        """Close it, whatever is left in it. Runs nothing."""
        self._loop.set_exception_handler(lambda loop, context: None)  # which would be told of the tasks that are left
        self._loop.close()

    def _stop(self) -> list[str]:
        loop = self._loop
        try:
            left = loop.run_until_complete(_cancel_what_is_left())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            return left
        finally:
            loop.close()


async def _awaited(begin: Callable[[], Awaitable[T]]) -> T:
    return await begin()


async def _cancel_what_is_left() -> list[str]:
    """The coroutines of those tasks of this loop that go on, which are cancelled."""
    for _ in range(_LAST_TURNS):
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    # Who has cancelled a task himself wants nothing more of it.
    left = sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in tasks if not task.cancelling())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return left


def _where_no_loop_runs(work: Callable[[], T]) -> T:
    """Do something in this thread, or in another one if an event loop runs in this. Blocks until it is done."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    result: Future[T] = Future()
    context = contextvars.copy_context()

    def work_there() -> None:
        try:
            result.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that waits
            result.set_exception(error)

    thread = threading.Thread(target=work_there, name="ckptcore-await")
    thread.start()
    thread.join()
    return result.result()
