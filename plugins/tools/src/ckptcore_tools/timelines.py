"""Timelines as text: one line with a bar for each phase of an operation."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final

from ckptcore.events import Event
from ckptcore_tools.formatting import format_size

__all__ = ["format_timeline"]

_BAR_CHARACTERS: Final = 28
_NAME_CHARACTERS: Final = 22
_ROUNDING_SECONDS: Final = 2e-6
"""Maximum difference between equal times after rounding to microseconds."""


def format_timeline(events: Sequence[Event]) -> str:
    """Return a table of at most 100 columns, with one line and a bar per phase, sorted by start.

    A phase within another phase of the same rank is indented. The same events always give the same text. Control
    characters in locations and errors are replaced.
    """
    if not events:
        return "no events\n"
    ordered = sorted(events, key=lambda event: (event.began, -event.seconds, event.rank, event.phase))
    first, last = ordered[0].began, max(event.ended for event in ordered)
    several = len({event.rank for event in ordered}) > 1
    rank = "rank " if several else ""
    heads = f"{'phase':{_NAME_CHARACTERS}} {rank}{'start ms':>11} {'took ms':>11} {'bytes':>8} {'GB/s':>7}"
    lines = [_headline(ordered), heads]
    enclosing: dict[int, list[Event]] = {}
    for event in ordered:
        above = enclosing.setdefault(event.rank, [])
        while above and not _within(event, above[-1]):
            above.pop()
        name = ("  " * min(len(above), 4) + event.phase)[:_NAME_CHARACTERS]
        above.append(event)
        nbytes = "" if event.nbytes is None else format_size(event.nbytes)
        lines.append(
            f"{name:{_NAME_CHARACTERS}} {f'{event.rank:4} ' if several else ''}"
            f"{(event.began - first) * 1e3:11.1f} {event.seconds * 1e3:11.1f} "
            f"{nbytes:>8} {_rate(event):>7} |{_bar(event, first, last)}|"
        )
        if event.error is not None:
            lines.append(f"    failed: {_printable(event.error, 86)}")
    return "\n".join(lines) + "\n"


def _headline(ordered: Sequence[Event]) -> str:
    head = ordered[0]
    step = "" if head.step is None else f" step {head.step}"
    where = f" {_printable(head.location, 50)}" if head.location else ""
    began = datetime.datetime.fromtimestamp(head.began, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{head.operation}{step}{where}, began {began} UTC"


def _within(event: Event, other: Event) -> bool:
    return other.began <= event.began + _ROUNDING_SECONDS and event.ended <= other.ended + _ROUNDING_SECONDS


def _bar(event: Event, first: float, last: float) -> str:
    """Return the bar of a phase, with at least one mark."""
    scale = _BAR_CHARACTERS / (last - first) if last > first else 0.0
    start = min(int((event.began - first) * scale), _BAR_CHARACTERS - 1)
    stop = min(max(round((event.ended - first) * scale), start + 1), _BAR_CHARACTERS)
    return " " * start + "#" * (stop - start) + " " * (_BAR_CHARACTERS - stop)


def _rate(event: Event) -> str:
    if not event.nbytes or event.seconds <= 0:
        return ""
    rate = event.nbytes / event.seconds / 1e9
    return f"{rate:.2f}" if rate < 1000 else f"{rate:.1e}"


def _printable(text: str, characters: int) -> str:
    """Return one line of text without control characters: text of a checkpoint could control the terminal."""
    shown = "".join([character if character.isprintable() else "?" for character in text])
    return shown if len(shown) <= characters else shown[: characters - 3] + "..."
