"""Responses of operations in the background: Orbax's `AsyncResponse`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from ckptcore.results import SaveHandle

T = TypeVar("T")


class Response(Generic[T]):
    """An `AsyncResponse` of work in a thread of its own."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Start the work."""
        self._future: Future[T] = Future()

        def run() -> None:
            try:
                self._future.set_result(work())
            except BaseException as error:  # noqa: BLE001  # the future raises it
                self._future.set_exception(error)

        threading.Thread(target=run, name="ckptcore-response").start()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the work, at most `timeout` seconds. Return its result, or raise its error."""
        return self._future.result(timeout)

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """Call a function with the result once the work is done; not if it fails."""
        self._future.add_done_callback(lambda done: None if done.exception() else callback(done.result()))


class SaveResponse:
    """The `AsyncResponse` of a save.

    If the error of a save is not retrieved by `result`, the next save raises it.
    """

    def __init__(self, handle: SaveHandle, timeout_seconds: float) -> None:
        """Count the timeout of the Context from now."""
        self._handle = handle
        self._deadline = time.monotonic() + timeout_seconds

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed.

        Raises:
            TimeoutError: it is not, after `timeout` seconds or the timeout of the Context.
            CheckpointError: the save failed.
        """
        remaining = max(0.0, self._deadline - time.monotonic())
        self._handle.result(remaining if timeout is None else min(timeout, remaining))

    def on_complete(self, callback: Callable[[None], None]) -> None:
        """Call a function once the checkpoint is committed; not if the save fails."""

        def wait() -> None:
            if self._handle.exception() is None:
                callback(None)

        threading.Thread(target=wait, name="ckptcore-on-complete").start()
