"""Layouts of trees from several torch.save files, and the index of their arrays. See `assembly`."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from ckptcore_dcp.reading import ReadOnlyLayout, StorageIndex

from ckptcore.errors import ChecksumError, CorruptCheckpointError
from ckptcore.model import JSON, Box, Chunk, HostArray, ReadItem, TreeMetadata
from ckptcore.planning import ChunkTable, natural_column
from ckptcore.protocols import ChunkIndex, ReadStore
from ckptcore_formats.assembly import PLACES, RESTORE

_SLAB_BYTES: Final = 1 << 24
"""Bytes that are read at a time to compare a checksum."""


class _AssembledIndex(ChunkTable):
    """Index of an assembled tree: a table of pieces, and whole tensors. A `NativeReader` of the latter."""

    def __init__(self, tree: TreeMetadata, state: JSON) -> None:
        """Read the state of `inspection_of`. A root may name this layout, with any state.

        Raises:
            CorruptCheckpointError: the state does not fit the tree.
        """
        super().__init__(tree, state)
        columns: Any = state  # the errors of a hostile state are caught below
        try:
            self._places = StorageIndex(tree, columns[PLACES])
            self._storages: Sequence[tuple[str, int, int, int]] = [_storage(*row) for row in columns["storages"]]
            numbers = natural_column(columns["storage"], len(self._storages), len(columns["leaf"])).tolist()
        except (TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
            raise CorruptCheckpointError(
                f"the root is corrupt: its state does not locate arrays in files of torch.save: {error!r}"
            ) from error
        self._storages_of: dict[int, set[int]] = {}
        for leaf, number in zip(columns["leaf"], numbers, strict=True):
            self._storages_of.setdefault(leaf, set()).add(number)
        self._verified: set[int] = set()

    def boxes(self, leaf: int, box: Box) -> Sequence[Chunk]:
        """See `ChunkIndex.boxes`. Whole tensors in storages have no chunks."""
        return () if leaf in self._places else tuple(super().boxes(leaf, box))

    def extents(self, leaf: int) -> Iterator[tuple[str, int, int]]:
        """See `ChunkIndex.extents`."""
        yield from self._places.extents(leaf)
        if leaf not in self._places:
            yield from super().extents(leaf)

    def unverified(self, leaf: int, store: ReadStore) -> Collection[str]:
        """Return the objects with elements of an array that have no checksum. Compare the CRC-32 of the other storages.

        A storage has elements of many arrays, so it is read again, but only once.

        Raises:
            ChecksumError: a checksum differs.
        """
        if leaf in self._places:
            places: Any = self._places
            found: Collection[str] = places.unverified(leaf, store)
            return found
        unknown: set[str] = set()
        for number in self._storages_of.get(leaf, ()):
            key, start, stop, expected = self._storages[number]
            if not expected:
                unknown.add(key)
            elif number not in self._verified:
                _verify(store, key, start, stop, expected)
                self._verified.add(number)
        return unknown

    def check(self, leaves: Collection[int]) -> None:
        """See `ChunkIndex.check`."""
        super().check([leaf for leaf in leaves if leaf not in self._places])

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """See `NativeReader.reads`."""
        return leaf in self._places

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """See `NativeReader.read`."""
        return self._places.read(items, buffers, store)


def _storage(key: object, start: object, stop: object, crc: object) -> tuple[str, int, int, int]:
    if type(key) is not str or type(start) is not int or type(stop) is not int or type(crc) is not int:
        raise TypeError("a storage is expected")
    if not 0 <= start <= stop < 1 << 62:
        raise ValueError("a storage has no valid range")
    return key, start, stop, crc


def _verify(store: ReadStore, key: str, start: int, stop: int, expected: int) -> None:
    found = 0
    for first in range(start, stop, _SLAB_BYTES):
        found = zlib.crc32(store.get(key, first, min(first + _SLAB_BYTES, stop)), found)
    if found != expected:
        raise ChecksumError(
            f"{key!r} is damaged in bytes {start} to {stop}: expected the CRC-32 {expected:08x}, found {found:08x}; "
            f"{RESTORE}",
            key=key,
            start=start,
            stop=stop,
        )


class AssembledLayout(ReadOnlyLayout):
    """A read-only layout whose `inspect` returns the result of `inspection_of`."""

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of the pieces and of the whole tensors."""
        return _AssembledIndex(tree, state)
