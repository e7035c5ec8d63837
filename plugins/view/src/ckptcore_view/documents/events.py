"""Events of a run: restarts, other frameworks, unfinished saves, repeated steps, the best step; trainer logs."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ckptcore_tools.run_steps import RunOwner, StepStatus

from ckptcore.commit.leases import Holder, read_lease
from ckptcore.commit.locks import OWNER_LEASE, read_owner
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import CheckpointError, StorageError
from ckptcore.model import JSON, ArrayRecord
from ckptcore.opening.members import present_members
from ckptcore.policies import AnyPreservation, BestN, PreservationPolicy
from ckptcore.training.steps import StepDirectory
from ckptcore_view.documents.request import number_to_json
from ckptcore_view.open_tree import OpenTree
from ckptcore_view.shardings import framework_of
from ckptcore_view.viewed import Viewed

_FILE: Final = "trainer_state.json"
_MAX_BYTES: Final = 1 << 26
_MAX_POINTS: Final = 20_000
"""Limit of the points of one metric. If there are more, points at regular intervals are kept."""

_MAX_METRICS: Final = 64
_NEWEST: Final = 3
"""Number of newest steps that are searched for a log. The newest one may be damaged or incomplete."""

_COUNTS: Final = frozenset({"step", "epoch", "total_flos", "train_runtime"})
"""Numbers of a row that are not metrics."""


@dataclass(frozen=True, slots=True)
class TrainerLog:
    """The logged metrics of a run.

    Attributes:
        values: the value at each step, by the name of the metric.
        metric: the metric by which the Trainer chooses the best step; empty if it is not known.
        best_step: the step that the Trainer chose; None without one.
        best_value: the metric of the best step.
    """

    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    metric: str = ""
    best_step: int | None = None
    best_value: float | None = None

    def metrics_at(self, step: int) -> Mapping[str, float]:
        """Return the metrics that were logged at a step."""
        return {name: points[step] for name, points in self.values.items() if step in points}

    @property
    def series(self) -> JSON:
        """The steps and values of each metric, thinned. Omits summaries of the training, which have a single point."""
        return {name: _thinned(points) for name, points in self.values.items() if len(points) > 1}


def _thinned(points: Mapping[int, float]) -> JSON:
    stride = -(-len(points) // _MAX_POINTS)
    return [[step, value] for step, value in itertools.islice(points.items(), 0, None, stride)]


def read_trainer_log(steps: StepDirectory) -> TrainerLog:
    """Return the log in the newest steps; an empty one if there is none, or if it cannot be read."""
    for step in steps.candidates()[: -_NEWEST - 1 : -1]:
        try:
            data = subdirectory(steps.store, steps.name(step)).get(_FILE, 0, _MAX_BYTES)
            document = json.loads(data)
        except (CheckpointError, OSError, ValueError, RecursionError):
            continue
        if isinstance(document, dict) and isinstance(document.get("log_history"), list):
            return _log_of(document)
    return TrainerLog()


def _log_of(document: Mapping[str, Any]) -> TrainerLog:
    series: dict[str, dict[int, float]] = {}
    for row in document["log_history"]:
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or not 0 <= step < 1 << 53:
            continue
        for name, value in row.items():
            if name in _COUNTS or name.endswith(("_per_second", "_runtime")) or type(value) not in (int, float):
                continue
            if math.isfinite(value) and (name in series or len(series) < _MAX_METRICS):
                series.setdefault(name, {})[step] = float(value)
    best_step, best_value = document.get("best_global_step"), document.get("best_metric")
    if type(best_step) is not int or type(best_value) is not float or not math.isfinite(best_value):
        return TrainerLog(series)
    metric = next((name for name, points in series.items() if points.get(best_step) == best_value), "")
    return TrainerLog(series, metric, best_step, best_value)


_MAX_RESTARTS: Final = 64
"""Limit of the restarts that are shown, from the newest on. For each, a tree is opened to find the framework."""

_MAX_LEAVES: Final = 64
"""Number of leaves that are searched for a framework."""

_UNFINISHED: Final = re.compile(r"\.(.+)\.[0-9a-f]{16}\.ckptcore")
_LOW_IS_GOOD: Final = re.compile(r"loss|perplexity|\bppl\b|error|\bmse\b|\bmae\b|\bwer\b|\bcer\b", re.IGNORECASE)
_HIGH_IS_GOOD: Final = re.compile(r"acc|f1|bleu|rouge|reward|score|auc|map\b", re.IGNORECASE)


def best_of(steps: Sequence[StepStatus], policy: PreservationPolicy | None, log: TrainerLog) -> JSON:
    """Return the best step and its metric: by the policy, by the Trainer, or by the name of a metric; None if unknown.

    Low values of a loss and high values of an accuracy are better. If two steps are equal, the later one is the best,
    as in `BestN`.
    """
    parts = policy.policies if isinstance(policy, AnyPreservation) else (policy,)
    chosen = next((part for part in parts if isinstance(part, BestN)), None)
    if chosen is None and log.metric and log.best_step is not None:
        mode = "max" if _HIGH_IS_GOOD.search(log.metric) and not _LOW_IS_GOOD.search(log.metric) else "min"
        return _best(log.metric, mode, log.best_step, log.best_value, "the Trainer")
    metrics = {
        status.step: {**log.metrics_at(status.step), **status.metrics}
        for status in steps
        if status.state in ("committed", "foreign")
    }
    if chosen is not None:
        return _best_step(metrics, chosen.metric, chosen.mode, "the policy")
    known = list(dict.fromkeys(name for by_name in metrics.values() for name in by_name))
    for name in sorted(known, key=lambda name: not name.startswith(("eval", "val"))):
        if _LOW_IS_GOOD.search(name):
            return _best_step(metrics, name, "min", "")
    for name in known:
        if _HIGH_IS_GOOD.search(name):
            return _best_step(metrics, name, "max", "")
    return None


def _best_step(metrics: Mapping[int, Mapping[str, float]], metric: str, mode: Literal["min", "max"], by: str) -> JSON:
    sign = 1 if mode == "max" else -1
    measured = [
        (sign * value, step)
        for step, values in metrics.items()
        if not math.isnan(value := values.get(metric, math.nan))
    ]
    if not measured:
        return None
    value, step = max(measured)
    return _best(metric, mode, step, sign * value, by)


def _best(metric: str, mode: str, step: int, value: float | None, by: str) -> JSON:
    return {"metric": metric, "mode": mode, "step": step, "value": number_to_json(value), "by": by}


def events_of(
    viewed: Viewed, place: str, steps: StepDirectory, statuses: Sequence[StepStatus], owner: RunOwner | None
) -> JSON:
    """Return the events of a run, ascending.

    Each owner of a run has a higher number than earlier owners, and stores this number in its steps. So a step whose
    owner has a higher number than the owner of the previous step shows a restart. The record of the last owner states
    if the earlier owners ended or were killed. The framework is that of the arrays in the first step of each owner.
    """
    saved = [status for status in statuses if status.save_id is not None]
    last = _last_owner(steps)
    ended = {} if last is None else {owner.number: owner.released for owner in last.earlier}
    events: list[dict[str, JSON]] = []
    restarts = [(old, new) for old, new in itertools.pairwise(saved) if new.order.owner > old.order.owner]
    framework = _framework(viewed, place, saved[0]) if saved and restarts else None
    for old, new in restarts[-_MAX_RESTARTS:]:
        before, framework = framework, _framework(viewed, place, new)
        events.append(
            {
                "kind": "restart",
                "step": new.step,
                "after": old.step,
                "from": before,
                "to": framework,
                "killed": None if (released := ended.get(old.order.owner)) is None else not released,
            }
        )
    if saved and last is not None and not last.released and owner is None:
        events.append({"kind": "death", "step": saved[-1].step, "since": last.since})
    again = [status.step for status in saved if status.order.save > 0]
    unfinished = [step for name in steps.leftovers if (step := _unfinished_step(steps, name)) is not None]
    for kind, numbers in (("again", again), ("unfinished", unfinished)):
        events += [{"kind": kind, "step": step} for step in numbers[-_MAX_RESTARTS:]]
    return [*sorted(events, key=lambda event: (event["step"], event["kind"]))]


def _last_owner(steps: StepDirectory) -> Holder | None:
    """Return the record of the last owner of a run; None if there is none, or if it cannot be read."""
    with suppress(StorageError):
        if (locked := read_owner(steps.store)) is not None:
            return locked
        lease = read_lease(steps.store, OWNER_LEASE)
        return None if lease is None else lease.holder
    return None


def _unfinished_step(steps: StepDirectory, leftover: str) -> int | None:
    """Return the step that a leftover of a save belongs to; None for other leftovers."""
    match = _UNFINISHED.fullmatch(leftover)
    return None if match is None else steps.names.parse(match[1])


def _framework(viewed: Viewed, place: str, status: StepStatus) -> str | None:
    """Return the framework of the arrays of a step; None if it is unknown. The result is cached by save."""
    key = ("framework", status.save_id)
    framework: str | None = viewed.recall(key)
    if framework is None:
        step = f"{place}/{status.name}" if place else status.name
        try:
            composite = viewed.members(step)
            members = {} if composite is None else present_members(composite)
            places = [f"{step}/{names[0]}" for names in members.values() if names] if members else [step]
            framework = next(filter(None, (viewed.read(part_place, _framework_of) for part_place in places)), "")
        except CheckpointError:
            framework = ""
        viewed.remember(key, framework)
    return framework or None


def _framework_of(open_tree: OpenTree) -> str:
    records = itertools.islice(open_tree.tree.leaves, _MAX_LEAVES)
    return next(filter(None, (framework_of(record) for record in records if isinstance(record, ArrayRecord))), "")
