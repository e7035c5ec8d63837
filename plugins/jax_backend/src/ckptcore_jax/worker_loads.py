"""`WorkerLoad`: a read strategy for a single controller, whose workers read their own leaves. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.loading.load import Load, LoadTarget
from ckptcore.loading.reading import TreeRead, batches, check_sizes, read_tree
from ckptcore.matching.options import Matched
from ckptcore.model import ArrayRecord
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.protocols import LeafHandler, ReadStrategy
from ckptcore_jax.worker_saves import LeavesAtWorkers, raise_first
from ckptcore_jax.worker_stages import DerivationRecipe, LeafReads, ReadBoxes, WorkerOptions, read_report

if TYPE_CHECKING:
    from ckptcore_jax.staged_executor import StagedExecutor

T = TypeVar("T")


class WantedLeaf(NamedTuple):
    """A leaf that workers read and build.

    Attributes:
        leaf: the number of the stored array in the tree; never an alias.
        abstract: the requested leaf.
        stored: the array that was saved.
    """

    leaf: int
    abstract: Any
    stored: ArrayRecord


@dataclass(frozen=True, slots=True)
class StagedReadResult:
    """Result of a read by several workers.

    Attributes:
        reports: the report of each worker's stage, by worker.
        leaves: the requested leaves, in order. Undefined if a report contains an error.
    """

    reports: Mapping[int, bytes]
    leaves: Sequence[object]


class WorkerLoad:
    """Load like another strategy, but workers read and build the leaves on their devices.

    See `ckptcore.protocols.ReadStrategy`.
    """

    def __init__(self, strategy: ReadStrategy[Any] | None, executor: StagedExecutor) -> None:
        self._strategy = strategy
        self._executor = executor

    def run(self, load: Load[T]) -> T:
        """Load."""
        load.target = _TargetAtWorkers(load.target, self._executor)
        load.read_planned = self._read
        if self._strategy is None:
            return load.run_here()
        loaded: T = self._strategy.run(load)
        return loaded

    def _read(self, reading: TreeRead, context: Context) -> None:
        here = [leaf_read for leaf_read in reading.leaf_reads if not isinstance(leaf_read.handler, LeavesAtWorkers)]
        read_tree(replace(reading, leaf_reads=here), context)
        there = [leaf_read for leaf_read in reading.leaf_reads if isinstance(leaf_read.handler, LeavesAtWorkers)]
        if not there:
            return
        check_sizes(reading.checkpoint, {leaf_read.leaf for leaf_read in there})
        limit = context.memory.load_bytes
        for batch in [there] if limit is None else batches(there, limit):
            wanted = [WantedLeaf(leaf_read.leaf, leaf_read.abstract, leaf_read.record) for leaf_read in batch]
            for leaf_read, leaf in zip(batch, self._read_leaves(reading.checkpoint, wanted, context), strict=True):
                for position in leaf_read.positions:
                    reading.leaves[position] = leaf
                if reading.progress is not None:
                    reading.progress.complete(leaf_read.nbytes)

    def _read_leaves(self, checkpoint: Checkpoint, leaves: Sequence[WantedLeaf], context: Context) -> Sequence[object]:
        """Read the boxes that each worker needs, and build the leaves there. All workers read concurrently.

        Args:
            checkpoint: the checkpoint. Workers open it themselves, and fail if they find another save.
            leaves: the leaves to build; the results have this order.
            context: the options of the controller.

        Raises:
            CheckpointError: the first error of a worker, with further errors as notes.
        """
        executor, save_id = self._executor, None if checkpoint.root is None else checkpoint.root.save_id
        options, recipes = WorkerOptions.of(context), DerivationRecipe.all_of(checkpoint)
        stages = {}
        for worker in range(len(executor.workers)):
            reads = [
                LeafReads(leaf.leaf, leaf.stored.spec, tuple(executor.wanted(leaf.abstract, leaf.stored, worker)))
                for leaf in leaves
            ]
            if any(read.boxes for read in reads):
                stages[worker] = ReadBoxes(checkpoint.location.address, save_id, tuple(reads), options, recipes)
        result = executor.run_reads(stages, leaves)
        failed: list[Exception] = []
        for worker, report in result.reports.items():
            try:
                read_report(report, executor.workers[worker])
            except CheckpointError as error:
                failed.append(error)
        raise_first(failed)
        return result.leaves


class _TargetAtWorkers(LoadTarget[T]):
    """Wrapper of a load target whose leaves are partly built by workers."""

    def __init__(self, target: LoadTarget[T], executor: StagedExecutor) -> None:
        self._target = target
        self._executor = executor

    def match(self, load: Load[T], checkpoint: Checkpoint) -> Matched:
        """Match the leaves, and mark the leaves that workers build."""
        matched = self._target.match(load, checkpoint)
        wrapped: dict[int, LeafHandler] = {}  # one for each handler, so that tied leaves share it
        handlers = list(matched.handlers)
        for position, (handler, abstract) in enumerate(zip(matched.handlers, matched.leaves, strict=True)):
            if handler is not None and position not in matched.arrays and self._executor.makes(abstract):
                handlers[position] = wrapped.setdefault(id(handler), LeavesAtWorkers(handler, self._executor))
        return replace(matched, handlers=handlers)

    def begin(self, load: Load[T], first: TreeRead) -> None:
        """See `LoadTarget`."""
        self._target.begin(load, first)

    def build(self, load: Load[T], reading: TreeRead) -> T:
        """See `LoadTarget`."""
        return self._target.build(load, reading)
