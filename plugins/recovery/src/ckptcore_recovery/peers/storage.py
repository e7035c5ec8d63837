"""PeerStorage: the memory of a job's hosts as a storage. Objects survive the loss of hosts, up to the number of copies.

Small objects, such as the roots of checkpoints, are entries on a few members of the job's memory. Large ones are blobs
in the memory of the host that writes them, with copies on other hosts; their entries name the hosts.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import unquote

import numpy as np

from ckptcore.errors import (
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
)
from ckptcore.events import logger_named
from ckptcore.model.metadata import check_directory_key, check_key
from ckptcore.protocols import (
    IF_ABSENT,
    Buffer,
    IfAbsent,
    ObjectWriter,
    PutCondition,
    RangeReader,
    StorageBackend,
    StorageCapabilities,
    StorageOptions,
)
from ckptcore_recovery.peers.host_memory import Blob, Entry, write_at
from ckptcore_recovery.peers.messages import BLOCK_BYTES, PIECE_BYTES, PayloadError, blocks_of, checksums_of
from ckptcore_recovery.peers.session import INLINE_BYTES, Session, session_of
from ckptcore_recovery.peers.views import Member

logger = logger_named("ckptcore.recovery")

SCHEME: Final = "peers"

_FETCHES: Final = 4
"""The number of pieces of a blob that are fetched at a time."""


def open_storage(url: str, options: StorageOptions) -> PeerStorage:
    """Open ``peers://JOB`` or ``peers://JOB/DIRECTORY``. Makes no request.

    Raises:
        InvalidLocationError
    """
    job, _, directory = url.partition("://")[2].partition("/")
    if not job:
        raise InvalidLocationError(f"the URL {url!r} has no name of a job; expected {SCHEME}://job/directory")
    directory = check_directory_key(unquote(directory, errors="surrogateescape"))
    return PeerStorage(job, directory + "/" if directory else "")


class PeerStorage(StorageBackend):
    """The objects below a prefix in the memory of a job. Thread-safe."""

    capabilities = StorageCapabilities(request_bytes=PIECE_BYTES, concurrency=8, part_bytes=PIECE_BYTES)

    def __init__(self, job: str, prefix: str, session: Session | None = None) -> None:
        """Open a directory.

        Args:
            job: the name of the job.
            prefix: the prefix of all keys.
            session: the session to use; None: that of this process.
        """
        self._job = job
        self._prefix = prefix
        self._given = session

    def __repr__(self) -> str:
        return f"PeerStorage({SCHEME}://{self._job}/{self._prefix})"

    @property
    def _session(self) -> Session:
        if self._given is None:
            self._given = session_of(self._job)
        return self._given

    def _below(self, prefix: str) -> str:
        directory = check_directory_key(prefix)
        return self._prefix + (directory + "/" if directory else "")

    def _find(self, key: str) -> Entry:
        return self._session.find(self._prefix + check_key(key))

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`."""
        return self._read(key, start, stop)[0]

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`."""
        return self._read(key, 0, None)

    def _read(self, key: str, start: int, stop: int | None) -> tuple[bytes, str]:
        """Return bytes of an object, and its tag."""
        while True:
            entry = self._find(key)
            if entry.data is not None:
                return entry.data[start:stop], str(entry.version)
            first = min(start, entry.size)
            data = bytearray((entry.size if stop is None else max(first, min(stop, entry.size))) - first)
            try:
                BlobReader(self._session, self._prefix, key, entry).get_into([(first, memoryview(data))])
            except ObjectNotFoundError:
                continue  # it was replaced; if it was deleted, `_find` raises
            return bytes(data), str(entry.version)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`."""
        self.open_reader(key).get_into(ranges)

    def open_reader(self, key: str) -> RangeReader:
        """See `StorageBackend`. Reads stay on this object even if another one replaces it."""
        return BlobReader(self._session, self._prefix, key, self._find(key))

    def size(self, key: str) -> int:
        """See `StorageBackend`."""
        return self._find(key).size

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        if len(data) > INLINE_BYTES:
            writer = _BlobWriter(self._session, self._prefix + check_key(key), len(data), condition)
            try:
                writer.write_at(0, data)
                return writer.complete()
            except BaseException:
                writer.abort()
                raise
        return _replace(self._session, self._prefix + check_key(key), Entry(0, len(data), bytes(data)), condition)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return self._writer(key, size, None)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return self._writer(key, size, IF_ABSENT)

    def _writer(self, key: str, size: int | None, condition: PutCondition | None) -> ObjectWriter:
        whole = self._prefix + check_key(key)
        if size is None:
            return _WriterOfUnknownSize(self._session, whole, condition)
        return _BlobWriter(self._session, whole, size, condition)

    def sync(self, keys: Sequence[str]) -> None:
        """Check that the objects exist. Memory is not durable; copies protect it."""
        for key in keys:
            self._find(key)

    # --- names --------------------------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`."""
        start = len(self._prefix)
        return iter([key[start:] for key in self._session.keys(self._below(prefix))])

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`."""
        below = self._below(prefix)
        names = set()
        for key in self._session.keys(below):
            name, slash, _ = key[len(below) :].partition("/")
            names.add(name + slash)
        return sorted(names)

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        for key in [self._prefix + check_key(key) for key in keys]:
            try:
                self._session.find(key)
            except ObjectNotFoundError:
                continue
            _, present = self._session.replace(key, Entry(0, is_deleted=True), None)
            if present is not None and present.blob:
                self._session.drop_blob(present)


def write_local_blob(session: Session, name: str, size: int, source: BlobReader) -> None:
    """Copy a blob of another host into the memory of this host.

    Raises:
        StorageFullError: it does not fit.
        CorruptCheckpointError: no host has a good copy.
        StorageError: the server of this host failed.
    """
    assert session.local is not None
    member = session.view.by_id[session.local.id]
    path = session.begin_blob(member, name, size)
    with open(path, "r+b", buffering=0) as file:

        def fetch(offset: int) -> list[int]:
            piece = memoryview(bytearray(min(PIECE_BYTES, size - offset)))
            source.get_into([(offset, piece)])
            write_at(file.fileno(), offset, piece)
            return checksums_of(piece)

        with ThreadPoolExecutor(_FETCHES) as threads:
            checksums = list(itertools.chain.from_iterable(threads.map(fetch, range(0, size, PIECE_BYTES))))
    session.finish_blob(member, name, checksums)


def _read_local(blob: Blob, offset: int, buffer: memoryview) -> None:
    """Copy bytes of a blob of this host, and verify the copy, which is in the cache of the processor."""
    if blob.checksums(offset, len(buffer)) is None:
        _copy(buffer, blob.read(offset, len(buffer)))
        return
    for begin in range(0, len(buffer), BLOCK_BYTES):
        block = buffer[begin : begin + BLOCK_BYTES]
        _copy(block, blob.memory[offset + begin : offset + begin + len(block)])
        blob.verify((offset + begin) // BLOCK_BYTES, block)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes, without the lock of the interpreter."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _replace(session: Session, key: str, entry: Entry, condition: PutCondition | None) -> str:
    """Store an entry, and free the blob of the replaced one. Return its tag."""
    wanted = None if condition is None else "" if isinstance(condition, IfAbsent) else condition.tag or "no tag"
    version, present = session.replace(key, entry, wanted)
    if present is not None and present.blob:
        session.drop_blob(present)
    return str(version)


class BlobReader:
    """An object that is open for reading. Tries the host's own copy first, then the others. Thread-safe."""

    def __init__(self, session: Session, prefix: str, key: str, entry: Entry) -> None:
        self._session = session
        self._key = key
        self._whole_key = prefix + key
        self._entry = entry
        self._avoided: set[str] = set()
        """The ids of holders that failed."""
        self._local: Blob | None = None
        """The copy on this host, which stays readable if the object is replaced."""
        if session.local is not None and session.local.id in entry.holders:
            self._local = session.local_blob(entry.blob)

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset."""
        for offset, buffer in ranges:
            if offset + len(buffer) > self._entry.size:
                raise CorruptCheckpointError(
                    f"the object {self._key!r} is too short: expected bytes {offset} to {offset + len(buffer)}, found "
                    f"{self._entry.size} bytes in all. Load another checkpoint",
                    key=self._key,
                    start=min(offset, self._entry.size),
                    stop=offset + len(buffer),
                )
            if self._entry.data is not None:
                buffer[:] = self._entry.data[offset : offset + len(buffer)]
                continue
            for begin in range(0, len(buffer), PIECE_BYTES):
                self._read(offset + begin, buffer[begin : begin + PIECE_BYTES])

    def _read(self, offset: int, buffer: memoryview) -> None:
        failures: list[str] = []
        for member in self._holders():
            try:
                if self._read_from(member, offset, buffer):
                    return
                failure = "it has no such blob"
            except StorageError as error:
                failure = str(error)
            except CorruptCheckpointError as error:
                failure = f"its copy is corrupt: {error}"
            place = self._session.server(member).place
            logger.warning("%s: the copy on host %s is passed over: %s", self._key, place, failure)
            self._avoided.add(member.id)
            failures.append(f"{place}: {failure}")
        self._expect_unchanged()
        raise CorruptCheckpointError(
            f"the object {self._key!r} is lost: none of its {len(self._entry.holders)} copies in memory can be read "
            f"({'; '.join(failures) or 'no holder is left'}). Load another step, or the copy in storage",
            key=self._key,
            start=offset,
            stop=offset + len(buffer),
        )

    def _expect_unchanged(self) -> None:
        """Raise ObjectNotFoundError if the object was replaced or deleted, so that its blob was dropped."""
        if self._session.find(self._whole_key).version != self._entry.version:
            raise ObjectNotFoundError(f"the object {self._key!r} was replaced while it was read")

    def _holders(self) -> Sequence[Member]:
        """Return the members that have the blob, the best first. Processes begin with different ones of other hosts."""
        by_id = self._session.view.by_id
        members = [by_id[name] for name in self._entry.holders if name in by_id and name not in self._avoided]
        turn = os.getpid() % max(len(members), 1)
        members = [*members[turn:], *members[:turn]]
        return sorted(members, key=lambda member: not self._session.is_local(member))

    def _read_from(self, member: Member, offset: int, buffer: memoryview) -> bool:
        """Read from one member. Return False if it does not have the blob."""
        if self._local is not None and self._session.is_local(member):
            _read_local(self._local, offset, buffer)
            return True
        self._session.pace.wait(len(buffer))
        request = {"op": "read", "blob": self._entry.blob, "offset": offset, "nbytes": len(buffer)}

        placed = False

        def place(header: object, nbytes: int) -> list[memoryview] | None:
            nonlocal placed
            placed = nbytes == len(buffer)
            return blocks_of(buffer) if placed else None

        try:
            answer, _ = self._session.server(member).call(request, place=place)
        except ObjectNotFoundError:
            return False
        except PayloadError as error:
            raise CorruptCheckpointError(str(error)) from error
        if "corrupt" in answer:
            raise CorruptCheckpointError(str(answer["corrupt"]))
        return placed


class _BlobWriter:
    """Writes a blob into the memory of this host, and sends each piece to the other hosts at once. Thread-safe."""

    def __init__(self, session: Session, key: str, size: int, condition: PutCondition | None) -> None:
        self._session = session
        self._key = key
        self._size = size
        self._condition = condition
        self._name = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._written = 0
        self._checksums: dict[int, list[int]] = {}
        """The checksums of the pieces that were written whole, and sent, by offset."""
        self._is_finished = False
        self._is_sent = False
        self._holders = session.holders()
        self._others = [member for member in self._holders if not session.is_local(member)]
        self._descriptor: int | None = None
        self._memory = bytearray()
        try:
            for member in self._holders:
                path = session.begin_blob(member, self._name, size)
                if session.is_local(member):  # the memory of the server of this host
                    self._descriptor = os.open(path, os.O_RDWR)
                    self._close = weakref.finalize(self, os.close, self._descriptor)
        except BaseException:
            self.abort()
            raise
        if self._descriptor is None:
            self._memory = bytearray(size)

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `ObjectWriter`."""
        stop = offset + len(data)
        if offset < 0 or stop > self._size:
            raise ValueError(f"cannot write bytes {offset} to {stop} of {self._key!r}: its size is {self._size} bytes")
        if self._is_finished:
            raise ValueError(f"{self._key!r} is complete or was aborted; nothing more can be written")
        view = memoryview(data)
        if self._descriptor is None:
            self._memory[offset:stop] = view
        else:
            write_at(self._descriptor, offset, view)
        if offset % PIECE_BYTES == 0 and (stop % PIECE_BYTES == 0 or stop == self._size):
            for begin in range(0, len(view), PIECE_BYTES):
                self._send(offset + begin, view[begin : begin + PIECE_BYTES])
        with self._lock:
            self._written += len(data)

    def _send(self, offset: int, piece: memoryview) -> None:
        """Send a piece to the other hosts. Several threads send several pieces, on connections of their own."""
        checksums = checksums_of(piece)
        for member in self._others:
            self._session.send_piece(member, self._name, offset, piece, checksums)
        self._checksums[offset] = checksums

    def finish(self) -> None:
        """See `ObjectWriter`."""
        self.complete()

    def complete(self) -> str:
        """Complete the copies, and make the object visible. Return its tag."""
        if self._is_finished:
            raise ValueError(f"{self._key!r} is complete or was aborted already")
        if self._written != self._size:
            raise StorageError(
                f"cannot complete {self._key!r}: expected {self._size} bytes, found {self._written} written"
            )
        if not self._is_sent:  # a retry after a condition failed sends nothing again
            self._complete_copies()
            self._is_sent = True
        entry = Entry(0, self._size, None, self._name, tuple([member.id for member in self._holders]))
        tag = _replace(self._session, self._key, entry, self._condition)
        self._is_finished = True
        self._release()
        return tag

    def _complete_copies(self) -> None:
        offsets = range(0, self._size, PIECE_BYTES)
        for offset in offsets:
            if offset not in self._checksums:  # it was written in parts
                self._send(offset, self._written_piece(offset))
        checksums = list(itertools.chain.from_iterable([self._checksums[offset] for offset in offsets]))
        for member in self._holders:
            is_local = self._session.is_local(member)
            self._session.finish_blob(member, self._name, checksums if is_local else None)

    def _written_piece(self, offset: int) -> memoryview:
        nbytes = min(PIECE_BYTES, self._size - offset)
        if self._descriptor is None:
            return memoryview(self._memory)[offset : offset + nbytes]
        piece = os.pread(self._descriptor, nbytes, offset)
        if len(piece) != nbytes:
            raise StorageError(f"the memory of {self._key!r} was truncated: found {len(piece)} of {nbytes} bytes")
        return memoryview(piece)

    def abort(self) -> None:
        """See `ObjectWriter`."""
        if not self._is_finished:
            self._is_finished = True
            self._release()
            for member in self._holders:
                self._session.try_to_call(member, {"op": "abort", "blob": self._name})
            holders = tuple([member.id for member in self._holders])
            self._session.drop_blob(Entry(0, blob=self._name, holders=holders))

    def _release(self) -> None:
        self._memory = bytearray()
        if self._descriptor is not None:
            self._close()


class _WriterOfUnknownSize:
    """Collects the pieces of an object whose size is unknown until it is complete. Thread-safe."""

    def __init__(self, session: Session, key: str, condition: PutCondition | None) -> None:
        self._session = session
        self._key = key
        self._condition = condition
        self._pieces: dict[int, bytes] | None = {}

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `ObjectWriter`."""
        if self._pieces is None:
            raise ValueError(f"{self._key!r} is complete or was aborted; nothing more can be written")
        if offset < 0:
            raise ValueError(f"cannot write at {offset} of {self._key!r}")
        if len(data):
            self._pieces[offset] = bytes(data)

    def finish(self) -> None:
        """See `ObjectWriter`."""
        if self._pieces is None:
            raise ValueError(f"{self._key!r} is complete or was aborted already")
        size = max((offset + len(piece) for offset, piece in self._pieces.items()), default=0)
        writer = _BlobWriter(self._session, self._key, size, self._condition)
        try:
            for offset, piece in self._pieces.items():
                writer.write_at(offset, piece)
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        self._pieces = None

    def abort(self) -> None:
        """See `ObjectWriter`."""
        self._pieces = None
