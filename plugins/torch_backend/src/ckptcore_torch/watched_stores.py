"""A store of torch.distributed whose answers are waited for until a deadline only, and whose errors say what failed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ckptcore.errors import CoordinationTimeoutError, RankFailedError

__all__ = ["WatchedStore", "watched"]

T = TypeVar("T")

_WHERE: Final = "it runs in the launcher (torchrun), or else in the process of rank 0: look whether that is alive"

_LOOK_SECONDS: Final = 0.5
"""How often it is looked whether the store still answers."""


class WatchedStore:
    """A store, for one exchange. On the thread of `watched`.

    Attributes:
        left: set when nobody waits for the exchange any longer.
        asked: when the store was asked what it has not answered yet, by `time.monotonic`; infinity if it owes no answer.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self.left = threading.Event()
        self.asked = math.inf

    def set(self, name: str, value: bytes) -> None:
        """Set a name."""
        self._ask(lambda: self._store.set(name, value))

    def get(self, name: str) -> bytes:
        """The value of a name, which is there."""
        return bytes(self._ask(lambda: self._store.get(name)))

    def has(self, name: str) -> bool:
        """Whether a name is there."""
        return bool(self._ask(lambda: self._store.check([name])))

    def add(self, name: str, amount: int) -> int:
        """Add to a counter; what it is then."""
        return int(self._ask(lambda: self._store.add(name, amount)))

    def remove(self, name: str) -> None:
        """Remove a name."""
        self._ask(lambda: self._store.delete_key(name))

    def pause(self, seconds: float) -> None:
        """Let others go on; sooner if nobody waits for this any longer."""
        self.left.wait(seconds)

    def _ask(self, question: Callable[[], T]) -> T:
        if self.left.is_set():
            raise RankFailedError(f"the exchange {self._key!r} was given up, and goes on no further")
        self.asked = time.monotonic()
        try:
            return question()
        except RuntimeError as error:  # torch.distributed.DistError is one; a server that is gone gives several
            raise RankFailedError(
                f"the store of the job failed in the exchange {self._key!r}: {error}; {_WHERE}"
            ) from error
        finally:
            self.asked = math.inf


def watched(store: Any, key: str, rank: int, timeout_seconds: float, exchange: Callable[[WatchedStore], T]) -> T:
    """Run an exchange, and stop waiting where the store leaves a question unanswered for longer than the deadline.

    ``torch.distributed.TCPStore`` waits without an end for the answer to a ``check``, ``get`` or ``add`` (seen with torch 2.13.0, where
    the process that serves it was stopped). So questions are asked on another thread, which is left behind then.

    Args:
        store: a `torch.distributed.Store`.
        key: of the exchange.
        rank: this process.
        timeout_seconds: the deadline of one question.
        exchange: what to do with the store.

    Raises:
        CoordinationTimeoutError: if the store does not answer. To any but the leader, the leader is missing then.
        RankFailedError: if the store failed.
        What `exchange` does.
    """
    seen = WatchedStore(store, key)
    results: list[T] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            results.append(exchange(seen))
        except BaseException as error:  # noqa: BLE001  # raised on the thread that waits
            errors.append(error)
        finally:
            over.set()

    threading.Thread(target=run, name="ckptcore-store", daemon=True).start()
    try:
        while not over.wait(min(_LOOK_SECONDS, timeout_seconds)):
            if time.monotonic() >= seen.asked + timeout_seconds:
                raise CoordinationTimeoutError(
                    f"the store of the job has not answered for {timeout_seconds:g} s in the exchange {key!r}; {_WHERE}",
                    [0] if rank else [],
                )
        if errors:
            raise errors[0]
        return results[0]
    finally:
        seen.left.set()
        errors.clear()  # else an error, this frame and what it was raised in held each other
