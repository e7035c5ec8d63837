"""Steps that each preservation policy keeps."""

from __future__ import annotations

import datetime
import math
import pickle
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given

from ckptcore.policies import (
    AnyPreservation,
    BestN,
    CustomPreservation,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    LatestN,
    PreservationPolicy,
    PreserveAll,
    StepInfo,
)
from tests.policies.strategies import POLICIES, histories

NOW = 10_000.0


def kept(policy: PreservationPolicy, created: Mapping[int, float]) -> list[int]:
    """Return the steps that a policy keeps, in ascending order. `created` maps steps to times."""
    return sorted(policy.keep([StepInfo(step, created[step]) for step in sorted(created)], NOW))


EVERY_MINUTE = {step: NOW - 600 + 6.0 * step for step in range(0, 101, 10)}
"""Steps 0, 10, ..., 100, one each minute, the last one now."""


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (PreserveAll(), list(range(0, 101, 10))),
        (LatestN(0), []),
        (LatestN(2), [90, 100]),
        (LatestN(99), list(range(0, 101, 10))),
        (LatestDuration(0), [100]),
        (LatestDuration(120), [80, 90, 100]),
        (LatestDuration(119.9), [90, 100]),
        (EveryNSeconds(120), [0, 20, 40, 60, 80, 100]),
        (EveryNSeconds(121), [0, 30, 60, 90]),
        (EveryNSteps(30), [0, 30, 60, 90]),
        (EveryNSteps(7), [0, 70]),
        (EveryNStepsClosest(30), [0, 30, 60, 90]),
        (EveryNStepsClosest(25), [0, 30, 50, 80, 100]),
        (CustomSteps([20, 21, 70]), [20, 70]),
        (AnyPreservation([LatestN(1), CustomSteps([20])]), [20, 100]),
        (CustomPreservation(lambda steps, now: [info.step for info in steps if now - info.created > 500]), [0, 10]),
    ],
    ids=str,
)
def test_each_policy_keeps_the_expected_steps(policy: PreservationPolicy, expected: list[int]) -> None:
    assert isinstance(policy, PreservationPolicy)
    assert kept(policy, EVERY_MINUTE) == expected


def test_latest_duration_keeps_no_gap() -> None:
    """A step with an earlier time is kept if an older step is kept, as in Orbax."""
    assert kept(LatestDuration(60), {1: NOW - 100, 2: NOW - 50, 3: NOW - 90}) == [2, 3]


def test_every_n_seconds_restarts_where_the_clock_was_set_back() -> None:
    assert kept(EveryNSeconds(60), {1: 9000.0, 2: 1000.0, 3: 1030.0, 4: 1060.0}) == [1, 2, 4]


def test_every_n_steps_closest_keeps_the_closest_step_to_each_multiple() -> None:
    saved = dict.fromkeys([90, 190, 290, 310, 395, 405, 450], NOW)
    assert kept(EveryNSteps(100), saved) == []
    assert kept(EveryNStepsClosest(100), saved) == [90, 190, 310, 405, 450]


def best(policy: BestN, values: Sequence[float | None]) -> list[int]:
    """Return the kept steps. Step number `n` has the loss `values[n]`, or no loss for None."""
    steps = [StepInfo(step, NOW, {} if loss is None else {"loss": loss}) for step, loss in enumerate(values)]
    return sorted(policy.keep(steps, NOW))


def test_best_n_keeps_the_best_steps() -> None:
    assert best(BestN(2, "loss", "min"), [3.0, 1.0, 2.0, 4.0]) == [1, 2]
    assert best(BestN(2, "loss", "max"), [3.0, 1.0, 2.0, 4.0]) == [0, 3]
    assert best(BestN(0, "loss", "min"), [3.0, 1.0]) == []
    assert best(BestN(9, "loss", "min"), [3.0, 1.0]) == [0, 1]


