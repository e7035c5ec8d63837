"""Strategies of loads: how the stages of a load run, and the source of boxes of stored arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import ReadPlan

LoadT_contra = TypeVar("LoadT_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)

ReadBoxes: TypeAlias = Callable[[ReadPlan, Sequence[HostArray]], Iterable[int]]
"""Fills C-contiguous buffers with the boxes of a plan. Yields the number of each box once it is complete."""


class ReadThrough(Protocol):
    """Reads boxes of stored arrays from another source than the checkpoint, such as a cache."""

    def __call__(
        self, content_id: str | None, plan: ReadPlan, buffers: Sequence[HostArray], read_stored: ReadBoxes
    ) -> Iterable[int]:
        """Fill buffers with the boxes of a plan. Yields the number of each box once it is complete.

        Args:
            content_id: identifies the stored tree. Every save, and every checkpointable of a save, has a different id.
                None if other software wrote the checkpoint: its bytes may change, so they may not be cached.
            plan: the boxes, of arrays in their stored form.
            buffers: for each box, C-contiguous memory of its shape and the stored dtype.
            read_stored: reads boxes from the checkpoint and verifies them. Accepts any boxes of the tree of the plan.
        """
        ...


class StagedLoad(Protocol[T_co]):
    """A load of one tree, as a strategy uses it."""

    def run_here(self, read_through: ReadThrough | None = None) -> T_co:
        """Run all stages in this process, and return the loaded value. Repeats them if the checkpoint was replaced.

        Args:
            read_through: reads boxes from another source; None: read the checkpoint.
        """
        ...


class ReadStrategy(Protocol[LoadT_contra]):
    """The reads of a load. Pass one as ``ckptcore.load(..., strategy=...)``. Thread-safe.

    `LoadT_contra` is ``ckptcore.loading.load.Load``, which is a `StagedLoad`.
    """

    def run(self, load: LoadT_contra) -> Any:
        """Run a load, and return the loaded value."""
        ...
