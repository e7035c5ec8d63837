"""A cache of open buckets by settings, so that locations in one bucket share connections."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
B = TypeVar("B")

_MAX_BUCKETS: Final = 64


class OpenBuckets(Generic[K, B]):
    """A bounded cache of buckets. Thread-safe.

    Settings contain credentials, and a long-running process may get new ones every hour or for
    each user, so the least recently used bucket is dropped. Directories that use it keep working.
    """

    def __init__(self, max_buckets: int = _MAX_BUCKETS) -> None:
        """Create an empty cache."""
        self._max_buckets = max_buckets
        self._lock = threading.Lock()
        self._open: OrderedDict[K, B] = OrderedDict()

    def get(self, settings: K, open_bucket: Callable[[], B]) -> B:
        """Return the bucket for these settings. Open it if needed, without a request."""
        with self._lock:
            bucket = self._open.get(settings)
            if bucket is None:
                bucket = self._open[settings] = open_bucket()
            self._open.move_to_end(settings)
            if len(self._open) > self._max_buckets:
                self._open.popitem(last=False)
        return bucket
