"""Objects that are read many times by one load: found once where the storage can, and no block read for each part of it."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from ckptcore.protocols import HeldReader, HoldsObjects, OpensObjects, RangeReader, StorageBackend

__all__ = ["EdgeBlocks", "hold_object", "hold_reader", "is_held_reader", "open_reader"]


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


def hold_reader(storage: StorageBackend, key: str) -> RangeReader:
    """Open an object of any storage for many small reads; a `HeldReader` where the storage can.

    Raises:
        ObjectNotFoundError: now, or by the first read.
    """
    return cast(HoldsObjects, storage).hold_open(key) if _holds(type(storage)) else open_reader(storage, key)


@functools.lru_cache(maxsize=64)
def _holds(kind: type[StorageBackend]) -> bool:
    """Whether storages of a type hold objects. Kept, for it is slow to find out."""
    return issubclass(kind, HoldsObjects)


@functools.lru_cache(maxsize=64)
def is_held_reader(kind: type[RangeReader]) -> bool:
    """Whether readers of a type are `HeldReader`. Kept, for it is slow to find out."""
    return issubclass(kind, HeldReader)


def hold_object(storage: StorageBackend, key: str) -> RangeReader | None:
    """The same, so that all that is read is of what is there now; None where the storage finds it by its key each time.

    Raises:
        ObjectNotFoundError
    """
    reader = hold_reader(storage, key)
    return None if isinstance(reader, _ByKey) else reader


class EdgeBlocks:
    """Verified blocks of which only a part was asked for: who asks for what lies beside that finds the rest here. Any thread."""

    def __init__(self, most: int) -> None:
        """Keep at most so many."""
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def find(self, key: str, start: int) -> bytes | None:
        """The block of an object that begins at a byte, if it is kept."""
        with self._lock:
            found = self._kept.get((key, start))
            if found is not None:
                self._kept.move_to_end((key, start))
            return found

    def keep(self, key: str, start: int, data: bytes) -> None:
        """Keep a block, in the place of the one that nobody has asked for longest."""
        with self._lock:
            self._kept[key, start] = data
            self._kept.move_to_end((key, start))
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
