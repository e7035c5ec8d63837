"""The limit of requests at once: fewer when the service asks to come slower, more again when it does not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ckptcore_obstore.forks import renew_in_children

__all__ = ["AdaptiveLimit"]

_LOG: Final = logging.getLogger("ckptcore.storage")

_LEAST: Final = 1
_SECONDS_BETWEEN_CUTS: Final = 1.0
"""All the requests that were under way together meet the same burst: it counts once."""


class AdaptiveLimit:
    """How many requests to one bucket may be under way in this process: additive increase, multiplicative decrease. Any thread."""

    def __init__(self, most: int, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the most.

        Args:
            most: requests at once where nothing is throttled.
            name: of the bucket, for the log.
            clock: seconds that never go back.
        """
        self._most = most
        self.name: Final = name
        self._clock = clock
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Begin with the most again: a child by fork has none of the requests that are under way."""
        self._allowed = float(self._most)
        self._under_way = 0
        self._changed = threading.Condition()
        self._cut_at = float("-inf")
        self._cuts = 0

    @property
    def allowed(self) -> int:
        """Requests that may be under way at once now."""
        return max(_LEAST, int(self._allowed))

    @property
    def cuts(self) -> int:
        """How often it was lowered."""
        return self._cuts

    @contextmanager
    def place(self) -> Iterator[None]:
        """Wait for a place, and hold it for one request."""
        with self._changed:
            while self._under_way >= self.allowed:
                self._changed.wait()
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify()

    def succeeded(self) -> None:
        """Count a request that the service answered: about one place more for each round of requests."""
        if self._allowed >= self._most:
            return
        with self._changed:
            self._allowed = min(self._most, self._allowed + 1 / max(1.0, self._allowed))
            self._changed.notify()

    def throttled(self) -> None:
        """Halve the limit, once for each burst."""
        with self._changed:
            now = self._clock()
            if now < self._cut_at + _SECONDS_BETWEEN_CUTS:
                return
            self._cut_at = now
            self._allowed = max(_LEAST, self._allowed / 2)
            self._cuts += 1
            first = self._cuts == 1
        if first:
            _LOG.warning("%s has too much to do: fewer requests go out at once for a while", self.name)
