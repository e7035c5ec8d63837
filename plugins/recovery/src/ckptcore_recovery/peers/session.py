"""Session: the memory of a job as one process uses it: the view, the servers, and the server of this host."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

from ckptcore.errors import StorageError
from ckptcore_recovery.peers.connections import Pace, ServerConnections, ServerLostError
from ckptcore_recovery.peers.host_memory import Entry
from ckptcore_recovery.peers.memory_files import Blob
from ckptcore_recovery.peers.messages import Header
from ckptcore_recovery.peers.starting import LocalServer
from ckptcore_recovery.peers.views import Member, View

logger = logging.getLogger("ckptcore.recovery")
logger.addHandler(logging.NullHandler())  # as `logger_named` of the core, whose module imports NumPy

INLINE_BYTES: Final = 1 << 19
"""Objects up to this size are stored with their entry."""

_MAX_CONNECTED: Final = 64
"""The maximum number of servers to which a process keeps idle connections, besides those that hold its blobs."""

_QUIET_SECONDS: Final = 5.0
"""Work in the background begins when this process has read nothing for this time: it plans, or other processes load."""


class Reads:
    """The reads of a process. Work in the background waits for their end, so that a load is fast. Thread-safe.

    Attributes:
        are_stopped: True if work in the background has to end.
    """

    def __init__(self) -> None:
        self.are_stopped = False
        self._changed = threading.Condition()
        self._running = 0
        self._quiet_since = time.monotonic()
        self._pause = _QUIET_SECONDS

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a read while the body runs."""
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._quiet_since = time.monotonic()
                self._changed.notify_all()

    def stop(self) -> None:
        """End the work in the background."""
        with self._changed:
            self.are_stopped = True
            self._changed.notify_all()

    def hurry(self) -> None:
        """Begin the work in the background as soon as no read is running."""
        with self._changed:
            self._pause = 0.0
            self._changed.notify_all()

    def wait_for_end(self) -> bool:
        """Wait until there was no read for some time. Return False if the work has to end."""
        with self._changed:
            while not self.are_stopped:
                left = self._quiet_since + self._pause - time.monotonic()
                if not self._running and left <= 0:
                    return True
                self._changed.wait(None if self._running else left)
            return False


