"""Places of which missing objects are read from another copy of the checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptcore.commit.location import IndirectPlace, Location, Within, resolve_location
from ckptcore.commit.root import ROOT_KEY, Root
from ckptcore.commit.root_json import decode_root
from ckptcore.errors import ObjectNotFoundError
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.tree import JSON
from ckptcore.plugins import Plugins
from ckptcore.protocols import (
    ObjectWriter,
    PutCondition,
    RangeReader,
    StorageAddress,
    StorageBackend,
    StorageCapabilities,
)

__all__ = ["BackedDirectory", "BackedPlace"]

logger = logging.getLogger("ckptcore.tiers")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BackedPlace(IndirectPlace):
    """A checkpoint in a near directory of which missing objects are read from its far copy.

    Attributes:
        near: the checkpoint.
        far: the copy; it counts if its root is the same, byte for byte.
    """

    near: Within
    far: Within

    @property
    def place(self) -> Within:
        """See `IndirectPlace`."""
        return self.near

    def resolve(self, plugins: Plugins, *, durable: bool, config: Mapping[str, Mapping[str, JSON]]) -> Location:
        """See `IndirectPlace`."""
        near, far = (
            resolve_location(place, plugins, durable=durable, config=config) for place in (self.near, self.far)
        )
        return replace(near, parent=BackedDirectory(near.parent, near.name, far.parent, far.name), of_host=True)


class BackedDirectory(StorageBackend):
    """The directory of a checkpoint, as a storage to read from. Any thread.

    Objects that the checkpoint lacks are read from its other copy, if that has the same root, byte for byte. The root
    itself is always read here. The first read from the other copy is logged.
    """

    def __init__(self, near: StorageBackend, name: str, far: StorageBackend, far_name: str) -> None:
        """Look at nothing yet.

        Args:
            near: the directory that the checkpoint is in.
            name: the checkpoint's name in it.
            far: the directory that the other copy is in.
            far_name: the name of that.
        """
        self._near = near
        self._name = name
        self._far = far
        self._far_name = far_name
        self._lock = threading.Lock()
        self._is_same: bool | None = None
        self._objects: dict[str, Mapping[str, ObjectRecord]] = {}

    @property
    def capabilities(self) -> StorageCapabilities:
        """Those of the directory itself."""
        return self._near.capabilities

    @property
    def address(self) -> StorageAddress | None:
        """None: native I/O would find only what is here."""
        return None

    def _other(self, key: str) -> str | None:
        """The key of an object in the other copy; None where that is no copy."""
        if not key.startswith(f"{self._name}/") or key == f"{self._name}/{ROOT_KEY}":
            return None
        with self._lock:
            if self._is_same is None:
                self._is_same = self._compare()
                if self._is_same:
                    logger.warning(
                        "step %s is not whole near: %s and what else is missing is read far", self._name, key
                    )
        return self._far_name + key[len(self._name) :] if self._is_same else None

    def _compare(self) -> bool:
        try:
            mine = self._near.get(f"{self._name}/{ROOT_KEY}")
            return self._far.get(f"{self._far_name}/{ROOT_KEY}") == mine
        except ObjectNotFoundError:
            return False

    def _read(self, key: str, read: Callable[[StorageBackend, str], T]) -> T:
        try:
            return read(self._near, key)
        except ObjectNotFoundError:
            other = self._other(key)
            if other is None:
                raise
        return read(self._far, other)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`."""
        return self._read(key, lambda store, there: store.get(there, start, stop))

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`."""
        return self._near.get_with_tag(key)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`."""
        self._read(key, lambda store, there: store.get_into(there, ranges))

    def open_reader(self, key: str) -> RangeReader:
        """See `StorageBackend`. A storage that finds objects only as they are read is asked whether it is there."""

        def open_there(store: StorageBackend, there: str) -> RangeReader:
            store.size(there)
            return store.open_reader(there)

        return self._read(key, open_there)

    def hold_open(self, key: str) -> RangeReader:
        """See `StorageBackend`; as `open_reader`."""

        def hold_there(store: StorageBackend, there: str) -> RangeReader:
            store.size(there)
            return store.hold_open(there)

        return self._read(key, hold_there)

    def size(self, key: str) -> int:
        """See `StorageBackend`. Of an object that is not here it is what a root here says: whoever reads it finds out whether that is so.

        What a load looks at before it reads are the sizes of all objects of an array, also of those that it will not
        read.
        """
        try:
            return self._near.size(key)
        except ObjectNotFoundError:
            stated = self._stated_size(key)
            if stated is None:
                raise
            return stated

    def _stated_size(self, key: str) -> int | None:
        """Bytes of an object as the root of its checkpoint, or of the checkpointable that it is part of, states them."""
        parts = key.split("/")
        for depth in range(1, min(len(parts), 3)):
            directory = "/".join(parts[:depth])
            objects = self._objects_of(directory)
            if (record := objects.get("/".join(parts[depth:]))) is not None:
                return record.size
        return None

    def _objects_of(self, directory: str) -> Mapping[str, ObjectRecord]:
        with self._lock:
            known = self._objects.get(directory)
        if known is None:
            try:
                root = decode_root(
                    self._near.get(f"{directory}/{ROOT_KEY}"),
                    lambda key, size: self._near.get(f"{directory}/{key}", 0, size),
                )
            except ObjectNotFoundError:
                root = None
            known = root.objects if isinstance(root, Root) else {}
            with self._lock:
                self._objects[directory] = known
        return known

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`; here only."""
        return self._near.put(key, data, condition=condition)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`; here only."""
        return self._near.open_writer(key, size)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`; here only."""
        return self._near.open_new(key, size)

    def abort_uploads(self, prefix: str = "") -> int:
        """See `StorageBackend`; here only."""
        return self._near.abort_uploads(prefix)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`; what is here."""
        return self._near.list(prefix)

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`; what is here."""
        return self._near.list_names(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`; here only."""
        self._near.delete(keys)

    def delete_while(self, keys: Sequence[str], check: Callable[[], None]) -> None:
        """See `StorageBackend`; here only."""
        self._near.delete_while(keys, check)

    def sync(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`; here only."""
        self._near.sync(keys)
