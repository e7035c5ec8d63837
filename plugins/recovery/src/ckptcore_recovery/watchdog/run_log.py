"""Format and reader of run logs: how a job spent its time, over all its restarts.

A job that starts, or starts again, is a new *incarnation* with a log of its own. Rank 0 writes it, because the other
ranks wait for each other in every step. It is in the directory of the run, where the `Checkpointer` keeps its locks::

    .ckptcore/run-log/000002-5f3a9c01/000000.jsonl
                      |      |        the segment
                      |      a random number, which tells apart jobs that start at the same time
                      the incarnation, counted from 1

A segment is text with one JSON value in each line. Its first line is the header. Arrays are periods, and objects are
notes. The last line of the last segment is the state at the time of writing. It is replaced with every write::

    {"format": 1, "began": 1796020000000000, "processes": 8}
    [0, 41000000, 0, 0, 0, 0, 0, 29000000, 12000000, 0]
    {"note": "load", "at": 12000000, "step": 100, "took": 29000000}
    [41000000, 52500000, 101, 105, 5, 11500000, 0, 0, 0, 0]
    {"alive": 53000000, "wall": 1796020053000000, "period": [...], "unfinished": 500000, "outcome": null}

All times are microseconds: since the start of the incarnation, by a monotonic clock, or since the epoch (``began`` and
``wall``). A log grows by one line in 10 s, and by one line for each save if they are a second or more apart.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from ckptcore.commit.location import LocationLike, open_directory, shown_location
from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.context import Context, default_context
from ckptcore.errors import ObjectNotFoundError, UnsupportedVersionError
from ckptcore.events import ERROR_CHARACTERS
from ckptcore.io.threads import map_ordered, requests_of
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import as_integer
from ckptcore.training.path_directory import as_run_directory
from ckptcore.training.run_directory import RunDirectory
from ckptcore_recovery.watchdog.time_account import Period

Outcome: TypeAlias = Literal["finished", "failed"]
"""End of an incarnation. "failed": by an error or a signal, and also if a watchdog ended it."""

FORMAT: Final = 1
LOG_DIRECTORY: Final = f"{INTERNAL_DIRECTORY}/run-log"
MAX_SEGMENT_BYTES: Final = 1 << 20
MAX_NOTES: Final = 1000
"""Maximum number of notes in the log of an incarnation. Further notes are dropped."""

NOTE_KIND: Final = re.compile(r"[a-z][a-z_]{0,39}")

_SEGMENT: Final = re.compile(rf"{re.escape(LOG_DIRECTORY)}/((\d{{6}})-[0-9a-f]{{8}})/(\d{{6}})\.jsonl", re.ASCII)
_MAX_TIME: Final = 1 << 52
"""Maximum time in microseconds. All smaller numbers are exact as floats."""

_MAX_STEP: Final = (1 << 63) - 1
_MAX_PROCESSES: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Note:
    """An event of an incarnation: a load, a failed save, load or upload, or a stall.

    Attributes:
        kind: the phase of the event, such as "load", or "stall".
        at: the time of its end.
        step: the step; None if unknown.
        took: its duration; None if unknown.
        text: the error, or what happened; None if there is nothing to say.
    """

    kind: str
    at: int
    step: int | None = None
    took: int | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The log of one incarnation. Times are microseconds, since its start or since the epoch.

    Attributes:
        number: its number, from 1. Two jobs that started at the same time may have the same number.
        processes: the number of processes of the job.
        began, ended: start, and last sign of life, since the epoch, by the clock of the host at that time.
        duration: the time between the two, by a monotonic clock.
        periods: ascending, without overlaps. Time between them was lost with a part of the log.
        unfinished: the time in a step that had not ended at the last sign of life.
        outcome: how it ended; None if it is running, or if nothing outlived it to record its end.
        notes: in the order of the log.
    """

    number: int
    processes: int
    began: int
    ended: int
    duration: int
    periods: Sequence[Period]
    unfinished: int
    outcome: Outcome | None
    notes: Sequence[Note]


def read_run_log(directory: LocationLike | RunDirectory, context: Context | None = None) -> Sequence[Incarnation]:
    """Return the incarnations of a run, in the order of their numbers; none if the run has no log.

    Lines and segments that are damaged are passed over.

    Args:
        directory: the directory of the run.
        context: options.

    Raises:
        StorageError: the log cannot be read.
        UnsupportedVersionError: a newer version wrote it.
    """
    context = context or default_context()
    location = as_run_directory(directory).location
    store = open_directory(location, runtime_of(context).storages)
    segments: dict[str, list[str]] = {}
    for key in sorted(store.list(LOG_DIRECTORY)):
        if (matched := _SEGMENT.fullmatch(key)) is not None:
            segments.setdefault(matched[1], []).append(key)
    keys = [key for of_one in segments.values() for key in of_one]
    texts = map_ordered(
        runtime_of(context).io_threads, keys, lambda key: _read(store, key), parallelism=requests_of(store).concurrency
    )
    by_key = dict(zip(keys, texts, strict=True))
    read = [
        _incarnation(int(name[:6]), [by_key[key] for key in of_one], shown_location(location))
        for name, of_one in segments.items()
    ]
    return [incarnation for incarnation in read if incarnation is not None]


