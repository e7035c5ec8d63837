"""Goodput: hand-made logs, simulated jobs with known truth, and the save interval that loses least."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ckptcore_recovery.watchdog.goodput import GROUPS, PARTS, Goodput, goodput_of
from ckptcore_recovery.watchdog.run_log import Incarnation, Outcome
from ckptcore_recovery.watchdog.save_interval import best_interval, failure_limits, lost_share, save_interval_of
from ckptcore_recovery.watchdog.time_account import SECOND, Period, TimeAccount


def period(
    began: int, first: int, steps: int, *, in_steps: int = 0, saves: int = 0, in_saves: int = 0, **others: int
) -> Period:
    """Return a period of steps that follow each other. Without `in_steps`, a step takes 10."""
    in_steps = in_steps or 10 * steps
    spent = {"in_loads": 0, "other": 0, **others}
    ended = began + in_steps + in_saves + sum(spent.values())
    last = first + steps - 1 if steps else 0
    return Period(began, ended, first, last, steps, in_steps, in_saves, saves=saves, **spent)


def incarnation(
    number: int, began: int, *periods: Period, outcome: Outcome | None = None, unfinished: int = 0, lost: int = 0
) -> Incarnation:
    duration = (periods[-1].ended if periods else 0) + unfinished + lost
    return Incarnation(number, 4, began, began + duration, duration, periods, unfinished, outcome, ())


def parts_of(goodput: Goodput) -> dict[str, int]:
    """Return the parts that are not 0."""
    assert sum(goodput.groups.values()) == goodput.total
    assert [part for parts in GROUPS.values() for part in parts] == list(PARTS)
    return {part: time for part, time in goodput.parts.items() if time}


# --- hand-made logs


def test_a_run_without_failures() -> None:
    run = incarnation(
        1,
        1000,
        period(0, 0, 0, other=5, in_loads=7),
        period(12, 1, 5, saves=1, in_saves=3, other=2),
        outcome="finished",
    )
    goodput = goodput_of([run])
    assert parts_of(goodput) == {"productive": 50, "saving": 3, "starting": 5, "loading": 7, "between": 2}
    assert goodput.total == 67 and goodput.share == 50 / 67
    assert (goodput.failures, goodput.saves, goodput.steps) == (0, 1, 5)


def test_a_run_that_failed_and_repeated_steps() -> None:
    first = incarnation(
        1, 0, period(0, 0, 0, other=5), period(5, 1, 5), period(55, 6, 3), unfinished=4, outcome="failed"
    )
    second = incarnation(2, 150, period(0, 0, 0, other=6), period(6, 6, 4), outcome="finished")
    goodput = goodput_of([first, second])
    assert parts_of(goodput) == {
        "productive": 50 + 40, "repeated": 30, "starting": 11, "unfinished": 4, "down": 150 - 89,
    }  # fmt: skip
    assert goodput.total == 150 + 46 and goodput.failures == 1
    assert [one.last_step for one in goodput.incarnations] == [8, 9]


def test_a_period_is_divided_where_the_run_was_set_back() -> None:
    first = incarnation(1, 0, period(0, 1, 10), outcome="failed")
    assert parts_of(goodput_of([first, incarnation(2, 100, period(0, 4, 1))])) == {"productive": 40, "repeated": 70}


def test_steps_that_are_repeated_twice_count_twice() -> None:
    runs = [incarnation(number, 100 * number, period(0, 1, 10), outcome="failed") for number in (1, 2, 3)]
    goodput = goodput_of(runs)
    assert parts_of(goodput) == {"productive": 100, "repeated": 200}
    assert goodput.failures == 3


def test_a_run_that_is_set_back_far_loses_all_later_steps() -> None:
    first = incarnation(1, 0, period(0, 1, 10), outcome="failed")
    second = incarnation(2, 100, period(0, 8, 10), outcome="failed")
    third = incarnation(3, 200, period(0, 3, 1))
    assert parts_of(goodput_of([first, second, third])) == {"productive": 20 + 10, "repeated": 80 + 100}


def test_steps_within_one_incarnation_can_be_repeated() -> None:
    run = incarnation(1, 0, period(0, 1, 10), period(100, 5, 2))
    assert parts_of(goodput_of([run])) == {"productive": 40 + 20, "repeated": 60}


def test_an_end_that_is_not_recorded_is_a_failure_once_the_run_goes_on() -> None:
    first = incarnation(1, 0, period(0, 1, 2), unfinished=5)
    assert parts_of(goodput_of([first])) == {"productive": 20}
    assert goodput_of([first]).incarnations[0].state == "running"
    goodput = goodput_of([first, incarnation(2, 40, period(0, 3, 1))])
    assert parts_of(goodput) == {"productive": 30, "unfinished": 5, "down": 15}
    assert goodput.incarnations[0].state == "failed"


def test_time_between_incarnations_is_a_stop_after_an_intended_end() -> None:
    first = incarnation(1, 0, period(0, 1, 2), outcome="finished")
    assert parts_of(goodput_of([first, incarnation(2, 50, period(0, 3, 1))])) == {"productive": 30, "stopped": 30}


def test_clocks_that_differ_take_no_time() -> None:
    first = incarnation(1, 1000, period(0, 1, 2), outcome="failed")
    goodput = goodput_of([first, incarnation(2, 900, period(0, 3, 1), outcome="finished")])
    assert parts_of(goodput) == {"productive": 30} and goodput.overlaps == [2]


def test_a_lost_part_of_the_log_is_unrecorded() -> None:
    run = incarnation(1, 0, period(0, 1, 2), period(50, 6, 1), lost=9, outcome="failed")
    assert parts_of(goodput_of([run])) == {"productive": 30, "unrecorded": 30 + 9}


def test_a_job_that_ends_in_its_first_step() -> None:
    run = incarnation(1, 0, period(0, 0, 0, other=5), unfinished=8, outcome="failed")
    assert parts_of(goodput_of([run])) == {"starting": 5, "unfinished": 8}
    assert save_interval_of(goodput_of([run])) is None


def test_a_run_without_a_log_has_no_time() -> None:
    goodput = goodput_of([])
    assert goodput.total == 0 and goodput.share == 0 and save_interval_of(goodput) is None


# --- simulated jobs


class SimulatedJob:
    """A job on a simulated clock, with random durations and failures. `truth` has each microsecond by part."""

    def __init__(self, seed: int, *, save_every: int, failure_seconds: float, step_seconds: float = 2.0) -> None:
        self.random = random.Random(seed)
        self.save_every = save_every
        self.failure_seconds = failure_seconds
        self.step_seconds = step_seconds
        self.truth = dict.fromkeys(PARTS, 0)
        self.step_times: dict[int, int] = {}
        self.now = 1_000_000 * SECOND
        self.saved = 0
        self.saves = 0
        self.failures = 0

    def run(self, last: int) -> Sequence[Incarnation]:
        """Train until the last step is done."""
        incarnations: list[Incarnation] = []
        while not incarnations or incarnations[-1].outcome == "failed":
            incarnations.append(self._incarnation(len(incarnations) + 1, last))
        self.truth["productive"] = sum(self.step_times.values())
        return incarnations

    def _takes(self, seconds: float) -> int:
        return round(self.random.uniform(0.5, 1.5) * seconds * SECOND)

    def _incarnation(self, number: int, last: int) -> Incarnation:
        account = TimeAccount()
        fails_at = round(self.random.expovariate(1 / self.failure_seconds) * SECOND)
        now = 0

        def spend(part: str, time: int) -> bool:
            """Spend time until the failure. Return False if it comes first."""
            nonlocal now
            lived = min(time, fails_at - now)
            now += lived
            if lived == time or part != "productive":
                self.truth[part] += lived  # type: ignore[index]
            else:
                self.truth["unfinished"] += lived
            account.advance(now)
            return lived == time

        def train() -> bool:
            """Return False if the incarnation fails."""
            if not spend("starting", self._takes(20)):
                return False
            if number > 1:
                account.begin("load", "load", now)
                is_loaded = spend("loading", self._takes(30))
                account.end("load", now)
                if not is_loaded:
                    return False
            for step in range(self.saved + 1, last + 1):
                account.begin_step(step, now)
                took = self._takes(self.step_seconds)
                if not spend("productive", took):
                    return False
                self.truth["repeated"] += self.step_times.pop(step, 0)
                self.step_times[step] = took
                if step % self.save_every == 0:
                    account.begin("save", "save", now)
                    is_saved = spend("saving", self._takes(3))
                    account.end("save", now, saved=is_saved)
                    if not is_saved:
                        return False
                    self.saved = step
                    self.saves += 1
                if step % 50 == 0:
                    account.end_step(now)
                    if not spend("between", self._takes(10)):
                        return False
            return True

        is_done = train()
        if is_done:
            account.end_step(now)
        else:
            self.failures += 1
        periods = [*account.take_closed(), account.open_period()]
        began, self.now = self.now, self.now + now
        if not is_done:
            down = self._takes(60)
            self.truth["down"] += down
            self.now += down
        return Incarnation(
            number, 8, began, began + now, now, periods, account.unfinished, "finished" if is_done else "failed", ()
        )


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_of_a_simulated_job_are_exact(seed: int) -> None:
    job = SimulatedJob(seed, save_every=random.Random(seed).choice([1, 7, 40]), failure_seconds=300.0)
    goodput = goodput_of(job.run(1000))
    assert goodput.parts == job.truth
    assert goodput.total == sum(job.truth.values()) == job.now - 1_000_000 * SECOND
    assert (goodput.failures, goodput.saves) == (job.failures, job.saves) and job.failures > 3


def test_steps_of_milliseconds_are_divided_within_a_second() -> None:
    job = SimulatedJob(1, save_every=3, failure_seconds=600.0, step_seconds=0.01)
    job._takes = lambda seconds: round(seconds * SECOND)  # type: ignore[method-assign]
    incarnations = job.run(5000)
    goodput = goodput_of(incarnations)
    assert job.failures > 5
    assert sum(len(one.periods) for one in incarnations) < sum(one.duration for one in incarnations) / SECOND + 100
    for part in PARTS:
        assert goodput.parts[part] == pytest.approx(job.truth[part], abs=SECOND * job.failures)


# --- the save interval


@pytest.mark.parametrize(("minutes", "best"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_interval_is_that_of_the_paper(minutes: float, best: float) -> None:
    """Compare with the figures 3 to 5 of Daly's paper, for saves of 5 minutes."""
    assert best_interval(5, minutes) == pytest.approx(best, rel=0.006)


