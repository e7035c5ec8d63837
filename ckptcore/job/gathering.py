"""Gathering and exchanging data between the processes of a job.

In a small job every rank sends its data to the leader. A larger job has blocks of ranks, and the first rank of a block
sends the data of the block: the leader receives one message for each block, and the work of other processes does not
grow with the job.
"""

from __future__ import annotations

import functools
import json
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import xxhash

from ckptcore.errors import CoordinationTimeoutError
from ckptcore.protocols import Coordinator, GathersInGroups

__all__ = [
    "BLOCK_RANKS",
    "ExchangeCounts",
    "Gathering",
    "exchange_counts",
]


class ExchangeCounts:
    """Counts the operations of each name that this process began in each job. Any thread.

    They are counted by job and not by Context, because two Contexts that save to one location would use the same keys:
    a message of a failed exchange would be taken for an answer. They are counted by name and not in total, so that a
    rank that missed one operation, because its program failed before, differs from the others only in that one.

    Names are stored as hashes; each takes about a hundred bytes while the job lasts.
    """

    def __init__(self) -> None:
        """Count nothing yet."""
        self._lock = threading.Lock()
        self._found: dict[int, int] = {}
        self._given: dict[int, tuple[Callable[[], Coordinator | None], dict[int, int]]] = {}

    def key(self, coordinator: Coordinator | None, name: str) -> str:
        """Return a key for the exchanges of an operation that begins now.

        Args:
            coordinator: the job of a Context, or one that this process has joined and may join again; None for a job
                that has a new coordinator for each operation.
            name: the name of the operation, such as its location.
        """
        hashed = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))
        with self._lock:
            counts = self._found if coordinator is None else self._counts_of(coordinator)
            number = counts.get(hashed, 0)
            counts[hashed] = number + 1
        return f"{name}#{number}"

    def _counts_of(self, coordinator: Coordinator) -> dict[int, int]:
        known = self._given.get(id(coordinator))
        if known is not None and known[0]() is coordinator:
            return known[1]
        counts: dict[int, int] = {}
        self._given[id(coordinator)] = (self._reference(coordinator), counts)
        return counts

    def _reference(self, coordinator: Coordinator) -> Callable[[], Coordinator | None]:
        try:
            # The callback does not take the lock: garbage collection can run while this thread holds it.
            return weakref.ref(coordinator, functools.partial(_drop, self._given, id(coordinator)))
        except TypeError:
            return lambda: coordinator  # slots without `__weakref__`: it stays in memory


def _drop(
    given: dict[int, tuple[Callable[[], Coordinator | None], dict[int, int]]], address: int, ended: object
) -> None:
    known = given.get(address)
    if known is not None and known[0] is ended:  # else another object has this address now
        del given[address]


@functools.cache
def exchange_counts() -> ExchangeCounts:
    """Return the counts of this process."""
    return ExchangeCounts()


BLOCK_RANKS: Final = 64
"""The ranks of a block; a job of up to so many ranks has no blocks."""

_SHOWN: Final = 100
_COMPRESSION: Final = 1
"""The fastest level of zlib; the messages of a block are similar, so that it is enough."""


