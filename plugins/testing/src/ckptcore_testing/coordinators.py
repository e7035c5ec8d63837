"""Conformance tests of coordinators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from ckptcore.errors import CoordinationTimeoutError
from ckptcore.protocols import Coordinator, GathersInGroups, ReportsAwaited

T = TypeVar("T")


class CoordinatorTests:
    """Conformance tests of a coordinator. Subclass it and define `run`.

    Attributes:
        sizes: numbers of ranks to test with.
        short_seconds: deadline in tests with missing ranks.
        long_seconds: deadline in tests without missing ranks.
    """

    sizes: Sequence[int] = (1, 2, 4)
    short_seconds: float = 0.5
    long_seconds: float = 60.0

    def run(self, size: int, job: Callable[[Coordinator], T], *, timeout_seconds: float) -> Sequence[T]:
        """Run `job` once on each of `size` ranks with its coordinator. Return the results by rank.

        `job` and its results can be pickled, so that ranks can be processes.

        Args:
            size: the number of ranks.
            job: the function that each rank calls.
            timeout_seconds: the deadline of each exchange.
        """
        raise NotImplementedError("define the method `run`")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise tests with the sizes."""
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", list(self.sizes))
        if "several" in metafunc.fixturenames:
            metafunc.parametrize("several", [size for size in self.sizes if size > 1])

    def test_ranks_are_numbered_from_zero(self, size: int) -> None:
        assert list(self.run(size, _rank_and_size, timeout_seconds=self.long_seconds)) == [
            (rank, size) for rank in range(size)
        ]

    def test_gather_returns_payloads_in_order_of_rank(self, size: int) -> None:
        gathered = self.run(size, _gather_names, timeout_seconds=self.long_seconds)
        assert gathered[0] == [b"rank %d" % rank for rank in range(size)]
        assert all(result is None for result in gathered[1:])

    @pytest.mark.parametrize("nbytes", [0, 1, 3_000_000])
    def test_every_rank_receives_a_broadcast(self, size: int, nbytes: int) -> None:
        received = self.run(size, _Broadcast(bytes(range(256)) * (nbytes // 256) + b"\0" * (nbytes % 256)),
                            timeout_seconds=self.long_seconds)  # fmt: skip
        assert [len(data) for data in received] == [nbytes] * size
        assert len(set(received)) == 1

    @pytest.mark.parametrize("nbytes", [0, 1, 3_000_000])
    def test_gather_returns_any_bytes_unchanged(self, size: int, nbytes: int) -> None:
        gathered = self.run(size, _Gather(nbytes), timeout_seconds=self.long_seconds)[0]
        assert gathered == [bytes([rank]) * nbytes for rank in range(size)]

    def test_many_exchanges_are_independent(self, size: int) -> None:
        for rank, results in enumerate(self.run(size, _many_exchanges, timeout_seconds=self.long_seconds)):
            assert results == [b"%d" % number for number in range(50)], f"rank {rank}"

    def test_a_broadcast_can_be_sent_before_it_is_received(self, size: int) -> None:
        """The leader can be several exchanges ahead of the others."""
        for results in self.run(size, _backwards, timeout_seconds=self.long_seconds):
            assert results == [b"second", b"first"]

    def test_exchanges_can_run_on_several_threads_at_once(self, size: int) -> None:
        for results in self.run(size, _exchanges_on_threads, timeout_seconds=self.long_seconds):
            assert results == {f"thread {number}": b"%d" % number for number in range(4)}

    def test_the_error_of_the_leader_names_missing_ranks(self, several: int, tmp_path: Path) -> None:
        job = _AbsentFromGather(several - 1, str(tmp_path), self.long_seconds)
        # This timeout is long, because the server of the exchange can be another process, which a busy machine delays.
        outcomes = self.run(several, job, timeout_seconds=max(5.0, self.short_seconds))
        assert outcomes[0] == [several - 1], "CoordinationTimeoutError.missing names the rank"

    def test_the_error_of_a_rank_names_a_missing_leader(self, several: int) -> None:
        outcomes = self.run(several, _absent_leader, timeout_seconds=self.short_seconds)
        assert outcomes[1:] == [[0]] * (several - 1), "CoordinationTimeoutError.missing names the leader"

    def test_the_leader_reports_the_ranks_that_it_waits_for(self, several: int) -> None:
        """The leader reports the last rank until that rank sends its payload, if the coordinator supports reports."""
        awaited = self.run(several, _awaited_in_gather, timeout_seconds=self.long_seconds)[0]
        assert awaited in (None, [several - 1])

    def test_a_broadcast_can_be_repeated_after_a_timeout(self, several: int) -> None:
        """The leader can be one deadline later than the others, if it has waited for missing ranks before."""
        received = self.run(several, _LateLeader(1.5 * self.short_seconds), timeout_seconds=self.short_seconds)
        assert received == [b"late"] * several

    def test_groups_exchange_messages_independently(self, several: int) -> None:
        """A pair of ranks and all others exchange at the same time, if the coordinator supports groups."""
        results = self.run(several, _groups, timeout_seconds=self.long_seconds)
        if results[0] is None:
            return
        last = several - 1
        assert results[last] == (0, 2, [b"rank %d" % last, b"rank 0"], b"of %d" % last), "the first of a group leads"
        assert results[0] == (1, 2, None, b"of %d" % last)
        for rank in range(1, last):
            names = [b"rank %d" % other for other in range(1, last)] if rank == 1 else None
            assert results[rank] == (rank - 1, several - 2, names, b"of 1")

    def test_the_error_of_the_leader_of_a_group_names_missing_ranks(self, several: int) -> None:
        outcomes = self.run(several, _absent_from_group, timeout_seconds=self.short_seconds)
        assert outcomes[0] in (None, [1]), "CoordinationTimeoutError.missing has the ranks of the group"


@dataclass(frozen=True, slots=True)
class _LateLeader:
    """A job whose leader broadcasts `seconds` later than the others, which retry after timeouts."""

    seconds: float

    def __call__(self, coordinator: Coordinator) -> bytes:
        if coordinator.rank == 0:
            time.sleep(self.seconds)
            return coordinator.broadcast("late", b"late")
        for _ in range(30):
            with suppress(CoordinationTimeoutError):
                return coordinator.broadcast("late", None)
        return b""


def _rank_and_size(coordinator: Coordinator) -> tuple[int, int]:
    return coordinator.rank, coordinator.size


def _gather_names(coordinator: Coordinator) -> list[bytes] | None:
    gathered = coordinator.gather("names", b"rank %d" % coordinator.rank)
    return None if gathered is None else list(gathered)


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """A job with one broadcast."""

    payload: bytes

    def __call__(self, coordinator: Coordinator) -> bytes:
        return coordinator.broadcast("payload", self.payload if coordinator.rank == 0 else None)


@dataclass(frozen=True, slots=True)
class _Gather:
    """A job that gathers `nbytes` from each rank."""

    nbytes: int

    def __call__(self, coordinator: Coordinator) -> list[bytes] | None:
        gathered = coordinator.gather("payload", bytes([coordinator.rank]) * self.nbytes)
        return None if gathered is None else list(gathered)


def _awaited_in_gather(coordinator: Coordinator) -> list[int] | None:
    """Gather, with the last rank late. The last rank starts once the leader has reported that only it is missing."""
    if not isinstance(coordinator, ReportsAwaited):
        return None
    last = coordinator.size - 1
    if coordinator.rank == last:
        coordinator.broadcast("seen", None)
    if coordinator.rank != 0:
        coordinator.gather("late", b"")
        if coordinator.rank != last:
            coordinator.broadcast("seen", None)
        return None
    gathering = threading.Thread(target=coordinator.gather, args=("late", b""))
    gathering.start()
    awaited: list[int] = []
    while awaited != [last]:
        awaited = list(coordinator.awaited("late"))
        time.sleep(0.005)
    coordinator.broadcast("seen", b"")
    gathering.join()
    return awaited


def _many_exchanges(coordinator: Coordinator) -> list[bytes]:
    """Run a hundred exchanges."""
    results = []
    for number in range(50):
        gathered = coordinator.gather(f"gather {number}", b"%d" % number)
        chosen = None if gathered is None else gathered[-1]
        results.append(coordinator.broadcast(f"broadcast {number}", chosen))
    return results


def _backwards(coordinator: Coordinator) -> list[bytes]:
    """Run two broadcasts that other ranks receive in reverse order."""
    if coordinator.rank == 0:
        first, second = coordinator.broadcast("first", b"first"), coordinator.broadcast("second", b"second")
        return [second, first]
    return [coordinator.broadcast("second", None), coordinator.broadcast("first", None)]


def _exchanges_on_threads(coordinator: Coordinator) -> dict[str, bytes]:
    """Run several exchanges concurrently, on threads other than the main thread."""
    results: dict[str, bytes] = {}

    def exchange(number: int) -> None:
        gathered = coordinator.gather(f"gather {number}", b"%d" % number)
        chosen = None if gathered is None else gathered[0]
        results[f"thread {number}"] = coordinator.broadcast(f"broadcast {number}", chosen)

    threads = [threading.Thread(target=exchange, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@dataclass(frozen=True, slots=True)
class _AbsentFromGather:
    """A gather without one rank. Returns the missing ranks that the leader's error names.

    The other ranks first wait for each other's files, because on a busy machine one rank could start after the deadline
    of the others.

    Attributes:
        absent: the missing rank.
        directory: a directory for the files, visible to all ranks.
        seconds: how long to wait for the files.
    """

    absent: int
    directory: str
    seconds: float

    def __call__(self, coordinator: Coordinator) -> list[int] | None:
        if coordinator.rank == self.absent:
            return None
        self._meet(coordinator)
        try:
            coordinator.gather("incomplete", b"here")
        except CoordinationTimeoutError as error:
            return list(error.missing)
        return None

    def _meet(self, coordinator: Coordinator) -> None:
        Path(self.directory, str(coordinator.rank)).touch()
        present = [Path(self.directory, str(rank)) for rank in range(coordinator.size) if rank != self.absent]
        deadline = time.monotonic() + self.seconds
        while not all(file.exists() for file in present):
            assert time.monotonic() < deadline, "a rank that is present did not start"
            time.sleep(0.001)


def _absent_leader(coordinator: Coordinator) -> list[int] | None:
    """Run a broadcast without the leader. Return the missing ranks that the error names."""
    if coordinator.rank == 0:
        return None
    try:
        coordinator.broadcast("incomplete", None)
    except CoordinationTimeoutError as error:
        return list(error.missing)
    return None


def _groups(coordinator: Coordinator) -> tuple[int, int, list[bytes] | None, bytes] | None:
    """Exchange in two groups: the last and the first rank, and all others. None if groups are not supported."""
    if not isinstance(coordinator, GathersInGroups):
        return None
    last = coordinator.size - 1
    ranks = (last, 0) if coordinator.rank in (0, last) else tuple(range(1, last))
    group = coordinator.within(ranks)
    gathered = group.gather(f"names of {ranks[0]}", b"rank %d" % coordinator.rank)
    received = group.broadcast(f"from {ranks[0]}", b"of %d" % ranks[0] if group.rank == 0 else None)
    # A gather of all ranks, as at the end of a save, because the leader of the job must not exit before the others.
    coordinator.gather("all groups are done", b"")
    return group.rank, group.size, None if gathered is None else list(gathered), received


def _absent_from_group(coordinator: Coordinator) -> list[int] | None:
    """Gather in a group of the first and the last rank, without the last. Return the missing ranks of the error.

    Returns an empty list if no error was raised. Returns None on other ranks, and if groups are not supported.
    """
    if coordinator.rank or not isinstance(coordinator, GathersInGroups):
        return None
    try:
        coordinator.within((0, coordinator.size - 1), deadlines=2).gather("incomplete", b"here")
    except CoordinationTimeoutError as error:
        return list(error.missing)
    return []
