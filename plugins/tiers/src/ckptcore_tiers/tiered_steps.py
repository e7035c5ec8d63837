"""`TieredSteps`: the steps of a run in two directories, and which copy of a step is valid."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptcore.commit.delete import concerns_one_entry
from ckptcore.commit.location import AnyLocation
from ckptcore.commit.root import SaveOrder
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.events import logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.training.steps import StepDirectory
from ckptcore_tiers.fallback_storage import FallbackLocation
from ckptcore_tiers.hosts import HostSteps

logger = logger_named("ckptcore.tiers")


class TieredSteps:
    """The `RunSteps` of two directories. Thread-safe.

    Two copies of a step are equal if they have the same save id. If the ids differ, the run was
    rolled back and saved the step again, or continued elsewhere. Then the copy with the higher
    `SaveOrder` is valid; if both have the same, the far copy is valid. The other copy is not
    loaded. Times are not compared, because they come from the clocks of different machines.

    Attributes:
        directories: the near directory and the far directory.
        main: the far directory.
        host_steps: the near steps of this host, if each host has a separate near directory; else
            None.
        is_owned: True once this process owns the far directory and has listed it. From then on no
            other process writes there, and the list stays valid.
    """

    def __init__(self, near: StepDirectory, far: StepDirectory, host_steps: HostSteps | None) -> None:
        self.directories = (near, far)
        self.main = far
        self.host_steps = host_steps
        self.is_owned = False

    def reload(self, agreement: Agreement) -> None:
        """See `RunSteps`. With several hosts, a near step is complete if all hosts have it from the same save."""
        before = [directory.changes() for directory in self.directories]
        if self.host_steps is None:
            listed: Any = agreement.lead("list", self._list_both)
            names_by_step = [{int(step): name for step, name in names.items()} for names in listed]
        else:
            names_by_step = [dict(names) for names in self.host_steps.find_names(agreement, self._list_far)]
        for directory, names, since in zip(self.directories, names_by_step, before, strict=True):
            directory.replace(names, since)

    def _list_both(self) -> JSON:
        near = self.directories[0].list_visible()
        return [{str(step): name for step, name in names.items()} for names in (near, self._list_far())]

    def _list_far(self) -> Mapping[int, str]:
        """List the far directory. If that fails, the owner uses its last list: no other process writes there."""
        far = self.directories[1]
        try:
            return far.list_steps()
        except StorageError as error:
            if not self.is_owned:
                raise
            logger.warning("%s cannot be listed now, using the previous list: %s", far.display, error)
            return {step: far.name(step) for step in far.candidates()}

    def candidates(self) -> Sequence[int]:
        """See `RunSteps`."""
        return sorted(set(itertools.chain.from_iterable(tier.candidates() for tier in self.directories)))

    def steps(self) -> tuple[int, ...]:
        """See `RunSteps`."""
        steps: set[int] = set()
        errors: list[StorageError] = []
        for tier in self.directories:
            try:
                steps.update(tier.steps())
            except StorageError as error:
                if not concerns_one_entry(error):
                    raise
                errors.append(error)  # no step of this tier can be read
        if errors and not steps:
            raise errors[0]
        return tuple(sorted(steps))

    def newest_first(self) -> Iterator[int]:
        """See `RunSteps`."""
        merged = heapq.merge(*[tier.newest_first() for tier in self.directories], reverse=True)
        return (step for step, _ in itertools.groupby(merged))

    def latest(self) -> int | None:
        """See `RunSteps`."""
        for step in reversed(self.candidates()):
            errors: list[StorageError] = []
            for tier in self.directories:
                try:
                    if tier.is_committed(step):
                        return step
                except StorageError as error:
                    errors.append(error)
            if errors:
                raise errors[0]
        return None

    def recheck(self, step: int) -> bool:
        """See `RunSteps`."""
        return any(tier.recheck(step) for tier in self.directories)

    def copy_location(self, step: int, number: int) -> AnyLocation:
        """See `RunSteps`. Objects that a host lacks are read from the far directory."""
        near, far = self.directories
        if self.host_steps is not None and number == 0:
            return FallbackLocation(near.location(step), far.location(step))
        return self.directories[number].location(step)

    def copies(self, step: int) -> Sequence[int]:
        """See `RunSteps`. Omits a copy that is not valid (see the class); includes damaged copies.

        If the far directory cannot be read and the near copy exists, logs a warning and returns
        only the near copy.
        """
        numbers: list[int] = []
        orders: dict[str, tuple[SaveOrder, int]] = {}
        saves: dict[int, str] = {}
        for number, tier in enumerate(self.directories):
            try:
                if not tier.is_committed(step):
                    continue
                summary = tier.summary(step)
                if summary is not None:
                    saves[number] = summary.save_id
                    orders[summary.save_id] = (summary.order, number)
                numbers.append(number)
            except CheckpointNotFoundError:
                continue  # deleted meanwhile
            except (CorruptCheckpointError, UnsupportedVersionError):
                numbers.append(number)  # a load of this copy raises the error
            except StorageError as error:
                if not numbers:
                    raise
                logger.warning(
                    "%s cannot be checked for another copy of step %d, using the copy in %s: %s",
                    tier.display, step, self.directories[numbers[0]].display, error,
                )  # fmt: skip
        valid = max(orders, key=lambda save: orders[save], default=None)
        if len(numbers) == 1 and valid is not None:
            self._warn_of_abandoned(step, orders[valid][0], numbers[0])
        return [number for number in numbers if saves.get(number, valid) == valid]

    def _warn_of_abandoned(self, step: int, order: SaveOrder, number: int) -> None:
        """Warn of a step in one directory if the other directory has an earlier step that was saved after it."""
        tier, other = self.directories[number], self.directories[1 - number]
        newest = next(reversed(other.candidates()), step)
        if newest >= step:
            return
        with contextlib.suppress(CheckpointError):
            summary = other.summary(newest)
            if summary is not None and summary.order > order:
                tier.warn_once(
                    "step %d exists only in %s, and was saved before step %d in %s: the run was set back or continued "
                    "elsewhere. To go on from step %d, delete the later steps in %s",
                    step, tier.display, newest, other.display, newest, tier.display,
                )  # fmt: skip
