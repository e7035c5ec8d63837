"""`WorkerSave`: a save strategy by which the workers of a single controller write their leaves. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from ckptcore.model import ArrayRecord, Box, Pending, Receipt, Shard, WritePlan
from ckptcore.planning import plan_write
from ckptcore.planning.replicas import cut_for_replicas, owners_of
from ckptcore.protocols import SaveCommit, SaveStrategy, StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import FilesDescription, PartDescription, SavePart
from ckptcore.saving.preparing import share_replicas
from ckptcore.saving.requests import Save, SaveDraft
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore.saving.writing import PlainSave
from ckptcore_jax.worker_stages import WorkerOptions, WorkerPart, WriteParts, read_report

if TYPE_CHECKING:
    from ckptcore_jax.staged_executor import StagedExecutor

__all__ = ["HeldElements", "LeafBoxes", "WorkerSave", "raise_first"]


@dataclass(frozen=True, slots=True)
class LeafBoxes:
    """Boxes of a leaf on one worker.

    Attributes:
        leaf: the leaf on the controller; its elements are on the workers.
        boxes: the boxes, without overlap.
    """

    leaf: Any
    boxes: tuple[Box, ...]


class HeldElements(Protocol):
    """Elements that one worker keeps in memory for a save. Thread-safe."""

    def wait(self) -> None:
        """Wait until the leaves can be changed or deleted.

        Raises:
            RankFailedError: if the worker failed or could not copy the elements.
        """
        ...

    def close(self) -> None:
        """Release the elements. Can be called repeatedly, and after the worker failed."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerSave(PlainSave):
    """Save like another strategy, and let workers write the leaves at them. See `ckptcore.protocols.SaveStrategy`.

    In the checkpoint the controller is rank 0, and the workers follow.

    Attributes:
        strategy: the other strategy.
        executor: the workers.
        held: the elements that workers write; None before `prepare`.
    """

    strategy: SaveStrategy[SaveDraft, Save]
    executor: StagedExecutor
    held: _WorkerElements | None = None

    def prepare(self, draft: SaveDraft) -> Save:
        """Prepare the save, and plan the boxes that each worker writes of it and of its further saves."""
        save = self.strategy.prepare(draft._replace(descriptions=[self._cut(draft, one) for one in draft.descriptions]))
        held = _WorkerElements(self.executor, save)
        if not held.parts:
            return save
        further = [one._replace(strategy=WorkerSave(one.strategy, self.executor, held)) for one in save.further]
        strategy = WorkerSave(save.strategy, self.executor, held)
        return save._replace(strategy=strategy, further=further, capture_elsewhere=held.start)

    def _cut(self, draft: SaveDraft, description: PartDescription) -> PartDescription:
        """Cut large arrays for the workers that hold replicas of them."""
        workers, context = len(self.executor.workers), draft.save.context
        if not isinstance(description, TreeDescription) or workers < 2:
            return description
        if not any(self.executor.takes(description.boxes(number).leaf) for number in description.holders.local):
            return description
        if not share_replicas(description.layout, self.strategy, runtime_of(context).registry):
            return description
        shares = cut_for_replicas(description.tree, context.job.replicas, size=workers)
        return description._replace(tree=shares.tree, shares=shares)

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of the save, with the receipts of the workers."""
        assert self.held is not None  # set by `prepare`
        return _WorkerCommit(self.strategy.begin(save._replace(strategy=self.strategy)), save, self.held)

    def after_commit(self, save: Save, write: Callable[[Save], None]) -> None:
        """Write the further saves of the other strategy."""
        self.strategy.after_commit(save, write)


@dataclass(slots=True, eq=False)
class _WorkerPlans:
    """The boxes that workers write of a part.

    Attributes:
        part: the part; the reference keeps its id valid.
        plans: by worker, the boxes to write.
        positions: by worker and item, the position of its boxes among those that the worker holds.
    """

    part: SavePart
    plans: Sequence[WritePlan]
    positions: list[Sequence[int]]


class _WorkerElements:
    """The elements that workers hold for a save and its further saves. See `ckptcore.io.snapshot.StateCopy`.

    Attributes:
        parts: by id of a part of which workers write boxes, what they write.
    """

    def __init__(self, executor: StagedExecutor, save: Save) -> None:
        """Plan what workers write. Parts of further saves have the same boxes as those of the save."""
        self.parts: dict[int, _WorkerPlans] = {}
        self._executor = executor
        self._save = save
        self._held: dict[int, HeldElements] = {}
        self._boxes: dict[tuple[int, int], tuple[Box, ...]] = {}
        """By worker and id of a leaf, the boxes that the worker writes of it."""
        for one in (save, *save.further):
            for part in one.parts:
                self._plan(part, is_further=one is not save)

    def _plan(self, part: SavePart, *, is_further: bool) -> None:
        leaves = dict(self._leaves(part))
        if not leaves:
            return
        workers, plan = len(self._executor.workers), part.plan
        plans = []
        for worker in range(workers):
            owners, shards = None, {}
            for number, leaf in leaves.items():
                if is_further:
                    shards[number] = [Shard(box) for box in self._boxes.get((worker, id(leaf)), ())]
                else:
                    shards[number] = list(self._executor.shards(leaf, worker))
            if not is_further and isinstance(part.source, TreeDescription) and part.source.shares is not None:
                owners = owners_of(part.source.shares, rank=worker, size=workers)
            ranks = {"rank": 1 + worker, "size": 1 + workers}
            plans.append(plan_write(plan.tree, shards, **ranks, save_id=plan.save_id, name=plan.name, owners=owners))
            self._boxes.update({(worker, id(leaves[item.leaf])): item.boxes for item in plans[-1].items})
        part.layout.check(plan.tree, 1 + workers)
        part.plan = plan._replace(size=1 + workers)
        part.own = False  # finished with the receipts of the workers, at the commit
        self.parts[id(part)] = _WorkerPlans(part, plans, [])

    def _leaves(self, part: SavePart) -> Iterator[tuple[int, object]]:
        """Yield the leaves of a part that are at workers, with their numbers."""
        source, tree = part.source, part.plan.tree
        assert source is not None  # not captured yet
        if isinstance(source, FilesDescription):
            return
        for number, record in enumerate(tree.leaves):
            if not isinstance(record, ArrayRecord) or number in tree.aliases:
                continue
            if isinstance(source, TreeDescription) and number not in source.holders.local:
                continue
            leaf = source.boxes(number, ()).leaf
            if self._executor.takes(leaf):
                yield number, leaf

    def start(self, copied: bool) -> Self:
        """Begin to keep the boxes in the memory of the workers. See `Save.capture_elsewhere`."""
        progress = self._save.recording.progress
        if progress is not None:
            items = [item for part in self.parts.values() for plan in part.plans for item in plan.items]
            progress.plan(self._save.nbytes + sum([item.nbytes for item in items]))
        try:
            for worker in range(len(self._executor.workers)):
                self._take(worker, copied=copied)
        except BaseException:
            self.end_writing()
            raise
        return self

    def _take(self, worker: int, *, copied: bool) -> None:
        boxes: dict[tuple[int, tuple[Box, ...]], LeafBoxes] = {}
        keys = {}
        for planned in self.parts.values():
            source = planned.part.source
            assert source is not None and not isinstance(source, FilesDescription)  # a tree, not captured yet
            leaves = [LeafBoxes(source.boxes(item.leaf, ()).leaf, item.boxes) for item in planned.plans[worker].items]
            keys[id(planned)] = [(id(one.leaf), one.boxes) for one in leaves]
            boxes.update(zip(keys[id(planned)], leaves, strict=True))
        numbers = {key: number for number, key in enumerate(boxes)}
        for planned in self.parts.values():
            planned.positions.append([numbers[key] for key in keys[id(planned)]])
        if boxes:
            self._held[worker] = self._executor.take(worker, list(boxes.values()), copied=copied)

    def wait(self) -> None:
        """See `StateCopy`."""
        for held in self._held.values():
            held.wait()

    def fail(self, error: BaseException) -> None:
        """See `StateCopy`. Workers copy all of their boxes at once."""

    def end_writing(self) -> None:
        """See `StateCopy`."""
        for held in self._held.values():
            held.close()

    def write(self, save: Save) -> _RunningWrites:
        """Start to write the boxes of all workers to a location that the controller has claimed."""
        location, claimed, options = save.target.location, save.info.claimed, WorkerOptions.of(save.context)
        parts = [self.parts[id(part)] for part in save.parts if id(part) in self.parts]
        writes = _RunningWrites(self._executor, parts)
        try:
            for worker, held in self._held.items():
                if any(planned.plans[worker].items for planned in parts):
                    worker_parts = tuple(
                        [
                            WorkerPart(
                                planned.part.directory,
                                planned.part.layout,
                                planned.plans[worker],
                                tuple(planned.positions[worker]),
                            )
                            for planned in parts
                        ]
                    )
                    stage = WriteParts(location.address, claimed, worker_parts, options)
                    writes.begun.append((worker, self._executor.run_write(worker, stage, held)))
        except BaseException:
            with suppress(Exception):  # wait for running workers before the caller removes the written objects
                writes.result()
            raise
        return writes


class _RunningWrites:
    """Workers that are writing parts of a save.

    Attributes:
        begun: the number and the pending report of each worker.
    """

    def __init__(self, executor: StagedExecutor, parts: Sequence[_WorkerPlans]) -> None:
        self.begun: list[tuple[int, Pending[bytes]]] = []
        self._executor = executor
        self._parts = parts

    def result(self) -> Sequence[tuple[SavePart, Receipt]]:
        """Wait for all workers. Return their receipts, each with its part.

        Raises:
            CheckpointError: the error of a worker.
            RankFailedError: if a worker failed with another error, or did not answer.
        """
        found: list[tuple[SavePart, Receipt]] = []
        failed: list[Exception] = []
        for worker, report in self.begun:
            try:
                receipts: Sequence[Receipt] = read_report(report.result(), self._executor.workers[worker])
                for planned, receipt in zip(self._parts, receipts, strict=True):
                    found.append((planned.part, receipt._replace(items=planned.plans[worker].items)))
            except Exception as error:  # noqa: BLE001  # raised below, after every worker has ended
                failed.append(error)
        raise_first(failed)
        return found


class _WorkerCommit:
    """The commit of another strategy, with the writes of workers between its claim and its commit. See `SaveCommit`."""

    def __init__(self, commit: SaveCommit, save: Save, held: _WorkerElements) -> None:
        self._commit = commit
        self._save = save
        self._held = held
        self._writes: _RunningWrites | None = None

    @property
    def meaning(self) -> str:
        """See `SaveCommit`."""
        return self._commit.meaning

    @property
    def commit_meaning(self) -> str:
        """See `SaveCommit`."""
        return self._commit.commit_meaning

    @property
    def store(self) -> StorageBackend:
        """See `SaveCommit`."""
        return self._commit.store

    def claim(self) -> None:
        """Claim the location, and let the workers begin to write, while the controller writes its own boxes."""
        self._commit.claim()
        self._held.wait()
        self._writes = self._held.write(self._save)

    def commit(self, payloads: Sequence[object]) -> None:
        """Wait for the workers, and commit their objects too."""
        assert self._writes is not None  # claimed before
        recording = self._save.recording
        with recording.phase("write") as phase:
            receipts = self._writes.result()
            phase.nbytes = sum([record.size for _, receipt in receipts for record in receipt.objects])
        for part, receipt in receipts:
            part.receipts = [*part.receipts, receipt]
        if recording.progress is not None:
            recording.progress.complete(sum([item.nbytes for _, receipt in receipts for item in receipt.items]))
        self._commit.commit(payloads)

    def settle(self, error: Exception | None) -> None:
        """See `SaveCommit`."""
        self._commit.settle(error)

    def abort(self) -> None:
        """Wait for the workers, which may not write after the objects are removed."""
        if self._writes is not None:
            with suppress(Exception):
                self._writes.result()
        self._commit.abort()


def raise_first(failed: Sequence[Exception]) -> None:
    """Raise the first error with the others as notes, or return if there are none."""
    if failed:
        for other in failed[1:]:
            failed[0].add_note(f"and then: {type(other).__name__}: {other}")
        raise failed[0]
