"""Preservation policies as text."""

from __future__ import annotations

import pytest
from ckptcore_tools.policy_text import format_preservation, parse_preservation
from hypothesis import given
from hypothesis import strategies as st

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
)
from tests.policies.strategies import POLICIES


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("preserve_all", PreserveAll()),
        ("latest_n=3", LatestN(3)),
        ("latest_n=0", LatestN(0)),
        ("latest_duration=90", LatestDuration(90)),
        ("latest_duration=1.5s", LatestDuration(1.5)),
        ("latest_duration=12h", LatestDuration(12 * 3600)),
        ("latest_duration=2d", LatestDuration(2 * 86400)),
        ("every_n_seconds=30m", EveryNSeconds(1800)),
        ("every_n_seconds=1e-07", EveryNSeconds(1e-7)),
        ("every_n_steps=1000", EveryNSteps(1000)),
        ("every_n_steps_closest=1000", EveryNStepsClosest(1000)),
        ("custom_steps=100", CustomSteps([100])),
        ("custom_steps=100:20", CustomSteps([20, 100])),
        ("best_n=2:loss:min", BestN(2, "loss", "min")),
        ("best_n=2:eval/loss:max:drop_unmeasured", BestN(2, "eval/loss", "max", keep_unmeasured=False)),
        ("best_n=2:a%2cb%3A%20%25%41:max", BestN(2, "a,b: %%41", "max")),
        ("latest_n=3, best_n=2:loss:min", AnyPreservation([LatestN(3), BestN(2, "loss", "min")])),
    ],
)
def test_text_is_parsed_to_the_policy(text: str, policy: PreservationPolicy) -> None:
    assert parse_preservation(text) == policy


@given(POLICIES)
def test_the_text_of_a_policy_parses_to_an_equal_policy(policy: PreservationPolicy) -> None:
    assert parse_preservation(format_preservation(policy)) == policy


@given(st.text(min_size=1))
def test_any_metric_can_be_named(metric: str) -> None:
    policy = BestN(1, metric, "min")
    text = format_preservation(policy)
    assert parse_preservation(text) == policy
    assert parse_preservation(f"latest_n=1, {text} ,preserve_all") == AnyPreservation(
        [LatestN(1), policy, PreserveAll()]
    )


def test_nested_policies_are_written_flat() -> None:
    nested = AnyPreservation([AnyPreservation([LatestN(1)]), AnyPreservation([LatestN(2), EveryNSteps(3)])])
    assert format_preservation(nested) == "latest_n=1,latest_n=2,every_n_steps=3"
    assert format_preservation(AnyPreservation([LatestN(1)])) == "latest_n=1"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a policy is missing"),
        ("latest_n=3,", "a policy is missing"),
        ("newest=3", "'newest' is not a preservation policy"),
        ("LatestN=3", "'LatestN' is not a preservation policy"),
        ("latest_n", "expected latest_n=3"),
        ("preserve_all=1", "expected preserve_all"),
        ("latest_n=", "expected a whole number, got ''"),
        ("latest_n=-1", "expected a whole number, got '-1'"),
        ("latest_n=1_0", "expected a whole number"),
        ("latest_n=٣", "expected a whole number"),
        ("latest_n=1:2", "expected a whole number, got '1:2'"),
        ("latest_n=" + "9" * 9999, "expected a whole number"),
        ("every_n_steps=0", "EveryNSteps(steps=0)"),
        ("every_n_seconds=0", "EveryNSeconds(seconds=0.0)"),
        ("every_n_seconds=1w", "the unit s, m, h or d, got '1w'"),
        ("every_n_seconds=nan", "expected seconds"),
        ("every_n_seconds=1e999", "give a finite number"),
        ("custom_steps=", "expected a whole number, got ''"),
        ("best_n=2", "expected n:metric:min or n:metric:max"),
        ("best_n=2:loss", "expected n:metric:min or n:metric:max"),
        ("best_n=2:loss:min:keep", "with or without :drop_unmeasured"),
        ("best_n=2:loss:lowest", "BestN(mode='lowest')"),
        ("best_n=2::min", "BestN(metric='')"),
    ],
)
def test_errors_have_the_position_and_the_known_names(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match="best_n=2:loss:min; commas separate policies") as raised:
        parse_preservation(text)
    assert problem in str(raised.value)
    assert len(str(raised.value)) < 1000


@given(st.text("latest_n=,:13bosm%"))
def test_any_other_text_is_a_value_error(text: str) -> None:
    try:
        policy = parse_preservation(text)
    except ValueError:
        return
    assert parse_preservation(format_preservation(policy)) == policy


def test_a_function_has_no_text() -> None:
    with pytest.raises(ValueError, match="has no text"):
        format_preservation(AnyPreservation([LatestN(1), CustomPreservation(lambda steps, now: [])]))