class Session:
    """A job's memory as this process uses it. Thread-safe.

    Attributes:
        job: the name of the job.
        local: the memory server of this host; None if there is none.
        pace: limits the rate of pieces.
        reads: the reads of this process, which copies in the background wait for.
    """

    def __init__(
        self,
        job: str,
        local: LocalServer | None,
        view: View,
        token: bytes,
        pace: Pace,
        start_again: Callable[[], object] | None = None,
        lost: Iterable[str] = (),
    ) -> None:
        """Use a view.

        Args:
            job: the name of the job.
            local: the memory server of this host.
            view: the view of the job's incarnation.
            token: the secret of the job.
            pace: limits the rate of pieces.
            start_again: starts the server of this host again; None if this process only reads.
            lost: ids of members that did not answer; they are asked last.
        """
        self.job = job
        self.local = local
        self.view = view
        self.pace = pace
        self._token = token
        self._start_again = start_again
        self._servers: dict[str, ServerConnections] = {}
        self._lost = set(lost)
        self._lock = threading.Lock()
        self.reads = Reads()
        self._copying: threading.Thread | None = None

    def reset_after_fork(self) -> None:
        """Replace the locks and the connections in a forked child, because threads of the parent use them."""
        self._lock = threading.Lock()
        self.reads = Reads()
        self._copying = None
        for server in self._servers.values():
            server.reset_after_fork()

    def server(self, member: Member) -> ServerConnections:
        """Return the connections to a member. Closes idle ones to the member that was not used for the longest time.

        Those to members that hold the blobs of this process stay: a server gives up the unfinished blobs of a
        connection that ends.
        """
        holders = self.view.holders(None if self.local is None else self.local.id)
        with self._lock:
            server = self._servers.pop(member.id, None)
            if server is None:
                server = ServerConnections(
                    member.host,
                    member.port,
                    self._token,
                    start_again=self._start_again if self.is_local(member) else None,
                )
            self._servers[member.id] = server
            unused = next((name for name in self._servers if name not in holders), None)
            idle = self._servers.pop(unused) if unused and len(self._servers) > _MAX_CONNECTED + len(holders) else None
        if idle is not None:
            idle.close()
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop to make copies, and close all idle connections."""
        self.reads.stop()
        self.wait_for_copies()
        self.close_idle()

    def close_idle(self) -> None:
        """Close all idle connections. Later requests connect again."""
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            server.close()

    # --- copies that are made again in the background -----------------------------------------------------------------

    def start_copying(self, work: Callable[[], None]) -> None:
        """Make copies in the background."""
        self._copying = threading.Thread(target=work, name="ckptcore copies in memory", daemon=True)
        self._copying.start()

    def wait_for_copies(self, timeout: float | None = None) -> None:
        """Wait until this process has made copies again that were on lost hosts, or `timeout` in seconds."""
        self.reads.hurry()
        if self._copying is not None:
            self._copying.join(timeout)

    # --- blobs --------------------------------------------------------------------------------------------------------

    def holders(self) -> tuple[Member, ...]:
        """Return the members that get the blobs of this process; that of this host is the first, if it has one."""
        own = None if self.local is None else self.local.id
        return tuple([self.view.by_id[name] for name in self.view.holders(own)])

    def is_local(self, member: Member) -> bool:
        """Return True for the member on this host."""
        return self.local is not None and member.id == self.local.id

    def local_blob(self, name: str) -> Blob | None:
        """Map a blob in the memory of this host; None if it is not there. It exists as long as the result."""
        return None if self.local is None else Blob.open(self.local.directory, name)

    def begin_blob(self, member: Member, name: str, key: str, size: int) -> str:
        """Reserve memory for a blob of an object on a member. Return its file, for processes of the same host.

        Raises:
            StorageFullError: it does not fit there.
            StorageError: the member failed.
        """
        header = {"op": "begin", "epoch": self.view.epoch, "blob": name, "key": key, "size": size}
        answer, _ = self.server(member).call(header)
        return str(answer["path"])

    def send_piece(self, member: Member, name: str, offset: int, piece: memoryview, checksums: Sequence[int]) -> None:
        """Send a piece of a blob to another member.

        Args:
            member: the member.
            name: the blob.
            offset: a multiple of `PIECE_BYTES`.
            piece: `PIECE_BYTES`, or the rest of the blob.
            checksums: the checksums of its blocks.

        Raises:
            StorageError: the member failed.
        """
        self.pace.wait(len(piece))
        header = {"op": "piece", "epoch": self.view.epoch, "blob": name, "offset": offset, "checksums": checksums}
        self.server(member).call(header, piece)

    def finish_blob(self, member: Member, name: str, checksums: Sequence[int] | None = None) -> None:
        """Make a blob visible on a member. See `HostMemory.finish_blob`.

        Raises:
            StorageError: the member failed.
        """
        packed = b"" if checksums is None else struct.pack(f"<{len(checksums)}Q", *checksums)
        self.server(member).call({"op": "finish", "epoch": self.view.epoch, "blob": name}, packed)

    def drop_blob(self, entry: Entry) -> None:
        """Free the memory of a blob that no object refers to any more. Members that do not answer keep it for now."""
        for name in entry.holders:
            member = self.view.by_id.get(name)
            if member is not None and not member.is_reader:
                self.try_to_call(member, {"op": "drop", "epoch": self.view.epoch, "blobs": [entry.blob]})

    def keep_server(self) -> None:
        """Start the server of this host again if it was killed. Other hosts need it, and cannot start it."""
        if self.local is not None:
            self.try_to_call(self.view.by_id[self.local.id], {"op": "status"})

    def try_to_call(self, member: Member, header: Header) -> None:
        """Send a request whose error shows elsewhere, or only keeps memory longer. It is logged at debug level."""
        try:
            self.server(member).call(header)
        except StorageError as error:
            logger.debug("%s of %s: %s", header["op"], self.server(member).place, error)

    # --- entries ------------------------------------------------------------------------------------------------------

    def home(self, key: str) -> Iterator[Member]:
        """Yield the members that hold the entry of a key; those that did not answer before are the last."""
        members = [self.view.by_id[name] for name in self.view.home(key)]
        yield from sorted(members, key=lambda member: member.id in self._lost)

    def ask_home(self, key: str, header: Header) -> tuple[dict[str, Any], memoryview]:
        """Return the answer of the first member with the entry of a key that answers.

        Raises:
            StorageError: none answers.
            Other errors of the request.
        """
        failure: ServerLostError | None = None
        lost: set[str] = set()
        for member in self.home(key):
            try:
                answer = self.server(member).call(header)
            except ServerLostError as error:
                self._lost.add(member.id)
                lost.add(member.id)
                failure = failure or error
                continue
            self._lost.discard(member.id)
            return answer
        raise lost_memory(self, lost) from failure

    def find(self, key: str) -> Entry:
        """Return the entry of an object, with the data of a small one.

        Raises:
            ObjectNotFoundError
            StorageError: no server answers.
        """
        answer, payload = self.ask_home(key, {"op": "find", "key": key})
        entry = Entry.decode(answer["entry"])
        return entry if entry.blob else entry._replace(data=bytes(payload))

    def replace(self, key: str, entry: Entry, condition: str | None) -> tuple[int, Entry | None]:
        """Store an entry on all members that hold those of its key. The first one decides about the condition.

        The others store it before the first one shows it, so that no version that was seen can be lost.

        Args:
            key: the key.
            entry: the entry; its version is ignored.
            condition: see `HostMemory.reserve`.

        Returns:
            The version, and the entry that was replaced.

        Raises:
            ConditionFailedError: the object does not match.
            SaveLostError: a later incarnation of the job has taken over.
            StorageError: a member failed. The entry may be stored nevertheless.
        """
        first, *others = [self.view.by_id[name] for name in self.view.home(key)]
        epoch = self.view.epoch
        reserve = {"op": "reserve", "epoch": epoch, "key": key, "condition": condition}
        reserved, _ = self.server(first).call(reserve)
        version = int(reserved["version"])
        data, encoded = entry.data or b"", entry._replace(version=version, data=None).encode()
        apply = {"op": "apply", "epoch": epoch, "key": key, "entry": encoded}
        try:
            for member in [*others, first]:
                self.server(member).call(apply, data)
        except BaseException:
            self.try_to_call(first, {"op": "cancel", "key": key, "version": version})
            raise
        present = reserved["present"]
        return version, None if present is None else Entry.decode(present)


def lost_memory(session: Session, lost: Collection[str]) -> StorageError:
    """Return the error for a job if none of the members that have some of its entries answers."""
    view = session.view
    return StorageError(
        f"the memory of job {session.job} is lost, or its hosts cannot be reached: some of its objects are known only "
        f"to servers that do not answer ({view.places(lost)}). It has {len(view.writers)} servers, and survives the "
        f"loss of {view.survivable} failure domains. Start the job again: it loads the newest step that is whole, in "
        "memory or in the directory"
    )
