"""Blobs: large objects in the memory of hosts, as copies or as fragments; their readers and writers."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

import numpy as np
import xxhash

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from ckptcore.events import logger_named
from ckptcore.protocols import Buffer, IfAbsent, PutCondition
from ckptcore_recovery.peers.fragments import Fragments
from ckptcore_recovery.peers.host_memory import Blob, Entry
from ckptcore_recovery.peers.messages import PIECE_BYTES
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.views import Member

logger = logger_named("ckptcore.recovery")


def put_entry(session: Session, key: str, entry: Entry, condition: PutCondition | None) -> str:
    """Store an entry, and free the blob of the replaced one. Return its tag."""
    wanted = None if condition is None else "" if isinstance(condition, IfAbsent) else condition.tag or "no tag"
    version, present = session.replace(key, entry, wanted)
    if present is not None and present.blob:
        session.drop_blob(present)
    return str(version)


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
            self._fill(offset, buffer)

    def _fill(self, offset: int, buffer: memoryview) -> None:
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
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(self._local.read(offset, len(buffer)), np.uint8))
            return True
        self._session.pace.wait(len(buffer))
        request = {"op": "read", "blob": self._entry.blob, "offset": offset, "nbytes": len(buffer)}

        def place(header: object, nbytes: int) -> memoryview:
            return buffer if nbytes == len(buffer) else memoryview(bytearray(nbytes))

        try:
            answer, data = self._session.server(member).call(request, place=place)
        except ObjectNotFoundError:
            return False
        if "corrupt" in answer:
            raise CorruptCheckpointError(str(answer["corrupt"]))
        return len(data) == len(buffer)


class FragmentReader(BlobReader):
    """An object in fragments that is open for reading. Thread-safe."""

    _blob_name = "fragment"

    @cached_property
    def _fragments(self) -> Fragments:
        return Fragments(self._entry.size, self._entry.needed, len(self._entry.holders))

    def _fill(self, offset: int, buffer: memoryview) -> None:
        for part in self._fragments.parts(offset, len(buffer)):
            name = self._entry.holders[part.place]
            member = self._session.view.by_id.get(name)
            if member is None or name in self._avoided or self._try(member, part.offset, buffer[part.of_range]):
                segment = self._fragments.decode(self._pieces(part.segment))
                buffer[part.of_range] = segment[part.of_segment]

    def rebuild(self, place: int, memory: memoryview) -> None:
        """Fill the memory of a fragment: from its holder, if that has left the job, or from other fragments."""
        name = self._entry.holders[place]
        holder = self._session.view.by_id.get(name)
        for number in self._fragments.segments:
            begin = number * PIECE_BYTES
            piece = memory[begin : begin + self._fragments.piece_bytes(number)]
            if holder is None or name in self._avoided or self._try(holder, begin, piece):
                piece[:] = self._fragments.rebuild(self._pieces(number, without=place), place)

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
    """Collects an object in memory, and sends its copies or fragments when it is complete. Thread-safe.

    The memory of a copy is that of the server of this host.
    """

    def __init__(self, session: Session, key: str, size: int, condition: PutCondition | None) -> None:
        self._session = session
        self._key = key
        self._size = size
        self._condition = condition
        self._name = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._written = 0
        self._is_finished = False
        self._is_sent = False
        self._holders = session.holders()
        self._needed = session.view.needed
        self._is_shared = self._needed == 1 and session.is_local(self._holders[0])
        self._memory = (
            begin_local_blob(session, self._name, key, size) if self._is_shared else memoryview(bytearray(size))
        )

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `ObjectWriter`."""
        stop = offset + len(data)
        if offset < 0 or stop > self._size:
            raise ValueError(f"cannot write bytes {offset} to {stop} of {self._key!r}: its size is {self._size} bytes")
        if self._is_finished:
            raise ValueError(f"{self._key!r} is complete or was aborted; nothing more can be written")
        if len(data):
            np.copyto(np.frombuffer(self._memory, np.uint8)[offset:stop], np.frombuffer(data, np.uint8))
        with self._lock:
            self._written += len(data)

    def finish(self) -> None:
        """See `ObjectWriter`."""
        self.complete()

    def complete(self) -> str:
        """Send the copies, and make the object visible. Return its tag."""
        if self._is_finished:
            raise ValueError(f"{self._key!r} is complete or was aborted already")
        if self._written != self._size:
            raise StorageError(
                f"cannot complete {self._key!r}: expected {self._size} bytes, found {self._written} written"
            )
        if not self._is_sent:  # a retry after a condition failed sends nothing again
            self._send()
            self._is_sent = True
        holders = tuple([member.id for member in self._holders])
        entry = Entry(0, self._size, None, self._name, holders, needed=self._needed)
        tag = put_entry(self._session, self._key, entry, self._condition)
        self._is_finished = True
        self._memory = memoryview(b"")
        return tag

    def _send(self) -> None:
        session, memory = self._session, self._memory
        if self._needed > 1:
            self._send_fragments()
            return
        for member in self._holders:
            if self._is_shared and session.is_local(member):
                finish_local_blob(session, self._name, memory)
            else:
                with session.sending(member, self._name, self._key, len(memory)) as send:
                    for offset in range(0, len(memory), PIECE_BYTES):
                        send(offset, memory[offset : offset + PIECE_BYTES])

    def _send_fragments(self) -> None:
        fragments = Fragments(self._size, self._needed, len(self._holders))
        with ExitStack() as stack:
            sends = [
                stack.enter_context(self._session.sending(member, self._name, self._key, fragments.nbytes))
                for member in self._holders
            ]
            for number in fragments.segments:
                pieces = fragments.encode(self._memory[fragments.segment(number)])
                for send, piece in zip(sends, pieces, strict=True):
                    send(number * PIECE_BYTES, memoryview(piece))

    def abort(self) -> None:
        """See `ObjectWriter`."""
        if not self._is_finished:
            self._is_finished = True
            self._memory = memoryview(b"")
            for member in self._holders:
                self._session.try_to_call(member, {"op": "abort", "blob": self._name})
            holders = tuple([member.id for member in self._holders])
            self._session.drop_blob(Entry(0, blob=self._name, holders=holders))


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
        StorageError: the server of this host failed.
    """
    reader = reader_of(session, "", key, entry)
    if isinstance(reader, FragmentReader):
        nbytes = Fragments(entry.size, entry.needed, len(entry.holders)).nbytes
        memory = begin_local_blob(session, entry.blob, key, nbytes)
        reader.rebuild(place, memory)
    else:
        memory = begin_local_blob(session, entry.blob, key, entry.size)
        reader.get_into([(0, memory)])
    finish_local_blob(session, entry.blob, memory)


def begin_local_blob(session: Session, name: str, key: str, size: int) -> memoryview:
    """Reserve a blob in the memory of the server of this host. Return the memory.

    Raises:
        StorageFullError: it does not fit.
        StorageError: the server failed.
    """
    request = {"op": "begin", "epoch": session.view.epoch, "blob": name, "key": key, "size": size}
    answer, _ = session.local_server().call(request)
    with open(answer["path"], "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), size)) if size else memoryview(b"")


def finish_local_blob(session: Session, name: str, memory: memoryview) -> None:
    """Make a blob in the memory of the server of this host visible."""
    epoch = session.view.epoch
    session.local_server().call({"op": "finish", "epoch": epoch, "blob": name, "checksums": checksums_of(memory)})


def checksums_of(memory: memoryview) -> list[int]:
    """Return the checksum of each piece of a blob."""
    pieces = range(0, len(memory), PIECE_BYTES)
    return [xxhash.xxh3_64_intdigest(memory[offset : offset + PIECE_BYTES]) for offset in pieces]
