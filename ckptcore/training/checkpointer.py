"""Checkpointer: saves the steps of a training run in the background, and deletes old steps by a policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeAlias

from ckptcore.commit.location import LocationLike, expect_directory_name
from ckptcore.commit.locks import IfInUse
from ckptcore.commit.stored_root import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedVersionError
from ckptcore.io.background import SaveHandle
from ckptcore.model.tree import JSON
from ckptcore.other_libraries import explains_arguments, hint_of_step
from ckptcore.policies import EveryStep, PreservationPolicy, PreserveAll, SavePolicy
from ckptcore.protocols import Layout, Rejoinable, SaveStrategy, StepStrategy
from ckptcore.redaction import redacted_location
from ckptcore.runtime import runtime_of
from ckptcore.saving.checking import check_values
from ckptcore.saving.requests import OneTree, Save, SaveDraft, as_integer
from ckptcore.step_names import StepNames
from ckptcore.training.path_directory import as_run_directory
from ckptcore.training.reader import CheckpointReader, StepReader
from ckptcore.training.run_directory import (
    Ownership,
    RunDirectory,
    RunSaves,
    check_step_names,
    exchanges_of,
)
from ckptcore.training.save_decisions import LastSave, PreemptionNotice, SaveDecider
from ckptcore.training.step_saving import StepOptions, StepSaver, StepSaveRequest, StepSaves

WhenBusy: TypeAlias = Literal["wait", "skip", "queue"]
"""Behaviour of a save while another runs. "wait": block. "skip": drop this save. "queue": copy now, write later."""


class Checkpointer(CheckpointReader):
    """Saves the steps of a training run in the background, keeps the steps that a policy chooses, and resumes the run.

    It owns its directory: a second Checkpointer for the same directory, in this process or another, raises an error.
    Use it as a context manager, or close it. In a job of several processes every process creates a Checkpointer, and
    calls the same methods in the same order. The leader owns the directory, lists and deletes, and decides for all
    processes.
    """

    @explains_arguments
    def __init__(
        self,
        directory: LocationLike | RunDirectory,
        *,
        save_policy: SavePolicy | None = None,
        preservation_policy: PreservationPolicy | None = None,
        step_names: StepNames | None = None,
        layout: str | Layout = "safetensors",
        context: Context | None = None,
        metadata: Mapping[str, JSON] | None = None,
        when_busy: WhenBusy = "wait",
        if_in_use: IfInUse = "error",
        preemption_notice: PreemptionNotice | None = None,
        strategy: StepStrategy[SaveStrategy[SaveDraft, Save]] | None = None,
        other_files: bool = False,
    ) -> None:
        """Own the directory of a run. Create it if it does not exist.

        Args:
            directory: a path or URL, or a `RunDirectory`, which may for example save to a fast directory first.
            save_policy: chooses the steps to save; None: every call of `save` saves.
            preservation_policy: chooses the steps to keep; None: all. The newest step is always kept.
            step_names: the names of step directories. None: the names of `StepNames()`. If the directory only has steps
                with another prefix, for example of other software, the run continues with that prefix.
            layout: the layout of arrays.
            context: options.
            metadata: JSON to store with the directory as a whole; None leaves the stored metadata unchanged.
            when_busy: what a save does while another is running.
            if_in_use: what to do if another job seems to own the directory. "error": raise an error. "take over": wait
                long enough for a renewal of its lease, and own the directory if the lease is not renewed.
            preemption_notice: called at each step; returns True if this process will be preempted. None: SIGTERM is the
                notice, if the save policy contains `PreemptionCheckpointing`. Either all processes of a job pass a
                notice, or none.
            strategy: writes and commits each step, such as `StepExports`; None: saves the step alone.
            other_files: True to delete a step even if its directory has files that no save wrote, such as the results
                of an evaluation. Saves with ``overwrite="best-effort"`` or ``"non-atomic"`` then delete such files,
                too. False: such steps are kept, with a warning.

        Raises:
            DirectoryInUseError: another job owns the directory.
            InvalidLocationError: the directory is a checkpoint, or has the name of a file (``x.pt``). Or it has
                checkpoints, but no steps, because their names do not match `step_names`. The error names the
                checkpoints, and says how to read them.
            NotSharedError: this process of a job does not see the directory of the leader.
            RankFailedError: another process of the job failed, for example because it does not see the directory.
            StorageError: the directory cannot be written.
            UnknownPluginError: the strategy needs an unknown layout.
            ValueError: an argument has a wrong value; the strategy refuses the directory; SIGTERM is the notice, and
                this is not the main thread.
        """
        if when_busy not in ("wait", "skip", "queue"):
            raise ValueError(f"Checkpointer(when_busy={when_busy!r}): expected 'wait', 'skip' or 'queue'")
        _expect(save_policy, SavePolicy, "save_policy", "a save policy, such as FixedInterval(100)")
        _expect(
            preservation_policy, PreservationPolicy, "preservation_policy", "a preservation policy, such as LatestN(3)"
        )
        self._closed = False
        self._process = os.getpid()
        context = context or default_context()
        source = as_run_directory(directory)
        expect_directory_name(source.location)
        if strategy is not None:
            if not hasattr(strategy, "for_step"):
                raise TypeError(
                    f"Checkpointer(strategy={strategy!r}): expected a StepStrategy, such as "
                    "ckptcore.StepExports([ckptcore.StepExport(directory=...)])"
                )
            strategy.check(source.location)
            for needed in strategy.layouts:
                runtime_of(context).registry.layout(needed)
        self._layout = layout
        options = StepOptions(
            layout=layout,
            strategy=strategy,
            when_busy="wait" if when_busy == "wait" else "queue",
            other_files=other_files,
        )
        self._decider = SaveDecider(save_policy or EveryStep(), skips_when_busy=when_busy == "skip")
        self._saves = StepSaves()
        self._job = runtime_of(context).job()
        names = check_step_names(step_names)
        agree = exchanges_of(f"{redacted_location(os.fspath(source.location))}/checkpointer", context, self._job)
        policy = preservation_policy or PreserveAll()
        saves = RunSaves(under_way=self._saves.under_way, last_steps=self._last_steps, wait=self.wait)
        self._run = source.own(names, context, Ownership(agree("own"), policy, metadata, if_in_use, saves, other_files))
        # Not `super().__init__`: `CheckpointReader` would open the directory, which is open already.
        StepReader.__init__(self, self._run.steps, context, agree, loaded=self._set_back)
        self._saver = StepSaver(self._run, self._decider, self._saves, options, context, self._job, agree=agree)
        try:
            self.reload()  # another job may have written before this job owned the directory
            self._read_past(self._newest_readable)
            self._decider.use_notice(preemption_notice)
            self._run.begin()
        except BaseException:
            self._release()
            raise

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy the Checkpointer of {self.directory}: one object owns the directory. Pass the "
            "directory, and read it with CheckpointReader in the other process"
        )

    def _read_past(self, choose: Callable[[], int | None]) -> None:
        """Make a step the last save for the save policy. The leader reads the time and the epoch of the step."""

        def read() -> list[JSON]:
            step = choose()
            if step is None:
                return [None, None, None]
            try:
                steps = self._directory_of(step)
                summary = steps.summary(step)
                began = steps.info(step).created if summary is not None else None
            except (CorruptCheckpointError, UnsupportedVersionError):
                return [step, None, None]  # a load will report that it cannot be read
            return [step, summary.progress.get("epoch") if summary is not None else None, began]

        last_save: Any = self._agree("look-back").lead("look-back", read)
        self._decider.last_save = LastSave(*last_save)

    def _set_back(self, step: int) -> None:
        """Set the run back to a loaded step, so that policies compare with this step and not with later steps."""
        if step != self._decider.last_save.step:
            self._read_past(lambda: step)

    # --- saving -------------------------------------------------------------------------------------------------------

    @property
    def preempted(self) -> bool:
        """True if a process of the job had a notice of preemption at the last decision about a save."""
        return self._decider.preempted

    def should_save(self, step: int, *, epoch: int | None = None) -> bool:
        """Return True if `save` would save a step, so that a loop builds the state only if it is needed.

        Args:
            step: the step.
            epoch: its epoch, for policies that need it.

        Raises:
            ValueError: the step is not a valid number, or the policy cannot decide.
        """
        self._expect_open()
        step, epoch = as_integer("step", step), None if epoch is None else as_integer("epoch", epoch)
        return self._saver.wants(step, epoch)

    def check(self, state: object) -> None:
        """Check that `save` can save a tree, and `load_into` restore it. Call it before the training.

        Reads no array and writes nothing. In a job, every process calls it. See `ckptcore.check`.

        Raises:
            UnsupportedLeafError: lists each path that cannot be saved or restored, with its type and a remedy.
            RankFailedError: another process of the job has such paths.
        """
        self._check({"": state})

    def check_checkpointables(self, checkpointables: Mapping[str, object]) -> None:
        """Check that `save_checkpointables` can save objects, and `load_checkpointables` restore them. See `check`."""
        self._check(dict(checkpointables))

    def _check(self, values: Mapping[str, object]) -> None:
        self._expect_open()
        check_values(values, self._layout, self._context, self._agree("check"))

    @explains_arguments
    def save(
        self,
        step: int,
        state: object,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, JSON] | None = None,
        epoch: int | None = None,
        force: bool = False,
        overwrite: Overwrite = False,
    ) -> SaveHandle | None:
        """Save a tree as a step, in the background. Return once the state may be changed.

        An error that is not retrieved from the handle is raised by the next save, by `wait` or by `close`.

        Args:
            step: the number of the step.
            state: as for `ckptcore.save`.
            metrics: measurements, for policies such as `BestN`.
            metadata: JSON to store with the step.
            epoch: the epoch of the step.
            force: save regardless of the policy and of running saves.
            overwrite: replace an existing step, as for `ckptcore.save`. A step that a load skipped because it was
                damaged is always replaced.

        Returns:
            The handle of the save; None if the policy did not want it, or ``when_busy="skip"`` dropped it.

        Raises:
            CheckpointExistsError: the step exists.
            The errors of `ckptcore.save_async`.
        """
        return self._saver.begin(self._request(step, OneTree(state), metrics, metadata, epoch, force, overwrite))

    @explains_arguments
    def save_checkpointables(
        self,
        step: int,
        checkpointables: Mapping[str, object],
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, JSON] | None = None,
        epoch: int | None = None,
        force: bool = False,
        overwrite: Overwrite = False,
    ) -> SaveHandle | None:
        """Save several objects as a step, in the background. Return once they may be changed.

        Arguments, result and errors are as for `save`, with the objects of `ckptcore.save_checkpointables`.
        """
        return self._saver.begin(self._request(step, checkpointables, metrics, metadata, epoch, force, overwrite))

    @explains_arguments
    def save_blocking(
        self,
        step: int,
        state: object,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, JSON] | None = None,
        epoch: int | None = None,
        force: bool = False,
        overwrite: Overwrite = False,
    ) -> bool:
        """Save a tree as a step. Return once it is committed. See `ckptcore.save`.

        Arguments and errors are as for `save`.

        Returns:
            True if it was saved; False if the policy did not want it, or ``when_busy="skip"`` dropped it.
        """
        return self._saver.perform(self._request(step, OneTree(state), metrics, metadata, epoch, force, overwrite))

    def _request(
        self,
        step: int,
        values: OneTree | Mapping[str, object],
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, JSON] | None,
        epoch: int | None,
        force: bool,
        overwrite: Overwrite,
    ) -> StepSaveRequest:
        """Check the arguments of a save, and that this process can save."""
        step = as_integer("step", step, hint="; a step is a whole number from 0 to 2**63 - 1. Nothing was written")
        self._expect_open()
        epoch = None if epoch is None else as_integer("epoch", epoch, hint=". Nothing was written")
        return StepSaveRequest(step, values, metrics, metadata, epoch, force, overwrite)

    # --- deleting -----------------------------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Delete a step in the background. The leader deletes, and all processes raise its error. See `wait`.

        Raises:
            CheckpointNotFoundError: the step does not exist, or other software wrote it.
            OnlyStepError: it is the only valid step.
            StepPinnedError: a reader has pinned it, or it is being saved.
            CheckpointReferredError: other checkpoints refer to it.
            CheckpointExistsError: its directory has another checkpoint. Or it has files that no save wrote, and this
                object was created without ``other_files=True``. Raised by `wait`.
            TypeError, ValueError: `step` is not an integer of at most 64 bits.
        """
        self._expect_open()
        step = as_integer("step", step, hint=hint_of_step(step))
        self._run.delete(step, self._agree("delete"))
        if step == self._decider.last_save.step:
            self._read_past(self._newest_readable)

    def _last_steps(self) -> set[int]:
        """Return the steps that this run saved or loaded last."""
        return {step for step in (self._saves.last_committed, self._decider.last_save.step) if step is not None}

    # --- ending -------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until every save and deletion has ended.

        Raises:
            CheckpointError: a save, a deletion or other work of the directory failed, and its error was not retrieved.
                Each error is raised once. If there are several, the others become notes of the first.
        """
        if self._is_inherited():
            return
        _raise_first([*self._saves.take_errors(), *self._run.take_errors()])

    def close(self) -> None:
        """Wait, and release the directory. Its steps can still be read. Further calls do nothing.

        In a forked child this does nothing, because the saves and the directory belong to the parent.

        Raises:
            CheckpointError: an error of `wait`, or of background work. The directory is released nevertheless.
        """
        if self._closed or self._is_inherited():
            return
        try:
            errors = list(self._saves.take_errors())
            try:
                self._run.close()  # first, because it may limit the time that `take_errors` waits for deletions
            except CheckpointError as error:
                errors.append(error)
            errors.extend(self._run.take_errors())
        finally:
            self._release()
        _raise_first(errors)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it. An error of the block propagates, with a note if closing failed, too."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:  # noqa: BLE001  # becomes a note of the first error
            error.add_note(f"and then, as {self!r} was closed: {type(failure).__name__}: {failure}")

    def _release(self) -> None:
        self._closed = True
        try:
            self._run.release()
        finally:
            self._decider.close()

    def _is_inherited(self) -> bool:
        """Return True in a forked child, which does not have the threads of the process that owns the directory."""
        return os.getpid() != self._process

    def _expect_open(self) -> None:
        if self._is_inherited():
            raise CheckpointError(
                f"the Checkpointer of {self.directory} belongs to process {self._process}, which forked this one; "
                "save in that process, or use a CheckpointReader in this one"
            )
        if self._closed:
            raise CheckpointError(f"the Checkpointer of {self.directory} is closed; create a new one")
        job = runtime_of(self._context).job()
        if job is not self._job and (isinstance(job, Rejoinable) or isinstance(self._job, Rejoinable)):
            raise CheckpointError(
                f"the Checkpointer of {self.directory} belongs to a job that this process has left or joined again "
                "since; close it, and create a new one in every process of the job"
            )


def _raise_first(errors: Sequence[BaseException]) -> None:
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and then: {type(other).__name__}: {other}")
        raise errors[0]


def _expect(value: object, expected_type: type, argument: str, expected: str) -> None:
    if value is not None and (isinstance(value, type) or not isinstance(value, expected_type)):
        raise TypeError(f"Checkpointer({argument}={value!r}): expected {expected}")
