"""HostMemory: the blobs and entries that the memory server of one host holds, as files in a memory file system.

A blob is a sequence of bytes with a random name; it never changes once it is complete. An entry belongs to the key of
an object. It has the data of a small object, or names the blobs of a large one and the hosts that hold them. Files
survive the server, so that a new server on the same host continues with them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from ckptcore.errors import (
    ConditionFailedError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    StorageFullError,
)
from ckptcore_recovery.peers.memory_files import (
    Blob,
    OpenFile,
    check_blob_name,
    open_private,
    read_number,
    unlink,
    write_at,
    write_file,
    write_number,
)
from ckptcore_recovery.peers.messages import BLOCK_BYTES, PIECE_BYTES

if TYPE_CHECKING:
    from ckptcore.model.tree import JSON  # the server starts faster without NumPy

_PENDING_SECONDS: Final = 10.0
"""Time in seconds after which a version that a client reserved no longer keeps other clients from changing the key."""

_DELETED_SECONDS: Final = 300.0
"""Time in seconds for which the version of a deleted object is remembered; longer than any request takes."""

_FILE_BYTES: Final = 4096
"""Memory of a small file in a memory file system: a page."""

_ROOM_BYTES: Final = 1 << 20
"""Room in a full memory file system for a start of the job: for its view, and for the entries of lost hosts."""


class Entry(NamedTuple):
    """The stored version of a key.

    Attributes:
        version: increases with each change of the key.
        size: the bytes of the object.
        data: the object if it is small, else None.
        blob: the name of the blobs with the object; empty if `data` has it.
        holders: the ids of the members that hold a blob of this name.
        is_deleted: True if the object was deleted by this version.
        needed: the number of blobs that are needed to read the object. 1: each blob is a copy of it. More: the blob of
            each holder is a fragment of an erasure code, numbered by its place in `holders`.
    """

    version: int
    size: int = 0
    data: bytes | None = None
    blob: str = ""
    holders: tuple[str, ...] = ()
    is_deleted: bool = False
    needed: int = 1

    def encode(self) -> list[JSON]:
        """Return the entry as JSON."""
        data = None if self.data is None else base64.b64encode(self.data).decode("ascii")
        return [self.version, self.size, data, self.blob, list(self.holders), self.is_deleted, self.needed]

    @classmethod
    def decode(cls, encoded: Any) -> Self:
        """Read an entry from JSON.

        Raises:
            StorageError: it is not valid.
        """
        try:
            version, size, data, blob, holders, is_deleted, needed = encoded
            if blob:
                check_blob_name(blob)
            content = None if data is None else base64.b64decode(data)
            names = tuple(map(str, holders))
            return cls(int(version), int(size), content, str(blob), names, bool(is_deleted), int(needed))
        except (TypeError, ValueError) as error:
            raise StorageError(f"invalid entry of a memory server: {error}") from error


@dataclass
class _UnfinishedBlob:
    """A blob that is being written.

    Attributes:
        key: the key of the object that it belongs to.
        size: its bytes.
        file: its file.
        checksums: the checksum of each block; None for one that is missing.
        owner: identifies the connection that writes it.
        failure: the first error of a write.
    """

    key: str
    size: int
    file: OpenFile
    checksums: list[int | None]
    owner: int
    failure: Exception | None = None


@dataclass
class _Pending:
    """A version of a key that a client reserved.

    Attributes:
        version: the version.
        since: when it was reserved, by the monotonic clock.
    """

    version: int
    since: float = field(default_factory=time.monotonic)


class HostMemory:
    """The blobs and entries of one host. Thread-safe.

    Attributes:
        directory: the directory with the files.
        limit: the maximum bytes of all files together.
        epoch: the number of the job's incarnation that may write.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        """Read the files that an earlier server of this host left. Removes blobs that are not complete."""
        self.directory = directory
        self.limit = limit
        self.epoch = 0
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._blobs: dict[str, Blob] = {}
        self._unfinished: dict[str, _UnfinishedBlob] = {}
        self._pending: dict[str, _Pending] = {}
        self._deleted: deque[tuple[float, str, int]] = deque()
        """The time of each deletion, the key and the version, oldest first."""
        self._counter = 0
        self._used = 0
        self._freeing = 0
        """The number of removed blobs whose memory counts as used until it is free."""
        self._buffers = threading.local()
        """A block for each thread that receives pieces."""
        for name in ("blobs", "entries"):
            (directory / name).mkdir(exist_ok=True, mode=0o700)
        self.release_room()
        # Versions are higher than those of earlier servers of this memory, which may have forgotten some of them.
        self._starts = read_number(directory / "starts") + 1
        write_number(directory / "starts", self._starts)
        self._read_files()

    def _read_files(self) -> None:
        self.epoch = read_number(self.directory / "epoch")
        for path in list((self.directory / "blobs").iterdir()):
            if path.suffix:
                if path.suffix != ".json" or not path.with_suffix("").exists():
                    unlink(path)
                continue
            blob = Blob.open(self.directory, path.name)
            if blob is None:
                unlink(path, path.with_suffix(".json"))
                continue
            self._blobs[path.name] = blob
            self._used += len(blob.memory) + _FILE_BYTES
        for path in list((self.directory / "entries").iterdir()):
            if path.suffix:
                unlink(path)  # a temporary file of a killed server
                continue
            key, encoded = json.loads(path.read_bytes())
            if not isinstance(key, str):
                raise StorageError(f"{path.name} has an entry of no key")
            entry = Entry.decode(encoded)
            self._entries[key] = entry
            self._used += _entry_bytes(entry)

    def keep_room(self) -> None:
        """Keep room for the next start of the job, as far as the memory file system has any."""
        with contextlib.suppress(OSError), open(self._room, "wb", opener=open_private) as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)

    def release_room(self) -> None:
        """Release the room that is kept for a start of the job."""
        unlink(self._room)

    @property
    def _room(self) -> Path:
        return self.directory / "room"

    @property
    def used(self) -> int:
        """The bytes of all files."""
        return self._used

    # --- incarnations of the job --------------------------------------------------------------------------------------

    def fence(self, epoch: int) -> None:
        """Refuse later writes of earlier incarnations of the job.

        Raises:
            ConditionFailedError: a later incarnation has fenced this host already.
        """
        with self._changed:
            if epoch <= self.epoch:
                raise ConditionFailedError(f"incarnation {epoch} of the job is not newer than {self.epoch}")
            self.release_room()
            write_number(self.directory / "epoch", epoch)
            self.epoch = epoch
            self._pending.clear()
            for name in list(self._unfinished):
                self._discard(name)
            self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self, epoch: int) -> Iterator[None]:
        """Hold off `fence` while an incarnation of the job writes.

        Raises:
            SaveLostError: another incarnation has taken over.
        """
        with self._changed:
            self.expect_epoch(epoch)
            yield

    def expect_epoch(self, epoch: int) -> None:
        """Check that an incarnation of the job may write.

        Raises:
            SaveLostError: another incarnation has taken over.
        """
        if epoch != self.epoch:
            raise SaveLostError(
                f"this process belongs to incarnation {epoch} of the job; incarnation {self.epoch} has taken over"
            )

    # --- blobs --------------------------------------------------------------------------------------------------------

    def begin_blob(self, name: str, key: str, size: int, owner: int) -> Path:
        """Reserve memory for a blob of an object. Return its file.

        Raises:
            StorageFullError: it does not fit.
        """
        path = self.directory / "blobs" / check_blob_name(name)
        with self._changed:
            if name in self._blobs:
                raise ConditionFailedError(f"blob {name} exists already")
            if name in self._unfinished:
                self._discard(name)
            self._wait_for_room(size + _FILE_BYTES)
            if size < 0 or self._used + size + _FILE_BYTES > self.limit:
                raise self._full(key, size)
            if size > (free := self._free_bytes()):
                raise StorageFullError(
                    f"{key}: {size} bytes do not fit into {self.directory}: {free} bytes are free; {self._used} bytes "
                    "are used by memory servers"
                )
            file = OpenFile(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR)
            os.ftruncate(file.descriptor, size)
            self._unfinished[name] = _UnfinishedBlob(key, size, file, [None] * _blocks(size), owner)
            self._used += size + _FILE_BYTES
        return path

    def receive_piece(self, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield memory for each block of a piece, and write the block to the blob when the next one is asked for.

        Raises:
            StorageError: the blob is not being written, or has no such piece.
        """
        blob = self._unfinished_blob(name)
        if nbytes != _piece_bytes(blob, offset):
            raise StorageError(f"bytes {offset} to {offset + nbytes} are no piece of a blob of {blob.size} bytes")
        if not hasattr(self._buffers, "block"):
            self._buffers.block = memoryview(bytearray(BLOCK_BYTES))
        memory: memoryview = self._buffers.block

        def blocks() -> Iterator[memoryview]:
            for begin in range(0, nbytes, BLOCK_BYTES):
                block = memory[: min(BLOCK_BYTES, nbytes - begin)]
                yield block
                try:
                    write_at(blob.file.descriptor, offset + begin, block)
                except OSError as error:
                    blob.failure = error

        return blocks()

    def add_piece(self, name: str, offset: int, checksums: Sequence[int]) -> None:
        """Record the checksums of the blocks of a piece that `receive_piece` has written.

        Raises:
            StorageFullError: a block did not fit.
            StorageError: the blob is not being written.
        """
        blob = self._unfinished_blob(name)
        if blob.failure is not None:
            raise blob.failure
        blocks = _blocks(_piece_bytes(blob, offset))
        if len(checksums) != blocks:
            raise StorageError(f"a piece at {offset} of a blob of {blob.size} bytes has {len(checksums)} checksums")
        first = offset // BLOCK_BYTES
        with self._changed:
            blob.checksums[first : first + blocks] = checksums

    def _unfinished_blob(self, name: str) -> _UnfinishedBlob:
        with self._changed:
            blob = self._unfinished.get(name)
        if blob is None:
            raise StorageError(f"blob {name[:80]} is not being written; the save that began it was given up")
        return blob

    def finish_blob(self, name: str, checksums: Sequence[int] | None) -> None:
        """Make a blob visible.

        Args:
            name: the blob.
            checksums: the checksum of each block, if a process of this host has written the file; None if the pieces
                were sent.

        Raises:
            StorageError: pieces are missing.
        """
        with self._changed:
            if name in self._blobs:
                return  # a repeated request
            blob = self._unfinished_blob(name)
            stated = blob.checksums if checksums is None else checksums
            known = [checksum for checksum in stated if checksum is not None]
            if len(known) != _blocks(blob.size):
                raise StorageError(f"blob {name} lacks {_blocks(blob.size) - len(known)} of its blocks")
            path = self.directory / "blobs" / name
            described = {"size": blob.size, "key": blob.key, "checksums": known}
            write_file(path.with_suffix(".json"), json.dumps(described).encode())
            memory = mmap.mmap(blob.file.descriptor, blob.size, prot=mmap.PROT_READ) if blob.size else b""
            self._blobs[name] = Blob(memoryview(memory), blob.key, known)
            del self._unfinished[name]

    def abort_blobs(self, owner: int) -> None:
        """Remove the unfinished blobs of a connection that has ended."""
        with self._changed:
            for name in [name for name, blob in self._unfinished.items() if blob.owner == owner]:
                self._discard(name)

    def abort_blob(self, name: str) -> None:
        """Remove an unfinished blob. Does nothing if it does not exist."""
        with self._changed:
            if name in self._unfinished:
                self._discard(name)

    def _discard(self, name: str) -> None:
        blob = self._unfinished.pop(name)
        self._used -= blob.size + _FILE_BYTES
        unlink(self.directory / "blobs" / name)

    def blob(self, name: str) -> Blob:
        """Return a complete blob.

        Raises:
            ObjectNotFoundError: this host does not have it.
        """
        with self._changed:
            blob = self._blobs.get(name)
        if blob is None:
            raise ObjectNotFoundError(f"this host has no blob {name[:80]}")
        return blob

    def drop(self, names: Iterable[str]) -> None:
        """Remove blobs, and free their memory in the background. Missing ones are no error. Running reads can end."""
        checked = [check_blob_name(name) for name in names]
        removed: list[tuple[Blob, int]] = []
        with self._changed:
            for name in checked:
                if name in self._blobs:
                    path = self.directory / "blobs" / name
                    removed.append((self._blobs.pop(name), os.open(path, os.O_RDONLY)))
                    unlink(path.with_suffix(".json"), path)
            self._freeing += len(removed)
        if removed:  # the system takes 15 ms to free 128 MiB, and requests wait for this one
            threading.Thread(target=self._free, args=(removed,), name="ckptcore free memory", daemon=True).start()

    def _free(self, removed: list[tuple[Blob, int]]) -> None:
        while removed:
            blob, descriptor = removed.pop()
            nbytes = len(blob.memory) + _FILE_BYTES
            del blob  # unmaps the file, but its last user frees the memory: this descriptor, or a read
            os.close(descriptor)  # other threads run meanwhile, unlike while memory is unmapped
            with self._changed:
                self._used -= nbytes
                self._freeing -= 1
                self._changed.notify_all()

    def _wait_for_room(self, nbytes: int) -> None:
        """Wait for memory that is being freed, if bytes do not fit without it.

        Raises:
            SaveLostError: another incarnation of the job has taken over meanwhile.
        """
        epoch = self.epoch
        while self._freeing and (self._used + nbytes > self.limit or nbytes > self._free_bytes()):
            self._changed.wait()
            self.expect_epoch(epoch)

    def _full(self, key: str, size: int) -> StorageFullError:
        return StorageFullError(
            f"{key}: {size} bytes do not fit: {self._used} of {self.limit} bytes of this host are used. Increase "
            "memory_bytes= of PeerMemory, or keep fewer steps in memory"
        )

    def _free_bytes(self) -> int:
        """Return the free bytes of the memory file system."""
        stated = os.statvfs(self.directory)
        return stated.f_bavail * stated.f_frsize if stated.f_blocks else sys.maxsize  # no blocks: no limit

    def blobs(self) -> Mapping[str, str]:
        """Return the names of all complete blobs, with the keys of their objects."""
        with self._changed:
            return {name: blob.key for name, blob in self._blobs.items()}

    # --- entries ------------------------------------------------------------------------------------------------------

    def find(self, key: str) -> Entry:
        """Return the entry of an object.

        Raises:
            ObjectNotFoundError
        """
        entry = self._entries.get(key)
        if entry is None or entry.is_deleted:
            raise ObjectNotFoundError(f"there is no object {key[:200]!r} in the memory of the job")
        return entry

    def sizes(self, below: str) -> dict[str, int]:
        """Return the sizes of the objects whose keys begin with `below`, in bytes, in the order of the keys."""
        with self._changed:
            return {
                key: entry.size
                for key, entry in sorted(self._entries.items())
                if key.startswith(below) and not entry.is_deleted
            }

    def reserve(self, key: str, condition: str | None) -> tuple[int, Entry | None]:
        """Reserve the next version of a key, on the server that decides about conditions.

        Waits while another client has reserved a version of it.

        Args:
            key: the key.
            condition: the tag that the object must have; empty if it must not exist; None for any.

        Returns:
            The version, and the present entry.

        Raises:
            ConditionFailedError: the object does not match.
            SaveLostError: another incarnation of the job has taken over meanwhile.
        """
        with self._changed:
            epoch = self.epoch
            while (pending := self._pending.get(key)) is not None:
                left = pending.since + _PENDING_SECONDS - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
                self.expect_epoch(epoch)
            entry = self._entries.get(key)
            present = None if entry is None or entry.is_deleted else entry
            if condition == "" and present is not None:
                raise ConditionFailedError(f"cannot create the object {key!r}: it exists already")
            if condition and (present is None or str(present.version) != condition):
                tag = "no object" if present is None else f"tag {present.version}"
                raise ConditionFailedError(f"cannot replace {key!r}: expected tag {condition}, found {tag}")
            self._counter = max(self._counter + 1, (self.epoch << 64) + (self._starts << 40))
            version = max(self._counter, 1 if entry is None else entry.version + 1)
            self._counter = version
            self._pending[key] = _Pending(version)
            return version, present

    def cancel(self, key: str, version: int) -> None:
        """Release a reserved version that is not used."""
        with self._changed:
            pending = self._pending.get(key)
            if pending is not None and pending.version == version:
                del self._pending[key]
                self._changed.notify_all()

    def apply(self, key: str, entry: Entry, *, is_moved: bool = False) -> None:
        """Store a version of a key. A later version stays.

        Args:
            key: the key.
            entry: the version.
            is_moved: it was accepted by another member; the limit is not checked, so that a full job can start again.

        Raises:
            ConditionFailedError: a later version is stored already, or reserved because this one took too long.
            StorageFullError: it does not fit.
        """
        with self._changed:
            if not is_moved:
                self._wait_for_room(_entry_bytes(entry))
            present = self._entries.get(key)
            pending = self._pending.get(key)
            later = max(present.version if present is not None else 0, pending.version if pending is not None else 0)
            if later > entry.version:
                raise ConditionFailedError(f"a later version of the object {key!r} is stored already, or under way")
            more = _entry_bytes(entry) - (_entry_bytes(present) if present is not None else 0)
            if more > 0 and self._used + more > self.limit and not is_moved:
                raise self._full(key, entry.size)
            path = self._path_of(key)
            if entry.is_deleted:
                unlink(path)
                self._deleted.append((time.monotonic(), key, entry.version))
                self._forget_deleted()
            else:
                write_file(path, json.dumps([key, entry.encode()]).encode("ascii"))
            self._entries[key] = entry
            self._used += more
            if pending is not None:
                del self._pending[key]
                self._changed.notify_all()

    def _forget_deleted(self) -> None:
        """Forget deleted objects once no earlier write of the same key can arrive any more."""
        while self._deleted and self._deleted[0][0] < time.monotonic() - _DELETED_SECONDS:
            _, key, version = self._deleted.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.is_deleted and entry.version == version:
                del self._entries[key]

    def entries(self) -> Mapping[str, Entry]:
        """Return all entries by key, also of deleted objects."""
        with self._changed:
            return dict(self._entries)

    def merge(self, entries: Mapping[str, Entry]) -> None:
        """Store entries of other members that are newer than the present ones."""
        for key, entry in entries.items():
            present = self._entries.get(key)
            if present is None or present.version < entry.version:
                self.apply(key, entry, is_moved=True)

    def keep_entries(self, is_kept: Callable[[str], bool]) -> None:
        """Remove all entries but those whose keys are kept."""
        with self._changed:
            for key in [key for key in self._entries if not is_kept(key)]:
                self._used -= _entry_bytes(self._entries.pop(key))
                unlink(self._path_of(key))

    def _path_of(self, key: str) -> Path:
        return self.directory / "entries" / hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _piece_bytes(blob: _UnfinishedBlob, offset: int) -> int:
    """Return the size of the piece that begins at an offset.

    Raises:
        StorageError: none begins there.
    """
    if offset not in range(0, blob.size, PIECE_BYTES):
        raise StorageError(f"no piece of a blob of {blob.size} bytes begins at {offset}")
    return min(PIECE_BYTES, blob.size - offset)


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _entry_bytes(entry: Entry) -> int:
    return 0 if entry.is_deleted else _FILE_BYTES + len(entry.data or b"")
