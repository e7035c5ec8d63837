"""Chunk indexes of the layouts `dcp` and `torch`: byte ranges of elements, of items, and of arrays in storages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, ArrayRecord, ArraySpec, Box, Chunk, HostArray, ReadItem, TreeMetadata, format_path
from ckptcore.planning import ChunkTable, natural_column
from ckptcore.protocols import ChunkIndex, ReadStore
from ckptcore_dcp.directories import find_dcp_files
from ckptcore_dcp.item_reading import ItemRead, StoredItem, read_items
from ckptcore_dcp.storages import LocationColumns, StoredBytes, decode_locations, verify_storage
from ckptcore_dcp.streams import Streams, read_arrays, verify_other_members
from ckptcore_dcp.zip_directories import STORED

_LOCATIONS: Final = "places"


def add_locations(chunks: JSON, locations: LocationColumns) -> JSON:
    """Add the locations of arrays inside values, such as a tuple of tensors that is stored as one item."""
    state: Any = chunks
    encoded: Any = locations.to_json()
    return {**state, _LOCATIONS: encoded} if encoded["arrays"] else state


def dcp_index(tree: TreeMetadata, state: JSON) -> ChunkIndex:
    """Return the index of a `dcp` checkpoint. Its chunks are ranges of elements, or torch.save items.

    Raises:
        CorruptCheckpointError: the state, which may be hostile, does not fit the tree.
    """
    content = state.get("content") if isinstance(state, Mapping) else None
    if content == "items":
        return ItemIndex(tree, state)
    if content != "elements":
        raise CorruptCheckpointError("the root is corrupt: the state of the layout dcp has no table of chunks")
    return ChunkTable(tree, state)


class StorageIndex(ChunkIndex):
    """Index of arrays in torch.save storages, which may be compressed or strided. A `NativeReader`."""

    def __init__(self, tree: TreeMetadata, state: JSON) -> None:
        """Read the JSON of `LocationColumns`, which may be hostile.

        Raises:
            CorruptCheckpointError: it does not fit the tree.
            UnsupportedLeafError: a view expands a few bytes to too many elements.
        """
        self._locations = decode_locations(tree, state)
        self._streams = Streams()
        self._verified: set[StoredBytes] = set()

    def __contains__(self, leaf: int) -> bool:
        """Return whether the location of an array is known."""
        return leaf in self._locations

    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        """See `ChunkIndex.boxes`. Always empty, because storages have no chunks."""
        return ()

    def extents(self, leaf: int) -> Iterator[tuple[str, int, int]]:
        """See `ChunkIndex.extents`. Includes bytes between the elements of a view, and all of a compressed storage."""
        if (location := self._locations.get(leaf)) is not None:
            yield location.key, *location.extent

    @property
    def stored_specs(self) -> Mapping[int, ArraySpec]:
        """See `ChunkIndex.stored_specs`. Fields of structures are read as bytes."""
        return {leaf: place.tensor.spec for leaf, place in self._locations.items() if place.elements is not None}

    def chunk_rows(self, leaf: int) -> int | None:
        """See `ChunkIndex.chunk_rows`. An array that is compressed, or not in C order, is read whole."""
        location = self._locations.get(leaf)
        if location is None or location.is_contiguous or not location.tensor.shape:
            return None
        return max(location.tensor.shape[0], 1)

    def unverified(self, leaf: int, store: ReadStore) -> Collection[str]:
        """See `ChunkIndex.unverified`. Verifies the CRC-32 of the storage if reading the array does not do so."""
        if (location := self._locations.get(leaf)) is None:
            return ()
        storage = location.storage
        if storage not in self._verified and not location.is_verified:
            if not storage.crc:
                return (storage.key,)
            verify_storage(storage, store)
        self._verified.add(storage)
        return ()

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """See `NativeReader.reads`."""
        return True

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """See `NativeReader.read`. Reads only the requested elements of tensors in C order."""
        return read_arrays(items, buffers, store, self._locations, self._streams)


class ZipIndex(StorageIndex):
    """Index of arrays in storages of whole files, which may be zips."""

    def __init__(self, tree: TreeMetadata, state: JSON) -> None:
        """Decode the locations. See `StorageIndex`."""
        super().__init__(tree, state)
        self._verified_files: set[str] = set()

    def unverified(self, leaf: int, store: ReadStore) -> Collection[str]:
        """See `ChunkIndex.unverified`. Also verifies the CRC-32 of members without arrays, such as code."""
        if (location := self._locations.get(leaf)) is not None and location.key not in self._verified_files:
            self._verified_files.add(location.key)
            known = {place.storage.start for place in self._locations.values() if place.key == location.key}
            verify_other_members(store, location.key, known)
        return super().unverified(leaf, store)


class ItemIndex(ChunkTable):
    """Chunks that are torch.save items, as torch.distributed.checkpoint writes them. A `NativeReader`."""

    def __init__(self, tree: TreeMetadata, state: JSON) -> None:
        """Read the columns of items, which may be hostile.

        Raises:
            CorruptCheckpointError: they do not fit the tree.
        """
        super().__init__(tree, state)
        columns: Any = state  # the errors of a hostile state are caught below
        try:
            sizes = columns["nbytes"]
            natural_column(sizes, 1 << 62, len(columns["leaf"]))
            self._sizes: Sequence[int] = sizes
            self._transforms: dict[str, tuple[str, ...]] = {}
            for row, names in columns["transforms"].items():
                if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                    raise TypeError("names of transforms are expected")
                self._transforms[row] = tuple(names)
        except (TypeError, KeyError, IndexError, ValueError, OverflowError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"the root is corrupt: the state of the layout dcp has no valid table of items: {error!r}"
            ) from error
        self._unverified: set[tuple[int, StoredBytes]] = set()
        self._metadata: Sequence[str] | None = None
        locations = columns.get(_LOCATIONS)
        self._in_values = StorageIndex(
            tree, {"files": [], "storages": [], "arrays": []} if locations is None else locations
        )

    def items(self, leaf: int, box: Box | None = None) -> list[StoredItem]:
        """Return the items of an array, or those that intersect a box."""
        record = self._tree.leaves[leaf]
        if not isinstance(record, ArrayRecord):
            return []  # the index lists items of arrays only
        sizes, transforms = self._sizes, self._transforms
        return [
            StoredItem(chunk.box, chunk.key, chunk.offset, sizes[chunk.number], transforms.get(str(chunk.number), ()))
            for chunk in self._chunks(leaf, record.spec, box)
        ]

    def boxes(self, leaf: int, box: Box) -> Iterable[Chunk]:
        """See `ChunkIndex.boxes`. Always empty, because only the items state where their elements begin."""
        return ()

    def extents(self, leaf: int) -> Iterator[tuple[str, int, int]]:
        """See `ChunkIndex.extents`. Covers whole items, including the bytes around their elements."""
        yield from self._in_values.extents(leaf)
        record = self._tree.leaves[leaf]
        if isinstance(record, ArrayRecord):
            for chunk in self._chunks(leaf, record.spec):
                yield chunk.key, chunk.offset, chunk.offset + self._sizes[chunk.number]

    def unverified(self, leaf: int, store: ReadStore) -> Collection[str]:
        """See `ChunkIndex.unverified`. Items have checksums, but the metadata that locates them has none."""
        if self._metadata is None:
            self._metadata, _ = find_dcp_files(store.list_names(""))
        unverified_objects = {*self._metadata, *self._in_values.unverified(leaf, store)}
        for read, storage in tuple(self._unverified):
            if read == leaf and storage.crc and storage.compression == STORED:
                verify_storage(storage, store)
            elif read == leaf:
                unverified_objects.add(storage.key)
        return unverified_objects

    def check(self, leaves: Collection[int]) -> None:
        """See `ChunkIndex.check`."""
        super().check([leaf for leaf in leaves if leaf not in self._in_values])

    def not_whole(self, leaf: int, reason: str) -> CheckpointError:
        """See `ChunkTable.not_whole`."""
        record = self._tree.leaves[leaf]
        if isinstance(record, ArrayRecord) and not self._chunks(leaf, record.spec):
            return UnsupportedLeafError(
                f"{format_path(self._tree.paths[leaf])} ({record.spec}) cannot be located: it is in a tuple or "
                "another value that torch.distributed.checkpoint stored whole and compressed, or .metadata lists "
                "no file for it; pass a PLACEHOLDER for it, or load it with torch"
            )
        return super().not_whole(leaf, reason)

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """See `NativeReader.reads`."""
        return True

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """See `NativeReader.read`."""
        wanted: dict[tuple[int, str, int, Box], ItemRead] = {}
        in_values: list[int] = []
        for number, (item, buffer) in enumerate(zip(items, buffers, strict=True)):
            if item.leaf in self._in_values:
                in_values.append(number)
                continue
            super().check((item.leaf,))
            for stored in self.items(item.leaf, item.box):
                # The box is part of the key, because a hostile state can list two chunks at one
                # offset.
                location = item.leaf, stored.key, stored.offset, stored.box
                read = wanted.get(location)
                if read is None:
                    read = wanted[location] = ItemRead(item.leaf, stored)
                read.targets.append((number, item.box, buffer))
        yield from read_items(self._tree, list(wanted.values()), store, self._unverified)
        if in_values:
            part = [items[number] for number in in_values]
            for place_number in self._in_values.read(part, [buffers[number] for number in in_values], store):
                yield in_values[place_number]
