"""The side of a process that lost its state: it receives parcels from holders, and verifies them."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore.io.elements import copy_elements, new_bytes
from ckptcore.io.threads import BackgroundThreads
from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import ReadItem, ReadPlan
from ckptcore_recovery.peers.messages import PIECE_BYTES, Connection
from ckptcore_recovery.replicas.job_state import NoReplicaError
from ckptcore_recovery.replicas.listening import receive_into
from ckptcore_recovery.replicas.sending import digest_of
from ckptcore_recovery.replicas.transfers import Parcel, Piece

logger = logger_named("ckptcore.recovery")

_THREADS: Final = 8
"""The number of holders from which a process receives at the same time."""

_AHEAD: Final = 2
"""Requests that are sent to a holder before their answers are received, so that it does not wait."""

_CONNECT_SECONDS: Final = 30.0
"""All holders accept a connection within this time, or count as failed."""

_LEAST_CONNECT_SECONDS: Final = 1.0

_ANSWER_SECONDS: Final = 60.0
"""A holder answers within this time, or another one is asked."""

Address: TypeAlias = tuple[str, int]
"""Host and port of a holder."""


class Holders(NamedTuple):
    """The holders of elements that this process needs.

    Attributes:
        connections: the connection to each holder that did not fail.
        failed: by rank, why a holder failed.
    """

    connections: dict[int, Connection]
    failed: dict[int, str]

    def connect(self, rank: int, token: bytes, addresses: Mapping[int, Address]) -> Mapping[int, str]:
        """Connect to holders. They have accepted the connections when this returns.

        Args:
            rank: the rank of this process.
            token: the secret of this recovery.
            addresses: the address of each holder.

        Returns:
            By rank, why a holder failed.
        """
        deadline = time.monotonic() + _CONNECT_SECONDS

        def connect(holder: int) -> None:
            seconds = max(_LEAST_CONNECT_SECONDS, deadline - time.monotonic())
            try:
                connected = socket.create_connection(addresses[holder], timeout=seconds)
                try:
                    connection = Connection(connected, token, is_server=False)
                    connection.set_timeout(_ANSWER_SECONDS)
                    connection.send({"op": "hello", "rank": rank})
                    connection.receive()
                except BaseException:
                    connected.close()
                    raise
            except (OSError, ValueError) as error:
                host, port = addresses[holder]
                self.failed[holder] = f"{host}:{port}: {type(error).__name__}: {error}"
                logger.warning("rank %d cannot send its part of the state: %s", holder, self.failed[holder])
            else:
                self.connections[holder] = connection

        threads = BackgroundThreads(_THREADS, "ckptcore-recover")
        for started in [threads.submit(partial(connect, holder)) for holder in sorted(addresses)]:
            started.result()
        return self.failed

    def close(self) -> None:
        """Close the connections."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()


class Wanted(NamedTuple):
    """The elements that a process receives.

    Attributes:
        parcels: the parcels that it needs, by number.
        digests: the digest of each parcel of the job.
        excluded: by number of a parcel, holders whose elements differ from those of the majority.
        requests: how often the load reads each box.
        dtypes: the dtype of each array, by leaf.
        paths: the path of each leaf, for errors.
    """

    parcels: Mapping[int, Parcel]
    digests: Sequence[bytes]
    excluded: Mapping[int, Sequence[int]]
    requests: Mapping[ReadItem, int]
    dtypes: Mapping[int, np.dtype[Any]]
    paths: Sequence[str]


class RefusedError(StorageError):
    """A holder sent an error, or elements with another digest than the agreed one."""


