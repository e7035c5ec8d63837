"""Chains of versions: from a full version to the newest delta. When a full version is due, and what deltas need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import TreePath
from ckptcore.policies import PreservationPolicy, StepInfo

Ties = Mapping[TreePath, TreePath]
"""By path of each tied array: the path of the array that has its elements."""


def ties_of(tree: TreeMetadata) -> Ties:
    """Return the tied arrays of a tree."""
    return {tree.paths[alias]: tree.paths[leaf] for alias, leaf in tree.aliases.items()}


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
        ties: the tied arrays of the newest version.
    """

    versions: Sequence[ChainVersion] = ()
    run: str = ""
    ties: Ties = field(default_factory=dict)

    def add(self, version: ChainVersion, ties: Ties, *, is_full: bool) -> None:
        """Add the newest version."""
        self.versions = [version] if is_full else [*self.versions, version]
        self.ties = ties

    def needs_full(self, most: int, ties: Ties) -> bool:
        """Return True if the next version, with these tied arrays, should be full.

        This is so if the chain has `most` versions, or if its deltas take as many bytes as its full version: so a late
        joiner reads less than twice the bytes of a full version. It is also so if other arrays are tied than before:
        deltas have each array under one name, and readers of slime's format would keep the old elements of the others.
        """
        if not self.versions or ties != self.ties:
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
