"""StagedExecutor: an executor that sends pickled stages to its workers, whatever carries them. Imports no JAX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.model import ArrayRecord, Box, Pending, Receipt, Shard
from ckptcore.protocols import HeldWork, WantedLeaf
from ckptcore.saving.parts import SavePart
from ckptcore.saving.requests import Save
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore_jax.worker_stages import (
    ReadBoxes,
    ReadsOf,
    ReadStage,
    Recipe,
    WorkerOptions,
    WorkerPart,
    WriteParts,
    WriteStage,
    read_report,
)

__all__ = ["Fetched", "Held", "LeafBoxes", "StagedExecutor"]


@dataclass(frozen=True, slots=True)
class LeafBoxes:
    """Boxes of a leaf that a worker holds.

    Attributes:
        leaf: the leaf at the controller; its elements are at the workers.
        boxes: without overlap.
    """

    leaf: Any
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a read.

    Attributes:
        reports: by worker, the report of its stage.
        leaves: the requested leaves, in order; of no use if a report has an error.
    """

    reports: Mapping[int, bytes]
    leaves: Sequence[object]


class Held(Protocol):
    """Elements that one worker holds for a save. Any thread."""

    def wait(self) -> None:
        """Return once the leaves are not needed any more.

        Raises:
            RankFailedError: the worker could not take the elements, or is gone.
        """
        ...

    def close(self) -> None:
        """Release the elements. Closing again, or after the worker is gone, is no error."""
        ...


class StagedExecutor(ABC):
    """A `ckptcore.protocols.Executor` whose workers run stages. Subclasses know leaves, and carry stages and elements."""

    @property
    @abstractmethod
    def workers(self) -> Sequence[str]:
        """See `Executor`."""

    @abstractmethod
    def takes(self, leaf: Any) -> bool:
        """See `Executor`."""

    @abstractmethod
    def makes(self, abstract: Any) -> bool:
        """See `Executor`."""

    @abstractmethod
    def identity(self, leaf: Any) -> Hashable | None:
        """See `Executor`."""

    @abstractmethod
    def shards(self, leaf: Any, worker: int) -> Sequence[Shard]:
        """See `Executor`."""

    @abstractmethod
    def wanted(self, abstract: Any, stored: ArrayRecord, worker: int) -> Sequence[Box]:
        """Return the boxes that a worker needs for its part of a leaf. See `LeafHandler.wanted`.

        Raises:
            UnsupportedLeafError: the stored array cannot become what is requested.
        """

    @abstractmethod
    def take(self, worker: int, leaves: Sequence[LeafBoxes], *, copied: bool) -> Held:
        """Begin to hold boxes at a worker.

        Args:
            worker: its number.
            leaves: the boxes.
            copied: True to copy them to memory that nobody changes or frees, for an asynchronous save.
        """

    @abstractmethod
    def run_write(self, worker: int, stage: WriteStage, held: Held) -> Pending[bytes]:
        """Begin to run a stage at a worker on the elements that it holds. Does not wait, so that workers write at once.

        Returns:
            The report of the stage. A result or an error comes only once the worker writes no more.
        """

    @abstractmethod
    def run_reads(self, stages: Mapping[int, ReadStage], leaves: Sequence[WantedLeaf]) -> Fetched:
        """Run a stage at each of some workers, and make leaves there of what they read. Return when all are done.

        Args:
            stages: by worker. A worker that needs no box of any leaf has none.
            leaves: the leaves to make.
        """

    def hold(self, save: Save, *, copied: bool) -> HeldWork[Save]:
        """See `Executor`."""
        held = _HeldParts(self)
        try:
            for worker in range(len(self.workers)):
                held.take(worker, save.parts, copied=copied)
        except BaseException:
            held.close()
            raise
        return held

    def read_bytes(self, abstract: Any, stored: ArrayRecord) -> int:
        """See `Executor`."""
        wanted = [self.wanted(abstract, stored, worker) for worker in range(len(self.workers))]
        elements = max([sum([box.size for box in boxes]) for boxes in wanted], default=0)
        return elements * stored.spec.numpy_dtype.itemsize

    def read(self, opened: Checkpoint, leaves: Sequence[WantedLeaf], context: Context) -> Sequence[object]:
        """See `Executor`."""
        save_id = None if opened.root is None else opened.root.save_id
        options, recipes = WorkerOptions.of(context), Recipe.all_of(opened)
        stages = {}
        for worker in range(len(self.workers)):
            reads = [
                ReadsOf(leaf.leaf, leaf.stored.spec, tuple(self.wanted(leaf.abstract, leaf.stored, worker)))
                for leaf in leaves
            ]
            if any(read.boxes for read in reads):
                stages[worker] = ReadBoxes(opened.location.to_open, save_id, tuple(reads), options, recipes)
        fetched = self.run_reads(stages, leaves)
        failed: list[Exception] = []
        for worker, report in fetched.reports.items():
            try:
                read_report(report, self.workers[worker])
            except CheckpointError as error:
                failed.append(error)
        _raise_first(failed)
        return fetched.leaves


