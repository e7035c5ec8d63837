"""Keys of exchanges: unique in a job, and the same on every rank without asking."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable

import xxhash

from ckptcore.protocols import Coordinator

__all__ = ["ExchangeCounts", "exchange_counts"]


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
