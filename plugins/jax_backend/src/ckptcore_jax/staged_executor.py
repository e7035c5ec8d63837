"""`StagedExecutor`: an executor whose workers run pickled stages. Independent of the transport. Imports no JAX."""

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
from ckptcore.protocols import WantedLeaf, WorkerCapture
from ckptcore.saving.parts import FilesDescription, SavePart
from ckptcore.saving.requests import Save
from ckptcore_jax.worker_stages import (
    DerivationRecipe,
    LeafReads,
    ReadBoxes,
    ReadStage,
    WorkerOptions,
    WorkerPart,
    WriteParts,
    WriteStage,
    read_report,
)

__all__ = ["HeldElements", "LeafBoxes", "StagedExecutor", "StagedReadResult"]


@dataclass(frozen=True, slots=True)
class LeafBoxes:
    """Boxes of a leaf on one worker.

    Attributes:
        leaf: the leaf on the controller; its elements are on the workers.
        boxes: the boxes, without overlap.
    """

    leaf: Any
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class StagedReadResult:
    """Result of a read by several workers.

    Attributes:
        reports: the report of each worker's stage, by worker.
        leaves: the requested leaves, in order. Undefined if a report contains an error.
    """

    reports: Mapping[int, bytes]
    leaves: Sequence[object]


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


class StagedExecutor(ABC):
    """A `ckptcore.protocols.Executor` whose workers run stages.

    Subclasses implement the leaf types, and the transport of stages and elements.
    """

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
        """Return the boxes that a worker must read for its part of a leaf. See `LeafHandler.wanted`.

        Raises:
            UnsupportedLeafError: if the stored array cannot be converted to the requested leaf.
        """

    @abstractmethod
    def take(self, worker: int, leaves: Sequence[LeafBoxes], *, copied: bool) -> HeldElements:
        """Begin to keep boxes in the memory of a worker.

        Args:
            worker: number of the worker.
            leaves: the leaves, with the boxes to keep.
            copied: True to copy them, so that later changes of the leaves do not affect an
                asynchronous save.
        """

    @abstractmethod
    def run_write(self, worker: int, stage: WriteStage, held: HeldElements) -> Pending[bytes]:
        """Start a stage on a worker with its held elements. Does not wait, so that workers write concurrently.

        Returns:
            The pending report of the stage. It is ready only after the worker has stopped writing,
            also after an error.
        """

    @abstractmethod
    def run_reads(self, stages: Mapping[int, ReadStage], leaves: Sequence[WantedLeaf]) -> StagedReadResult:
        """Run read stages on the workers, and build the leaves there. Return when all are done.

        Args:
            stages: stages by worker. A worker that needs no box has no stage.
            leaves: the leaves to build.
        """

    def capture(self, save: Save, *, copied: bool) -> WorkerCapture[Save]:
        """See `Executor`."""
        work = _HeldSave(self)
        try:
            parts = [part for one in (save, *save.further) for part in one.parts]
            for worker in range(len(self.workers)):
                work.take(worker, parts, copied=copied)
        except BaseException:
            work.close()
            raise
        return work

    def read_bytes(self, abstract: Any, stored: ArrayRecord) -> int:
        """See `Executor`."""
        wanted = [self.wanted(abstract, stored, worker) for worker in range(len(self.workers))]
        elements = max([sum([box.size for box in boxes]) for boxes in wanted], default=0)
        return elements * stored.spec.numpy_dtype.itemsize

    def read(self, opened: Checkpoint, leaves: Sequence[WantedLeaf], context: Context) -> Sequence[object]:
        """See `Executor`."""
        save_id = None if opened.root is None else opened.root.save_id
        options, recipes = WorkerOptions.of(context), DerivationRecipe.all_of(opened)
        stages = {}
        for worker in range(len(self.workers)):
            reads = [
                LeafReads(leaf.leaf, leaf.stored.spec, tuple(self.wanted(leaf.abstract, leaf.stored, worker)))
                for leaf in leaves
            ]
            if any(read.boxes for read in reads):
                stages[worker] = ReadBoxes(opened.location.address, save_id, tuple(reads), options, recipes)
        result = self.run_reads(stages, leaves)
        failed: list[Exception] = []
        for worker, report in result.reports.items():
            try:
                read_report(report, self.workers[worker])
            except CheckpointError as error:
                failed.append(error)
        _raise_first(failed)
        return result.leaves


