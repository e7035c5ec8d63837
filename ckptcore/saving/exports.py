"""Exports: further checkpoints that a save writes, in other layouts, from the copy that it has made anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptcore.commit.location import LocationLike, Place, Within, absolute_location
from ckptcore.plugins import Plugins
from ckptcore.protocols import Layout
from ckptcore.step_names import whole_number
from ckptcore.tree.subtrees import SubtreePath

__all__ = ["Export", "StepExport", "check_exports"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A further checkpoint, in another layout, of what a save writes or of a part of it.

    It is a checkpoint by itself: committed, verified, loaded and deleted on its own. The save commits its own checkpoint first.

    Attributes:
        location: where to.
        layout: how arrays are laid out: a name, or a layout object with options.
        subtree: which part of the state, such as ``"model"`` or ``("model", "layers", 0)``; paths in the export begin there. Of
            several checkpointables it begins with a name. Empty: all of it.
    """

    location: Place
    layout: str | Layout = "safetensors"
    subtree: SubtreePath = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExport:
    """A further checkpoint for steps of a `Checkpointer`.

    Exports are kept until they are deleted: preservation policies are for steps, and weights are often to outlive them.

    Attributes:
        directory: where they go: each into a directory with the name of its step.
        layout, subtree: as of an `Export`.
        every: exported are the saved steps whose number is a multiple of it.
    """

    directory: LocationLike
    layout: str | Layout = "safetensors"
    subtree: SubtreePath = ()
    every: int = 1

    def __post_init__(self) -> None:
        if whole_number("every", self.every) < 1:
            raise ValueError(f"StepExport(every={self.every!r}): expected at least 1")

    def wants(self, step: int) -> bool:
        """Whether a step that is saved is exported."""
        return step % self.every == 0

    def of_step(self, name: str) -> Export:
        """The export of the step with this name."""
        return Export(location=Within(self.directory, name), layout=self.layout, subtree=self.subtree)


def check_exports(exports: Sequence[StepExport], steps: LocationLike, plugins: Plugins) -> tuple[StepExport, ...]:
    """The exports of a `Checkpointer`; refuses what would fail the run at the first step that all of it is for.

    Args:
        exports: what the user gave.
        steps: the directory of the run.
        plugins: that know layouts.

    Raises:
        TypeError: if one is no export.
        ValueError: if one goes where the steps are, or where another goes.
        UnknownPluginError: if one has a layout that is not there.
    """
    taken = {absolute_location(steps): "where the steps are"}
    for number, export in enumerate(exports):
        if not isinstance(export, StepExport):
            raise TypeError(
                f"Checkpointer(exports=...): number {number} is {export!r}; expected a StepExport(directory=...)"
            )
        place = absolute_location(export.directory)
        if place in taken:
            raise ValueError(
                f"Checkpointer(exports=...): number {number} goes into {export.directory}, {taken[place]}; give it a directory of its own"
            )
        taken[place] = f"where number {number} goes"
        plugins.layout(export.layout)
    return tuple(exports)
