"""Threads for requests to a storage, and calls that run many tasks on them."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol, TypeVar

from ckptcore.io.background import call_into

__all__ = [
    "IOThreads",
    "WorkerPool",
    "ask_each",
    "reset_in_children",
    "run_each",
]

_MOST_THREADS: Final = 8
_IDLE_SECONDS: Final = 10.0
"""So long threads stay that waited for a storage which is far."""

T = TypeVar("T")


class IOThreads:
    """Worker threads that start when there is work. Any thread may give them some.

    There are two groups: as many as suit the processors, for copies and near storages, and more that wait for far
    storages (`ckptcore.protocols.StorageCapabilities.concurrency`), as many as these ask for. Neither keeps the other
    from its work, and threads of the second end when there was nothing to do for a while.

    The threads are daemons: at exit the interpreter waits for callers that wait for their work, never for the threads
    themselves, so a save that runs in a thread of its own still completes. After a fork the child starts its own.
    Where no thread can be started any more, `run` does all the work on the calling thread.
    """

    def __init__(self, count: int | None = None) -> None:
        """Plan for `count` threads; by default one for each processor, from 2 to 8, and more for far storages."""
        if count is not None and count < 1:
            raise ValueError(f"expected at least one thread, found {count}")
        self.count: Final = count if count is not None else min(_MOST_THREADS, max(2, os.cpu_count() or 2))
        self._most: Final = count
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget threads and work, in a forked child, which has none."""
        self._near = _Group(None)
        self._far = _Group(_IDLE_SECONDS)

    def at_once(self, concurrency: int) -> int:
        """Return the number of calls at once for a storage with this `concurrency`; `count` if that was set."""
        return self.count if self._most is not None or concurrency <= self.count else concurrency

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` on one of the threads, or on this one if no thread can be started."""
        future: Future[T] = Future()
        work = partial(call_into, future, function)
        if not self._near.give(work, self.count):
            work()
        return future

    def start(self, worker: Callable[[], None], parallelism: int, concurrency: int = 1) -> WorkerPool:
        """Start up to `parallelism` threads that call `worker` once each. `WorkerPool.join` must follow.

        Fewer threads call it if there are fewer, or if they are busy until the pool is joined. The caller must be ready
        to do all the work itself.

        Args:
            worker: to call; must not raise.
            parallelism: the most calls.
            concurrency: of the storage that `worker` waits for, see `at_once`.
        """
        pool = WorkerPool(worker)
        most = self.at_once(concurrency)
        group = self._far if most > self.count else self._near
        for _ in range(min(parallelism, most)):
            if not group.give(pool.work, most):
                break
        return pool

    def run(self, worker: Callable[[], None], parallelism: int, concurrency: int = 1) -> None:
        """Call `worker` on this thread and on up to ``parallelism - 1`` others at once; returns when all have returned.

        `worker` must not raise, and return when nothing is left to do. Never waits for a thread that has not begun,
        so it can be nested. Arguments as of `start`.
        """
        others = min(parallelism, self.at_once(concurrency)) - 1
        if others < 1:
            worker()
            return
        pool = self.start(worker, others, concurrency)
        try:
            worker()
        finally:
            pool.join()

    def __del__(self) -> None:
        for group in (getattr(self, "_near", None), getattr(self, "_far", None)):
            if group is not None:
                group.end()


class _Group:
    """Threads that take work from one queue."""

    def __init__(self, idle_seconds: float | None) -> None:
        """End threads after so many seconds without work; None: never."""
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0
        self._waiting = 0  # threads without work, less the work in the queue

    def give(self, work: Callable[[], None], most: int) -> bool:
        """Queue work for `most` threads. Return False if there is no thread to do it."""
        with self._lock:
            if self._waiting <= 0 and self._started < most:
                thread = threading.Thread(
                    target=_serve,
                    args=(self._work, weakref.ref(self), self._idle_seconds),
                    name="ckptcore-io",
                    daemon=True,
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

    def is_free(self) -> None:
        """Count a thread that has done its work."""
        with self._lock:
            self._waiting += 1

    def may_leave(self) -> bool:
        """Return True if a thread that found no work may end; else work is on its way to it."""
        with self._lock:
            if self._waiting <= 0:
                return False
            self._waiting -= 1
            self._started -= 1
            return True

    def end(self) -> None:
        """End all threads."""
        for _ in range(self._started):
            self._work.put(None)


def _serve(
    work: queue.SimpleQueue[Callable[[], None] | None], owner: weakref.ref[_Group], idle_seconds: float | None
) -> None:
    while True:
        try:
            function = work.get(timeout=idle_seconds)
        except queue.Empty:
            group = owner()
            if group is None or group.may_leave():
                return
            del group
            continue
        if function is None:
            return
        function()
        del function  # what it holds must not live until the next work comes
        if (group := owner()) is not None:
            group.is_free()
        del group


class WorkerPool:
    """Threads that call one worker."""

    def __init__(self, worker: Callable[[], None]) -> None:
        self._worker: Callable[[], None] | None = worker
        self._lock = threading.Lock()
        self._busy = 0
        self._idle = threading.Condition(self._lock)

    def work(self) -> None:
        """Call the worker, unless the pool was joined before."""
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
            # The caller must not continue while threads still use its memory.
            while self._busy:
                try:
                    self._idle.wait()
                except BaseException as error:  # noqa: BLE001  # raised below
                    interruption = error
        if interruption is not None:
            raise interruption


class _Resettable(Protocol):
    """An object that can be reset."""

    def reset_after_fork(self) -> None:
        """Return to the initial state without a lock: another thread of the parent may have held it."""
        ...


def reset_in_children(thing: _Resettable) -> None:
    """Call `reset_after_fork` of an object in every child forked during its lifetime. Keeps a weak reference."""
    _RESETTABLE.add(thing)


_RESETTABLE: Final[weakref.WeakSet[_Resettable]] = weakref.WeakSet()


def _after_fork() -> None:
    for thing in _RESETTABLE:
        thing.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


S = TypeVar("S")


def run_each(threads: IOThreads, items: Iterable[T], do: Callable[[T], None], *, parallelism: int = 1) -> None:
    """Call `do` with each of the items, several at once. Return when all calls have returned.

    Args:
        threads: make the calls, together with the calling thread.
        items: taken in their order, one when a thread has nothing to do, so that they may come from a generator.
        do: the function.
        parallelism: calls worth having under way at once, if more than a thread for each processor.

    Raises:
        The first error of a call. No item is taken after it, and no call goes on when it is raised.
    """
    source = iter(items)
    taking = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                with taking:
                    if errors:
                        return
                    try:
                        item = next(source)
                    except StopIteration:
                        return
                do(item)
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    threads.run(work, max(threads.count, parallelism), parallelism)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # errors hold frames, which hold them


def ask_each(threads: IOThreads, items: Sequence[T], ask: Callable[[T], S], *, parallelism: int = 1) -> Sequence[S]:
    """Return the results of `ask` for each of the items, in their order. See `run_each`."""
    found: dict[int, S] = {}

    def note(number: int) -> None:
        found[number] = ask(items[number])

    run_each(threads, range(len(items)), note, parallelism=parallelism)
    return [found[number] for number in range(len(items))]
