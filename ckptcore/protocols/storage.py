"""Storages: objects by key."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptcore.errors import ConditionFailedError, ObjectNotFoundError
from ckptcore.model.tree import JSON

__all__ = [
    "IF_ABSENT",
    "AtomicDirectories",
    "Buffer",
    "CheckedWriter",
    "IfAbsent",
    "IfTag",
    "ObjectWriter",
    "PutCondition",
    "RangeReader",
    "ReaderByKey",
    "StampedReader",
    "StorageAddress",
    "StorageBackend",
    "StorageCapabilities",
    "StorageOpener",
    "StorageOptions",
]


Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes. A `memoryview` is one-dimensional with format ``B``."""


@dataclass(frozen=True, slots=True)
class StorageAddress:
    """Where native I/O finds the same objects.

    Attributes:
        url: the directory, ending in ``/``; what no URL has is escaped with ``%`` in it, and so is ``%``.
        options: what else native I/O needs, without secrets: ``endpoint`` (a URL), ``region``, ``credentials`` (where
            they come from: ``anonymous``, ``environment``, ``profile`` with the name in ``profile``, ``default`` for
            what the cloud's own libraries find, ``given`` where only this process has them), and what else the storage
            was opened with. Who does not know an option leaves native I/O be.
    """

    url: str
    options: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """How a storage is opened.

    Attributes:
        durable: whether what `finish`, `put` and `sync` return from survives a loss of power.
        config: options of this storage by name, from the Context.
    """

    durable: bool = True
    config: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IfAbsent:
    """Put only where there is no such object."""


class IfTag(NamedTuple):
    """Put only where the object still has this tag."""

    tag: str


IF_ABSENT: Final = IfAbsent()
"""Put only where there is no such object."""

PutCondition: TypeAlias = IfAbsent | IfTag
"""What must be true of an object for a put to replace it."""


class ObjectWriter(Protocol):
    """An object that is being written in pieces; it is not there before `finish`, or is not relied on before."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset, in any order and from any thread; every byte is written once.

        The memory can be reused when this returns.
        """
        ...

    def finish(self) -> None:
        """Complete the object; durable where the storage was opened so."""
        ...

    def abort(self) -> None:
        """Give up and remove what was written. Never raises; may follow a failed `finish`."""
        ...


