"""Steps in several tiers: which there are, and which of two copies that differ counts."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Iterator, Sequence

from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UnsupportedVersionError
from ckptcore.training.steps import StepDirectory

__all__ = ["TieredSteps"]

logger = logging.getLogger("ckptcore.training")


class TieredSteps:
    """The steps of a run, of which each is in one or several directories: its tiers. Any thread.

    Two copies of a step are the same where their save ids are. Where they differ, the run was set back and saved the step again,
    or went on elsewhere: then the copy whose save began later counts, and of two that began at once the one farther away. The other
    is what a run gave up, and is not loaded.

    Attributes:
        tiers: the directories, the nearest first. A run without tiers has one.
    """

    def __init__(self, tiers: Sequence[StepDirectory]) -> None:
        """Look at nothing yet."""
        self.tiers = tuple(tiers)

    def candidates(self) -> Sequence[int]:
        """Every step that has a name in any tier, committed or not, ascending."""
        return sorted(set(itertools.chain.from_iterable(tier.candidates() for tier in self.tiers)))

    def steps(self) -> tuple[int, ...]:
        """Every step that is committed in any tier, ascending."""
        return tuple(sorted(set(itertools.chain.from_iterable(tier.steps() for tier in self.tiers))))

    def newest_first(self) -> Iterator[int]:
        """Every step that is committed in any tier, the newest first; looks no further than it is asked."""
        merged = heapq.merge(*[tier.newest_first() for tier in self.tiers], reverse=True)
        return (step for step, _ in itertools.groupby(merged))

    def latest(self) -> int | None:
        """The newest step that is committed in any tier; None if there is none."""
        return next(self.newest_first(), None)

    def is_committed(self, step: int) -> bool:
        """Whether a step is committed in any tier."""
        return any(tier.is_committed(step) for tier in self.tiers)

    def look_again(self, step: int) -> bool:
        """Whether a step is committed in any tier, without relying on what is remembered."""
        return any(tier.look_again(step) for tier in self.tiers)

    def nearest(self, step: int) -> StepDirectory:
        """The nearest tier that has the copy of a step that counts.

        Raises:
            CheckpointNotFoundError: if no tier has the step.
        """
        found = self.tiers_of(step)
        if not found:
            raise CheckpointNotFoundError(self.tiers[-1].missing(step))
        return self.tiers[found[0]]

    def tiers_of(self, step: int) -> Sequence[int]:
        """The numbers of the tiers to load a step from, the nearest first; those whose copy does not count are left out.

        A farther tier that does not answer is left out too, where a nearer one has the step: this is logged.

        Raises:
            StorageError: if the only tier that may have it does not answer.
        """
        found: list[int] = []
        created: dict[str, tuple[float, int]] = {}
        saves: dict[int, str] = {}
        for number, tier in enumerate(self.tiers):
            try:
                if not tier.is_committed(step):
                    continue
                if len(self.tiers) > 1:
                    summary = tier.summary(step)
                    if summary is not None:
                        saves[number] = summary.save_id
                        created[summary.save_id] = (tier.info(step).created, number)
                found.append(number)
            except CheckpointNotFoundError:
                continue  # deleted since
            except (CorruptCheckpointError, UnsupportedVersionError):
                found.append(number)  # a load finds that it cannot be read, and says why
            except StorageError as error:
                if not found:
                    raise
                logger.warning(
                    "whether %s has another copy of step %d is not known, that in %s is taken: %s",
                    tier.display, step, self.tiers[found[0]].display, error,
                )  # fmt: skip
        counts = max(created, key=lambda save: created[save], default=None)
        return [number for number in found if saves.get(number, counts) == counts]
