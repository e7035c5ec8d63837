"""`TieredDirectory`: a run with a fast near and a durable far directory; `TieredRun`: both while a job owns them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckptcore_tools.near_notes import write_near_note

from ckptcore.commit.location import LocationLike, SubPath
from ckptcore.commit.locks import Lock
from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, UploadError
from ckptcore.inspection.completeness import has_expected_sizes
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import expect_one_directory
from ckptcore.model.tree import JSON
from ckptcore.policies import CustomPreservation, PreserveAll, StepInfo, what_to_delete
from ckptcore.redaction import redacted, redacted_location
from ckptcore.saving.writing import PlainSave
from ckptcore.step_names import StepNames
from ckptcore.training.deletion import DeletionQueue, PendingDeletion
from ckptcore.training.path_directory import OwnedDirectory, refuse_existing, write_directory_metadata
from ckptcore.training.run_directory import Ownership, SavedStep, StepTarget
from ckptcore.training.steps import StepDirectory
from ckptcore_tiers.host_saves import HostSave
from ckptcore_tiers.host_sending import HostSender, LeaderSender, StepSender, WholeStepSender
from ckptcore_tiers.hosts import Hosts, HostSteps, find_hosts, has_expected_sizes_on_host
from ckptcore_tiers.near_tier import Deadline, NearTier
from ckptcore_tiers.status import UploadStatus
from ckptcore_tiers.tiered_steps import TieredSteps
from ckptcore_tiers.uploader import Uploader


@dataclass(frozen=True, slots=True)
class Uploads:
    """The role of one process in the uploads of a run.

    The leader uploads. If hosts have separate near directories, the first process of every other
    host sends the part of its host. Other processes do nothing.

    Attributes:
        uploader: uploads steps; None except on the leader.
        stop_sending: on the leader, notifies the other hosts that it sends no more steps; on the
            first process of another host, stops its `HostSender`. None on other processes, and if
            all processes share one near directory.
        close_sending: on the first process of a host other than the leader's, waits until the
            leader's uploads end or the deadline passes, and stops the `HostSender`. Else None.
    """

    uploader: Uploader | None = None
    stop_sending: Callable[[Deadline], None] | None = None
    close_sending: Callable[[Deadline], None] | None = None

    def resume(self) -> None:
        """Start to upload, beginning with steps that an earlier run did not upload."""
        if self.uploader is not None:
            self.uploader.resume()

    def committed(self, step: int, epoch: int | None, *, preempted: bool) -> None:
        """See `Uploader.committed`."""
        if self.uploader is not None:
            self.uploader.committed(step, epoch, preempted=preempted)

    def pending(self) -> frozenset[int]:
        """Return steps whose near files are still needed."""
        return frozenset() if self.uploader is None else self.uploader.pending()

    def cancel(self, step: int) -> None:
        """See `Uploader.cancel`."""
        if self.uploader is not None:
            self.uploader.cancel(step)

    @property
    def status(self) -> UploadStatus:
        """Progress of the uploads; empty without an uploader."""
        return UploadStatus() if self.uploader is None else self.uploader.status

    def raise_unreported(self) -> None:
        """See `Uploader.raise_unreported`."""
        if self.uploader is not None:
            self.uploader.raise_unreported()

    def close(self, until: Deadline) -> None:
        """Wait for uploads until a deadline, then stop.

        Raises:
            UploadError: see `Uploader.close`.
        """
        if self.uploader is not None:
            self.uploader.close(until)
        if self.close_sending is not None:
            self.close_sending(until)

    def stop(self, until: Deadline) -> None:
        """Stop without waiting for the remaining uploads."""
        if self.uploader is not None:
            self.uploader.stop(until)
        if self.stop_sending is not None:
            self.stop_sending(until)


class TieredRun:
    """The `OwnedRun` of a `TieredDirectory`, in one process.

    The leader owns both directories. If hosts have separate near directories, the first process of
    each host owns the near directory of its host. Other processes own none.

    Attributes:
        steps: the steps of the run.
        hosts: groups of processes that share a near directory; None if all share one.
        near, far: the two directories; None if this process does not own the directory.
        uploads: the role of this process in the uploads.
    """

    def __init__(
        self,
        options: NearTier,
        steps: TieredSteps,
        context: Context,
        ownership: Ownership,
        *,
        far_lock: Lock | None = None,
    ) -> None:
        """See `RunDirectory.own`.

        Args:
            options: the options of the near directory.
            steps, context, ownership: as for `RunDirectory.own`.
            far_lock: the lock of the far directory if this process owns it already.
        """
        self.steps = steps
        self.hosts: Hosts | None = None
        self.near: OwnedDirectory | None = None
        self.far: OwnedDirectory | None = None
        self.uploads = Uploads()
        self._options = options
        self._context = context
        self._agreement = agreement = ownership.agreement
        self._leads = agreement.rank == 0
        self._saves = ownership.saves
        near, far = steps.directories
        self._deletions = DeletionQueue(far.display, daemon=True)
        self._until: Deadline | None = None  # set when the run begins to close
        if steps.host_steps is not None:
            self.hosts = find_hosts(agreement.part("hosts"), near.open_to_write())
        own = partial(OwnedDirectory, context=context, if_in_use=ownership.if_in_use, other_files=ownership.other_files)
        try:
            with expect_one_directory(agreement, lambda: [(seen.store, seen.directory) for seen in self.shared()]):
                if agreement.rank in (self.hosts.firsts if self.hosts is not None else [0]):
                    looks_complete = has_expected_sizes if self.hosts is None else has_expected_sizes_on_host
                    self.near = own(near, options.preservation_policy, looks_complete=looks_complete)
                if self._leads:
                    assert self.near is not None  # the leader is the first process of its host
                    self.far = own(far, ownership.policy, at_least=self.near.lock.number, lock=far_lock)
                    if ownership.metadata is not None:
                        write_directory_metadata(far.open_to_write(), ownership.metadata)
                    write_near_note(far.open_to_write(), redacted_location(near.display))
        except BaseException:
            self.release()
            raise

    @property
    def _owned(self) -> Sequence[OwnedDirectory]:
        """The directories that this process owns, the near directory first."""
        return [owned for owned in (self.near, self.far) if owned is not None]

    def shared(self) -> Sequence[StepDirectory]:
        """Return the directories that all processes must see, and may not: each host can have another one."""
        return self.steps.directories if self.hosts is None else self.steps.directories[1:]

    def begin(self) -> None:
        """See `OwnedRun`. Starts uploads. Steps that an earlier run did not upload are first."""
        self.steps.is_owned = self.far is not None
        self.uploads = self._role()
        self.uploads.resume()  # before deletions, which must not delete waiting steps
        if self.near is not None:
            self._deletions.begin(self.near.deleter.clean)

    def _role(self) -> Uploads:
        """Return the role of this process in the uploads. Every rank calls this. Uploads begin with `resume`."""
        near, to = self.steps.directories
        send: StepSender
        stop_sending: Callable[[Deadline], None] | None = None
        if self.hosts is not None:
            run = self._agreement.lead("run", lambda: secrets.token_hex(8))
            if self.far is None:
                if self._agreement.rank not in self.hosts.firsts:
                    return Uploads()
                sender = HostSender(self._agreement.rank, run, near, to, to.open_to_write(), self._context)
                return Uploads(stop_sending=sender.stop, close_sending=sender.close)
            send = leader = LeaderSender(near, to, self.far.store, self.hosts, self._context)
            stop_sending = partial(leader.close, run)
        elif self.far is None:
            return Uploads()
        else:
            send = WholeStepSender(near, to, self._context)
        uploader = Uploader(
            self._options,
            near,
            self.far,
            send,
            kept=self._saves.last_steps,
            uploaded=self._begin_collecting,
            waits_at_exit=self.hosts is None,
            observers=self._context.observers,
        )
        return Uploads(uploader, stop_sending)

    # --- saves ------------------------------------------------------------------------------------

    def target(self, step: int, name: str) -> StepTarget:
        """See `OwnedRun`. The target is in the near directory. A step that some hosts lack can be replaced."""
        near = self.steps.directories[0]
        is_incomplete = self.hosts is not None and step not in near.candidates()
        if self.near is not None:
            self.near.deleter.keep_claim(step)
        return StepTarget(
            SubPath(near.directory, name),
            is_unusable=is_incomplete or step in near.broken,
            before_commit=None if self.near is None else self.near.lock.check,
            strategy=PlainSave()
            if self.hosts is None
            else HostSave(self.hosts, partial(self._steps_to_keep, step), self._keep_on_host),
            owner=0 if self.far is None else self.far.lock.number,
        )

    def allow(self, step: int, *, is_new: bool) -> None:
        """See `OwnedRun`."""
        if self.near is not None:
            self.near.expect_present()
        for owned in self._owned:
            owned.deleter.wait_until_gone(step)
        if is_new:
            refuse_existing(step, self.steps.directories)

    def committed(self, saved: SavedStep) -> None:
        """See `OwnedRun`. Queues the upload of the step if the upload policy chooses it."""
        self.steps.directories[0].add(saved.step, saved.name)
        self.uploads.committed(saved.step, saved.epoch, preempted=saved.preempted)
        self._begin_collecting()

    # --- retention --------------------------------------------------------------------------------

    def _kept(self) -> set[int]:
        """Return the steps that the near directory keeps regardless of the policy."""
        return self._saves.kept() | self.uploads.pending()

    def _begin_collecting(self) -> None:
        """Apply the near directory's preservation policy in the background. The leader decides for all hosts."""
        near = self.near
        if near is not None and self._leads and (self.hosts is not None or not isinstance(near.policy, PreserveAll)):
            self._deletions.begin(partial(self._collect, near))

    def _collect(self, near: OwnedDirectory) -> None:
        near.deleter.collect(near.policy, keep=self._kept, broken=frozenset(near.steps.broken))
        self._delete_incomplete()

    def _steps_to_keep(self, step: int) -> JSON:
        """On the leader, return the steps that every host must keep after the commit of a step."""
        near = self.near
        assert near is not None  # the leader owns it
        now = time.time()
        deleted = set(what_to_delete(near.policy, [*near.infos(), StepInfo(step, now)], now))
        return sorted({step, *near.steps.candidates()} - deleted.difference(self._kept()))

    def _keep_on_host(self, kept: JSON) -> None:
        """On other hosts, delete the steps that the leader does not keep."""
        if self.near is not None and not self._leads:
            steps = frozenset(step for step in kept if isinstance(step, int)) if isinstance(kept, list) else frozenset()
            self._deletions.begin(partial(self._keep_only, self.near, steps))

    def _keep_only(self, near: OwnedDirectory, steps: frozenset[int]) -> None:
        policy = CustomPreservation(lambda infos, now: steps)
        near.deleter.collect(policy, keep=self._kept, broken=frozenset())
        self._delete_incomplete()

    def _delete_incomplete(self) -> None:
        if self.steps.host_steps is not None:
            self.steps.host_steps.delete_incomplete()

    # --- deletion ---------------------------------------------------------------------------------

    def delete(self, step: int, agreement: Agreement) -> None:
        """See `OwnedRun`. Hides the step in both directories immediately, and removes its files in the background."""
        # Create both exchanges before the first stage, so that they have the same state on every rank.
        deleted = agreement.part("deleted")
        on_hosts = agreement.part("hosts")
        begun: list[PendingDeletion] = []
        try:
            with agreement.stage("delete"):
                if self._leads:
                    begun = self._begin_deletions(step)
            if self.hosts is not None:
                # After the leader's stage: the leader may wait for an upload that needs the files
                # of every host.
                with on_hosts.stage("delete"):
                    if not self._leads:
                        begun = self._begin_deletions(step)
        except BaseException:
            _cancel(begun)
            raise
        if self._leads:
            self._deletions.begin(partial(deleted.lead, "deleted", partial(self._remove, step, begun)))
            return
        names = [tier.name(step) if step in tier.candidates() else None for tier in self.steps.directories]
        for number, tier in enumerate(self.steps.directories):
            if not begun or number != 0:  # a begun deletion forgets the near step itself
                tier.forget([step])
        self._deletions.begin(partial(self._await_deletion, step, names, begun, deleted))

    def _begin_deletions(self, step: int) -> list[PendingDeletion]:
        """Hide a step in every directory that this process owns."""
        committed = [owned for owned in self._owned if owned.steps.is_committed(step)]
        if not committed and self._leads:
            raise CheckpointNotFoundError(self.steps.main.missing(step))
        begun: list[PendingDeletion] = []
        try:
            for owned in committed:
                begun.append(self._begin_deletion(owned, step))
        except BaseException:
            _cancel(begun)
            raise
        return begun

    def _begin_deletion(self, owned: OwnedDirectory, step: int) -> PendingDeletion:
        def is_another_elsewhere() -> bool:
            if not self._leads:
                return True  # the leader checks this for all processes
            others = [other for other in self._owned if other is not owned]
            return any(other.deleter.has_another(step) for other in others)

        return owned.deleter.begin(step, under_way=self._saves.under_way, elsewhere=is_another_elsewhere)

    def _remove(self, step: int, begun: Sequence[PendingDeletion]) -> None:
        """On the leader, remove a step. Remove the near copy first: the next run would upload it if it remained."""
        self.uploads.cancel(step)
        if self.far is not None and self.far.steps.is_committed(step):  # it was uploaded after `_begin_deletions`
            begun = [*begun, self._begin_deletion(self.far, step)]
        for deletion in begun:
            deletion.perform()

    def _await_deletion(
        self, step: int, names: Sequence[str | None], begun: Sequence[PendingDeletion], deleted: Agreement
    ) -> None:
        """Delete the files that this process owns, and wait for the leader.

        If that fails, add the step to the lists of steps again.
        """
        try:
            for deletion in begun:
                deletion.perform()
            deleted.lead("deleted", _nothing)
        except BaseException:
            for tier, name in zip(self.steps.directories, names, strict=True):
                if name is not None:
                    tier.add(step, name)
                    tier.distrust(step)  # it may be deleted nevertheless
            raise

    # --- end --------------------------------------------------------------------------------------

    def wait_for_uploads(self, timeout: float | None) -> None:
        """See `TieredDirectory.wait_for_uploads`."""
        self._saves.wait()
        if self.uploads.uploader is not None:
            self.uploads.uploader.wait(timeout)
            self._saves.wait()  # for deletions in the near directory after the uploads

    def take_errors(self) -> Sequence[BaseException]:
        """See `OwnedRun`. Includes an error for steps that cannot be uploaded, such as damaged ones."""
        errors = list(self._deletions.take_errors(None if self._until is None else self._until.left_to_stop()))
        try:
            self.uploads.raise_unreported()
        except UploadError as error:
            errors.append(error)
        return errors

    def close(self) -> None:
        """See `OwnedRun`. Waits for uploads as long as the near tier's options allow.

        Raises:
            UploadError: if steps still wait (unless ``close_seconds=0``), or could not be uploaded.
                Waiting steps stay in the near directory, and the next run uploads them.
        """
        self.uploads.close(self._begin_to_close())

    def release(self) -> None:
        """See `OwnedRun`."""
        self._deletions.refuse()
        until = self._begin_to_close()
        try:
            self.uploads.stop(until)
            self._deletions.close(until.left_to_stop())
        finally:
            for owned in self._owned:  # the near directory first, because the far one may not answer
                owned.close(until.left_to_release())

    def _begin_to_close(self) -> Deadline:
        if self._until is None:
            self._until = Deadline(self._options.close_seconds)
        return self._until


