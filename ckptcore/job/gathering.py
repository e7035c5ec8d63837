"""Gathering and exchanging data between the processes of a job.

A small job tells the leader everything at once. In a larger one ranks stand in blocks, and the first of each block tells the leader what
its block says: the leader takes one message for each block, and no other process does or hears more in a larger job.
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
    """How many operations of each name this process began in each job. Any thread.

    They are counted by job and not by Context, because two Contexts that save to one location would use the same keys: what was
    left of an exchange that failed would be taken for an answer. They are counted by name and not in all, so that a rank that
    missed one operation, because its program failed before it, is apart from the others in that one only.

    A name takes about a hundred bytes for as long as the job lasts: it is kept as a hash.
    """

    def __init__(self) -> None:
        """Nothing was begun."""
        self._lock = threading.Lock()
        self._found: dict[int, int] = {}
        self._given: dict[int, tuple[Callable[[], Coordinator | None], dict[int, int]]] = {}

    def key(self, coordinator: Coordinator | None, name: str) -> str:
        """A key for the exchanges of an operation that begins now.

        Args:
            coordinator: the job that a Context was given, or that this process has joined and may join again; None for any other that
                this process is part of, which is told by a new coordinator each time.
            name: of the operation: where it goes.
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
            # It is dropped without the lock: the garbage collector may come while this thread holds it.
            return weakref.ref(coordinator, functools.partial(_drop, self._given, id(coordinator)))
        except TypeError:
            return lambda: coordinator  # it has slots and none for references: it stays


def _drop(
    given: dict[int, tuple[Callable[[], Coordinator | None], dict[int, int]]], address: int, ended: object
) -> None:
    known = given.get(address)
    if known is not None and known[0] is ended:  # else another object lives there by now
        del given[address]


@functools.cache
def exchange_counts() -> ExchangeCounts:
    """Those of this process."""
    return ExchangeCounts()


BLOCK_RANKS: Final = 64
"""Ranks of a block; a job of up to so many has no blocks."""

_SHOWN: Final = 100
_COMPRESSION: Final = 1
"""What a block says is much alike; zlib's fastest level finds that, and no process waits for a better one."""


class Gathering:
    """The two directions of an exchange. Any thread; keeps nothing."""

    def __init__(self, coordinator: Coordinator, *, block_ranks: int = BLOCK_RANKS) -> None:
        """Go through a coordinator; through groups of its ranks, if it has them and the job is large.

        Args:
            coordinator: the processes.
            block_ranks: how many ranks a block has; the same in every process.
        """
        self._coordinator = coordinator
        self._block_ranks = block_ranks
        self.rank = coordinator.rank
        self.size = coordinator.size
        grouped = isinstance(coordinator, GathersInGroups) and self.size > block_ranks
        self._groups = coordinator if isinstance(coordinator, GathersInGroups) and grouped else None

    @property
    def blocks(self) -> Sequence[range]:
        """The ranks of each block; all of them in one where the job has no blocks."""
        if self._groups is None:
            return (range(self.size),)
        return [
            range(first, min(first + self._block_ranks, self.size)) for first in range(0, self.size, self._block_ranks)
        ]

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Give a payload to the leader: there all of them in order of rank, elsewhere None.

        The first of a block waits for the others of it. Where it did not come itself, nothing is known of the others.

        Raises:
            CoordinationTimeoutError: on the leader, names the ranks that did not come.
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
                raise  # this rank could not even say it
            # Where it names nobody, the store or the like did not answer: then nothing of the others is known here either.
            missing = [block[place] for place in error.missing] or list(block[1:])
        if self.rank != block[0]:
            return None
        relays = range(0, self.size, self._block_ranks)
        batch = b"" if self.rank == 0 else _pack(of_block or (), missing)
        try:
            # The others may come a deadline later than this rank, and wait one for those of their block.
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
        """Get what the leader says to all; the others pass None."""
        return self._told(self._coordinator, key, payload)

    def tell_blocks(self, key: str, say: Callable[[range], bytes] | None) -> bytes:
        """Get what the leader says to this rank's block.

        Args:
            key: of the exchange.
            say: on the leader, what it says to the ranks of a block; None on the others.
        """
        if self._groups is None:
            return self.tell(key, None if say is None else say(range(self.size)))
        if say is None:
            number = self.rank // self._block_ranks
            return self._told(self._groups.within(self._with_leader(number)), f"{key}-{number}", None)
        for number, block in enumerate(self.blocks):
            ranks = self._with_leader(number)
            if len(ranks) > 1:
                self._groups.within(ranks).broadcast(f"{key}-{number}", say(block))
        return say(self._block(0))

    def _told(self, coordinator: Coordinator, key: str, payload: bytes | None) -> bytes:
        """What the leader tells; waits for several deadlines.

        The leader may come up to a deadline later than this rank, and says who is missing when its own is over. Where there are
        blocks, it waits for its own block and twice as long for those who lead the others.
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
