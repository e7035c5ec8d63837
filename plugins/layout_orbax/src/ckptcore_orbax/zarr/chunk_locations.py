"""Locations of the chunks of arrays: values of a database, or objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from weakref import WeakKeyDictionary

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model import Checksum, ChunkLocations, HostArray
from ckptcore.protocols import ReadStore
from ckptcore_orbax.crc32c import CRC32C
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.node import ValueLocation
from ckptcore_orbax.zarr.formats import ArrayFormat
from ckptcore_orbax.zarr.state import ArraysState, ZarrArray

DatabaseCache = WeakKeyDictionary[ReadStore, dict[str, Database]]
"""Open databases of a store, by directory, so that all loads from one store share their nodes."""


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Location of a chunk.

    Attributes:
        key: the object; empty if `inline`.
        offset: offset in the object, in bytes.
        nbytes: length in bytes; None for a whole object of unknown length.
        inline: the chunk itself, if the database stores it inline.
    """

    key: str
    offset: int
    nbytes: int | None
    inline: bytes | None = None


def locate_chunks(
    state: ArraysState, leaf: int, indices: Sequence[tuple[int, ...]], store: ReadStore, databases: DatabaseCache
) -> Mapping[tuple[int, ...], ChunkLocation | None]:
    """Return the locations of write chunks of an array by index, or None for chunks that are not stored.

    Requests the size of an object only if it may be missing.

    Raises:
        CorruptCheckpointError: the database is missing or damaged.
    """
    stored = state.arrays[leaf]
    format = stored.format
    is_listed = state.storage == "ocdbt" and leaf not in state.embedded and len(indices) > 4
    if is_listed and len(indices) * 4 > prod(format.grid):  # for many keys, one listing is faster
        first = stored.prefix.encode()
        stop = first[:-1] + b"0" if first else None  # 0 follows / in ASCII
        listed = dict(open_database(state.directory, store, databases).range(first, stop))
        return {index: _location_of_value(listed.get(first + format.chunk_key(index).encode())) for index in indices}
    return {index: locate_chunk(state, leaf, index, store, databases) for index in indices}


def locate_chunk(
    state: ArraysState, leaf: int, index: tuple[int, ...], store: ReadStore, databases: DatabaseCache
) -> ChunkLocation | None:
    """Return the location of one write chunk. See `locate_chunks`."""
    stored = state.arrays[leaf]
    match state.embedded.get(leaf):
        case bytes() as embedded:
            return ChunkLocation("", 0, len(embedded), embedded)
        case (key, start, stop):
            return ChunkLocation(key, start, stop - start)
    key = f"{stored.prefix}{stored.format.chunk_key(index)}"
    if state.storage == "ocdbt":
        return _location_of_value(open_database(state.directory, store, databases).get(key.encode()))
    if state.missing == "error":
        return ChunkLocation(f"{state.prefix}{key}", 0, None)
    return _location_if_stored(f"{state.prefix}{key}", store)


def _location_of_value(value: ValueLocation | None) -> ChunkLocation | None:
    return None if value is None else ChunkLocation(value.file, value.offset, value.length, value.inline)


def _location_if_stored(key: str, store: ReadStore) -> ChunkLocation | None:
    try:
        return ChunkLocation(key, 0, store.size(key))
    except ObjectNotFoundError:
        return None


class LocatedChunks:
    """Collects the locations of a batch of read chunks.

    Attributes:
        encoded: rows of encoded chunks. The row of a chunk is its position in the batch.
    """

    def __init__(self, format: ArrayFormat, count: int) -> None:
        """Create an empty collection for `count` chunks of an array."""
        self.encoded: set[int] = set()
        self._is_raw = format.direct
        self._checksum = CRC32C if format.checksum else None
        self._keys = [""] * count
        self._starts = [0] * count
        self._stops: dict[int, int | None] = {}
        self._checksums: dict[int, Checksum] = {}
        self._inline: dict[int, bytes] = {}
        self._fills: dict[int, HostArray] = {}

    def add(self, row: int, location: ChunkLocation, start: int, nbytes: int | None) -> None:
        """Add a read chunk that begins at byte `start` of the object or inline value of its write chunk.

        If `nbytes` is None, the read chunk extends to the end.
        """
        self._keys[row] = location.key
        self._starts[row] = start
        if location.inline is not None:
            self._inline[row] = location.inline
        if not self._is_raw:
            self.encoded.add(row)
            self._stops[row] = None if nbytes is None else start + nbytes
        elif self._checksum is not None:
            self._checksums[row] = self._checksum

    def fill(self, rows: Iterable[int], value: HostArray) -> None:
        """Add read chunks that are not stored, and whose elements all equal `value`."""
        self._fills.update(dict.fromkeys(rows, value))

    def places(self) -> ChunkLocations:
        """Return the locations of all chunks."""
        return ChunkLocations(
            self._keys, self._starts, self._stops, self.encoded, self._checksums, self._inline, self._fills
        )


def open_database(directory: str, store: ReadStore, databases: DatabaseCache) -> Database:
    """Return the database in a directory.

    Raises:
        CorruptCheckpointError: it is missing or cannot be read.
    """
    by_directory = databases.setdefault(store, {})
    database = by_directory.get(directory)
    if database is None:
        try:
            database = by_directory[directory] = Database.open(store, directory)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(
                f"the database of the arrays is missing: {error}. Restore it from a copy, or load another checkpoint"
            ) from error
    return database


def expect_length(stored: ZarrArray, index: tuple[int, ...], location: ChunkLocation) -> None:
    """Reject a chunk whose length differs from its format.

    Raises:
        CorruptCheckpointError: the length is known and differs.
    """
    expected = stored.format.chunk_bytes
    if location.nbytes is not None and location.nbytes != expected:
        raise CorruptCheckpointError(
            f"the chunk {list(index)} of {stored.name!r} has {location.nbytes} bytes; expected {expected}; it "
            "was cut off or its metadata is damaged: restore it from a copy, or load another checkpoint",
            key=location.key or None,
            start=location.offset,
            stop=location.offset + location.nbytes,
        )