def _cancel(begun: Sequence[PendingDeletion]) -> None:
    for deletion in begun:
        deletion.cancel()


def _nothing() -> None:
    """Do nothing: `Agreement.lead` calls its function only on the leader."""


class TieredDirectory:
    """A `RunDirectory` with two directories: steps are saved to the near directory and uploaded to the far one.

    A load reads the near copy of a step if it is valid, and otherwise the far copy. Errors of the
    far directory do not delay saves: uploads are retried until the run ends. One `Checkpointer` at
    a time can own the directories; any number of readers can use them.
    """

    def __init__(self, near: NearTier | LocationLike, far: LocationLike) -> None:
        """Describe the two directories. Does no I/O.

        Args:
            near: the options of the fast directory, or only its path or URL.
            far: the directory of the run: a path or URL. The upload policy of the near tier chooses
                the steps to upload to it. The preservation policy of the `Checkpointer` chooses the
                steps to keep in it.

        `open` and `own` raise `InvalidLocationError` if one directory is the other or inside it.
        """
        self.near = near if isinstance(near, NearTier) else NearTier(near)
        self.location = far
        self._run: TieredRun | None = None

    def __repr__(self) -> str:
        return redacted(f"TieredDirectory(near={self.near!r}, far={self.location!r})")

    def open(self, names: StepNames, context: Context) -> TieredSteps:
        """See `RunDirectory`."""
        near = StepDirectory(self.near.locate(self.location), names, context)
        far = StepDirectory(self.location, names, context)
        return TieredSteps(near, far, HostSteps(near, context) if self.near.seen_by == "host" else None)

    def own(self, names: StepNames, context: Context, ownership: Ownership) -> TieredRun:
        """See `RunDirectory`."""
        self._run = TieredRun(self.near, self.open(names, context), context, ownership)
        return self._run

    @property
    def uploads(self) -> UploadStatus:
        """Progress of the uploads. Empty on every process except the leader."""
        return UploadStatus() if self._run is None else self._run.uploads.status

    def wait_for_uploads(self, timeout: float | None = None) -> None:
        """Wait until all saves are done, and all steps that the upload policy chose are uploaded.

        In a job only the leader waits for uploads; the other processes wait only for saves.

        Args:
            timeout: maximum time to wait for uploads, in seconds; None for no limit.

        Raises:
            UploadError: if steps still wait after the timeout, or could not be uploaded.
            The errors of `Checkpointer.wait`.
        """
        if self._run is not None:
            self._run.wait_for_uploads(timeout)
