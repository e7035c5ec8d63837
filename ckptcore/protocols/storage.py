"""Protocols of storages: objects by key, and the requests that suit each storage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptcore.errors import ConditionFailedError, ObjectNotFoundError
from ckptcore.model.tree import JSON

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes. A `memoryview` is one-dimensional with format ``B``."""

_EMPTY: Final[Mapping[str, JSON]] = {}


def quoted_path(path: bytes) -> str:
    """Return a path as part of a URL, with other bytes than letters, digits and ``/._-~`` escaped."""
    if path.translate(None, b"/._-~").isalnum():
        return path.decode("ascii")
    from urllib.parse import quote  # slow, and few paths need it

    return quote(path)


class StorageAddress(NamedTuple):
    """The address of the objects of a storage, for native I/O.

    Attributes:
        url: the directory, ending in ``/``. Characters that a URL cannot have, and ``%``, are escaped with ``%``.
        options: other options of native I/O, without secrets: ``endpoint`` (a URL), ``region``, ``credentials``, and
            options of the storage. ``credentials`` is the source of the credentials: ``anonymous``, ``environment``,
            ``profile`` (its name is in the option ``profile``), ``default`` for the search of the cloud's libraries, or
            ``given`` if only this process has them. Native I/O is not used if it does not know an option.
    """

    url: str
    options: Mapping[str, JSON] = _EMPTY


class StorageOptions(NamedTuple):
    """Options for opening a storage.

    Attributes:
        durable: True if the results of `finish`, `put` and `sync` must survive a loss of power.
        config: options of this storage by name, from the Context.
    """

    durable: bool = True
    config: Mapping[str, JSON] = _EMPTY

    def __repr__(self) -> str:
        """Return a text without the values of options, which may be secrets."""
        return f"StorageOptions(durable={self.durable}, config=<{', '.join(self.config)}>)"


@dataclass(frozen=True, slots=True)
class IfAbsent:
    """Condition of a put: the object does not exist."""


class IfTag(NamedTuple):
    """Condition of a put: the object still has this tag."""

    tag: str


IF_ABSENT: Final = IfAbsent()
"""Condition of a put: the object does not exist."""

PutCondition: TypeAlias = IfAbsent | IfTag
"""The condition under which a put replaces an object."""


class ObjectWriter(Protocol):
    """An object that is written in pieces. Before `finish`, the object does not exist, or readers ignore it."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset, in any order and from any thread. Each byte is written once.

        The caller may reuse the memory of `data` once the call has returned.
        """

    def finish(self) -> None:
        """Complete the object. It is then durable if the storage was opened durable."""

    def abort(self) -> None:
        """Abort the write and remove the pieces. Never raises. May be called after a failed `finish`."""


