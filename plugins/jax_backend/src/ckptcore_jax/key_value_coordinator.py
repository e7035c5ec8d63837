"""The processes of a jax.distributed job agreeing through its key-value service: no collective, no device, any thread."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

from ckptcore.errors import CoordinationTimeoutError, PluginError, RankFailedError
from ckptcore_jax.job_service import JobService, KeyValueClient, service_of_job

__all__ = ["JobCoordinator", "KeyValueCoordinator", "coordinator_of_job"]

_PIECE_BYTES: Final = 1 << 20
"""The most that is set at once. A message of the service is at most 4 MiB, value and key together (measured with jaxlib 0.4.34: a
value of 4 MiB less 90 bytes passes, one of 4 MiB is RESOURCE_EXHAUSTED); that of 0.10.2 takes 64 MiB, and is slow to."""
_INLINE_BYTES: Final = 1 << 10
"""Up to this size a payload stands beside its length, which saves a call and keeps a listing of a thousand ranks below 4 MiB."""
_WAIT_SECONDS: Final = 1.0
"""How long one call waits: the interpreter sees no signal meanwhile."""


class KeyValueCoordinator:
    """Agrees through the service by which the processes of a JAX job found each other, which runs in process 0.

    A payload of any size is set in pieces, and removed when the last that waits for it has it. What is left behind where ranks did
    not come stays in the service until the job ends.
    """

    def __init__(self, client: KeyValueClient, rank: int, size: int, *, timeout_seconds: float = 600.0) -> None:
        """Touch nothing yet.

        Args:
            client: of the service.
            rank, size: which process of how many this is.
            timeout_seconds: how long an exchange waits for the others.
        """
        self._client: Final = client
        self._rank: Final = rank
        self._size: Final = size
        self._timeout_seconds: Final = timeout_seconds

    @classmethod
    def of_job(cls, *, timeout_seconds: float = 600.0) -> KeyValueCoordinator:
        """The coordinator of the job for which `jax.distributed.initialize` was called, with a deadline of your choice.

        JAX ends every process of a job one of which is not heard of for ``heartbeat_timeout_seconds`` of
        `jax.distributed.initialize`, 100 by default: an error that is to be seen has an earlier deadline.

        Raises:
            PluginError: if it was not called, or this version of JAX keeps its service where this does not look.
        """
        service = service_of_job()
        if service is None:
            raise PluginError(
                "this process is part of no job of JAX: expected a call of jax.distributed.initialize() before, found none"
            )
        return cls(service.client, service.rank, service.size, timeout_seconds=timeout_seconds)

    @property
    def rank(self) -> int:
        """Which process this is, as `jax.distributed.initialize` was told; `jax.process_index` may number them otherwise."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._size

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> KeyValueCoordinator:
        """See `ckptcore.protocols.GathersInGroups`."""
        place, seconds = ranks.index(self._rank), self._timeout_seconds * deadlines
        return KeyValueCoordinator(self._client, place, len(ranks), timeout_seconds=seconds)

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """See `ckptcore.protocols.Coordinator`; only the leader waits, and removes what came."""
        place = f"ckptcore/gather/{quote(key, safe='')}"
        if self._rank:
            self._give(place, payload)
            return None
        if self._size == 1:
            return [payload]
        try:
            return [payload, *self._take(key, place, range(1, self._size))]
        finally:
            self._remove(place)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """See `ckptcore.protocols.Coordinator`; the leader does not wait, and the last to come removes the payload."""
        if (payload is None) == (self._rank == 0):
            raise PluginError(f"broadcast {key!r}: the leader, and nobody else, gives the payload")
        place = f"ckptcore/broadcast/{quote(key, safe='')}"
        if payload is not None:
            if self._size > 1:
                self._give(place, payload)
            return payload
        (received,) = self._take(key, place, [0])
        if self._is_last(place):
            self._remove(place)
        return received

    def _give(self, place: str, payload: bytes) -> None:
        """Set this rank's payload, what says that it is there last."""
        inline = len(payload) <= _INLINE_BYTES
        starts = range(0, 0 if inline else len(payload), _PIECE_BYTES)
        try:
            for number, start in enumerate(starts):
                piece = payload[start : start + _PIECE_BYTES]
                self._client.key_value_set_bytes(_piece(place, self._rank, number), piece, True)
            head = b"%d\n" % len(starts) + (payload if inline else b"")
            self._client.key_value_set_bytes(_head(place, self._rank), head, True)
        except RuntimeError as error:
            raise _failed(error) from error

    def _take(self, key: str, place: str, ranks: Sequence[int]) -> Sequence[bytes]:
        """Wait for the payloads of these ranks."""
        deadline = time.monotonic() + self._timeout_seconds
        heads: dict[int, bytes] = {}
        for rank in ranks:
            head = self._wait(_head(place, rank), deadline)
            if head is None:
                heads.update(self._heads(place, ranks))
                missing = [rank for rank in ranks if rank not in heads]
                if missing:
                    raise self._timed_out(key, missing)
                break  # those that were waited for came just now, all of them
            heads[rank] = head
        return [self._payload(key, place, rank, heads[rank]) for rank in ranks]

    def _payload(self, key: str, place: str, rank: int, head: bytes) -> bytes:
        count, _, inline = head.partition(b"\n")
        pieces = []
        for number in range(int(count)):
            piece = self._wait(_piece(place, rank, number), time.monotonic() + self._timeout_seconds)
            if piece is None:  # it was set before the head: somebody removed it
                raise self._timed_out(key, [rank])
            pieces.append(piece)
        return b"".join(pieces) if pieces else inline

    def _wait(self, name: str, deadline: float) -> bytes | None:
        """The value of a name; None if it was not set before the deadline."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._client.blocking_key_value_get_bytes(name, 1 + int(1000 * min(left, _WAIT_SECONDS)))
            except RuntimeError as error:
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise _failed(error) from error
            if not left:
                return None

    def _heads(self, place: str, ranks: Sequence[int]) -> Mapping[int, bytes]:
        """What the ranks that came have set."""
        try:
            found = self._client.key_value_dir_get_bytes(f"{place}/head")
        except RuntimeError as error:
            raise _failed(error) from error
        names = {_head(place, rank): rank for rank in ranks}
        return {names[name]: value for name, value in found if name in names}

    def _is_last(self, place: str) -> bool:
        """Whether all other ranks that wait for a payload have it."""
        came = f"{place}/came"
        waiting = self._size - 1
        try:
            increment = getattr(self._client, "key_value_increment", None)
            if increment is not None:
                return int(increment(came, 1)) == waiting
            # Versions before have no counter. The service takes one call after another: who is last sees all.
            self._client.key_value_set_bytes(f"{came}/{self._rank}", b"", True)
            return len(self._client.key_value_dir_get_bytes(came)) == waiting
        except RuntimeError as error:
            raise _failed(error) from error

    def _remove(self, place: str) -> None:
        try:
            self._client.key_value_delete(place)
        except RuntimeError as error:
            raise _failed(error) from error

    def _timed_out(self, key: str, missing: Sequence[int]) -> CoordinationTimeoutError:
        return CoordinationTimeoutError(
            f"after {self._timeout_seconds:g} s of the exchange {key!r}, {len(missing)} of {self._size} ranks had not come: "
            f"{list(missing)}; look at what they were doing",
            missing,
        )


def coordinator_of_job() -> JobCoordinator | None:
    """The coordinator of the job that this process is part of; None where it is part of none, or of one of one process.

    The same until `jax.distributed.shutdown`, and another one after `jax.distributed.initialize` was called again.

    Raises:
        PluginError: this version of JAX keeps its service where this does not look.
    """
    return _job_coordinators().of(service_of_job())


class JobCoordinator(KeyValueCoordinator):
    """The coordinator of a job from `jax.distributed.initialize` to `jax.distributed.shutdown`: a `ckptcore.protocols.Rejoinable`.

    A program that ends its job and begins another one, with processes that it had before and others, goes on in that one.
    """

    def __init__(self, client: KeyValueClient, rank: int, size: int, *, incarnation: int) -> None:
        """Touch nothing yet.

        Args:
            client, rank, size: as of `KeyValueCoordinator`.
            incarnation: see there.
        """
        super().__init__(client, rank, size)
        self._incarnation: Final = incarnation

    @property
    def incarnation(self) -> int:
        """Which one of the jobs that this process was in and saved or loaded with, one after the other, from 1."""
        return self._incarnation


class _JobCoordinators:
    """The coordinator of the job that this process is in; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: KeyValueClient | None = None
        self._coordinator: JobCoordinator | None = None
        self._made = 0

    def of(self, service: JobService | None) -> JobCoordinator | None:
        """That of a service, of which the last one only is known: JAX has one at a time, and a client that lives has an identity."""
        with self._lock:
            client = None if service is None else service.client
            if client is not self._client:
                self._client, self._coordinator = client, None
            if self._coordinator is None and service is not None and service.size > 1:
                self._made += 1
                found = JobCoordinator(service.client, service.rank, service.size, incarnation=self._made)
                self._coordinator = found
            return self._coordinator


@functools.cache
def _job_coordinators() -> _JobCoordinators:
    return _JobCoordinators()


def _head(place: str, rank: int) -> str:
    return f"{place}/head/{rank}"


def _piece(place: str, rank: int, number: int) -> str:
    return f"{place}/piece/{rank}/{number}"


def _failed(error: RuntimeError) -> RankFailedError:
    return RankFailedError(
        f"the key-value service of the JAX job failed, which runs in process 0, or it says that a process is gone: {error}; look at "
        "the logs of process 0 and of those it names"
    )