class _HeldSave:
    """The elements of a save that the workers hold. See `WorkerCapture`."""

    def __init__(self, executor: StagedExecutor) -> None:
        self._executor = executor
        self._held: dict[int, HeldElements] = {}
        self._parts: list[SavePart] = []  # references keep the ids in `_first` valid
        self._positions: dict[tuple[int, int], tuple[int, ...]] = {}
        """By worker and id of a part, for each item the position of its boxes among those that the worker holds."""

    def take(self, worker: int, parts: Sequence[SavePart], *, copied: bool) -> None:
        """Begin to keep the elements that a worker will write for parts of a save and its further saves."""
        boxes: dict[tuple[int, tuple[Box, ...]], LeafBoxes] = {}
        for part in parts:
            if part.worker_plans:
                assert part.source is not None and not isinstance(part.source, FilesDescription)  # leaves are in trees
                self._parts.append(part)
                keys = []
                for item in part.worker_plans[worker].items:
                    leaf = part.source.boxes(item).leaf
                    keys.append((id(leaf), item.boxes))
                    boxes.setdefault(keys[-1], LeafBoxes(leaf, item.boxes))
                numbers = {key: number for number, key in enumerate(boxes)}
                self._positions[worker, id(part)] = tuple([numbers[key] for key in keys])
        if boxes:
            self._held[worker] = self._executor.take(worker, list(boxes.values()), copied=copied)

    def wait(self) -> None:
        """See `WorkerCapture`."""
        for held in self._held.values():
            held.wait()

    def close(self) -> None:
        """See `WorkerCapture`."""
        for held in self._held.values():
            held.close()

    def write(self, save: Save) -> Pending[Sequence[Sequence[Receipt]]]:
        """See `WorkerCapture`."""
        location, claimed, options = save.target.location, save.info.claimed, WorkerOptions.of(save.context)
        parts = {number: part for number, part in enumerate(save.parts) if part.worker_plans}
        writes = _RunningWrites(self._executor, save.parts)
        try:
            for worker, held in self._held.items():
                if any(part.worker_plans[worker].items for part in parts.values()):
                    worker_parts = [self._worker_part(worker, part) for part in parts.values()]
                    stage = WriteParts(location.address, claimed, tuple(worker_parts), options)
                    writes.begun.append((worker, tuple(parts), self._executor.run_write(worker, stage, held)))
        except BaseException:
            with suppress(Exception):  # wait for running workers before the caller removes the written objects
                writes.result()
            raise
        return writes

    def _worker_part(self, worker: int, part: SavePart) -> WorkerPart:
        positions = self._positions[worker, id(part)]
        return WorkerPart(part.directory, part.layout, part.worker_plans[worker], positions)


class _RunningWrites:
    """Workers that are writing the parts of a save. See `WorkerCapture.write`.

    Attributes:
        begun: for each worker its number, the numbers of its parts, and the pending report.
    """

    def __init__(self, executor: StagedExecutor, parts: Sequence[SavePart]) -> None:
        self.begun: list[tuple[int, Sequence[int], Pending[bytes]]] = []
        self._executor = executor
        self._parts = parts

    def result(self) -> Sequence[Sequence[Receipt]]:
        """Wait for all workers. Return their receipts for each part.

        Raises:
            CheckpointError: the error of a worker.
            RankFailedError: if a worker failed with another error, or did not answer.
        """
        found: list[list[Receipt]] = [[] for _ in self._parts]
        failed: list[Exception] = []
        for worker, numbers, report in self.begun:
            try:
                receipts: Sequence[Receipt] = read_report(report.result(), self._executor.workers[worker])
                for number, receipt in zip(numbers, receipts, strict=True):
                    found[number].append(receipt._replace(items=self._parts[number].worker_plans[worker].items))
            except Exception as error:  # noqa: BLE001  # raised below, after every worker has ended
                failed.append(error)
        _raise_first(failed)
        return found


def _raise_first(failed: Sequence[Exception]) -> None:
    """Raise the first error with the others as notes, or return if there are none."""
    if failed:
        for other in failed[1:]:
            failed[0].add_note(f"and then: {type(other).__name__}: {other}")
        raise failed[0]
