"""Bounds: how long a step or an operation may take, given by the user or learnt from the durations before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from ckptcore.model import JSON

Kind: TypeAlias = Literal["step", "save", "load", "upload", "delete"]
"""A training step, or an operation of `ckptcore.events`: each kind has a bound."""

_REMEMBERED: Final = 200
_QUANTILE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Learnt:
    """A bound that is learnt: a multiple of the 90th percentile of the last 200 durations.

    Less than a tenth of the durations may be arbitrarily long without an effect on the bound.

    Attributes:
        floor: the bound is never shorter, in seconds.
        factor: the multiple.
        samples: the number of durations from which on the bound is learnt.
        before: the bound until then, in seconds, unless `floor` is longer; None: no bound.

    Raises:
        ValueError: a value is out of range.
    """

    floor: float
    factor: float = 10.0
    samples: int = 10
    before: float | None = 3600.0

    def __post_init__(self) -> None:
        is_valid = self.floor > 0 and self.factor >= 1 and self.samples >= 1
        if not is_valid or not (self.before is None or self.before > 0):
            raise ValueError(f"{self}: expected seconds above 0, a factor of at least 1 and at least 1 sample")

    @property
    def until_learnt(self) -> float | None:
        """The bound in seconds until it is learnt; None: no bound."""
        return None if self.before is None else max(self.floor, self.before)


Bound: TypeAlias = float | Learnt
"""A bound in seconds, or a learnt one."""

DEFAULT_BOUNDS: Final[Mapping[Kind, Bound]] = {
    "step": Learnt(120.0, factor=8.0),
    "save": Learnt(600.0),
    "load": Learnt(1800.0),
    "upload": Learnt(1800.0),
    "delete": Learnt(1800.0),
}
"""The bounds of kinds for which the user gives none."""


def with_defaults(bounds: Mapping[Kind, Bound]) -> dict[Kind, Bound]:
    """Return the bounds of all kinds.

    Raises:
        ValueError: a kind is unknown, or a bound is not above 0.
    """
    for kind, bound in bounds.items():
        if kind not in get_args(Kind):
            raise ValueError(f"bounds={{{kind!r}: ...}}: expected one of {', '.join(map(repr, get_args(Kind)))}")
        if not isinstance(bound, Learnt) and not bound > 0:
            raise ValueError(f"bounds={{{kind!r}: {bound!r}}}: expected seconds above 0, or Learnt(...)")
    return {**DEFAULT_BOUNDS, **bounds}


def bounds_to_json(bounds: Mapping[Kind, Bound]) -> dict[str, JSON]:
    """Return bounds as JSON, for the monitor."""
    return {kind: asdict(bound) if isinstance(bound, Learnt) else float(bound) for kind, bound in bounds.items()}


def bounds_from_json(document: Mapping[Kind, Any]) -> dict[Kind, Bound]:
    """Return the bounds of `bounds_to_json`."""
    return {kind: Learnt(**bound) if isinstance(bound, dict) else bound for kind, bound in document.items()}


def shortest_bound(bounds: Mapping[Kind, Bound]) -> float:
    """Return the shortest time in seconds that any of the bounds may be."""
    return min([bound.floor if isinstance(bound, Learnt) else bound for bound in bounds.values()])


class Durations:
    """The durations of one kind in this process, and the bound that follows from them."""

    def __init__(self, bound: Bound) -> None:
        """Start without durations."""
        self._bound = bound
        self._last: deque[float] = deque(maxlen=_REMEMBERED)
        self._count = 0
        self._limit = bound.until_learnt if isinstance(bound, Learnt) else bound

    @property
    def limit(self) -> float | None:
        """The bound in seconds; None if there is none yet."""
        return self._limit

    def add(self, seconds: float) -> None:
        """Add a duration. One that exceeded the bound counts as the bound, so that one stall teaches little."""
        if not isinstance(self._bound, Learnt):
            return
        self._last.append(seconds if self._limit is None else min(seconds, self._limit))
        self._count += 1
        # Sort rarely: thousands of steps may end in a second.
        if self._count >= self._bound.samples and (self._count < _REMEMBERED or self._count % 10 == 0):
            ordered = sorted(self._last)
            typical = ordered[math.ceil(_QUANTILE * len(ordered)) - 1]
            self._limit = max(self._bound.floor, self._bound.factor * typical)
