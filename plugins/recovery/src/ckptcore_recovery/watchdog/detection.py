"""Detector: finds steps and operations of one process that exceed their bounds. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ckptcore_recovery.watchdog.bounds import Bound, Durations, Kind

_SLOW: Final = 0.25
"""The part of a bound from which on something is slow."""

_WAITS: Final = ("exchange", "wait_for_previous")
"""Phases in which this rank waits for others, or for an earlier save."""


class RunningPhase(NamedTuple):
    """A phase that has begun. See `ckptcore.events.Event`.

    Attributes:
        operation_id, operation, phase, began: identify the phase. `began` is in seconds since the epoch.
        step: the training step; None if unknown.
        location: the location of the operation.
        thread: the thread that entered the phase, as of `threading.get_ident`.
    """

    operation_id: str
    operation: Kind
    phase: str
    began: float
    step: int | None
    location: str
    thread: int

    @property
    def key(self) -> tuple[str, str, float]:
        """Identifies the phase within the process."""
        return self.operation_id, self.phase, self.began

    @property
    def is_whole(self) -> bool:
        """True if the phase spans an operation."""
        return self.phase in (self.operation, "clean")


class RunningPause(NamedTuple):
    """A pause of the step, such as an evaluation.

    Attributes:
        number: identifies it within the process.
        name: what happens meanwhile.
        bound: its own bound in seconds; None: none.
        began: in seconds since the epoch.
        thread: the thread that paused, as of `threading.get_ident`.
    """

    number: int
    name: str
    bound: float | None
    began: float
    thread: int


class RunningStep(NamedTuple):
    """The training step that has begun last.

    Attributes:
        number: the step.
        began: in seconds since the epoch.
        thread: the thread that trains, as of `threading.get_ident`.
    """

    number: int
    began: float
    thread: int


@dataclass(frozen=True, slots=True)
class Stall:
    """A step, an operation or a pause that takes longer than its bound.

    Attributes:
        what: ``"step"``, the operation, or ``"pause"``.
        phase: the phase that runs: the innermost one of an operation, the name of a pause, or ``"step"``.
        step: the training step; None if unknown.
        location: the location of an operation; empty for a step or a pause.
        began: when it began, in seconds since the epoch.
        seconds: how long it has been running. Time in which the machine was suspended does not count. In a step, pauses
            and operations do not count.
        bound: the bound in seconds.
        thread: the thread that runs the phase, as of `threading.get_ident`.
    """

    what: str
    phase: str
    step: int | None
    location: str
    began: float
    seconds: float
    bound: float
    thread: int

    @property
    def is_wait(self) -> bool:
        """True if the phase is a wait for other ranks, or for an earlier save."""
        return self.phase in _WAITS


class Detector:
    """The running step, phases and pauses of one process.

    While an operation runs, the step does not age, because it may wait for the operation: each operation has a bound of
    its own. Times are seconds of a `WatchClock`, and never go back.
    """

    def __init__(self, bounds: Mapping[Kind, Bound]) -> None:
        """Begin without a step. Operations without a bound in `bounds` are not judged."""
        self._durations = {kind: Durations(bound) for kind, bound in bounds.items()}
        self._phases: dict[tuple[str, str, float], tuple[RunningPhase, float]] = {}
        self._pauses: dict[int, tuple[RunningPause, float]] = {}
        self._operations = 0
        self._step: RunningStep | None = None
        self._steps = 0
        self._age = 0.0
        """Seconds of the step without pauses and operations. The bound applies to it."""
        self._taken = 0.0
        """Seconds of the step without pauses. The bound is learnt from it."""
        self._now = 0.0
        self._stalls: dict[object, Stall] = {}

    def _advance(self, now: float) -> None:
        passed, self._now = max(0.0, now - self._now), max(now, self._now)
        if self._step is not None and not self._pauses:
            self._taken += passed
            if not self._operations:
                self._age += passed

    def step(self, step: RunningStep, now: float) -> None:
        """Begin a step, and end the step before it. The first step is not learnt from: it may compile."""
        self._advance(now)
        if self._steps > 1:
            self._durations["step"].add(self._taken)
        self._steps += 1
        self._step, self._age, self._taken = step, 0.0, 0.0

    def begin(self, phase: RunningPhase, now: float) -> None:
        """Begin a phase."""
        self._advance(now)
        if phase.key not in self._phases:
            self._phases[phase.key] = phase, now
            self._operations += phase.is_whole

    def end(self, key: tuple[str, str, float], now: float) -> None:
        """End a phase. Ignore one that did not begin."""
        self._advance(now)
        phase, began = self._phases.pop(key, (None, now))
        if phase is not None and phase.is_whole:
            self._operations -= 1
            if phase.operation in self._durations:
                self._durations[phase.operation].add(now - began)

    def pause(self, pause: RunningPause, now: float) -> None:
        """Begin a pause."""
        self._advance(now)
        self._pauses.setdefault(pause.number, (pause, now))

    def resume(self, number: int, now: float) -> None:
        """End a pause. Ignore one that did not begin."""
        self._advance(now)
        self._pauses.pop(number, None)

    def correct(
        self,
        step: RunningStep | None,
        phases: Sequence[RunningPhase],
        pauses: Sequence[RunningPause],
        now: float,
    ) -> None:
        """Replace what runs, after messages were lost. Running times of what was known already are kept."""
        self._advance(now)
        for key in self._phases.keys() - {phase.key for phase in phases}:
            phase, _ = self._phases.pop(key)
            self._operations -= phase.is_whole
        for phase in phases:
            self.begin(phase, now)
        for number in self._pauses.keys() - {pause.number for pause in pauses}:
            self.resume(number, now)
        for pause in pauses:
            self.pause(pause, now)
        if step != self._step and step is not None:
            self._step, self._age, self._taken = step, 0.0, 0.0
            self._steps = max(1, self._steps)

    def check(self, now: float) -> tuple[Sequence[Stall], Sequence[Stall]]:
        """Return the stalls that are new, and those that have ended since the last check."""
        self._advance(now)
        stalls = self._longer_than(1.0)
        new = [stall for key, stall in stalls.items() if key not in self._stalls]
        ended = [stall for key, stall in self._stalls.items() if key not in stalls]
        self._stalls = {key: self._stalls.get(key, stall) for key, stall in stalls.items()}
        return new, ended

    def is_slow(self) -> bool:
        """Return True if something had taken a quarter of its bound at the last check."""
        return bool(self._longer_than(_SLOW))

    def _longer_than(self, part: float) -> dict[object, Stall]:
        """Return what has taken more than a part of its bound."""
        now = self._now
        stalls: dict[object, Stall] = {}
        for phase, began in self._phases.values():
            limit = self._durations[phase.operation].limit if phase.operation in self._durations else None
            if phase.is_whole and limit is not None and now - began > part * limit:
                inner = [other for other, _ in self._phases.values() if other.operation_id == phase.operation_id][-1]
                stalls[phase.key] = Stall(
                    phase.operation, inner.phase, phase.step, phase.location, phase.began, now - began, limit,
                    inner.thread,
                )  # fmt: skip
        for pause, began in self._pauses.values():
            if pause.bound is not None and now - began > part * pause.bound:
                number = None if self._step is None else self._step.number
                stalls[pause.number] = Stall(
                    "pause", pause.name, number, "", pause.began, now - began, pause.bound, pause.thread
                )
        limit = self._durations["step"].limit
        if self._step is not None and limit is not None and self._age > part * limit:
            step = self._step
            stalls[step] = Stall("step", "step", step.number, "", step.began, self._age, limit, step.thread)
        return stalls
