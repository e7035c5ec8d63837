"""Garbage collection as a pure decision: which steps a preservation policy gives up, and why the others stay."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ckptcore.policies.preservation import AnyPreservation, BestN, PreservationPolicy, StepInfo

__all__ = ["explain", "what_to_delete"]

_NEWEST: Final = "the newest step, which is never deleted"


def what_to_delete(policy: PreservationPolicy, steps: Sequence[StepInfo], now: float) -> tuple[int, ...]:
    """The steps that garbage collection deletes, ascending.

    Never the newest, whatever the policy says: a job that resumes would lose work.

    Args:
        policy: which steps to keep.
        steps: every committed step, in any order.
        now: seconds since the epoch, UTC.
    """
    ascending = _ascending(steps)
    if len(ascending) < 2:
        return ()
    kept = policy.keep(ascending, now)
    return tuple([info.step for info in ascending[:-1] if info.step not in kept])


def explain(policy: PreservationPolicy, steps: Sequence[StepInfo], now: float) -> Mapping[int, tuple[str, ...]]:
    """For each step, ascending, what keeps it, in words; nothing for a step that `what_to_delete` names.

    Args:
        policy: which steps to keep. Each policy within an `AnyPreservation` speaks for itself, by its `str`.
        steps: every committed step, in any order.
        now: seconds since the epoch, UTC.
    """
    ascending = _ascending(steps)
    reasons: dict[int, list[str]] = {info.step: [] for info in ascending}
    for part in _parts(policy):
        kept = part.keep(ascending, now)
        for info in ascending:
            if info.step in kept:
                reasons[info.step].append(_reason(part, info))
    if ascending and not reasons[ascending[-1].step]:
        reasons[ascending[-1].step].append(_NEWEST)
    return {step: tuple(words) for step, words in reasons.items()}


def _ascending(steps: Sequence[StepInfo]) -> list[StepInfo]:
    return sorted(steps, key=operator.attrgetter("step"))


def _reason(policy: PreservationPolicy, info: StepInfo) -> str:
    if isinstance(policy, BestN) and policy.measure(info) is None:
        return f"has no metric {policy.metric!r}"
    return str(policy)


def _parts(policy: PreservationPolicy) -> Iterator[PreservationPolicy]:
    if isinstance(policy, AnyPreservation):
        for part in policy.policies:
            yield from _parts(part)
    else:
        yield policy