class Fetch:
    """Receives the parcels that this process needs, from several holders at the same time.

    If a holder fails, or sends bytes with another digest, the other holders send the rest of its parcels.

    Attributes:
        rank: the rank of this process.
        wanted: what it receives.
        connections: the connection to each holder that did not fail.
        moved: bytes of elements received, including those that were refused.
        received: bytes of elements accepted, by rank of the holder.
        failed: by rank, why a holder was replaced.
    """

    def __init__(self, rank: int, wanted: Wanted, holders: Holders) -> None:
        """Request nothing yet.

        Args:
            rank: the rank of this process.
            wanted: what it receives.
            holders: the holders of the parcels.
        """
        self.rank = rank
        self.wanted = wanted
        self.connections, self.failed = holders
        self.moved = 0
        self.received: dict[int, int] = {}
        self._requests = Counter(wanted.requests)
        self._kept: dict[ReadItem, list[tuple[Piece, HostArray]]] = {}
        self._ordered: set[int] = set()  # parcels of earlier reads
        self._by_item: dict[ReadItem, list[int]] = {}
        for number, parcel in wanted.parcels.items():
            for item in dict.fromkeys([piece.item for piece in parcel.pieces]):
                self._by_item.setdefault(item, []).append(number)

    def drop(self, holder: int, error: Exception, unanswered: int = 0) -> None:
        """Close the connection to a holder that failed.

        Args:
            holder: its rank.
            error: the reason.
            unanswered: the number of answers to receive before the connection is closed. If bytes are left when a
                socket is closed, the other side may lose the last message.
        """
        self.failed[holder] = f"{type(error).__name__}: {error}"
        logger.warning("rank %d cannot send its part of the state, others send it: %s", holder, error)
        if (connection := self.connections.pop(holder, None)) is not None:
            self._end(holder, connection, refusal=str(error), unanswered=unanswered)

    def close(self, error: BaseException | None) -> None:
        """Tell the holders that this process has its state, or the error that stopped it."""
        reason = None if error is None else f"{type(error).__name__}: {error}"
        for holder, connection in self.connections.items():
            self._end(holder, connection, error=reason)
        self.connections.clear()

    def _end(
        self,
        holder: int,
        connection: Connection,
        *,
        error: str | None = None,
        refusal: str | None = None,
        unanswered: int = 0,
    ) -> None:
        try:
            connection.send({"op": "end", "error": error, "refusal": refusal})
            for _ in range(unanswered):
                connection.receive()
        except (OSError, ValueError) as failure:
            logger.info("rank %d does not hear that rank %d needs nothing more: %s", holder, self.rank, failure)
        connection.close()

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterator[int]:
        """Fill buffers with the boxes of a plan. Yields the number of each box once it is complete.

        Raises:
            NoReplicaError: every holder of a parcel has failed.
        """
        targets = _Targets(plan.items, buffers)
        assert all(item in self._by_item or not item.box.size for item in targets.items), "a box was not planned"
        self._requests.subtract(plan.items)
        numbers: dict[int, None] = {}
        for item in targets.items:
            numbers.update(dict.fromkeys(self._by_item.get(item, ())))
            for piece, elements in self._kept.get(item, ()):
                targets.put(piece, elements)
            if not self._requests[item]:
                self._kept.pop(item, None)
        ordered = [number for number in numbers if number not in self._ordered]
        self._ordered.update(ordered)
        round_ = _Round(self, ordered, targets)
        threads = BackgroundThreads(_THREADS, "ckptcore-recover")
        try:
            for _ in range(min(_THREADS, len(self.connections), len(ordered))):
                threads.submit(round_.work)
            for _ in plan.items:
                number = targets.complete.get()
                if isinstance(number, BaseException):
                    raise number
                yield number
        finally:
            round_.stop()
            threads.join()

    def accept(self, holder: int, parcel: Parcel, data: memoryview, targets: _Targets) -> None:
        """Copy the elements of a verified parcel to their targets, and keep those that a later read needs."""
        position = 0
        for piece in parcel.pieces:
            dtype = self.wanted.dtypes[piece.leaf]
            stop = position + piece.box.size * dtype.itemsize
            elements: HostArray = np.frombuffer(data[position:stop], dtype).reshape(piece.box.shape)
            targets.put(piece, elements)
            if self._requests[piece.item] > 0:
                self._kept.setdefault(piece.item, []).append((piece, elements.copy()))
            position = stop
        self.received[holder] = self.received.get(holder, 0) + parcel.nbytes


class _Targets:
    """The memory that one read fills. Thread-safe.

    Attributes:
        items: the boxes, each once.
        complete: the numbers of complete boxes, or an error.
    """

    def __init__(self, items: Sequence[ReadItem], buffers: Sequence[HostArray]) -> None:
        self.items: dict[ReadItem, list[int]] = {}
        self.complete: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._buffers = buffers
        self._missing = [item.box.size for item in items]
        self._lock = threading.Lock()
        for number, item in enumerate(items):
            self.items.setdefault(item, []).append(number)
            if not item.box.size:
                self.complete.put(number)

    def put(self, piece: Piece, elements: HostArray) -> None:
        """Copy elements to all boxes of this read that need them."""
        for number in self.items.get(piece.item, ()):
            buffer = self._buffers[number]
            copy_elements(buffer[piece.box.within(piece.item.box)] if piece.box.start else buffer, elements)
            with self._lock:
                self._missing[number] -= piece.box.size
                is_complete = not self._missing[number]
            if is_complete:
                self.complete.put(number)


