"""Checkpoints in a near directory whose missing objects are read from the far copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptcore.commit.location import IndirectLocation, Location, Storages, SubPath, resolve_location
from ckptcore.commit.root import ROOT_KEY, Root
from ckptcore.commit.root_json import decode_root
from ckptcore.errors import ObjectNotFoundError
from ckptcore.events import logger_named
from ckptcore.model.metadata import ObjectRecord
from ckptcore.protocols import (
    ObjectWriter,
    PutCondition,
    RangeReader,
    StorageAddress,
    StorageBackend,
    StorageCapabilities,
)

logger = logger_named("ckptcore.tiers")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FallbackLocation(IndirectLocation):
    """A checkpoint in a near directory whose missing objects are read from its far copy.

    Attributes:
        near: the checkpoint.
        far: the copy. It is used only if its root has the same bytes.
    """

    near: SubPath
    far: SubPath

    @property
    def path(self) -> SubPath:
        """See `IndirectLocation`."""
        return self.near

    def resolve(self, storages: Storages, *, to_write: bool) -> Location:
        """See `IndirectLocation`."""
        near, far = (resolve_location(path, storages, to_write=to_write) for path in (self.near, self.far))
        return replace(near, parent=FallbackStorage(near.parent, near.name, far.parent, far.name), of_host=True)


class FallbackStorage(StorageBackend):
    """The near directory of a checkpoint, with missing objects read from the far copy. Thread-safe.

    The far copy is used only if its root has the same bytes. The root itself is always read from
    the near directory. Writes and deletions affect only the near directory. The first read from the
    far copy logs a warning.
    """

    def __init__(self, near: StorageBackend, name: str, far: StorageBackend, far_name: str) -> None:
        """Create the storage without I/O.

        Args:
            near: directory of the checkpoint.
            name: name of the checkpoint in it.
            far: directory of the far copy.
            far_name: name of the far copy in it.
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
        """Capabilities of the near directory."""
        return self._near.capabilities

    @property
    def address(self) -> StorageAddress | None:
        """None, because native I/O would find only near objects."""
        return None

    def _far_key(self, key: str) -> str | None:
        """Return the key of an object in the far copy; None for the root, or if the far copy lacks the same root."""
        if not key.startswith(f"{self._name}/") or key == f"{self._name}/{ROOT_KEY}":
            return None
        with self._lock:
            if self._is_same is None:
                self._is_same = self._compare()
                if self._is_same:
                    logger.warning(
                        "step %s: %s is missing in the near directory; reading missing objects from the far copy",
                        self._name, key,
                    )  # fmt: skip
        return self._far_name + key[len(self._name) :] if self._is_same else None

    def _compare(self) -> bool:
        try:
            root = self._near.get(f"{self._name}/{ROOT_KEY}")
            return self._far.get(f"{self._far_name}/{ROOT_KEY}") == root
        except ObjectNotFoundError:
            return False

    def _read(self, key: str, read: Callable[[StorageBackend, str], T]) -> T:
        try:
            return read(self._near, key)
        except ObjectNotFoundError:
            far_key = self._far_key(key)
            if far_key is None:
                raise
        return read(self._far, far_key)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`."""
        return self._read(key, lambda store, location: store.get(location, start, stop))

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`. Reads only near objects."""
        return self._near.get_with_tag(key)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`."""
        self._read(key, lambda store, location: store.get_into(location, ranges))

    def open_reader(self, key: str) -> RangeReader:
        """See `StorageBackend`."""

        def open_existing(store: StorageBackend, location: str) -> RangeReader:
            store.size(location)  # some storages do not detect a missing object before it is read
            return store.open_reader(location)

        return self._read(key, open_existing)

    def open_stamped(self, key: str) -> RangeReader:
        """See `StorageBackend`."""

        def hold_existing(store: StorageBackend, location: str) -> RangeReader:
            store.size(location)  # some storages do not detect a missing object before it is read
            return store.open_stamped(location)

        return self._read(key, hold_existing)

    def size(self, key: str) -> int:
        """See `StorageBackend`. For a missing object, return the size that the near root states.

        A load checks the sizes of all objects of an array, including objects that it will not read.
        This way the check needs no request to the far directory.
        """
        try:
            return self._near.size(key)
        except ObjectNotFoundError:
            stated = self._stated_size(key)
            if stated is None:
                raise
            return stated

    def _stated_size(self, key: str) -> int | None:
        """Return the size of an object in bytes, from the root of its checkpoint or checkpointable."""
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
        """See `StorageBackend`."""
        return self._near.put(key, data, condition=condition)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return self._near.open_writer(key, size)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return self._near.open_new(key, size)

    def abort_uploads(self, prefix: str = "") -> int:
        """See `StorageBackend`."""
        return self._near.abort_uploads(prefix)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`. Lists only near objects."""
        return self._near.list(prefix)

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`. Lists only near objects."""
        return self._near.list_names(prefix)

    def list_sizes(self, prefix: str = "") -> Mapping[str, int] | None:
        """See `StorageBackend`. None, because a listing would have only near objects."""
        return None

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        self._near.delete(keys)

    def delete_while(self, keys: Sequence[str], check: Callable[[], None]) -> None:
        """See `StorageBackend`."""
        self._near.delete_while(keys, check)

    def defer_names(self, key: str) -> AbstractContextManager[object]:
        """See `StorageBackend`."""
        return self._near.defer_names(key)

    def sync(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        self._near.sync(keys)
