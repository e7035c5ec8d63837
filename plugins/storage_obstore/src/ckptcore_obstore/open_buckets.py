"""Open buckets: those that a process used last, by their settings, so that the next location in one finds its connections."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

__all__ = ["OpenBuckets"]

K = TypeVar("K", bound=Hashable)
B = TypeVar("B")

_MOST: Final = 64


class OpenBuckets(Generic[K, B]):
    """Buckets that stay open, up to a number of them. Any thread.

    Settings have credentials, and a process that runs for long may be given others every hour, or for every user: what was used
    longest ago is no longer kept. Directories that have it go on with it.
    """

    def __init__(self, most: int = _MOST) -> None:
        """Open nothing; keep at most so many."""
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, B] = OrderedDict()

    def get(self, settings: K, open_bucket: Callable[[], B]) -> B:
        """The bucket of some settings, opened where none is kept; `open_bucket` makes no request."""
        with self._lock:
            bucket = self._kept.get(settings)
            if bucket is None:
                bucket = self._kept[settings] = open_bucket()
            self._kept.move_to_end(settings)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return bucket
