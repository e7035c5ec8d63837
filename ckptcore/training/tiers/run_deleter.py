"""Deletion of steps in both tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from ckptcore.errors import CheckpointNotFoundError
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import OnHosts
from ckptcore.model.tree import JSON
from ckptcore.policies import CustomPreservation, PreserveAll, StepInfo, what_to_delete
from ckptcore.training.garbage import BegunDeletion, Cleaner
from ckptcore.training.tiers.near import OwnedTier, RunTiers
from ckptcore.training.tiers.uploads import Uploads

__all__ = [
    "Collector",
    "RunDeleter",
]


class Collector:
    """Collects the nearest tier of a run. Any thread.

    Where hosts have directories of their own, the leader decides what stays and tells it with each save, so that every host keeps the
    same steps.
    """

    def __init__(self, tiers: RunTiers, cleaner: Cleaner, *, kept: Callable[[], Collection[int]]) -> None:
        """Collect nothing yet.

        Args:
            tiers: of the run.
            cleaner: on which steps are deleted.
            kept: gives the steps that stay whatever the policy says.
        """
        self._tiers = tiers
        self._cleaner = cleaner
        self._kept = kept

    def begin(self) -> None:
        """Delete what the policy gives up by now, in the background. Where another process leads, nothing."""
        hosts, nearest = self._tiers.hosts, self._tiers.nearest
        if nearest is None or (hosts is not None and self._tiers.far is None):
            return  # who leads collects, and lets the other hosts know
        if not isinstance(nearest.policy, PreserveAll) or hosts is not None:
            self._cleaner.begin(partial(self._collect, nearest))

    def on_hosts(self, step: int) -> OnHosts | None:
        """How a save of a step lets the other hosts keep what the leader's keeps; None where all see one directory."""
        if self._tiers.hosts is None:
            return None
        return OnHosts(self._tiers.hosts, tell=partial(self._tell, step), hear=self._hear)

    def _tell(self, step: int) -> JSON:
        """On the leader: the steps that every host is to keep once this one is committed."""
        nearest = self._tiers.nearest
        assert nearest is not None  # who leads owns it
        now = time.time()
        doomed = set(what_to_delete(nearest.policy, [*nearest.infos(), StepInfo(step, now)], now))
        return sorted({step, *nearest.steps.candidates()} - doomed.difference(self._kept()))

    def _hear(self, told: JSON) -> None:
        """Where another process leads: let this host keep what the leader's keeps."""
        nearest = self._tiers.nearest
        if nearest is not None and self._tiers.far is None:
            steps = frozenset(step for step in told if isinstance(step, int)) if isinstance(told, list) else frozenset()
            self._cleaner.begin(partial(self._keep_only, nearest, steps))

    def _keep_only(self, nearest: OwnedTier, steps: frozenset[int]) -> None:
        policy = CustomPreservation(lambda infos, now: steps)
        nearest.deleter.collect(policy, keep=self._kept, broken=frozenset())
        self._sweep()

    def _collect(self, nearest: OwnedTier) -> None:
        nearest.deleter.collect(nearest.policy, keep=self._kept, broken=frozenset(nearest.broken))
        self._sweep()

    def _sweep(self) -> None:
        if self._tiers.host_steps is not None:
            self._tiers.host_steps.sweep()


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
