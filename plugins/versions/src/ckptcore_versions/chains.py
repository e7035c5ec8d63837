"""Chains of versions: from a full version to the newest delta. When a full version is due, and what deltas need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptcore.model.metadata import TreeMetadata
from ckptcore.policies import PreservationPolicy, StepInfo


class ChainVersion(NamedTuple):
    """A version of a chain.

    Attributes:
        number: its number.
        save_id: its save id.
        nbytes: the size of its objects in bytes.
    """

    number: int
    save_id: str
    nbytes: int


@dataclass(slots=True)
class Chain:
    """The newest chain: a full version, and the deltas that follow it. Known on the leader.

    Attributes:
        versions: the full version, and its deltas in ascending order; empty if there is no version to continue from.
        run: the run of the newest version.
        tree: the tree of the newest version.
    """

    versions: Sequence[ChainVersion] = ()
    run: str = ""
    tree: TreeMetadata | None = None

    def add(self, version: ChainVersion, tree: TreeMetadata, *, is_full: bool) -> None:
        """Add the newest version, which has the given tree."""
        self.versions = [version] if is_full else [*self.versions, version]
        self.tree = tree

    def needs_full(self, most: int) -> bool:
        """Return True if the next version should be full.

        This is so if the chain has `most` versions, or if its deltas take as many bytes as its full version: so a late
        joiner reads less than twice the bytes of a full version.
        """
        if not self.versions:
            return True
        full, *deltas = self.versions
        return len(self.versions) >= most or sum([delta.nbytes for delta in deltas]) >= full.nbytes


@dataclass(frozen=True, slots=True)
class WholeChains:
    """Keeps the versions that another policy keeps, and the versions that these need.

    Deletions would refuse the base of a version that is kept, again after each publish.

    Attributes:
        policy: the other policy.
        base_of: returns the number of the base of a version; None for a full version. Called with committed versions.
    """

    policy: PreservationPolicy
    base_of: Callable[[int], int | None]

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """See `PreservationPolicy`."""
        if not steps:
            return frozenset()
        present = {info.step for info in steps}
        kept: set[int] = set()
        for chosen in [*self.policy.keep(steps, now), steps[-1].step]:
            number: int | None = chosen
            while number is not None and number in present and number not in kept:
                kept.add(number)
                number = self.base_of(number)
        return frozenset(kept)

    def __str__(self) -> str:
        return f"{self.policy}, and the versions that these need"
