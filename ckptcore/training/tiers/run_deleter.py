"""RunDeleter: deletes a step that the user names from every tier, for every process of the job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from ckptcore.errors import CheckpointNotFoundError
from ckptcore.job.agreement import Agreement
from ckptcore.training.cleaning import Cleaner
from ckptcore.training.garbage import BegunDeletion
from ckptcore.training.tiers.owned import OwnedTier
from ckptcore.training.tiers.run_tiers import RunTiers
from ckptcore.training.tiers.uploads import Uploads

__all__ = ["RunDeleter"]


class RunDeleter:
    """Deletes steps of a run. Whether a step goes is decided at once; its files are removed in the background."""

    def __init__(
        self, tiers: RunTiers, uploads: Uploads, cleaner: Cleaner, *, under_way: Callable[[], Collection[int]]
    ) -> None:
        """Delete nothing yet.

        Args:
            tiers: of the run, owned.
            uploads: from the near tier: what is deleted is not to be uploaded.
            cleaner: on which files are removed, and who does not lead waits for the leader.
            under_way: gives the steps that this process is saving.
        """
        self._tiers = tiers
        self._uploads = uploads
        self._cleaner = cleaner
        self._under_way = under_way

    def delete(self, step: int, agreement: Agreement) -> None:
        """Delete a step, in the background. On every rank; only who leads deletes, and the others hear how it ended.

        Args:
            step: which.
            agreement: with the other processes.

        Raises:
            CheckpointNotFoundError: if it is not there, or other software wrote it.
            OnlyStepError: if it is the only one that is valid.
            StepPinnedError: if a reader has pinned it.
        """
        leads = self._tiers.leads
        told = agreement.part("deleted")  # a rank that has come through the stage counts as the leader does
        on_hosts = agreement.part("hosts")
        begun: list[BegunDeletion] = []
        try:
            with agreement.stage("delete"):
                if leads:
                    begun = self._begin(step)
            if self._tiers.hosts is not None:
                # Only now: until the leader comes here it may wait for an upload of the step, for which every host's files are needed.
                with on_hosts.stage("delete"):
                    if not leads:
                        begun = self._begin(step)
        except BaseException:
            _cancel(begun)
            raise
        if leads:
            self._cleaner.begin(partial(told.lead, "deleted", partial(self._remove, step, begun)))
            return
        tiers = self._tiers.copies.tiers
        names = [tier.name(step) if step in tier.candidates() else None for tier in tiers]
        for tier in tiers:
            if not begun or tier is not tiers[0]:  # a deletion of this process's own forgets it when it has ended
                tier.forget([step])
        self._cleaner.begin(partial(self._hear, step, names, begun, told))

    def _begin(self, step: int) -> list[BegunDeletion]:
        """Let a step be gone for this process from every tier that it owns."""
        there = [tier for tier in self._tiers.owned if tier.steps.is_committed(step)]
        if not there and self._tiers.leads:
            raise CheckpointNotFoundError(self._tiers.copies.tiers[-1].missing(step))
        begun: list[BegunDeletion] = []
        try:
            for tier in there:
                begun.append(self._begin_in(tier, step))
        except BaseException:
            _cancel(begun)
            raise
        return begun

    def _begin_in(self, tier: OwnedTier, step: int) -> BegunDeletion:
        def is_another_elsewhere() -> bool:
            if not self._tiers.leads:
                return True  # the leader has looked, or fails for all
            others = [other for other in self._tiers.owned if other is not tier]
            return any(other.deleter.has_another(step, other.broken) for other in others)

        return tier.deleter.begin(step, broken=tier.broken, under_way=self._under_way, elsewhere=is_another_elsewhere)

    def _remove(self, step: int, begun: Sequence[BegunDeletion]) -> None:
        """On the leader: remove a step from the tiers, the nearest first: one that is only near would be uploaded by the next run."""
        self._uploads.cancel(step)
        far = self._tiers.far
        if far is not None and far.steps.is_committed(step):  # it was uploaded meanwhile
            begun = [*begun, self._begin_in(far, step)]
        for deletion in begun:
            deletion.perform()

    def _hear(self, step: int, names: Sequence[str | None], begun: Sequence[BegunDeletion], told: Agreement) -> None:
        """Where another process leads: wait until it has deleted a step, which is there again if it could not.

        Processes of which some went on and some had an error would not meet again.
        """
        try:
            for deletion in begun:
                deletion.perform()
            told.lead("deleted", _nothing)
        except BaseException:
            for tier, name in zip(self._tiers.copies.tiers, names, strict=True):
                if name is not None:
                    tier.add(step, name)
                    tier.distrust(step)  # it may be gone all the same
            raise


def _cancel(begun: Sequence[BegunDeletion]) -> None:
    for deletion in begun:
        deletion.cancel()


def _nothing() -> None:
    """What who does not lead brings to a decision."""
