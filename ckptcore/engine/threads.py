"""The threads that do input, output and copies, and what a forked child, where they are not, begins anew."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar

__all__ = ["Crew", "IOThreads", "renew_in_children"]

_MOST_THREADS: Final = 8
T = TypeVar("T")


class IOThreads:
    """Worker threads that start when there is work. Any thread may give them some.

    The threads are daemons: at exit the interpreter waits for whoever waits for their work, never for the threads
    themselves, so a save that runs in a thread of its own still completes. After a fork the child starts its own.
    Where no thread can be started any more, `run` does all the work on the calling thread.
    """

    def __init__(self, count: int | None = None) -> None:
        """Plan for `count` threads; by default one for each processor, from 2 to 8."""
        self.renew()
        if count is not None and count < 1:
            raise ValueError(f"expected at least one thread, found {count}")
        self.count: Final = count if count is not None else min(_MOST_THREADS, max(2, os.cpu_count() or 2))
        renew_in_children(self)

    def renew(self) -> None:
        """Forget threads and work: in a forked child, where there are none."""
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0
        self._waiting = 0

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` on one of the threads; here and now where there can be none."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  # raised by whoever asks for the result
                future.set_exception(error)
            else:
                future.set_result(result)

        if not self._give(work):
            work()
        return future

    def start(self, worker: Callable[[], None], parallelism: int) -> Crew:
        """Let up to `parallelism` threads call `worker` once each; it must not raise. `Crew.join` must follow.

        Fewer do where there are fewer threads, or they are busy until the crew is joined: what must be done, the
        caller has to be ready to do itself.
        """
        crew = Crew(worker)
        for _ in range(min(parallelism, self.count)):
            if not self._give(crew.work):
                break
        return crew

    def run(self, worker: Callable[[], None], parallelism: int) -> None:
        """Call `worker` on this thread and on up to ``parallelism - 1`` others at once; returns when all have returned.

        `worker` must not raise, and return when nothing is left to do. Never waits for a thread that has not begun,
        so it can be nested.
        """
        crew = self.start(worker, min(parallelism, self.count) - 1)
        try:
            worker()
        finally:
            crew.join()

    def _give(self, work: Callable[[], None]) -> bool:
        """Queue work; False where there is no thread to do it."""
        with self._lock:
            if self._waiting <= 0 and self._started < self.count:
                thread = threading.Thread(
                    target=_serve, args=(self._work, weakref.ref(self)), name="ckptcore-io", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is going down, or the system has no more threads
                    if self._started == 0:
                        return False
                else:
                    self._started += 1
                    self._waiting += 1
            self._waiting -= 1
            self._work.put(work)
            return True

    def _is_free(self) -> None:
        with self._lock:
            self._waiting += 1

    def __del__(self) -> None:
        for _ in range(self._started):
            self._work.put(None)


def _serve(work: queue.SimpleQueue[Callable[[], None] | None], owner: weakref.ref[IOThreads]) -> None:
    while (function := work.get()) is not None:
        function()
        del function  # what it holds must not live until the next work comes
        if (threads := owner()) is not None:
            threads._is_free()
        del threads


class Crew:
    """Threads that call one worker."""

    def __init__(self, worker: Callable[[], None]) -> None:
        self._worker: Callable[[], None] | None = worker
        self._lock = threading.Lock()
        self._busy = 0
        self._idle = threading.Condition(self._lock)

    def work(self) -> None:
        """Call the worker, unless the crew was joined before."""
        with self._lock:
            worker = self._worker
            if worker is None:
                return
            self._busy += 1
        try:
            worker()
        finally:
            del worker
            with self._lock:
                self._busy -= 1
                if self._busy == 0:
                    self._idle.notify_all()

    def join(self) -> None:
        """Keep threads that have not begun from doing so, and wait for those that have, even if interrupted."""
        interruption: BaseException | None = None
        with self._lock:
            self._worker = None
            # Nobody may go on while threads still use the caller's memory.
            while self._busy:
                try:
                    self._idle.wait()
                except BaseException as error:  # noqa: BLE001  # raised below
                    interruption = error
        if interruption is not None:
            raise interruption


class _Renewable(Protocol):
    """An object that can begin anew."""

    def renew(self) -> None:
        """Become as at first, without using a lock: one that another thread of the parent held stays locked for ever."""
        ...


def renew_in_children(thing: _Renewable) -> None:
    """Have `thing` renewed in every child that is forked while it lives; does not keep it alive."""
    _RENEWABLES.add(thing)


_RENEWABLES: Final[weakref.WeakSet[_Renewable]] = weakref.WeakSet()


def _after_fork() -> None:
    for thing in _RENEWABLES:
        thing.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
