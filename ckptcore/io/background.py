"""Saves and loads in the background: their threads and handles, and reports of errors that were never retrieved."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NoReturn, TypeVar

from ckptcore.errors import BackgroundSaveError
from ckptcore.io.threads import BackgroundThreads, new_future, reset_in_children
from ckptcore.other_libraries import ExplainsAttributes
from ckptcore.progress import ByteProgress, Progress, ProgressCallback
from ckptcore.redaction import redacted_location

T = TypeVar("T")


class SaveHandle(ExplainsAttributes):
    """A save that runs in the background."""

    def __init__(self, location: str, progress: ByteProgress) -> None:
        self.location = redacted_location(location)
        self._future = new_future()
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
            # If the caller raises the error, its traceback keeps the locals of frames alive. Keep no reference here.
            _exit_report().remove(self)
            if self._saves is not None and (saves := self._saves()) is not None:
                saves._forget(self)
        return error

    def done(self) -> bool:
        """Return True if the save is committed or failed."""
        return self._future.done()

    def wait_for_claim(self) -> None:
        """Wait until the save has claimed its location, or has failed.

        After the claim, the directory that the save writes into exists. On an object storage, the claim object exists.
        """
        self._claimed.wait()

    @property
    def matters(self) -> bool:
        """True if the save is running, or failed with an error that was not retrieved."""
        return not self.done() or (not self._noticed and self._future.exception() is not None)

    @property
    def progress(self) -> Progress:
        """Bytes of arrays that this process has written, and all bytes to write. Equal once the save is committed."""
        return self._progress.value


class LoadHandle(ExplainsAttributes, Generic[T]):
    """A load that runs in the background."""

    def __init__(self, load: Callable[[ProgressCallback], T]) -> None:
        """Start a load on a new thread. `load` is called with the function to which it reports its progress."""
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
        """Wait for the load. Return its error, or None if it succeeded."""
        return self._future.exception(timeout)

    def done(self) -> bool:
        """Return True if the load is done."""
        return self._future.done()

    @property
    def progress(self) -> Progress:
        """Bytes of arrays that this process has loaded, and all bytes to load. Zeros until the checkpoint is open."""
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
        self._lock = threading.RLock()  # reentrant: if no thread can be started, a save runs under this lock
        self._handles: list[SaveHandle] = []

    def run(
        self, handle: SaveHandle, work: Callable[[], None], locations: Sequence[str] = (), *, inline: bool = True
    ) -> None:
        """Run a save after all earlier saves, and store its outcome in the handle.

        Args:
            handle: the handle of the save.
            work: writes and commits the save.
            locations: the targets of the save. The save also waits for earlier saves of other Contexts to the same
                targets.
            inline: True to do the work on this thread if no other thread can be started.

        Raises:
            RuntimeError: no thread can be started, and `inline` is False.
        """
        with self._lock:
            handle._saves = weakref.ref(self)
            self._handles = [*(other for other in self._handles if other.matters), handle]
            # Take the turn under the lock: turns must have the order of the queue, or two saves could wait for each
            # other.
            turn = _ORDER.take(locations)
            try:
                self._threads.submit(functools.partial(_run, handle, work, turn), inline=inline)
            except BaseException:
                _ORDER.end(turn)
                self._forget(handle)
                raise

    def _forget(self, handle: SaveHandle) -> None:
        with self._lock:
            self._handles = [other for other in self._handles if other is not handle]

    def wait(self) -> None:
        """Wait until no save is running. Does not raise the errors of saves."""
        for handle in self._running():
            handle._future.exception()

    def wait_for_room(self) -> None:
        """Block until at most one save is running, so that at most two snapshots are in memory."""
        for handle in self._running()[:-1]:
            handle._future.exception()

    def raise_unnoticed(self) -> None:
        """Raise the error of an earlier save if the error was not retrieved.

        Raises:
            BackgroundSaveError: the error of the save is its cause.
        """
        with self._lock:
            failed = [handle for handle in self._handles if handle.done() and handle.matters]
        if failed:
            handle = failed[0]
            error = handle.exception()
            raise BackgroundSaveError(f"the earlier save to {handle.location} failed: {error}") from error

    def _running(self) -> list[SaveHandle]:
        with self._lock:
            return [handle for handle in self._handles if not handle.done()]


@dataclass(slots=True, eq=False)
class _Turn:
    """The position of an asynchronous save in the queue of each of its locations.

    Attributes:
        locations: the locations.
        before: events of the previous save to each location; each is set once that save has ended.
        ended: set once this save has ended.
    """

    locations: Sequence[str]
    before: Sequence[threading.Event]
    ended: threading.Event = field(default_factory=threading.Event)


class _SaveOrder:
    """The asynchronous saves of all Contexts to each location, in the order in which they started. Thread-safe."""

    def __init__(self) -> None:
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget all saves: they do not run in a forked child."""
        self._lock = threading.Lock()
        self._last: dict[str, _Turn] = {}
        self._running = threading.local()

    def take(self, locations: Sequence[str]) -> _Turn:
        """Return the turn of a new save, after all earlier saves."""
        with self._lock:
            before = [self._last[location].ended for location in locations if location in self._last]
            turn = _Turn(locations, before)
            self._last.update(dict.fromkeys(locations, turn))
            return turn

    def begin(self, turn: _Turn) -> None:
        """Wait for earlier saves, on the thread that runs the save of a turn."""
        for ended in turn.before:
            ended.wait()
        self._running.turn = turn

    def end(self, turn: _Turn) -> None:
        """End a turn, so that later saves start."""
        self._running.turn = None
        with self._lock:
            for location in turn.locations:
                if self._last.get(location) is turn:
                    del self._last[location]
        turn.ended.set()

    def wait_for(self, location: str) -> None:
        """Wait for earlier saves to a location. Do nothing inside an asynchronous save, which has waited already."""
        if getattr(self._running, "turn", None) is not None:
            return
        with self._lock:
            turn = self._last.get(location)
        if turn is not None:
            turn.ended.wait()


_ORDER: Final = _SaveOrder()


def wait_for_saves_to(location: str) -> None:
    """Wait for the asynchronous saves of all Contexts to a location. Inside such a save, do not wait."""
    _ORDER.wait_for(location)


def _run(handle: SaveHandle, work: Callable[[], None], turn: _Turn) -> None:
    try:
        _ORDER.begin(turn)
        try:
            work()
        finally:
            _ORDER.end(turn)
        handle._progress.end()
    except BaseException as error:  # noqa: BLE001  # raised by the caller of `result`, or reported at exit
        del work  # refers to the state: `_clear_frames` cannot clear this frame, which is still running
        _clear_frames(error)
        _exit_report().add(handle, error)
        handle._future.set_exception(error)
    else:
        handle._future.set_result(None)
    finally:
        handle._claimed.set()  # a save can fail before its claim


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error. They refer to the state, and the caller may keep the error for a long time."""
    import traceback  # only errors need it

    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        pending += [cause.__cause__, cause.__context__]
        if isinstance(cause, BaseExceptionGroup):
            pending += cause.exceptions


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
