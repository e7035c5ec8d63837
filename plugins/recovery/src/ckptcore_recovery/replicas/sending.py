"""The side of a process that has its state: it computes digests of parcels, and sends them to processes that ask."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np
import xxhash

from ckptcore.errors import RankFailedError, StorageError
from ckptcore.events import logger_named
from ckptcore.io.elements import copy_elements, new_bytes
from ckptcore.io.threads import BackgroundThreads
from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending
from ckptcore.saving.descriptions import TreeDescription
from ckptcore_recovery.peers.messages import Connection, Header, MessageError, error_header
from ckptcore_recovery.replicas.listening import Listener, no_payload
from ckptcore_recovery.replicas.transfers import Parcel, Piece

logger = logger_named("ckptcore.recovery")

DIGEST_BYTES: Final = 16

_DIGEST_THREADS: Final = 8


def digest_of(data: memoryview | bytes) -> bytes:
    """Return the digest of the elements of a parcel."""
    return xxhash.xxh3_128_digest(data)


def _native(elements: HostArray) -> HostArray:
    """Return elements in the byte order of the host, which that of an array of NumPy may not be."""
    return elements if elements.dtype.isnative else elements.astype(elements.dtype.newbyteorder("="))


class HeldElements:
    """The elements that this process holds. Thread-safe. The state must not change meanwhile."""

    def __init__(self, description: TreeDescription) -> None:
        """Hold the state of this process, described with the numbers of leaves of the tree of the job."""
        self._description = description

    def parcel(self, parcel: Parcel) -> memoryview:
        """Return the elements of a parcel, in native byte order: a copy, or the memory of the state itself."""
        return self._elements(parcel.pieces)

    def _elements(self, pieces: Sequence[Piece]) -> memoryview:
        started: list[Pending[HostArray]] = []
        for piece in pieces:
            leaf, handler, boxes = self._description.boxes(piece.leaf, (piece.box,))
            started.extend(handler.view_on_host(leaf, boxes))
        viewed = [_native(pending.result()) for pending in started]
        if len(viewed) == 1 and viewed[0].flags.c_contiguous:
            return memoryview(cast(Any, viewed[0].reshape(-1).view(np.uint8)))
        data = new_bytes(sum([elements.nbytes for elements in viewed]))
        position = 0
        for elements in viewed:
            stop = position + elements.nbytes
            place: HostArray = np.frombuffer(data[position:stop], elements.dtype).reshape(elements.shape)
            copy_elements(place, elements)
            position = stop
        return data

    def digests(self, parcels: Sequence[Parcel], rank: int) -> bytes:
        """Return the digests of the parcels of which this process is a witness, in their order."""
        threads = BackgroundThreads(_DIGEST_THREADS, "ckptcore-digest")
        witnessed = [parcel for parcel in parcels if rank in parcel.witnesses]
        started = [threads.submit(partial(self._digest, parcel)) for parcel in witnessed]
        return b"".join([digest.result() for digest in started])

    def piece_digests(self, parcel: Parcel) -> bytes:
        """Return the digests of the pieces of a parcel, in their order."""
        return b"".join([digest_of(self._elements((piece,))) for piece in parcel.pieces])

    def _digest(self, parcel: Parcel) -> bytes:
        return digest_of(self.parcel(parcel))


class ReplicaServer:
    """Sends parcels to the processes that lost their state, for the time of one recovery."""

    def __init__(self, interface: str, token: bytes, lost: Collection[int]) -> None:
        """Listen, and accept connections. Requests wait for `serve`.

        Args:
            interface: the address of this host to listen on.
            token: the secret of this recovery.
            lost: the ranks that may connect.

        Raises:
            StorageError: the address does not belong to this host.
        """
        self._lost = frozenset(lost)
        self._send: Callable[[int], memoryview] | None = None
        self._changed = threading.Condition()
        self._connected: set[int] = set()
        self._ended: dict[int, str | None] = {}
        self._is_closed = False
        self._listener = Listener(interface, token, self._serve)

    @property
    def address(self) -> tuple[str, int]:
        """Address and port for the processes that lost their state."""
        return self._listener.address

    def serve(self, send: Callable[[int], memoryview], receivers: Collection[int]) -> None:
        """Answer requests until every receiver has ended its recovery.

        Args:
            send: returns the elements of a parcel, by number.
            receivers: the ranks that may need this process. They are connected.

        Raises:
            RankFailedError: a receiver failed, or ended its process.
        """
        with self._changed:
            self._send = send
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended.keys() >= set(receivers))
            failed = {rank: reason for rank in receivers if (reason := self._ended[rank]) is not None}
        if failed:
            reasons = "; ".join([f"rank {rank}: {reason}" for rank, reason in sorted(failed.items())])
            raise RankFailedError(f"the recovery failed on {reasons}. This process has its state")

    def close(self) -> None:
        """Close all connections, and stop to listen."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        """Serve the connection of a process that lost its state."""
        header, _ = connection.receive(no_payload)
        rank = header.get("rank")
        if type(rank) is not int or rank not in self._lost or header.get("op") != "hello":
            raise MessageError(f"expected the rank of a process that lost its state, received {rank!r:.80}")
        with self._changed:
            if rank in self._connected:
                raise MessageError(f"rank {rank} is connected already")
            self._connected.add(rank)
        reason: str | None = "it closed its connection before it had its state"
        try:
            connection.send({"op": "hello"})
            reason = self._answer(connection, rank)
        finally:
            with self._changed:
                self._ended[rank] = reason
                self._changed.notify_all()

    def _answer(self, connection: Connection, rank: int) -> str | None:
        """Answer requests until the last one. Return the error of the other process, or None if it has its state."""
        while True:
            header, _ = connection.receive(no_payload)
            match header:
                case {"op": "parcel", "number": int() as number}:
                    try:
                        answer, data = self._parcel(number)
                    except Exception as error:  # of a device, for example: another holder is asked
                        logger.exception("this process cannot send parcel %d to rank %d", number, rank)
                        answer, data = error_header(error), memoryview(b"")
                    with contextlib.suppress(OSError):  # the reason of the other process is received next
                        connection.send(answer, data)
                case {"op": "end", "error": str() | None as error, "refusal": str() | None as refusal}:
                    if refusal is not None:
                        logger.error("rank %d refused the bytes of this process: %s", rank, refusal)
                    return error
                case _:
                    raise MessageError(f"unknown request {str(header.get('op'))[:80]!r}")

    def _parcel(self, number: int) -> tuple[Header, memoryview]:
        with self._changed:
            self._changed.wait_for(lambda: self._send is not None or self._is_closed)
            send = self._send
        if send is None:
            raise StorageError("the recovery has ended")
        return {"number": number}, send(number)
