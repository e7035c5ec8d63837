"""Timelines as text: a line for each phase of an operation, with a bar."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final

from ckptcore.events import Event

__all__ = ["format_timeline"]

_BAR_CHARACTERS: Final = 28
_NAME_CHARACTERS: Final = 22
_ROUNDING_SECONDS: Final = 2e-6
"""How far apart equal times can be, once they were stored in whole microseconds."""


def format_timeline(events: Sequence[Event]) -> str:
    """A timeline as a table of at most 100 columns: a line per phase in the order in which they began, with a bar.

    A phase inside another one of the same rank is indented below it. The same events give the same text. Characters of
    a location or an error that cannot be shown are replaced.
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
        lines.append(
            f"{name:{_NAME_CHARACTERS}} {f'{event.rank:4} ' if several else ''}"
            f"{(event.began - first) * 1e3:11.1f} {event.seconds * 1e3:11.1f} "
            f"{_amount(event.nbytes):>8} {_rate(event):>7} |{_bar(event, first, last)}|"
        )
        if event.error is not None:
            lines.append(f"    failed: {_shown(event.error, 86)}")
    return "\n".join(lines) + "\n"


def _headline(ordered: Sequence[Event]) -> str:
    head = ordered[0]
    step = "" if head.step is None else f" step {head.step}"
    where = f" {_shown(head.location, 50)}" if head.location else ""
    began = datetime.datetime.fromtimestamp(head.began, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{head.operation}{step}{where}, began {began} UTC"


def _within(event: Event, other: Event) -> bool:
    return other.began <= event.began + _ROUNDING_SECONDS and event.ended <= other.ended + _ROUNDING_SECONDS


def _bar(event: Event, first: float, last: float) -> str:
    """Where the phase lies in the whole; at least one mark."""
    scale = _BAR_CHARACTERS / (last - first) if last > first else 0.0
    start = min(int((event.began - first) * scale), _BAR_CHARACTERS - 1)
    stop = min(max(round((event.ended - first) * scale), start + 1), _BAR_CHARACTERS)
    return " " * start + "#" * (stop - start) + " " * (_BAR_CHARACTERS - stop)


def _amount(nbytes: int | None) -> str:
    """Bytes in decimal units, in at most 8 characters."""
    if nbytes is None:
        return ""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB", "EB"):
        amount /= 1000
        if amount < 999.5:
            break
    return f"{amount:.{2 if amount < 9.995 else 1 if amount < 99.95 else 0}f} {unit}"


def _rate(event: Event) -> str:
    if not event.nbytes or event.seconds <= 0:
        return ""
    rate = event.nbytes / event.seconds / 1e9
    return f"{rate:.2f}" if rate < 1000 else f"{rate:.1e}"


def _shown(text: str, characters: int) -> str:
    """Text on one line; from a checkpoint of a stranger's it could otherwise steer the terminal."""
    shown = "".join([character if character.isprintable() else "?" for character in text])
    return shown if len(shown) <= characters else shown[: characters - 3] + "..."
