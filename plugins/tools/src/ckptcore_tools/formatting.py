"""Formatting of sizes, counts, ages, metrics and types as text."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptcore.model import ArrayRecord, LeafRecord, TreeMetadata

if TYPE_CHECKING:
    from ckptcore.results import Problem

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def format_size(nbytes: int) -> str:
    """Return bytes in decimal units, with three digits: ``999 B``, ``1.02 kB``, ``90.9 MB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB", "EB"):  # noqa: B007  # the last one is used below
        amount /= 1000
        if amount < 999.5:
            break
    digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    return f"{amount:.{digits}f} {unit}"


def format_leaf_type(record: LeafRecord) -> str:
    """Return the type of a leaf: ``float32[64, 48]``, ``int``. An unusual kind precedes the dtype of an array."""
    if not isinstance(record, ArrayRecord):
        return record.kind
    return str(record.spec) if record.kind == "array" else f"{record.kind} {record.spec}"


def format_layout(layout: str, tree: TreeMetadata, foreign: str | None) -> str:
    """Return the layout of a tree. For a tree of other software without arrays, such as a JSON file, return its writer.

    Args:
        layout: the layout that reads the tree.
        tree: the tree.
        foreign: the software that wrote it; None for ckptcore.
    """
    has_arrays = any(isinstance(record, ArrayRecord) for record in tree.leaves)
    return layout if has_arrays or not tree.leaves or not foreign else foreign


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 array``, ``1,200 arrays``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_problems(problems: Sequence[Problem]) -> str:
    """Return the first problem and the number of the others: ``a.safetensors is missing, and 2 more problems``."""
    first, others = problems[0].message, len(problems) - 1
    return f"{first}, and {format_count(others, 'more problem')}" if others else first


def format_age(created: str, now: float) -> str:
    """Return the age of a time: ``42 s``, ``3 h``, ``12 days``. Return the time itself if it cannot be parsed.

    Args:
        created: a time in ISO 8601.
        now: seconds since the epoch.
    """
    try:
        seconds = now - datetime.datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError, OSError):
        return created
    if seconds < 0:
        return "0 s" if seconds > -_MINUTE else "in the future"
    for unit, name in ((_DAY, "days"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:,.0f} {name}"
    return f"{seconds:.0f} s"


def format_metrics(metrics: Mapping[str, float | str]) -> str:
    """Return metrics on one line: ``loss=0.25 accuracy=0.9``."""
    return " ".join(f"{name}={float(value):.6g}" for name, value in metrics.items())
