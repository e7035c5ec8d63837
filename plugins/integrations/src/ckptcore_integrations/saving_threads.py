"""Threads on which adapters end a save while the training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def start(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function on a new thread, for which the interpreter waits at exit.

    The executors of `concurrent.futures` refuse work once the main thread has ended, while a training on another thread
    goes on. If no thread can be started, and in exit handlers, the function is called at once.
    """
    future: Future[T] = Future()
    main = threading.main_thread()
    # The main thread runs exit handlers after it has joined all threads, so it would not wait for a new thread.
    if main.is_alive() or threading.current_thread() is not main:
        with suppress(RuntimeError):  # the system has no more threads
            threading.Thread(target=_call, args=(future, function), name=name, daemon=False).start()
            return future
    _call(future, function)
    return future


def _call(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001  # raised by the caller of `result`
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future, function  # the traceback of an error holds this frame
