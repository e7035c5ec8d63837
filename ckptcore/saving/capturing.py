"""Capturing: what a save and its further saves hold of a state until it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ckptcore.io.memory import StagingMemory
from ckptcore.io.snapshot import BoundedSnapshot, CopiedSnapshot, SharedSnapshot, ViewedSnapshot
from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending, WritePlan
from ckptcore.protocols import HeldWork, Snapshot
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import ArraySource, Captured, FilesDescription, SavePart, SharedItems, TreeCaptured
from ckptcore.saving.prepared import Save
from ckptcore.saving.tree_descriptions import StartTransfer

__all__ = ["Copy", "Holding"]


class Copy(Protocol):
    """A copy of some of a state that was begun, here or at the workers of this controller."""

    def wait(self) -> None:
        """Return once the copied leaves are not needed any more: all is copied, or the save that writes it ended."""
        ...


class Holding:
    """What is held of a state for a save: copies, or views if the save blocks. Nothing else is kept of what was copied.

    Attributes:
        at_workers: what workers of this controller hold; None if they write none of the save.
    """

    def __init__(self, save: Save) -> None:
        """Hold nothing yet."""
        self.at_workers: HeldWork[Save] | None = None
        self._save = save
        self._copied: list[CopiedSnapshot] = []

    def view(self) -> None:
        """Hold arrays as they are, for a save that blocks until it is committed."""
        at_workers = self._hold_at_workers(copied=False)
        self._capture(lambda plan, source: ViewedSnapshot(plan, source.start_view(plan)))
        for held in at_workers:
            held.wait()

    def begin_copies(self, memory: StagingMemory) -> Sequence[Copy]:
        """Begin to copy every array once. Once all results were waited for, nothing of the state is needed."""
        at_workers = self._hold_at_workers(copied=True)

        def copied(plan: WritePlan, source: ArraySource) -> Snapshot:
            self._copied.append(CopiedSnapshot(plan, source.start_copy(plan, memory), memory.give_back))
            return self._copied[-1]

        self._capture(copied)
        return [*self._copied, *at_workers]

    def copy_bounded(self, memory: StagingMemory, limit: int) -> Sequence[BoundedSnapshot]:
        """Prepare copies that are made while they are written, so that at most `limit` bytes are held at a time.

        Further saves copy again, because the first copy is gone by then. Workers copy all that they hold at once: the bound is on the
        memory of this process.

        Returns:
            What is to be copied, in the order in which it is written.
        """
        at_workers = self._hold_at_workers(copied=True)
        snapshots: list[BoundedSnapshot] = []

        def bounded(plan: WritePlan, start: StartTransfer) -> Captured:
            snapshots.append(BoundedSnapshot(plan, start, memory.give_back, limit))
            return TreeCaptured(snapshots[-1], snapshots[-1].writer_ended)

        starts: dict[int, StartTransfer] = {}
        for part, source in self._sources():
            starts[id(part)] = source.start_copy(part.plan, memory)
            part.captured = bounded(part.plan, starts[id(part)])
        for part, shared in self._further():
            part.captured = bounded(part.plan, _renumbered(starts[id(shared.part)], shared.items))
        for held in at_workers:
            held.wait()
        return snapshots

    def close(self) -> None:
        """Release everything: the traceback of an error holds the parts for as long as it is kept."""
        for save in (self._save, *self._save.further):
            for part in save.parts:
                part.close()
        for copied in self._copied:
            copied.writer_ended()
        self._copied.clear()
        if self.at_workers is not None:
            self.at_workers.close()
            self.at_workers = None

    def _hold_at_workers(self, *, copied: bool) -> Sequence[Copy]:
        """Let the workers begin to hold what they will write. Return what they hold, if they write any of the save."""
        executor = runtime_of(self._save.context).workers() if self._save.uses_workers else None
        if executor is None:
            return ()
        self.at_workers = executor.hold(self._save, copied=copied)
        return (self.at_workers,)

    def _sources(self) -> Iterator[tuple[SavePart, ArraySource]]:
        """Capture the parts that are files; give each other part with its arrays, and forget these afterwards."""
        for part in self._save.parts:
            source = part.source
            assert source is not None  # captured once
            if isinstance(source, FilesDescription):
                part.captured = source.capture()
            else:
                yield part, source
            part.source = None

    def _further(self) -> Iterator[tuple[SavePart, SharedItems]]:
        """Give the parts of further saves, each with the items that it shares."""
        for save in self._save.further:
            for part in save.parts:
                assert part.shared is not None  # as the strategy prepared it
                yield part, part.shared

    def _capture(self, snapshot_of: Callable[[WritePlan, ArraySource], Snapshot]) -> None:
        shared: dict[int, SharedSnapshot] = {}
        written_again = [id(shared.part) for _, shared in self._further()]
        for part, source in self._sources():
            snapshot = snapshot_of(part.plan, source)
            if id(part) in written_again:
                shared[id(part)] = SharedSnapshot(snapshot)
                part.captured = _share(shared[id(part)], part.plan, range(len(part.plan.items)))
            else:
                part.captured = TreeCaptured(snapshot)
        for part, of_part in self._further():
            part.captured = _share(shared[id(of_part.part)], part.plan, of_part.items)


def _share(shared: SharedSnapshot, plan: WritePlan, items: Sequence[int]) -> Captured:
    share = shared.share(plan, items)
    return TreeCaptured(share, share.close)


def _renumbered(start: StartTransfer, items: Sequence[int]) -> StartTransfer:
    def start_item(number: int) -> Sequence[Pending[HostArray]]:
        return start(items[number])

    return start_item
