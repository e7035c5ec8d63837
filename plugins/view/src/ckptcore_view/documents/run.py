"""The document about a run: its steps, what a policy would keep, and the job that saves there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from ckptcore_tools.policy_text import parse_preservation
from ckptcore_tools.retention import plan_deletions
from ckptcore_tools.run_steps import StepStatus, find_owner, find_pinned, read_steps

from ckptcore.io.requests import requests_of
from ckptcore.model import JSON
from ckptcore.redaction import redacted_location
from ckptcore.training.steps import StepDirectory
from ckptcore_view.documents.numbers import number_to_json
from ckptcore_view.documents.request import BadRequestError, Request
from ckptcore_view.viewed import Viewed

__all__ = ["run_document"]

_STEPS: Final = 200
"""Steps that are read if the request does not say how many: each costs a read of its root."""


_AT_ONCE: Final = 64
"""Steps that are read between two looks for the client."""


def run_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return the steps of a run, ascending.

    Parameters: ``last``, the number of steps to read, the newest ones; ``policy``, the text of a preservation policy.
    """
    steps = viewed.steps()
    candidates = steps.candidates()
    last = request.number("last") if "last" in request.parameters else _STEPS
    chosen = candidates[len(candidates) - last :] if last < len(candidates) else candidates
    pinned = find_pinned(steps) or frozenset()
    policy = request.text("policy").strip()
    decisions = _decisions(viewed, steps, policy)
    owner = find_owner(steps)
    return {
        "location": redacted_location(viewed.location),
        "owner": None if owner is None else owner.description,
        "older": len(candidates) - len(chosen),
        "leftovers": list(steps.leftovers),
        "policy": policy or None,
        "steps": [
            _step(status, status.name in pinned, decisions.get(status.step))
            for status in _read(viewed, steps, chosen, request)
        ],
    }


def _read(viewed: Viewed, steps: StepDirectory, chosen: Sequence[int], request: Request) -> Sequence[StepStatus]:
    """Read the steps. Committed steps in object stores are remembered for a while."""
    known = [viewed.recall(steps.name(step)) for step in chosen] if _is_remote(steps) else []
    found: dict[int, StepStatus] = {status.step: status for status in known if status is not None}
    missing = [step for step in chosen if step not in found]
    for first in request.each(range(0, len(missing), _AT_ONCE)):
        for status in read_steps(steps, missing[first : first + _AT_ONCE], viewed.context):
            found[status.step] = status
            if status.state == "committed":
                viewed.remember(status.name, status)
    return [found[step] for step in chosen]


def _is_remote(steps: StepDirectory) -> bool:
    return requests_of(steps.store).concurrency > 1


def _step(status: StepStatus, is_pinned: bool, decision: tuple[bool, Sequence[str]] | None) -> Mapping[str, JSON]:
    return {
        "step": status.step,
        "name": status.name,
        "state": status.state,
        "created": status.created,
        "nbytes": status.nbytes,
        "seconds": status.seconds,
        "blocked": status.blocked_seconds,
        "metrics": {name: number_to_json(value) for name, value in status.metrics.items()},
        "pinned": is_pinned,
        "error": status.error,
        "kept": None if decision is None else decision[0],
        "reasons": [] if decision is None else list(decision[1]),
    }


def _decisions(viewed: Viewed, steps: StepDirectory, text: str) -> Mapping[int, tuple[bool, Sequence[str]]]:
    """Return for each step whether a policy keeps it, and why."""
    if not text:
        return {}
    try:
        policy = parse_preservation(text)
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    candidates = steps.candidates()
    remembered = viewed.recall(("policy", text)) if _is_remote(steps) else None
    if remembered is None or remembered[0] != candidates:
        plan = plan_deletions(steps, policy, time.time(), viewed.context)
        found = {decision.status.step: (not decision.delete, decision.reasons) for decision in plan.decisions}
        viewed.remember(("policy", text), remembered := (candidates, found))
    decisions: Mapping[int, tuple[bool, Sequence[str]]] = remembered[1]
    return decisions
