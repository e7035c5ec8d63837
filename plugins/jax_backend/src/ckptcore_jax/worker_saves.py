"""`WorkerSave`: a save strategy for a single controller, whose workers write their own leaves. Imports no JAX.

`LeavesAtWorkers` wraps the handlers of leaves whose elements are at the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from ckptcore.model import ArrayRecord, Box, HostArray, LeafRecord, Pending, Receipt, Shard, StridedMemory, WritePlan
from ckptcore.planning import plan_write
from ckptcore.planning.partition import cut_for_replicas, owners_of
from ckptcore.protocols import (
    CheckpointableHandler,
    HostBytes,
    HostMemory,
    LeafHandler,
    SaveCommit,
    SaveStrategy,
    StorageBackend,
)
from ckptcore.runtime import runtime_of
from ckptcore.saving.common_trees import share_replicas
from ckptcore.saving.descriptions import FilesDescription, PartDescription, TreeDescription
from ckptcore.saving.requests import Save, SaveDraft, SavePart
from ckptcore.saving.writing import PlainSave
from ckptcore_jax.worker_stages import WorkerOptions, WorkerPart, WriteParts, read_report

if TYPE_CHECKING:
    from ckptcore_jax.staged_executor import StagedExecutor


class LeavesAtWorkers(LeafHandler):
    """A leaf handler of a controller for leaves at its workers. The controller itself has no boxes of such leaves.

    The wrapped handler handles other leaves.
    """

    def __init__(self, handler: LeafHandler, executor: StagedExecutor) -> None:
        self._handler = handler
        self._executor = executor

    @property
    def priority(self) -> int:
        """See `LeafHandler`."""
        return self._handler.priority

    def describe(self, leaf: Any) -> LeafRecord:
        """See `LeafHandler`."""
        return self._handler.describe(leaf)

    def abstract(self, leaf: Any) -> object:
        """See `LeafHandler`."""
        return self._handler.abstract(leaf)

    def parts_handler(self, leaf: Any) -> CheckpointableHandler | None:
        """See `LeafHandler`."""
        return self._handler.parts_handler(leaf)

    def identity(self, leaf: Any) -> Hashable | None:
        """Return the identity of a leaf. For leaves at workers, the executor determines it."""
        is_remote = self._executor.takes(leaf) or self._executor.makes(leaf)
        return (self._executor if is_remote else self._handler).identity(leaf)

    def built_type(self, leaf: Any) -> object:
        """See `LeafHandler`."""
        return self._handler.built_type(leaf)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard] | None:
        """Return no box for a leaf at workers, and check that the workers have its elements."""
        if not self._executor.takes(leaf):
            return self._handler.shards(leaf, rank, size)
        for worker in range(len(self._executor.workers)):
            self._executor.shards(leaf, worker)  # raises an error for a leaf without elements
        return ()

    def replicas(self, leaf: Any, size: int) -> int | None:
        """See `LeafHandler`."""
        return self._handler.replicas(leaf, size)

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard] | None:
        """Return the result of `shards` for a leaf at workers if `process` is None. See `LeafHandler`."""
        if process is None and self._executor.takes(leaf):
            return self.shards(leaf, rank, size)
        return self._handler.shards_of(leaf, process, rank, size)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """See `LeafHandler`."""
        return self._handler.host_bytes(leaf, boxes)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """See `LeafHandler`."""
        return self._handler.copy_to_host(leaf, boxes, memory)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """See `LeafHandler`."""
        return self._handler.view_on_host(leaf, boxes)

    def sample(self, leaf: Any, stored: ArrayRecord, box: Box) -> Sequence[Pending[HostArray]] | None:
        """See `LeafHandler`."""
        return self._handler.sample(leaf, stored, box)

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the boxes of the worker that reads the largest part of a leaf. The worker reads them itself."""
        workers = range(len(self._executor.workers))
        wanted = [self._executor.wanted(abstract, stored, worker) for worker in workers]
        return max(wanted, key=lambda boxes: sum([box.size for box in boxes]), default=())

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """See `LeafHandler`."""
        return self._handler.destination(abstract, stored, box)

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build a stored value. Workers build arrays."""
        return self._handler.build(abstract, stored, boxes)

    def keeps_memory(self, abstract: Any) -> bool:
        """See `LeafHandler`."""
        return self._handler.keeps_memory(abstract)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """See `LeafHandler`."""
        return self._handler.fill(target, stored, boxes)

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """See `LeafHandler`."""
        return self._handler.memory_to_fill(target)


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
    """Save like another strategy, but workers write the leaves that they hold. See `ckptcore.protocols.SaveStrategy`.

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
        """Prepare the save and its further saves, and plan which boxes each worker writes."""
        save = self.strategy.prepare(
            draft._replace(descriptions=[self._cut(draft, description) for description in draft.descriptions])
        )
        held = _WorkerElements(self.executor, save)
        if not held.shares:
            return save
        for prepared in (save, *save.further):
            prepared.strategy.begin(prepared)  # raises errors before any array is captured
        further = [self._with_workers(further_save, held) for further_save in save.further]
        own = self._with_workers(save, held)
        return own._replace(further=further, capture_elsewhere=held.start, nbytes_elsewhere=held.nbytes)

    def _with_workers(self, save: Save, held: _WorkerElements) -> Save:
        strategy = WorkerSave(save.strategy, self.executor, held)
        return save._replace(strategy=strategy, receive_elsewhere=held.receive)

    def _cut(self, draft: SaveDraft, description: PartDescription) -> PartDescription:
        """Cut large arrays that several workers hold, so that each of these workers writes a part."""
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
        commit = _WorkerCommit(self.strategy.begin(save._replace(strategy=self.strategy)), save, self.held)
        self.held.commits[save.info.save_id] = commit
        return commit

    def after_commit(self, save: Save, write: Callable[[Save], None]) -> None:
        """Write the further saves of the other strategy."""
        self.strategy.after_commit(save, write)


