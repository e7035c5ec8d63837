"""Gathering in blocks of ranks. In large jobs the leader gets one message for each block.

The number of messages of other ranks does not grow with the job.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, run_ranks

import ckptcore
from ckptcore.errors import CheckpointError, CoordinationTimeoutError, RankFailedError
from ckptcore.job.agreement import Agreement
from ckptcore.job.gathering import Gathering
from ckptcore.model import JSON, HostArray
from ckptcore.protocols import Coordinator, GathersInGroups

_LONG_SECONDS = 60.0


class _Counts:
    """Counts of messages and bytes between different ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def note(self, rank: int, payloads: Sequence[bytes]) -> None:
        with self.lock:
            self.messages[rank] += len(payloads)
            self.received[rank] += sum(map(len, payloads))


class _Counting:
    """A coordinator that counts messages by their ranks in the job, also within a group."""

    def __init__(self, coordinator: Coordinator, rank: int, counts: _Counts) -> None:
        self._coordinator = coordinator
        self._of_job = rank
        self._counts = counts
        self.rank, self.size = coordinator.rank, coordinator.size

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> _Counting:
        assert isinstance(self._coordinator, GathersInGroups)
        return _Counting(self._coordinator.within(ranks, deadlines=deadlines), self._of_job, self._counts)

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        gathered = self._coordinator.gather(key, payload)
        self._counts.note(self._of_job, [payload] if gathered is None else gathered[1:])
        return gathered

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        told = self._coordinator.broadcast(key, payload)
        self._counts.note(self._of_job, [told])
        return told


