"""Copies of the steps of a run, and of the metadata of its directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ckptcore.commit.delete import concerns_one_entry
from ckptcore.commit.location import LocationLike, SubPath
from ckptcore.commit.locks import IfInUse, Lock
from ckptcore.commit.stored_root import Overwrite
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context, default_context
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    StorageError,
)
from ckptcore.progress import ProgressCallback
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNames
from ckptcore.training.path_directory import read_directory_metadata, write_directory_metadata
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.copies.copying import CopyReport, CopyVerification, copy_whole

_SHOWN: Final = 5
"""Maximum number of steps or names in an error."""


@dataclass(frozen=True, slots=True)
class StepsCopyReport:
    """Result of copying the steps of a run.

    Attributes:
        steps: reports of the steps that are at the destination, copied now or before.
        skipped: steps of other software that were not copied, because their directory exists at the destination.
            Without a root, ckptcore cannot tell whether the directory contains the same checkpoint.
        deleted_at_source: steps that were deleted at the source before they were copied.
        damaged: the error of each step that was not copied, because it is damaged at the source.
        failed: the error of each step that was not copied, because this process may not read or write it, or because it
            is in an archive.
        left_out: files in the directory of the steps, such as ``latest_checkpointed_iteration.txt``. They are not
            copied.
    """

    steps: Mapping[int, CopyReport] = field(default_factory=dict)
    skipped: tuple[int, ...] = ()
    deleted_at_source: tuple[int, ...] = ()
    damaged: Mapping[int, str] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the steps at the destination."""
        return sum(report.nbytes for report in self.steps.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes that were written."""
        return sum(report.sent_bytes for report in self.steps.values())


def copy_steps(
    source: LocationLike,
    destination: LocationLike,
    *,
    steps: Collection[int] | None = None,
    step_names: StepNames | None = None,
    overwrite: Overwrite = False,
    verify: CopyVerification = "passing",
    if_in_use: IfInUse = "error",
    progress: bool | ProgressCallback = False,
    context: Context | None = None,
) -> StepsCopyReport:
    """Copy the committed steps of a run to another directory, under the same names, with the metadata of the run.

    The steps are copied byte for byte; see `copy`. They are copied in ascending order, so an interrupted copy is an
    earlier state of the run. Calling this again resumes, and also copies steps that were saved since. Without
    `overwrite`, steps that exist at the destination are not copied again. This process owns the destination during the
    copy.

    Args:
        source, destination: the directories of steps, as paths or URLs.
        steps: the steps to copy. None: all committed steps.
        step_names: the naming of the steps. None: the usual names. If no step has one, steps with another prefix are
            copied, if only one prefix has checkpoints.
        overwrite, verify: see `copy`. `overwrite` also replaces the metadata of the destination.
        if_in_use: what to do if another job owns the destination; see `Checkpointer`.
        progress: see `copy`. The total is an estimate until the last step: it assumes that later steps have the size of
            the current one.
        context: options.

    Raises:
        CheckpointNotFoundError: if one of `steps` does not exist, or if the source has no steps. Steps that are deleted
            during the copy are listed in the report.
        CheckpointExistsError: if the destination has another save of a step. The steps before this step are copied.
        DirectoryInUseError: if another job writes steps to the destination.
        CheckpointError: see `copy`. Steps that are damaged at the source, or that this process may not read or write,
            are listed in the report. If this process may not read or write any of the steps, the first error is raised.
    """
    context = context or default_context()
    from_steps, to_steps = (
        StepDirectory(directory, step_names or StepNames(), context) for directory in (source, destination)
    )
    from_steps.replace(from_steps.list_steps())
    to_steps.replace(to_steps.list_names())
    chosen, unread = _choose_steps(from_steps, steps)
    store = to_steps.open_to_write()
    with runtime_of(context).show_progress(progress, "copying") as report:
        counted = _StepsProgress(report, len(chosen))
        with to_steps.commit_method(store).locks(to_steps.display).own(if_in_use) as lock:
            _copy_metadata(from_steps.store, store, overwrite)
            copy = _RunCopy(from_steps, to_steps, lock, overwrite, verify, counted, context, unread)
            for step in chosen:
                copy.step(step)
                counted.end_step()
        counted.report(0, 0)
    return replace(copy.report(), left_out=_other_files(from_steps))


def _choose_steps(
    source: StepDirectory, steps: Collection[int] | None
) -> tuple[Sequence[int], Mapping[int, StorageError]]:
    """Return the steps to copy, and the errors of those that this process may not read.

    The steps are ascending, so that an interrupted copy is an earlier state of the run.

    Raises:
        CheckpointNotFoundError: if a requested step does not exist, or if the source has no steps.
        StorageError: if the storage fails, or no step can be read.
    """
    asked = source.candidates() if steps is None else sorted(set(steps))
    states = dict(zip(asked, source.map_ordered(asked, source.is_committed_or_why), strict=True))
    unread = {step: error for step, error in states.items() if isinstance(error, StorageError)}
    chosen = [step for step in asked if states[step] is True]
    for step in asked if steps is not None else ():
        if states[step] is False:
            newest = ", ".join(map(str, source.steps()[-_SHOWN:]))
            raise CheckpointNotFoundError(
                f"{source.display} has no committed step {step}; the newest: {newest}" if newest else _no_steps(source)
            )
    if not chosen:
        for unreadable in unread.values():
            raise unreadable
        if steps is None:
            raise CheckpointNotFoundError(_no_steps(source))
    return chosen, unread


def _no_steps(source: StepDirectory) -> str:
    """Return the error message for a directory without steps."""
    names = sorted(name for name in source.store.list_names() if not name.startswith("."))
    if not names:
        way = "check the path. Or it is a file: give the directory of the steps"
        return f"{source.display} does not exist or is empty: {way}"
    return (
        f"{source.display} has no committed steps, but {', '.join(map(repr, names[:_SHOWN]))}: copy a checkpoint "
        "without a step by ckptcore.copy"
    )


def _other_files(source: StepDirectory) -> tuple[str, ...]:
    """Return the files in a directory of steps. Its metadata is not included, because it is in a hidden directory."""
    steps = set(source.list_names().values())
    names = [name for name in source.store.list_names() if not name.startswith(".") and name not in steps]
    return tuple(sorted([name for name in names if not name.endswith("/")]))


def _copy_metadata(source: StorageBackend, destination: StorageBackend, overwrite: Overwrite) -> None:
    """Copy the metadata of the directory. Without `overwrite`, existing metadata is not replaced."""
    metadata = read_directory_metadata(source)
    if metadata and (overwrite or not read_directory_metadata(destination)):
        write_directory_metadata(destination, metadata)


class _StepsProgress:
    """Adds up the progress of steps that are copied one after another."""

    def __init__(self, report: ProgressCallback | None, count: int) -> None:
        self._report = report
        self._left = count
        self._before = self._done = 0

    def report(self, done: int, total: int) -> None:
        """Report the progress of the current step. Later steps are assumed to have its size."""
        self._done = self._before + done
        if self._report is not None:
            self._report(self._done, self._before + total * self._left)

    def end_step(self) -> None:
        """End the current step, whether it was copied or not."""
        self._left -= 1
        self._before = self._done


class _RunCopy:
    """Copies steps one after another and collects the report."""

    def __init__(
        self,
        source: StepDirectory,
        destination: StepDirectory,
        lock: Lock,
        overwrite: Overwrite,
        verify: CopyVerification,
        progress: _StepsProgress,
        context: Context,
        failed: Mapping[int, StorageError],
    ) -> None:
        self._source = source
        self._destination = destination
        self._lock = lock
        self._overwrite = overwrite
        self._verify = verify
        self._progress = progress
        self._context = context
        self._copied: dict[int, CopyReport] = {}
        self._skipped: list[int] = []
        self._deleted: list[int] = []
        self._damaged: dict[int, str] = {}
        self._failed = dict(failed)

    def step(self, step: int) -> None:
        """Copy a step. Errors that concern only this step are added to the report, so that other steps are copied.

        Raises:
            CheckpointExistsError: if the destination has another save of the step.
            CheckpointError: errors of the destination; see `copy_whole`.
        """
        name = self._source.name(step)
        if step in self._destination.candidates() and self._destination.name(step) != name:
            raise CheckpointExistsError(
                f"{self._destination.display} already has step {step} as {self._destination.name(step)}, but in "
                f"{self._source.display} it is {name}: with both, the step would be ambiguous. Delete one, or copy to "
                "another directory"
            )
        self._lock.check()
        try:
            if not self._overwrite and not self._source.is_ours(step) and self._exists(name):
                self._skipped.append(step)
                return
            self._copied[step] = copy_whole(
                self._source.location(step),
                SubPath(self._destination.directory, name),
                self._context,
                overwrite=self._overwrite,
                verify=self._verify,
                progress=self._progress.report,
            )
        except (CheckpointNotFoundError, ObjectNotFoundError, CorruptCheckpointError) as error:
            if not self._source.recheck(step):
                self._deleted.append(step)
                return
            if not isinstance(error, CorruptCheckpointError):
                raise
            self._damaged[step] = str(error)
        except StorageError as error:
            if not concerns_one_entry(error):
                raise
            self._failed[step] = error

    def _exists(self, name: str) -> bool:
        return bool(subdirectory(self._destination.store, name).list_names())

    def report(self) -> StepsCopyReport:
        """Return the report.

        Raises:
            StorageError: if all steps failed: a permission for the directory may be missing.
        """
        failed = dict(sorted(self._failed.items()))
        if not (self._copied or self._skipped or self._deleted or self._damaged):
            for error in failed.values():
                raise error
        return StepsCopyReport(
            dict(self._copied),
            tuple(self._skipped),
            tuple(self._deleted),
            dict(self._damaged),
            {step: str(error) for step, error in failed.items()},
        )
