"""ReplicaTransport: a checkpoint transport of torchft, over authenticated connections and with digests.

Importing this module imports PyTorch and torchft. Written for torchft 0.2.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torchft.checkpointing.transport import CheckpointTransport

from ckptcore.errors import CorruptCheckpointError, StorageError
from ckptcore.events import logger_named
from ckptcore.io.threads import BackgroundThreads
from ckptcore_recovery.peers.messages import PIECE_BYTES, Connection, Header, error_header, raise_error
from ckptcore_recovery.replicas.listening import Listener, no_payload, receive_into
from ckptcore_recovery.replicas.sending import digest_of

T = TypeVar("T")

logger = logger_named("ckptcore.recovery")

_THREADS: Final = 4
"""Connections of one transfer, and threads that compute digests."""

_LEAST_SECONDS: Final = 0.001


class _Piece(NamedTuple):
    """A range of bytes of a storage of tensors; half-open."""

    storage: int
    start: int
    stop: int


class _Staged:
    """A state that can be sent.

    Attributes:
        step: its step.
        storages: the bytes of its storages, which tensors with the same memory share.
        pieces: the ranges in which they are sent.
    """

    def __init__(self, step: int, state: object) -> None:
        """Pickle everything but the bytes of tensors, copy storages of devices, and begin to compute digests."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(state)
        self.step = step
        self.storages = [_bytes_of(_on_cpu(storage)) for storage in pickler.storages]
        sizes = [storage.nbytes for storage in self.storages]
        self.pieces = list(_pieces(sizes))
        threads = BackgroundThreads(_THREADS, "ckptcore-digest", daemon=True)
        self._digests = [threads.submit(partial(self._digest, piece)) for piece in self.pieces]
        self._pickled = file.getvalue()
        self._sizes = sizes

    def piece(self, number: int) -> memoryview:
        """Return the bytes of a piece."""
        piece = self.pieces[number]
        return memoryview(cast(Any, self.storages[piece.storage][piece.start : piece.stop]))

    @cached_property
    def head(self) -> bytes:
        """The pickled state, the sizes of the storages, and the digests of the pieces. Waits for the digests."""
        return pickle.dumps((self._pickled, self._sizes, [digest.result() for digest in self._digests]))

    def _digest(self, piece: _Piece) -> bytes:
        return digest_of(memoryview(cast(Any, self.storages[piece.storage][piece.start : piece.stop])))


