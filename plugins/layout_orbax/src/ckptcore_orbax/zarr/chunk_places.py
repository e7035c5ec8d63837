"""Where the chunks of arrays are: values of a database, or objects of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol
from weakref import WeakKeyDictionary

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model import Box, StoredTile
from ckptcore.protocols import ReadStore
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.node import Value
from ckptcore_orbax.zarr.chunking import chunks_of, expect_countable, flat_index
from ckptcore_orbax.zarr.state import ArraysState, StoredName

__all__ = [
    "ChunkPlace",
    "ChunkPlaces",
    "DatabasePlaces",
    "Databases",
    "EmbeddedPlaces",
    "KnownTiles",
    "ObjectPlaces",
    "SparseObjectPlaces",
    "expect_length",
    "open_database",
    "open_places",
]

Databases = WeakKeyDictionary[ReadStore, dict[str, Database]]
"""The databases that were opened in a store, by directory: their nodes are read once for all loads from one store."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a chunk is.

    Attributes:
        key: the object it is in; empty where it is `inline`.
        offset: where in it, in bytes.
        nbytes: its length; None where it is all of the object, whose length nobody has asked for.
        inline: the chunk itself, where it stands with the keys.
    """

    key: str
    offset: int
    nbytes: int | None
    inline: bytes | None = None


class ChunkPlaces(Protocol):
    """Finds chunks. Any thread."""

    def find(self, stored: StoredName, box: Box) -> Mapping[tuple[int, ...], ChunkPlace | None]:
        """The places of the chunks that a box of an array touches, by index; None for those that are not there."""
        ...

    def first(self, stored: StoredName) -> ChunkPlace | None:
        """The place of the first chunk of an array, which most small ones have alone; None if it is not there."""
        ...


class DatabasePlaces:
    """Chunks that are values of an OCDBT database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, stored: StoredName, box: Box) -> Mapping[tuple[int, ...], ChunkPlace | None]:
        """See `ChunkPlaces`: few keys are looked up, many are listed."""
        form = stored.form
        expect_countable(box, form.chunk, stored.name)
        indices = [index for index, _ in chunks_of(form.chunk, box)]
        if len(indices) * 4 > prod(form.grid) and len(indices) > 4:
            prefix = stored.prefix.encode()
            stop = prefix[:-1] + b"0" if prefix else None  # 0 follows / in ASCII
            values = dict(self._database.range(prefix, stop))
            found = [values.get(prefix + form.chunk_key(index).encode()) for index in indices]
        else:
            found = [self._database.get(f"{stored.prefix}{form.chunk_key(index)}".encode()) for index in indices]
        return {index: _place_of(value) for index, value in zip(indices, found, strict=True)}

    def first(self, stored: StoredName) -> ChunkPlace | None:
        """See `ChunkPlaces`."""
        form = stored.form
        return _place_of(self._database.get(f"{stored.prefix}{form.chunk_key((0,) * len(form.chunk))}".encode()))


def _place_of(value: Value | None) -> ChunkPlace | None:
    return None if value is None else ChunkPlace(value.file, value.offset, value.length, value.inline)


