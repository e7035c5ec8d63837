"""Coordinators of a jax.distributed job over its key-value service. They use no devices. Thread-safe.

`JobService` gives access to the service. Only `service_of_job` uses a private module of JAX.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable
from urllib.parse import quote

from ckptcore.errors import CoordinationTimeoutError, PluginError, RankFailedError

_MODULE = "jax._src.distributed"


@runtime_checkable
class KeyValueClient(Protocol):
    """Methods of the client of JAX's key-value service (``DistributedRuntimeClient`` of jaxlib since 0.4.34).

    Keys are paths; repeated slashes are ignored. Every method can be called in any thread and
    releases the interpreter lock while it waits. Errors are RuntimeErrors whose message begins with
    a gRPC status.
    """

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Set a key. Fails with the status ALREADY_EXISTS if the key is set and overwriting is not allowed."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Wait until a key is set, and return its value. Fails with the status DEADLINE_EXCEEDED after the timeout."""
        ...

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        """Return the keys below a path, with their values."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Delete a key and all keys below it, if they exist."""
        ...


@dataclass(frozen=True, slots=True)
class JobService:
    """The key-value service of a job, as one process sees it.

    Attributes:
        client: client of the service.
        rank, size: rank of this process and number of processes, as passed to
            `jax.distributed.initialize`.
    """

    client: KeyValueClient
    rank: int
    size: int


def service_of_job() -> JobService | None:
    """Return the service of the initialized JAX job, or None if no job is initialized.

    Returns None also after a shutdown, and if JAX is not imported. Thread-safe. Starts no JAX
    backend, unlike `jax.process_index` and `jax.process_count`.

    Raises:
        PluginError: if this version of JAX is not supported.
    """
    # JAX has no public access to its service. Orbax uses the same path in multihost.py.
    if sys.modules.get("jax") is None:
        return None
    try:
        state = importlib.import_module(_MODULE).global_state
        client, rank, size = state.client, state.process_id, state.num_processes
    except (ImportError, AttributeError) as error:
        raise _unsupported_version(str(error)) from error
    if client is None:
        return None
    if not isinstance(client, KeyValueClient):
        raise _unsupported_version(f"its client is a {type(client).__name__} without key-value methods")
    return JobService(client, int(rank), int(size))


def _unsupported_version(problem: str) -> PluginError:
    version = getattr(sys.modules.get("jax"), "__version__", "unknown")
    return PluginError(
        f"jax {version} is not supported: ckptcore-jax expects the key-value service of a job in "
        f"{_MODULE}.global_state: {problem}; upgrade ckptcore-jax, or use "
        "Context(job=JobOptions(coordinator=...)) with another coordinator"
    )


_PIECE_BYTES: Final = 1 << 20
"""Maximum size of one value in bytes.

A message of the service, with key and value, has at most 4 MiB (measured with jaxlib 0.4.34: it
accepts a value of 4 MiB less 90 bytes, and returns RESOURCE_EXHAUSTED for 4 MiB). With jaxlib
0.10.2 the limit is 64 MiB, but such messages are slow.
"""
_INLINE_BYTES: Final = 1 << 10
"""Maximum size, in bytes, of a payload that is stored in its head (see `KeyValueCoordinator`) instead of in pieces.

This saves a call, and keeps a listing of the heads of a thousand ranks below 4 MiB.
"""
_WAIT_SECONDS: Final = 1.0
"""Maximum duration of one call that waits for a key, in seconds. Python handles no signals during such a call."""


