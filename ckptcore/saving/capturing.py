"""Capturing: what a save and its exports hold of a state until it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ckptcore.io.memory import StagingMemory
from ckptcore.io.snapshot import BoundedSnapshot, CopiedSnapshot, SharedSnapshot, ViewedSnapshot
from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending, WritePlan
from ckptcore.protocols import Executor, Held, LeafBoxes, Snapshot
from ckptcore.saving.parts import Captured, FilesDescription, Part, TreeCaptured
from ckptcore.saving.preparing import PreparedSave
from ckptcore.saving.tree_descriptions import StartTransfer, TreeDescription
from ckptcore.saving.worker_writes import HeldByWorkers, boxes_at_workers

if TYPE_CHECKING:
    from ckptcore.saving.host_persisting import CopyDescription

__all__ = ["Copies", "Holding"]

_Arrays: TypeAlias = "TreeDescription | CopyDescription"


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a state that were begun.

    Attributes:
        here: in this process.
        at_workers: by the workers of this controller.
    """

    here: Sequence[CopiedSnapshot]
    at_workers: Sequence[Held]

    def wait(self) -> None:
        """Wait until nothing of the state is needed any more: all is copied, or the save that writes it ended."""
        for snapshot in self.here:
            snapshot.wait()
        for held in self.at_workers:
            held.wait()


class Holding:
    """What is held of a state for a save: copies, or views where the save blocks; of what was copied nothing else is kept.

    Attributes:
        parts: by part of the save.
        exports: by export of the save.
        at_workers: what workers of this controller hold; None where none does.
    """

    def __init__(self) -> None:
        self.parts: list[Captured] = []
        self.exports: list[Captured] = []
        self.at_workers: HeldByWorkers | None = None
        self._held: list[Held] = []
        self._copied: list[CopiedSnapshot] = []

    def view(self, save: PreparedSave) -> None:
        """Hold arrays as they are, for a save that blocks until it is committed."""
        if save.executor is not None:
            self._hold(save, save.executor, save.executor.view)
        self._capture(save, lambda part, tree: ViewedSnapshot(part.plan, tree.start_view(part.plan)))
        self._wait_for_workers()

    def begin_copies(self, save: PreparedSave, memory: StagingMemory) -> Copies:
        """Begin to copy every array once. Nothing of the state is needed any more when what is returned was waited for."""
        if save.executor is not None:
            self._hold(save, save.executor, save.executor.copy)

        def copied(part: Part, tree: _Arrays) -> Snapshot:
            self._copied.append(CopiedSnapshot(part.plan, tree.start_copy(part.plan, memory), memory.give_back))
            return self._copied[-1]

        self._capture(save, copied)
        return Copies(tuple(self._copied), tuple(self._held))

    def copy_bounded(self, save: PreparedSave, memory: StagingMemory, limit: int) -> Sequence[BoundedSnapshot]:
        """Get ready to copy while it is written, so that at most `limit` bytes are held at a time.

        What is exported is copied again then: the first copy is gone. Workers copy all that they hold at once: the bound is on the
        memory of this process.

        Returns:
            What is to be copied, in the order in which it is written.
        """
        if save.executor is not None:
            self._hold(save, save.executor, save.executor.copy)
        snapshots: list[BoundedSnapshot] = []

        def bounded(plan: WritePlan, start: StartTransfer) -> Captured:
            snapshots.append(BoundedSnapshot(plan, start, memory.give_back, limit))
            return TreeCaptured(snapshots[-1], snapshots[-1].writer_ended)

        starts: dict[int, StartTransfer] = {}
        for number, (part, description) in enumerate(save.described_parts):
            if isinstance(description, FilesDescription):
                self.parts.append(description.capture())
            else:
                starts[number] = description.start_copy(part.plan, memory)
                self.parts.append(bounded(part.plan, starts[number]))
        for export in save.exports:
            self.exports.append(bounded(export.plan, _renumbered(starts[export.part], export.items)))
        self._wait_for_workers()
        return snapshots

    def close(self) -> None:
        """Let go of everything: the functions in the traceback of an error hold the lists for as long as that is kept."""
        for captured in (*self.parts, *self.exports):
            captured.close()
        for copied in self._copied:
            copied.writer_ended()
        for held in self._held:
            held.close()
        self._copied.clear()
        self._held.clear()
        self.at_workers = None
        self.parts.clear()
        self.exports.clear()

    def _hold(self, save: PreparedSave, executor: Executor, take: Callable[[int, Sequence[LeafBoxes]], Held]) -> None:
        """Let every worker begin to hold what it is to write."""
        trees = [(part, one) for part, one in save.described_parts if isinstance(one, TreeDescription)]
        held: list[Held | None] = [None] * len(executor.workers)
        for worker in range(len(held)):
            if boxes := boxes_at_workers(trees, worker):
                held[worker] = taken = take(worker, boxes)
                self._held.append(taken)
        self.at_workers = HeldByWorkers.of_parts(executor, held, save.described.parts)

    def _wait_for_workers(self) -> None:
        for held in self._held:
            held.wait()

    def _capture(self, save: PreparedSave, snapshot_of: Callable[[Part, _Arrays], Snapshot]) -> None:
        shared: dict[int, SharedSnapshot] = {}
        exported = {export.part for export in save.exports}
        for number, (part, description) in enumerate(save.described_parts):
            if isinstance(description, FilesDescription):
                self.parts.append(description.capture())
                continue
            snapshot = snapshot_of(part, description)
            if number in exported:
                shared[number] = SharedSnapshot(snapshot)
                self.parts.append(_share(shared[number], part.plan, range(len(part.plan.items))))
            else:
                self.parts.append(TreeCaptured(snapshot))
        for export in save.exports:
            self.exports.append(_share(shared[export.part], export.plan, export.items))


def _share(shared: SharedSnapshot, plan: WritePlan, items: Sequence[int]) -> Captured:
    share = shared.share(plan, items)
    return TreeCaptured(share, share.close)


def _renumbered(start: StartTransfer, items: Sequence[int]) -> StartTransfer:
    def start_item(number: int) -> Sequence[Pending[HostArray]]:
        return start(items[number])

    return start_item
