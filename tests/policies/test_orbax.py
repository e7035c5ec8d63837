"""Policies with the names of Orbax's policies keep and save the same steps as these."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptcore.policies import (
    AnyPreservation,
    BestN,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    FixedInterval,
    InitialSave,
    LatestDuration,
    LatestN,
    PreemptionCheckpointing,
    PreservationPolicy,
    PreserveAll,
    SaveContext,
    SavePolicy,
    SpecificSteps,
    StepInfo,
)
from tests.policies.strategies import histories

training = pytest.importorskip("orbax.checkpoint.experimental.v1").training
preservation = training.preservation_policies
saving = training.save_decision_policies


@dataclass
class OrbaxInfo:
    """A step with the attributes that Orbax's policies read."""

    step: int
    time: datetime.datetime
    metrics: dict[str, float] | None


def kept_by_orbax(policy: Any, steps: Sequence[StepInfo]) -> set[int]:
    infos = [
        OrbaxInfo(info.step, datetime.datetime.fromtimestamp(info.created, datetime.UTC), dict(info.metrics) or None)
        for info in steps
    ]
    decisions = policy.should_preserve(infos, context=preservation.PreservationContext())
    return {info.step for info, decision in zip(infos, decisions, strict=True) if decision}


COUNTS = st.integers(0, 5)
INTERVALS = st.integers(1, 12)


def pair(
    ours: Any, theirs: Any, arguments: st.SearchStrategy[Any]
) -> st.SearchStrategy[tuple[PreservationPolicy, Any]]:
    return arguments.map(lambda argument: (ours(argument), theirs(argument)))


SINGLE = st.one_of(
    st.just((PreserveAll(), preservation.PreserveAll())),
    pair(LatestN, preservation.LatestN, COUNTS.filter(bool)),  # for 0, Orbax slices [-0:], which keeps all steps
    pair(EveryNSeconds, preservation.EveryNSeconds, INTERVALS),
    pair(EveryNSteps, preservation.EveryNSteps, INTERVALS),
    pair(CustomSteps, preservation.CustomSteps, st.lists(st.integers(0, 40), min_size=1)),
)

UNIONS = st.lists(SINGLE, min_size=1, max_size=4).map(
    lambda pairs: (
        AnyPreservation([ours for ours, _ in pairs]),
        preservation.AnyPreservationPolicy([theirs for _, theirs in pairs]),
    )
)


@given(st.one_of(SINGLE, UNIONS), histories())
def test_the_same_steps_are_kept_as_by_orbax(policies: tuple[PreservationPolicy, Any], steps: list[StepInfo]) -> None:
    assume(steps)  # without steps, Orbax's union is no list
    ours, theirs = policies
    assert ours.keep(steps, 0.0) == kept_by_orbax(theirs, steps)


@given(INTERVALS.filter(lambda number: number % 2 == 1), histories())
def test_the_same_closest_steps_are_kept_as_by_orbax(interval: int, steps: list[StepInfo]) -> None:
    """Intervals are odd, so that no step is equally close to two multiples. Orbax would choose the even multiple."""
    newest = {steps[-1].step} if steps else set()
    theirs = kept_by_orbax(preservation.EveryNStepsClosest(interval), steps)
    assert EveryNStepsClosest(interval).keep(steps, 0.0) | newest == theirs


@given(st.integers(1, 4), st.sampled_from(["min", "max"]), st.booleans(), histories())
def test_same_best_steps_are_kept_as_by_orbax(n: int, mode: Any, keep_unmeasured: bool, steps: list[StepInfo]) -> None:
    measured = [
        StepInfo(info.step, info.created, {"loss": info.metrics["loss"]})
        if not math.isnan(info.metrics.get("loss", math.nan))
        else StepInfo(info.step, info.created)
        for info in steps
    ]
    assume(len(measured) > n)  # otherwise Orbax keeps steps without a metric with all options
    theirs = preservation.BestN(
        get_metric_fn=lambda metrics: metrics["loss"],
        reverse=mode == "min",
        n=n,
        keep_checkpoints_without_metrics=keep_unmeasured,
    )
    ours = BestN(n, "loss", mode, keep_unmeasured=keep_unmeasured)
    assert ours.keep(measured, 0.0) == kept_by_orbax(theirs, measured)


@given(st.integers(1, 30), st.lists(st.integers(-30, 60), max_size=10))
def test_the_same_latest_steps_are_kept_as_by_orbax(hours: int, ages: list[int]) -> None:
    # Orbax reads the clock itself. An offset of half an hour keeps the ages away from the limit.
    now = datetime.datetime.now(datetime.UTC).timestamp()
    steps = [StepInfo(step, now - 3600.0 * age + 1800) for step, age in enumerate(ages)]
    theirs = kept_by_orbax(preservation.LatestDuration(datetime.timedelta(hours=hours)), steps)
    assert LatestDuration(3600 * hours).keep(steps, now) == theirs


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FixedInterval(3), saving.FixedIntervalPolicy(3)),
        (SpecificSteps([2, 5]), saving.SpecificStepsPolicy([2, 5])),
        (InitialSave(), saving.InitialSavePolicy()),
        (PreemptionCheckpointing(), saving.PreemptionCheckpointingPolicy()),
    ],
)
@given(st.integers(0, 20), st.none() | st.integers(0, 20), st.booleans(), st.booleans())
def test_the_same_steps_are_saved_as_by_orbax(
    ours: SavePolicy, theirs: Any, step: int, last: int | None, saving_now: bool, preempted: bool
) -> None:
    def info(number: int) -> OrbaxInfo:
        return OrbaxInfo(number, datetime.datetime.fromtimestamp(number, datetime.UTC), None)

    context = saving.DecisionContext(
        is_saving_in_progress=saving_now, reached_preemption=preempted, multiprocessing_options=None
    )
    moment = SaveContext(step=step, now=100.0, last_step=last, saving=saving_now, preempted=preempted)
    previous = [] if last is None else [info(last)]
    assert ours.should_save(moment) == theirs.should_save(info(step), previous, context=context)
