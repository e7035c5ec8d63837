"""What a user asks of a save, and the check of what is said along with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from ckptcore.commit.location import Place
from ckptcore.commit.occupants import Overwrite
from ckptcore.model.tree import JSON
from ckptcore.protocols import Layout
from ckptcore.saving.exporting import Export
from ckptcore.step_names import whole_number

if TYPE_CHECKING:
    from ckptcore.job.visibility import OnHosts

__all__ = ["OneTree", "SaveRequest", "check_custom", "check_metrics", "check_progress"]

_MOST_PROGRESS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class OneTree:
    """Says that a checkpoint is one tree.

    Attributes:
        state: the tree.
    """

    state: object


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A save that a user asked for.

    Attributes:
        location: where to.
        values: what: one tree, or checkpointables by name.
        layout: a name, or a layout with options.
        overwrite: whether what is there is replaced.
        custom: metadata of the user's; JSON.
        metrics: measurements to be kept with it.
        step, epoch: how far the training is, in integers of any type; None where nobody says.
        when_busy: what an asynchronous save does while another runs; None: as the Context says.
        allowed: called on the leader before anything is written; an error of it stops the save.
        before_commit: called on the leader right before the commit; an error of it stops the save.
        committed: called on every rank once the checkpoint is there, on the thread that waited for it. Exports come after it.
        exports: further checkpoints in other layouts, of the same copy.
        on_hosts: that it goes to a directory of each host; None: to one that all processes see.
        partial: whether it is a session of a partial save, of one tree.
        base: the checkpoint that has what is not given; None: everything is given.
        name: what every rank of a job calls the location, whatever its path is on each; None: as it is given.
    """

    location: Place
    values: OneTree | Mapping[str, object]
    layout: str | Layout
    overwrite: Overwrite
    custom: Mapping[str, JSON] | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    when_busy: Literal["wait", "queue"] | None = None
    allowed: Callable[[], None] | None = None
    before_commit: Callable[[], None] | None = None
    committed: Callable[[], None] | None = None
    exports: Sequence[Export] = ()
    on_hosts: OnHosts | None = None
    partial: bool = False
    base: Place | None = None
    name: str | None = None

    @property
    def agreed(self) -> object:
        """What the exchanges of the save are called by."""
        return self.location if self.name is None else self.name


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


def check_metrics(metrics: Mapping[str, float]) -> Mapping[str, float]:
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


def check_progress(request: SaveRequest) -> Mapping[str, int]:
    """The step and the epoch, as they are stored.

    Raises:
        ValueError, TypeError: if one is no whole number of at most 64 bits.
    """
    checked = {}
    for name, value in (("step", request.step), ("epoch", request.epoch)):
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
