"""Waiting for what the threads of a run do, without polling: until an event or a log record, or until uploads end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from ckptcore.events import Event

_SECONDS: Final = 60.0


class Signals(logging.Handler):
    """Wakes a test at each event and each log record. Use it as an observer, and as a handler of the logger.

    Attributes:
        messages: the messages of the log records so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._happened = threading.Event()

    def __call__(self, event: Event) -> None:
        """Wake the test."""
        self._happened.set()

    def emit(self, record: logging.LogRecord) -> None:
        """Store the message, and wake the test."""
        self.messages.append(record.getMessage())
        self._happened.set()

    def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until a condition is true. It is checked again after each event and each log record."""
        deadline = time.monotonic() + _SECONDS
        while True:
            self._happened.clear()
            if is_true():
                return
            assert self._happened.wait(max(0.0, deadline - time.monotonic()))


def join_uploads() -> None:
    """Wait until the upload threads end. They end when no step waits for its upload."""
    for thread in threading.enumerate():
        if thread.name == "ckptcore-upload":
            thread.join(_SECONDS)
            assert not thread.is_alive()