class ReplicaTransport(CheckpointTransport[T]):  # type: ignore[misc]  # torchft is not installed where types are checked
    """Sends the state of a replica to replicas that are behind, for ``torchft.Manager(checkpoint_transport=...)``.

    Like `torchft.checkpointing.HTTPTransport`, it serves the state from a thread until `disallow_checkpoint`, and a
    replica receives the tensors of the rank with the same position, on the CPU. The other side must prove that it knows
    a token, which `metadata` contains. Each piece of a tensor is compared with the digest that the sender computed when
    it was given the state. Values other than tensors are pickled: a replica runs code that another one sends.
    """

    def __init__(self, timeout: timedelta, *, interface: str = "127.0.0.1") -> None:
        """Listen, and refuse to send until `send_checkpoint` is called.

        Args:
            timeout: the longest time that `disallow_checkpoint` waits for running transfers.
            interface: the IP address of this host at which the other replicas reach it.

        Raises:
            StorageError: the address does not belong to this host.
        """
        self._seconds = timeout.total_seconds()
        self._changed = threading.Condition()
        self._staged: _Staged | None = None
        self._transfers: dict[Connection, _Staged] = {}
        self._is_shut_down = False
        token = secrets.token_bytes(32)
        self._listener = Listener(interface, token, self._serve)
        self._metadata = json.dumps([*self._listener.address, token.hex()])

    def metadata(self) -> str:
        """Return the address and the token of this replica: a secret of the job.

        torchft writes it to its log, at level INFO, when a replica recovers.
        """
        return self._metadata

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Begin to serve a state. Returns once it is pickled and copied from the devices.

        Args:
            dst_ranks: not used: every replica that knows the token may receive.
            step: the step of the state.
            state_dict: the state, which must not change before `disallow_checkpoint` returns.
            timeout: not used.
        """
        staged = _Staged(step, state_dict)
        with self._changed:
            self._staged = staged
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Wait for running transfers, and send nothing until the next `send_checkpoint`.

        After the timeout of the transport, transfers are aborted.
        """
        with self._changed:
            self._staged = None
            if self._changed.wait_for(lambda: not self._transfers, self._seconds):
                return
            late = list(self._transfers)
        logger.error("%d transfers of a checkpoint were aborted after %g s", len(late), self._seconds)
        for connection in late:
            connection.close()
        with self._changed:
            self._changed.wait_for(lambda: self._transfers.keys().isdisjoint(late))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive and verify the state of another replica.

        Args:
            src_rank: its rank, for errors.
            metadata: the result of its `metadata`.
            step: the step to receive.
            timeout: the longest time for everything.

        Raises:
            TimeoutError: it did not send the state in time.
            CorruptCheckpointError: it sent other bytes than it had when it was given the state.
            StorageError: it serves another step, or failed.
        """
        receiver = _Receiver(metadata, step, timeout.total_seconds())
        try:
            return cast(T, receiver.receive())
        except OSError as error:
            if not (receiver.is_late or isinstance(error, TimeoutError)):
                raise
            raise TimeoutError(
                f"receiving the checkpoint of step {step} from rank {src_rank} timed out: {error}. The limit is "
                f"{timeout.total_seconds():g} s"
            ) from error
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"rank {src_rank}, step {step}: {error}") from error

    def shutdown(self, wait: bool = True) -> None:
        """Stop to listen, and abort running transfers.

        Args:
            wait: True to wait until the thread that listens has ended.
        """
        with self._changed:
            self._is_shut_down = True
            self._staged = None
            self._changed.notify_all()
        self._listener.close(wait=wait)

    def _serve(self, connection: Connection) -> None:
        """Send a state to one replica."""
        header, _ = connection.receive(no_payload)
        try:
            staged = self._open(connection, header)
        except StorageError as error:
            connection.send(error_header(error))
            return
        try:
            head = staged.head
            connection.send({"nbytes": len(head)})
            self._answer(connection, staged, head)
        except ConnectionError:
            pass  # the other side closes the connection when it has everything
        finally:
            with self._changed:
                self._transfers.pop(connection, None)
                self._changed.notify_all()

    def _open(self, connection: Connection, header: Any) -> _Staged:
        """Wait until a state may be sent, and count the transfer.

        Further connections of a transfer join it, although no new transfer may begin: `disallow_checkpoint` waits for
        it, so it must end.

        Raises:
            StorageError: it is of another step, or is not given in time.
        """
        with self._changed:
            match header:
                case {"op": "open", "step": int() as step, "seconds": float() | int() as requested}:
                    seconds = min(requested, self._seconds)
                    self._changed.wait_for(lambda: self._staged is not None or self._is_shut_down, seconds)
                    staged = self._staged
                    if staged is None:
                        raise StorageError(f"timed out: no checkpoint was allowed within {seconds:g} s")
                    if staged.step != step:
                        raise StorageError(f"serving step {staged.step}, but step {step} was requested")
                case {"op": "join", "step": int() as step}:
                    staged = next((sent for sent in self._transfers.values() if sent.step == step), None)
                    if staged is None:
                        raise StorageError(f"no transfer of step {step} is running")
                case _:
                    raise StorageError(f"unknown request {str(header)[:80]!r}")
            self._transfers[connection] = staged
            return staged

    def _answer(self, connection: Connection, staged: _Staged, head: bytes) -> None:
        """Send the pieces that are requested, until the other side closes the connection."""
        while True:
            header, _ = connection.receive(no_payload)
            match header:
                case {"op": "head", "offset": int() as offset} if offset >= 0:
                    connection.send({}, head[offset : offset + PIECE_BYTES])
                case {"op": "piece", "number": int() as number} if number >= 0:
                    connection.send({}, staged.piece(number))
                case _:
                    raise StorageError(f"unknown request {str(header)[:80]!r}")


class _Receiver:
    """Receives one state over several connections, which are closed at the deadline.

    Attributes:
        is_late: True after the deadline.
    """

    def __init__(self, metadata: str, step: int, seconds: float) -> None:
        host, port, token = json.loads(metadata)
        self.is_late = False
        self._address = (str(host), int(port))
        self._token = bytes.fromhex(token)
        self._step = step
        self._seconds = seconds
        self._lock = threading.Lock()
        self._connected: list[socket.socket] = []

    def receive(self) -> object:
        """Receive the state. See `ReplicaTransport.recv_checkpoint`."""
        timer = threading.Timer(self._seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            return self._receive()
        finally:
            timer.cancel()

    def _end(self) -> None:
        with self._lock:
            self.is_late = True
            for connected in self._connected:
                with contextlib.suppress(OSError):  # it is closed already
                    connected.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> object:
        with closing(self._connect()) as connection:
            head = bytearray()
            nbytes = self._open(connection, {"op": "open", "step": self._step, "seconds": self._seconds})
            while len(head) < nbytes:
                head += self._ask(connection, {"op": "head", "offset": len(head)})
            pickled, sizes, digests = pickle.loads(head)
            storages = [torch.empty(size, dtype=torch.uint8).untyped_storage() for size in sizes]
            self._receive_pieces(connection, storages, list(zip(_pieces(sizes), digests, strict=True)))
        return _Unpickler(io.BytesIO(pickled), storages).load()

    def _receive_pieces(
        self, first: Connection, storages: Sequence[torch.UntypedStorage], pieces: Sequence[tuple[_Piece, bytes]]
    ) -> None:
        memory = [_bytes_of(storage) for storage in storages]
        numbers = deque(range(len(pieces)))

        def receive(connection: Connection) -> None:
            try:
                while numbers:
                    number = numbers.popleft()
                    piece, digest = pieces[number]
                    place = memoryview(cast(Any, memory[piece.storage][piece.start : piece.stop]))
                    data = self._ask(connection, {"op": "piece", "number": number}, place)
                    if len(data) != len(place) or digest_of(data) != digest:
                        raise CorruptCheckpointError(
                            f"bytes {piece.start} to {piece.stop} of storage {piece.storage} differ from those of the "
                            "state that was given to send_checkpoint: the state changed, or memory is corrupt"
                        )
            except IndexError:
                return  # another thread took the last piece
            except BaseException:
                numbers.clear()  # the other threads end, too
                raise

        def receive_with_own() -> None:
            with closing(self._connect()) as connection:
                self._open(connection, {"op": "join", "step": self._step})
                receive(connection)

        threads = BackgroundThreads(_THREADS, "ckptcore-torchft")
        others: list[Future[None]] = []
        for _ in range(min(_THREADS, len(pieces)) - 1):
            others.append(threads.submit(receive_with_own))
        try:
            receive(first)
        finally:
            threads.join()
        for other in others:
            other.result()

    def _connect(self) -> Connection:
        connected = socket.create_connection(self._address, timeout=max(self._seconds, _LEAST_SECONDS))
        try:
            with self._lock:
                if self.is_late:
                    raise TimeoutError("connected after the deadline")
                self._connected.append(connected)
            return Connection(connected, self._token, is_server=False)
        except BaseException:
            connected.close()
            raise

    def _open(self, connection: Connection, request: Header) -> int:
        """Wait until the state may be sent. Return the bytes of its head."""
        connection.send(request)
        header, _ = connection.receive(no_payload)
        raise_error(header, f"{self._address[0]}:{self._address[1]}")
        return int(header["nbytes"])

    def _ask(self, connection: Connection, request: Header, place: memoryview | None = None) -> memoryview:
        connection.send(request)
        return connection.receive()[1] if place is None else receive_into(connection, place)[1]


def _pieces(sizes: Sequence[int]) -> Iterator[_Piece]:
    """Divide storages into pieces."""
    for number, nbytes in enumerate(sizes):
        for start in range(0, nbytes, PIECE_BYTES):
            yield _Piece(number, start, min(start + PIECE_BYTES, nbytes))


def _on_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage of any device on the CPU; one that is there already is not copied."""
    return cast(Any, storage).cpu()  # type: ignore[no-any-return]


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the memory of a storage on the CPU."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


class _Pickler(pickle.Pickler):
    """Pickles everything but the bytes of tensors, as `torch.save` does. Tensors that share memory keep sharing it.

    Attributes:
        storages: the storages of the tensors, each once.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: object) -> tuple[int, torch.dtype] | None:
        """Return the number of a storage, and the dtype of its elements; None for all other objects."""
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, torch.uint8
        else:
            return None
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number, dtype


class _Unpickler(pickle.Unpickler):
    """Loads what `_Pickler` has pickled."""

    def __init__(self, file: io.BytesIO, storages: Sequence[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: tuple[int, torch.dtype]) -> object:
        """Return a storage. As in `torch.load`, it is typed: that is what tensors of all dtypes are created from."""
        number, dtype = pid
        return cast(Any, torch.storage.TypedStorage)(wrap_storage=self._storages[number], dtype=dtype, _internal=True)
