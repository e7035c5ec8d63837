"""The near tier of a run, and the directories that it owns."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeAlias

from ckptcore.commit.location import LocationLike, Place, absolute_location, commit_method
from ckptcore.commit.locks import IfInUse, Lock
from ckptcore.context import Context
from ckptcore.errors import InvalidLocationError
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import Hosts, expect_one_directory, find_hosts
from ckptcore.loading.verify import has_its_sizes
from ckptcore.model.tree import JSON
from ckptcore.policies import EveryStep, LatestN, PreservationPolicy, PreserveAll, SavePolicy, StepInfo
from ckptcore.protocols import StorageBackend
from ckptcore.training.garbage import StepDeleter, policy_infos
from ckptcore.training.steps import StepDirectory, write_directory_metadata
from ckptcore.training.tiered_steps import TieredSteps
from ckptcore.training.tiers.host_steps import HostSteps, is_whole_here

__all__ = [
    "NearTier",
    "OwnedTier",
    "RunTiers",
    "SeenBy",
]

SeenBy: TypeAlias = Literal["job", "host"]
"""Which processes see the files that one of them writes there: all of the job, or those on the same host."""

_SEEN_BY: Final[tuple[SeenBy, ...]] = ("job", "host")


@dataclass(frozen=True, slots=True)
class NearTier:
    """A fast directory, such as one of the local disk, that a `Checkpointer` saves steps to.

    A step is committed there, and the job waits for no more. It is uploaded to the directory of the run in the background.

    Attributes:
        directory: a path or URL, or a function that gives one in each process. It belongs to this run alone.
        preservation_policy: which steps are kept there. The newest always is, and so are those that wait to be uploaded.
        upload_policy: which steps are uploaded, a save policy: of its `Moment` the last step is the last one that it chose. A step
            that replaces one which the directory of the run has is uploaded in any case.
        most_waiting: of how many steps that wait to be uploaded the near tier keeps the files; where more wait, the oldest is given
            up. At least 1.
        close_seconds: how long `Checkpointer.close` waits for uploads, in seconds; None: for ever. With 0 it waits for none,
            and leaves those that wait to the next run, which finds their files.
        seen_by: which processes see what one writes there: ``"job"``, all of them; ``"host"``, those on the same host, each of which has
            a directory of its own. Then a step is on all hosts, each with what its processes wrote, or it does not count.

    Raises:
        TypeError, ValueError: if an argument is none of its values.
    """

    directory: LocationLike | Callable[[], LocationLike]
    preservation_policy: PreservationPolicy = field(default_factory=lambda: LatestN(2), kw_only=True)
    upload_policy: SavePolicy = field(default_factory=EveryStep, kw_only=True)
    most_waiting: int = field(default=8, kw_only=True)
    close_seconds: float | None = field(default=600.0, kw_only=True)
    seen_by: SeenBy = field(default="job", kw_only=True)

    def __post_init__(self) -> None:
        for name, kind, wanted in (
            ("preservation_policy", PreservationPolicy, "a preservation policy, such as LatestN(2)"),
            ("upload_policy", SavePolicy, "a save policy, such as FixedInterval(1000)"),
        ):
            value = getattr(self, name)
            if isinstance(value, type) or not isinstance(value, kind):
                raise TypeError(f"NearTier({name}={value!r}): expected {wanted}")
        if isinstance(self.most_waiting, bool) or not isinstance(self.most_waiting, int) or self.most_waiting < 1:
            raise ValueError(f"NearTier(most_waiting={self.most_waiting!r}): give a whole number of at least 1")
        seconds = self.close_seconds
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ValueError(f"NearTier(close_seconds={seconds!r}): give seconds, at least 0, or None to wait for ever")
        if self.seen_by not in _SEEN_BY:
            raise ValueError(f"NearTier(seen_by={self.seen_by!r}): expected one of {', '.join(map(repr, _SEEN_BY))}")

    def locate(self, far: LocationLike) -> LocationLike:
        """The directory of this process.

        Args:
            far: the directory of the run.

        Raises:
            InvalidLocationError: if it lies in the directory of the run, or that in it.
        """
        directory = self.directory() if callable(self.directory) else self.directory
        near, other = absolute_location(directory), absolute_location(far)
        if f"{near}/".startswith(f"{other}/") or f"{other}/".startswith(f"{near}/"):
            raise InvalidLocationError(
                f"NearTier({str(directory)!r}) and the directory of the run, {str(far)!r}, are the same or lie in each other; give each "
                "tier a directory of its own"
            )
        return directory


class OwnedTier:
    """A tier of a run, as a process sees it that owns its directory, until it is closed.

    Attributes:
        steps: which there are.
        policy: which are kept.
        broken: those whose copy here was found to be damaged, and not replaced since; who finds out adds and takes away.
        store: the storage, opened at the directory.
        owned: the ownership.
        deleter: deletes steps.
    """

    def __init__(
        self,
        steps: StepDirectory,
        policy: PreservationPolicy,
        broken: set[int],
        context: Context,
        *,
        if_in_use: IfInUse,
        looks_whole: Callable[[Place, Context], bool] = has_its_sizes,
    ) -> None:
        """Own the directory.

        Args:
            steps: the directory.
            policy: which steps are kept.
            broken: the steps that are known to be damaged here, now and later.
            context: options.
            if_in_use: as for `Checkpointer`.
            looks_whole: whether a step at a place seems to be undamaged.

        Raises:
            DirectoryInUseError: if another job owns it.
            StorageError: if it cannot be written.
        """
        steps.expect_directory()
        self.steps = steps
        self.policy = policy
        self.broken = broken
        self.store: StorageBackend = steps.open_to_write()
        self.owned: Lock = commit_method(self.store).locks(steps.display).own(if_in_use)
        self.deleter = StepDeleter(steps, self.store, self.owned, context, looks_whole=looks_whole)

    def infos(self) -> Sequence[StepInfo]:
        """What its policy decides over."""
        return policy_infos(self.steps, self.broken)

    def collect(self, *, keep: Callable[[], Collection[int]]) -> None:
        """Delete what its policy gives up; what is damaged is left alone.

        Args:
            keep: gives the steps that stay whatever the policy says.

        Raises:
            StorageError, SaveLostError: some may be deleted.
        """
        if not isinstance(self.policy, PreserveAll):
            self.deleter.collect(self.policy, keep=keep, broken=frozenset(self.broken))

    def close(self) -> None:
        """Let the directory go."""
        self.owned.close()


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
