"""TimeAccount: divides the time of one incarnation of a job between its activities. Pure: no clock and no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

Activity: TypeAlias = Literal["save", "load"]
"""An activity during which the training waits."""

SECOND: Final = 1_000_000
"""Microseconds. All times of a run log are whole microseconds, so that parts add up exactly."""

_PERIOD: Final = 10 * SECOND
_SHORTEST_PERIOD: Final = SECOND
"""A period ends with the first step after `_PERIOD`. After `_SHORTEST_PERIOD`, it also ends where a save begins: a job
that restarts continues there."""


class Period(NamedTuple):
    """A part of an incarnation. Its four times add up to ``ended - began``.

    Attributes:
        began, ended: microseconds since the start of the incarnation.
        first, last: the numbers of the first and the last step that ended in the period; 0 if there is none. Numbers
            increase within a period.
        steps: the number of steps that ended.
        in_steps: microseconds in these steps. The last step of a period ends with it, so that no step is divided.
        in_saves, in_loads: microseconds during which saves or loads blocked the training.
        other: microseconds between steps, or before the first step.
        saves: the number of saves of steps that blocked the training and succeeded.
    """

    began: int
    ended: int
    first: int
    last: int
    steps: int
    in_steps: int
    in_saves: int
    in_loads: int
    other: int
    saves: int


class TimeAccount:
    """The activities of one incarnation, reported in order of time. Times are microseconds since its start.

    A step ends where the next step, a save or a load begins, or where `end_step` is called. A save or load during which
    a step begins does not block the training. From then on, it takes no time.

    Attributes:
        step: the step that is running; None between steps.
        unfinished: microseconds in the running step.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.unfinished = 0
        self._now = 0
        self._open: dict[str, Activity] = {}
        self._last: int | None = None
        self._closed: list[Period] = []
        self._begin_period()

    def _begin_period(self) -> None:
        self._began = self._now
        self._first = self._steps = self._saves = 0
        self._in_steps = self._in_saves = self._in_loads = self._other = 0

    def begin_step(self, step: int, at: int) -> None:
        """Begin a step, and end the previous one."""
        self.advance(at)
        self._open.clear()
        self._complete()
        if self._last is None or step <= self._last or self._now - self._began >= _PERIOD:
            self._end_period()
        self.step = step

    def end_step(self, at: int) -> None:
        """End the running step, if there is one. Its successor begins later, for example after an evaluation."""
        self.advance(at)
        self._complete()

    def begin(self, key: str, activity: Activity, at: int) -> None:
        """Begin a save or a load. `key` identifies it."""
        self.advance(at)
        self._complete()
        if activity == "save" and self._now - self._began >= _SHORTEST_PERIOD:
            self._end_period()
        self._open[key] = activity

    def end(self, key: str, at: int, *, saved: bool = False) -> None:
        """End a save or a load. `saved`: it was a successful save of a step."""
        self.advance(at)
        if self._open.pop(key, None) == "save":
            self._saves += saved

    def advance(self, at: int) -> None:
        """Add the time up to `at` to the running activity. Earlier times than the latest are ignored."""
        elapsed = max(at - self._now, 0)
        self._now += elapsed
        if "save" in self._open.values():
            self._in_saves += elapsed
        elif self._open:
            self._in_loads += elapsed
        elif self.step is not None:
            self.unfinished += elapsed
        else:
            self._other += elapsed

    def _complete(self) -> None:
        if self.step is not None:
            self._in_steps += self.unfinished
            self._first = self._first if self._steps else self.step
            self._last = self.step
            self._steps += 1
            self.step, self.unfinished = None, 0

    def _end_period(self) -> None:
        if self._now > self._began:
            self._closed.append(self.open_period())
            self._begin_period()

    def open_period(self) -> Period:
        """Return the current period up to now, without the running step."""
        last = self._last if self._steps and self._last is not None else 0
        return Period(
            self._began, self._now - self.unfinished, self._first, last, self._steps,
            self._in_steps, self._in_saves, self._in_loads, self._other, self._saves,
        )  # fmt: skip

    def take_closed(self) -> Sequence[Period]:
        """Return the periods that have ended since the last call."""
        closed, self._closed = self._closed, []
        return closed