@pytest.mark.parametrize("cost", [1.0, 30.0, 600.0])
def test_the_interval_loses_least_by_the_complete_model(cost: float) -> None:
    between = 3600.0
    best = best_interval(cost, between)
    least = min(lost_share(best * factor / 100, cost, between) for factor in range(10, 400))
    assert lost_share(best, cost, between) == pytest.approx(least, rel=0.002)


def test_saves_that_take_longer_than_the_time_between_failures() -> None:
    assert best_interval(30.0, 10.0) == 10.0
    assert lost_share(10.0, 30.0, 10.0) < 1 and lost_share(1.0, 1e6, 1.0) == 1.0


def simulated_loss(interval: float, cost: float, between: float) -> float:
    """Return the lost part of the time of a simulated job that restarts at once."""
    chance = random.Random(0)
    elapsed = trained = 0.0
    for _ in range(20_000):
        uptime = chance.expovariate(1 / between)
        elapsed += uptime
        trained += uptime // (interval + cost) * interval
    return 1 - trained / elapsed


def test_the_interval_loses_least_in_a_simulated_job() -> None:
    cost, between = 20.0, 2000.0
    best = best_interval(cost, between)
    losses = {factor: simulated_loss(factor * best, cost, between) for factor in (0.5, 0.75, 1.0, 1.5, 2.0)}
    assert min(losses, key=lambda factor: losses[factor]) == 1.0
    for factor, loss in losses.items():
        assert lost_share(factor * best, cost, between) == pytest.approx(loss, rel=0.03)


