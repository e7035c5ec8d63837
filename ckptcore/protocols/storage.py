"""Storages: objects by key, and what some storages can do on top."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, runtime_checkable

from ckptcore.model.tree import JSON

__all__ = [
    "IF_ABSENT",
    "AtomicDirectories",
    "Buffer",
    "CreatesObjects",
    "HeldReader",
    "HoldsObjects",
    "HoldsUploads",
    "IfAbsent",
    "IfTag",
    "ManyRequests",
    "ObjectWriter",
    "OpensObjects",
    "PutCondition",
    "RangeReader",
    "RepeatsDeletions",
    "StorageAddress",
    "StorageBackend",
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
        options: what else native I/O needs, without secrets: ``endpoint`` (a URL), ``region``, ``credentials`` (where they come from:
            ``anonymous``, ``environment``, ``profile`` with the name in ``profile``, ``default`` for what the cloud's own libraries
            find, ``given`` where only this process has them), and what else the storage was opened with. Who does not know an
            option leaves native I/O be.
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


@dataclass(frozen=True, slots=True)
class IfTag:
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


class StorageBackend(Protocol):
    """Objects by key. No arrays, no retries of the caller's, no state that matters. Any thread.

    A key is relative, with ``/`` between directories; it has no empty, ``.`` or ``..`` part.
    """

    @property
    def request_bytes(self) -> int:
        """Bytes that one read should ask for to be efficient; a class attribute will do."""
        ...

    @property
    def address(self) -> StorageAddress | None:
        """For native I/O, or None."""
        ...

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of an object; fewer where it ends before.

        Raises:
            ObjectNotFoundError
        """
        ...

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """A small object whole, and the tag that a conditional put can name.

        Raises:
            ObjectNotFoundError
        """
        ...

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on, on this thread.

        Raises:
            ObjectNotFoundError
            CorruptCheckpointError: where the object ends before a buffer is full.
        """
        ...

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            ObjectNotFoundError: also where the key is that of a directory.
        """
        ...

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object whole or not at all, replacing what is there; returns its new tag.

        Raises:
            ConditionFailedError: nothing was changed.
            StorageFullError, or a StorageError that is a PermissionError: nothing was changed, and nothing will be: not where an
                earlier try of the same put may have been done, or be on its way.
        """
        ...

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Begin an object that is written in pieces; `size` in bytes where it is known."""
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys of all objects below a directory, sorted; nothing where there is none."""
        ...

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``. Empty where there is none."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error. Directories that become empty vanish."""
        ...

    def sync(self, keys: Sequence[str]) -> None:
        """Make objects durable that something else wrote (native I/O), and the directories they are in."""
        ...


class RangeReader(Protocol):
    """An object that is open for reading. Any thread."""

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on, on this thread; raises what `StorageBackend.get_into` does."""
        ...


@runtime_checkable
class OpensObjects(Protocol):
    """What a storage can do on top for which finding an object costs something: find it once for many reads."""

    def open_reader(self, key: str) -> RangeReader:
        """Open an object; what is read is of the object that was there then, or fails.

        Raises:
            ObjectNotFoundError
        """
        ...


@runtime_checkable
class HeldReader(RangeReader, Protocol):
    """An object that is open for many small reads, and tells whether it changed. Any thread."""

    def stamp(self) -> Hashable | None:
        """What is another one after the bytes of the object changed, from now on; None while a change could go unseen. Asked for each read.

        Who has verified bytes after this gave a stamp, and is given the same one later, has verified what is there then.

        Raises:
            StorageError
        """
        ...

    def size(self) -> int:
        """Bytes that it has now. Asked for each read.

        Raises:
            StorageError
        """
        ...

    def memory(self) -> memoryview | None:
        """All of it as memory that nobody writes to; None where touching that could end the process, as on storage that is somewhere else.

        What is behind `size` must not be touched.
        """
        ...


@runtime_checkable
class HoldsObjects(Protocol):
    """What a storage can do on top that is near, and reads the same bytes again as fast: open an object for many small reads."""

    def hold_open(self, key: str) -> HeldReader:
        """Open an object; what is read is of the object that was there then, or fails.

        Raises:
            ObjectNotFoundError
        """
        ...


@runtime_checkable
class ManyRequests(Protocol):
    """What a storage says on top for which each request takes long, and many at once take no longer: an object store."""

    @property
    def concurrency(self) -> int:
        """Requests worth having under way at once, at least 1; a class attribute will do.

        The core has that many threads for it, within its own bounds. 1: a thread for each processor is as good.
        """
        ...

    @property
    def part_bytes(self) -> int:
        """Bytes that one request carries to an object that is written in pieces; a class attribute will do.

        A multiple of 1 MiB, or 1 where any piece is as good as another. What `ObjectWriter.write_at` is given in multiples of it, at
        multiples of it, is sent as it is, before the call returns, and is not copied.
        """
        ...


@runtime_checkable
class CreatesObjects(Protocol):
    """What a storage can do on top whose conditions also hold for objects that are written in pieces."""

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """As `StorageBackend.open_writer`, but nothing is replaced.

        The writer's `finish` raises `ConditionFailedError` where the object is there by then, and leaves that as it is. Where
        the service cannot make the look and the change one step, the writer looks right before. A `finish` that the writer
        repeats because its answer was lost finds what it wrote itself: it raises then too, and who has it looks. What was written
        is kept for a `finish` that is called again, once the object that was in its way is gone.
        """
        ...


@runtime_checkable
class HoldsUploads(Protocol):
    """What a storage can do on top that keeps the pieces of objects which nobody has finished."""

    def abort_uploads(self, prefix: str = "") -> int:
        """Give up every unfinished object below a directory, whoever writes it; how many there were.

        A writer of one cannot finish it any more: its `finish` raises `StorageError`. Objects that are finished stay.
        """
        ...


@runtime_checkable
class RepeatsDeletions(Protocol):
    """What a storage must do on top that asks for a deletion again by itself where it failed: what stands there may be another one by then."""

    def delete_while(self, keys: Sequence[str], check: Callable[[], None]) -> None:
        """Delete objects as `delete` does, and call `check` right before each request, a repeated one too.

        What `check` raises ends the deletion; it may use the storage.
        """
        ...


@runtime_checkable
class AtomicDirectories(Protocol):
    """What a storage with real directories can do on top: the commit by rename. Keys as in `StorageBackend`."""

    def lock_directory(self, key: str) -> AbstractContextManager[None] | None:
        """Create a directory where there is none and hold it until closed or this process dies; None: another has it."""
        ...

    def rename(self, source: str, destination: str) -> None:
        """Rename a directory; atomic, and durable where the storage was opened so.

        Raises:
            ConditionFailedError: something stands at the destination (an empty directory is replaced).
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
