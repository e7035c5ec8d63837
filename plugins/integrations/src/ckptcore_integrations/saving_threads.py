"""Threads on which adapters end a save while the training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function on a new thread, for which the interpreter waits at exit.

    The executors of `concurrent.futures` refuse work once the main thread has ended, while a training on another thread
    goes on. If no thread can be started, the function is called at once.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # raised by the caller of `result`
            future.set_exception(error)

    try:
        threading.Thread(target=call, name=name).start()
    except RuntimeError:  # the program is ending, or the system has no more threads
        call()
    return future
