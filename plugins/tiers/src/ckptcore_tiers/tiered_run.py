"""TieredRun: the two directories of a run while a job owns them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from ckptcore.commit.location import Within
from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, UploadError
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import expect_one_directory
from ckptcore.loading.verify import has_its_sizes
from ckptcore.model.tree import JSON
from ckptcore.policies import CustomPreservation, PreserveAll, StepInfo, what_to_delete
from ckptcore.saving.writing import PlainSave
from ckptcore.training.garbage import BegunDeletion, DeletionQueue
from ckptcore.training.path_directory import OwnedDirectory, refuse_existing, write_directory_metadata
from ckptcore.training.run_directory import Ownership, SavedStep, StepTarget
from ckptcore_tiers.host_groups import Hosts, OnHosts
from ckptcore_tiers.host_saves import HostSave
from ckptcore_tiers.hosts import find_hosts, is_whole_here
from ckptcore_tiers.near_tier import NearTier
from ckptcore_tiers.tiered_steps import TieredSteps
from ckptcore_tiers.uploads import Uploads, begin_uploads

__all__ = ["TieredRun"]


class TieredRun:
    """The `OwnedRun` of a `TieredDirectory`, in one process.

    The leader owns both directories. If hosts have near directories of their own, the first process of each host owns
    the one of its host. Every other process owns none.

    Attributes:
        steps: the steps of the run.
        hosts: which processes see one near directory; None if all do.
        near, far: the directories that this process owns.
        uploads: the part of this process in the uploads.
    """

    def __init__(self, options: NearTier, steps: TieredSteps, context: Context, ownership: Ownership) -> None:
        """See `RunDirectory.own`."""
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
        self._cleaner = DeletionQueue(far.display)
        if steps.host_steps is not None:
            self.hosts = find_hosts(agreement.part("hosts"), near.open_to_write())
        own = partial(OwnedDirectory, context=context, if_in_use=ownership.if_in_use)
        try:
            with agreement.stage("own"):
                if agreement.rank in (self.hosts.firsts if self.hosts is not None else [0]):
                    looks_whole = has_its_sizes if self.hosts is None else is_whole_here
                    self.near = own(near, options.preservation_policy, looks_whole=looks_whole)
                if self._leads:
                    self.far = own(far, ownership.policy)
                    if ownership.metadata is not None:
                        write_directory_metadata(far.open_to_write(), ownership.metadata)
            for name, directory in (("near", near), ("far", far)):
                if self.hosts is None or directory is far:
                    expect_one_directory(agreement.part(name), directory.store, directory.directory)
        except BaseException:
            self.release()
            raise

    @property
    def _owned(self) -> Sequence[OwnedDirectory]:
        """The directories that this process owns, the near one first."""
        return [owned for owned in (self.near, self.far) if owned is not None]

    def begin(self) -> None:
        """See `OwnedRun`. Upload from now on; first what an earlier run left near."""
        self.steps.is_owned = self.far is not None
        self.uploads = begin_uploads(
            self._options,
            self.steps,
            self.far,
            self.hosts,
            self._context,
            self._agreement,
            kept=self._saves.last_steps,
            uploaded=self._begin_collecting,
        )
        self.uploads.resume()  # before anything is deleted: steps that wait must stay
        if self.near is not None:
            self._cleaner.begin(self.near.deleter.clean)

    # --- saves --------------------------------------------------------------------------------------------------------

    def target(self, step: int, name: str) -> StepTarget:
        """See `OwnedRun`: the near directory. A step that only some hosts have is worthless."""
        near = self.steps.directories[0]
        is_incomplete = self.hosts is not None and step not in near.candidates()
        if self.near is not None:
            self.near.deleter.spare(step)
        return StepTarget(
            Within(near.directory, name),
            is_worthless=is_incomplete or step in near.broken,
            before_commit=None if self.near is None else self.near.hold.check,
            strategy=PlainSave()
            if self.hosts is None
            else HostSave(OnHosts(self.hosts, tell=partial(self._kept_on_hosts, step), hear=self._keep_on_host)),
        )

    def allow(self, step: int, *, is_new: bool) -> None:
        """See `OwnedRun`."""
        for owned in self._owned:
            owned.deleter.wait_until_gone(step)
        if is_new:
            refuse_existing(step, self.steps.directories)

    def committed(self, saved: SavedStep) -> None:
        """See `OwnedRun`. The step is near; its upload begins if the upload policy chooses it."""
        self.steps.directories[0].add(saved.step, saved.name)
        self.uploads.committed(saved.step, saved.epoch, preempted=saved.preempted)
        self._begin_collecting()

    # --- retention ----------------------------------------------------------------------------------------------------

    def _kept(self) -> set[int]:
        """Return the steps that stay near whatever the policy says."""
        return self._saves.kept() | self.uploads.pending()

    def _begin_collecting(self) -> None:
        """Delete near what the policy gives up, in the background. The leader decides for all hosts."""
        near = self.near
        if near is not None and self._leads and (self.hosts is not None or not isinstance(near.policy, PreserveAll)):
            self._cleaner.begin(partial(self._collect, near))

    def _collect(self, near: OwnedDirectory) -> None:
        near.deleter.collect(near.policy, keep=self._kept, broken=frozenset(near.steps.broken))
        self._sweep()

    def _kept_on_hosts(self, step: int) -> JSON:
        """On the leader: return the steps that every host keeps once a step is committed, so that all keep the same."""
        near = self.near
        assert near is not None  # the leader owns it
        now = time.time()
        doomed = set(what_to_delete(near.policy, [*near.infos(), StepInfo(step, now)], now))
        return sorted({step, *near.steps.candidates()} - doomed.difference(self._kept()))

    def _keep_on_host(self, kept: JSON) -> None:
        """On other hosts than the leader's: keep the steps that the leader keeps."""
        if self.near is not None and not self._leads:
            steps = frozenset(step for step in kept if isinstance(step, int)) if isinstance(kept, list) else frozenset()
            self._cleaner.begin(partial(self._keep_only, self.near, steps))

    def _keep_only(self, near: OwnedDirectory, steps: frozenset[int]) -> None:
        policy = CustomPreservation(lambda infos, now: steps)
        near.deleter.collect(policy, keep=self._kept, broken=frozenset())
        self._sweep()

    def _sweep(self) -> None:
        if self.steps.host_steps is not None:
            self.steps.host_steps.sweep()

    # --- deletion -----------------------------------------------------------------------------------------------------

    def delete(self, step: int, agreement: Agreement) -> None:
        """See `OwnedRun`. The step is hidden in both directories at once; its files are removed in the background."""
        deleted = agreement.part("deleted")  # a rank that completes the stage counts as the leader does
        on_hosts = agreement.part("hosts")
        begun: list[BegunDeletion] = []
        try:
            with agreement.stage("delete"):
                if self._leads:
                    begun = self._begin_deletions(step)
            if self.hosts is not None:
                # Only now: an upload of the step needs the files of every host, and the leader may have waited for it.
                with on_hosts.stage("delete"):
                    if not self._leads:
                        begun = self._begin_deletions(step)
        except BaseException:
            _cancel(begun)
            raise
        if self._leads:
            self._cleaner.begin(partial(deleted.lead, "deleted", partial(self._remove, step, begun)))
            return
        names = [tier.name(step) if step in tier.candidates() else None for tier in self.steps.directories]
        for number, tier in enumerate(self.steps.directories):
            if not begun or number != 0:  # the deletion of this process removes the step itself
                tier.forget([step])
        self._cleaner.begin(partial(self._await_deletion, step, names, begun, deleted))

    def _begin_deletions(self, step: int) -> list[BegunDeletion]:
        """Hide a step in every directory that this process owns."""
        there = [owned for owned in self._owned if owned.steps.is_committed(step)]
        if not there and self._leads:
            raise CheckpointNotFoundError(self.steps.main.missing(step))
        begun: list[BegunDeletion] = []
        try:
            for owned in there:
                begun.append(self._begin_deletion(owned, step))
        except BaseException:
            _cancel(begun)
            raise
        return begun

    def _begin_deletion(self, owned: OwnedDirectory, step: int) -> BegunDeletion:
        def is_another_elsewhere() -> bool:
            if not self._leads:
                return True  # the leader checks, and fails for all
            others = [other for other in self._owned if other is not owned]
            return any(other.deleter.has_another(step, other.steps.broken) for other in others)

        return owned.begin_deletion(step, self._saves.under_way, elsewhere=is_another_elsewhere)

    def _remove(self, step: int, begun: Sequence[BegunDeletion]) -> None:
        """On the leader: remove a step, near first: the next run would upload a step that is only near."""
        self.uploads.cancel(step)
        if self.far is not None and self.far.steps.is_committed(step):  # it was uploaded meanwhile
            begun = [*begun, self._begin_deletion(self.far, step)]
        for deletion in begun:
            deletion.perform()

    def _await_deletion(
        self, step: int, names: Sequence[str | None], begun: Sequence[BegunDeletion], deleted: Agreement
    ) -> None:
        """Delete what this process owns, and wait for the leader. The step exists again if that failed."""
        try:
            for deletion in begun:
                deletion.perform()
            deleted.lead("deleted", _nothing)
        except BaseException:
            for tier, name in zip(self.steps.directories, names, strict=True):
                if name is not None:
                    tier.add(step, name)
                    tier.distrust(step)  # it may be deleted all the same
            raise

    # --- ending -------------------------------------------------------------------------------------------------------

    def wait_for_uploads(self, timeout: float | None) -> None:
        """See `TieredDirectory.wait_for_uploads`."""
        self._saves.wait()
        if self.uploads.uploader is not None:
            self.uploads.uploader.wait(timeout)
            self._saves.wait()  # for deletions near of what was uploaded

    def take_errors(self) -> Sequence[BaseException]:
        """See `OwnedRun`. A step that cannot be uploaded because it is damaged is an error."""
        errors = list(self._cleaner.take_errors())
        try:
            self.uploads.raise_unheard()
        except UploadError as error:
            errors.append(error)
        return errors

    def close(self) -> None:
        """See `OwnedRun`. Wait for uploads as long as the near tier's options say.

        Raises:
            UploadError: if steps are not uploaded by then. They stay near, and the next run uploads them.
        """
        self.uploads.close()

    def release(self) -> None:
        """See `OwnedRun`."""
        self._cleaner.refuse()
        try:
            self.uploads.stop()
            self._cleaner.close()
        finally:
            for owned in reversed(self._owned):
                owned.close()


def _cancel(begun: Sequence[BegunDeletion]) -> None:
    for deletion in begun:
        deletion.cancel()


def _nothing() -> None:
    """The part of other processes in what the leader does."""
