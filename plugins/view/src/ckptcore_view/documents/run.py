"""Documents about runs: the steps, the events and the logged metrics of one run; and the runs of a folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from ckptcore_tools.policy_text import parse_preservation
from ckptcore_tools.retention import plan_deletions
from ckptcore_tools.run_steps import StepStatus, find_owner, find_pinned, read_steps

from ckptcore.errors import CheckpointError
from ckptcore.io.threads import requests_of
from ckptcore.model import JSON
from ckptcore.policies import AnyPreservation, PreservationPolicy
from ckptcore.redaction import redacted, redacted_location
from ckptcore.training.steps import StepDirectory
from ckptcore_view.documents.events import TrainerLog, best_of, events_of, read_trainer_log
from ckptcore_view.documents.panels import panels_of
from ckptcore_view.documents.request import BadRequestError, Request, number_to_json
from ckptcore_view.viewed import Viewed

_STEPS: Final = 200
"""Default number of steps to read. For each step, its root is read."""

_STEPS_OF_MANY: Final = 50
"""Number of steps to read for each run of a folder."""

_AT_ONCE: Final = 64
"""Number of steps to read before checking again whether the client has disconnected."""


def run_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return the steps of a run, ascending, and the panels of other distributions.

    Parameters: ``at``, the place of the run; ``last``, the number of steps to read, the newest ones; ``policy``, the
    text of a preservation policy.
    """
    return {**_run(viewed, request), "panels": panels_of(viewed, request.text("at"))}


def _run(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    place = request.text("at")
    steps = viewed.steps(place)
    candidates = steps.candidates()
    last = request.number("last") if "last" in request.parameters else _STEPS
    chosen = candidates[len(candidates) - last :] if last < len(candidates) else candidates
    pinned = find_pinned(steps) or frozenset()
    text = request.text("policy").strip()
    policy = _parsed(text)
    decisions = {} if policy is None else _decisions(viewed, steps, text, policy)
    owner = find_owner(steps)
    statuses = _read(viewed, steps, chosen, request)
    log = _log(viewed, steps)
    return {
        "location": redacted_location(viewed.locate(place)),
        "owner": None if owner is None else owner.description,
        "is_running": owner is not None and owner.alive is not False,
        "older": len(candidates) - len(chosen),
        "leftovers": list(steps.leftovers),
        "policy": text or None,
        "policy_parts": [] if policy is None else [str(part) for part in _parts(policy)],
        "best": best_of(statuses, policy, log),
        "events": events_of(viewed, place, steps, statuses, owner),
        "log": log.series,
        "steps": [
            _step(status, status.name in pinned, decisions.get(status.step), log.metrics_at(status.step))
            for status in statuses
        ],
    }


def runs_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return the runs and the checkpoints of a folder. Parameter: ``policy``, as for a run."""
    runs: list[JSON] = []
    policy = {"policy": request.text("policy")} if request.text("policy") else {}
    for name, kind in request.each(viewed.find_children().items()):
        if kind == "checkpoint":
            runs.append({"name": name, "kind": kind})
            continue
        try:
            inner = Request({"at": name, "last": str(_STEPS_OF_MANY), **policy}, request.is_cancelled)
            runs.append({"name": name, "kind": kind, **_run(viewed, inner)})
        except CheckpointError as error:
            runs.append({"name": name, "kind": kind, "error": redacted(str(error))})
    return {"location": redacted_location(viewed.location), "runs": runs}


def _read(viewed: Viewed, steps: StepDirectory, chosen: Sequence[int], request: Request) -> Sequence[StepStatus]:
    """Read the steps. Committed steps in object stores are cached for a minute."""
    known = [viewed.recall((steps.display, steps.name(step))) for step in chosen] if _is_remote(steps) else []
    statuses: dict[int, StepStatus] = {status.step: status for status in known if status is not None}
    missing = [step for step in chosen if step not in statuses]
    for first in request.each(range(0, len(missing), _AT_ONCE)):
        for status in read_steps(steps, missing[first : first + _AT_ONCE], viewed.context):
            statuses[status.step] = status
            if status.state == "committed":
                viewed.remember((steps.display, status.name), status)
    return [statuses[step] for step in chosen]


def _is_remote(steps: StepDirectory) -> bool:
    return requests_of(steps.store).concurrency > 1


def _log(viewed: Viewed, steps: StepDirectory) -> TrainerLog:
    """Return the log of the newest step that has one. It is read again if there is a new step."""
    key, newest = ("log", steps.display), tuple(steps.candidates()[-1:])
    remembered: tuple[tuple[int, ...], TrainerLog] | None = viewed.recall(key)
    if remembered is None or remembered[0] != newest:
        viewed.remember(key, remembered := (newest, read_trainer_log(steps)))
    return remembered[1]


def _step(
    status: StepStatus,
    is_pinned: bool,
    decision: tuple[bool, Sequence[str]] | None,
    logged: Mapping[str, float],
) -> Mapping[str, JSON]:
    return {
        "step": status.step,
        "name": status.name,
        "state": status.state,
        "created": status.created,
        "nbytes": status.nbytes,
        "seconds": status.seconds,
        "blocked": status.blocked_seconds,
        "metrics": {name: number_to_json(value) for name, value in {**logged, **status.metrics}.items()},
        "pinned": is_pinned,
        "error": status.error,
        "kept": None if decision is None else decision[0],
        "reasons": [] if decision is None else list(decision[1]),
    }


def _parsed(text: str) -> PreservationPolicy | None:
    try:
        return parse_preservation(text) if text else None
    except ValueError as error:
        raise BadRequestError(str(error)) from error


def _parts(policy: PreservationPolicy) -> Sequence[PreservationPolicy]:
    return tuple(policy.policies) if isinstance(policy, AnyPreservation) else (policy,)


def _decisions(
    viewed: Viewed, steps: StepDirectory, text: str, policy: PreservationPolicy
) -> Mapping[int, tuple[bool, Sequence[str]]]:
    """Return for each step True if a policy keeps it, and the reasons."""
    candidates, key = steps.candidates(), ("policy", steps.display, text)
    remembered = viewed.recall(key) if _is_remote(steps) else None
    if remembered is None or remembered[0] != candidates:
        plan = plan_deletions(steps, policy, time.time(), viewed.context)
        by_step = {decision.status.step: (not decision.delete, decision.reasons) for decision in plan.decisions}
        viewed.remember(key, remembered := (candidates, by_step))
    decisions: Mapping[int, tuple[bool, Sequence[str]]] = remembered[1]
    return decisions