class RangeReader(Protocol):
    """An object that is open for reading. Thread-safe."""

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset, on this thread. Raises the errors of `StorageBackend.get_into`."""


@runtime_checkable
class StampedReader(RangeReader, Protocol):
    """An object that is open for many small reads, with a stamp that shows changes. Thread-safe."""

    def stamp(self) -> Hashable | None:
        """Return a value that differs after the bytes of the object changed; None while a change could be missed.

        Bytes that were verified after this method returned a stamp need no further verification as long as the method
        returns the same stamp. Called for each read.

        Raises:
            StorageError
        """

    def size(self) -> int:
        """Return the current size in bytes. Called for each read.

        Raises:
            StorageError
        """

    def memory(self) -> memoryview | None:
        """Map the object as read-only memory; None if a page fault could end the process, as on network file systems.

        Bytes after `size` must not be touched.
        """


class StorageCapabilities(NamedTuple):
    """The requests that suit a storage.

    Attributes:
        request_bytes: the size of an efficient read in bytes.
        concurrency: the number of requests to have in flight. Above 1, for object stores, which have high latency:
            the core uses that many threads, within its limits. 1: the core uses one thread for each processor.
        part_bytes: the size of the parts of an object that is written in pieces, in bytes: a multiple of 1 MiB, or 1
            for any size. If the offset and the length of an `ObjectWriter.write_at` are multiples of it, the bytes are
            sent without a copy before the call returns.
    """

    request_bytes: int = 1 << 20
    concurrency: int = 1
    part_bytes: int = 1


class StorageBackend(Protocol):
    """Objects by key. Knows no arrays, and has no state besides caches. Thread-safe.

    A key is a relative path with ``/`` between directories. It has no empty parts, and no parts ``.`` and ``..``. A
    storage inherits from this class, which has defaults for all optional methods. A storage that wraps another storage
    must forward all methods; otherwise the capabilities of the wrapped storage are lost.
    """

    @property
    def capabilities(self) -> StorageCapabilities:
        """The requests that suit the storage: a class attribute or a property."""
        return StorageCapabilities()

    @property
    def address(self) -> StorageAddress | None:
        """The address for native I/O, or None, the default."""
        return None

    # --- read

    @abstractmethod
    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of an object; fewer if it ends earlier.

        Raises:
            ObjectNotFoundError
        """

    @abstractmethod
    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """Return a small object, and its tag for conditional puts.

        Raises:
            ObjectNotFoundError
        """

    @abstractmethod
    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset, on this thread.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: the object ends before a buffer is full.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            ObjectNotFoundError: also if the key is a directory.
        """

    def open_reader(self, key: str) -> RangeReader:
        """Open an object for several reads. An implementation reads the object that exists now, or fails.

        By default each read looks up the object by its key again, and may find another object. A storage in which the
        lookup takes time implements this method.

        Raises:
            ObjectNotFoundError: now, or by the first read.
        """
        return ReaderByKey(self, key)

    def open_stamped(self, key: str) -> RangeReader:
        """Open an object for many small reads. By default equal to `open_reader`.

        A local storage, whose repeated reads are fast, returns a `StampedReader`.

        Raises:
            ObjectNotFoundError: now, or by the first read.
        """
        return self.open_reader(key)

    # --- write

    @abstractmethod
    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object atomically, replacing an existing object; return its new tag.

        Raises:
            ConditionFailedError: nothing was changed.
            AtomicityError: the storage has no conditional puts; nothing was changed.
            StorageFullError, or a StorageError that is a PermissionError: the put had no effect and will have none. If
                an earlier attempt of the same put may have reached the storage, raise another StorageError.
        """

    @abstractmethod
    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Start an object that is written in pieces; `size` in bytes if known."""

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """Start an object as `open_writer` does, but replace nothing.

        If the object exists when the writer's `finish` is called, `finish` raises `ConditionFailedError` and leaves the
        object unchanged. The pieces are kept, so that `finish` can be called again after the object was deleted. If the
        response to a `finish` is lost, a repeated `finish` finds the object that the first `finish` completed, and
        raises too. Therefore the caller must check which object exists.

        Called in storages where conditional puts commit checkpoints, and in new directories of `AtomicDirectories`. In
        a new directory, this method may already refuse an existing object. By default the writer looks for an existing
        object right before it completes its own. This is not atomic, and requires that unfinished objects are
        invisible. A storage implements this method if it has conditions for objects in pieces, or if its unfinished
        objects are visible.
        """
        return CheckedWriter(self, key, self.open_writer(key, size))

    def abort_uploads(self, prefix: str = "") -> int:
        """Abort all unfinished objects below a directory, whoever writes them. Return their number.

        The `finish` of their writers then raises `StorageError`. Finished objects remain. By default do nothing and
        return 0, for a storage that keeps no pieces of unfinished objects.
        """
        return 0

    def defer_names(self, key: str) -> AbstractContextManager[object]:
        """Return a ``with`` block in which the names in a directory, and below it, need not become durable.

        In the block, writes make only the content of objects durable. Its end without an error makes durable all names
        that this storage changed meanwhile. `AtomicDirectories.sync_directory` of the directory ends the deferral
        early, once all names in it are durable, and leaves the name of the directory itself to a rename. No thread
        may write there meanwhile. For directories that are not committed yet. By default, nothing is deferred.

        Raises:
            StorageError: at the end of the block.
        """
        return nullcontext()

    @abstractmethod
    def sync(self, keys: Sequence[str]) -> None:
        """Make durable the objects that native I/O wrote, and the directories that contain them."""

    # --- names

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """Return the keys of all objects below a directory, sorted; none if it does not exist."""

    @abstractmethod
    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Return the names one level below a directory, sorted. Names of directories end in ``/``. May be empty."""

    def list_sizes(self, prefix: str = "") -> Mapping[str, int] | None:
        """Return the sizes in bytes of all objects below a directory, by key.

        By default None: `size` is called for each object. A storage whose listings have sizes implements this method.
        """
        return None

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; a missing object is no error. Directories that become empty disappear."""

    def delete_while(self, keys: Sequence[str], check: Callable[[], None]) -> None:
        """Delete objects like `delete`, and call `check` right before each request, including retries.

        An error of `check` ends the deletion. `check` may use the storage. By default `check` is called once. A storage
        that retries failed deletions must implement this method, because another save may write between two attempts.
        """
        check()
        self.delete(keys)


class ReaderByKey:
    """A reader that looks up the object by its key for each read. Thread-safe."""

    def __init__(self, storage: StorageBackend, key: str) -> None:
        self._storage = storage
        self._key = key

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `RangeReader`."""
        self._storage.get_into(self._key, ranges)


