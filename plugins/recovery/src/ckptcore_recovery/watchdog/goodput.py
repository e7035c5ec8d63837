"""Goodput: the parts of the time of a run, over all its restarts. They add up exactly to the time from first to last.

::

    group       part         the time
    ----------  -----------  ------------------------------------------------------------------------------
    productive  productive   in steps that were kept
    repeated    repeated     in steps that a later incarnation, or the same one, executed again
    saving      saving       in saves, while they blocked the training
    waiting     starting     from the start of an incarnation to its first step, except loads
                loading      in loads that blocked the training
                between      between steps, such as evaluations, and after the last step
                stopped      between incarnations, if the first one ended as intended
    failures    unfinished   in the step that a failure interrupted
                down         from the last sign of life of an incarnation that failed to the start of the next
    unrecorded  unrecorded   in an incarnation, where its log was lost

A step was kept if no later step has its number or a smaller one. So a restart that loads step 100 makes the time in
steps 101 and later repeated, as soon as it executes step 101.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptcore_recovery.watchdog.run_log import Incarnation, Note
from ckptcore_recovery.watchdog.time_account import SECOND, Period

Part: TypeAlias = Literal[
    "productive", "repeated", "saving", "starting", "loading", "between", "stopped", "unfinished", "down", "unrecorded"
]
State: TypeAlias = Literal["finished", "failed", "running"]

GROUPS: Final[Mapping[str, Sequence[Part]]] = {
    "productive": ["productive"],
    "repeated": ["repeated"],
    "saving": ["saving"],
    "waiting": ["starting", "loading", "between", "stopped"],
    "failures": ["unfinished", "down"],
    "unrecorded": ["unrecorded"],
}
"""The parts of each group."""

PARTS: Final[Sequence[Part]] = [part for parts in GROUPS.values() for part in parts]


@dataclass(frozen=True, slots=True)
class IncarnationTime:
    """The time of an incarnation, and the time after it.

    Attributes:
        number: its number, from 1.
        processes: the number of processes of the job.
        began: its start in microseconds since the epoch.
        state: "running" if it is the last one and its end is not recorded. A host that is lost with all processes of
            the job records no end.
        steps: the number of steps, including repeated ones.
        last_step: the step with which it ended; None if no step ended.
        saves: the number of saves that blocked the training and succeeded.
        parts: microseconds by part. "stopped" and "down" are the time to the next incarnation.
        notes: loads, failed operations and stalls.
    """

    number: int
    processes: int
    began: int
    state: State
    steps: int
    last_step: int | None
    saves: int
    parts: Mapping[Part, int]
    notes: Sequence[Note]


@dataclass(frozen=True, slots=True)
class Goodput:
    """The time of a run.

    Attributes:
        incarnations: in the order of their numbers.
        overlaps: the numbers of the incarnations that began before the previous one ended: the clocks of their hosts
            differ, or both ran. The time between the two counts as 0.
    """

    incarnations: Sequence[IncarnationTime]
    overlaps: Sequence[int]

    @property
    def parts(self) -> Mapping[Part, int]:
        """Microseconds by part."""
        return {part: sum(one.parts[part] for one in self.incarnations) for part in PARTS}

    @property
    def groups(self) -> Mapping[str, int]:
        """Microseconds by group."""
        parts = self.parts
        return {group: sum(parts[part] for part in members) for group, members in GROUPS.items()}

    @property
    def total(self) -> int:
        """Microseconds from the start of the first incarnation to the last sign of life, without overlaps."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """The productive part of the total time, from 0 to 1; 0 if the run has taken no time."""
        return self.parts["productive"] / self.total if self.total else 0.0

    @property
    def failures(self) -> int:
        """The number of incarnations that failed."""
        return sum(one.state == "failed" for one in self.incarnations)

    @property
    def saves(self) -> int:
        """The number of saves that blocked the training and succeeded."""
        return sum(one.saves for one in self.incarnations)

    @property
    def steps(self) -> int:
        """The number of steps, including repeated ones."""
        return sum(one.steps for one in self.incarnations)


def goodput_of(incarnations: Sequence[Incarnation]) -> Goodput:
    """Return the time of a run from its log.

    The last incarnation counts up to the start of its running step, unless its end is recorded.
    """
    times: list[IncarnationTime] = []
    overlaps: list[int] = []
    limit = math.inf
    following: Incarnation | None = None
    for incarnation in reversed(incarnations):
        parts = dict.fromkeys(PARTS, 0)
        for period in reversed(incarnation.periods):
            kept = _time_below(limit, period)
            parts["productive"] += kept
            parts["repeated"] += period.in_steps - kept
            parts["saving"] += period.in_saves
            parts["loading"] += period.in_loads
            if period.steps:
                limit = min(limit, period.first)
        parts["starting"], parts["between"] = _time_outside_steps(incarnation.periods)
        recorded = sum(period.ended - period.began for period in incarnation.periods)
        parts["unrecorded"] = incarnation.duration - recorded - incarnation.unfinished
        state: State = incarnation.outcome or ("running" if following is None else "failed")
        if state != "running":
            parts["unfinished"] = incarnation.unfinished
        if following is not None:
            gap = following.began - incarnation.ended
            parts["stopped" if state == "finished" else "down"] = max(0, gap)
            if gap < 0:
                overlaps.append(following.number)
        stepped = [period for period in incarnation.periods if period.steps]
        times.append(
            IncarnationTime(
                number=incarnation.number,
                processes=incarnation.processes,
                began=incarnation.began,
                state=state,
                steps=sum(period.steps for period in stepped),
                last_step=stepped[-1].last if stepped else None,
                saves=sum(period.saves for period in incarnation.periods),
                parts=parts,
                notes=incarnation.notes,
            )
        )
        following = incarnation
    return Goodput(times[::-1], overlaps[::-1])


def _time_below(limit: float, period: Period) -> int:
    """Return the time in steps of a period with numbers below a limit. Steps of one period count as equally long."""
    if not period.steps or period.first >= limit:
        return 0
    if period.last < limit:
        return period.in_steps
    return period.in_steps * (int(limit) - period.first) // (period.last - period.first + 1)


def _time_outside_steps(periods: Iterable[Period]) -> tuple[int, int]:
    """Return the time outside of steps, saves and loads: before the first step, and from then on."""
    before = after = 0
    has_begun = False
    for period in periods:
        has_begun |= period.steps > 0
        if has_begun:
            after += period.other
        else:
            before += period.other
    return before, after


def seconds(microseconds: int) -> float:
    """Return seconds."""
    return microseconds / SECOND