@dataclass(slots=True, eq=False)
class _WorkerShares:
    """The boxes of a part that workers write.

    Attributes:
        part: the part; the reference keeps its id valid.
        plans: the plans of the workers.
        held: share of each worker: its plan, and the positions of the plan's boxes among all boxes
            that the worker holds. Empty before `start`.
    """

    part: SavePart
    plans: Sequence[WritePlan]
    held: list[WorkerPart]


class _WorkerElements:
    """The elements that workers hold for a save and its further saves. See `ckptcore.io.snapshot.StateCopy`.

    Attributes:
        executor: the workers.
        shares: boxes that workers write, by id of the part.
        by_worker: elements that each worker holds. Workers without elements are left out.
        commits: commits for which workers write, by save id.
    """

    def __init__(self, executor: StagedExecutor, save: Save) -> None:
        """Plan the writes of the workers. Parts of further saves have the same boxes as the parts of the save."""
        self.executor = executor
        self.shares: dict[int, _WorkerShares] = {}
        self.by_worker: dict[int, HeldElements] = {}
        self.commits: dict[str, _WorkerCommit] = {}
        self._boxes: dict[tuple[int, int], tuple[Box, ...]] = {}
        """Boxes of a leaf that a worker writes, by worker and id of the leaf."""
        for each in (save, *save.further):
            for part in each.parts:
                self._plan(part, is_further=each is not save)

    def _plan(self, part: SavePart, *, is_further: bool) -> None:
        leaves = dict(self._leaves(part))
        if not leaves:
            return
        workers, plan = len(self.executor.workers), part.plan
        plans = []
        for worker in range(workers):
            owners, shards = None, {}
            for number, leaf in leaves.items():
                if is_further:
                    shards[number] = [Shard(box) for box in self._boxes.get((worker, id(leaf)), ())]
                else:
                    shards[number] = list(self.executor.shards(leaf, worker))
            if not is_further and isinstance(part.source, TreeDescription) and part.source.shares is not None:
                owners = owners_of(part.source.shares, rank=worker, size=workers)
            ranks = {"rank": 1 + worker, "size": 1 + workers}
            plans.append(plan_write(plan.tree, shards, **ranks, save_id=plan.save_id, name=plan.name, owners=owners))
            self._boxes.update({(worker, id(leaves[item.leaf])): item.boxes for item in plans[-1].items})
        part.layout.check(plan.tree, 1 + workers)
        part.plan = plan._replace(size=1 + workers)
        part.own = False  # complete only with the receipts of the workers
        self.shares[id(part)] = _WorkerShares(part, plans, [])

    def _leaves(self, part: SavePart) -> Iterator[tuple[int, object]]:
        """Yield the leaves of a part that are at workers, each with its number."""
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
            if self.executor.takes(leaf):
                yield number, leaf

    @property
    def nbytes(self) -> int:
        """Bytes that the workers write."""
        return sum([item.nbytes for share in self.shares.values() for plan in share.plans for item in plan.items])

    def start(self, copied: bool) -> Self:
        """Begin to keep the boxes in the memory of the workers. See `Save.capture_elsewhere`."""
        try:
            for worker in range(len(self.executor.workers)):
                self._take(worker, copied=copied)
        except BaseException:
            self.end_writing()
            raise
        return self

    def _take(self, worker: int, *, copied: bool) -> None:
        boxes: dict[tuple[int, tuple[Box, ...]], LeafBoxes] = {}
        numbers: dict[tuple[int, tuple[Box, ...]], int] = {}
        for share in self.shares.values():
            part, plan, positions = share.part, share.plans[worker], []
            assert part.source is not None and not isinstance(part.source, FilesDescription)  # a tree, not captured yet
            for item in plan.items:
                leaf = part.source.boxes(item.leaf, ()).leaf
                key = id(leaf), item.boxes
                boxes.setdefault(key, LeafBoxes(leaf, item.boxes))
                positions.append(numbers.setdefault(key, len(numbers)))
            share.held.append(WorkerPart(part.directory, part.layout, plan, tuple(positions)))
        if boxes:
            self.by_worker[worker] = self.executor.take(worker, list(boxes.values()), copied=copied)

    def receive(self, save: Save) -> None:
        """Wait until the workers have written. See `Save.receive_elsewhere`."""
        self.commits.pop(save.info.save_id).receive()

    def wait(self) -> None:
        """See `StateCopy`."""
        for held in self.by_worker.values():
            held.wait()

    def fail(self, error: BaseException) -> None:
        """Do nothing, because `start` has begun the copies of all boxes. See `StateCopy`."""

    def end_writing(self) -> None:
        """See `StateCopy`."""
        for held in self.by_worker.values():
            held.close()