class _Alone:
    """A coordinator without groups."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.rank, self.size = coordinator.rank, coordinator.size
        self.gather, self.broadcast = coordinator.gather, coordinator.broadcast


class _Unanswered:
    """A coordinator that fails on rank 2, while it waits for its block. The error names no missing rank."""

    def __init__(self, coordinator: Coordinator, rank: int) -> None:
        self._coordinator = coordinator
        self._of_job = rank
        self.rank, self.size = coordinator.rank, coordinator.size
        self.broadcast = coordinator.broadcast

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> _Unanswered:
        assert isinstance(self._coordinator, GathersInGroups)
        return _Unanswered(self._coordinator.within(ranks, deadlines=deadlines), self._of_job)

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        if self._of_job == 2 and key.endswith("write/block-1"):
            raise CoordinationTimeoutError("the store has not answered", [])
        return self._coordinator.gather(key, payload)


def test_ranks_of_a_silent_group_leader_are_missing() -> None:
    """The leader of their block failed, so their messages are lost."""

    def of_rank(coordinator: Coordinator) -> str:
        agreement = Agreement(_Unanswered(coordinator, coordinator.rank), "save", block_ranks=2)
        try:
            with agreement.stage("describe"):
                pass
            with agreement.stage("write"):
                if coordinator.rank == 3:
                    raise OSError("the disk is full")
        except (CheckpointError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return "agreed"

    leader, *others = ThreadJob(6, timeout_seconds=_LONG_SECONDS).run(of_rank)
    assert leader.startswith("CoordinationTimeoutError") and "[3]" in leader
    assert "agreed" not in others and all("rank 3" in outcome or "disk" in outcome for outcome in others)


@pytest.mark.parametrize(("size", "block_ranks"), [(2, 1), (3, 2), (7, 3), (9, 3), (13, 4), (5, 8)])
def test_the_leader_gets_all_messages_in_the_order_of_ranks(size: int, block_ranks: int) -> None:
    def of_rank(coordinator: Coordinator) -> tuple[Sequence[bytes] | None, bytes, bytes]:
        gathering = Gathering(coordinator, block_ranks=block_ranks)
        gathered = gathering.gather("here", b"%d" % coordinator.rank * coordinator.rank)
        leads = coordinator.rank == 0
        told = gathering.broadcast("all", b"to all" if leads else None)
        return (
            gathered,
            told,
            gathering.broadcast_to_blocks("block", (lambda block: b"%d" % block[-1]) if leads else None),
        )

    results = ThreadJob(size, timeout_seconds=_LONG_SECONDS).run(of_rank)
    assert results[0][0] == [b"%d" % rank * rank for rank in range(size)]
    last = [min(rank // block_ranks * block_ranks + block_ranks, size) - 1 for rank in range(size)]
    if size <= block_ranks:
        last = [size - 1] * size
    for rank, (gathered, told, of_block) in enumerate(results):
        assert (gathered is None) == (rank > 0) and told == b"to all" and of_block == b"%d" % last[rank]


def test_a_coordinator_without_groups_gathers_all_ranks_at_once() -> None:
    def of_rank(coordinator: Coordinator) -> Sequence[bytes] | None:
        return Gathering(_Alone(coordinator), block_ranks=2).gather("here", b"%d" % coordinator.rank)

    assert ThreadJob(5, timeout_seconds=_LONG_SECONDS).run(of_rank)[0] == [b"0", b"1", b"2", b"3", b"4"]


def _stages(size: int, *, absent: Sequence[int] = (), fails: Sequence[int] = (), seconds: float = _LONG_SECONDS,
            counts: _Counts | None = None) -> list[str]:  # fmt: skip
    """Return the results of two stages on each rank, in blocks of 4."""
    counts = counts or _Counts()

    def of_rank(coordinator: Coordinator) -> str:
        if coordinator.rank in absent:
            return "absent"
        agreement = Agreement(_Counting(coordinator, coordinator.rank, counts), "save", block_ranks=4)
        try:
            with agreement.stage("describe") as stage:
                stage.payload = {"rank": coordinator.rank}
            if coordinator.rank == 0:
                assert stage.payloads == [{"rank": rank} for rank in range(size)]
            with agreement.stage("write") as stage:
                stage.payload = b"\n%d\n" % coordinator.rank
                if coordinator.rank in fails:
                    raise OSError("the disk is full")
            if coordinator.rank == 0:
                assert stage.payloads == [b"\n%d\n" % rank for rank in range(size)]
        except (CheckpointError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return "agreed"

    return list(ThreadJob(size, timeout_seconds=seconds).run(of_rank))


def test_messages_to_a_rank_do_not_grow_with_the_job() -> None:
    counts_by_size = {}
    for size in (16, 64):
        counts = _Counts()
        assert set(_stages(size, counts=counts)) == {"agreed"}
        counts_by_size[size] = counts
    small, large = counts_by_size[16], counts_by_size[64]
    for rank in (1, 4, 5, 15):
        assert large.messages[rank] == small.messages[rank]
        assert large.received[rank] <= small.received[rank] + 8, "but for a digit of a rank"
    # In each of two stages the leader gets a message from each other rank of its block, and from each other block.
    # It sends a token to each block, and one verdict to all.
    assert large.messages[0] == 2 * (3 + 15) + 16 + 1
    assert small.messages[0] == 2 * (3 + 3) + 4 + 1


def test_all_ranks_raise_an_error_with_the_failed_rank() -> None:
    ended = _stages(11, fails=[6])
    assert ended.pop(6) == "OSError: the disk is full"
    assert set(ended) == {"RankFailedError: the stage 'write' failed on rank 6: OSError: the disk is full"}


def test_only_the_first_of_many_errors_are_listed() -> None:
    failing = range(1, 23)
    ended = _stages(26, fails=failing)
    told = f"the stage 'write' failed on the ranks {[*failing[:20]]}: OSError: the disk is full; and 2 more ranks"
    assert {ended[rank] for rank in (0, 23, 24, 25)} == {f"RankFailedError: {told}"}


@pytest.mark.parametrize(
    ("absent", "named"),
    [([6], [6]), ([2, 9], [2, 9]), ([4], [4]), ([4, 6], [4]), ([1, 8], [1, 8])],
    ids=["one", "in two blocks", "first of a block", "first and another", "of the leader's block and first of another"],
)
def test_missing_ranks_are_named_on_all_ranks(absent: list[int], named: list[int]) -> None:
    """If the first rank of a block is missing, the leader does not know which other ranks of the block are."""
    ended = _stages(11, absent=absent, seconds=0.7)
    came = [rank for rank in range(11) if rank not in absent]
    assert ended[0].startswith("CoordinationTimeoutError") and f"{named}" in ended[0]
    for rank in came[1:]:
        if rank // 4 * 4 in absent or rank in absent:
            continue
        assert ended[rank].startswith("RankFailedError"), (rank, ended[rank])
        assert f"{named}" in ended[rank] and "CoordinationTimeoutError" in ended[rank]


def test_the_error_of_the_leader_has_the_missing_ranks() -> None:
    def of_rank(coordinator: Coordinator) -> Sequence[int]:
        if coordinator.rank in (3, 7):
            return ()
        try:
            Gathering(coordinator, block_ranks=4).gather("here", b"")
        except CoordinationTimeoutError as error:
            return error.missing
        return ()

    assert ThreadJob(10, timeout_seconds=0.5).run(of_rank)[0] == (3, 7)


def test_responses_to_an_earlier_operation_are_refused_as_stale() -> None:
    """Rank 5 was restarted, and receives a message for its earlier process."""
    job = ThreadJob(6, timeout_seconds=_LONG_SECONDS)

    def stage(rank: int) -> None:
        with Agreement(job.coordinator(rank), "save", block_ranks=2).stage("describe"):
            pass

    threads = [threading.Thread(target=stage, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    class Again:
        """A coordinator of the restarted rank. It sends nothing, and reads the messages of the earlier operation."""

        rank, size = 5, 6

        def __init__(self, coordinator: Coordinator) -> None:
            self._coordinator = coordinator
            self.broadcast: Callable[[str, bytes | None], bytes] = coordinator.broadcast

        def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> Again:
            assert isinstance(self._coordinator, GathersInGroups)
            return Again(self._coordinator.within(ranks, deadlines=deadlines))

        def gather(self, key: str, payload: bytes) -> None:
            pass

    with (
        pytest.raises(RankFailedError, match="stale message"),
        Agreement(Again(job.coordinator(5)), "save", block_ranks=2).stage("describe"),
    ):
        pass


def test_a_large_job_saves_and_loads(tmp_path: Path) -> None:
    """The job has more ranks than a block. Its state has a sharded array, and an array that every rank holds."""
    size, rows = 72, 144

    def of_rank(rank: int, context: ckptcore.Context) -> None:
        first = 2 * rank
        elements: HostArray = np.arange(first * 3, first * 3 + 6, dtype=np.int32).reshape(2, 3)
        state: dict[str, object] = {
            "rows": ckptcore.ShardedArray.part(elements, (first, 0), (rows, 3), cuts=(range(2, rows, 2), ())),
            "same": np.arange(7),
            "name": "large",
        }
        ckptcore.save(tmp_path / "saved", state, context=context)

    run_ranks(size, of_rank, timeout_seconds=_LONG_SECONDS, io=ckptcore.context.IOOptions(threads=1), durability="none")
    loaded = ckptcore.load(tmp_path / "saved")
    np.testing.assert_array_equal(loaded["rows"], np.arange(rows * 3).reshape(rows, 3))
    np.testing.assert_array_equal(loaded["same"], np.arange(7))
    assert loaded["name"] == "large"


def test_messages_can_be_any_json() -> None:
    told: list[JSON] = [None, 3, "a\nb", [1, {"b": None}]]

    def of_rank(coordinator: Coordinator) -> None:
        agreement = Agreement(coordinator, "save", block_ranks=2)
        for number, payload in enumerate(told):
            with agreement.stage(f"stage {number}") as stage:
                stage.payload = payload
            if coordinator.rank == 0:
                assert list(stage.payloads) == [payload] * coordinator.size

    ThreadJob(5, timeout_seconds=_LONG_SECONDS).run(of_rank)
