"""The memory server of one host: a process of its own, which outlives the processes of the job that use it.

Start it with ``python -m ckptcore_recovery.peers.server DIRECTORY``, or let `starting.ensure_server` start it. It ends
if no process of the job has been connected for some time, or when the job ends.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from ckptcore.errors import StorageError, StorageFullError
from ckptcore_recovery.peers.host_memory import HostMemory
from ckptcore_recovery.peers.memory_files import write_file
from ckptcore_recovery.peers.messages import Channel, Connection, MessageError
from ckptcore_recovery.peers.request_handler import RequestHandler
from ckptcore_recovery.peers.starting import (
    LOOPBACK,
    TOKEN_BYTES,
    damaged_memory,
    log_of,
    read_description,
    read_token,
)

logger = logging.getLogger("ckptcore.recovery")

_MAX_CONNECTIONS: Final = 4096

_PAUSE_SECONDS: Final = 0.1

_ENDING_SECONDS: Final = 60.0
"""A server whose job has ended waits so long for another start of the job."""


class MemoryServer:
    """Accepts connections, and serves each on a thread of its own.

    Attributes:
        handler: answers the requests.
    """

    def __init__(self, memory: HostMemory, member_id: str, token: bytes, idle_seconds: float) -> None:
        """Serve a memory.

        Args:
            memory: the memory.
            member_id: its id.
            token: the secret of the job.
            idle_seconds: end after this time without a connection.
        """
        self.handler = RequestHandler(memory, member_id, token, self.listen_on)
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._connections: dict[int, Channel | None] = {}
        self._last_used = time.monotonic()
        self._accepted = 0
        self._listening = selectors.DefaultSelector()
        self._ports: dict[str, int] = {}

    def serve(self, listening: socket.socket) -> None:
        """Accept connections until the server ends.

        Args:
            listening: the socket that listens. It is closed.
        """
        self._listen(listening.getsockname()[0], listening)
        try:
            while not self._is_over():
                self._accept_waiting()
        finally:
            with self._lock:
                for key in list(self._listening.get_map().values()):
                    key.data.close()
                self._listening.close()

    def _accept_waiting(self) -> None:
        """Accept the connections that wait, or wait for some."""
        accepting = self._listening.select(min(1.0, self._idle_seconds))
        if not accepting:
            self.handler.close_idle()  # they would keep other servers from ending
        for ready, _ in accepting:
            try:
                accepted, _ = ready.data.accept()
            except BlockingIOError:  # the client has gone
                continue
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)
                time.sleep(_PAUSE_SECONDS)  # there are too many open files
                continue
            if len(self._connections) >= _MAX_CONNECTIONS:
                accepted.close()
                continue
            try:
                self.serve_channel(partial(_accept, accepted))
            except RuntimeError as error:
                accepted.close()
                logger.warning("cannot serve a connection: %s", error)
                time.sleep(_PAUSE_SECONDS)  # there are too many threads

    def _listen(self, interface: str, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._ports[interface] = listening.getsockname()[1]
        self._listening.register(listening, selectors.EVENT_READ, listening)

    def listen_on(self, interface: str) -> int:
        """Listen on another address of this host, too. Return the port."""
        address = _address_of(interface)
        directory = self.handler.memory.directory
        with self._lock:
            if address not in self._ports:
                described = read_description(directory)
                listening = _listening_on(address, next(iter(self._ports.values())))
                try:
                    described |= {"interface": interface, "port": listening.getsockname()[1]}
                    write_file(directory / "server.json", json.dumps(described).encode())
                    self._listen(address, listening)
                except BaseException:
                    listening.close()
                    raise
            return self._ports[address]

    def serve_channel(self, begin: Callable[[bytes], Channel]) -> None:
        """Serve a connection on a thread of its own until it ends.

        Args:
            begin: makes the connection, given the token of the job.

        Raises:
            RuntimeError: there are too many threads. `begin` is not called.
        """
        with self._lock:
            self._accepted += 1
            number = self._accepted
            self._connections[number] = None
        try:
            threading.Thread(target=self._serve_connection, args=(number, begin), daemon=True).start()
        except RuntimeError:
            with self._lock:
                del self._connections[number]
            raise

    def _is_over(self) -> bool:
        with self._lock:
            if any(connection is not None for connection in self._connections.values()):
                self._last_used = time.monotonic()
                return False
            seconds = min(self._idle_seconds, _ENDING_SECONDS) if self.handler.is_ending else self._idle_seconds
            return time.monotonic() > self._last_used + seconds

    def _serve_connection(self, number: int, begin: Callable[[bytes], Channel]) -> None:
        connection = None
        try:
            connection = begin(self.handler.token)
            with self._lock:
                self._connections[number] = connection
            while True:
                self._serve_request(number, connection)
        except (OSError, ValueError) as error:
            if isinstance(error, MessageError):
                logger.warning("refused a connection: %s", error)
        finally:
            self.handler.memory.abort_blobs(number)
            with self._lock:
                del self._connections[number]
            if connection is not None:
                connection.close()

    def _serve_request(self, number: int, connection: Channel) -> None:
        header, payload = connection.receive(self.handler.place)
        connection.send(*self.handler.answer(number, header, payload))


def _accept(accepted: socket.socket, token: bytes) -> Channel:
    """Return the connection of a socket. Close the socket if the other side does not know the token."""
    try:
        return Connection(accepted, token, is_server=True)
    except BaseException:
        accepted.close()
        raise


def _address_of(interface: str) -> str:
    """Return the IP address of an interface, which can be given by a name.

    Raises:
        StorageError: there is none, or it means all addresses of this host.
    """
    try:
        address = str(socket.getaddrinfo(interface or "::", None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise _refused(interface, error) from error
    if address in ("0.0.0.0", "::"):
        raise _refused(interface, "other hosts cannot connect to it")
    return address


def _refused(interface: str, reason: object) -> StorageError:
    return StorageError(
        f"cannot listen on {interface!r}: {reason}. Pass interface= with an IP address of this host that the other "
        "hosts of the job reach"
    )


def _listening_on(interface: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this host, at a port, or at another one if that is taken.

    Raises:
        StorageError: the address does not belong to this host.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listening.bind((interface, port))
        except OSError:  # another program took the port meanwhile
            listening.bind((interface, 0))
    except OSError as error:
        listening.close()
        raise _refused(interface, error) from error
    listening.listen(128)
    return listening


def _listening_again(before: Mapping[str, Any], interface: str) -> tuple[str, socket.socket]:
    """Listen at the port of the last server, and at its address, which views name, unless another one was asked for.

    Args:
        before: the description of the last server; empty if there was none.
        interface: the address that was asked for; the default is none.
    """
    last = before.get("interface", interface)
    if interface == LOOPBACK != last:
        with contextlib.suppress(StorageError):  # the address may no longer belong to this host
            return last, _listening_on(last, before["port"])
    return interface, _listening_on(interface, before.get("port", 0))


def _is_file(path: Path, descriptor: int) -> bool:
    """Return True if the file of a descriptor still has its name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def run(directory: Path, *, limit: int, interface: str, idle_seconds: float, background: bool) -> int:
    """Serve the memory in a directory until the job ends. Return the exit status.

    Prints a line when it is ready, or if another server serves the directory already.

    Args:
        directory: the directory.
        limit: the maximum bytes in memory.
        interface: the address to listen on; the default means that of the last server, if there was one.
        idle_seconds: end after this time without a connection.
        background: serve in a process of its own session, and return at once.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("already running", flush=True)
        return 0
    if not _is_file(directory / "lock", lock):  # the last server removed the directory meanwhile
        print("already running", flush=True)
        return 0
    described = directory / "server.json"
    before = read_description(directory) if described.exists() else {}
    token_path = directory / "token"
    if not token_path.exists():
        write_file(token_path, os.urandom(TOKEN_BYTES))
    token = read_token(directory)
    member_id = before.get("id") or os.urandom(8).hex()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # systems differ in the highest value that they accept
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each blob and each connection is an open file
    try:
        memory = HostMemory(directory, limit)
        serving = MemoryServer(memory, member_id, token, idle_seconds)
    except StorageFullError:
        raise
    except (StorageError, ValueError, TypeError, IsADirectoryError, NotADirectoryError) as error:
        raise damaged_memory(directory, error) from error
    interface, listening = _listening_again(before, interface)
    port = listening.getsockname()[1]
    if background:
        if os.fork():  # no thread runs yet
            os._exit(0)  # the caller waits for this process, and not for the server
        os.setsid()
    else:
        signal.signal(signal.SIGTERM, _end)
    server = {"id": member_id, "interface": interface, "port": port, "pid": os.getpid()}
    write_file(described, json.dumps(server).encode())
    print("ready", flush=True)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)  # the process that reads the pipe may have ended
    memory.keep_room()
    serving.serve(listening)
    import shutil  # here, because jobs wait for the start of a server

    shutil.rmtree(directory, ignore_errors=True)
    log = log_of(directory)
    if log.exists() and not log.stat().st_size:
        log.unlink(missing_ok=True)
    return 0


def _end(number: int, frame: object) -> None:
    """End, and leave the memory to the next server. The first process of a container ignores SIGTERM without this."""
    sys.exit(0)


def main() -> int:
    """Run a server with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m ckptcore_recovery.peers.server", description=__doc__)
    parser.add_argument("directory", type=Path, help="a directory in a memory file system, such as /dev/shm/run")
    parser.add_argument("--limit", type=int, required=True, help="the maximum bytes in memory")
    parser.add_argument("--interface", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--idle-seconds", type=float, default=900.0, help="end after this time without a connection")
    parser.add_argument("--background", action="store_true", help="end at once, and serve in a session of its own")
    arguments = parser.parse_args()
    return run(
        arguments.directory,
        limit=arguments.limit,
        interface=arguments.interface,
        idle_seconds=arguments.idle_seconds,
        background=arguments.background,
    )


if __name__ == "__main__":
    sys.exit(main())
