"""Being told that the machine will be taken away: by SIGTERM, or as a framework tells it."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self, TypeAlias

from ckptcore.io.threads import renew_in_children

__all__ = ["PreemptionNotice", "TerminationSignal"]

PreemptionNotice: TypeAlias = Callable[[int], bool]
"""Tells, given a step, whether this process is to be preempted. It is asked at every step, on the training thread."""


_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""What `signal.getsignal` gives."""


class TerminationSignal:
    """A `PreemptionNotice` that SIGTERM gives: from the first one on, the answer is yes.

    While it is open, SIGTERM no longer ends the process: the training loop does, when it has saved. A handler that the program
    had is called too. A forked child does with SIGTERM what it did before, so that worker processes can be ended.
    """

    def __init__(self) -> None:
        """Listen from now on.

        Raises:
            ValueError: not on the main thread, where alone signals can be listened to.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "SIGTERM can be listened to on the main thread only: make the Checkpointer there, or pass "
                "preemption_notice=, a function that tells whether this process is to be preempted"
            )
        self._received = False
        self._closed = False
        # Not held by the signal: one that is dropped without being closed must not leave the process deaf.
        reference = weakref.ref(self)
        self._previous: _Handler = signal.getsignal(signal.SIGTERM)
        previous = self._previous

        def handle(number: int, frame: FrameType | None) -> None:
            own = reference()
            if own is not None:
                own._hear(number, frame)
            else:
                _hand_on(previous, handle, number, frame)

        self._handler = handle
        signal.signal(signal.SIGTERM, handle)
        renew_in_children(self)

    def renew(self) -> None:
        """Listen no longer: this is a forked child, and the training loop is its parent's."""
        self.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if self._closed:
            # It could not be taken out when it was closed.
            _hand_on(self._previous, self._handler, number, frame)
        elif callable(self._previous):
            self._previous(number, frame)

    def _is_asked_first(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self._handler

    def __call__(self, step: int) -> bool:
        """Whether SIGTERM came."""
        return self._received

    def close(self) -> None:
        """Listen no longer; what listened before does again. Any thread; again is no error."""
        self._closed = True
        # What somebody put in place meanwhile stays, and may still call this one. Off the main thread nothing can be put
        # back, and what comes is handed on.
        if self._is_asked_first() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Listen no longer."""
        self.close()


def _hand_on(previous: _Handler, own: _Handler, number: int, frame: FrameType | None) -> None:
    """Do with a signal what was done before somebody listened who no longer does."""
    if callable(previous):
        previous(number, frame)
    elif previous != signal.SIG_IGN and signal.getsignal(signal.SIGTERM) is own:
        # Nobody else listens: the process ends, as it would have.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
