"""The detector finds every stall within its bound, and nothing else, on a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from ckptcore_recovery.watchdog.bounds import Kind
from ckptcore_recovery.watchdog.detection import RunningPause, RunningPhase, RunningStep, Stall

from plugins.recovery.tests.simulated_training import PHASES, Happening, Training, alarms

SEEDS = [*range(4), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 150)]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thousand_healthy_minutes_have_no_alarm(seed: int) -> None:
    training = Training(seed)
    assert len(training.happenings) > 1000 and len(training.suspended) == 8
    assert training.end > 60_000
    assert list(alarms(training, seed, training.end)) == []


class FoundStall(NamedTuple):
    """The first alarm after something stalled.

    Attributes:
        stall: what was found.
        delay: seconds until it was found.
        in_operations: seconds until the operations that ran when it stalled had ended.
    """

    stall: Stall
    delay: float
    in_operations: float


def _stall(seed: int, is_stalled: Callable[[Happening], bool]) -> FoundStall:
    """Stall what begins with one of the happenings."""
    training = Training(seed)
    candidates = [number for number, happening in enumerate(training.happenings) if is_stalled(happening)]
    stalled = training.stall_at(random.Random(seed).choice(candidates))
    alarm = next(alarms(training, seed, until=stalled.at + 30_000))
    return FoundStall(alarm.stall, alarm.at - stalled.at, max(0.0, training.happenings[-1].at - stalled.at))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("operation", "phase"), PHASES)
def test_a_stall_in_each_phase_is_found_within_the_bound(operation: Kind, phase: str, seed: int) -> None:
    def is_stalled(happening: Happening) -> bool:
        what = happening.what
        return isinstance(what, RunningPhase) and (what.operation, what.phase) == (operation, phase)

    found = _stall(seed, is_stalled)
    assert (found.stall.what, found.stall.phase) == (operation, phase)
    assert found.delay < found.stall.bound + 10 and found.stall.bound <= 20_000


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stalled_step_is_found_within_the_bound_after_the_operations(seed: int) -> None:
    found = _stall(seed, lambda happening: isinstance(happening.what, RunningStep))
    assert (found.stall.what, found.stall.phase) == ("step", "step")
    assert found.delay < found.stall.bound + found.in_operations + 10 and found.stall.bound <= 3600


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stalled_evaluation_is_found_within_its_own_bound(seed: int) -> None:
    found = _stall(seed, lambda happening: isinstance(happening.what, RunningPause))
    assert (found.stall.what, found.stall.phase, found.stall.bound) == ("pause", "evaluation", 4000.0)
    assert 3950 < found.delay < 4010  # of a suspension, up to five seconds count
