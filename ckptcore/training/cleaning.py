"""Cleaner: the thread on which a run deletes and collects, behind what was asked for before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import RLock
from typing import Final

from ckptcore.io.background import BackgroundThreads

__all__ = ["Cleaner"]

logger = logging.getLogger("ckptcore.training")

_MOST_UNHEARD: Final = 100
"""How many errors are kept to be told; all are logged."""


class Cleaner:
    """Does work in the background, one thing after the other, and keeps the errors until somebody takes them. Any thread may ask.

    The thread begins with the first work.
    """

    def __init__(self, directory: str) -> None:
        """Do nothing yet.

        Args:
            directory: what is cleaned, as the log calls it.
        """
        self._directory = directory
        self._lock = RLock()  # reentrant: without a thread, work runs while the lock is held
        self._refuses = False
        self._threads = BackgroundThreads(1, "ckptcore-clean")
        self._asked: list[Future[None]] = []

    def __len__(self) -> int:
        """How much of what was asked for is kept, because nobody has heard yet how it ended."""
        with self._lock:
            return len(self._asked)

    def begin(self, work: Callable[[], object]) -> None:
        """Do work after what was asked for before; nothing once it refuses: the next owner of the directory cleans what is left over."""
        with self._lock:
            if self._refuses:
                return
            self._asked = [*self._unheard(), self._threads.submit(partial(self._do, work))]

    def take_errors(self) -> Sequence[BaseException]:
        """Wait until all that was asked for before this call is done; what failed, each told once.

        Who is interrupted while it waits has taken nothing.
        """
        with self._lock:
            asked = list(self._asked)
        errors = [error for work in asked if (error := work.exception()) is not None]
        with self._lock:
            self._asked = [work for work in self._asked if work not in asked]
        return errors

    def refuse(self) -> None:
        """Take no more work."""
        with self._lock:
            self._refuses = True

    def close(self) -> None:
        """Take no more work, and return once what was asked for is done. Again is no error."""
        self.refuse()
        self._threads.join()

    def _unheard(self) -> list[Future[None]]:
        failed = [work for work in self._asked if work.done() and work.exception() is not None]
        running = [work for work in self._asked if not work.done()]
        return [*failed[:_MOST_UNHEARD], *running]

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            logger.warning("cleaning %s failed: %s", self._directory, error)
            raise
