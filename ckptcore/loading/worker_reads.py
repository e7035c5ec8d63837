"""Fetching: leaves that the workers of a single controller read and make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.loading.opened import Opened
from ckptcore.loading.worker_stages import ReadBoxes, ReadsOf, WorkerOptions, read_report
from ckptcore.model.arrays import Box
from ckptcore.protocols import Executor, WantedLeaf

if TYPE_CHECKING:
    from ckptcore.loading.derived import Recipe

__all__ = ["WantedAtWorkers", "fetch_leaves"]


@dataclass(frozen=True, slots=True)
class WantedAtWorkers:
    """A leaf that workers are to read and make.

    Attributes:
        leaf: its number in the tree that was saved; no alias.
        wanted: what is asked for.
        boxes: by worker, what it reads of the array.
    """

    leaf: int
    wanted: WantedLeaf
    boxes: tuple[tuple[Box, ...], ...]

    @property
    def nbytes(self) -> int:
        """The most that one worker reads of it, in bytes."""
        elements = [sum([box.size for box in boxes]) for boxes in self.boxes]
        return max(elements, default=0) * self.wanted.stored.spec.numpy_dtype.itemsize


def fetch_leaves(
    opened: Opened, executor: Executor, leaves: Sequence[WantedAtWorkers], context: Context
) -> Sequence[object]:
    """Let workers read and make leaves; returns these in order.

    Raises:
        CheckpointError: what a worker found wrong, or RankFailedError if one is gone.
    """
    save_id = None if opened.root is None else opened.root.save_id
    options = WorkerOptions.of(context)
    recipes = () if opened.derived is None else _recipes(opened)
    stages = {}
    for worker in range(len(executor.workers)):
        reads = [ReadsOf(leaf.leaf, leaf.wanted.stored.spec, leaf.boxes[worker]) for leaf in leaves]
        if any(read.boxes for read in reads):
            stages[worker] = ReadBoxes(opened.location.to_open, save_id, tuple(reads), options, recipes)
    fetched = executor.read(stages, [leaf.wanted for leaf in leaves])
    failed: list[CheckpointError] = []
    for worker, report in fetched.reports.items():
        try:
            read_report(report, executor.workers[worker])
        except CheckpointError as error:
            failed.append(error)
    if failed:
        for other in failed[1:]:
            failed[0].add_note(f"and then: {type(other).__name__}: {other}")
        raise failed[0]
    return fetched.leaves


def _recipes(opened: Opened) -> tuple[Recipe, ...]:
    from ckptcore.loading.derived import Recipe  # is there by now

    return Recipe.all_of(opened)
