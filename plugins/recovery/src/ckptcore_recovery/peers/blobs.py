"""Blobs: large objects in the memory of hosts, as copies or as fragments; their readers and writers."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np

from ckptcore.errors import (
    CheckpointError,
    ConditionFailedError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    StorageError,
)
from ckptcore.events import logger_named
from ckptcore.io.threads import IOThreads, map_ordered
from ckptcore.protocols import Buffer, IfAbsent, PutCondition
from ckptcore_recovery.peers.fragments import Fragments
from ckptcore_recovery.peers.host_memory import Entry
from ckptcore_recovery.peers.memory_files import Blob, OpenFile, write_at
from ckptcore_recovery.peers.messages import BLOCK_BYTES, PIECE_BYTES, PayloadError, blocks_of, checksums_of
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.views import Member

logger = logger_named("ckptcore.recovery")

_FETCHES: Final = 4
"""The number of pieces of a blob that are fetched at a time."""


def put_entry(session: Session, key: str, entry: Entry, condition: PutCondition | None) -> str:
    """Store an entry, and free the blob of the replaced one. Return its tag."""
    wanted = None if condition is None else "" if isinstance(condition, IfAbsent) else condition.tag or "no tag"
    version, present = session.replace(key, entry, wanted)
    if present is not None and present.blob:
        session.drop_blob(present)
    return str(version)


def withdraw(session: Session, key: str) -> bool:
    """Delete the entry that a failed put may have left on some members. Return False if it may still be there.

    That is so if a member does not answer, and if the first one shows an older object of this key.
    """
    try:
        session.replace(key, Entry(0, is_deleted=True), "")
    except CheckpointError as error:
        logger.debug("%s may be stored: %s", key, error)
        return False
    return True


def reader_of(session: Session, prefix: str, key: str, entry: Entry) -> BlobReader:
    """Open an object.

    Args:
        session: the session of this process.
        prefix, key: the key; errors have only the second part.
        entry: its entry.
    """
    return (BlobReader if entry.needed == 1 else FragmentReader)(session, prefix, key, entry)


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
            with self._session.reads.running():
                self.fill(offset, buffer)

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer. Unlike `get_into`, work in the background does not wait for it."""
        for begin in range(0, len(buffer), PIECE_BYTES):
            self._read(offset + begin, buffer[begin : begin + PIECE_BYTES])

    def _read(self, offset: int, buffer: memoryview) -> None:
        """Read at most a piece from the first copy that is good."""
        failures: list[str] = []
        for member in self._holders():
            if (failure := self._try(member, offset, buffer)) is None:
                return
            failures.append(failure)
        raise self._lost("none of its {} copies in memory can be read", failures, offset, offset + len(buffer))

    def _try(self, member: Member, offset: int, buffer: memoryview) -> str | None:
        """Read from the blob of one member. Return None, or why it failed. A member that failed is not tried again."""
        try:
            if self._read_from(member, offset, buffer):
                return None
            failure = "it has no such blob"
        except StorageError as error:
            failure = str(error)
        except CorruptCheckpointError as error:
            failure = f"its {self._blob_name} is corrupt: {error}"
        place = self._session.server(member).place
        logger.warning("%s: the %s on host %s is passed over: %s", self._key, self._blob_name, place, failure)
        self._avoided.add(member.id)
        return f"{place}: {failure}"

    _blob_name = "copy"

    def _lost(self, reason: str, failures: Sequence[str], start: int, stop: int) -> CorruptCheckpointError:
        """Return the error for an object that cannot be read.

        Raises:
            ObjectNotFoundError: it was replaced or deleted, so that its blobs were dropped.
        """
        self._expect_unchanged()
        return CorruptCheckpointError(
            f"the object {self._key!r} is lost: {reason.format(len(self._entry.holders))} "
            f"({'; '.join(failures) or 'no holder is left'}). Load another step, or the copy in storage",
            key=self._key,
            start=start,
            stop=stop,
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


class FragmentReader(BlobReader):
    """An object in fragments that is open for reading. Thread-safe."""

    _blob_name = "fragment"

    @cached_property
    def _fragments(self) -> Fragments:
        return Fragments(self._entry.size, self._entry.needed, len(self._entry.holders))

    def fill(self, offset: int, buffer: memoryview) -> None:
        """See `BlobReader.fill`."""
        for part in self._fragments.parts(offset, len(buffer)):
            name = self._entry.holders[part.place]
            member = self._session.view.by_id.get(name)
            if member is None or name in self._avoided or self._try(member, part.offset, buffer[part.of_range]):
                segment = self._fragments.decode(self._pieces(part.segment))
                buffer[part.of_range] = segment[part.of_segment]

    @property
    def fragment_bytes(self) -> int:
        """The size of each fragment in bytes."""
        return self._fragments.nbytes

    def rebuild(self, number: int, place: int) -> memoryview:
        """Return a piece of a fragment: from its holder, if that has left the job, or made from other fragments."""
        name = self._entry.holders[place]
        holder = self._session.view.by_id.get(name)
        piece = memoryview(bytearray(self._fragments.piece_bytes(number)))
        if holder is None or name in self._avoided or self._try(holder, number * PIECE_BYTES, piece):
            return memoryview(self._fragments.rebuild(self._pieces(number, without=place), place))
        return piece

    def _pieces(self, number: int, without: int | None = None) -> Sequence[bytes]:
        """Return the pieces of a segment: from the fragments of the data, and from others if some of them fail."""
        nbytes = self._fragments.piece_bytes(number)
        pieces: list[bytes] = []
        failures: list[str] = []
        for place, name in enumerate(self._entry.holders):
            member = self._session.view.by_id.get(name)
            if member is None or name in self._avoided or place == without:
                continue
            piece = bytearray(nbytes)
            if (failure := self._try(member, number * PIECE_BYTES, memoryview(piece))) is not None:
                failures.append(failure)
                continue
            pieces.append(bytes(piece))
            if len(pieces) == self._fragments.needed:
                return pieces
        of_object = self._fragments.segment(number)
        reason = f"{len(pieces)} of the {self._fragments.needed} fragments that it needs can be read, of {{}} in all"
        raise self._lost(reason, failures, of_object.start, of_object.stop)


class BlobWriter:
    """Writes an object into the memory of this host, and sends each piece to the other hosts at once. Thread-safe.

    An object in fragments is collected in the memory of this process, and sent when it is complete.
    """

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
        self._may_be_visible = False
        """True if some members may have the entry of this object."""
        self._holders = session.holders()
        session.reads.hurry()  # the load is over: while this step is saved, older ones get their copies
        self._fragments: Fragments | None = None
        nbytes = size
        if session.view.needed > 1:
            self._fragments = Fragments(size, session.view.needed, len(self._holders))
            nbytes = self._fragments.nbytes
        self._others = [member for member in self._holders if not session.is_local(member)]
        self._file: OpenFile | None = None
        """The blob in the memory of the server of this host; None if there is none, or in fragments."""
        self._memory = bytearray()
        try:
            for member in self._holders:
                path = session.begin_blob(member, self._name, key, nbytes)
                if self._fragments is None and session.is_local(member):
                    self._file = OpenFile(path)
        except BaseException:
            self.abort()
            raise
        if self._file is None:
            self._memory = bytearray(size)

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `ObjectWriter`."""
        stop = offset + len(data)
        if offset < 0 or stop > self._size:
            raise ValueError(f"cannot write bytes {offset} to {stop} of {self._key!r}: its size is {self._size} bytes")
        if self._is_finished:
            raise ValueError(f"{self._key!r} is complete or was aborted; nothing more can be written")
        view = memoryview(data)
        if (file := self._file) is not None:
            write_at(file.descriptor, offset, view)
        else:
            self._memory[offset:stop] = view
        if self._fragments is None and offset % PIECE_BYTES == 0 and (stop % PIECE_BYTES == 0 or stop == self._size):
            for begin in range(0, len(view), PIECE_BYTES):
                self._send_copies(offset + begin, view[begin : begin + PIECE_BYTES])
        with self._lock:
            self._written += len(data)

    def _send_copies(self, offset: int, piece: memoryview) -> None:
        """Send a piece to the other hosts. Several threads send several pieces, on connections of their own."""
        checksums = checksums_of(piece)
        for member in self._others:
            self._session.send_piece(member, self._name, offset, piece, checksums)
        self._checksums[offset] = checksums

    def finish(self) -> None:
        """See `ObjectWriter`."""
        self.complete()

    def complete(self) -> str:
        """Complete the copies or fragments, and make the object visible. Return its tag."""
        if self._is_finished:
            raise ValueError(f"{self._key!r} is complete or was aborted already")
        if self._written != self._size:
            raise StorageError(
                f"cannot complete {self._key!r}: expected {self._size} bytes, found {self._written} written"
            )
        if not self._is_sent:  # a retry after a condition failed sends nothing again
            self._complete_copies() if self._fragments is None else self._send_fragments(self._fragments)
            self._is_sent = True
        holders = tuple([member.id for member in self._holders])
        entry = Entry(0, self._size, None, self._name, holders, needed=self._session.view.needed)
        try:
            tag = put_entry(self._session, self._key, entry, self._condition)
        except ConditionFailedError:
            raise  # nothing was stored, or a later version was
        except BaseException:
            self._may_be_visible = True
            raise
        self._is_finished = True
        self._release()
        return tag

    def _complete_copies(self) -> None:
        offsets = range(0, self._size, PIECE_BYTES)
        for offset in offsets:
            if offset not in self._checksums:  # it was written in parts
                self._send_copies(offset, self._written_piece(offset))
        checksums = list(itertools.chain.from_iterable([self._checksums[offset] for offset in offsets]))
        for member in self._holders:
            is_local = self._session.is_local(member)
            self._session.finish_blob(member, self._name, checksums if is_local else None)

    def _written_piece(self, offset: int) -> memoryview:
        nbytes = min(PIECE_BYTES, self._size - offset)
        if self._file is None:
            return memoryview(self._memory)[offset : offset + nbytes]
        piece = os.pread(self._file.descriptor, nbytes, offset)
        if len(piece) != nbytes:
            raise StorageError(f"the memory of {self._key!r} was truncated: found {len(piece)} of {nbytes} bytes")
        return memoryview(piece)

    def _send_fragments(self, fragments: Fragments) -> None:
        memory = memoryview(self._memory)
        for number in fragments.segments:
            pieces = fragments.encode(memory[fragments.segment(number)])
            for member, encoded in zip(self._holders, pieces, strict=True):
                piece = memoryview(encoded)
                self._session.send_piece(member, self._name, number * PIECE_BYTES, piece, checksums_of(piece))
        for member in self._holders:
            self._session.finish_blob(member, self._name)

    def abort(self) -> None:
        """See `ObjectWriter`."""
        if not self._is_finished:
            self._is_finished = True
            self._release()
            if self._may_be_visible and not withdraw(self._session, self._key):
                return  # the next start of the job frees the blobs, unless their entry is the latest
            for member in self._holders:
                self._session.try_to_call(member, {"op": "abort", "blob": self._name})
            holders = tuple([member.id for member in self._holders])
            self._session.drop_blob(Entry(0, blob=self._name, holders=holders))

    def _release(self) -> None:
        self._memory = bytearray()
        self._file = None


def fetch_blob(session: Session, key: str, entry: Entry, place: int) -> None:
    """Make a copy or a fragment of an object of other hosts in the memory of this host.

    Args:
        session: the session of this process.
        key: the key of the object.
        entry: its entry.
        place: the place of the fragment among the holders.

    Raises:
        StorageFullError: it does not fit.
        CorruptCheckpointError: the other hosts do not have the object.
        StorageError: the server of this host failed, or the session was closed.
    """
    assert session.local is not None
    member = session.view.by_id[session.local.id]
    reader = reader_of(session, "", key, entry)
    nbytes = reader.fragment_bytes if isinstance(reader, FragmentReader) else entry.size

    def fetch(offset: int) -> list[int]:
        if not session.reads.wait_for_end():
            raise StorageError("this process closed the memory of the job")
        if isinstance(reader, FragmentReader):
            piece = reader.rebuild(offset // PIECE_BYTES, place)
        else:
            piece = memoryview(bytearray(min(PIECE_BYTES, nbytes - offset)))
            reader.fill(offset, piece)
        write_at(file.descriptor, offset, piece)
        return checksums_of(piece)

    path = session.begin_blob(member, entry.blob, key, nbytes)
    try:
        file = OpenFile(path)
        checksums = map_ordered(IOThreads(_FETCHES), range(0, nbytes, PIECE_BYTES), fetch)
        session.finish_blob(member, entry.blob, list(itertools.chain.from_iterable(checksums)))
    except BaseException:
        session.try_to_call(member, {"op": "abort", "blob": entry.blob})
        raise


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
