"""Garbage collection: the steps that it deletes by a policy, and the explanation of the kept ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptcore.policies import (
    AnyPreservation,
    BestN,
    CustomPreservation,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
    PreservationPolicy,
    StepInfo,
    explain,
    what_to_delete,
)
from tests.policies.strategies import POLICIES, SINGLE_POLICIES, histories

NOTHING = CustomPreservation(lambda steps, now: [])


def collect_at_the_end(policy: PreservationPolicy, steps: list[StepInfo]) -> list[int]:
    """Return the steps that remain after one collection, at the time of the last step."""
    deleted = what_to_delete(policy, steps, steps[-1].created) if steps else ()
    return [info.step for info in steps if info.step not in deleted]


def collect_after_each_save(policy: PreservationPolicy, steps: list[StepInfo]) -> list[int]:
    """Return the steps that remain if a collection follows each step."""
    left: list[StepInfo] = []
    for info in steps:
        left.append(info)
        deleted = what_to_delete(policy, left, info.created)
        left = [kept for kept in left if kept.step not in deleted]
    return [info.step for info in left]


@given(POLICIES, histories())
def test_collecting_after_each_save_equals_one_collection_at_the_end(
    policy: PreservationPolicy, steps: list[StepInfo]
) -> None:
    assert collect_after_each_save(policy, steps) == collect_at_the_end(policy, steps)


@given(st.builds(EveryNSeconds, st.integers(1, 12)), histories(least_delay=-6))
def test_every_n_seconds_is_stable_even_if_clock_goes_back(policy: PreservationPolicy, steps: list[StepInfo]) -> None:
    assert collect_after_each_save(policy, steps) == collect_at_the_end(policy, steps)


@given(POLICIES, histories(least_delay=-6), st.floats(0, 2e3))
def test_collecting_twice_deletes_nothing_more(policy: PreservationPolicy, steps: list[StepInfo], now: float) -> None:
    deleted = what_to_delete(policy, steps, now)
    left = [info for info in steps if info.step not in deleted]
    assert what_to_delete(policy, left, now) == ()


def test_an_unstable_policy_is_detected() -> None:
    """Show that the comparison above can fail: a policy of every other step deletes more with each collection."""
    every_other = CustomPreservation(lambda steps, now: [info.step for info in steps[::2]])
    steps = [StepInfo(step, step) for step in range(9)]
    assert collect_after_each_save(every_other, steps) != collect_at_the_end(every_other, steps)


@given(st.one_of(POLICIES, st.just(NOTHING)), histories(least_delay=-6), st.floats(0, 2e3), st.randoms())
def test_the_newest_step_is_never_deleted(
    policy: PreservationPolicy, steps: list[StepInfo], now: float, chooser: object
) -> None:
    newest = max((info.step for info in steps), default=None)
    expected = what_to_delete(policy, steps, now)
    assert newest not in expected
    assert list(expected) == sorted(expected)
    chooser.shuffle(steps)  # type: ignore[attr-defined]  # the value is a random.Random
    assert what_to_delete(policy, steps, now) == expected, "the order in which steps are given does not matter"


@given(st.one_of(POLICIES, st.just(NOTHING)), histories(), st.floats(0, 2e3))
def test_exactly_kept_steps_have_an_explanation(policy: PreservationPolicy, steps: list[StepInfo], now: float) -> None:
    explained = explain(policy, steps, now)
    assert list(explained) == [info.step for info in steps]
    assert tuple(step for step, reasons in explained.items() if not reasons) == what_to_delete(policy, steps, now)


@given(st.lists(SINGLE_POLICIES, min_size=1, max_size=4), histories(), st.floats(0, 2e3))
def test_any_preservation_keeps_union(policies: list[PreservationPolicy], steps: list[StepInfo], now: float) -> None:
    union = frozenset().union(*[policy.keep(steps, now) for policy in policies])
    assert AnyPreservation(policies).keep(steps, now) == union


def test_explanations_have_the_expected_text() -> None:
    steps = [StepInfo(step, 1000.0 + step, {"loss": 1 / (step + 1)} if step < 40 else {}) for step in range(5, 50, 5)]
    policy = AnyPreservation(
        [AnyPreservation([EveryNSteps(20), BestN(1, "loss", "min")]), EveryNSeconds(25), CustomSteps([10])]
    )
    assert explain(policy, steps, 2000.0) == {
        5: ("one every 25 s",),
        10: ("among 1 chosen step",),
        15: (),
        20: ("a multiple of 20 steps",),
        25: (),
        30: ("one every 25 s",),
        35: ("the best 1 by loss (min)",),
        40: ("a multiple of 20 steps", "has no metric 'loss'"),
        45: ("has no metric 'loss'",),
    }


def test_the_newest_step_is_explained() -> None:
    steps = [StepInfo(step, step) for step in range(3)]
    assert explain(LatestN(0), steps, 3.0) == {0: (), 1: (), 2: ("the newest step, which is never deleted",)}
    assert explain(LatestN(1), steps, 3.0)[2] == ("the latest 1",)
    assert explain(LatestN(1), [], 3.0) == {}


def test_a_custom_class_can_be_a_preservation_policy() -> None:
    class Even:
        def keep(self, steps: object, now: float) -> frozenset[int]:
            return frozenset(range(0, 100, 2))

        def __str__(self) -> str:
            return "even"

    steps = [StepInfo(step, step) for step in range(4)]
    assert what_to_delete(Even(), steps, 0.0) == (1,), "a step that is kept and not there does no harm"
    assert explain(AnyPreservation([Even(), NOTHING]), steps, 0.0)[2] == ("even",)
