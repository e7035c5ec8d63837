"""Requests to storages, and threads: the number of each, the sizes of requests, and the ranges that share a request.

Threads make requests and copies, do background work, and share the work of a loop.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from ckptcore.model import BLOCK_BYTES, WritePlan
from ckptcore.model.metadata import block_bytes_for
from ckptcore.protocols import StorageBackend, StorageCapabilities

if TYPE_CHECKING:
    import queue
    from concurrent.futures import Future

_MAX_CONCURRENCY: Final = 64
"""Maximum number of concurrent requests, because each takes a thread and memory."""

_MAX_PART_BYTES: Final = 64 << 20
"""Maximum bytes of a part, because each writing thread has one part in memory."""


def requests_of(storage: StorageBackend) -> StorageCapabilities:
    """Return the requests that suit a storage, within limits."""
    stated = storage.capabilities
    concurrency = max(1, min(stated.concurrency, _MAX_CONCURRENCY))
    part_bytes = max(1, min(stated.part_bytes, _MAX_PART_BYTES))
    if (concurrency, part_bytes) == (stated.concurrency, stated.part_bytes):
        return stated
    return stated._replace(concurrency=concurrency, part_bytes=part_bytes)


class Sizes(NamedTuple):
    """Sizes of work, in bytes. Tests make them small.

    Attributes:
        block: the most bytes that one checksum covers.
        task: the bytes that a thread reads as one task; a multiple of `block`.
        write: the bytes that a thread copies, checks and writes at a time; a multiple of `block` that fits into the
            cache of a processor.
        inline: one thread writes an object with fewer bytes. A local read of fewer bytes runs on the calling thread.
        direct: a range of at least this size is read directly into an array, if only this array needs the range, and
            takes its bytes unchanged.
        run: if the contiguous runs of a box have at least this size, they are read directly into its array, block by
            block.
    """

    block: int = BLOCK_BYTES
    task: int = 4 << 20
    write: int = BLOCK_BYTES
    inline: int = 1 << 20
    direct: int = 64 << 10
    run: int = 4 << 20

    def for_parts(self, part_bytes: int) -> Sizes:
        """Return the sizes for a storage that writes parts of `part_bytes`; 1: unchanged."""
        if part_bytes == 1:
            return self
        return self._replace(write=-(-part_bytes // self.block) * self.block)

    def for_requests(self, request_bytes: int) -> Sizes:
        """Return the sizes for a storage with many concurrent requests of `request_bytes`. Each request is a task."""
        return self._replace(task=max(self.block, request_bytes // self.block * self.block))


SIZES: Final = Sizes()
"""The sizes for memory and local disks."""


def sizes_of(plan: WritePlan) -> Sizes:
    """Return the sizes for the objects of a plan, with blocks that suit the bytes of its whole tree.

    A session has only a part of the tree, and files have no tree: both have the largest blocks.
    """
    is_whole = plan.session is None and plan.tree.leaves
    return SIZES._replace(block=block_bytes_for(plan.tree.nbytes)) if is_whole else SIZES


class ObjectShape(NamedTuple):
    """The sizes of reads of one object.

    Attributes:
        key: the object.
        size: its size in bytes.
        step: reads start and end at multiples of this number of bytes: a block if blocks are verified, else 1.
        part_bytes: the most bytes of a request; a multiple of `step`.
        gap_bytes: gaps up to this size are read, because that is cheaper than another request.
        sizes: the sizes of tasks and blocks.
    """

    key: str
    size: int
    step: int
    part_bytes: int
    gap_bytes: int
    sizes: Sizes

    @property
    def task_bytes(self) -> int:
        """The most bytes of a task."""
        return max(self.sizes.task, self.part_bytes)

    def keeps_elements(self, offset: int, itemsize: int) -> bool:
        """Return True if reads never start or end inside an element of a chunk at `offset`."""
        grid = self.step if self.step > 1 else self.part_bytes
        return offset % itemsize == 0 and grid % itemsize == 0

    def above(self, position: int) -> int:
        """Return the first step boundary at or after a position, or the end of the object."""
        return min(self.size, -(-position // self.step) * self.step)


class CoalescedRange(NamedTuple):
    """Ranges of one object that are requested together.

    Attributes:
        key: the object.
        start, stop: the range that contains the ranges of the group. `stop` is None for the end of the object.
        numbers: the positions of the ranges in the argument of `coalesce`.
    """

    key: str
    start: int
    stop: int | None
    numbers: tuple[int, ...]


def coalesce(
    ranges: Sequence[tuple[str, int, int | None]], gap_bytes: int, most_bytes: int
) -> Iterator[CoalescedRange]:
    """Group close ranges (key, start, stop) of the same object. The groups have no particular order.

    Args:
        ranges: in any order; they may overlap.
        gap_bytes: gaps up to this size are read, because that is cheaper than another request.
        most_bytes: the most bytes of a group of several ranges. A range without a known end is a separate group.
    """
    order = sorted(range(len(ranges)), key=lambda number: ranges[number][:2])
    numbers: list[int] = []
    key, first, last = "", 0, 0
    for number in order:
        of_key, start, stop = ranges[number]
        if stop is None:
            yield CoalescedRange(of_key, start, None, (number,))
            continue
        together = numbers and of_key == key and start <= last + gap_bytes and max(last, stop) - first <= most_bytes
        if not together:
            if numbers:
                yield CoalescedRange(key, first, last, tuple(numbers))
            numbers, key, first, last = [], of_key, start, stop
        numbers.append(number)
        last = max(last, stop)
    if numbers:
        yield CoalescedRange(key, first, last, tuple(numbers))


_MAX_THREADS: Final = 8
_IDLE_SECONDS: Final = 10.0
"""Idle time after which threads for remote storages end."""

S = TypeVar("S")
T = TypeVar("T")


class IOThreads:
    """Worker threads for requests and copies. They start when there is work. Any thread may submit work.

    There are two groups: `count` threads for copies and local storages, and, for remote storages, as many threads as
    their `ckptcore.protocols.StorageCapabilities.concurrency`. The groups do not wait for each other. Threads for
    remote storages end when they are idle. If the user set the number of threads, all storages use the first group.

    The threads are daemons. At exit, the interpreter does not wait for them, but it waits for background threads that
    use them, so a save in a background thread still completes. A forked child starts its own threads. If no thread can
    be started, `run` does all the work on the calling thread.
    """

    def __init__(self, count: int | None = None) -> None:
        """Use `count` threads. By default one for each processor, within 2 to 8, and more for remote storages."""
        if count is not None and count < 1:
            raise ValueError(f"expected at least one thread, found {count}")
        self.count: Final = count if count is not None else min(_MAX_THREADS, max(2, os.cpu_count() or 2))
        self._most: Final = count
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget the threads of the parent in a forked child."""
        self._local = _ThreadGroup(None)
        self._remote = _ThreadGroup(_IDLE_SECONDS)

    def parallelism(self, concurrency: int) -> int:
        """Return the most threads that a storage with this `concurrency` can use; always `count` if the user set it."""
        return self.count if self._most is not None or concurrency <= self.count else concurrency

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` on one of the threads, or on this thread if no thread can be started."""
        future: Future[T] = new_future()
        work = functools.partial(call_into, future, function)
        if not self._local.submit(work, self.count):
            work()
        return future

    def start(self, worker: Callable[[], None], parallelism: int, concurrency: int = 1) -> WorkerPool:
        """Start up to `parallelism` threads that call `worker` once each. `WorkerPool.join` must follow.

        Fewer threads call `worker`, or none, if the others are busy until the pool is joined. Therefore the caller must
        be able to do all the work itself.

        Args:
            worker: the function to call; must not raise.
            parallelism: maximum number of concurrent calls.
            concurrency: the `StorageCapabilities.concurrency` of the storage that `worker` waits for.
        """
        pool = WorkerPool(worker)
        most = self.parallelism(concurrency)
        group = self._remote if most > self.count else self._local
        for _ in range(min(parallelism, most)):
            if not group.submit(pool.work, most):
                break
        return pool

    def run(self, worker: Callable[[], None], parallelism: int, concurrency: int = 1) -> None:
        """Call `worker` on this thread and on up to ``parallelism - 1`` others. Return when all calls have returned.

        `worker` must not raise, and must return when no work is left. Never waits for a thread that has not started, so
        calls can be nested. See `start` for the arguments.
        """
        others = min(parallelism, self.parallelism(concurrency)) - 1
        if others < 1:
            worker()
            return
        pool = self.start(worker, others, concurrency)
        try:
            worker()
        finally:
            pool.join()

    def __del__(self) -> None:
        for group in (getattr(self, "_local", None), getattr(self, "_remote", None)):
            if group is not None:
                group.end()


class _ThreadGroup:
    """Threads that take work from one queue."""

    def __init__(self, idle_seconds: float | None) -> None:
        """End threads after `idle_seconds` without work; None: never."""
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._started = 0
        self._waiting = 0  # idle threads minus queued work

    @functools.cached_property
    def _work(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        import queue  # a small save starts no thread

        return queue.SimpleQueue()

    def submit(self, work: Callable[[], None], most: int) -> bool:
        """Queue work for at most `most` threads. Return False if no thread can do it."""
        with self._lock:
            if self._waiting <= 0 and self._started < most:
                thread = threading.Thread(
                    target=_serve,
                    # A weak reference, so that a waiting thread does not keep its group alive.
                    args=(self._work, weakref.ref(self), self._idle_seconds),
                    name="ckptcore-io",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is shutting down, or the system has no more threads
                    if self._started == 0:
                        return False
                else:
                    self._started += 1
                    self._waiting += 1
            self._waiting -= 1
            self._work.put(work)
            return True

    def mark_idle(self) -> None:
        """Count a thread that has finished its work."""
        with self._lock:
            self._waiting += 1

    def may_end(self) -> bool:
        """Return True if a thread that found no work may end, and False if work was queued for it meanwhile."""
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
    work: queue.SimpleQueue[Callable[[], None] | None], owner: weakref.ref[_ThreadGroup], idle_seconds: float | None
) -> None:
    from queue import Empty  # see `_ThreadGroup`

    while True:
        try:
            function = work.get(timeout=idle_seconds)
        except Empty:
            group = owner()
            # Work may be queued for this thread right after the timeout, so the group decides under its lock.
            if group is None or group.may_end():
                return
            del group
            continue
        if function is None:
            return
        function()
        del function  # release its references before the next wait
        if (group := owner()) is not None:
            group.mark_idle()
        del group


class WorkerPool:
    """Threads that call one worker."""

    def __init__(self, worker: Callable[[], None]) -> None:
        self._worker: Callable[[], None] | None = worker
        self._lock = threading.Lock()
        self._busy = 0
        self._idle = threading.Condition(self._lock)

    def work(self) -> None:
        """Call the worker, unless the pool was already joined."""
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
        """Prevent further threads from starting the worker, and wait for running calls, even if interrupted."""
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


def for_each(threads: IOThreads, items: Iterable[T], do: Callable[[T], None], *, parallelism: int = 1) -> None:
    """Call `do` with each item, in several threads. Return when all calls have returned.

    Args:
        threads: the threads to use besides the calling thread.
        items: may be a generator. Items are taken in order, one whenever a thread is free.
        do: the function.
        parallelism: the useful number of concurrent calls, if it is larger than the number of threads.

    Raises:
        The first error of a call. No item is taken after it, and no call runs when it is raised.
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
            errors.clear()  # break the cycle between the errors and this frame


def map_ordered(threads: IOThreads, items: Sequence[T], call: Callable[[T], S], *, parallelism: int = 1) -> Sequence[S]:
    """Return the results of `call` for each item, in order. See `for_each`."""
    results: dict[int, S] = {}

    def store(number: int) -> None:
        results[number] = call(items[number])

    for_each(threads, range(len(items)), store, parallelism=parallelism)
    return [results[number] for number in range(len(items))]


class BackgroundThreads:
    """Threads that call functions in the order of submission, and end once the queue is empty. Thread-safe.

    The interpreter waits for them at exit, unless they are daemons. The executors of `concurrent.futures` refuse work
    once the main thread has ended, and their module cannot be imported then. Here `submit` calls the function itself if
    no thread can be started, and in exit handlers.
    """

    def __init__(self, most: int, name: str, *, daemon: bool = False) -> None:
        """Start no thread yet.

        Args:
            most: maximum number of functions that run at the same time.
            name: the name of the threads.
            daemon: True if the interpreter must not wait for the threads at exit.
        """
        self._most = most
        self._daemon = daemon
        self._name = name
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._serving: set[int] = set()  # identifiers of threads
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    def submit(self, function: Callable[[], T], *, inline: bool = True) -> Future[T]:
        """Call a function on one of the threads.

        Args:
            function: the function.
            inline: True to call it on this thread if no other thread can be started.

        Raises:
            RuntimeError: no thread can be started, and `inline` is False.
        """
        future: Future[T] = new_future()
        work = future, function
        with self._lock:
            self._work.append(work)
            if len(self._serving) >= self._most:
                return future
        main = threading.main_thread()
        if main.is_alive() or threading.current_thread() is not main:
            try:
                threading.Thread(target=self._serve, name=self._name, daemon=self._daemon).start()
            except RuntimeError:  # the system has no more threads
                pass
            else:
                return future
        # The main thread runs exit handlers after it has joined all threads, so it would not wait for a new thread.
        if not inline:
            with self._lock:
                self._work.remove(work)
            raise RuntimeError("no thread can be started: the program is ending, or the system has no more threads")
        self._serve()
        return future

    def join(self, seconds: float | None = None, *, cancel: bool = False) -> None:
        """Wait until all functions have returned.

        Args:
            seconds: the longest time to wait; None: no limit.
            cancel: drop functions that have not started.
        """
        with self._lock:
            while cancel and self._work:
                future, _ = self._work.popleft()
                future.cancel()
        self._serve()  # calls functions that an interrupted `submit` has queued without a thread
        with self._lock:
            self._idle.wait_for(lambda: not self._work and not self._serving, seconds)

    def _serve(self) -> None:
        """Call functions until the queue is empty. Return immediately if enough threads already call functions."""
        thread = threading.get_ident()
        with self._lock:
            if len(self._serving) >= self._most or thread in self._serving:
                return
            self._serving.add(thread)
        try:
            while True:
                with self._lock:
                    if not self._work:
                        self._serving.remove(thread)
                        self._idle.notify_all()
                        return
                    future, function = self._work.popleft()
                call_into(future, function)
                del future, function  # release them before the next wait
        except BaseException:  # an interrupt; another thread serves the rest of the queue
            with self._lock:
                self._serving.discard(thread)
                self._idle.notify_all()
            raise


def call_within(seconds: float | None, function: Callable[[], None]) -> bool:
    """Call a function that may wait for a storage. Return False if it has not returned within `seconds`.

    If it has not returned, it continues on a daemon thread, which ends with the program.

    Args:
        seconds: the longest time to wait; None: no limit.
        function: the function; it should log its errors.
    """
    thread = threading.Thread(target=function, name="ckptcore-close", daemon=True)
    try:
        if seconds is not None:
            thread.start()
            thread.join(seconds)
            return not thread.is_alive()
    except RuntimeError:
        pass  # no thread can be started: the program is ending, or the system has no more threads
    function()
    return True


def new_future() -> Future[Any]:
    """Return a future that is pending."""
    from concurrent.futures import Future  # slow: imports `logging`

    return Future()


def call_into(future: Future[T], function: Callable[[], T]) -> None:
    """Call a function unless its future was cancelled, and store the result or error in the future."""
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


class _Resettable(Protocol):
    """An object that can be reset."""

    def reset_after_fork(self) -> None:
        """Return to the initial state. Must not take locks: a thread of the parent may have held them at the fork."""


def reset_in_children(resettable: _Resettable) -> None:
    """Call `reset_after_fork` of an object in every forked child, for as long as the object exists."""
    _RESETTABLE.add(resettable)


_RESETTABLE: Final[weakref.WeakSet[_Resettable]] = weakref.WeakSet()


def _after_fork() -> None:
    for resettable in _RESETTABLE:
        resettable.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
