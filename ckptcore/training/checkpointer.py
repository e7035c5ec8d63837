"""Checkpointer: a sequence of steps for a training loop, saved in the background and collected by a policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar

from ckptcore.commit.location import Backed, LocationLike, Place
from ckptcore.commit.occupants import Overwrite
from ckptcore.context import Context, default_context
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedVersionError,
    UploadError,
)
from ckptcore.io.background import SaveHandle
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.policies import EveryStep, PreservationPolicy, PreserveAll, SavePolicy
from ckptcore.protocols import Layout, Rejoinable
from ckptcore.runtime import runtime_of
from ckptcore.saving.exporting import StepExport, check_exports
from ckptcore.saving.save_requests import OneTree
from ckptcore.step_names import StepNames, step_number, whole_number
from ckptcore.training.garbage import Cleaner
from ckptcore.training.preemption import PreemptionNotice
from ckptcore.training.reader import CheckpointReader
from ckptcore.training.restoring import Loading
from ckptcore.training.step_saves import Past, SaveDecider, StepSaves
from ckptcore.training.step_saving import StepOptions, StepOrder, StepSaver
from ckptcore.training.steps import StepDirectory
from ckptcore.training.tiers.near import NearTier, RunTiers
from ckptcore.training.tiers.run_deleter import Collector, RunDeleter
from ckptcore.training.tiers.status import UploadStatus
from ckptcore.training.tiers.uploads import Uploads, begin_uploads

__all__ = ["Checkpointer", "IfInUse", "WhenBusy"]

logger = logging.getLogger("ckptcore.training")

V = TypeVar("V")

WhenBusy: TypeAlias = Literal["wait", "skip", "queue"]
"""What a save does while another is under way: wait for it; let this one be; copy at once and wait behind it."""

IfInUse: TypeAlias = Literal["error", "take over"]
"""What to do where another job seems to own the directory: fail at once; wait for a sign of life, and take it if none comes."""


class Checkpointer(CheckpointReader):
    """The steps of a training run: saves them without stopping the loop, keeps those that a policy wants, resumes.

    It owns its directory: a second one there, in this process or another, gets an error. Use it as a context manager, or close
    it. In a job of several processes every process makes one and calls the same methods in the same order; who leads owns,
    lists and deletes, and decides where processes could see different things.
    """

    def __init__(
        self,
        directory: LocationLike,
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
        exports: Sequence[StepExport] = (),
        near: NearTier | None = None,
    ) -> None:
        """Open a directory for a run, and make it where there is none.

        Args:
            directory: a path or URL.
            save_policy: at which steps `save` saves; None: whenever it is called.
            preservation_policy: which steps are kept; None: all. The newest always is.
            step_names: how steps are named.
            layout: how arrays are laid out.
            context: options.
            metadata: JSON, kept with the directory as a whole; None leaves what is there.
            when_busy: what a save does while another is under way.
            if_in_use: what to do where another job seems to own the directory.
            preemption_notice: tells at each step whether this process is to be preempted. None: SIGTERM does, if the save policy
                has `PreemptionCheckpointing` in it. In a job every process gives one, or none does.
            exports: further checkpoints of steps in other layouts, such as weights for other programs, that are written from the same
                copy once the step is committed.
            near: a fast directory that steps are saved to, and uploaded from in the background. Then `directory` is the far tier: it
                gets the steps that the near tier's upload policy chooses, and keeps those that `preservation_policy` wants.

        Raises:
            DirectoryInUseError: if another job owns the directory.
            NotSharedError: if this process of a job does not see the directory of the leader; where others do not, it is RankFailedError.
            StorageError: if it cannot be written.
            UnknownPluginError: if an export has a layout that is not there.
            InvalidLocationError: if the tiers lie in each other.
            ValueError: if an argument is none of its values; if two exports go into one directory; if SIGTERM is to be listened to, and this is not the main thread.
        """
        if when_busy not in ("wait", "skip", "queue"):
            raise ValueError(f"Checkpointer(when_busy={when_busy!r}): expected 'wait', 'skip' or 'queue'")
        _expect(save_policy, SavePolicy, "save_policy", "a save policy, such as FixedInterval(100)")
        _expect(
            preservation_policy, PreservationPolicy, "preservation_policy", "a preservation policy, such as LatestN(3)"
        )
        self._closed = False
        self._process = os.getpid()
        if near is not None and not isinstance(near, NearTier):
            raise TypeError(f"Checkpointer(near={near!r}): expected NearTier(directory)")
        options = StepOptions(
            layout=layout,
            exports=check_exports(exports, directory, runtime_of(context or default_context()).registry),
            when_busy="wait" if when_busy == "wait" else "queue",
        )
        self._decider = SaveDecider(save_policy or EveryStep(), skips_when_busy=when_busy == "skip")
        self._saves = StepSaves()
        self._is_listed = False
        tiers = (directory,) if near is None else (near.locate(directory), directory)
        self._begin_reading(tiers, step_names, context)
        self._cleaner = Cleaner(self.directory)
        self._tiers = RunTiers(self._copies, near, self._context)
        self._uploads = Uploads()
        self._collector = Collector(self._tiers, self._cleaner, kept=self._kept)
        self._saver = StepSaver(
            self._tiers,
            self._loader.broken_in,
            self._decider,
            self._saves,
            options,
            self._context,
            self._job,
            agree=self._agreement,
            on_hosts=self._collector.on_hosts,
            committed=self._committed,
        )
        try:
            agreement = self._agreement("own")
            policy = preservation_policy or PreserveAll()
            self._tiers.own(agreement, policy, self._loader.broken_in, metadata=metadata, if_in_use=if_in_use)
            self.reload()  # only now: another job may have written until this one owned the directory
            self._is_listed = True
            self._look_back(self._copies.latest)
            self._decider.heed(preemption_notice)
            self._uploads = begin_uploads(
                self._tiers, self._context, agreement, kept=self._last_steps, uploaded=self._collector.begin
            )
            self._uploads.resume()  # only now: what is collected meanwhile must know which steps wait
            self._deleter = RunDeleter(self._tiers, self._uploads, self._cleaner, under_way=self._saves.under_way)
            if self._tiers.nearest is not None:
                self._cleaner.begin(self._tiers.nearest.deleter.clean)
        except BaseException:
            self._release()
            raise

    def _find_names(self, agreement: Agreement) -> Sequence[Mapping[int, str]]:
        """See `CheckpointReader`. Of steps that each host has by itself those count that are on all of them, of one save."""
        hosts = self._tiers.host_steps
        if hosts is None:
            return super()._find_names(agreement)
        return hosts.find_names(agreement, lambda: self._list_names(self._copies.tiers[-1]))

    def _place(self, step: int, tier: int) -> Place:
        """See `CheckpointReader`. What one host lacks of a step is read from the far tier."""
        near, far = self._copies.tiers[0], self._copies.tiers[-1]
        if self._tiers.hosts is None or tier != 0:
            return super()._place(step, tier)
        return Backed(near.place(step), far.place(step))

    def _look_back(self, choose: Callable[[], int | None]) -> None:
        """Take from a step, such as the newest, when it was saved, and in which epoch; the leader looks."""

        def look() -> list[JSON]:
            step = choose()
            if step is None:
                return [None, None, None]
            try:
                steps = self._copies.nearest(step)
                summary = steps.summary(step)
                began = steps.info(step).created if summary is not None else None
            except (CorruptCheckpointError, UnsupportedVersionError):
                return [step, None, None]  # a load will find that it cannot be read
            return [step, summary.progress.get("epoch") if summary is not None else None, began]

        found: Any = self._agreement("look-back").lead("look-back", look)
        self._decider.past = Past(*found)

    def _list_names(self, tier: StepDirectory) -> Mapping[int, str]:
        """See `CheckpointReader`. Of a far tier that does not answer, what is known is what there is: nobody else writes there."""
        try:
            return super()._list_names(tier)
        except StorageError as error:
            if self._tiers.far is None or tier is self._steps or not self._is_listed:
                raise
            logger.warning("%s cannot be listed now, and is taken as it was: %s", tier.display, error)
            return {step: tier.name(step) for step in tier.candidates()}

    def _load(self, step: int | None, loading: Loading[V]) -> V:
        loaded = self._loader.load(step, loading)
        if self.restored_step != self._decider.past.step:
            # The run is set back to where it was when that step was saved: what came after it counts for no policy.
            self._look_back(lambda: self.restored_step)
        return loaded

    # --- saving -------------------------------------------------------------------------------------------------------

    @property
    def preempted(self) -> bool:
        """Whether this process was told, when a step was last decided upon, that its machine will be taken away."""
        return self._decider.preempted

    def should_save(self, step: int, *, epoch: int | None = None) -> bool:
        """Whether `save` would save at a step, so that a state need not be made for nothing.

        Args:
            step: the step.
            epoch: the epoch that it is in, for policies that ask for it.

        Raises:
            ValueError: if the step is no number of one, or the policy cannot answer.
        """
        self._expect_open()
        step, epoch = step_number(step), None if epoch is None else whole_number("epoch", epoch)
        return self._saver.wants(step, epoch)

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
        """Save a tree as a step, in the background: returns once the save owns its memory.

        An error that nobody asks the handle for is raised by the next save, by `wait` and by `close`.

        Args:
            step: the number of the step.
            state: as for `ckptcore.save`.
            metrics: measurements, for policies such as `BestN`.
            metadata: JSON, kept with the step.
            epoch: the epoch that the step is in.
            force: save whatever the policy says, and however busy.
            overwrite: whether a step that is there is replaced, as for `ckptcore.save`. One that a load passed over because it
                was damaged is, in any case.

        Returns:
            The save; None where the policy did not want it, or ``when_busy="skip"`` let it be.

        Raises:
            CheckpointExistsError: if the step is there.
            What `ckptcore.save_async` does.
        """
        return self._saver.begin(self._order(step, OneTree(state), metrics, metadata, epoch, force, overwrite))

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
        """Save several objects as a step, in the background: they may change or advance once this returns.

        Takes, returns and raises what `save` does, for what `ckptcore.save_checkpointables` takes.
        """
        return self._saver.begin(self._order(step, checkpointables, metrics, metadata, epoch, force, overwrite))

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
        """Save a tree as a step and return once it is committed; see `ckptcore.save`.

        Takes and raises what `save` does.

        Returns:
            Whether it was saved; False where the policy did not want it, or ``when_busy="skip"`` let it be.
        """
        return self._saver.perform(self._order(step, OneTree(state), metrics, metadata, epoch, force, overwrite))

    def _order(
        self,
        step: int,
        values: OneTree | Mapping[str, object],
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, JSON] | None,
        epoch: int | None,
        force: bool,
        overwrite: Overwrite,
    ) -> StepOrder:
        """What the user asks to be saved, where numbers are numbers and this can save."""
        step = step_number(step)
        self._expect_open()
        epoch = None if epoch is None else whole_number("epoch", epoch)
        return StepOrder(step, values, metrics, metadata, epoch, force, overwrite)

    def _committed(self, step: int, epoch: int | None, preempted: bool) -> None:
        """A step is committed. On the thread of its save."""
        self._uploads.committed(step, epoch, preempted=preempted)
        self._collector.begin()

    # --- deleting -----------------------------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Delete a step, in the background; `wait` waits for it. Only who leads deletes; the others of a job hear how it ended.

        Raises:
            CheckpointNotFoundError: if it is not there, or other software wrote it.
            OnlyStepError: if it is the only one that is valid.
            StepPinnedError: if a reader has pinned it.
        """
        self._expect_open()
        step = step_number(step)
        self._deleter.delete(step, self._agreement("delete"))
        if step == self._decider.past.step:
            self._look_back(self._copies.latest)

    def _kept(self) -> set[int]:
        """The steps that stay near whatever the policy says."""
        return self._last_steps() | self._saves.under_way() | self._uploads.pending()

    def _last_steps(self) -> set[int]:
        """The steps that this run has saved or loaded last: the newest by number may be older, because it was set back."""
        return {step for step in (self._saves.last_committed, self._decider.past.step) if step is not None}

    # --- ending -------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until every save and deletion is over; not until steps are uploaded, for which there is `wait_for_uploads`.

        Raises:
            CheckpointError: the first error of a save that nobody asked for, or of a deletion; it is told once.
            UploadError: if a step of the near tier cannot be uploaded because it is damaged; it is told once.
        """
        if self._is_inherited():
            return
        errors = [*self._saves.take_errors(), *self._cleaner.take_errors()]
        try:
            self._uploads.raise_unheard()
        except UploadError as error:
            errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and then: {type(other).__name__}: {other}")
            raise errors[0]

    @property
    def uploads(self) -> UploadStatus:
        """How far the uploads from the near tier are; empty without one, and in a job where this process does not lead."""
        return self._uploads.status

    def wait_for_uploads(self, timeout: float | None = None) -> None:
        """Wait until every save is over, and every step that is to be uploaded is in the far tier.

        In a job only who leads waits for uploads. Without a near tier it waits for saves.

        Args:
            timeout: how long to wait for uploads at most, in seconds; None: for ever.

        Raises:
            UploadError: if steps wait still, or cannot be uploaded.
            What `wait` does.
        """
        self.wait()
        uploader = self._uploads.uploader
        if uploader is not None and not self._is_inherited():
            uploader.wait(timeout)
            self.wait()  # what is uploaded may be deleted near

    def close(self) -> None:
        """Wait, and let the directory go; again is no error. What is there can still be read.

        In a forked child it does nothing: there is nothing to wait for there, and the directory is the parent's.

        With a near tier it also waits for uploads, as long as that says.

        Raises:
            CheckpointError: as `wait`; the directory is let go in any case.
            UploadError: if steps are not uploaded by then; they stay near, and the next run uploads them.
        """
        if self._closed or self._is_inherited():
            return
        try:
            try:
                self.wait()
            finally:
                self._uploads.close()
        finally:
            self._release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it. The error that ended the block goes on, and has a note if closing failed too."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:  # noqa: BLE001  # told with the error that came first
            error.add_note(f"and then, as {self!r} was closed: {type(failure).__name__}: {failure}")

    def _release(self) -> None:
        self._closed = True
        self._cleaner.refuse()
        try:
            self._uploads.stop()
            self._cleaner.close()
        finally:
            self._decider.close()
            self._tiers.close()

    def _is_inherited(self) -> bool:
        """Whether this is a forked child of the process that opened the directory, and has none of its threads."""
        return os.getpid() != self._process

    def _expect_open(self) -> None:
        if self._is_inherited():
            raise CheckpointError(
                f"the Checkpointer of {self.directory} belongs to process {self._process}, which this one was forked from; "
                "save there, or use a CheckpointReader here"
            )
        if self._closed:
            raise CheckpointError(f"the Checkpointer of {self.directory} is closed; make a new one")
        job = runtime_of(self._context).job()
        if job is not self._job and (isinstance(job, Rejoinable) or isinstance(self._job, Rejoinable)):
            raise CheckpointError(
                f"the Checkpointer of {self.directory} belongs to a job that this process has left or joined again since; close it, and "
                "make a new one, as every other process of the job does"
            )

    def _agreement(self, what: str) -> Agreement:
        return Agreement(
            self._job, runtime_of(self._context).exchange_key(f"{self.directory}/checkpointer/{what}", job=self._job)
        )


def _expect(given: object, kind: type, argument: str, wanted: str) -> None:
    if given is not None and (isinstance(given, type) or not isinstance(given, kind)):
        raise TypeError(f"Checkpointer({argument}={given!r}): expected {wanted}")
