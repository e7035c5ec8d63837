"""Trainer logs: the metrics that the Trainer of Hugging Face logged, from ``trainer_state.json`` in its steps."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import CheckpointError
from ckptcore.model import JSON
from ckptcore.training.steps import StepDirectory

_FILE: Final = "trainer_state.json"
_MAX_BYTES: Final = 1 << 26
_MAX_POINTS: Final = 20_000
"""Limit of the points of one metric. Of more, every second one is left out, until they are few enough."""

_MAX_METRICS: Final = 64
_NEWEST: Final = 3
"""Steps that are asked for a log. The newest one may be damaged, or still be copied."""

_COUNTS: Final = frozenset({"step", "epoch", "total_flos", "train_runtime"})
"""Numbers of a row that are not metrics."""


@dataclass(frozen=True, slots=True)
class TrainerLog:
    """The logged metrics of a run.

    Attributes:
        values: the value at each step, by the name of the metric.
        metric: the metric by which the Trainer chooses the best step; empty if it is not known.
        best_step: the step that the Trainer chose; None without one.
        best_value: its metric.
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
        """The steps and values of each metric, thinned. A summary of the whole training is one point: left out."""
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