class _WorkerCommit:
    """The commit of another strategy. Workers write between its claim and its commit. See `SaveCommit`."""

    def __init__(self, commit: SaveCommit, save: Save, held: _WorkerElements) -> None:
        self._commit = commit
        self._save = save
        self._held = held
        self._shares = [held.shares[id(part)] for part in save.parts if id(part) in held.shares]
        self._begun: list[tuple[int, Pending[bytes]]] = []
        """Number and pending report of each worker that writes."""

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
        """Claim the location, and start the writes of the workers. The controller writes its own boxes meanwhile."""
        self._commit.claim()
        self._held.wait()
        location, claimed, options = (
            self._save.target.location,
            self._save.info.claimed,
            WorkerOptions.of(self._save.context),
        )
        for worker, held in self._held.by_worker.items():
            parts = tuple([share.held[worker] for share in self._shares])
            if any(part.plan.items for part in parts):
                stage = WriteParts(location.address, claimed, parts, options)
                self._begun.append((worker, self._held.executor.run_write(worker, stage, held)))

    def _receipts(self) -> Sequence[tuple[SavePart, Receipt]]:
        """Wait for all workers. Return their receipts, each with its part.

        Raises:
            CheckpointError: the error of a worker.
            RankFailedError: if a worker failed with another error, or did not answer.
        """
        receipts: list[tuple[SavePart, Receipt]] = []
        failed: list[Exception] = []
        for worker, report in self._begun:
            try:
                reported: Sequence[Receipt] = read_report(report.result(), self._held.executor.workers[worker])
                for share, receipt in zip(self._shares, reported, strict=True):
                    receipts.append((share.part, receipt._replace(items=share.plans[worker].items)))
            except Exception as error:  # noqa: BLE001  # raised below, after every worker has ended
                failed.append(error)
        self._begun.clear()
        raise_first(failed)
        return receipts

    def receive(self) -> None:
        """Wait for the workers, and add their receipts to the parts."""
        receipts, progress = self._receipts(), self._save.recording.progress
        for part, receipt in receipts:
            part.receipts = [*part.receipts, receipt]
        if progress is not None:
            progress.complete(sum([item.nbytes for _, receipt in receipts for item in receipt.items]))

    def commit(self, payloads: Sequence[object]) -> None:
        """See `SaveCommit`."""
        self._commit.commit(payloads)

    def settle(self, error: Exception | None) -> None:
        """See `SaveCommit`."""
        self._commit.settle(error)

    def abort(self) -> None:
        """Wait for the workers, because they must not write after the objects are removed. Then abort."""
        self._held.commits.pop(self._save.info.save_id, None)
        with suppress(Exception):
            self._receipts()
        self._commit.abort()


def raise_first(failed: Sequence[Exception]) -> None:
    """Raise the first error with the other errors as notes. Return if there are no errors."""
    if failed:
        for other in failed[1:]:
            failed[0].add_note(f"and then: {type(other).__name__}: {other}")
        raise failed[0]
