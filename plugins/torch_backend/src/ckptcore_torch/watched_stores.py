"""A torch.distributed store with a timeout for every answer, and with clear errors."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ckptcore.errors import CoordinationTimeoutError, RankFailedError

__all__ = ["WatchedStore", "watched"]

T = TypeVar("T")

_WHERE: Final = "it runs in the launcher (torchrun), or else in the process of rank 0: check that this is running"

_LOOK_SECONDS: Final = 0.5
"""Interval of the checks for a timeout."""


class WatchedStore:
    """A store for one exchange, on the thread of `watched`.

    Attributes:
        left: set when the exchange was abandoned.
        asked: start of the pending request, by `time.monotonic`; infinity if there is none.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self.left = threading.Event()
        self.asked = math.inf

    def set(self, name: str, value: bytes) -> None:
        """Set the value of a name."""
        self._ask(lambda: self._store.set(name, value))

    def get(self, name: str) -> bytes:
        """Return the value of an existing name."""
        return bytes(self._ask(lambda: self._store.get(name)))

    def has(self, name: str) -> bool:
        """Return True if a name exists."""
        return bool(self._ask(lambda: self._store.check([name])))

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, and return the sum."""
        return int(self._ask(lambda: self._store.add(name, amount)))

    def remove(self, name: str) -> None:
        """Remove a name."""
        self._ask(lambda: self._store.delete_key(name))

    def pause(self, seconds: float) -> None:
        """Sleep, but wake up if the exchange is abandoned."""
        self.left.wait(seconds)

    def _ask(self, question: Callable[[], T]) -> T:
        if self.left.is_set():
            raise RankFailedError(f"the exchange {self._key!r} was abandoned")
        self.asked = time.monotonic()
        try:
            return question()
        except RuntimeError as error:  # base of torch.distributed.DistError; a failed server causes several types
            raise RankFailedError(
                f"the store of the job failed in the exchange {self._key!r}: {error}; {_WHERE}"
            ) from error
        finally:
            self.asked = math.inf


def watched(store: Any, key: str, rank: int, timeout_seconds: float, exchange: Callable[[WatchedStore], T]) -> T:
    """Run an exchange, and stop waiting if a request to the store exceeds the timeout.

    ``torch.distributed.TCPStore`` waits endlessly for answers to ``check``, ``get`` and ``add``
    (torch 2.13.0, if the server process is stopped). Therefore requests run on another thread,
    which is abandoned on timeout.

    Args:
        store: a `torch.distributed.Store`.
        key: of the exchange.
        rank: of this process.
        timeout_seconds: timeout of one request.
        exchange: the exchange to run with the store.

    Raises:
        CoordinationTimeoutError: if the store does not answer. Other ranks than the leader report
            the leader as missing.
        RankFailedError: if the store failed.
    """
    seen = WatchedStore(store, key)
    results: list[T] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            results.append(exchange(seen))
        except BaseException as error:  # noqa: BLE001  # raised on the waiting thread
            errors.append(error)
        finally:
            over.set()

    threading.Thread(target=run, name="ckptcore-store", daemon=True).start()
    try:
        while not over.wait(min(_LOOK_SECONDS, timeout_seconds)):
            if time.monotonic() >= seen.asked + timeout_seconds:
                raise CoordinationTimeoutError(
                    f"the store of the job did not answer for {timeout_seconds:g} s in the exchange {key!r}; {_WHERE}",
                    [0] if rank else [],
                )
        if errors:
            raise errors[0]
        return results[0]
    finally:
        seen.left.set()
        errors.clear()  # break the reference cycle between an error and this frame
