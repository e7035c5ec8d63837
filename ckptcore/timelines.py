"""Timelines: the events of one operation as JSON that a checkpoint stores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from ckptcore.errors import CorruptCheckpointError
from ckptcore.events import ERROR_CHARACTERS, Event, Operation
from ckptcore.model.tree import JSON

__all__ = ["MAX_EVENTS", "timeline_from_json", "timeline_to_json"]

MAX_EVENTS: Final = 10_000
"""The most events that a stored timeline has."""

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
