"""Conformance tests of executors. They save and load with layouts that check the workers."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.arrays import assert_same_bits
from ckptcore_tools.exports import Export, WithExports

import ckptcore
from ckptcore.context import JobOptions, ReplicaOptions
from ckptcore.errors import CorruptCheckpointError, RankFailedError
from ckptcore.model import JSON, ArraySpec, Box, HostArray, Receipt, TreeMetadata
from ckptcore.protocols import Snapshot, WriteStore
from ckptcore_jax.staged_executor import StagedExecutor


class ExecutorTests:
    """Conformance tests of an executor. Subclass it, and define the fixture `executor` and the methods for leaves.

    Attributes:
        deadline_seconds: how long workers wait for each other in the test of concurrent writes.
    """

    deadline_seconds: float = 60.0

    @pytest.fixture
    def executor(self) -> StagedExecutor:
        """Return an executor with at least two workers. Only the test that calls `lose` changes it."""
        raise NotImplementedError("define the fixture `executor`")

    def context(self, executor: StagedExecutor) -> ckptcore.Context:
        """Return the Context of the controller. Override it to add the handler of the leaves."""
        job = JobOptions(executor=executor, replicas=ReplicaOptions(piece_bytes=32))
        return ckptcore.Context(job=job, durability="none")

    def split(self, executor: StagedExecutor, elements: HostArray) -> Any:
        """Return a leaf whose rows are divided evenly among the workers, in order."""
        raise NotImplementedError("define the method `split`")

    def replicated(self, executor: StagedExecutor, elements: HostArray) -> Any:
        """Return a leaf with a full replica on every worker."""
        raise NotImplementedError("define the method `replicated`")

    def alone(self, executor: StagedExecutor, elements: HostArray) -> Any:
        """Return a leaf that exists only on worker 0."""
        raise NotImplementedError("define the method `alone`")

    def elements(self, executor: StagedExecutor, leaf: Any) -> HostArray:
        """Return the elements of a leaf."""
        raise NotImplementedError("define the method `elements`")

    def disturb(self, executor: StagedExecutor, leaf: Any) -> None:
        """Change or delete a leaf, as a program may after an asynchronous save has started."""
        raise NotImplementedError("define the method `disturb`")

    def abstract(self, executor: StagedExecutor, spec: ArraySpec) -> Any:
        """Return an abstract leaf that is divided like the result of `split`, without using workers.

        Called only after `lose`.
        """
        raise NotImplementedError("define the method `abstract`")

    def lose(self, executor: StagedExecutor, worker: int) -> None:
        """Stop a worker permanently. Skip the test if that is impossible."""
        pytest.skip("a worker of this executor cannot be stopped")

    def test_workers_have_names(self, executor: StagedExecutor) -> None:
        assert len(executor.workers) >= 2
        assert len(set(executor.workers)) == len(executor.workers)

    def test_values_of_the_controller_are_rejected(self, executor: StagedExecutor) -> None:
        for here in (np.zeros(3), 3, None, "text"):
            assert not executor.takes(here)
            assert not executor.makes(here)

    def test_each_shard_of_a_split_leaf_has_one_replica(self, executor: StagedExecutor) -> None:
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

    def test_each_worker_has_one_replica_of_a_replicated_leaf(self, executor: StagedExecutor) -> None:
        count = len(executor.workers)
        leaf = self.replicated(executor, _numbers(count))
        for worker in range(count):
            ((shard,),) = [executor.shards(leaf, worker)]
            assert shard.box == Box.whole((4 * count, 6))
            assert (shard.replica, shard.replicas) == (worker, count)

    def test_identity_differs_between_leaves(self, executor: StagedExecutor) -> None:
        elements = _numbers(len(executor.workers))
        first, second = self.split(executor, elements), self.split(executor, elements)
        assert executor.identity(first) == executor.identity(first)
        assert executor.identity(first) is None or executor.identity(first) != executor.identity(second)

    @pytest.mark.parametrize("blocking", [True, False])
    def test_workers_write_their_own_shards(self, blocking: bool, executor: StagedExecutor, tmp_path: Path) -> None:
        elements = _numbers(len(executor.workers))
        state = {
            "split": self.split(executor, elements),
            "whole": self.replicated(executor, elements + 1),  # each worker writes a part of its replica
            "alone": self.alone(executor, elements + 2),
            "here": elements + 3,
        }
        layout, context = _SharingLayout(), self.context(executor)
        if blocking:
            ckptcore.save(tmp_path / "it", state, layout=layout, context=context)
        else:
            ckptcore.save_async(tmp_path / "it", state, layout=layout, context=context).result()
        self._expect(tmp_path / "it", split=elements, whole=elements + 1, alone=elements + 2, here=elements + 3)

    def test_a_snapshot_does_not_change(self, executor: StagedExecutor, tmp_path: Path) -> None:
        """The snapshot is written twice, the second time by an export."""
        elements = _numbers(len(executor.workers))
        leaf = self.split(executor, elements)
        strategy = WithExports([Export(location=tmp_path / "again")])
        handle = ckptcore.save_async(tmp_path / "it", {"leaf": leaf}, strategy=strategy, context=self.context(executor))
        self.disturb(executor, leaf)
        handle.result()
        self._expect(tmp_path / "it", leaf=elements)
        self._expect(tmp_path / "again", leaf=elements)

    def test_layouts_are_pickled_for_workers(self, executor: StagedExecutor, tmp_path: Path) -> None:
        """Workers get a pickled copy of the layout."""
        elements = _numbers(len(executor.workers))
        state = {"leaf": self.split(executor, elements)}
        ckptcore.save(tmp_path / "it", state, layout=_SentLayout(), context=self.context(executor))
        self._expect(tmp_path / "it", leaf=elements)

    @pytest.mark.parametrize("length", [0, 1, 3_000_000])
    def test_receipts_of_any_size_are_returned(self, length: int, executor: StagedExecutor, tmp_path: Path) -> None:
        elements = _numbers(len(executor.workers))
        state = {"leaf": self.split(executor, elements)}
        layout = _ReportingLayout(length=length, workers=len(executor.workers))
        ckptcore.save(tmp_path / "it", state, layout=layout, context=self.context(executor))
        self._expect(tmp_path / "it", leaf=elements)

    def test_workers_write_at_the_same_time(self, executor: StagedExecutor, tmp_path: Path) -> None:
        elements = _numbers(len(executor.workers))
        (tmp_path / "met").mkdir()
        layout = _MeetingLayout(
            directory=str(tmp_path / "met"), workers=len(executor.workers), seconds=self.deadline_seconds
        )
        state = {"leaf": self.split(executor, elements)}
        ckptcore.save(tmp_path / "it", state, layout=layout, context=self.context(executor))
        assert len(list((tmp_path / "met").iterdir())) == len(executor.workers)

    def test_the_error_names_the_failed_worker(self, executor: StagedExecutor, tmp_path: Path) -> None:
        elements, context = _numbers(len(executor.workers)), self.context(executor)
        state = {"leaf": self.split(executor, elements)}
        with pytest.raises(RankFailedError, match=re.escape(executor.workers[1]) + ".*ValueError: rank 2 fails"):
            ckptcore.save(tmp_path / "it", state, layout=_FailingLayout(), context=context)
        assert list(tmp_path.iterdir()) == []
        ckptcore.save(tmp_path / "it", state, context=context)
        self._expect(tmp_path / "it", leaf=elements)

    def test_workers_build_the_loaded_leaves(self, executor: StagedExecutor, tmp_path: Path) -> None:
        elements, context = _numbers(len(executor.workers)), self.context(executor)
        wanted = {"split": self.split(executor, elements), "whole": self.replicated(executor, elements)}
        stored = {"split": elements + 5, "whole": elements + 7}
        ckptcore.save(tmp_path / "it", stored)
        loaded = ckptcore.load(tmp_path / "it", wanted, context=context)
        for name, expected in stored.items():
            assert executor.takes(loaded[name])
            assert_same_bits(self.elements(executor, loaded[name]), expected, f"{name}, which workers made")

    def test_a_worker_reports_a_corrupt_checkpoint(self, executor: StagedExecutor, tmp_path: Path) -> None:
        elements, context = _numbers(len(executor.workers)), self.context(executor)
        wanted = {"split": self.split(executor, elements)}
        ckptcore.save(tmp_path / "it", {"split": elements})
        (file,) = (tmp_path / "it").glob("*.safetensors")
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptCheckpointError, match="split"):
            ckptcore.load(tmp_path / "it", wanted, context=context)
        file.write_bytes(data)
        loaded = ckptcore.load(tmp_path / "it", wanted, context=context)
        assert_same_bits(self.elements(executor, loaded["split"]), elements, "the leaf that workers made")

    def test_the_error_names_a_lost_worker(self, executor: StagedExecutor, tmp_path: Path) -> None:
        elements, context = _numbers(len(executor.workers)), self.context(executor)
        split, alone = self.split(executor, elements), self.alone(executor, elements)
        ckptcore.save(tmp_path / "before", {"split": split}, context=context)
        self.lose(executor, 1)
        lost = pytest.raises(RankFailedError, match=re.escape(executor.workers[1]))
        with lost:
            ckptcore.save(tmp_path / "it", {"split": split}, context=context)
        ckptcore.save(tmp_path / "it", {"alone": alone}, context=context)
        self._expect(tmp_path / "it", alone=elements)
        wanted = {"split": self.abstract(executor, ArraySpec(elements.shape, elements.dtype.name))}
        with lost:
            ckptcore.load(tmp_path / "before", wanted, context=context)

    @staticmethod
    def _expect(location: Path, **expected: HostArray) -> None:
        """Load without workers and compare."""
        loaded = ckptcore.load(location)
        assert loaded.keys() == expected.keys()
        for name, elements in expected.items():
            assert_same_bits(loaded[name], elements, name)


def _leaf_size(workers: int) -> int:
    return 4 * workers * 6


def _numbers(workers: int) -> HostArray:
    return np.arange(_leaf_size(workers), dtype=np.float32).reshape(4 * workers, 6)


@dataclass(frozen=True)
class _SharingLayout(ckptcore.SafetensorsLayout):
    """Layout that lets every process with a replica of a box write a part of the box."""

    @property
    def shares_replicas(self) -> bool:
        return True


@dataclass(frozen=True)
class _SentLayout(ckptcore.SafetensorsLayout):
    """Layout that fails on a worker if the worker has the controller's object instead of a pickled copy."""

    sent: bool = False

    def __reduce__(self) -> tuple[type[_SentLayout], tuple[object, ...], dict[str, bool]]:
        return _SentLayout, (), {"sent": True}

    def __setstate__(self, state: dict[str, bool]) -> None:
        object.__setattr__(self, "sent", state["sent"])

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        assert self.sent == (snapshot.plan.rank > 0), f"the layout of rank {snapshot.plan.rank}"
        return super().write(snapshot, store)


