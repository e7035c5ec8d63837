"""Coroutines of objects that save themselves asynchronously, run to completion in threads that have no event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["AwaitedLater", "DirectoryToAwait", "path_for_others", "run"]

T = TypeVar("T")


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
    """A continuation that awaits what a first phase returned; a coroutine that is not awaited in the end is closed."""

    def __init__(self, rest: Awaitable[object]) -> None:
        self._rest: Awaitable[object] | None = rest

    def __call__(self) -> None:
        """Await it, in an event loop of its own. The thread is blocked until it is done."""
        rest, self._rest = self._rest, None
        if rest is not None:
            run(lambda: rest)

    def __del__(self) -> None:
        # A save that fails elsewhere drops its continuations, which is no fault of whoever wrote the coroutine.
        if inspect.iscoroutine(self._rest):
            self._rest.close()


def path_for_others(directory: Path) -> Any:
    """A path of etils where that is imported: objects that save themselves asynchronously are written for it."""
    make = getattr(sys.modules.get("etils.epath"), "Path", Path)
    return make(directory)


def run(begin: Callable[[], Awaitable[T]]) -> T:
    """Await what `begin` gives, in an event loop of its own, on this thread unless a loop runs in it already.

    Blocks until it is done. The event loop that a thread has set as its own stays as it is.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(begin)
    result: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result.set_result(context.run(_run_here, begin))
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that waits
            result.set_exception(error)

    thread = threading.Thread(target=work, name="ckptcore-await")
    thread.start()
    thread.join()
    return result.result()


def _run_here(begin: Callable[[], Awaitable[T]]) -> T:
    async def whole() -> T:
        return await begin()

    # Not asyncio.run, which takes away the event loop that the thread has, and looks at the tasks of other threads.
    loop = asyncio.new_event_loop()
    try:
        result = loop.run_until_complete(whole())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        return result
    finally:
        loop.close()