class ObjectPlaces:
    """Chunks that are objects."""

    def __init__(self, store: ReadStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def find(self, stored: StoredName, box: Box) -> Mapping[tuple[int, ...], ChunkPlace | None]:
        """See `ChunkPlaces`; whether they are there is not looked at."""
        prefix = f"{self._prefix}{stored.prefix}"
        expect_countable(box, stored.form.chunk, stored.name)
        return {
            index: ChunkPlace(f"{prefix}{stored.form.chunk_key(index)}", 0, None)
            for index, _ in chunks_of(stored.form.chunk, box)
        }

    def first(self, stored: StoredName) -> ChunkPlace | None:
        """See `ChunkPlaces`; whether it is there is not looked at."""
        form = stored.form
        return ChunkPlace(f"{self._prefix}{stored.prefix}{form.chunk_key((0,) * len(form.chunk))}", 0, None)


class SparseObjectPlaces:
    """Chunks that are objects, of which some may be missing: they hold the fill value."""

    def __init__(self, store: ReadStore, prefix: str) -> None:
        self._store = store
        self._places = ObjectPlaces(store, prefix)

    def find(self, stored: StoredName, box: Box) -> Mapping[tuple[int, ...], ChunkPlace | None]:
        """See `ChunkPlaces`; asks the storage for each."""
        return {index: self._there(place) for index, place in self._places.find(stored, box).items() if place}

    def first(self, stored: StoredName) -> ChunkPlace | None:
        """See `ChunkPlaces`; asks the storage."""
        place = self._places.first(stored)
        return None if place is None else self._there(place)

    def _there(self, place: ChunkPlace) -> ChunkPlace | None:
        try:
            return ChunkPlace(place.key, 0, self._store.size(place.key))
        except ObjectNotFoundError:
            return None


class EmbeddedPlaces:
    """The only chunk of an array whose elements are known."""

    def __init__(self, elements: bytes) -> None:
        self._elements = elements

    def find(self, stored: StoredName, box: Box) -> Mapping[tuple[int, ...], ChunkPlace | None]:
        """See `ChunkPlaces`."""
        place = self.first(stored)
        return {index: place for index, _ in chunks_of(stored.form.chunk, box)}

    def first(self, stored: StoredName) -> ChunkPlace | None:
        """See `ChunkPlaces`."""
        return ChunkPlace("", 0, len(self._elements), self._elements)


def open_places(state: ArraysState, store: ReadStore, databases: Databases) -> ChunkPlaces:
    """What finds the chunks of a checkpoint.

    Raises:
        CorruptCheckpointError: if its database is not there or cannot be read.
    """
    if state.storage == "objects":
        return (ObjectPlaces if state.missing == "error" else SparseObjectPlaces)(store, state.prefix)
    return DatabasePlaces(open_database(state.directory, store, databases))


def open_database(directory: str, store: ReadStore, databases: Databases) -> Database:
    """The database in a directory.

    Raises:
        CorruptCheckpointError: if it is not there or cannot be read.
    """
    opened = databases.setdefault(store, {})
    database = opened.get(directory)
    if database is None:
        try:
            database = opened[directory] = Database.open(store, directory)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(f"the database of the arrays is missing: {error}") from error
    return database


def expect_length(stored: StoredName, index: tuple[int, ...], place: ChunkPlace) -> None:
    """Refuse a chunk that has not the bytes that its format says.

    Raises:
        CorruptCheckpointError
    """
    expected = stored.form.chunk_bytes
    if place.nbytes is not None and place.nbytes != expected:
        raise CorruptCheckpointError(
            f"the chunk {list(index)} of {stored.name!r} has {place.nbytes} bytes, where {expected} are expected; it was cut off "
            "or what describes it is damaged: restore it from a copy, or load another checkpoint",
            key=place.key or None,
            start=place.offset,
            stop=place.offset + place.nbytes,
        )


class KnownTiles:
    """The read chunks of the arrays of a state, of which it keeps what it sorted last. Any thread."""

    def __init__(self) -> None:
        self._last: tuple[ArraysState, dict[int, list[int]]] | None = None

    def tiles(self, state: ArraysState, leaf: int) -> Iterator[StoredTile]:
        """The read chunks of an array, those at its edge whole; nothing where it stands in a file that was read.

        Chunks of a database are not looked up: those of this layout are taken to follow each other in C order, as they do where
        one process wrote an array, or several wrote its rows.

        Raises:
            CorruptCheckpointError: if there are more than any array has.
        """
        stored = state.arrays[leaf]
        if leaf in state.embedded:
            return
        form = stored.form
        whole = Box.whole(form.spec.shape)
        expect_countable(whole, form.inner, stored.name)
        # The root has checksums of the blocks that this layout wrote; those of other software have one behind each read chunk.
        is_plain = form.direct and (state.source == "ckptcore" or not form.checksum)
        step = form.inner_stored_bytes if form.direct else 1
        places = self._chunk_places(state, leaf, stored)
        for (index, chunk), (key, offset) in zip(chunks_of(form.chunk, whole), places, strict=False):
            common = chunk.intersect(whole)
            assert common is not None  # the chunk holds elements of the array
            first = tuple(map(int.__mul__, index, form.inner_grid))
            for inner, box in chunks_of(form.inner, common):
                number = flat_index(tuple(map(int.__sub__, inner, first)), form.inner_grid)
                yield StoredTile(key, offset + number * step, box, is_plain)

    def _chunk_places(self, state: ArraysState, leaf: int, stored: StoredName) -> Iterator[tuple[str, int]]:
        """Where each chunk of an array begins, in C order; numbers where nobody knows, without an end."""
        form = stored.form
        if state.storage == "objects":
            for index, _ in chunks_of(form.chunk, Box.whole(form.spec.shape)):
                yield f"{state.prefix}{stored.prefix}{form.chunk_key(index)}", 0
            return
        if form.direct:
            extents = state.extents
            for row in self._rows(state).get(leaf, ()):
                key = f"{state.prefix}{extents.files[extents.file[row]]}"
                for offset in range(extents.start[row], extents.stop[row], max(1, form.chunk_bytes)):
                    yield key, offset
        yield from ((state.prefix, number) for number in itertools.count())

    def _rows(self, state: ArraysState) -> dict[int, list[int]]:
        """By leaf, the numbers of its extents."""
        last = self._last
        if last is None or last[0] is not state:
            rows: dict[int, list[int]] = {}
            for row, leaf in enumerate(state.extents.leaf):
                rows.setdefault(leaf, []).append(row)
            last = self._last = (state, rows)
        return last[1]
