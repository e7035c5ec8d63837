"""Many small objects on their way to the storage: several at a time, and no more after one has failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

__all__ = ["SmallObjects"]

_THREADS: Final = 8
"""Threads that wait for the storage: they wait most of the time."""

_STARTED: Final = 4 * _THREADS
"""Objects that are asked for ahead of those that are written."""


class SmallObjects:
    """Writes objects on threads of its own; a context that ends when all are written. One thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "ckptcore-objects")
        self._started: deque[Future[None]] = deque()
        self._failed = False

    def start(self, write: Callable[[], None]) -> None:
        """Let one object be written.

        Raises:
            StorageError: the error of one before; a storage that fails may take minutes to say so of every object.
        """
        while len(self._started) >= _STARTED:
            self._started.popleft().result()
        self._started.append(self._pool.submit(self._write, write))

    def _write(self, write: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            write()
        except BaseException:
            self._failed = True
            raise

    def wait(self) -> None:
        """Wait until all are written.

        Raises:
            StorageError: the first error.
        """
        while self._started:
            self._started.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            # Those that have begun are waited for: the memory that they write from is given back after this.
            self._pool.shutdown(wait=True, cancel_futures=True)