class _Round:
    """The parcels of one read, by the holder that is asked for them. Thread-safe."""

    def __init__(self, fetch: Fetch, numbers: Sequence[int], targets: _Targets) -> None:
        self._fetch = fetch
        self._targets = targets
        self._changed = threading.Condition()
        self._queues: dict[int, deque[int]] = {holder: deque() for holder in fetch.connections}
        self._busy: set[int] = set()
        self._left = len(numbers)
        with self._changed:
            for number in numbers:
                self._order(number)

    def stop(self) -> None:
        """Receive no further parcels."""
        with self._changed:
            self._left = 0
            self._changed.notify_all()

    def work(self) -> None:
        """Receive parcels until all are received. Never raises."""
        memory = new_bytes(PIECE_BYTES)
        while (holder := self._take()) is not None:
            pending: deque[int] = deque()
            try:
                self._receive(holder, pending, memory)
            except (OSError, ValueError) as error:
                self._replace(holder, pending, error)
            except BaseException as error:  # noqa: BLE001  # raised by `Fetch.read`
                self._targets.complete.put(error)
                self.stop()
            with self._changed:
                self._busy.discard(holder)
                self._changed.notify_all()

    def _take(self) -> int | None:
        """Wait for a holder that has something to send; None once everything is received."""
        with self._changed:
            while self._left:
                for holder, numbers in self._queues.items():
                    if numbers and holder not in self._busy:
                        self._busy.add(holder)
                        return holder
                self._changed.wait()
            return None

    def _receive(self, holder: int, pending: deque[int], memory: memoryview) -> None:
        """Receive the parcels of a holder.

        Args:
            holder: its rank.
            pending: receives the numbers of the parcels that were requested and not received.
            memory: the memory of messages.
        """
        fetch, wanted = self._fetch, self._fetch.wanted
        connection = fetch.connections[holder]
        while True:
            while len(pending) < _AHEAD and (number := self._next(holder)) is not None:
                pending.append(number)
                connection.send({"op": "parcel", "number": number})
            if not pending:
                return
            number, parcel = pending[0], wanted.parcels[pending[0]]
            header, data = receive_into(connection, memory)
            if (reason := header.get("message")) is not None:
                raise RefusedError(f"rank {holder} failed: {reason}")
            with self._changed:
                fetch.moved += len(data)
            if len(data) != parcel.nbytes or digest_of(data) != wanted.digests[number]:
                path = wanted.paths[parcel.pieces[0].leaf]
                raise RefusedError(f"rank {holder} sent elements of {path} with another digest than the agreed one")
            fetch.accept(holder, parcel, data, self._targets)
            pending.popleft()
            with self._changed:
                self._left = max(0, self._left - 1)
                self._changed.notify_all()

    def _next(self, holder: int) -> int | None:
        with self._changed:
            numbers = self._queues[holder]
            return numbers.popleft() if numbers and self._left else None

    def _replace(self, holder: int, pending: deque[int], error: Exception) -> None:
        """Ask other holders for the parcels that a holder did not send."""
        self._fetch.drop(holder, error, len(pending) - 1 if isinstance(error, RefusedError) else 0)
        with self._changed:
            for number in [*pending, *self._queues.pop(holder)]:
                self._order(number)
            self._changed.notify_all()

    def _order(self, number: int) -> None:
        """Choose the holder that is asked for a parcel: its sender, or else the one with the fewest parcels."""
        fetch, wanted = self._fetch, self._fetch.wanted
        parcel = wanted.parcels[number]
        left = [
            holder
            for holder in parcel.holders
            if holder in self._queues and holder not in wanted.excluded.get(number, ())
        ]
        if not left:
            path = wanted.paths[parcel.pieces[0].leaf]
            reasons = "; ".join([f"rank {holder}: {reason}" for holder, reason in sorted(fetch.failed.items())])
            self._targets.complete.put(
                NoReplicaError(f"{path}: every process that holds it has failed ({reasons}). Load a checkpoint")
            )
            self._left = 0
            return
        sender = parcel.senders[fetch.rank]
        self._queues[sender if sender in left else min(left, key=lambda rank: len(self._queues[rank]))].append(number)