class CheckedWriter:
    """A writer that checks right before completion that the object does not exist. Thread-safe."""

    def __init__(self, storage: StorageBackend, key: str, inner: ObjectWriter) -> None:
        """Write through `inner`, which would replace an existing object."""
        self._storage = storage
        self._key = key
        self._inner = inner

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `ObjectWriter`."""
        self._inner.write_at(offset, data)

    def finish(self) -> None:
        """See `StorageBackend.open_new`."""
        try:
            nbytes = self._storage.size(self._key)
        except ObjectNotFoundError:
            self._inner.finish()
        else:
            raise ConditionFailedError(
                f"cannot create the object {self._key!r}: it exists already, with {nbytes} bytes"
            )

    def abort(self) -> None:
        """See `ObjectWriter`."""
        self._inner.abort()


NameForm: TypeAlias = Literal["case", "accents", "trailing dots"]
"""A difference between two names: in case, in the Unicode form of accents, or in dots and spaces at the end."""


class DirectoryFeatures(NamedTuple):
    """Features that a probe of a file system found.

    Attributes:
        exchanges: True if two directories can be exchanged atomically.
        merges: the differences between names that the file system ignores, so that two names are the same file.
    """

    exchanges: bool = True
    merges: frozenset[NameForm] = frozenset()


class PlaceLimits(NamedTuple):
    """Limits of a checkpoint at a location.

    Attributes:
        name_bytes: maximum bytes of a name; None if unknown.
        is_mount_point: True if a file system is mounted there, so that no rename can replace the directory.
        mount: bytes that identify the file system of the parent directory. They differ if another file system is
            mounted later.
    """

    name_bytes: int | None = None
    is_mount_point: bool = False
    mount: bytes = b""


class DirectoryLock(AbstractContextManager[None], Protocol):
    """The lock of a directory. Enter it immediately, because it may take effect only then.

    It lasts until the exit of the context, or until the process ends.
    """

    def is_in_place(self) -> bool:
        """Return True if the locked directory is still at its key.

        Return False if the directory was renamed, removed or replaced, or if its file system is no longer mounted
        there.
        """


@runtime_checkable
class AtomicDirectories(Protocol):
    """A storage with real directories that can be renamed atomically. See `StorageBackend` for keys."""

    def lock_directory(self, key: str) -> DirectoryLock | None:
        """Create a directory if needed, and lock it. See `DirectoryLock`.

        Returns:
            The lock, or None if the directory is locked already.

        Raises:
            AtomicityError: the file system has no locks. The directory was created nevertheless.
        """

    def has_locks(self) -> bool:
        """Return True if directories can be locked here. Changes nothing.

        If not, the caller uses leases instead, which are objects that it writes with conditional puts.
        """

    def probe(self, key: str) -> DirectoryFeatures:
        """Find out which features the file system of a directory has, by creating names in it and removing them.

        Args:
            key: a directory that exists, and that this process has locked.
        """

    def limits(self, key: str) -> PlaceLimits:
        """Return the limits of a checkpoint at a key, which need not exist. Changes nothing."""

    def can_move(self, key: str, onto: str) -> bool:
        """Return True if a directory can be renamed. Changes nothing.

        Args:
            key: the directory.
            onto: a directory with the same parent that is not empty, so that a rename to its name fails.
        """

    def rename(self, source: str, destination: str) -> None:
        """Rename a directory atomically. The new name is durable if the storage was opened durable.

        Raises:
            ConditionFailedError: the destination exists (an empty directory is replaced).
        """

    def exchange(self, first: str, second: str) -> None:
        """Exchange two directories atomically. The exchange is durable if the storage was opened durable.

        Raises:
            AtomicityError: the file system does not support this; nothing was changed.
        """

    def place(self, source: str, destination: str, keys: Sequence[str]) -> None:
        """Move objects of a directory into another directory, each by one rename.

        The new names are durable if the storage was opened durable. Replaces nothing. After an error, some of the
        objects may have been moved.

        Args:
            source, destination: the directories.
            keys: the objects, relative to both directories.

        Raises:
            ConditionFailedError: an object exists at the destination.
            ObjectNotFoundError: a directory or an object is missing.
        """

    def replace(self, source: str, destination: str, stamp: str | None) -> None:
        """Rename an object to `destination`. It replaces the object there, and gets the attributes of that object.

        The new name is durable if the storage was opened durable.

        Args:
            source, destination: the objects.
            stamp: the stamp of the object to replace; None if the destination must not exist.

        Raises:
            ConditionFailedError: the destination does not match `stamp`; nothing was changed.
            ObjectNotFoundError: the object, or the directory of the destination, is missing.
        """

    def stamps(self, keys: Sequence[str]) -> Mapping[str, str]:
        """Return a stamp of each existing object. It differs after a replacement or change, but not after a rename."""

    def delete_unchanged(self, stamps: Mapping[str, str]) -> None:
        """Delete the objects that still have the given stamps. See `StorageBackend.delete`."""

    def hide_from_others(self, old: str, new: str) -> None:
        """Give a new directory the attributes of an old directory.

        Users who cannot read everything in the old directory get no access to the new directory. Attributes are owner,
        group, mode, ACL and extended attributes. Attributes that the file system does not have, or that the process may
        not set, are omitted. Does nothing if the old directory does not exist.
        """

    def keep_attributes(self, old: str, new: str) -> None:
        """Give a new directory and its contents the attributes of an old directory and its contents, matched by name.

        See `hide_from_others`. The result is durable if the storage was opened durable.
        """

    def sync_directory(self, key: str) -> None:
        """Make the contents of a directory durable, including the names of objects and directories below it.

        The name of the directory itself becomes durable too, unless it is deferred: see `StorageBackend.defer_names`.
        """

    def delete_directory(self, key: str) -> None:
        """Delete a directory and its contents; a missing directory is no error."""


class StorageOpener(Protocol):
    """Opens a directory of a storage. Creates nothing."""

    def __call__(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open the directory of a URL. A local directory may also be a plain path."""
