"""The memory server of one host: a process of its own, which outlives the processes of the job that use it.

Start it with ``python -m ckptcore_recovery.peers.server DIRECTORY``, or let `starting.ensure_server` start it. It ends
if no process of the job has been connected for some time, or when the job ends.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from ckptcore.errors import CheckpointError, CorruptCheckpointError, SaveLostError, StorageError
from ckptcore_recovery.peers.host_memory import Entry, HostMemory
from ckptcore_recovery.peers.messages import PIECE_BYTES, Connection, Header, MessageError, error_header

logger = logging.getLogger("ckptcore.recovery")

_MAX_CONNECTIONS: Final = 4096
_PAGE_BYTES: Final = 1 << 21
"""Stop to add keys or entries to a page once it has this size."""

_ENDING_SECONDS: Final = 60.0
"""A server whose job has ended waits so long for another start of the job."""

Answer: TypeAlias = tuple[Header, memoryview | bytes]
"""The header and the payload of an answer."""

_NO_PAYLOAD: Final = b""


class MemoryServer:
    """Answers the requests of processes for the memory of this host.

    Attributes:
        member_id: identifies this memory. Another memory on the same host has another id.
    """

    def __init__(self, memory: HostMemory, member_id: str, token: bytes, idle_seconds: float) -> None:
        """Serve a memory.

        Args:
            memory: the memory.
            member_id: its id.
            token: the secret of the job.
            idle_seconds: end after this time without a connection.
        """
        self.memory = memory
        self.member_id = member_id
        self._token = token
        self._idle_seconds = idle_seconds
        self._view: Header = {}
        self._lock = threading.Lock()
        self._connections: dict[int, Connection | None] = {}
        self._last_used = time.monotonic()
        self._is_ending = False
        self._next = 0
        view = memory.directory / "view.json"
        if view.exists():
            self._view = json.loads(view.read_bytes())

    # --- connections --------------------------------------------------------------------------------------------------

    def serve(self, listening: socket.socket) -> None:
        """Accept connections until the server ends."""
        listening.settimeout(min(1.0, self._idle_seconds))
        while not self._is_over():
            try:
                accepted, _ = listening.accept()
            except TimeoutError:
                continue
            with self._lock:
                if len(self._connections) >= _MAX_CONNECTIONS:
                    accepted.close()
                    continue
                self._next += 1
                number = self._next
                self._connections[number] = None
            threading.Thread(target=self._serve_connection, args=(number, accepted), daemon=True).start()

    def _is_over(self) -> bool:
        with self._lock:
            if any(connection is not None for connection in self._connections.values()):
                self._last_used = time.monotonic()
                return False
            seconds = min(self._idle_seconds, _ENDING_SECONDS) if self._is_ending else self._idle_seconds
            return time.monotonic() > self._last_used + seconds

    def _serve_connection(self, number: int, accepted: socket.socket) -> None:
        connection = None
        try:
            connection = Connection(accepted, self._token, is_server=True)
            with self._lock:
                self._connections[number] = connection
            while True:
                self._serve_request(number, connection)
        except (OSError, ValueError) as error:
            if isinstance(error, MessageError):
                logger.warning("refused a connection: %s", error)
        finally:
            self.memory.abort_blobs(number)
            with self._lock:
                del self._connections[number]
            accepted.close() if connection is None else connection.close()

    def _serve_request(self, number: int, connection: Connection) -> None:
        header, payload = connection.receive(self._place)
        try:
            operation = _OPERATIONS.get(str(header.get("op")))
            if operation is None:
                raise StorageError(f"unknown request {str(header.get('op'))[:80]!r}")
            if operation in _WRITES and _integer(header, "epoch") != self.memory.epoch:
                raise SaveLostError(
                    f"this process belongs to incarnation {header['epoch']} of the job; incarnation "
                    f"{self.memory.epoch} has taken over"
                )
            answer, data = operation(self, {**header, "connection": number}, payload)
        except (CheckpointError, OSError, KeyError, TypeError, ValueError) as error:
            answer, data = error_header(error), _NO_PAYLOAD
        connection.send(answer, data)

    def _place(self, header: Header, nbytes: int) -> Iterator[memoryview] | None:
        """Write pieces to their blob while they arrive."""
        if header.get("op") == "piece" and header.get("epoch") == self.memory.epoch:
            try:
                return self.memory.receive_piece(str(header["blob"]), _integer(header, "offset"), nbytes)
            except (StorageError, KeyError, TypeError):
                pass  # received elsewhere, and refused
        return None

    # --- requests -----------------------------------------------------------------------------------------------------

    def status(self, header: Header, payload: memoryview) -> Answer:
        """Return the id, the incarnation and the used memory."""
        memory = self.memory
        return {"id": self.member_id, "epoch": memory.epoch, "used": memory.used, "limit": memory.limit}, _NO_PAYLOAD

    def fence(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.fence`."""
        self.memory.fence(_integer(header, "epoch"))
        return {}, _NO_PAYLOAD

    def install(self, header: Header, payload: memoryview) -> Answer:
        """Store the view of the job that fenced this server, and its token."""
        view = header["view"]
        if view["epoch"] != self.memory.epoch:
            raise SaveLostError(f"incarnation {self.memory.epoch} of the job has fenced this server")
        token = bytes.fromhex(header["token"])
        _write_private(self.memory.directory / "view.json", json.dumps(view).encode())
        _write_private(self.memory.directory / "token", token)
        self._view, self._token, self._is_ending = view, token, False
        if self.member_id not in view["home"]:
            self.memory.clear_entries()  # those of an earlier incarnation
        return {}, _NO_PAYLOAD

    def view(self, header: Header, payload: memoryview) -> Answer:
        """Return the installed view."""
        return {"view": self._view}, _NO_PAYLOAD

    def end(self, header: Header, payload: memoryview) -> Answer:
        """End soon after the last connection is closed: the job has ended. If it starts again, go on."""
        self._is_ending = True
        return {}, _NO_PAYLOAD

    def begin(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.begin_blob`."""
        path = self.memory.begin_blob(header["blob"], _integer(header, "size"), header["connection"])
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

    def keep(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.keep_only`."""
        return {"dropped": self.memory.keep_only(header["blobs"])}, _NO_PAYLOAD

    def find(self, header: Header, payload: memoryview) -> Answer:
        """Return the entry of a key, with the data of a small object as payload."""
        entry = self.memory.find(str(header["key"]))
        return {"entry": entry._replace(data=None).encode()}, entry.data if entry.data is not None else _NO_PAYLOAD

    def keys(self, header: Header, payload: memoryview) -> Answer:
        """Return the keys below a prefix, a page at a time."""
        after = header.get("after")
        page: list[str] = []
        nbytes = 0
        keys = self.memory.keys(str(header["below"]))
        rest = [key for key in keys if after is None or key > after]
        for key in rest:
            page.append(key)
            nbytes += len(key) * 6 + 4  # as JSON, at most
            if nbytes > _PAGE_BYTES:
                break
        return {"more": len(page) < len(rest)}, json.dumps(page).encode("ascii")

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

    def dump(self, header: Header, payload: memoryview) -> Answer:
        """Return entries, a page at a time."""
        after = header.get("after")
        page: list[Any] = []
        nbytes = 0
        more = False
        for key, entry in self.memory.dump():
            if after is not None and key <= after:
                continue
            if nbytes > _PAGE_BYTES // 2:
                more = True
                break
            page.append([key, entry.encode()])
            nbytes += len(key) * 6 + entry.size * (entry.data is not None) * 4 // 3 + 300
        return {"more": more}, json.dumps(page).encode("ascii")

    def blobs(self, header: Header, payload: memoryview) -> Answer:
        """See `HostMemory.blobs_of`."""
        return {"blobs": self.memory.blobs_of(str(header["holder"]))}, _NO_PAYLOAD

    def load(self, header: Header, payload: memoryview) -> Answer:
        """Store entries that other servers dumped, in place of the present ones with the first page."""
        if header["is_first"]:
            self.memory.clear_entries()
        for key, encoded in json.loads(bytes(payload)):
            self.memory.apply(key, Entry.decode(encoded))
        return {}, _NO_PAYLOAD


_OPERATIONS: Final[Mapping[str, Callable[[MemoryServer, Header, memoryview], Answer]]] = {
    operation.__name__: operation
    for operation in (
        MemoryServer.status, MemoryServer.fence, MemoryServer.install, MemoryServer.view, MemoryServer.end,
        MemoryServer.begin, MemoryServer.piece, MemoryServer.finish, MemoryServer.abort, MemoryServer.read,
        MemoryServer.drop, MemoryServer.keep, MemoryServer.find, MemoryServer.keys, MemoryServer.reserve,
        MemoryServer.cancel, MemoryServer.apply, MemoryServer.dump, MemoryServer.load,
        MemoryServer.blobs,
    )
}  # fmt: skip

_WRITES: Final = frozenset(
    {
        MemoryServer.end, MemoryServer.begin, MemoryServer.piece, MemoryServer.finish, MemoryServer.drop,
        MemoryServer.keep, MemoryServer.reserve, MemoryServer.apply, MemoryServer.load,
    }
)  # fmt: skip
"""Operations that only the current incarnation of the job may do."""


def _integer(header: Header, name: str) -> int:
    """Return a number of a request.

    Raises:
        KeyError, TypeError: it is missing, or no integer.
    """
    value = header[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: expected an integer")
    return value


def _write_private(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode=0o600)) as file:
        file.write(data)
    os.replace(temporary, path)


def run(directory: Path, *, limit: int, interface: str, idle_seconds: float) -> int:
    """Serve the memory in a directory until the job ends. Return the exit status.

    Prints a line when it is ready, or if another server serves the directory already.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("already running", flush=True)
        return 0
    described = directory / "server.json"
    before = json.loads(described.read_bytes()) if described.exists() else {}
    token_path = directory / "token"
    if not token_path.exists():
        _write_private(token_path, secrets.token_bytes(32))
    member_id = before.get("id") or secrets.token_hex(8)
    memory = HostMemory(directory, limit)
    listening = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((interface, before.get("port", 0)))
    except OSError:  # another program took the port meanwhile
        listening.bind((interface, 0))
    listening.listen(128)
    port = listening.getsockname()[1]
    if os.fork():  # no thread runs yet
        os._exit(0)  # the caller waits for this process, and not for the server
    os.setsid()
    server = {"id": member_id, "interface": interface, "port": port, "pid": os.getpid()}
    _write_private(described, json.dumps(server).encode())
    print("ready", flush=True)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    MemoryServer(memory, member_id, token_path.read_bytes(), idle_seconds).serve(listening)
    listening.close()
    shutil.rmtree(directory, ignore_errors=True)
    return 0


def main() -> int:
    """Run a server with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m ckptcore_recovery.peers.server", description=__doc__)
    parser.add_argument("directory", type=Path, help="a directory in a memory file system, such as /dev/shm/run")
    parser.add_argument("--limit", type=int, required=True, help="the maximum bytes in memory")
    parser.add_argument("--interface", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--idle-seconds", type=float, default=900.0, help="end after this time without a connection")
    arguments = parser.parse_args()
    return run(
        arguments.directory,
        limit=arguments.limit,
        interface=arguments.interface,
        idle_seconds=arguments.idle_seconds,
    )


if __name__ == "__main__":
    sys.exit(main())
