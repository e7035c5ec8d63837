"""Sizes of objects: known, expected and limited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ckptcore.io.requests import requests_of
from ckptcore.io.threads import IOThreads, ask_each
from ckptcore.model import BLOCK_BYTES, ObjectRecord
from ckptcore.protocols import StorageBackend

__all__ = [
    "SIZES",
    "ObjectSizes",
    "Sizes",
]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes; tests make them small.

    Attributes:
        block: what one checksum covers.
        task: what a thread reads before it looks for other work, where there is so much; a multiple of `block`.
        write: what a thread copies, checks and writes at a time; a multiple of `block`, small enough for a processor's
            cache.
        inline: objects and reads of fewer bytes are left to the calling thread alone.
        direct: from here on bytes that only one array wants, as they are, are read straight into it.
        run: from here on each run of elements of a box is read straight into its array, block by block.
    """

    block: int = BLOCK_BYTES
    task: int = 4 << 20
    write: int = BLOCK_BYTES
    inline: int = 1 << 20
    direct: int = 64 << 10
    run: int = 4 << 20

    def for_parts(self, part_bytes: int) -> Sizes:
        """The sizes that suit a storage of which a request carries so many bytes; 1: as they are."""
        if part_bytes == 1:
            return self
        return replace(self, write=-(-part_bytes // self.block) * self.block)

    def for_requests(self, request_bytes: int) -> Sizes:
        """The sizes that suit a storage of which many requests of so many bytes are under way: each is a task."""
        return replace(self, task=max(self.block, request_bytes // self.block * self.block))


SIZES: Final = Sizes()
"""The sizes that suit memory and local disks."""


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
