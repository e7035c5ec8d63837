"""The detector finds every stall within its bound, and nothing else, on a simulated clock."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from ckptcore_recovery.watchdog.bounds import (
    DEFAULT_BOUNDS,
    Bound,
    Durations,
    Kind,
    Learnt,
    bounds_from_json,
    bounds_to_json,
    with_defaults,
)
from ckptcore_recovery.watchdog.detection import Detector, RunningPause, RunningPhase, RunningStep, Stall
from ckptcore_recovery.watchdog.monitor import WatchClock

from plugins.recovery.tests.simulated_training import PHASES, Happening, Training, alarms

SEEDS = [0, 1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 150)]]


@pytest.mark.parametrize("seed", [*SEEDS[:2], 2, 3, 4, *SEEDS[5:]])
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


# --- single rules -----------------------------------------------------------------------------------------------------


def _step(number: int, thread: int = 1) -> RunningStep:
    return RunningStep(number, 1e9, thread)


def _phase(name: str, operation: Kind = "save", operation_id: str = "a", thread: int = 2) -> RunningPhase:
    return RunningPhase(operation_id, operation, name, 1e9, 7, "run/7", thread)


def test_a_pause_and_operations_do_not_count_as_time_of_the_step() -> None:
    detector = Detector({"step": 10.0, "save": 100.0})
    detector.step(_step(1), 0.0)
    detector.pause(RunningPause(1, "evaluation", None, 1e9, 1), 5.0)
    assert detector.check(1000.0) == ([], [])
    detector.resume(1, 1000.0)
    detector.begin(_phase("save"), 1002.0)
    detector.begin(_phase("write"), 1002.0)
    assert detector.check(1090.0) == ([], [])
    detector.end(_phase("write").key, 1090.0)
    detector.end(_phase("save").key, 1090.0)
    assert detector.check(1092.9) == ([], [])
    (stall,), _ = detector.check(1093.5)
    assert (stall.what, stall.step, stall.bound) == ("step", 1, 10.0)
    assert stall.seconds == pytest.approx(10.5)


def test_the_innermost_phase_and_its_thread_are_reported_once_until_the_operation_ends() -> None:
    detector = Detector({"step": 10.0, "save": 10.0})
    detector.begin(_phase("save", thread=1), 0.0)
    detector.begin(_phase("write"), 1.0)
    detector.begin(_phase("load", "load", "b"), 1.5)
    (stall,), ended = detector.check(11.0)
    assert (stall.what, stall.phase, stall.step, stall.thread, stall.location) == ("save", "write", 7, 2, "run/7")
    assert not stall.is_wait and ended == []
    assert detector.check(500.0) == ([], [])
    detector.end(_phase("write").key, 501.0)
    detector.begin(_phase("exchange"), 501.0)
    assert detector.check(502.0) == ([], [])
    detector.end(_phase("save", thread=1).key, 503.0)
    assert detector.check(503.0) == ([], [stall])


def test_what_was_lost_is_corrected() -> None:
    detector = Detector({"step": 10.0, "save": 10.0})
    detector.step(_step(1), 0.0)
    detector.begin(_phase("save"), 1.0)
    detector.pause(RunningPause(1, "evaluation", 5.0, 1e9, 1), 1.0)
    other, pause = _phase("save", operation_id="other"), RunningPause(2, "test", 20.0, 1e9, 1)
    detector.correct(_step(3), [other], [pause], 4.0)
    detector.correct(_step(3), [other], [pause], 9.0)  # changes nothing
    assert detector.check(13.9) == ([], [])
    (save,), _ = detector.check(14.5)
    assert (save.what, save.seconds) == ("save", 10.5)
    detector.correct(_step(3), [], [], 20.0)
    assert detector.check(29.0) == ([], [save])
    (step,), _ = detector.check(30.5)
    assert (step.what, step.step) == ("step", 3)


def test_a_bound_is_learnt_and_one_stall_teaches_little() -> None:
    durations = Durations(Learnt(5.0, factor=4.0, samples=10, before=100.0))
    for _ in range(9):
        durations.add(2.0)
        assert durations.limit == 100.0
    durations.add(2.0)
    assert durations.limit == 8.0
    durations.add(5000.0)
    assert durations.limit == 8.0
    for _ in range(100):
        durations.add(0.1)
    assert durations.limit == 5.0  # the floor
    assert Durations(3.0).limit == 3.0 and Durations(Learnt(1.0, before=None)).limit is None


def test_a_bound_is_never_shorter_than_its_floor() -> None:
    assert Durations(Learnt(7200.0)).limit == 7200.0
    assert Durations(Learnt(7200.0, before=None)).limit is None


def test_something_is_slow_from_a_quarter_of_its_bound_on() -> None:
    detector = Detector({"step": 100.0, "save": 40.0})
    slow = []
    detector.step(_step(1), 0.0)
    for now in (24.0, 26.0):
        detector.check(now)
        slow.append(detector.is_slow())
    detector.step(_step(2), 26.0)
    detector.begin(_phase("save"), 26.0)
    detector.pause(RunningPause(1, "evaluation", None, 1e9, 1), 26.0)
    for now in (35.0, 37.0):
        detector.check(now)
        slow.append(detector.is_slow())
    assert slow == [False, True, False, True]


def test_a_bound_follows_operations_that_become_slower() -> None:
    durations = Durations(Learnt(5.0, factor=4.0, samples=10))
    for _ in range(200):
        durations.add(10.0)
    assert durations.limit == 40.0
    for _ in range(200):
        durations.add(100.0)
    assert durations.limit is not None and durations.limit > 100.0


def test_bounds_travel_to_the_monitor() -> None:
    given: dict[Kind, Bound] = {"step": 3.0, "load": Learnt(60.0, before=None)}
    bounds = with_defaults(given)
    assert bounds_from_json(json.loads(json.dumps(bounds_to_json(bounds)))) == bounds == {**DEFAULT_BOUNDS, **given}


def test_the_clock_stands_still_while_the_monitor_does_not_run() -> None:
    times = iter([100.0, 101.0, 10_000.0, 10_001.0, 9_000.0, 9_001.0])
    clock = WatchClock(lambda: next(times), most=5.0)
    assert [clock.now() for _ in range(5)] == [1.0, 6.0, 7.0, 7.0, 8.0]
