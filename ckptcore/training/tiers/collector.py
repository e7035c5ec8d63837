"""Collector: deletes, in the background, what the directory that steps are saved to need not keep any longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from ckptcore.job.hosts import OnHosts
from ckptcore.model.tree import JSON
from ckptcore.policies import CustomPreservation, PreserveAll, StepInfo, what_to_delete
from ckptcore.training.cleaning import Cleaner
from ckptcore.training.tiers.owned import OwnedTier
from ckptcore.training.tiers.run_tiers import RunTiers

__all__ = ["Collector"]


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
