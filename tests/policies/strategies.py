"""Steps and preservation policies for property tests."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from ckptcore.policies import (
    AnyPreservation,
    BestN,
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

METRIC_VALUES = st.one_of(st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(-3, 3).map(float))

METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), METRIC_VALUES)

INTERVALS = st.one_of(st.integers(1, 12).map(float), st.floats(1e-7, 1e22))

SINGLE_POLICIES: st.SearchStrategy[PreservationPolicy] = st.one_of(
    st.just(PreserveAll()),
    st.builds(LatestN, st.integers(0, 5)),
    st.builds(LatestDuration, INTERVALS),
    st.builds(EveryNSeconds, INTERVALS),
    st.builds(EveryNSteps, st.integers(1, 12)),
    st.builds(EveryNStepsClosest, st.integers(1, 12)),
    st.builds(CustomSteps, st.sets(st.integers(0, 40), min_size=1)),
    st.builds(
        BestN,
        st.integers(0, 4),
        st.sampled_from(["loss", "accuracy", "eval/loss, mean: 5%", "min"]),
        st.sampled_from(["min", "max"]),
        keep_unmeasured=st.booleans(),
    ),
)

POLICIES = st.one_of(SINGLE_POLICIES, st.builds(AnyPreservation, st.lists(SINGLE_POLICIES, min_size=2, max_size=4)))


@st.composite
def histories(draw: st.DrawFn, *, least_delay: int = 0) -> list[StepInfo]:
    """Draw steps in ascending order, in which they were saved.

    Args:
        least_delay: the minimum number of seconds between two steps. If it is negative, the clock may go back.
    """
    steps, step, created = [], -1, 1000.0
    for _ in range(draw(st.integers(0, 15))):
        step += draw(st.integers(1, 6))
        created += draw(st.integers(least_delay, 6))
        steps.append(StepInfo(step, created, draw(METRICS)))
    return steps
