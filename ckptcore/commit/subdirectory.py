"""Subdirectory: a directory of a storage, as a storage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import cast

from ckptcore.commit.names import existing_name
from ckptcore.errors import AtomicityError, ConditionFailedError, NameCollisionError
from ckptcore.protocols import (
    IF_ABSENT,
    AtomicDirectories,
    DirectoryFeatures,
    DirectoryLock,
    ObjectWriter,
    PlaceLimits,
    PutCondition,
    RangeReader,
    StorageAddress,
    StorageBackend,
    StorageCapabilities,
)
from ckptcore.protocols.storage import quoted_path


class Subdirectory(StorageBackend):
    """A directory of a storage, as a storage."""

    def __init__(self, parent: StorageBackend, name: str) -> None:
        self._parent = parent
        self._prefix = f"{name}/" if name else ""

    @property
    def capabilities(self) -> StorageCapabilities:
        """The capabilities of the parent."""
        return self._parent.capabilities

    @property
    def address(self) -> StorageAddress | None:
        """The address of the directory. Names are escaped, because a name may look like a URL escape (``%41``)."""
        address = self._parent.address
        quoted = quoted_path(self._prefix.encode("utf-8", "surrogateescape"))
        return address and StorageAddress(address.url + quoted, address.options)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`."""
        return self._parent.get(self._prefix + key, start, stop)

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`."""
        return self._parent.get_with_tag(self._prefix + key)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`."""
        self._parent.get_into(self._prefix + key, ranges)

    def open_reader(self, key: str) -> RangeReader:
        """See `StorageBackend`."""
        return self._parent.open_reader(self._prefix + key)

    def open_stamped(self, key: str) -> RangeReader:
        """See `StorageBackend`."""
        return self._parent.open_stamped(self._prefix + key)

    def size(self, key: str) -> int:
        """See `StorageBackend`."""
        return self._parent.size(self._prefix + key)

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        return self._parent.put(self._prefix + key, data, condition=condition)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return self._parent.open_writer(self._prefix + key, size)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return self._parent.open_new(self._prefix + key, size)

    def abort_uploads(self, prefix: str = "") -> int:
        """See `StorageBackend`."""
        return self._parent.abort_uploads(self._prefix + prefix)

    def delete_while(self, keys: Sequence[str], check: Callable[[], None]) -> None:
        """See `StorageBackend`."""
        self._parent.delete_while([self._prefix + key for key in keys], check)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`."""
        for key in self._parent.list(self._prefix + prefix):
            yield key[len(self._prefix) :]

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`."""
        return self._parent.list_names(self._prefix + prefix)

    def list_sizes(self, prefix: str = "") -> Mapping[str, int] | None:
        """See `StorageBackend`."""
        sizes = self._parent.list_sizes(self._prefix + prefix)
        return sizes and {key[len(self._prefix) :]: size for key, size in sizes.items()}

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        self._parent.delete([self._prefix + key for key in keys])

    def defer_names(self, key: str) -> AbstractContextManager[object]:
        """See `StorageBackend`."""
        return self._parent.defer_names((self._prefix + key).removesuffix("/"))

    def sync(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        self._parent.sync([self._prefix + key for key in keys])


class AtomicSubdirectories(Subdirectory):
    """A directory of a storage with real directories, as a storage."""

    def __init__(self, parent: StorageBackend, name: str) -> None:
        super().__init__(parent, name)
        self._directories = cast(AtomicDirectories, parent)

    def lock_directory(self, key: str) -> DirectoryLock | None:
        """See `AtomicDirectories`."""
        return self._directories.lock_directory(self._prefix + key)

    def has_locks(self) -> bool:
        """See `AtomicDirectories`."""
        return self._directories.has_locks()

    def probe(self, key: str) -> DirectoryFeatures:
        """See `AtomicDirectories`."""
        return self._directories.probe(self._prefix + key)

    def limits(self, key: str) -> PlaceLimits:
        """See `AtomicDirectories`."""
        return self._directories.limits(self._prefix + key)

    def can_move(self, key: str, onto: str) -> bool:
        """See `AtomicDirectories`."""
        return self._directories.can_move(self._prefix + key, self._prefix + onto)

    def rename(self, source: str, destination: str) -> None:
        """See `AtomicDirectories`."""
        self._directories.rename(self._prefix + source, self._prefix + destination)

    def exchange(self, first: str, second: str) -> None:
        """See `AtomicDirectories`."""
        self._directories.exchange(self._prefix + first, self._prefix + second)

    def place(self, source: str, destination: str, keys: Sequence[str]) -> None:
        """See `AtomicDirectories`."""
        self._directories.place(self._prefix + source, self._prefix + destination, keys)

    def replace(self, source: str, destination: str, stamp: str | None) -> None:
        """See `AtomicDirectories`."""
        self._directories.replace(self._prefix + source, self._prefix + destination, stamp)

    def stamps(self, keys: Sequence[str]) -> Mapping[str, str]:
        """See `AtomicDirectories`."""
        stamps = self._directories.stamps([self._prefix + key for key in keys])
        return {key[len(self._prefix) :]: stamp for key, stamp in stamps.items()}

    def delete_unchanged(self, stamps: Mapping[str, str]) -> None:
        """See `AtomicDirectories`."""
        self._directories.delete_unchanged({self._prefix + key: stamp for key, stamp in stamps.items()})

    def hide_from_others(self, old: str, new: str) -> None:
        """See `AtomicDirectories`."""
        self._directories.hide_from_others(self._prefix + old, self._prefix + new)

    def keep_attributes(self, old: str, new: str) -> None:
        """See `AtomicDirectories`."""
        self._directories.keep_attributes(self._prefix + old, self._prefix + new)

    def sync_directory(self, key: str) -> None:
        """See `AtomicDirectories`."""
        self._directories.sync_directory(self._prefix + key)

    def delete_directory(self, key: str) -> None:
        """See `AtomicDirectories`."""
        self._directories.delete_directory(self._prefix + key)


class NewDirectory(AtomicSubdirectories):
    """A new directory, as a storage. No object replaces another object, even if the file system merges their names."""

    def __init__(self, parent: StorageBackend, name: str, display: str) -> None:
        """Open a directory that a save writes. `display` is its location, for errors."""
        super().__init__(parent, name)
        self._display = display

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`. A put without a condition does not replace an existing object."""
        try:
            return super().put(key, data, condition=condition or IF_ABSENT)
        except ConditionFailedError as error:
            if condition is not None:
                raise
            raise self._exists(key) from error

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`. Does not replace an existing object."""
        try:
            return super().open_new(key, size)
        except ConditionFailedError as error:
            raise self._exists(key) from error

    def _exists(self, key: str) -> NameCollisionError:
        return existing_name(self._display, key, self.list())


def subdirectory(parent: StorageBackend, name: str) -> StorageBackend:
    """Return a directory of a storage as a storage. An empty name returns the storage itself."""
    if not name:
        return parent
    if has_directories(type(parent)):
        return AtomicSubdirectories(parent, name)
    return Subdirectory(parent, name)


@functools.lru_cache(maxsize=64)
def has_directories(storage_type: type[StorageBackend]) -> bool:
    """Return True if a type of storage has real directories. Cached, because the check is slow and frequent."""
    return issubclass(storage_type, AtomicDirectories)


def stamps_of(store: StorageBackend, keys: Sequence[str]) -> Mapping[str, str]:
    """Return a stamp of each existing file, see `AtomicDirectories.stamps`; nothing for an object store."""
    return cast(AtomicDirectories, store).stamps(keys) if has_directories(type(store)) else {}


def make_directory(parent: StorageBackend, name: str) -> None:
    """Create a directory by locking it, because `AtomicDirectories` has no other way.

    If the file system has no locks, the lock fails after the directory was created.
    """
    with suppress(AtomicityError):
        lock = cast(AtomicDirectories, parent).lock_directory(name)
        if lock is not None:
            with lock:
                pass