@dataclass(frozen=True)
class _ReportingLayout(ckptcore.SafetensorsLayout):
    """Layout that adds text to all receipts, and compares the text on the controller.

    Attributes:
        length: length of the text.
        workers: number of workers.
    """

    length: int = 0
    workers: int = 0

    @property
    def _text(self) -> str:
        return ("".join(map(chr, range(256))) * (self.length // 256 + 1))[: self.length]

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        return [super().write(snapshot, store), self._text]

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        assert len(receipts) == 1 + self.workers
        taken = []
        for receipt in receipts:
            assert isinstance(receipt.state, list) and receipt.state[1] == self._text
            taken.append(receipt._replace(state=receipt.state[0]))
        return super().finish(tree, taken, store)


@dataclass(frozen=True)
class _MeetingLayout(ckptcore.SafetensorsLayout):
    """Layout that waits on each worker until all workers write.

    Attributes:
        directory: directory with a file for each worker that writes.
        workers: number of workers.
        seconds: maximum wait.
    """

    directory: str = ""
    workers: int = 0
    seconds: float = 0.0

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        if snapshot.plan.rank:
            Path(self.directory, str(snapshot.plan.rank)).touch()
            deadline = time.monotonic() + self.seconds
            while len(list(Path(self.directory).iterdir())) < self.workers:
                assert time.monotonic() < deadline, "the workers did not write at the same time"
                time.sleep(0.01)
        return super().write(snapshot, store)


@dataclass(frozen=True)
class _FailingLayout(ckptcore.SafetensorsLayout):
    """Layout that fails on the second worker."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        if snapshot.plan.rank == 2:
            raise ValueError("rank 2 fails")
        return super().write(snapshot, store)
