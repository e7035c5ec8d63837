"""RunTiers: the tiers of a run in one of its processes, and which of them that process owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ckptcore.commit.ownership import IfInUse
from ckptcore.context import Context
from ckptcore.job.agreement import Agreement
from ckptcore.job.hosts import Hosts, find_hosts
from ckptcore.job.visibility import expect_one_directory
from ckptcore.loading.verify import has_its_sizes
from ckptcore.model.tree import JSON
from ckptcore.policies import PreservationPolicy
from ckptcore.training.directories import write_directory_metadata
from ckptcore.training.tiered_steps import TieredSteps
from ckptcore.training.tiers.host_steps import HostSteps, is_whole_here
from ckptcore.training.tiers.near import NearTier
from ckptcore.training.tiers.owned import OwnedTier

__all__ = ["RunTiers"]


class RunTiers:
    """The tiers of a run. Who leads owns all of them; where hosts have near directories of their own, who speaks for a host owns that.

    Every other process owns none. A run without a near tier has one tier, and that is the nearest.

    Attributes:
        copies: the steps in each tier.
        near: what the user says of the near tier; None where there is none.
        leads: whether this process leads; nobody does before the tiers are owned.
        hosts: which processes see one near directory; None where all do.
        host_steps: what this host has in its near directory, where hosts have their own.
        nearest: the directory that steps are saved to, if this process owns it.
        far: the directory of the run, where there is a near tier and this process leads.
    """

    def __init__(self, copies: TieredSteps, near: NearTier | None, context: Context) -> None:
        """Own nothing yet."""
        self.copies = copies
        self.near = near
        self.leads = False
        self._context = context
        self.hosts: Hosts | None = None
        self.host_steps: HostSteps | None = None
        self.nearest: OwnedTier | None = None
        self.far: OwnedTier | None = None

    def own(
        self,
        agreement: Agreement,
        policy: PreservationPolicy,
        broken_in: Sequence[set[int]],
        *,
        metadata: Mapping[str, JSON] | None,
        if_in_use: IfInUse,
    ) -> None:
        """Own what this process is to, and find out whether all processes see the same directories. On every rank.

        Args:
            agreement: with the other processes.
            policy: which steps the directory of the run keeps.
            broken_in: by tier, the steps that are known to be damaged there, now and later.
            metadata: is written to the directory of the run, unless it is None.
            if_in_use: as for `Checkpointer`.

        Raises:
            DirectoryInUseError: if another job owns a directory.
            NotSharedError: if this process does not see the directory of the leader.
            StorageError: if a directory cannot be written.
        """
        self.leads = agreement.rank == 0
        steps, run = self.copies.tiers[0], self.copies.tiers[-1]
        own = partial(OwnedTier, context=self._context, if_in_use=if_in_use)
        if self.near is not None and self.near.seen_by == "host":
            self.hosts = find_hosts(agreement.part("hosts"), steps.open_to_write())
            self.host_steps = HostSteps(steps, self._context)
        with agreement.stage("own"):
            if agreement.rank in (self.hosts.firsts if self.hosts is not None else [0]):
                looks_whole = has_its_sizes if self.hosts is None else is_whole_here
                kept = policy if self.near is None else self.near.preservation_policy
                self.nearest = own(steps, kept, broken_in[0], looks_whole=looks_whole)
            if self.leads:
                if self.near is not None:
                    self.far = own(run, policy, broken_in[-1])
                if metadata is not None:
                    write_directory_metadata(run.open_to_write(), metadata)
        for number, tier in enumerate(self.copies.tiers):
            if self.hosts is None or tier is not steps:
                expect_one_directory(agreement.part(f"tier-{number}"), tier.store, tier.directory)

    @property
    def owned(self) -> Sequence[OwnedTier]:
        """Those that this process owns, the nearest first."""
        return [tier for tier in (self.nearest, self.far) if tier is not None]

    def close(self) -> None:
        """Let what is owned go."""
        for tier in reversed(self.owned):
            tier.close()
