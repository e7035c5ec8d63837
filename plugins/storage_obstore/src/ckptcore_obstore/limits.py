"""An adaptive limit of concurrent requests: lower while the service throttles."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ckptcore.events import logger_named
from ckptcore_obstore.forks import reset_in_children

_LOG: Final = logger_named("ckptcore.storage")

_MIN_LIMIT: Final = 1
_SECONDS_BETWEEN_CUTS: Final = 1.0
"""Minimum time between cuts of the limit, because concurrent requests are throttled together."""


class AdaptiveLimit:
    """Limit of concurrent requests to one bucket in this process. Thread-safe.

    Uses additive increase and multiplicative decrease.
    """

    def __init__(self, max_requests: int, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with the maximum.

        Args:
            max_requests: maximum number of concurrent requests.
            name: name of the bucket, for the log.
            clock: monotonic time in seconds.
        """
        self._max_requests = max_requests
        self.name: Final = name
        self._clock = clock
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Reset to the maximum. A forked child has none of its parent's requests."""
        self._allowed = float(self._max_requests)
        self._running = 0
        self._changed = threading.Condition()
        self._cut_at = float("-inf")
        self._cuts = 0

    @property
    def allowed(self) -> int:
        """Current limit."""
        return max(_MIN_LIMIT, int(self._allowed))

    @property
    def cuts(self) -> int:
        """Number of times the limit was lowered."""
        return self._cuts

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Wait for a slot, and occupy it for one request."""
        with self._changed:
            while self._running >= self.allowed:
                self._changed.wait()
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def succeeded(self) -> None:
        """Raise the limit after an answered request: by about one when as many requests succeed as the limit allows."""
        if self._allowed >= self._max_requests:
            return
        with self._changed:
            self._allowed = min(self._max_requests, self._allowed + 1 / max(1.0, self._allowed))
            self._changed.notify()

    def throttled(self) -> None:
        """Halve the limit, at most once per second."""
        with self._changed:
            now = self._clock()
            if now < self._cut_at + _SECONDS_BETWEEN_CUTS:
                return
            self._cut_at = now
            self._allowed = max(_MIN_LIMIT, self._allowed / 2)
            self._cuts += 1
            first = self._cuts == 1
        if first:
            _LOG.warning("%s throttles requests: fewer requests run concurrently for a while", self.name)
