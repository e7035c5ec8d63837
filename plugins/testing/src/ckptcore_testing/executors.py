"""What every executor must do, as tests to inherit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptcore.errors import RankFailedError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.protocols import Executor, LeafBoxes, WantedLeaf
from ckptcore_testing.arrays import assert_same_bits

__all__ = ["ExecutorTests"]


class ExecutorTests:
    """Inherit, give `executor` as a fixture, and the methods that make leaves; pytest collects the tests.

    Attributes:
        deadline_seconds: how long workers wait for each other in the test that they work at the same time.
    """

    deadline_seconds: float = 60.0

    @pytest.fixture
    def executor(self) -> Executor:
        """An executor with at least two workers. The tests change nothing of it, unless `lose` does."""
        raise NotImplementedError("give the class the fixture `executor`")

    def split(self, executor: Executor, elements: HostArray) -> Any:
        """A leaf of which each worker holds as many rows as the others, in the order of the workers."""
        raise NotImplementedError("give the class the method `split`")

    def replicated(self, executor: Executor, elements: HostArray) -> Any:
        """A leaf that every worker holds whole."""
        raise NotImplementedError("give the class the method `replicated`")

    def elements(self, executor: Executor, leaf: Any) -> HostArray:
        """The elements of a leaf, however the test gets them."""
        raise NotImplementedError("give the class the method `elements`")

    def disturb(self, executor: Executor, leaf: Any) -> None:
        """Do the worst to a leaf that a program may do after an asynchronous save began: change it, or delete it."""
        raise NotImplementedError("give the class the method `disturb`")

    def lose(self, executor: Executor, worker: int) -> None:
        """End a worker for good; skip the test where that cannot be done."""
        pytest.skip("this executor cannot lose a worker here")

    def test_workers_have_names(self, executor: Executor) -> None:
        assert len(executor.workers) >= 2
        assert len(set(executor.workers)) == len(executor.workers)

    def test_what_is_here_is_not_taken(self, executor: Executor) -> None:
        for here in (np.zeros(3), 3, None, "text"):
            assert not executor.takes(here)
            assert not executor.makes(here)

    def test_a_split_leaf_is_held_once(self, executor: Executor) -> None:
        count = len(executor.workers)
        leaf = self.split(executor, _numbers(count))
        assert executor.takes(leaf)
        assert executor.makes(leaf)
        for worker in range(count):
            shards = executor.shards(leaf, worker)
            assert {(shard.replica, shard.replicas) for shard in shards} == {(0, 1)}
            assert sum(shard.box.size for shard in shards) == _leaf_size(count) // count
            rows = {(shard.box.start[0], shard.box.stop[0]) for shard in shards}
            assert (min(rows)[0], max(rows)[1]) == (4 * worker, 4 * worker + 4)

    def test_replicas_are_workers(self, executor: Executor) -> None:
        count = len(executor.workers)
        leaf = self.replicated(executor, _numbers(count))
        for worker in range(count):
            ((shard,),) = [executor.shards(leaf, worker)]
            assert shard.box == Box.whole((4 * count, 6))
            assert (shard.replica, shard.replicas) == (worker, count)

    def test_identity_is_that_of_the_leaf(self, executor: Executor) -> None:
        elements = _numbers(len(executor.workers))
        first, second = self.split(executor, elements), self.split(executor, elements)
        assert executor.identity(first) == executor.identity(first)
        assert executor.identity(first) is None or executor.identity(first) != executor.identity(second)

    @pytest.mark.parametrize("way", ["copy", "view"])
    def test_a_stage_gets_the_boxes_in_order(self, executor: Executor, way: str) -> None:
        count = len(executor.workers)
        elements = _numbers(count)
        split, whole = self.split(executor, elements), self.replicated(executor, elements + 1)
        for worker in range(count):
            boxes = tuple(shard.box for shard in executor.shards(split, worker))
            corner = Box((1, 2), (3, 5))  # a part of what it holds
            held = getattr(executor, way)(worker, [LeafBoxes(split, boxes), LeafBoxes(whole, (corner,))])
            held.wait()
            expected = [[elements[box.slices] for box in boxes], [(elements + 1)[corner.slices]]]
            assert executor.write(worker, _Compare(expected), held).result() == b"same"
            held.close()
            held.close()

    def test_what_is_copied_does_not_change(self, executor: Executor) -> None:
        elements = _numbers(len(executor.workers))
        leaf = self.split(executor, elements)
        held = []
        for worker in range(len(executor.workers)):
            boxes = tuple(shard.box for shard in executor.shards(leaf, worker))
            held.append((executor.copy(worker, [LeafBoxes(leaf, boxes)]), boxes))
        for copied, _ in held:
            copied.wait()
        self.disturb(executor, leaf)
        for worker, (copied, boxes) in enumerate(held):
            assert (
                executor.write(worker, _Compare([[elements[box.slices] for box in boxes]]), copied).result() == b"same"
            )
            assert executor.write(worker, _Answer(b"again"), copied).result() == b"again"  # as exports do
            copied.close()

    def test_a_stage_is_sent(self, executor: Executor) -> None:
        """It does not come as the object that the controller has: then it could have anything in it."""
        held = _hold_all(self, executor)
        assert [executor.write(worker, _Sent(), held[worker]).result() for worker in range(len(held))] == [
            b"sent"
        ] * len(held)

    @pytest.mark.parametrize("nbytes", [0, 1, 3_000_000])
    def test_any_report_comes_back(self, executor: Executor, nbytes: int) -> None:
        report = bytes(range(256)) * (nbytes // 256) + b"\0" * (nbytes % 256)
        held = _hold_all(self, executor)
        assert executor.write(0, _Answer(report), held[0]).result() == report

    def test_workers_write_at_the_same_time(self, executor: Executor, tmp_path: Path) -> None:
        held = _hold_all(self, executor)
        begun = [
            executor.write(worker, _Meet(str(tmp_path), worker, len(held), self.deadline_seconds), one)
            for worker, one in enumerate(held)
        ]
        assert [pending.result() for pending in begun] == [b"met"] * len(held)

    def test_leaves_are_made_of_what_is_read(self, executor: Executor) -> None:
        count = len(executor.workers)
        elements = _numbers(count)
        split, whole = self.split(executor, elements), self.replicated(executor, elements)
        stored = ArrayRecord(ArraySpec(elements.shape, elements.dtype.name))
        wanted = [WantedLeaf(split, stored), WantedLeaf(whole, stored)]
        offsets = (elements + 5, elements + 7)
        stages = {}
        for worker in range(count):
            arrays = [
                [offset[box.slices].copy() for box in executor.wanted(one.abstract, stored, worker)]
                for one, offset in zip(wanted, offsets, strict=True)
            ]
            assert sum(array.size for array in arrays[0]) == elements.size // count
            assert [array.shape for array in arrays[1]] == [elements.shape]
            stages[worker] = _Give(arrays)
        fetched = executor.read(stages, wanted)
        assert fetched.reports == dict.fromkeys(range(count), b"given")
        for leaf, expected in zip(fetched.leaves, offsets, strict=True):
            assert executor.takes(leaf)
            assert_same_bits(self.elements(executor, leaf), expected, "the leaf that was made")

    def test_a_report_of_failure_comes_without_elements(self, executor: Executor) -> None:
        elements = _numbers(len(executor.workers))
        wanted = WantedLeaf(self.split(executor, elements), ArrayRecord(ArraySpec(elements.shape, "float32")))
        stages = {worker: _Fail(b"failed") for worker in range(len(executor.workers))}
        assert executor.read(stages, [wanted]).reports == dict.fromkeys(stages, b"failed")
        self.test_leaves_are_made_of_what_is_read(executor)

    def test_a_lost_worker_is_named(self, executor: Executor) -> None:
        held = _hold_all(self, executor)
        self.lose(executor, 1)
        with pytest.raises(RankFailedError, match=executor.workers[1]):
            executor.write(1, _Answer(b""), held[1]).result()
        assert executor.write(0, _Answer(b"here"), held[0]).result() == b"here"
        for one in held:
            one.close()
        elements = _numbers(len(executor.workers))
        wanted = WantedLeaf(self._made_before(executor), ArrayRecord(ArraySpec(elements.shape, "float32")))
        with pytest.raises(RankFailedError, match=executor.workers[1]):
            executor.read({1: _Fail(b"")}, [wanted])

    def _made_before(self, executor: Executor) -> Any:
        """A leaf to ask for, that no worker has to make."""
        return self.abstract(executor, ArraySpec((4 * len(executor.workers), 6), "float32"))

    def abstract(self, executor: Executor, spec: ArraySpec) -> Any:
        """What asks for a split leaf; only called after `lose`."""
        raise NotImplementedError("give the class the method `abstract`")


def _leaf_size(workers: int) -> int:
    """Elements of the arrays of these tests."""
    return 4 * workers * 6


def _numbers(workers: int) -> HostArray:
    return np.arange(_leaf_size(workers), dtype=np.float32).reshape(4 * workers, 6)


def _hold_all(tests: ExecutorTests, executor: Executor) -> Sequence[Any]:
    leaf = tests.split(executor, _numbers(len(executor.workers)))
    held = []
    for worker in range(len(executor.workers)):
        boxes = tuple(shard.box for shard in executor.shards(leaf, worker))
        held.append(executor.view(worker, [LeafBoxes(leaf, boxes)]))
        held[-1].wait()
    return held


@dataclass(frozen=True)
class _Compare:
    """Tells whether a worker holds these elements."""

    expected: Sequence[Sequence[HostArray]]

    def __call__(self, arrays: Sequence[Sequence[HostArray]]) -> bytes:
        if [len(boxes) for boxes in arrays] != [len(boxes) for boxes in self.expected]:
            return b"not as many boxes"
        for found, expected in zip(arrays, self.expected, strict=True):
            for one, other in zip(found, expected, strict=True):
                if one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes():
                    return b"other elements"
        return b"same"


@dataclass(frozen=True)
class _Answer:
    """Reports what it is told to."""

    report: bytes

    def __call__(self, arrays: Sequence[Sequence[HostArray]]) -> bytes:
        return self.report


@dataclass(frozen=True)
class _Sent:
    """Knows whether it was pickled."""

    report: bytes = b"not sent"

    def __reduce__(self) -> tuple[type[_Sent], tuple[bytes]]:
        return _Sent, (b"sent",)

    def __call__(self, arrays: Sequence[Sequence[HostArray]]) -> bytes:
        return self.report


@dataclass(frozen=True)
class _Meet:
    """Waits until as many stages as there are workers run at once."""

    directory: str
    worker: int
    workers: int
    seconds: float

    def __call__(self, arrays: Sequence[Sequence[HostArray]]) -> bytes:
        Path(self.directory, str(self.worker)).touch()
        deadline = time.monotonic() + self.seconds
        while len(list(Path(self.directory).iterdir())) < self.workers:
            if time.monotonic() > deadline:
                return b"nobody else came"
            time.sleep(0.01)
        return b"met"


@dataclass(frozen=True)
class _Give:
    """Has read these arrays."""

    arrays: Sequence[Sequence[HostArray]]

    def __call__(self) -> tuple[bytes, Sequence[Sequence[HostArray]]]:
        return b"given", self.arrays


@dataclass(frozen=True)
class _Fail:
    """Could read nothing."""

    report: bytes

    def __call__(self) -> tuple[bytes, Sequence[Sequence[HostArray]]]:
        return self.report, ()
