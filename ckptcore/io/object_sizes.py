"""The sizes of a checkpoint's objects: those that they have, and those that memory may be taken for before they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ckptcore.io.errands import ask_each
from ckptcore.io.requests import requests_of
from ckptcore.io.threads import IOThreads
from ckptcore.model import ObjectRecord
from ckptcore.protocols import StorageBackend

__all__ = ["ObjectSizes"]

_SUPPOSED_BYTES: Final = 1 << 30
"""Recorded bytes that memory may be taken for before any of them was seen: taken, not touched, and given back with the first object
that is not there or ends too early."""


class ObjectSizes:
    """How large objects of a storage are, in bytes, by key. Any thread."""

    def __init__(self, storage: StorageBackend, objects: Mapping[str, ObjectRecord], threads: IOThreads) -> None:
        """Ask nothing yet.

        Args:
            storage: where the objects are.
            objects: what is recorded of them, by key; may be hostile.
            threads: what asks, where many are asked for at once.
        """
        self._storage = storage
        self._objects = objects
        self._threads = threads
        self._concurrency = requests_of(storage).concurrency
        self._far = threads.at_once(self._concurrency) > threads.count

    def present(self, keys: Iterable[str]) -> dict[str, int]:
        """Those that objects have, whatever is recorded; many are asked for at once where that is worth it.

        Raises:
            ObjectNotFoundError
        """
        asked = list(keys)
        if self._far and len(asked) > 1:
            sizes = ask_each(self._threads, asked, self._storage.size, parallelism=self._concurrency)
        else:
            sizes = [self._storage.size(key) for key in asked]
        return dict(zip(asked, sizes, strict=True))

    def bounding(self, keys: Iterable[str]) -> dict[str, int]:
        """Bounds of what can be read, for who takes memory for it and reads it then.

        Of small objects that are far this is what is recorded, up to a bound for all of them together: the one request that reads
        such an object tells whether it is as large, and one more before it would double their number. Others are asked for.

        Raises:
            ObjectNotFoundError
        """
        asked = list(keys)
        supposed: dict[str, int] = {}
        if self._far:
            left = _SUPPOSED_BYTES
            recorded = [record for key in asked if (record := self._objects.get(key)) is not None]
            for record in sorted(recorded, key=lambda record: record.size):
                left -= record.size
                if left < 0 or record.size > self._storage.request_bytes:
                    break
                supposed[record.key] = record.size
        return {**supposed, **self.present([key for key in asked if key not in supposed])}
