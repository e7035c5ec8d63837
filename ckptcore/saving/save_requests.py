"""What a user asks of a save, and the check of what is said along with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ckptcore.commit.location import Place
from ckptcore.commit.occupants import Overwrite
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout, SaveStrategy
from ckptcore.saving.plain import PlainSave
from ckptcore.saving.prepared import CommitInfo, Save, SaveDraft
from ckptcore.step_names import whole_number

__all__ = ["Destination", "OneTree", "SaveHooks", "SaveNotes", "SaveRequest", "check_custom"]

_MOST_PROGRESS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class OneTree:
    """Says that a checkpoint is one tree.

    Attributes:
        state: the tree.
    """

    state: object


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a save goes.

    Attributes:
        place: a path or URL.
        overwrite: whether a checkpoint there is replaced.
        name: what every rank of a job calls it, if its path differs between them; None: the place.
    """

    place: Place
    overwrite: Overwrite = False
    name: str | None = None

    @property
    def agreed(self) -> object:
        """What names the exchanges of the save."""
        return self.place if self.name is None else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveNotes:
    """What a user says about a checkpoint.

    Attributes:
        custom: metadata; JSON.
        metrics: measurements.
        step, epoch: progress of the training, as integers of any type; None if unknown.
    """

    custom: Mapping[str, JSON] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None

    def info(self) -> CommitInfo:
        """What the root says, checked; the save has no id yet.

        Raises:
            ValueError, TypeError: for what is no metadata, metric, step or epoch.
        """
        custom, metrics = check_custom(self.custom), _check_metrics(self.metrics)
        return CommitInfo(
            save_id="", created="", custom=custom, metrics=metrics, progress=_check_progress(self.step, self.epoch)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHooks:
    """What is called during a save.

    Attributes:
        allowed: on the leader before anything is written; an error of it stops the save.
        before_commit: on each process that commits, right before it; an error of it stops the save.
        committed: on every rank once the checkpoint exists, on the thread that waited for it, before further saves are written.
    """

    allowed: Callable[[], None] | None = None
    before_commit: Callable[[], None] | None = None
    committed: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A save that a user asked for.

    Attributes:
        destination: where it goes.
        values: one tree, or checkpointables by name.
        layout: a name, or a layout with options.
        strategy: what is written and committed.
        notes: what the user says about it.
        hooks: what is called.
    """

    destination: Destination
    values: OneTree | Mapping[str, object]
    layout: str | Layout
    strategy: SaveStrategy[SaveDraft, Save] = field(default_factory=PlainSave)
    notes: SaveNotes = field(default_factory=SaveNotes)
    hooks: SaveHooks = field(default_factory=SaveHooks)


def check_custom(custom: Mapping[str, JSON] | None) -> Mapping[str, JSON]:
    """Metadata of the user's, as it is stored.

    Raises:
        ValueError: if it is no JSON, or would come back changed.
    """
    if custom is None:
        return {}
    try:
        decoded: dict[str, JSON] = json.loads(json.dumps(dict(custom), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metadata= must be JSON, with str keys and finite numbers: {error}. Nothing was written"
        ) from error
    if decoded != _lists(custom):
        raise ValueError("metadata= must be JSON, with str keys; it would come back changed. Nothing was written")
    return decoded


def _check_metrics(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Measurements as they are stored.

    Raises:
        ValueError, TypeError: if one is no number, or its name no text.
    """
    checked = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metrics={{{name!r}: {value!r}}}: a metric is one number. Nothing was written") from error
        if not isinstance(name, str):
            raise TypeError(f"metrics={{{name!r}: ...}}: the name of a metric is a str. Nothing was written")
        checked[name] = number
    return checked


def _check_progress(step: int | None, epoch: int | None) -> Mapping[str, int]:
    """The step and the epoch, as they are stored.

    Raises:
        ValueError, TypeError: if one is no whole number of at most 64 bits.
    """
    checked = {}
    for name, value in (("step", step), ("epoch", epoch)):
        if value is None:
            continue
        number = whole_number(name, value, hint=". Nothing was written")
        if abs(number) > _MOST_PROGRESS:
            raise ValueError(f"{name}= must fit into 64 bits, as a signed integer. Nothing was written")
        checked[name] = number
    return checked


def _lists(value: Any) -> Any:
    """JSON with its tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _lists(child) for key, child in value.items()}
    return [_lists(child) for child in value] if isinstance(value, list | tuple) else value
