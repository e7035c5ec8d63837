"""TieredSteps: the steps of a run in two directories, and which of two different copies counts."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptcore.commit.location import Place
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UnsupportedVersionError
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.training.steps import StepDirectory
from ckptcore_tiers.backed_places import BackedPlace
from ckptcore_tiers.hosts import HostSteps

__all__ = ["TieredSteps"]

logger = logging.getLogger("ckptcore.tiers")


class TieredSteps:
    """The `RunSteps` of two directories. Any thread.

    Two copies of a step are the same if their save ids are. If they differ, the run was set back and saved the step
    again, or went on elsewhere: then the copy whose save began later counts, and the far one of two that began at once.
    The other copy is not loaded.

    Attributes:
        directories: the near directory and the far one.
        main: the far directory.
        host_steps: what this host has near, if hosts have directories of their own.
        is_owned: True once this process owns the far directory and has listed it. Nobody else writes there then.
    """

    def __init__(self, near: StepDirectory, far: StepDirectory, host_steps: HostSteps | None) -> None:
        """List nothing yet."""
        self.directories = (near, far)
        self.main = far
        self.host_steps = host_steps
        self.is_owned = False

    def reload(self, agreement: Agreement) -> None:
        """See `RunSteps`. Steps of single hosts count if they are on all of them, of one save."""
        before = [directory.changes() for directory in self.directories]
        if self.host_steps is None:
            listed: Any = agreement.lead("list", self._list_both)
            found = [{int(step): name for step, name in names.items()} for names in listed]
        else:
            found = [dict(names) for names in self.host_steps.find_names(agreement, self._list_far)]
        for directory, names, since in zip(self.directories, found, before, strict=True):
            directory.replace(names, since)

    def _list_both(self) -> JSON:
        near = self.directories[0].list_visible()
        return [{str(step): name for step, name in names.items()} for names in (near, self._list_far())]

    def _list_far(self) -> Mapping[int, str]:
        """List the far directory. If it does not answer, the owner uses its last list: no other process writes there."""
        far = self.directories[1]
        try:
            return far.list_visible()
        except StorageError as error:
            if not self.is_owned:
                raise
            logger.warning("%s cannot be listed now, and is taken as it was: %s", far.display, error)
            return {step: far.name(step) for step in far.candidates()}

    def candidates(self) -> Sequence[int]:
        """See `RunSteps`."""
        return sorted(set(itertools.chain.from_iterable(tier.candidates() for tier in self.directories)))

    def steps(self) -> tuple[int, ...]:
        """See `RunSteps`."""
        return tuple(sorted(set(itertools.chain.from_iterable(tier.steps() for tier in self.directories))))

    def newest_first(self) -> Iterator[int]:
        """See `RunSteps`."""
        merged = heapq.merge(*[tier.newest_first() for tier in self.directories], reverse=True)
        return (step for step, _ in itertools.groupby(merged))

    def latest(self) -> int | None:
        """See `RunSteps`."""
        return next(self.newest_first(), None)

    def look_again(self, step: int) -> bool:
        """See `RunSteps`."""
        return any(tier.look_again(step) for tier in self.directories)

    def copy_place(self, step: int, number: int) -> Place:
        """See `RunSteps`. What one host lacks of a step is read from the far directory."""
        near, far = self.directories
        if self.host_steps is not None and number == 0:
            return BackedPlace(near.place(step), far.place(step))
        return self.directories[number].place(step)

    def copies(self, step: int) -> Sequence[int]:
        """See `RunSteps`. Copies that do not count are left out.

        So is a far directory that does not answer, if the step is near; a warning is logged.
        """
        found: list[int] = []
        created: dict[str, tuple[float, int]] = {}
        saves: dict[int, str] = {}
        for number, tier in enumerate(self.directories):
            try:
                if not tier.is_committed(step):
                    continue
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
                    tier.display, step, self.directories[found[0]].display, error,
                )  # fmt: skip
        counts = max(created, key=lambda save: created[save], default=None)
        return [number for number in found if saves.get(number, counts) == counts]
