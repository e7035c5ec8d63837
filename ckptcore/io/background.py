"""Saves and loads in the background: their threads, their handles, and reports of errors that were not retrieved."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from ckptcore.errors import BackgroundSaveError
from ckptcore.other_libraries import ExplainsAttributes
from ckptcore.redaction import redacted

__all__ = [
    "BackgroundSaves",
    "BackgroundThreads",
    "LoadHandle",
    "Progress",
    "SaveHandle",
    "call_into",
    "wait_for_saves_to",
]

T = TypeVar("T")


def call_into(future: Future[T], function: Callable[[], T]) -> None:
    """Call a function unless its future was cancelled, and give the future its result or error."""
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


class BackgroundThreads:
    """Threads that call functions in the order of submission, and end once the queue is empty. Thread-safe.

    The interpreter waits for them at exit. The executors of `concurrent.futures` refuse work once the main thread has
    ended, and their module cannot be imported then. Here `submit` calls the function itself where no thread can be
    started, and in exit handlers.
    """

    def __init__(self, most: int, name: str) -> None:
        """Start no thread yet.

        Args:
            most: how many functions run at once.
            name: of the threads.
        """
        self._most = most
        self._name = name
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._serving: set[int] = set()  # identifiers of threads
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    def submit(self, function: Callable[[], T], *, inline: bool = True) -> Future[T]:
        """Call a function on one of the threads.

        Args:
            function: to call.
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
                threading.Thread(target=self._serve, name=self._name).start()
            except RuntimeError:  # the system has no more threads
                pass
            else:
                return future
        # The main thread runs exit handlers after all threads were joined: no one would wait for a new one.
        if not inline:
            with self._lock:
                self._work.remove(work)
            raise RuntimeError("no thread can be started: the program is ending, or the system has no more threads")
        self._serve()
        return future

    def join(self, *, cancel: bool = False) -> None:
        """Wait until all functions have returned; `cancel` drops those that have not begun."""
        with self._lock:
            while cancel and self._work:
                future, _ = self._work.popleft()
                future.cancel()
        self._serve()  # functions for which an interrupted `submit` started no thread
        with self._lock:
            self._idle.wait_for(lambda: not self._work and not self._serving)

    def _serve(self) -> None:
        """Call functions until the queue is empty. Return at once if enough threads do."""
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
                del future, function  # this frame must not hold them while it waits
        except BaseException:  # an interrupt; another thread serves what is left
            with self._lock:
                self._serving.discard(thread)
                self._idle.notify_all()
            raise


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a save.

    Attributes:
        written: bytes of arrays and headers that are in the storage.
        total: bytes of arrays that this process writes.
    """

    written: int
    total: int


class SaveHandle(ExplainsAttributes):
    """A save that runs in the background."""

    def __init__(self, location: str, total: int) -> None:
        self.location = redacted(location)
        self._future: Future[None] = Future()
        self._total = total
        self._written = 0
        self._lock = threading.Lock()
        self._noticed = False
        self._key = object()  # identifies this handle in reports that do not keep it
        self._kept_by: weakref.ref[BackgroundSaves] | None = None

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._future.exception() else "committed"
        return f"<SaveHandle {self.location!r} {state}>"

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed.

        Raises:
            TimeoutError: if it is not within `timeout` seconds; the save goes on.
            CheckpointError: why the save failed.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save. Return its error, or None if it is committed."""
        error = self._future.exception(timeout)
        self._noticed = True
        if error is not None:
            # The caller may raise it, and then it holds the locals of the frames that it passes.
            _exit_report().remove(self)
            if self._kept_by is not None and (keeper := self._kept_by()) is not None:
                keeper._forget(self)
        return error

    def done(self) -> bool:
        """Return True if the save is committed or failed."""
        return self._future.done()

    @property
    def matters(self) -> bool:
        """True if the save is running, or failed with an error that was not retrieved."""
        return not self.done() or (not self._noticed and self._future.exception() is not None)

    @property
    def progress(self) -> Progress:
        """Progress of the save."""
        return Progress(self._written, self._total)

    def count(self, nbytes: int) -> None:
        """Add bytes that were written to the storage. Any thread."""
        with self._lock:
            self._written += nbytes


