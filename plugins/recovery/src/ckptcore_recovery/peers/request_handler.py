"""RequestHandler: answers the requests of processes and of other servers for the memory of one host."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, SaveLostError, StorageError
from ckptcore_recovery.peers.connections import Pace
from ckptcore_recovery.peers.host_memory import Entry, HostMemory
from ckptcore_recovery.peers.memory_files import write_file
from ckptcore_recovery.peers.messages import PIECE_BYTES, Header, error_header, raise_error
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.spreading import PAGE_BYTES, Part, Reached, delete_each, page_of, pass_on
from ckptcore_recovery.peers.starting import LocalServer
from ckptcore_recovery.peers.views import INTERNAL_DIRECTORY, View, is_internal

if TYPE_CHECKING:
    from ckptcore.model.tree import JSON

OWNER: Final = f"{INTERNAL_DIRECTORY}/owner"
"""`ckptcore.commit.locks.OWNER`."""

Answer: TypeAlias = tuple[Header, memoryview | bytes]
"""The header and the payload of an answer."""

_NO_PAYLOAD: Final = b""


class RequestHandler:
    """Answers requests. Thread-safe.

    Attributes:
        memory: the memory.
        member_id: identifies this memory. Another memory on the same host has another id.
        token: the secret of the job.
    """

    def __init__(self, memory: HostMemory, member_id: str, token: bytes, listen_on: Callable[[str], int]) -> None:
        """Answer requests for a memory.

        Args:
            memory: the memory.
            member_id: its id.
            token: the secret of the job.
            listen_on: makes the server listen on another address of this host. Returns the port.
        """
        self.memory = memory
        self.member_id = member_id
        self.token = token
        self._listen_on = listen_on
        self._view = _read_view(memory.directory / "view")
        """The view of the last incarnation whose entries are here; None if there is none."""
        self._next = _read_view(memory.directory / "next")
        """The view of the incarnation that is starting; None if there is none."""
        self._acting: int | None = None
        """The rank that acts for this host while its incarnation starts."""
        self._lock = threading.Lock()
        self._is_ending = False
        self._others: Session | None = None
        """The last session with the other members, whose connections are kept while a job starts or is used."""

    @property
    def is_ending(self) -> bool:
        """True if the job has ended, and has not started again."""
        return self._is_ending

    def close_idle(self) -> None:
        """Close the idle connections to the other members."""
        others = self._others  # `fence` clears it at any time
        if others is not None:
            others.close_idle()

    def answer(self, number: int, header: Header, payload: memoryview) -> Answer:
        """Return the answer to a request.

        Args:
            number: identifies the connection.
            header, payload: the request.
        """
        try:
            operation = _OPERATIONS.get(str(header.get("op")))
            if operation is None:
                raise StorageError(f"unknown request {str(header.get('op'))[:80]!r}")
            if operation in _ACTS:
                self.memory.expect_epoch(_integer(header, "epoch"))
            is_write = operation in _WRITES
            with self.memory.writing(_integer(header, "epoch")) if is_write else contextlib.nullcontext():
                return operation(self, {**header, "connection": number}, payload)
        except Exception as error:  # noqa: BLE001  # a request may have anything; the peer raises the error
            return error_header(error), _NO_PAYLOAD

    def place(self, header: Header, nbytes: int) -> Iterator[memoryview] | None:
        """Write pieces to their blob while they arrive."""
        if header.get("op") == "piece" and header.get("epoch") == self.memory.epoch:
            try:
                return self.memory.receive_piece(str(header["blob"]), _integer(header, "offset"), nbytes)
            except (StorageError, KeyError, TypeError):
                pass  # received elsewhere, and refused
        return None

    def status(self, header: Header, payload: memoryview) -> Answer:
        """Return the id, the incarnation, that of the view, the run, the process, and the used memory.

        The run is empty if another one may use this memory.
        """
        memory = self.memory
        stated: dict[str, JSON] = {
            "id": self.member_id,
            "epoch": memory.epoch,
            "view": 0 if self._view is None else self._view.epoch,
            "next": 0 if self._next is None else self._next.epoch,
            "run": "" if self._is_free() else _text_of(memory.directory / "run"),
            "pid": os.getpid(),
            "used": memory.used,
            "limit": memory.limit,
        }
        return stated, _NO_PAYLOAD

    def _is_free(self) -> bool:
        """Return True if the job has ended without steps: none is here, and no other member may have some."""
        if not self._is_ending or (self._view is not None and len(self._view.members) > 1):
            return False
        return all(entry.is_deleted or is_internal(key) for key, entry in self.memory.entries().items())

    def listen(self, header: Header, payload: memoryview) -> Answer:
        """Listen on another address of this host, too: the job starts with another `interface`. Return the port."""
        return {"port": self._listen_on(str(header["interface"]))}, _NO_PAYLOAD

    def fence(self, header: Header, payload: memoryview) -> Answer:
        """Refuse later writes of earlier incarnations. Return True to the rank that acts for this host: the first.

        The server keeps its entries if it has the newest view, and takes the token of that view, the limit of the job's
        memory, and the run.
        """
        epoch, before, rank = _integer(header, "epoch"), _integer(header, "before"), _integer(header, "rank")
        token = bytes.fromhex(header["token"]) if "token" in header else self.token
        with self._lock:
            if epoch != self.memory.epoch or self._acting is None:
                self.memory.fence(epoch)
                self.memory.limit = _integer(header, "limit") if "limit" in header else self.memory.limit
                self._acting = rank
                write_file(self.memory.directory / "token", token)
                if header.get("run"):
                    write_file(self.memory.directory / "run", str(header["run"]).encode("utf-8", "surrogatepass"))
                self.token, self._is_ending, self._others = token, False, None
                self._take(before)
            return {"acts": self._acting == rank}, _NO_PAYLOAD

    def _take(self, before: int) -> None:
        """Keep what belongs to the newest view, of the incarnation `before`."""
        if self._next is not None and self._next.epoch == before:
            self._install()  # another server did so, and the job was killed before this one did
        self._next = None
        (self.memory.directory / "next").unlink(missing_ok=True)
        if self._view is None or self._view.epoch != before:
            self._view = None
            (self.memory.directory / "view").unlink(missing_ok=True)
            self.memory.keep_entries(lambda key: False)

    def prepare(self, header: Header, payload: memoryview) -> Answer:
        """Store the view of the incarnation that is starting. Entries belong to the earlier one until `install`."""
        self._next = View.decode(bytes(payload))
        write_file(self.memory.directory / "next", bytes(payload))
        return {}, Reached().encode()

    def hand_over(self, header: Header, payload: memoryview) -> Answer:
        """Send the entries of the earlier view to the members that hold them in the next one. Return the next view.

        The payload is the next view, for a server that left the job, and gets none.
        """
        view = View.decode(bytes(payload)) if len(payload) else self._expect(self._next)
        shares: dict[str, dict[str, Entry]] = {}
        for key, entry in self.memory.entries().items():
            if self._view is None or self.member_id not in self._view.home(key) or _is_lease_of_owner(key):
                continue
            for name in view.home(key):
                if name != self.member_id:
                    shares.setdefault(name, {})[key] = entry
        for name, entries in shares.items():
            for page in _pages_of(entries):
                self._session(view).server(view.by_id[name]).call({"op": "load", "epoch": view.epoch}, page)
        return ({}, _NO_PAYLOAD) if len(payload) else self.view({"next": True}, payload)

    def load(self, header: Header, payload: memoryview) -> Answer:
        """Store entries that another server handed over."""
        self.memory.merge({str(key): Entry.decode(encoded) for key, encoded in json.loads(bytes(payload))})
        return {}, _NO_PAYLOAD

    def install(self, header: Header, payload: memoryview) -> Answer:
        """Use the next view. All its members have their entries. Return the first page of `decided`.

        Removes the entries that belong to others, and the blobs that no object refers to, such as those of saves that
        were killed.
        """
        epoch = _integer(header, "epoch")
        with self.memory.writing(epoch):
            if self._view is None or self._view.epoch != epoch:
                self._install()
        session = self._session(self._expect(self._view))
        unused = [name for name, key in self.memory.blobs().items() if not self._is_used(session, name, key)]
        with self.memory.writing(epoch):  # a later incarnation moves the entries
            self.memory.drop(unused)
        return self.decided({"after": ""}, payload)

    def _install(self) -> None:
        view = self._expect(self._next)
        os.replace(self.memory.directory / "next", self.memory.directory / "view")
        self._view, self._next = view, None
        self.memory.keep_entries(lambda key: self.member_id in view.home(key) and not _is_lease_of_owner(key))
        self.memory.keep_room()

    def _is_used(self, session: Session, name: str, key: str) -> bool:
        try:
            # A member of the home of a key has its entry, and needs no request to find it.
            entry = self.memory.find(key) if self.member_id in session.view.home(key) else session.find(key)
        except ObjectNotFoundError:
            return False
        return entry.blob == name and self.member_id in entry.holders

    def decided(self, header: Header, payload: memoryview) -> Answer:
        """Return the entries of large objects that this server decides about, a page at a time, without their data."""
        view = self._expect(self._view)
        after = str(header["after"])
        entries = {
            key: entry
            for key, entry in sorted(self.memory.entries().items())
            if key > after and entry.blob and view.deciding(key) == self.member_id
        }
        pages = _pages_of(entries)
        page = next(pages, b"[]")
        return {"more": next(pages, None) is not None}, page

    def view(self, header: Header, payload: memoryview) -> Answer:
        """Return the view, or that of the incarnation that is starting."""
        name = "next" if header.get("next") else "view"
        self._expect(self._next if name == "next" else self._view)
        return {}, (self.memory.directory / name).read_bytes()

    def spread(self, header: Header, payload: memoryview) -> Answer:
        """Do what a request asks on this server, and pass it on to other members. See `spreading`."""
        request = header["request"]
        if request["op"] not in _SPREAD:
            raise StorageError(f"{str(request['op'])[:80]!r} is no request to several members")
        view = View.decode(bytes(payload)) if request["op"] == "prepare" else self._expect(self._view)
        if view.epoch != _integer(request, "epoch"):
            raise SaveLostError(f"this server has the view of incarnation {view.epoch} of the job")
        part = Part(_integer(header, "first"), _integer(header, "count"))
        if not (0 <= part.first < len(view.writers) and 0 < part.size <= len(view.writers)):
            raise StorageError(f"there are no members {part} in a view of {len(view.writers)}")

        def own(share: bytes) -> Reached:
            answer, data = self.answer(header["connection"], request, memoryview(share))
            raise_error(answer, self.member_id)
            return Reached.decode(bytes(data))

        return {}, pass_on(self._session(view), request, bytes(payload), part, own).encode()

    def _session(self, view: View) -> Session:
        """Return the session of this server in a view."""
        with self._lock:
            if self._others is None or self._others.view != view:
                member = view.by_id.get(self.member_id)
                host, port = (member.host, member.port) if member is not None else ("", 0)
                local = LocalServer(self.memory.directory, self.member_id, host, port, self.token)
                self._others = Session(self.memory.directory.name, local, view, self.token, Pace(None))
            return self._others

    @staticmethod
    def _expect(view: View | None) -> View:
        if view is None:
            raise StorageError("this memory server belongs to no incarnation of the job; start the job again")
        return view

    def end(self, header: Header, payload: memoryview) -> Answer:
        """End soon after the last connection is closed: the job has ended. If it starts again, go on."""
        self._is_ending = True
        return {}, Reached().encode()

    def begin(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.begin_blob`."""
        size = _integer(header, "size")
        path = self.memory.begin_blob(header["blob"], str(header["key"]), size, header["connection"])
        return {"path": str(path)}, _NO_PAYLOAD

    def piece(self, header: Header, payload: memoryview) -> Answer:
        """Record a piece of a blob, which is in its place already."""
        name, offset = str(header["blob"]), _integer(header, "offset")
        if len(payload):
            self.memory.receive_piece(name, offset, len(payload))  # raises the error for which it was not placed
            raise StorageError(f"a piece of blob {name[:80]} arrived before the blob was begun")
        self.memory.add_piece(name, offset, header["checksums"])
        return {}, _NO_PAYLOAD

    def finish(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.finish_blob`."""
        checksums = [checksum for (checksum,) in struct.iter_unpack("<Q", payload)] if len(payload) else None
        self.memory.finish_blob(header["blob"], checksums)
        return {}, _NO_PAYLOAD

    def abort(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.abort_blob`."""
        self.memory.abort_blob(str(header["blob"]))
        return {}, _NO_PAYLOAD

    def read(self, header: Header, payload: memoryview) -> Answer:
        """Return bytes of a blob. Those of whole blocks have the checksums with which they were written."""
        blob = self.memory.blob(str(header["blob"]))
        offset, nbytes = _integer(header, "offset"), min(_integer(header, "nbytes"), PIECE_BYTES)
        try:
            if (checksums := blob.checksums(offset, nbytes)) is not None:
                return {"checksums": checksums}, blob.memory[offset : offset + nbytes]
            return {}, blob.read(offset, nbytes)
        except CorruptCheckpointError as error:
            return {"corrupt": str(error)}, _NO_PAYLOAD

    def drop(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.drop`."""
        self.memory.drop(header["blobs"])
        return {}, _NO_PAYLOAD

    def find(self, header: Header, payload: memoryview) -> Answer:
        """Return the entry of a key, with the data of a small object as payload."""
        entry = self.memory.find(str(header["key"]))
        return {"entry": entry._replace(data=None).encode()}, entry.data if entry.data is not None else _NO_PAYLOAD

    def sizes(self, header: Header, payload: memoryview) -> Answer:
        """Return the sizes of objects below a prefix, a page at a time: of those that this server decides about."""
        after, lost = header["after"], header["lost"]
        view = self._expect(self._view)
        sizes = [
            (key, size)
            for key, size in self.memory.sizes(str(header["below"])).items()
            if (after is None or key > after) and (lost is None or view.deciding(key, lost) == self.member_id)
        ]
        return {}, page_of(sizes).encode()

    def delete(self, header: Header, payload: memoryview) -> Answer:
        """Delete objects that this server decides about."""
        view = self._expect(self._view)
        if view.epoch != _integer(header, "epoch"):
            raise SaveLostError(f"incarnation {view.epoch} of the job has taken over")
        delete_each(self._session(view), json.loads(bytes(payload)))
        return {}, Reached().encode()

    def reserve(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.reserve`."""
        version, present = self.memory.reserve(str(header["key"]), header["condition"])
        encoded = None if present is None else present._replace(data=None).encode()
        return {"version": version, "present": encoded}, _NO_PAYLOAD

    def cancel(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.cancel`."""
        self.memory.cancel(str(header["key"]), _integer(header, "version"))
        return {}, _NO_PAYLOAD

    def apply(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.apply`."""
        entry = Entry.decode(header["entry"])
        if not entry.is_deleted and not entry.blob:
            entry = entry._replace(data=bytes(payload))
        self.memory.apply(str(header["key"]), entry)
        return {}, _NO_PAYLOAD


_OPERATIONS: Final[Mapping[str, Callable[[RequestHandler, Header, memoryview], Answer]]] = {
    operation.__name__: operation
    for operation in (
        RequestHandler.status, RequestHandler.listen, RequestHandler.fence, RequestHandler.prepare,
        RequestHandler.hand_over, RequestHandler.load, RequestHandler.install, RequestHandler.decided,
        RequestHandler.view, RequestHandler.spread,
        RequestHandler.end, RequestHandler.begin, RequestHandler.piece, RequestHandler.finish, RequestHandler.abort,
        RequestHandler.read, RequestHandler.drop, RequestHandler.find, RequestHandler.sizes, RequestHandler.delete,
        RequestHandler.reserve, RequestHandler.cancel, RequestHandler.apply,
    )
}  # fmt: skip

_WRITES: Final = frozenset(
    {
        RequestHandler.prepare, RequestHandler.load, RequestHandler.end, RequestHandler.begin,
        RequestHandler.piece, RequestHandler.finish, RequestHandler.drop, RequestHandler.reserve, RequestHandler.apply,
    }
)  # fmt: skip
"""Operations that only the current incarnation of the job may do. It does not change while they run."""

_ACTS: Final = frozenset({RequestHandler.hand_over, RequestHandler.install, RequestHandler.delete})
"""Operations that only the current incarnation may begin. They send requests to other servers, which check it again."""

_SPREAD: Final = frozenset({"prepare", "sizes", "delete", "end"})
"""Requests that servers pass on."""


def _is_lease_of_owner(key: str) -> bool:
    """Return True for the lease of the previous owner of a run, which is fenced."""
    return f"/{OWNER}" in f"/{key}"


def _read_view(path: Path) -> View | None:
    return View.decode(path.read_bytes()) if path.exists() else None


def _pages_of(entries: Mapping[str, Entry]) -> Iterator[bytes]:
    """Yield entries as JSON, in pages."""
    page: list[JSON] = []
    nbytes = 0
    for key, entry in entries.items():
        page.append([key, entry.encode()])
        nbytes += len(key) * 6 + len(entry.data or b"") * 4 // 3 + 300
        if nbytes > PAGE_BYTES:
            yield json.dumps(page).encode("ascii")
            page, nbytes = [], 0
    if page:
        yield json.dumps(page).encode("ascii")


def _integer(header: Header, name: str) -> int:
    """Return a number of a request.

    Raises:
        KeyError, TypeError: it is missing, or no integer.
    """
    value = header[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: expected an integer")
    return value


def _text_of(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogatepass") if path.exists() else ""