class KeyValueCoordinator:
    """Coordinator over the key-value service of a JAX job, which runs in process 0.

    A payload is stored as pieces of at most 1 MiB, and a head with the number of pieces. A payload
    of at most 1 KiB is stored in the head itself, without pieces. The last receiver of a payload
    removes it. Keys of an incomplete exchange can remain in the service until the job ends.

    Attributes:
        rank: rank of this process: its id in `jax.distributed.initialize`, or its position in a group (`within`).
            `jax.process_index` can differ.
        size: number of processes of the job or group.
    """

    def __init__(self, client: KeyValueClient, rank: int, size: int, *, timeout_seconds: float = 600.0) -> None:
        """Create the coordinator. Does no I/O.

        Args:
            client: client of the service.
            rank, size: rank of this process and number of processes.
            timeout_seconds: maximum time that an exchange waits for other ranks.
        """
        self._client: Final = client
        self.rank: Final = rank
        self.size: Final = size
        self._timeout_seconds: Final = timeout_seconds

    @classmethod
    def of_job(cls, *, timeout_seconds: float = 600.0) -> KeyValueCoordinator:
        """Return a new coordinator of the initialized JAX job, with its own timeout.

        JAX terminates all processes if one process sends no heartbeat for
        ``heartbeat_timeout_seconds``, an argument of `jax.distributed.initialize` (default: 100).
        Use a shorter timeout to get an error first.

        Raises:
            PluginError: if JAX is not initialized, or if this version of JAX is not supported.
        """
        service = service_of_job()
        if service is None:
            raise PluginError(
                "jax.distributed is not initialized in this process: call jax.distributed.initialize() first"
            )
        return cls(service.client, service.rank, service.size, timeout_seconds=timeout_seconds)

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> KeyValueCoordinator:
        """Return the coordinator of a group of ranks. See `ckptcore.protocols.GathersInGroups`."""
        rank, seconds = ranks.index(self.rank), self._timeout_seconds * deadlines
        return KeyValueCoordinator(self._client, rank, len(ranks), timeout_seconds=seconds)

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Gather payloads at the leader. See `ckptcore.protocols.Coordinator`.

        Only the leader waits. It then removes the payloads, also after an error.
        """
        prefix = f"ckptcore/gather/{quote(key, safe='')}"
        if self.rank:
            self._set_payload(prefix, payload)
            return None
        if self.size == 1:
            return [payload]
        try:
            return [payload, *self._wait_for_payloads(key, prefix, range(1, self.size))]
        finally:
            self._remove(prefix)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Send the leader's payload to all. See `ckptcore.protocols.Coordinator`.

        The leader does not wait. The last rank to receive the payload removes it.
        """
        if (payload is None) == (self.rank == 0):
            raise PluginError(f"broadcast {key!r}: the leader must pass a payload, and other ranks must not")
        prefix = f"ckptcore/broadcast/{quote(key, safe='')}"
        if payload is not None:
            if self.size > 1:
                self._set_payload(prefix, payload)
            return payload
        (received,) = self._wait_for_payloads(key, prefix, [0])
        if self._is_last(prefix):
            self._remove(prefix)
        return received

    def awaited(self, key: str) -> Sequence[int]:
        """Return the ranks for which this rank waits: ranks missing in a gather if it is the leader, else the leader.

        See `ckptcore.protocols.ReportsAwaited`.
        """
        if self.rank:
            return (0,)
        others = range(1, self.size)
        heads = self._heads(f"ckptcore/gather/{quote(key, safe='')}", others)
        return [rank for rank in others if rank not in heads]

    def _set_payload(self, prefix: str, payload: bytes) -> None:
        """Set the payload of this rank. The head is set last, so all pieces exist once the head exists."""
        inline = len(payload) <= _INLINE_BYTES
        starts = range(0, 0 if inline else len(payload), _PIECE_BYTES)
        try:
            for number, start in enumerate(starts):
                piece = payload[start : start + _PIECE_BYTES]
                self._client.key_value_set_bytes(_piece_key(prefix, self.rank, number), piece, True)
            head = b"%d\n" % len(starts) + (payload if inline else b"")
            self._client.key_value_set_bytes(_head_key(prefix, self.rank), head, True)
        except RuntimeError as error:
            raise _service_error(error) from error

    def _wait_for_payloads(self, key: str, prefix: str, ranks: Sequence[int]) -> Sequence[bytes]:
        """Wait for the payloads of these ranks, and return them."""
        deadline = time.monotonic() + self._timeout_seconds
        heads: dict[int, bytes] = {}
        for rank in ranks:
            head = self._wait(_head_key(prefix, rank), deadline)
            if head is None:
                heads.update(self._heads(prefix, ranks))
                missing = [rank for rank in ranks if rank not in heads]
                if missing:
                    raise self._timed_out(key, missing)
                break  # the missing heads were set meanwhile
            heads[rank] = head
        return [self._read_payload(key, prefix, rank, heads[rank]) for rank in ranks]

    def _read_payload(self, key: str, prefix: str, rank: int, head: bytes) -> bytes:
        count, _, inline = head.partition(b"\n")
        pieces = []
        for number in range(int(count)):
            piece = self._wait(_piece_key(prefix, rank, number), time.monotonic() + self._timeout_seconds)
            if piece is None:  # another process has removed it: the head was set after all pieces
                raise self._timed_out(key, [rank])
            pieces.append(piece)
        return b"".join(pieces) if pieces else inline

    def _wait(self, name: str, deadline: float) -> bytes | None:
        """Return the value of a key, or None if no process sets the key before the deadline."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._client.blocking_key_value_get_bytes(name, 1 + int(1000 * min(left, _WAIT_SECONDS)))
            except RuntimeError as error:
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise _service_error(error) from error
            if not left:
                return None

    def _heads(self, prefix: str, ranks: Sequence[int]) -> Mapping[int, bytes]:
        """Return the heads that are set, by rank."""
        try:
            heads = self._client.key_value_dir_get_bytes(f"{prefix}/head")
        except RuntimeError as error:
            raise _service_error(error) from error
        names = {_head_key(prefix, rank): rank for rank in ranks}
        return {names[name]: value for name, value in heads if name in names}

    def _is_last(self, prefix: str) -> bool:
        """Count this rank as a receiver of a payload. Return True if it is the last receiver."""
        counter = f"{prefix}/came"
        waiting = self.size - 1
        try:
            increment = getattr(self._client, "key_value_increment", None)
            if increment is not None:
                return int(increment(counter, 1)) == waiting
            # Older versions have no counter. The service handles calls one after another, so the
            # last rank sees the keys of all ranks.
            self._client.key_value_set_bytes(f"{counter}/{self.rank}", b"", True)
            return len(self._client.key_value_dir_get_bytes(counter)) == waiting
        except RuntimeError as error:
            raise _service_error(error) from error

    def _remove(self, prefix: str) -> None:
        try:
            self._client.key_value_delete(prefix)
        except RuntimeError as error:
            raise _service_error(error) from error

    def _timed_out(self, key: str, missing: Sequence[int]) -> CoordinationTimeoutError:
        return CoordinationTimeoutError(
            f"{len(missing)} of {self.size} ranks did not reach the exchange {key!r} within "
            f"{self._timeout_seconds:g} s: {list(missing)}; check their logs. If they were only late, set "
            "Context(job=JobOptions(coordinator=KeyValueCoordinator.of_job(timeout_seconds=...))) on every process",
            missing,
        )


def coordinator_of_job() -> JobCoordinator | None:
    """Return the coordinator of this process's job, or None without a job or for one process.

    The coordinator is the same object until `jax.distributed.shutdown`. After another
    `jax.distributed.initialize` it is a new one.

    Raises:
        PluginError: if this version of JAX is not supported.
    """
    return _job_coordinators().of(service_of_job())


class JobCoordinator(KeyValueCoordinator):
    """Coordinator of one initialized JAX job. A `ckptcore.protocols.Rejoinable`.

    A program can shut its job down and initialize another one with some of the same processes.
    Saves and loads then use the new job.
    """

    def __init__(self, client: KeyValueClient, rank: int, size: int, *, incarnation: int) -> None:
        """Create the coordinator. Does no I/O.

        Args:
            client, rank, size: see `KeyValueCoordinator`.
            incarnation: number of the job in this process.
        """
        super().__init__(client, rank, size)
        self.incarnation: Final = incarnation


class _JobCoordinators:
    """The coordinator of this process's job. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: KeyValueClient | None = None
        self._coordinator: JobCoordinator | None = None
        self._count = 0

    def of(self, service: JobService | None) -> JobCoordinator | None:
        """Return the coordinator of a service, or None without a service or for one process.

        Only the latest coordinator is cached, because JAX has one service at a time. The service is
        identified by its client object.
        """
        with self._lock:
            client = None if service is None else service.client
            if client is not self._client:
                self._client, self._coordinator = client, None
            if self._coordinator is None and service is not None and service.size > 1:
                self._count += 1
                coordinator = JobCoordinator(service.client, service.rank, service.size, incarnation=self._count)
                self._coordinator = coordinator
            return self._coordinator


@functools.cache
def _job_coordinators() -> _JobCoordinators:
    return _JobCoordinators()


def _head_key(prefix: str, rank: int) -> str:
    return f"{prefix}/head/{rank}"


def _piece_key(prefix: str, rank: int, number: int) -> str:
    return f"{prefix}/piece/{rank}/{number}"


def _service_error(error: RuntimeError) -> RankFailedError:
    return RankFailedError(
        "the key-value service of the JAX job in process 0 failed, or reports a failed "
        f"process: {error}; check the logs of process 0 and of the processes in this message"
    )
