"""Time, and work that is done again and again; a test brings a clock of its own."""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from ckptcore.io.threads import renew_in_children

__all__ = ["SYSTEM_CLOCK", "Clock", "Repetition", "SystemClock"]

logger = logging.getLogger("ckptcore.commit")

_EXIT_SECONDS: Final = 5.0
"""How long the end of the program waits at most for what is to be done last."""


class Repetition(Protocol):
    """Work that is done again and again until it is stopped, or this object is dropped."""

    def stop(self) -> None:
        """Do it no more; waits for nothing. Again is no error."""
        ...


class Clock(Protocol):
    """How time goes by. Any thread."""

    def now(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def repeat(self, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> Repetition:
        """Call `work` every so many seconds, on another thread, until stopped; then `at_end`, once.

        It ends too when the program does, and when the result is dropped: neither function may refer to it.
        """
        ...


class SystemClock:
    """The real one. A forked child repeats nothing of what its parent does."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait on this thread."""
        time.sleep(seconds)

    def repeat(self, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> Repetition:
        """Start a daemon thread; the end of the program waits some seconds for `at_end`, and no longer."""
        return _Repeating(seconds, work, at_end)


SYSTEM_CLOCK: Final = SystemClock()

_Wakings: TypeAlias = "queue.SimpleQueue[None]"


class _Repeating:
    """A thread that waits most of the time. It does not know this object, so dropping this ends it."""

    def __init__(self, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> None:
        # Of all that wakes a thread only this queue may be used in `__del__`, which can come in the midst of anything.
        self._wake: _Wakings = queue.SimpleQueue()
        self.thread: Final = threading.Thread(
            target=_repeat, args=(self._wake, seconds, work, at_end), name="ckptcore-lease", daemon=True
        )
        self.thread.start()
        _exit().add(self)

    def stop(self) -> None:
        self._wake.put(None)

    def __del__(self) -> None:
        self._wake.put(None)


def _repeat(wake: _Wakings, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> None:
    while True:
        try:
            wake.get(timeout=seconds)
        except queue.Empty:
            _attempt(work)
        else:
            _attempt(at_end)
            return


def _attempt(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001  # the thread must go on: one failure does not lose a lease
        logger.warning("a lease could not be renewed or let go: %s", error)


class _Exit:
    """What is still repeated when the program ends."""

    def __init__(self) -> None:
        self.renew()
        renew_in_children(self)
        atexit.register(self.end_all)

    def renew(self) -> None:
        """Know of nothing: the threads of a process do not follow it into a forked child."""
        self._repeating: weakref.WeakSet[_Repeating] = weakref.WeakSet()

    def add(self, repeating: _Repeating) -> None:
        self._repeating.add(repeating)

    def end_all(self) -> None:
        """End everything, and wait for it for a bounded time; saves in the background have ended by now."""
        running = list(self._repeating)
        for repeating in running:
            repeating.stop()
        deadline = time.monotonic() + _EXIT_SECONDS
        for repeating in running:
            repeating.thread.join(max(0.0, deadline - time.monotonic()))


@functools.cache
def _exit() -> _Exit:
    return _Exit()
