"""A job that is simulated in one process: coordinators that count what goes over the wire, and stores that count what is written."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ckptcore.errors import CoordinationTimeoutError, ObjectNotFoundError, UnsupportedVersionError
from ckptcore.model import BLOCK_BYTES, HostArray, ObjectRecord, Segment, WritePlan
from ckptcore.protocols import Buffer, ObjectWriter, PutCondition, StorageAddress, StorageBackend

__all__ = ["CountingStore", "DiscardingStorage", "PlannedSnapshot", "SimulatedCoordinator", "Wire"]

_CHECKSUM_BYTES: Final = 8


class Wire:
    """What is under way between the processes of a simulated job.

    Attributes:
        sent, received: by process, bytes.
        messages: by process, how many it sent and received.
    """

    def __init__(self) -> None:
        """Nothing is under way."""
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.messages: Counter[int] = Counter()
        self._given: dict[tuple[str, int], tuple[int, bytes]] = {}

    def give(self, key: str, place: int, rank: int, payload: bytes) -> None:
        """Put a payload where others find it."""
        if (key, place) in self._given:
            raise ValueError(f"rank {rank} uses the key {key!r} for two exchanges")
        self._given[key, place] = rank, payload
        self.sent[rank] += len(payload)
        self.messages[rank] += 1

    def fetch(self, key: str, place: int, rank: int) -> bytes:
        """Take one away; it is still there for others.

        Raises:
            CoordinationTimeoutError: it was not given.
        """
        if (key, place) not in self._given:
            raise CoordinationTimeoutError(f"{key!r}: rank {place} of the group did not come", [place])
        _, payload = self._given[key, place]
        self.received[rank] += len(payload)
        self.messages[rank] += 1
        return payload

    def forget(self, key: str, place: int) -> None:
        """Let go of what nobody fetches any more."""
        del self._given[key, place]


class SimulatedCoordinator:
    """One process of a job, or of a group of it. Nothing waits: who is asked for has come, or is missing.

    What a rank sends to itself costs nothing.
    """

    def __init__(self, wire: Wire, ranks: Sequence[int], rank: int) -> None:
        """Touch nothing yet.

        Args:
            wire: of the job.
            ranks: those of the group.
            rank: this process, as the job numbers it.
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
    """A snapshot whose elements nobody asks for."""

    def __init__(self, plan: WritePlan) -> None:
        """Of a plan."""
        self.plan = plan

    def take(self, item: int) -> Sequence[HostArray]:
        """Refuse."""
        raise UnsupportedVersionError("no element is moved in a simulation")

    def release(self, item: int) -> None:
        """Nothing is held."""


class CountingStore:
    """Counts objects and their bytes, and makes up checksums of the right number: as good as random, the same in every run."""

    address: StorageAddress | None = None

    def __init__(self, rank: int) -> None:
        """Nothing is written.

        Args:
            rank: the process.
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
    """A storage that counts the bytes that are put, and keeps none.

    Attributes:
        nbytes: that were put.
    """

    def __init__(self) -> None:
        """Nothing was put."""
        self.nbytes = 0

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `ckptcore.protocols.StorageBackend`."""
        self.nbytes += len(data)
        return ""

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `ckptcore.protocols.StorageBackend`."""
        return _DiscardingWriter(self)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Nothing is there."""
        raise ObjectNotFoundError(key)

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """Nothing is there."""
        raise ObjectNotFoundError(key)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Nothing is there."""
        raise ObjectNotFoundError(key)

    def size(self, key: str) -> int:
        """Nothing is there."""
        raise ObjectNotFoundError(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        """Nothing is there."""
        return iter(())

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Nothing is there."""
        return ()

    def delete(self, keys: Sequence[str]) -> None:
        """Nothing is there."""

    def sync(self, keys: Sequence[str]) -> None:
        """Nothing is there."""
