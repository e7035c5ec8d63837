"""The requests that suit a storage: how many at once, and how large those are that write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ckptcore.protocols import StorageBackend

__all__ = ["Requests", "requests_of"]

_MOST_AT_ONCE: Final = 64
"""Each request holds a thread, and memory: a storage that asks for more gets this many."""

_MOST_PART_BYTES: Final = 64 << 20
"""Each thread that writes holds so much memory at most; a storage that asks for more gets pieces of this size."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What suits a storage, within bounds.

    Attributes:
        concurrency: requests worth having under way at once; 1 where a thread for each processor is as good.
        part_bytes: bytes that one request carries to an object that is written in pieces; 1 where any are as good.
    """

    concurrency: int = 1
    part_bytes: int = 1


def requests_of(storage: StorageBackend) -> Requests:
    """What suits a storage: what it says as a `ckptcore.protocols.ManyRequests`, else that it does not matter."""
    # Asked for every directory that is opened: a look at what a `ManyRequests` has takes a tenth of what `isinstance` does.
    concurrency: int | None = getattr(storage, "concurrency", None)
    part_bytes: int | None = getattr(storage, "part_bytes", None)
    if concurrency is None or part_bytes is None:
        return Requests()
    return Requests(max(1, min(concurrency, _MOST_AT_ONCE)), max(1, min(part_bytes, _MOST_PART_BYTES)))
