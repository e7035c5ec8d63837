"""Objects that are read many times by one load: found once where the storage can."""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore.protocols import OpensObjects, RangeReader, StorageBackend

__all__ = ["open_reader"]


class _ByKey:
    """An object that its storage finds by its key each time. Any thread."""

    def __init__(self, storage: StorageBackend, key: str) -> None:
        self._storage = storage
        self._key = key

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on."""
        self._storage.get_into(self._key, ranges)


def open_reader(storage: StorageBackend, key: str) -> RangeReader:
    """Open an object of any storage.

    Raises:
        ObjectNotFoundError: now, or by the first read.
    """
    return storage.open_reader(key) if isinstance(storage, OpensObjects) else _ByKey(storage, key)
