"""Saves and loads in the background: their threads, their handles, and reports of errors that were never retrieved."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic, NoReturn, TypeVar

from ckptcore.errors import BackgroundSaveError
from ckptcore.io.requests import call_into, reset_in_children
from ckptcore.other_libraries import ExplainsAttributes
from ckptcore.progress import ByteProgress, Progress, ProgressCallback
from ckptcore.redaction import redacted_location

T = TypeVar("T")


class BackgroundThreads:
    """Threads that call functions in the order of submission, and end once the queue is empty. Thread-safe.

    The interpreter waits for them at exit, unless they are daemons. The executors of `concurrent.futures` refuse work
    once the main thread has ended, and their module cannot be imported then. Here `submit` calls the function itself if
    no thread can be started, and in exit handlers.
    """

    def __init__(self, most: int, name: str, *, daemon: bool = False) -> None:
        """Start no thread yet.

        Args:
            most: the most functions that run at once.
            name: the name of the threads.
            daemon: the interpreter does not wait for them at exit.
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
            inline: call it on this thread if no other can be started.

        Raises:
            RuntimeError: no thread can be started, and `inline` is False.
        """
        future: Future[T] = Future()
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
        # The main thread runs exit handlers after all threads were joined: nothing would wait for a new thread.
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
        self._serve()  # functions for which an interrupted `submit` started no thread
        with self._lock:
            self._idle.wait_for(lambda: not self._work and not self._serving, seconds)

    def _serve(self) -> None:
        """Call functions until the queue is empty. Return immediately if enough threads do."""
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

    Then it continues on a thread that ends with the program.

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


class SaveHandle(ExplainsAttributes):
    """A save that runs in the background."""

    def __init__(self, location: str, progress: ByteProgress) -> None:
        self.location = redacted_location(location)
        self._future: Future[None] = Future()
        self._claimed = threading.Event()
        self._progress = progress
        self._noticed = False
        self._key = object()  # identifies this handle in reports, which keep no reference to it
        self._saves: weakref.ref[BackgroundSaves] | None = None

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._future.exception() else "committed"
        return f"<SaveHandle {self.location!r} {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle or copy the handle of the save to {self.location}: wait for its result() here")

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed.

        Raises:
            TimeoutError: the save has not finished within `timeout` seconds. It continues.
            CheckpointError: the save failed.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def __await__(self) -> Generator[Any, None, None]:
        """Wait for `result` in a coroutine of asyncio: ``await ckptcore.save_async(path, state)``."""
        return _awaited(self.result)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save. Return its error, or None if it is committed.

        Raises:
            TimeoutError: the save has not finished within `timeout` seconds. It continues.
        """
        error = self._future.exception(timeout)
        self._noticed = True
        if error is not None:
            # The caller may raise it: its traceback then holds the locals of the frames that it passes.
            _exit_report().remove(self)
            if self._saves is not None and (saves := self._saves()) is not None:
                saves._forget(self)
        return error

    def done(self) -> bool:
        """Return True if the save is committed or failed."""
        return self._future.done()

    def wait_for_claim(self) -> None:
        """Wait until the save has claimed its location, or has failed.

        After the claim, the directory exists into which the save writes; on an object storage, a claim does.
        """
        self._claimed.wait()

    @property
    def matters(self) -> bool:
        """True if the save is running, or failed with an error that was not retrieved."""
        return not self.done() or (not self._noticed and self._future.exception() is not None)

    @property
    def progress(self) -> Progress:
        """Bytes of arrays that this process has written, and has to write; equal once the save is committed."""
        return self._progress.value