@pytest.mark.parametrize(
    ("failures", "fewest", "most"), [(0, 0.0, 2.996), (1, 0.0253, 5.572), (10, 4.795, 18.39), (100, 81.36, 121.63)]
)
def test_the_limits_of_the_failure_rate(failures: int, fewest: float, most: float) -> None:
    """Compare with tables of the Poisson distribution."""
    assert failure_limits(failures) == pytest.approx((fewest, most), rel=1e-3)


def run_with(failures: int, *, hours: int = 10, saves: int = 60, **changes: Any) -> Goodput:
    """Return a run that saves every 10 minutes, and fails some times."""
    one = Period(0, hours * 3600 * SECOND, 1, 3600, 3600, hours * 3600 * SECOND - 60 * SECOND, 60 * SECOND, 0, 0, saves)
    runs = [incarnation(number + 1, number * 10**13, one, outcome="failed") for number in range(failures)]
    runs.append(incarnation(failures + 1, failures * 10**13, one._replace(**changes), outcome="finished"))
    return goodput_of([replace(run, periods=[one._replace(first=1 + 3600 * at, last=3600 * (at + 1))])
                       for at, run in enumerate(runs)])  # fmt: skip


def test_the_interval_of_a_run() -> None:
    found = save_interval_of(run_with(4))
    assert found is not None and found.best is not None and found.longest is not None
    assert found.failure_seconds == 5 * 36_000 / 4 and found.cost == 1.0
    assert found.now == pytest.approx((36_000 - 60) / 60) and found.step == pytest.approx((36_000 - 60) / 3600)
    assert found.best == best_interval(1.0, 45_000)
    assert found.shortest < found.best < found.longest
    assert found.lost_best is not None and found.lost_now is not None and found.lost_best < found.lost_now


def test_more_failures_narrow_the_limits() -> None:
    few, many = save_interval_of(run_with(1)), save_interval_of(run_with(50))
    assert few is not None and many is not None and few.longest and few.best and many.longest and many.best
    assert few.longest / few.shortest > 5 and many.longest / many.shortest < 1.5


def test_without_a_failure_only_the_shortest_interval_is_known() -> None:
    found = save_interval_of(run_with(0))
    assert found is not None
    assert (found.best, found.longest, found.failure_seconds, found.lost_now) == (None, None, None, None)
    assert found.shortest == pytest.approx(best_interval(1.0, 36_000 / 2.9957), rel=1e-3)


def test_without_a_save_there_is_no_interval() -> None:
    assert save_interval_of(goodput_of([incarnation(1, 0, period(0, 1, 5), outcome="failed")])) is None
