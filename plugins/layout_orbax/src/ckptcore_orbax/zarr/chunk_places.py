"""Where the chunks of arrays are: values of a database, or objects of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol
from weakref import WeakKeyDictionary

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model import Box
from ckptcore.protocols import ReadStore
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.node import Value
from ckptcore_orbax.zarr.chunking import chunks_of
from ckptcore_orbax.zarr.grids import expect_countable
from ckptcore_orbax.zarr.state import ArraysState, StoredName

__all__ = [
    "ChunkPlace",
    "ChunkPlaces",
    "DatabasePlaces",
    "Databases",
    "EmbeddedPlaces",
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