def outcome_of(error: BaseException | None) -> Outcome:
    """Return how an incarnation ends, given the error that leaves a ``with`` block; None: without an error.

    An interrupt by the keyboard and an exit with status 0 are meant. All other errors are failures.
    """
    is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
    return "finished" if error is None or is_exit or isinstance(error, KeyboardInterrupt) else "failed"


def checked_step(step: object) -> int:
    """Return the number of a step.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    number = as_integer("step", step, hint=f"; a step is a whole number from 0 to {_MAX_STEP}")
    if not 0 <= number <= _MAX_STEP:
        raise ValueError(f"step {step!r}: a step is a whole number from 0 to {_MAX_STEP}")
    return number


def next_number(store: StorageBackend) -> int:
    """Return the number of a new incarnation."""
    names = [re.fullmatch(r"(\d{6})-[0-9a-f]{8}/", name, re.ASCII) for name in store.list_names(LOG_DIRECTORY)]
    return 1 + max([int(matched[1]) for matched in names if matched is not None], default=0)


def _read(store: StorageBackend, key: str) -> bytes:
    try:
        return store.get(key, 0, MAX_SEGMENT_BYTES)
    except ObjectNotFoundError:
        return b""


def _incarnation(number: int, segments: Sequence[bytes], display: str) -> Incarnation | None:
    """Return the incarnation that the segments describe; None if no header is readable."""
    header: Mapping[str, Any] = {}
    state: Mapping[str, Any] = {}
    periods: list[Period] = []
    notes: list[Note] = []
    for value in itertools.chain.from_iterable(map(_lines, segments)):
        if isinstance(value, list):
            if (period := _period(value)) is not None:
                periods.append(period)
        elif "format" in value:
            if value["format"] != FORMAT:
                raise UnsupportedVersionError(
                    f"{display}: the log of incarnation {number} has the format {value['format']!r:.40}; this version "
                    f"of ckptcore-recovery reads the format {FORMAT}: update it"
                )
            if _is_time(value.get("began")) and _is_whole(value.get("processes"), _MAX_PROCESSES):
                header = value
        elif "alive" in value:
            if _is_time(value["alive"]) and _is_time(value.get("wall")):
                state = value
        elif len(notes) < MAX_NOTES and (note := _note(value)) is not None:
            notes.append(note)
    if not header:
        return None
    ordered = _without_overlaps(periods)
    ended = ordered[-1].ended if ordered else 0
    alive = max(state.get("alive", 0), ended)
    unfinished = 0
    if state:
        current = _period(state.get("period"))
        if current is not None and current.began >= ended and current.ended <= alive:
            ordered.append(current)
            if state.get("unfinished") == alive - current.ended:
                unfinished = alive - current.ended
    outcome = state.get("outcome")
    return Incarnation(
        number=number,
        processes=header["processes"],
        began=header["began"],
        ended=max(0, state["wall"] + alive - state["alive"]) if state else header["began"] + alive,
        duration=alive,
        periods=ordered,
        unfinished=unfinished,
        outcome=outcome if outcome in ("finished", "failed") else None,
        notes=notes,
    )


def _lines(segment: bytes) -> Iterator[list[Any] | dict[str, Any]]:
    """Yield the arrays and objects of a segment. Pass over damaged lines."""
    for line in segment.decode("utf-8", "replace").split("\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, list | dict):
            yield value


def _without_overlaps(periods: Sequence[Period]) -> list[Period]:
    ordered: list[Period] = []
    for period in periods:
        if not ordered or period.began >= ordered[-1].ended:
            ordered.append(period)
    return ordered


def _period(values: object) -> Period | None:
    """Return the period for an array of a log; None if it is not valid."""
    if not isinstance(values, list) or len(values) != len(Period._fields) or {*map(type, values)} != {int}:
        return None
    period = Period(*values)
    spent = (period.in_steps, period.in_saves, period.in_loads, period.other)
    is_valid = (
        min(values) >= 0
        and period.ended <= _MAX_TIME
        and sum(spent) == period.ended - period.began
        and period.last <= _MAX_STEP
        and period.steps <= period.last - period.first + 1
        and (period.steps > 0 or period.in_steps == 0)
    )
    return period if is_valid else None


def _note(value: Mapping[str, Any]) -> Note | None:
    """Return the note for an object of a log; None if it is not valid."""
    kind, at, step, took, text = map(value.get, ("note", "at", "step", "took", "text"))
    is_valid = (
        isinstance(kind, str)
        and NOTE_KIND.fullmatch(kind) is not None
        and _is_time(at)
        and (step is None or _is_whole(step, _MAX_STEP))
        and (took is None or _is_time(took))
        and (text is None or (isinstance(text, str) and len(text) <= ERROR_CHARACTERS))
    )
    return Note(kind, at, step, took, text) if is_valid and isinstance(kind, str) and isinstance(at, int) else None


def _is_time(value: object) -> bool:
    return _is_whole(value, _MAX_TIME)


def _is_whole(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
