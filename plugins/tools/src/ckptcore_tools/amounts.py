"""Sizes, counts and ages as text for people."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

__all__ = ["age", "count", "metrics_text", "size"]

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def size(nbytes: int) -> str:
    """Bytes in decimal units, with three digits: ``999 B``, ``1.02 kB``, ``90.9 MB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        amount /= 1000
        if amount < 999.5:
            break
    digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    return f"{amount:.{digits}f} {unit}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 array``, ``1,200 arrays``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def age(created: str, now: float) -> str:
    """How long ago a time in ISO 8601 was, in the unit that fits: ``42 s``, ``3 h``, ``12 days``; itself if it cannot be read.

    Args:
        created: the time.
        now: seconds since the epoch.
    """
    try:
        seconds = now - datetime.datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError, OSError):
        return created
    if seconds < 0:
        return "0 s" if seconds > -_MINUTE else "in future"
    for unit, name in ((_DAY, "days"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:,.0f} {name}"
    return f"{seconds:.0f} s"


def metrics_text(metrics: Mapping[str, float | str]) -> str:
    """Measurements on one line: ``loss=0.25 accuracy=0.9``."""
    return " ".join(f"{name}={float(value):.6g}" for name, value in metrics.items())
