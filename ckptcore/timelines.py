"""Timelines: the events of one operation as JSON that a checkpoint stores, and as text that people read."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from ckptcore.errors import CorruptCheckpointError
from ckptcore.events import ERROR_CHARACTERS, Event, Operation
from ckptcore.model.tree import JSON

__all__ = ["MAX_EVENTS", "format_timeline", "timeline_from_json", "timeline_to_json"]

MAX_EVENTS: Final = 10_000
"""The most events that a stored timeline has."""

_BAR_CHARACTERS: Final = 28
_NAME_CHARACTERS: Final = 22
_ROUNDING_SECONDS: Final = 2e-6
"""How far apart equal times can be, once they were stored in whole microseconds."""

_OPERATIONS: Final[tuple[Operation, ...]] = ("save", "load", "delete", "upload")
_NAME: Final = re.compile(r"[a-z][a-z_]{0,39}")
_SAVE_ID: Final = re.compile(r"[0-9a-f]{16}")
_MOST_MICROSECONDS: Final = 1 << 52
"""In the year 2112; every such number is a float without loss, and a `datetime`."""

_MOST: Final = (1 << 63) - 1


def timeline_to_json(events: Sequence[Event]) -> dict[str, JSON]:
    """Events of one operation, perhaps of several ranks, as columns of JSON; times in whole microseconds.

    The location is left out: a checkpoint can be moved, and where it was written does not concern those who get a copy. So is
    the operation's id. Of more than `MAX_EVENTS` events the longest are kept.

    Raises:
        ValueError: if there is no event, or they are of several operations.
    """
    operations = {(event.operation, event.step) for event in events}
    save_ids = {event.save_id for event in events} - {None}
    if len(operations) != 1 or len(save_ids) > 1:
        raise ValueError(
            f"a timeline is the events of one operation; these are of {sorted(operations, key=repr)} and of the saves "
            f"{sorted(save_ids, key=repr)}"
        )
    if len(events) > MAX_EVENTS:
        longest = sorted(range(len(events)), key=lambda number: -events[number].seconds)[:MAX_EVENTS]
        events = [events[number] for number in sorted(longest)]
    first = min(_microseconds(event.began) for event in events)
    return {
        "operation": events[0].operation,
        "step": events[0].step,
        "save_id": next(iter(save_ids), None),
        "began": first,
        "phase": [event.phase for event in events],
        "rank": [event.rank for event in events],
        "offset": [_microseconds(event.began) - first for event in events],
        "duration": [_microseconds(event.seconds) for event in events],
        "nbytes": [event.nbytes for event in events],
        "error": [event.error for event in events],
    }


def timeline_from_json(found: JSON, *, location: str = "") -> tuple[Event, ...]:
    """The events of a stored timeline, which may be hostile.

    Args:
        found: what `timeline_to_json` gave. A phase that this version does not know is kept.
        location: where the checkpoint is now, for the events to name.

    Raises:
        CorruptCheckpointError: if it is anything else, or has more than `MAX_EVENTS` events.
    """
    if not isinstance(found, dict):
        _refuse("it", found, "an object")
    operation = found.get("operation")
    if operation not in _OPERATIONS:
        _refuse("operation", operation, f"one of {', '.join(_OPERATIONS)}")
    step = None if found.get("step") is None else _whole("step", found["step"], -_MOST, _MOST)
    save_id = None if found.get("save_id") is None else _text("save_id", found["save_id"], _SAVE_ID)
    first = _whole("began", found.get("began"), 0, _MOST_MICROSECONDS)
    names = ("phase", "rank", "offset", "duration", "nbytes", "error")
    columns = [found.get(name) for name in names]
    for name, column in zip(names, columns, strict=True):
        if not isinstance(column, list) or len(column) > MAX_EVENTS:
            _refuse(name, column, f"a list of at most {MAX_EVENTS}")
    lengths = {name: len(column) for name, column in zip(names, columns, strict=True) if isinstance(column, list)}
    if len(set(lengths.values())) != 1 or not lengths["phase"]:
        _refuse("the length of its columns", max(lengths.values()), "the same for all, and at least 1")
    rows: Any = zip(*columns, strict=True)
    return tuple(
        [
            Event(
                phase=_text("phase", phase, _NAME),
                operation=operation,
                location=location,
                step=step,
                rank=_whole("rank", rank, 0, 1 << 31),
                began=(first + _whole("offset", offset, 0, _MOST_MICROSECONDS - first)) / 1e6,
                seconds=_whole("duration", duration, 0, _MOST_MICROSECONDS) / 1e6,
                nbytes=None if nbytes is None else _whole("nbytes", nbytes, 0, _MOST),
                error=None if error is None else _error(error),
                save_id=save_id,
            )
            for phase, rank, offset, duration, nbytes, error in rows
        ]
    )


def format_timeline(events: Sequence[Event]) -> str:
    """A timeline as a table of at most 100 columns: a line per phase in the order in which they began, with a bar.

    A phase inside another one of the same rank is indented below it. The same events give the same text. Characters of a
    location or an error that cannot be shown are replaced.
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


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _whole(name: str, found: Any, least: int, most: int) -> int:
    if type(found) is not int or not least <= found <= most:
        _refuse(name, found, f"a whole number from {least} to {most}")
    return found


def _text(name: str, found: Any, expected: re.Pattern[str]) -> str:
    if not isinstance(found, str) or expected.fullmatch(found) is None:
        _refuse(name, found, f"text that matches {expected.pattern}")
    return found


def _error(found: Any) -> str:
    if not isinstance(found, str) or len(found) > ERROR_CHARACTERS:
        _refuse("error", found, f"text of at most {ERROR_CHARACTERS} characters")
    return found


def _refuse(name: str, found: Any, expected: str) -> NoReturn:
    # Of a container only its size: it may be large or deep.
    shown = f"{type(found).__name__} of {len(found)}" if isinstance(found, list | dict) else repr(found)[:80]
    raise CorruptCheckpointError(f"a timeline cannot be read: {name} is {shown}, and expected is {expected}")