class Gathering:
    """Sends data to the leader and from it. Stateless. Any thread."""

    def __init__(self, coordinator: Coordinator, *, block_ranks: int = BLOCK_RANKS) -> None:
        """Use a coordinator, in blocks if it supports groups and the job is large.

        Args:
            coordinator: connects the processes.
            block_ranks: the number of ranks of a block; equal in every process.
        """
        self._coordinator = coordinator
        self._block_ranks = block_ranks
        self.rank = coordinator.rank
        self.size = coordinator.size
        has_blocks = isinstance(coordinator, GathersInGroups) and self.size > block_ranks
        self._groups = coordinator if isinstance(coordinator, GathersInGroups) and has_blocks else None

    @property
    def blocks(self) -> Sequence[range]:
        """The ranks of each block; one block of all ranks in a small job."""
        if self._groups is None:
            return (range(self.size),)
        return [
            range(first, min(first + self._block_ranks, self.size)) for first in range(0, self.size, self._block_ranks)
        ]

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Send a payload to the leader. Return there all payloads in order of rank; None on the others.

        The first rank of a block waits for the others. If it is missing itself, nothing is known of the others.

        Raises:
            CoordinationTimeoutError: on the leader, with the missing ranks.
        """
        if self._groups is None:
            return self._coordinator.gather(key, payload)
        number = self.rank // self._block_ranks
        block = self._block(number)
        missing: list[int] = []
        of_block: Sequence[bytes] | None = None
        try:
            of_block = self._groups.within(block).gather(f"{key}/block-{number}", payload)
        except CoordinationTimeoutError as error:
            if self.rank != block[0]:
                raise  # this rank could not send its own payload
            # Without names the connection itself failed, and nothing is known of the others.
            missing = [block[place] for place in error.missing] or list(block[1:])
        if self.rank != block[0]:
            return None
        relays = range(0, self.size, self._block_ranks)
        batch = b"" if self.rank == 0 else _pack(of_block or (), missing)
        try:
            # The others may start a deadline later than this rank, and wait one deadline for their blocks.
            batches = self._groups.within(relays, deadlines=2).gather(f"{key}/blocks", batch)
        except CoordinationTimeoutError as error:
            raise self._timed_out(key, [*missing, *[relays[place] for place in error.missing]]) from error
        if batches is None:
            return None
        gathered = list(of_block or ())
        for data in batches[1:]:
            payloads, absent = _unpack(data)
            gathered += payloads
            missing += absent
        if missing:
            raise self._timed_out(key, missing)
        return gathered

    def tell(self, key: str, payload: bytes | None) -> bytes:
        """Return the payload of the leader on every rank; the others pass None."""
        return self._broadcast(self._coordinator, key, payload)

    def tell_blocks(self, key: str, message: Callable[[range], bytes] | None) -> bytes:
        """Return the message of the leader to the block of this rank.

        Args:
            key: the key of the exchange.
            message: on the leader, returns the message to the ranks of a block; None on the others.
        """
        if self._groups is None:
            return self.tell(key, None if message is None else message(range(self.size)))
        if message is None:
            number = self.rank // self._block_ranks
            return self._broadcast(self._groups.within(self._with_leader(number)), f"{key}-{number}", None)
        for number, block in enumerate(self.blocks):
            ranks = self._with_leader(number)
            if len(ranks) > 1:
                self._groups.within(ranks).broadcast(f"{key}-{number}", message(block))
        return message(self._block(0))

    def _broadcast(self, coordinator: Coordinator, key: str, payload: bytes | None) -> bytes:
        """Broadcast from the leader. The other ranks wait for several deadlines.

        The leader may start up to a deadline later than this rank, and reports missing ranks after its own deadline. In
        a job with blocks it waits for its own block, and twice as long for the first ranks of the others.
        """
        if payload is not None:
            return coordinator.broadcast(key, payload)
        for _ in range(1 if self._groups is None else 3):
            try:
                return coordinator.broadcast(key, None)
            except CoordinationTimeoutError:
                continue
        return coordinator.broadcast(key, None)

    def _block(self, number: int) -> range:
        first = number * self._block_ranks
        return range(first, min(first + self._block_ranks, self.size))

    def _with_leader(self, number: int) -> Sequence[int]:
        block = self._block(number)
        return block if number == 0 else (0, *block)

    def _timed_out(self, key: str, missing: Sequence[int]) -> CoordinationTimeoutError:
        ranks = sorted(missing)
        shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
        return CoordinationTimeoutError(
            f"before the deadline of the exchange {key!r}, {len(ranks)} of {self.size} ranks had not come: [{shown}]; "
            f"look at what they were doing. Each {self._block_ranks} ranks are heard through the first of them",
            ranks,
        )


def _pack(payloads: Sequence[bytes], missing: Sequence[int]) -> bytes:
    head = json.dumps({"sizes": list(map(len, payloads)), "missing": list(missing)}, separators=(",", ":"))
    return b"".join((head.encode("ascii"), b"\n", zlib.compress(b"".join(payloads), _COMPRESSION)))


def _unpack(data: bytes) -> tuple[list[bytes], list[int]]:
    line, _, rest = data.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    joined = zlib.decompress(rest)
    payloads = []
    start = 0
    for size in head["sizes"]:
        payloads.append(joined[start : start + size])
        start += size
    return payloads, head["missing"]
