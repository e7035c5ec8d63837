"""What the workers of a single controller hold of a save, and the writing of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ckptcore.commit.location import Location
from ckptcore.commit.root import Claimed
from ckptcore.loading.workers import WorkerOptions, WorkerPart, WriteParts, read_report
from ckptcore.model.transfer import Pending, Receipt
from ckptcore.protocols import Executor, Held, LeafBoxes
from ckptcore.saving.parts import SavePart
from ckptcore.saving.tree_descriptions import TreeDescription

__all__ = ["HeldByWorkers", "WorkerWrites", "boxes_at_workers"]


def boxes_at_workers(parts: Sequence[SavePart], worker: int) -> Sequence[LeafBoxes]:
    """What a worker holds for a save: of each part that workers write, what its plan says, in that order."""
    return [
        boxes
        for part in parts
        if part.worker_plans and isinstance(part.source, TreeDescription)
        for boxes in part.source.boxes_of(part.worker_plans[worker])
    ]


@dataclass(frozen=True, slots=True)
class HeldByWorkers:
    """What workers hold for one checkpoint.

    Attributes:
        executor: the workers.
        parts: of the checkpoint.
        held: by worker, what it holds; None where that is nothing.
        numbers: by worker and part of the checkpoint, for each item of the worker's plan the number of what it holds.
    """

    executor: Executor
    parts: Sequence[SavePart]
    held: Sequence[Held | None]
    numbers: Sequence[Sequence[tuple[int, ...]]]

    @classmethod
    def of_parts(cls, executor: Executor, held: Sequence[Held | None], parts: Sequence[SavePart]) -> HeldByWorkers:
        """What workers hold that were asked for `boxes_at_workers`."""
        numbers = []
        for worker in range(len(held)):
            taken = 0
            of_worker = []
            for part in parts:
                items = len(part.worker_plans[worker].items) if part.worker_plans else 0
                of_worker.append(tuple(range(taken, taken + items)))
                taken += items
            numbers.append(of_worker)
        return cls(executor, parts, held, numbers)

    def share(self, source: SavePart, items: Sequence[Sequence[int]]) -> HeldByWorkers | None:
        """Return what workers hold for a further checkpoint of one of the parts; None if they hold none of it.

        Args:
            source: the part.
            items: by worker, for each item of the further plan the item of that of the part.
        """
        if not items:
            return None
        part = next(number for number, found in enumerate(self.parts) if found is source)
        numbers = [
            [tuple([of_worker[part][item] for item in chosen])]
            for of_worker, chosen in zip(self.numbers, items, strict=True)
        ]
        return replace(self, numbers=numbers)

    def begin_writing(
        self, location: Location, claimed: Claimed, parts: Sequence[SavePart], options: WorkerOptions
    ) -> WorkerWrites:
        """Let every worker that has something of a part write it. Does not wait."""
        begun: list[tuple[int, Sequence[int], Pending[bytes]]] = []
        for worker, held in enumerate(self.held):
            chosen = [number for number, part in enumerate(parts) if part.worker_plans]
            if held is None or not any(parts[number].worker_plans[worker].items for number in chosen):
                continue
            stage = WriteParts(
                location.to_open,
                claimed,
                tuple(
                    [
                        WorkerPart(
                            parts[number].directory,
                            parts[number].layout,
                            parts[number].worker_plans[worker],
                            self.numbers[worker][number],
                        )
                        for number in chosen
                    ]
                ),
                options,
            )
            try:
                begun.append((worker, chosen, self.executor.write(worker, stage, held)))
            except BaseException:
                WorkerWrites(self.executor, parts, begun).settle()  # what they write would be removed meanwhile
                raise
        return WorkerWrites(self.executor, parts, begun)


class WorkerWrites:
    """Workers that are writing parts of one checkpoint."""

    def __init__(
        self, executor: Executor, parts: Sequence[SavePart], begun: Sequence[tuple[int, Sequence[int], Pending[bytes]]]
    ) -> None:
        """`begun` has for each worker its number, the parts that it writes, and its report to come."""
        self._executor = executor
        self._parts = parts
        self._begun = begun

    def settle(self) -> None:
        """Wait until no worker writes any more, whatever became of it: another error stopped the save."""
        for _, _, report in self._begun:
            with suppress(Exception):  # the one that stopped the save is raised; all workers are waited for
                report.result()

    def receipts(self) -> Sequence[Sequence[Receipt]]:
        """By part, what workers wrote; waits for all of them, also if one failed.

        Raises:
            RankFailedError: if a worker failed, or is gone; the first of them.
            CheckpointError: what it failed with.
        """
        found: list[list[Receipt]] = [[] for _ in self._parts]
        failed: list[Exception] = []
        for worker, chosen, report in self._begun:
            name = self._executor.workers[worker]
            try:
                receipts: Sequence[Receipt] = read_report(report.result(), name)
                for number, receipt in zip(chosen, receipts, strict=True):
                    part = self._parts[number]
                    found[number].append(replace(receipt, items=part.worker_plans[worker].items))
            except Exception as error:  # noqa: BLE001  # the others are waited for first, then it is raised
                failed.append(error)
        if failed:
            for other in failed[1:]:
                failed[0].add_note(f"and then: {type(other).__name__}: {other}")
            raise failed[0]
        return found