class LoadHandle(ExplainsAttributes, Generic[T]):
    """A load that runs in the background."""

    def __init__(self, load: Callable[[ProgressCallback], T]) -> None:
        """Start a load on a new thread. It reports its progress to the function that it is called with."""
        self._progress = Progress(0, 0)
        self._future = BackgroundThreads(1, "ckptcore-load").submit(functools.partial(load, self._set_progress))

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle or copy the handle of a load: wait for its result() here, and pickle that")

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value.

        Raises:
            TimeoutError: the load has not finished within `timeout` seconds. It continues.
            CheckpointError: the load failed.
        """
        return self._future.result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for `result` in a coroutine of asyncio: ``await ckptcore.load_async(path)``."""
        return _awaited(self.result)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the load. Return its error, or None."""
        return self._future.exception(timeout)

    def done(self) -> bool:
        """Return True if the load is done."""
        return self._future.done()

    @property
    def progress(self) -> Progress:
        """Bytes of arrays that this process has loaded, and has to load; zeros until the checkpoint is open."""
        return self._progress

    def _set_progress(self, done: int, total: int) -> None:
        self._progress = Progress(done, total)


def _awaited(result: Callable[[], T]) -> Generator[Any, None, T]:
    import asyncio  # most programs have no event loop

    # A thread waits, because cancelling the coroutine must not cancel the save or load.
    return asyncio.to_thread(result).__await__()


class BackgroundSaves:
    """The asynchronous saves of a Context. They run one after the other, in the order in which they started."""

    def __init__(self) -> None:
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Start without saves or threads. A forked child does not have the threads of its parent."""
        self._threads = BackgroundThreads(1, "ckptcore-save")
        self._lock = threading.RLock()  # reentrant: a save for which no thread starts runs while the lock is held
        self._handles: list[SaveHandle] = []

    def run(
        self, handle: SaveHandle, work: Callable[[], None], locations: Sequence[str] = (), *, inline: bool = True
    ) -> None:
        """Run a save after all earlier saves, and store its outcome in the handle.

        Args:
            handle: the handle of the save.
            work: writes and commits the save.
            locations: the targets of the save. It also waits for earlier saves of other Contexts to them.
            inline: do the work on this thread if no other can be started.

        Raises:
            RuntimeError: no thread can be started, and `inline` is False.
        """
        with self._lock:
            handle._saves = weakref.ref(self)
            self._handles = [*(other for other in self._handles if other.matters), handle]
            # Under the lock: turns must have the order of the queue, or two saves could wait for each other.
            turn = _ORDER.take(locations)
            try:
                self._threads.submit(functools.partial(_run, handle, work, turn), inline=inline)
            except BaseException:
                turn.end()
                self._forget(handle)
                raise

    def _forget(self, handle: SaveHandle) -> None:
        with self._lock:
            self._handles = [other for other in self._handles if other is not handle]

    def wait(self) -> None:
        """Wait until no save is running. Raises no errors of saves."""
        for handle in self._running():
            handle._future.exception()

    def wait_for_room(self) -> None:
        """Block until at most one save is running, so that at most two snapshots are in memory."""
        for handle in self._running()[:-1]:
            handle._future.exception()

    def busy(self) -> bool:
        """Return True if a save is running."""
        return bool(self._running())

    def raise_unnoticed(self) -> None:
        """Raise the error of an earlier save, if it was not retrieved.

        Raises:
            BackgroundSaveError: the error of the save is its cause.
        """
        for handle in self._failed_unnoticed():
            error = handle.exception()
            raise BackgroundSaveError(f"the earlier save to {handle.location} failed: {error}") from error

    def _running(self) -> list[SaveHandle]:
        with self._lock:
            return [handle for handle in self._handles if not handle.done()]

    def _failed_unnoticed(self) -> list[SaveHandle]:
        with self._lock:
            return [handle for handle in self._handles if handle.done() and handle.matters]


class _Turn:
    """The position of an asynchronous save in the queue of each of its locations."""

    def __init__(self, order: _SaveOrder, locations: Sequence[str], before: Sequence[_Turn]) -> None:
        self.locations = locations
        self._order = order
        self._before = before
        self._ended = threading.Event()

    def begin(self) -> None:
        """Wait for earlier saves, on the thread that runs this save."""
        for turn in self._before:
            turn.wait()
        self._before = ()
        self._order.running.turn = self

    def wait(self) -> None:
        """Wait until the save is committed or failed."""
        self._ended.wait()

    def end(self) -> None:
        """End the turn, so that later saves start."""
        self._order.running.turn = None
        self._order.remove(self)
        self._ended.set()


class _SaveOrder:
    """The asynchronous saves of all Contexts to each location, in the order in which they started. Thread-safe."""

    def __init__(self) -> None:
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget all saves: they do not run in a forked child."""
        self._lock = threading.Lock()
        self._last: dict[str, _Turn] = {}
        self.running = threading.local()

    def take(self, locations: Sequence[str]) -> _Turn:
        """Return the turn of a new save, after all earlier saves."""
        with self._lock:
            before = [self._last[location] for location in locations if location in self._last]
            turn = _Turn(self, locations, before)
            self._last.update(dict.fromkeys(locations, turn))
            return turn

    def remove(self, turn: _Turn) -> None:
        """Remove a save that ended."""
        with self._lock:
            for location in turn.locations:
                if self._last.get(location) is turn:
                    del self._last[location]

    def wait_for(self, location: str) -> None:
        """Wait for earlier saves to a location. Inside an asynchronous save, do not wait again."""
        if getattr(self.running, "turn", None) is not None:
            return
        with self._lock:
            turn = self._last.get(location)
        if turn is not None:
            turn.wait()


_ORDER: Final = _SaveOrder()


def wait_for_saves_to(location: str) -> None:
    """Wait for asynchronous saves of all Contexts of this process to a location. Inside such a save, do not wait."""
    _ORDER.wait_for(location)


def _run(handle: SaveHandle, work: Callable[[], None], turn: _Turn) -> None:
    try:
        turn.begin()
        try:
            work()
        finally:
            turn.end()
        handle._progress.end()
    except BaseException as error:  # noqa: BLE001  # raised by the caller of `result`, or reported at exit
        del work
        _clear_frames(error)
        _exit_report().add(handle, error)
        handle._future.set_exception(error)
    else:
        handle._future.set_result(None)
    finally:
        handle._claimed.set()  # a save can fail before its claim


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error: they refer to the state, and the caller may keep the error for a long time."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        pending += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions


class _ExitReport:
    """Failed saves that are reported when the program ends. Thread-safe."""

    def __init__(self) -> None:
        self._failures: dict[object, str] = {}  # by the key of the handle
        atexit.register(self.print)

    def add(self, handle: SaveHandle, error: BaseException) -> None:
        """Add a failed save."""
        self._failures[handle._key] = f"the save to {handle.location} failed: {type(error).__name__}: {error}"

    def remove(self, handle: SaveHandle) -> None:
        """Remove a save whose error was retrieved."""
        self._failures.pop(handle._key, None)

    def print(self) -> None:
        """Print the failed saves whose errors were not retrieved. The threads of all saves have been joined."""
        for failure in self._failures.values():
            print(f"ckptcore: {failure}", file=sys.stderr)


@functools.cache
def _exit_report() -> _ExitReport:
    return _ExitReport()
