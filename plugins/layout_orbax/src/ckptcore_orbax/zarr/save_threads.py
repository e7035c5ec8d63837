"""Threads of a save, which also start while the program ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(function: Callable[[], T]) -> Future[T]:
    """Call a function on a new thread, or on this one if no thread can be started.

    The executors of `concurrent.futures` refuse work once the main thread has ended, when a save in the background may
    still write.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  # raised by `Future.result`
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=run, name="ckptcore-encoded").start()
    except RuntimeError:  # the system has no more threads
        run()
    return future
