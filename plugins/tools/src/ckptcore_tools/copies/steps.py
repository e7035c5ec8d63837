"""Copying the steps of a run to another directory, and what is kept with the directory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from ckptcore.commit.location import LocationLike, Within, commit_method
from ckptcore.commit.locks import IfInUse, Lock
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.commit.target import Overwrite
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from ckptcore.protocols import StorageBackend
from ckptcore.step_names import StepNames
from ckptcore.training.path_directory import read_directory_metadata, write_directory_metadata
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.copies.copying import CopyReport, CopyVerification, copy_whole

__all__ = ["StepProgressCallback", "StepsCopyReport", "copy_run"]

StepProgressCallback: TypeAlias = Callable[[int, int, int], None]
"""Called with a step, its bytes at the destination and its bytes in all."""


@dataclass(frozen=True, slots=True)
class StepsCopyReport:
    """What a copy of the steps of a run did.

    Attributes:
        steps: by step what was copied, or was there already.
        left: steps of other software that have a directory at the destination: whether those are the same is not known.
        gone: steps that were deleted at the source before they were copied.
        damaged: by step, what is wrong with it at the source; it was not copied.
    """

    steps: Mapping[int, CopyReport] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    damaged: Mapping[int, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the steps that are at the destination."""
        return sum(report.nbytes for report in self.steps.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes that were written there."""
        return sum(report.sent_bytes for report in self.steps.values())


def copy_run(
    source: LocationLike,
    destination: LocationLike,
    context: Context,
    *,
    steps: Collection[int] | None = None,
    names: StepNames | None = None,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    if_in_use: IfInUse = "error",
    progress: StepProgressCallback | None = None,
) -> StepsCopyReport:
    """See `ckptcore.copy_steps`."""
    here, there = (StepDirectory(directory, names or StepNames(), context) for directory in (source, destination))
    here.replace(here.list_names())
    there.replace(there.list_names())
    chosen = _chosen(here, steps)
    store = there.open_to_write()
    with commit_method(store).locks(there.display).own(if_in_use) as owned:
        _copy_metadata(here.store, store, overwrite)
        copy = _RunCopy(here, there, owned, overwrite, verify, progress, context)
        for step in chosen:
            copy.step(step)
    return copy.report()


def _chosen(here: StepDirectory, steps: Collection[int] | None) -> Sequence[int]:
    """The steps to copy, ascending: what is at the destination is a run as it was at some time.

    Raises:
        CheckpointNotFoundError: if there are none, or not all that were asked for.
    """
    if steps is None:
        committed = here.steps()
        if not committed:
            raise CheckpointNotFoundError(f"there is no committed step in {here.display}; check the path")
        return committed
    for step in steps:
        if not here.is_committed(step):
            raise CheckpointNotFoundError(here.missing(step))
    return sorted(set(steps))


def _copy_metadata(here: StorageBackend, there: StorageBackend, overwrite: Overwrite) -> None:
    """Copy what is kept with the directory; what is there stays unless all is replaced."""
    metadata = read_directory_metadata(here)
    if metadata and (overwrite or not read_directory_metadata(there)):
        write_directory_metadata(there, metadata)


class _RunCopy:
    """A copy of steps, one after the other."""

    def __init__(
        self,
        here: StepDirectory,
        there: StepDirectory,
        owned: Lock,
        overwrite: Overwrite,
        verify: CopyVerification,
        progress: StepProgressCallback | None,
        context: Context,
    ) -> None:
        self._here = here
        self._there = there
        self._owned = owned
        self._overwrite = overwrite
        self._verify = verify
        self._progress = progress
        self._context = context
        self._copied: dict[int, CopyReport] = {}
        self._left: list[int] = []
        self._gone: list[int] = []
        self._damaged: dict[int, str] = {}

    def step(self, step: int) -> None:
        """Copy a step; what is wrong with it at the source is noted, and no reason not to copy others.

        Raises:
            CheckpointExistsError: another save is there.
            What `copy_whole` does of the destination.
        """
        name = self._here.name(step)
        if step in self._there.candidates() and self._there.name(step) != name:
            raise CheckpointExistsError(
                f"{self._there.display} has step {step} under the name {self._there.name(step)}, and "
                f"{self._here.display} as {name}: which one would be loaded is not clear; delete one, or copy to "
                "another directory"
            )
        if not self._overwrite and not self._here.is_ours(step) and self._is_anything(name):
            self._left.append(step)
            return
        self._owned.check()
        try:
            self._copied[step] = copy_whole(
                self._here.place(step),
                Within(self._there.directory, name),
                self._context,
                overwrite=self._overwrite,
                verify=self._verify,
                progress=None if self._progress is None else partial(self._progress, step),
            )
        except (CheckpointNotFoundError, ObjectNotFoundError, CorruptCheckpointError) as error:
            if not self._here.look_again(step):
                self._gone.append(step)
                return
            if not isinstance(error, CorruptCheckpointError):
                raise
            self._damaged[step] = str(error)

    def _is_anything(self, name: str) -> bool:
        return bool(subdirectory(self._there.store, name).list_names())

    def report(self) -> StepsCopyReport:
        """What was done."""
        return StepsCopyReport(dict(self._copied), tuple(self._left), tuple(self._gone), dict(self._damaged))
