"""Handler of objects that save themselves asynchronously. Runs their coroutines on threads without an event loop."""

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
from ckptcore.protocols import Continuation, Priority

T = TypeVar("T")

_LAST_TURNS: Final = 10
"""Iterations of the event loop in which remaining tasks may end before they are reported and canceled."""

_MAX_LISTED_TASKS: Final = 5


class SavesToDirectoryAsyncHandler:
    """Handler of objects with ``async save(directory)`` and ``async load(directory)``.

    Orbax's ``StatefulCheckpointable`` has these methods. They may return an awaitable, which does the rest of the work.
    The `directory` of a save has ``await_creation()``, which returns the path. The `directory` of a load is a path.
    """

    priority = Priority.PROTOCOL

    def save(self, value: Any, directory: Path) -> Continuation | None:
        """Run the first phase on the thread of the caller. The continuation awaits its result.

        Both run in one event loop, which is paused between them.

        Raises:
            PluginError: the first phase returns nothing to await and leaves tasks running. The continuation raises the
                same error if its own tasks are still running.
        """
        return run_first_phase(lambda: value.save(AwaitableDirectory(path_for_object(directory))))

    def load(self, like: Any, directory: Path) -> object:
        """Run both phases of the load, in place, and return the object."""

        async def both() -> None:
            rest = await like.load(path_for_object(directory))
            if inspect.isawaitable(rest):
                await rest

        run(both)
        return like


class AwaitableDirectory:
    """An existing directory with the interface of Orbax's directories.

    Orbax creates its directories in the background.
    """

    def __init__(self, path: Any) -> None:
        self.path = path

    def __truediv__(self, name: Any) -> AwaitableDirectory:
        return AwaitableDirectory(self.path / name)

    async def await_creation(self) -> Any:
        """Return the path immediately."""
        return self.path


class DeferredAwait:
    """A continuation that awaits the result of a first phase, in the event loop of that phase.

    If it is deleted without a call, it closes the coroutine and the loop.
    """

    def __init__(self, loop: _Loop, rest: Awaitable[object]) -> None:
        self._loop = loop
        self._rest: Awaitable[object] | None = rest

    def __call__(self) -> None:
        """Await the result. Blocks the thread.

        Raises:
            PluginError: tasks of either phase are still running.
        """
        rest, self._rest = self._rest, None
        if rest is not None:
            self._loop.run_last(lambda: rest)

    def __del__(self) -> None:
        # A save that fails elsewhere drops its continuations: close the coroutine, so that Python does not warn.
        if self._rest is not None:
            if inspect.iscoroutine(self._rest):
                self._rest.close()
            self._loop.drop()


def path_for_object(directory: Path) -> Any:
    """Return an `etils.epath.Path` if etils is imported, because objects with Orbax's protocol expect it."""
    make = getattr(sys.modules.get("etils.epath"), "Path", Path)
    return make(directory)


def run(begin: Callable[[], Awaitable[T]]) -> T:
    """Await the result of `begin` in a new event loop, on this thread unless another loop runs in it.

    Blocks until it is done. Does not change the event loop that is set for the thread.

    Raises:
        PluginError: tasks are still running; their results would be lost.
    """
    return _Loop().run_last(begin)


def run_first_phase(begin: Callable[[], Awaitable[object]]) -> DeferredAwait | None:
    """Await `begin()`. If the result is awaitable too, return a continuation that awaits it; else None. See `run`.

    Tasks of the first phase pause until the continuation is called.

    Raises:
        PluginError: the result is not awaitable, and tasks are still running.
    """
    loop = _Loop()
    rest = loop.run(begin)
    if inspect.isawaitable(rest):
        return DeferredAwait(loop, rest)
    loop.end()
    return None


class _Loop:
    """An event loop that threads run one after the other. The first error closes it."""

    def __init__(self) -> None:
        # Not asyncio.run, which removes the event loop of the thread.
        self._loop = asyncio.new_event_loop()

    def run(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Await the result of `begin`."""
        try:
            return _run_outside_loop(lambda: self._loop.run_until_complete(_awaited(begin)))
        except BaseException:
            _run_outside_loop(self._stop)
            raise

    def run_last(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Await the result of `begin`, and close the loop.

        Raises:
            PluginError: see `end`.
        """
        result = self.run(begin)
        self.end()
        return result

    def end(self) -> None:
        """Wait for the threads of the loop, and close it.

        Raises:
            PluginError: tasks are still running; they are canceled.
        """
        if left := _run_outside_loop(self._stop):
            more = f" and {len(left) - _MAX_LISTED_TASKS} more" if len(left) > _MAX_LISTED_TASKS else ""
            raise PluginError(
                "tasks were still running when the object said that it was done: "
                f"{', '.join(left[:_MAX_LISTED_TASKS])}{more}; their results would be lost, so they were canceled. "
                "Await them, or return from the first phase a coroutine that awaits them"
            )

    def drop(self) -> None:
        """Close the loop without running anything."""
        self._loop.set_exception_handler(lambda loop, context: None)  # no report of remaining tasks
        self._loop.close()

    def _stop(self) -> list[str]:
        loop = self._loop
        try:
            left = loop.run_until_complete(_cancel_remaining_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            return left
        finally:
            loop.close()


async def _awaited(begin: Callable[[], Awaitable[T]]) -> T:
    return await begin()


async def _cancel_remaining_tasks() -> list[str]:
    """Cancel the running tasks of this loop. Return the names of their coroutines."""
    for _ in range(_LAST_TURNS):
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    # Tasks that the object canceled itself are no error.
    left = sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in tasks if not task.cancelling())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return left


def _run_outside_loop(work: Callable[[], T]) -> T:
    """Call a function on this thread, or on another one if an event loop runs here. Blocks until it is done."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    result: Future[T] = Future()
    context = contextvars.copy_context()

    def run_work() -> None:
        try:
            result.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001  # raised by the caller
            result.set_exception(error)

    thread = threading.Thread(target=run_work, name="ckptcore-await")
    thread.start()
    thread.join()
    return result.result()
