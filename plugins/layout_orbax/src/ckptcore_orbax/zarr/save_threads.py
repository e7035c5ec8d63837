"""Threads of a save, which also start while the program ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function on a new thread of this name, or on this one if no thread can be started.

    The executors of `concurrent.futures` refuse work once the main thread has ended, when a save in the background may
    still write. `WriteStore.write_many` writes more objects at a time than `encode_buffer_bytes` counts.
    """
    future: Future[T] = Future()
    try:
        threading.Thread(target=_run, args=(future, function), name=name, daemon=False).start()
    except RuntimeError:  # the system has no more threads
        _run(future, function)
    return future


def _run(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001  # raised by `Future.result`
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future, function  # the traceback of an error holds this frame
