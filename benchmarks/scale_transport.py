"""Transport of a job simulated in one process: coordinators that count messages, and stores that count bytes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ckptcore.errors import CoordinationTimeoutError, ObjectNotFoundError, UnsupportedVersionError
from ckptcore.model import BLOCK_BYTES, HostArray, ObjectRecord, Segment, WritePlan
from ckptcore.protocols import Buffer, ObjectWriter, PutCondition, StorageAddress, StorageBackend

_CHECKSUM_BYTES: Final = 8


class Wire:
    """Messages between the processes of a simulated job.

    Attributes:
        sent, received: bytes, by process.
        messages: number of messages sent and received, by process.
    """

    def __init__(self) -> None:
        """Begin without messages."""
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.messages: Counter[int] = Counter()
        self._given: dict[tuple[str, int], tuple[int, bytes]] = {}

    def give(self, key: str, place: int, rank: int, payload: bytes) -> None:
        """Store a payload for other processes."""
        if (key, place) in self._given:
            raise ValueError(f"rank {rank} uses the key {key!r} for two exchanges")
        self._given[key, place] = rank, payload
        self.sent[rank] += len(payload)
        self.messages[rank] += 1

    def fetch(self, key: str, place: int, rank: int) -> bytes:
        """Receive a payload. Other processes can still receive it.

        Raises:
            CoordinationTimeoutError: it was not sent.
        """
        if (key, place) not in self._given:
            raise CoordinationTimeoutError(f"{key!r}: rank {place} of the group sent nothing", [place])
        _, payload = self._given[key, place]
        self.received[rank] += len(payload)
        self.messages[rank] += 1
        return payload

    def forget(self, key: str, place: int) -> None:
        """Discard a payload."""
        del self._given[key, place]


class SimulatedCoordinator:
    """The coordinator of one process, or of a process in a group. It never waits: a missing payload is an error.

    Payloads of a rank to itself are not counted.
    """

    def __init__(self, wire: Wire, ranks: Sequence[int], rank: int) -> None:
        """Create a coordinator.

        Args:
            wire: the wire of the job.
            ranks: the ranks of the group.
            rank: the rank of this process in the job.
        """
        self._wire = wire
        self._ranks = ranks
        self._of_job = rank
        self.rank = ranks.index(rank)
        self.size = len(ranks)

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> SimulatedCoordinator:
        """See `ckptcore.protocols.GathersInGroups`."""
        return SimulatedCoordinator(self._wire, ranks, self._of_job)

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """See `ckptcore.protocols.Coordinator`."""
        if self.rank:
            self._wire.give(key, self.rank, self._of_job, payload)
            return None
        gathered = [payload]
        for place in range(1, self.size):
            gathered.append(self._wire.fetch(key, place, self._of_job))
            self._wire.forget(key, place)
        return gathered

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """See `ckptcore.protocols.Coordinator`."""
        if payload is None:
            return self._wire.fetch(key, 0, self._of_job)
        self._wire.give(key, 0, self._of_job, payload)
        return payload


class PlannedSnapshot:
    """A snapshot without elements."""

    def __init__(self, plan: WritePlan) -> None:
        """Take the sizes from a plan."""
        self.plan = plan

    def take(self, item: int) -> Sequence[HostArray]:
        """Fail: elements must not be read."""
        raise UnsupportedVersionError("no element is moved in a simulation")

    def release(self, item: int) -> None:
        """Do nothing: no memory is held."""


class CountingStore:
    """A store that records the key and size of each object, with the right number of pseudorandom checksums."""

    address: StorageAddress | None = None

    def __init__(self, rank: int) -> None:
        """Begin without objects.

        Args:
            rank: the rank of the process.
        """
        self._seed = rank
        self.objects: list[ObjectRecord] = []

    def put(self, key: str, data: bytes) -> None:
        """See `ckptcore.protocols.WriteStore`."""
        self._note(key, len(data))

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """See `ckptcore.protocols.WriteStore`."""
        self._note(key, sum(segment.nbytes for segment in segments))

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """See `ckptcore.protocols.WriteStore`."""
        for key, segments in objects:
            self.write(key, segments)

    def _note(self, key: str, nbytes: int) -> None:
        blocks = -(-nbytes // BLOCK_BYTES)
        seed = b"%d %s" % (self._seed, key.encode())
        checksums = hashlib.shake_128(seed).digest(blocks * _CHECKSUM_BYTES)
        self.objects.append(ObjectRecord(key, nbytes, checksums))


class _DiscardingWriter:
    def __init__(self, storage: DiscardingStorage) -> None:
        self._storage = storage

    def write_at(self, offset: int, data: Buffer) -> None:
        self._storage.nbytes += len(data)

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass


class DiscardingStorage(StorageBackend):
    """A storage that counts the written bytes and discards them.

    Attributes:
        nbytes: bytes of all puts and of all object writers.
    """

    def __init__(self) -> None:
        """Begin with zero bytes."""
        self.nbytes = 0

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `ckptcore.protocols.StorageBackend`."""
        self.nbytes += len(data)
        return ""

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `ckptcore.protocols.StorageBackend`."""
        return _DiscardingWriter(self)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `ckptcore.protocols.StorageBackend`. The storage is empty."""
        raise ObjectNotFoundError(key)

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `ckptcore.protocols.StorageBackend`. The storage is empty."""
        raise ObjectNotFoundError(key)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `ckptcore.protocols.StorageBackend`. The storage is empty."""
        raise ObjectNotFoundError(key)

    def size(self, key: str) -> int:
        """See `ckptcore.protocols.StorageBackend`. The storage is empty."""
        raise ObjectNotFoundError(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `ckptcore.protocols.StorageBackend`. The storage is empty."""
        return iter(())

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `ckptcore.protocols.StorageBackend`. The storage is empty."""
        return ()

    def delete(self, keys: Sequence[str]) -> None:
        """See `ckptcore.protocols.StorageBackend`. The storage is empty."""

    def sync(self, keys: Sequence[str]) -> None:
        """See `ckptcore.protocols.StorageBackend`. The storage is empty."""
