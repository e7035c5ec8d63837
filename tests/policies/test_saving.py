"""Steps at which each save policy saves."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.policies import (
    AnySave,
    ContinuousCheckpointing,
    CustomSave,
    EpochInterval,
    EveryStep,
    FixedInterval,
    InitialSave,
    PreemptionCheckpointing,
    SaveContext,
    SavePolicy,
    SpecificSteps,
    TimeInterval,
)

AT = SaveContext(step=7, now=1000.0)
"""A moment of a run that has saved nothing."""

POLICIES: list[tuple[SavePolicy, bool]] = [
    (EveryStep(), False),
    (FixedInterval(3), False),
    (EpochInterval(2), False),
    (SpecificSteps([1, 2]), False),
    (InitialSave(), False),
    (TimeInterval(60), True),
    (ContinuousCheckpointing(), True),
    (PreemptionCheckpointing(), True),
    (CustomSave(bool), True),
    (CustomSave(bool, needs_agreement=False), False),
    (AnySave([FixedInterval(3), InitialSave()]), False),
    (AnySave([FixedInterval(3), TimeInterval(3)]), True),
]


@pytest.mark.parametrize(("policy", "needs_agreement"), POLICIES)
def test_policies_that_may_differ_between_processes_need_agreement(policy: SavePolicy, needs_agreement: bool) -> None:
    assert isinstance(policy, SavePolicy)
    assert policy.needs_agreement is needs_agreement
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize("policy", [policy for policy, agreed in POLICIES if not agreed], ids=str)
@given(
    step=st.integers(0, 10),
    epoch=st.integers(0, 5),
    last=st.none() | st.integers(0, 9),
    seen=st.lists(st.tuples(st.floats(0, 1e10), st.booleans(), st.booleans()), min_size=2, max_size=2),
)
def test_processes_decide_equally_without_agreement(
    policy: SavePolicy, step: int, epoch: int, last: int | None, seen: list[tuple[float, bool, bool]]
) -> None:
    """Conditions that differ between processes (time, a running save, preemption) have no effect."""
    shared = SaveContext(step=step, now=0.0, epoch=epoch, last_step=last, last_epoch=last)
    decisions = {
        policy.should_save(
            replace(shared, now=now, saving=saving, preempted=preempted, last_save_began=now - 1, last_save_ended=now)
        )
        for now, saving, preempted in seen
    }
    assert len(decisions) == 1


def test_every_step_saves_each_new_step() -> None:
    assert EveryStep().should_save(AT)


def test_fixed_interval_saves_at_multiples_only() -> None:
    assert [step for step in range(25) if FixedInterval(10).should_save(replace(AT, step=step))] == [0, 10, 20]
    jumping = [replace(AT, step=step) for step in range(5, 40, 7)]
    assert not any(FixedInterval(10).should_save(context) for context in jumping), (
        "a multiple that is jumped over is lost"
    )


def test_epoch_interval_saves_once_in_each_such_epoch() -> None:
    saved: list[tuple[int, int]] = []
    for step in range(20):
        epoch = step // 4
        last_step, last_epoch = saved[-1] if saved else (None, None)
        context = replace(AT, step=step, epoch=epoch, last_step=last_step, last_epoch=last_epoch)
        if EpochInterval(2).should_save(context):
            saved.append((step, epoch))
    assert saved == [(0, 0), (8, 2), (16, 4)]


def test_epoch_interval_needs_the_epoch() -> None:
    with pytest.raises(ValueError, match=r"EpochInterval\(epochs=2\): step 7 has no epoch; pass epoch="):
        EpochInterval(2).should_save(AT)
    with pytest.raises(ValueError, match="has no epoch"):
        AnySave([EveryStep(), EpochInterval(2)]).should_save(AT)


@pytest.mark.parametrize("policy", [TimeInterval(60), ContinuousCheckpointing(60)])
def test_time_intervals_save_after_their_seconds(policy: SavePolicy) -> None:
    assert policy.should_save(AT), "where nothing was saved, it saves at once"
    saved = replace(AT, last_step=1, last_save_began=941.0, last_save_ended=999.0)
    assert not policy.should_save(saved), "the time counts from when the save began"
    assert policy.should_save(replace(saved, now=1001.0))
    assert policy.should_save(replace(saved, now=940.0)), "a clock that was set back does not stop saves"


def test_continuous_checkpointing_never_waits_for_a_save() -> None:
    saved = replace(AT, last_step=1, last_save_began=AT.now)
    assert ContinuousCheckpointing().should_save(saved)
    assert not ContinuousCheckpointing().should_save(replace(saved, saving=True))
    assert TimeInterval(60).should_save(replace(saved, now=2000.0, saving=True))


def test_specific_steps_initial_and_preemption_policies() -> None:
    assert SpecificSteps([7, 9]).should_save(AT)
    assert not SpecificSteps([8]).should_save(AT)
    assert not SpecificSteps([]).should_save(AT)
    assert InitialSave().should_save(AT)
    assert not InitialSave().should_save(replace(AT, last_step=0)), "step 0 is a step"
    assert not PreemptionCheckpointing().should_save(AT)
    assert PreemptionCheckpointing().should_save(replace(AT, preempted=True))


def test_any_save_and_custom_save() -> None:
    policy = AnySave([FixedInterval(10), CustomSave(lambda context: context.step == 7)])
    assert policy.should_save(AT)
    assert policy.should_save(replace(AT, step=20))
    assert not policy.should_save(replace(AT, step=8))


def test_a_custom_class_can_be_a_save_policy() -> None:
    class Primes:
        needs_agreement = False

        def should_save(self, context: SaveContext) -> bool:
            return context.step in {2, 3, 5, 7}

    assert AnySave([Primes()]).should_save(AT)
    assert not AnySave([Primes()]).needs_agreement


def test_numpy_numbers_are_accepted() -> None:
    int_of_numpy: Any = np.int64(3)
    float_of_numpy: Any = np.float32(1.5)
    assert FixedInterval(int_of_numpy) == FixedInterval(3)
    assert TimeInterval(float_of_numpy) == TimeInterval(1.5)
    assert SpecificSteps(np.array([1, 2])) == SpecificSteps([2, 1])
    assert hash(SpecificSteps([1]))


@pytest.mark.parametrize("number", [0, -1, True, 1.0, float("nan"), "3", None])
def test_intervals_must_be_whole_numbers(number: int) -> None:
    with pytest.raises(ValueError, match=r"FixedInterval\(steps=.*\): give a whole number of at least 1"):
        FixedInterval(number)
    with pytest.raises(ValueError, match=r"EpochInterval\(epochs=.*\): give"):
        EpochInterval(number)


@pytest.mark.parametrize(
    "number", [-1.0, True, float("nan"), float("inf"), "3", None, pytest.param(10**400, id="huge")]
)
def test_seconds_must_be_finite(number: float) -> None:
    with pytest.raises(ValueError, match=r"TimeInterval\(seconds=.*\): give a finite number of seconds above 0"):
        TimeInterval(number)
    with pytest.raises(ValueError, match=r"ContinuousCheckpointing\(minimum_interval_secs=.*\): give .* of at least 0"):
        ContinuousCheckpointing(number)


def test_errors_name_other_invalid_arguments() -> None:
    with pytest.raises(ValueError, match=r"TimeInterval\(seconds=0\)"):
        TimeInterval(0)
    with pytest.raises(ValueError, match=r"SpecificSteps\(steps=-1\)"):
        SpecificSteps([3, -1])
    with pytest.raises(TypeError, match=r"SpecificSteps\(steps='12'\): give a collection"):
        SpecificSteps("12")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=r"AnySave\(policies=\[\]\): give at least one"):
        AnySave([])
    with pytest.raises(TypeError, match=r"AnySave\(policies=.*an instance, not its class"):
        AnySave([FixedInterval])  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(TypeError, match=r"AnySave\(policies=FixedInterval.*give a list"):
        AnySave(FixedInterval(3))  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match=r"CustomSave\(function=3\)"):
        CustomSave(3)  # type: ignore[arg-type]  # wrong on purpose