class LoadHandle(ExplainsAttributes, Generic[T]):
    """A load that runs in the background."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value.

        Raises:
            TimeoutError: if it is not there within `timeout` seconds; the load goes on.
            CheckpointError: why the load failed.
        """
        return self._future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the load. Return its error, or None."""
        return self._future.exception(timeout)

    def done(self) -> bool:
        """Return True if the load is done."""
        return self._future.done()


class BackgroundSaves:
    """The asynchronous saves of a Context, one after the other in the order in which they began."""

    def __init__(self) -> None:
        self._begin_anew()
        _ALL.add(self)

    def _begin_anew(self) -> None:
        """Start without saves or threads. A forked child does not have the threads of its parent."""
        self._threads = BackgroundThreads(1, "ckptcore-save")
        self._lock = threading.RLock()  # a save that cannot have a thread runs while it is held
        self._handles: list[SaveHandle] = []

    def run(
        self, handle: SaveHandle, work: Callable[[], None], locations: Sequence[str] = (), *, inline: bool = True
    ) -> None:
        """Run a save after those before it, and give its outcome to the handle.

        Args:
            handle: of the save.
            work: writes and commits it.
            locations: the save's targets; it also waits for earlier saves of other Contexts to them.
            inline: do the work on this thread if no other can be started.

        Raises:
            RuntimeError: no thread can be started, and `inline` is False.
        """
        with self._lock:
            handle._kept_by = weakref.ref(self)
            self._handles = [*(other for other in self._handles if other.matters), handle]
            # Under the lock: turns must come in the order of the queue, or two saves could wait for each other.
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

    def load(self, work: Callable[[], T]) -> LoadHandle[T]:
        """Run a load on a thread of its own."""
        return LoadHandle(BackgroundThreads(1, "ckptcore-load").submit(work))

    def wait(self) -> None:
        """Wait until no save is running. Raises no errors of saves."""
        for handle in self._under_way():
            handle._future.exception()

    def wait_for_room(self) -> None:
        """Block until at most one save is running, so that at most two snapshots are in memory."""
        for handle in self._under_way()[:-1]:
            handle._future.exception()

    def busy(self) -> bool:
        """Return True if a save is running."""
        return bool(self._under_way())

    def raise_unnoticed(self) -> None:
        """Raise the error of an earlier save, if it was not retrieved.

        Raises:
            BackgroundSaveError: with the save's error as its cause.
        """
        for handle in self._failed_unnoticed():
            error = handle.exception()
            raise BackgroundSaveError(f"the earlier save to {handle.location} failed: {error}") from error

    def _under_way(self) -> list[SaveHandle]:
        with self._lock:
            return [handle for handle in self._handles if not handle.done()]

    def _failed_unnoticed(self) -> list[SaveHandle]:
        with self._lock:
            return [handle for handle in self._handles if handle.done() and handle.matters]


class _Turn:
    """The place of an asynchronous save among those to the same locations."""

    def __init__(self, order: _SaveOrder, locations: Sequence[str], before: Sequence[_Turn]) -> None:
        self.locations = locations
        self._order = order
        self._before = before
        self._ended = threading.Event()

    def begin(self) -> None:
        """Wait for the saves before this one, on the thread that runs it."""
        for turn in self._before:
            turn.wait()
        self._before = ()
        self._order.running.turn = self

    def wait(self) -> None:
        """Wait until the save has committed or failed."""
        self._ended.wait()

    def end(self) -> None:
        """End the turn, so that later saves begin."""
        self._order.running.turn = None
        self._order.remove(self)
        self._ended.set()


class _SaveOrder:
    """The asynchronous saves of all Contexts to each location, in the order in which they began. Thread-safe."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all saves: a forked child runs none of those of its parent."""
        self._lock = threading.Lock()
        self._last: dict[str, _Turn] = {}
        self.running = threading.local()

    def take(self, locations: Sequence[str]) -> _Turn:
        """Give a save its turn after those that began before."""
        with self._lock:
            before = [self._last[location] for location in locations if location in self._last]
            turn = _Turn(self, locations, before)
            self._last.update(dict.fromkeys(locations, turn))
            return turn

    def remove(self, turn: _Turn) -> None:
        """Forget a save that ended."""
        with self._lock:
            for location in turn.locations:
                if self._last.get(location) is turn:
                    del self._last[location]

    def wait_for(self, location: str) -> None:
        """Wait for earlier saves to a location. A save that runs in its turn has waited already."""
        if getattr(self.running, "turn", None) is not None:
            return
        with self._lock:
            turn = self._last.get(location)
        if turn is not None:
            turn.wait()


_ORDER: Final = _SaveOrder()


def wait_for_saves_to(location: str) -> None:
    """Wait for asynchronous saves of all Contexts of this process to a location. Inside such a save, return at once."""
    _ORDER.wait_for(location)


_ALL: Final[weakref.WeakSet[BackgroundSaves]] = weakref.WeakSet()


def _after_fork() -> None:
    _ORDER.begin_anew()
    for saves in _ALL:
        saves._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _run(handle: SaveHandle, work: Callable[[], None], turn: _Turn) -> None:
    try:
        turn.begin()
        try:
            work()
        finally:
            turn.end()
    except BaseException as error:  # noqa: BLE001  # raised by the caller of `result`, or reported at exit
        del work
        _empty_frames(error)
        _exit_report().add(handle, error)
        handle._future.set_exception(error)
    else:
        handle._future.set_result(None)


def _empty_frames(error: BaseException) -> None:
    """Clear the frames of an error, which hold the state and its memory: the error may be kept for long."""
    seen: set[int] = set()
    behind: list[BaseException | None] = [error]
    while behind:
        one = behind.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        behind += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            behind += one.exceptions


class _ExitReport:
    """Failed saves that are reported when the program ends. Any thread."""

    def __init__(self) -> None:
        self._unheard: dict[object, str] = {}  # by the key of the handle, which is not kept itself
        atexit.register(self.print)

    def add(self, handle: SaveHandle, error: BaseException) -> None:
        """Remember a save that is about to fail."""
        self._unheard[handle._key] = f"the save to {handle.location} failed: {type(error).__name__}: {error}"

    def remove(self, handle: SaveHandle) -> None:
        """Forget a save: its error was retrieved."""
        self._unheard.pop(handle._key, None)

    def print(self) -> None:
        """Print the failed saves whose errors were not retrieved. The threads of all saves have been joined."""
        for failure in self._unheard.values():
            print(f"ckptcore: {failure}", file=sys.stderr)


@functools.cache
def _exit_report() -> _ExitReport:
    return _ExitReport()