class RangeReader(Protocol):
    """An object that is open for reading. Any thread."""

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on, on this thread; raises what `StorageBackend.get_into` does."""
        ...


@runtime_checkable
class StampedReader(RangeReader, Protocol):
    """An object that is open for many small reads, and tells whether it changed. Any thread."""

    def stamp(self) -> Hashable | None:
        """Return a value that differs once the bytes of the object changed; None while a change could go unseen.

        Bytes that were verified after this returned a stamp need not be verified again while it returns the same one.
        Called for each read.

        Raises:
            StorageError
        """
        ...

    def size(self) -> int:
        """Bytes that it has now. Called for each read.

        Raises:
            StorageError
        """
        ...

    def memory(self) -> memoryview | None:
        """All of it as read-only memory; None if touching that could end the process, as on network file systems.

        Bytes behind `size` must not be touched.
        """
        ...


class StorageCapabilities(NamedTuple):
    """The requests that suit a storage.

    Attributes:
        request_bytes: bytes that one read should ask for to be efficient.
        concurrency: requests to have in flight at once. Object stores, whose latency is high, have more than 1: the
            core then uses that many threads, within its own bounds. 1: one thread for each processor.
        part_bytes: bytes of one part of an object that is written in pieces: a multiple of 1 MiB, or 1 if parts may
            have any size. An `ObjectWriter.write_at` whose offset and length are multiples of it is sent without a copy
            before it returns.
    """

    request_bytes: int = 1 << 20
    concurrency: int = 1
    part_bytes: int = 1


class StorageBackend(Protocol):
    """Objects by key. No arrays, no retries of the caller's, no state that matters. Any thread.

    A key is relative, with ``/`` between directories; it has no empty, ``.`` or ``..`` part. A storage inherits from
    this class, which has defaults for all that is optional. One that wraps another storage must forward all
    methods, or what that can do is lost.
    """

    @property
    def capabilities(self) -> StorageCapabilities:
        """The requests that suit it: a class attribute or a property."""
        return StorageCapabilities()

    @property
    def address(self) -> StorageAddress | None:
        """The address for native I/O, or None, the default."""
        return None

    # --- read

    @abstractmethod
    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of an object; fewer where it ends before.

        Raises:
            ObjectNotFoundError
        """
        ...

    @abstractmethod
    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """A small object whole, and the tag that a conditional put can name.

        Raises:
            ObjectNotFoundError
        """
        ...

    @abstractmethod
    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on, on this thread.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: where the object ends before a buffer is full.
        """
        ...

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            ObjectNotFoundError: also where the key is that of a directory.
        """
        ...

    def open_reader(self, key: str) -> RangeReader:
        """Open an object for several reads: they read the object that was there then, or fail.

        By default each read finds the object again by its key. A storage where finding an object costs something
        implements it.

        Raises:
            ObjectNotFoundError: now, or by the first read.
        """
        return ReaderByKey(self, key)

    def open_stamped(self, key: str) -> RangeReader:
        """Open an object for many small reads, as `open_reader`, which is the default.

        A storage that is near, and reads the same bytes again as fast, returns a `StampedReader`.

        Raises:
            ObjectNotFoundError: now, or by the first read.
        """
        return self.open_reader(key)

    # --- write

    @abstractmethod
    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object whole or not at all, replacing what is there; returns its new tag.

        Raises:
            ConditionFailedError: nothing was changed.
            AtomicityError: the storage has no conditional puts; nothing was changed.
            StorageFullError, or a StorageError that is a PermissionError: the put had no effect and will have none.
                If an earlier attempt may have reached the storage, raise another StorageError.
        """
        ...

    @abstractmethod
    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Begin an object that is written in pieces; `size` in bytes where it is known."""
        ...

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """Begin an object as `open_writer` does, but replace nothing.

        The writer's `finish` raises `ConditionFailedError` if the object is there by then, and leaves it as it is. A
        `finish` that is repeated because its answer was lost finds what it wrote itself, and raises too: the caller
        looks. Pieces are kept, so that `finish` can be called again once the object in its way is gone.

        Called only where checkpoints are committed with conditional puts. By default the writer looks right before it
        completes the object, which is not one step, and needs a writer that shows nothing before. A storage whose
        conditions also hold for objects in pieces implements it.
        """
        return CheckedWriter(self, key, self.open_writer(key, size))

    def abort_uploads(self, prefix: str = "") -> int:
        """Abort every unfinished object below a directory, whoever writes it; returns how many there were.

        Their writers cannot finish them any more: `finish` raises `StorageError`. Finished objects stay. By default
        nothing and 0, for a storage that keeps no pieces of unfinished objects.
        """
        return 0

    @abstractmethod
    def sync(self, keys: Sequence[str]) -> None:
        """Make objects durable that native I/O wrote, and the directories they are in."""
        ...

    # --- names

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys of all objects below a directory, sorted; nothing where there is none."""
        ...

    @abstractmethod
    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``. Empty where there is none."""
        ...

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error. Directories that become empty vanish."""
        ...

    def delete_while(self, keys: Sequence[str], check: Callable[[], None]) -> None:
        """Delete objects as `delete` does, and call `check` right before each request, including repeated ones.

        What `check` raises ends the deletion; it may use the storage. By default it is called once. A storage that
        repeats failed deletions by itself must implement it: another save may have written there meanwhile.
        """
        check()
        self.delete(keys)


class ReaderByKey:
    """An object that its storage finds by its key for each read. Any thread."""

    def __init__(self, storage: StorageBackend, key: str) -> None:
        self._storage = storage
        self._key = key

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `RangeReader`."""
        self._storage.get_into(self._key, ranges)


class CheckedWriter:
    """A writer that looks for the object right before it completes it. Any thread."""

    def __init__(self, storage: StorageBackend, key: str, inner: ObjectWriter) -> None:
        """Write through `inner`, which replaces what is there by then."""
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
                f"cannot create the object {self._key!r}: expected none there, found one of {nbytes} bytes"
            )

    def abort(self) -> None:
        """See `ObjectWriter`."""
        self._inner.abort()


@runtime_checkable
class AtomicDirectories(Protocol):
    """A storage with real directories that can be renamed atomically. Keys as in `StorageBackend`."""

    def lock_directory(self, key: str) -> AbstractContextManager[None] | None:
        """Create a directory if needed, and lock it until closed or the process ends; None if it is locked."""
        ...

    def rename(self, source: str, destination: str) -> None:
        """Rename a directory; atomic, and durable where the storage was opened so.

        Raises:
            ConditionFailedError: the destination exists (an empty directory is replaced).
        """
        ...

    def exchange(self, first: str, second: str) -> None:
        """Let two directories change places; atomic, and durable where the storage was opened so.

        Raises:
            AtomicityError: this file system cannot; nothing was changed.
        """
        ...

    def sync_directory(self, key: str) -> None:
        """Make everything in a directory durable: the names of the objects, and of directories below it."""
        ...

    def delete_directory(self, key: str) -> None:
        """Delete a directory with all it holds; one that is not there is no error."""
        ...


class StorageOpener(Protocol):
    """Opens a directory of a storage; creates nothing."""

    def __call__(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open the directory that `url` names (with its scheme; a local one may be a plain path)."""
        ...