def test_best_n_prefers_the_later_of_equal_steps() -> None:
    assert best(BestN(2, "loss", "min"), [1.0, 1.0, 5.0, 1.0]) == [1, 3]
    assert best(BestN(2, "loss", "max"), [1.0, 1.0, 0.0, 1.0]) == [1, 3]


def test_best_n_keeps_steps_without_the_metric_by_default() -> None:
    values = [1.0, None, math.nan, 2.0, math.inf]
    assert best(BestN(1, "loss", "min"), values) == [0, 1, 2]
    assert best(BestN(1, "loss", "min", keep_unmeasured=False), values) == [0]
    assert best(BestN(1, "loss", "max", keep_unmeasured=False), values) == [4], "infinity is a value"
    assert best(BestN(1, "los", "min"), values) == [0, 1, 2, 3, 4], "a mistyped name gives up nothing"


@given(POLICIES, histories(least_delay=-6))
def test_policies_keep_only_given_steps_and_are_hashable_values(
    policy: PreservationPolicy, steps: list[StepInfo]
) -> None:
    assert policy.keep(steps, NOW) <= {info.step for info in steps}
    assert policy.keep(steps, NOW) == policy.keep(tuple(steps), NOW)
    assert policy.keep([], NOW) == frozenset()
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert len({policy, policy}) == 1
    assert str(policy)


@pytest.mark.parametrize("number", [-1, True, 1.0, math.nan, "3", None])
def test_counts_must_be_whole_numbers(number: int) -> None:
    with pytest.raises(ValueError, match=r"^LatestN\(n=.*\): give a whole number of at least 0"):
        LatestN(number)
    with pytest.raises(ValueError, match=r"^BestN\(n="):
        BestN(number, "loss", "min")
    with pytest.raises(ValueError, match=r"^EveryNSteps\(steps=.*\): give a whole number of at least 1"):
        EveryNSteps(number)
    with pytest.raises(ValueError, match=r"^EveryNStepsClosest\(steps="):
        EveryNStepsClosest(number)
    with pytest.raises(ValueError, match=r"^CustomSteps\(steps="):
        CustomSteps([1, number])


@pytest.mark.parametrize("number", [-1.0, True, math.nan, math.inf, "3", None, datetime.timedelta(hours=1)])
def test_seconds_must_be_finite(number: float) -> None:
    with pytest.raises(
        ValueError, match=r"^LatestDuration\(seconds=.*\): give a finite number of seconds of at least 0"
    ):
        LatestDuration(number)
    with pytest.raises(ValueError, match=r"^EveryNSeconds\(seconds=.*\): give a finite number of seconds above 0"):
        EveryNSeconds(number)


def test_errors_name_other_invalid_arguments() -> None:
    for zero in (EveryNSteps, EveryNStepsClosest, EveryNSeconds):
        with pytest.raises(ValueError, match=rf"^{zero.__name__}\(.*=0\)"):
            zero(0)
    with pytest.raises(ValueError, match="for a timedelta, pass its total_seconds"):
        LatestDuration(datetime.timedelta(hours=24))  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=r"CustomSteps\(steps=\[\]\): give at least one"):
        CustomSteps([])
    with pytest.raises(TypeError, match=r"CustomSteps\(steps=3\)"):
        CustomSteps(3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=r"BestN\(metric=''\)"):
        BestN(1, "", "min")
    with pytest.raises(ValueError, match=r"BestN\(mode='lowest'\): give 'min'"):
        BestN(1, "loss", "lowest")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=r"AnyPreservation\(policies=\(\)\): give at least one"):
        AnyPreservation(())
    with pytest.raises(TypeError, match=r"AnyPreservation\(policies=.*LatestN.*an instance, not its class"):
        AnyPreservation([LatestN])  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(TypeError, match=r"CustomPreservation\(function=3\)"):
        CustomPreservation(3)  # type: ignore[arg-type]  # wrong on purpose