class _HeldParts:
    """What the workers hold of the parts of a save. See `HeldWork`."""

    def __init__(self, executor: StagedExecutor) -> None:
        """Hold nothing yet."""
        self._executor = executor
        self._held: dict[int, Held] = {}
        self._parts: list[SavePart] = []  # keeps the ids of `_first`
        self._first: dict[tuple[int, int], int] = {}
        """By worker and id of a part, the number of the first leaf of the part among those that the worker holds."""

    def take(self, worker: int, parts: Sequence[SavePart], *, copied: bool) -> None:
        """Let a worker begin to hold what it writes of the parts of a save."""
        boxes: list[LeafBoxes] = []
        for part in parts:
            if part.worker_plans:
                assert isinstance(part.source, TreeDescription)  # only leaves of trees are at workers
                self._parts.append(part)
                self._first[worker, id(part)] = len(boxes)
                for item in part.worker_plans[worker].items:
                    boxes.append(LeafBoxes(part.source.leaf(item.leaf)[0], item.boxes))
        if boxes:
            self._held[worker] = self._executor.take(worker, boxes, copied=copied)

    def wait(self) -> None:
        """See `HeldWork`."""
        for held in self._held.values():
            held.wait()

    def close(self) -> None:
        """See `HeldWork`."""
        for held in self._held.values():
            held.close()

    def write(self, save: Save) -> Pending[Sequence[Sequence[Receipt]]]:
        """See `HeldWork`."""
        location, claimed, options = save.target.location, save.info.claimed, WorkerOptions.of(save.context)
        parts = {number: part for number, part in enumerate(save.parts) if part.worker_plans}
        writes = _Writes(self._executor, save.parts)
        try:
            for worker, held in self._held.items():
                if any(part.worker_plans[worker].items for part in parts.values()):
                    written = [self._part(worker, part) for part in parts.values()]
                    stage = WriteParts(location.to_open, claimed, tuple(written), options)
                    writes.begun.append((worker, tuple(parts), self._executor.run_write(worker, stage, held)))
        except BaseException:
            with suppress(Exception):  # the workers that have begun would write into what is removed
                writes.result()
            raise
        return writes

    def _part(self, worker: int, part: SavePart) -> WorkerPart:
        plan, shared = part.worker_plans[worker], part.shared
        first = self._first[worker, id(part if shared is None else shared.part)]
        items = range(len(plan.items)) if shared is None else shared.worker_items[worker]
        return WorkerPart(part.directory, part.layout, plan, tuple([first + item for item in items]))


class _Writes:
    """Workers that are writing parts of a save; see `HeldWork.write`.

    Attributes:
        begun: the number of each worker, those of the parts that it writes, and its pending report.
    """

    def __init__(self, executor: StagedExecutor, parts: Sequence[SavePart]) -> None:
        self.begun: list[tuple[int, Sequence[int], Pending[bytes]]] = []
        self._executor = executor
        self._parts = parts

    def result(self) -> Sequence[Sequence[Receipt]]:
        """Wait for all workers; return their receipts by part.

        Raises:
            RankFailedError: a worker failed, or is gone. Other `CheckpointError` of a worker are raised as they are.
        """
        found: list[list[Receipt]] = [[] for _ in self._parts]
        failed: list[Exception] = []
        for worker, numbers, report in self.begun:
            try:
                receipts: Sequence[Receipt] = read_report(report.result(), self._executor.workers[worker])
                for number, receipt in zip(numbers, receipts, strict=True):
                    found[number].append(receipt._replace(items=self._parts[number].worker_plans[worker].items))
            except Exception as error:  # noqa: BLE001  # raised below, once every worker has ended
                failed.append(error)
        _raise_first(failed)
        return found


def _raise_first(failed: Sequence[Exception]) -> None:
    """Raise the first of some errors, with the others as notes."""
    if failed:
        for other in failed[1:]:
            failed[0].add_note(f"and then: {type(other).__name__}: {other}")
        raise failed[0]
