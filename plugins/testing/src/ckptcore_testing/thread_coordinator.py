"""A fake job: the ranks are threads of one process and exchange payloads through memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ckptcore.context import Context, JobOptions
from ckptcore.errors import CoordinationTimeoutError, PluginError
from ckptcore.protocols import Coordinator

T = TypeVar("T")


class ThreadJob:
    """A job of ranks with a `ThreadCoordinator` each. Thread-safe.

    Args:
        size: the number of ranks.
        timeout_seconds: how long a rank waits for the others in one exchange.
    """

    def __init__(self, size: int, *, timeout_seconds: float = 60.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._exchanges: dict[str, dict[int, bytes]] = {}

    def coordinator(self, rank: int) -> ThreadCoordinator:
        """Return the coordinator of a rank."""
        return ThreadCoordinator(self, rank)

    def run(self, job: Callable[[Coordinator], T]) -> Sequence[T]:
        """Run `job` on a thread for each rank. Return the results by rank.

        Raises:
            ExceptionGroup: the errors of the ranks, after all have finished.
        """
        results: dict[int, T] = {}
        errors: list[Exception] = []

        def run_rank(rank: int) -> None:
            try:
                results[rank] = job(self.coordinator(rank))
            except Exception as error:  # noqa: BLE001  # raised again on the calling thread
                errors.append(error)

        threads = [threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {self.size} ranks failed", errors)
        return [results[rank] for rank in range(self.size)]

    def _give(self, key: str, rank: int, payload: bytes) -> None:
        with self._changed:
            exchange = self._exchanges.setdefault(key, {})
            if rank in exchange:
                raise PluginError(
                    f"rank {rank} used the key {key!r} for two exchanges. Use a new key for each exchange"
                )
            exchange[rank] = payload
            self._changed.notify_all()

    def _missing(self, key: str, ranks: Sequence[int]) -> Sequence[int]:
        with self._changed:
            exchange = self._exchanges.get(key, {})
            return [rank for rank in ranks if rank not in exchange]

    def _take(self, key: str, ranks: Sequence[int], size: int, timeout_seconds: float) -> Sequence[bytes]:
        """Wait for the payloads of these ranks, and return them."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while True:
                exchange = self._exchanges.setdefault(key, {})
                missing = [rank for rank in ranks if rank not in exchange]
                if not missing:
                    return [exchange[rank] for rank in ranks]
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    raise CoordinationTimeoutError(
                        f"{len(missing)} of {size} ranks did not take part in the exchange {key!r} within "
                        f"{timeout_seconds:g} s: {missing}. Make every rank call it. ThreadJob.run also raises the "
                        "errors of ranks that failed before",
                        missing,
                    )


def run_ranks(
    size: int, work: Callable[[int, Context], T], *, timeout_seconds: float = 60.0, **options: Any
) -> Sequence[T]:
    """Call ``work(rank, context)`` on each rank of a `ThreadJob`. Return the results by rank.

    Args:
        size: the number of ranks.
        work: called on each rank, with the rank and a Context for it.
        timeout_seconds: how long a rank waits for the others in one exchange.
        options: more options of each Context.
    """

    def run(coordinator: Coordinator) -> T:
        return work(coordinator.rank, Context(job=JobOptions(coordinator=coordinator), **options))

    return ThreadJob(size, timeout_seconds=timeout_seconds).run(run)


class ThreadCoordinator:
    """One rank of a `ThreadJob`, or of a group of its ranks. Thread-safe."""

    def __init__(self, job: ThreadJob, rank: int, size: int | None = None, deadlines: int = 1) -> None:
        self._job = job
        self._rank = rank
        self._size = job.size if size is None else size
        self._timeout_seconds = job.timeout_seconds * deadlines

    @property
    def rank(self) -> int:
        """The rank."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> ThreadCoordinator:
        """See `ckptcore.protocols.GathersInGroups`."""
        return ThreadCoordinator(self._job, list(ranks).index(self._rank), len(ranks), deadlines)

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """See `ckptcore.protocols.Coordinator`. Only the leader waits."""
        self._job._give(key, self._rank, payload)
        return self._take(key, range(self.size)) if self._rank == 0 else None

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """See `ckptcore.protocols.Coordinator`. The leader does not wait."""
        if (payload is None) == (self._rank == 0):
            raise PluginError(f"broadcast {key!r}: only the leader must pass a payload")
        if payload is not None:
            self._job._give(key, self._rank, payload)
            return payload
        return self._take(key, (0,))[0]

    def awaited(self, key: str) -> Sequence[int]:
        """See `ckptcore.protocols.ReportsAwaited`."""
        return self._job._missing(key, range(self._size) if self._rank == 0 else (0,))

    def _take(self, key: str, ranks: Sequence[int]) -> Sequence[bytes]:
        return self._job._take(key, ranks, self._size, self._timeout_seconds)
