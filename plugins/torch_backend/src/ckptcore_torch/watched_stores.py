"""Exchanges over a torch.distributed store, with a timeout for each request and clear errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ckptcore.errors import CoordinationTimeoutError, RankFailedError

T = TypeVar("T")

_SERVER_HINT: Final = "it runs in the launcher (torchrun) or in the process of rank 0: check that this is running"

_CHECK_SECONDS: Final = 0.5
"""Interval of the checks for a timeout, in seconds."""


class WatchedStore:
    """The store of one exchange, used on the thread of `run_watched`.

    Attributes:
        abandoned: set when `run_watched` stops waiting for the exchange.
        pending: the function that sends the pending request; None if no request is pending.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self.abandoned = threading.Event()
        self.pending: Callable[[], object] | None = None

    def set(self, name: str, value: bytes) -> None:
        """Set the value of a name, which is a key of the store."""
        self._request(lambda: self._store.set(name, value))

    def get(self, name: str) -> bytes:
        """Return the value of an existing name."""
        return bytes(self._request(lambda: self._store.get(name)))

    def has(self, name: str) -> bool:
        """Return True if a name exists."""
        return bool(self._request(lambda: self._store.check([name])))

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, and return the sum."""
        return int(self._request(lambda: self._store.add(name, amount)))

    def remove(self, name: str) -> None:
        """Remove a name."""
        self._request(lambda: self._store.delete_key(name))

    def pause(self, seconds: float) -> None:
        """Sleep, but wake up if the exchange is abandoned."""
        self.abandoned.wait(seconds)

    def _request(self, request: Callable[[], T]) -> T:
        if self.abandoned.is_set():
            raise RankFailedError(f"the exchange {self._key!r} was abandoned")
        self.pending = request
        try:
            return request()
        except RuntimeError as error:  # base of the errors of a failed server, such as torch.distributed.DistError
            raise RankFailedError(
                f"the store of the job failed in the exchange {self._key!r}: {error}; {_SERVER_HINT}"
            ) from error
        finally:
            self.pending = None


def run_watched(store: Any, key: str, rank: int, timeout_seconds: float, exchange: Callable[[WatchedStore], T]) -> T:
    """Run an exchange, and stop waiting if a request to the store exceeds the timeout.

    If the server process of ``torch.distributed.TCPStore`` is stopped, ``check``, ``get`` and
    ``add`` wait without a limit (torch 2.13.0). Therefore the exchange runs on another thread,
    which is abandoned on timeout. The time of a request is counted in checks, so that a request
    does not time out because the whole machine was suspended.

    Args:
        store: a `torch.distributed.Store`.
        key: key of the exchange.
        rank: rank of this process.
        timeout_seconds: timeout of one request.
        exchange: runs the exchange on the store that it gets.

    Raises:
        CoordinationTimeoutError: if the store does not answer. On other ranks than the leader, it
            reports the leader as missing.
        RankFailedError: if the store failed.
        Exception: any other error of the exchange.
    """
    watched = WatchedStore(store, key)
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()
    interval = min(_CHECK_SECONDS, timeout_seconds)

    def run() -> None:
        try:
            results.append(exchange(watched))
        except BaseException as error:  # noqa: BLE001  # raised on the waiting thread
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="ckptcore-store", daemon=True).start()
    seen, waited = None, 0.0
    try:
        while not done.wait(interval):
            pending = watched.pending
            waited = waited + interval if pending is not None and pending is seen else 0.0
            seen = pending
            if waited >= timeout_seconds:
                raise CoordinationTimeoutError(
                    f"the store of the job did not answer for {timeout_seconds:g} s "
                    f"in the exchange {key!r}; {_SERVER_HINT}",
                    [0] if rank else [],
                )
        if errors:
            raise errors[0]
        return results[0]
    finally:
        watched.abandoned.set()
        errors.clear()  # breaks the reference cycle between an error and this frame
