"""Events: the phases of saves, loads and deletions, reported to observers.

A phase is a part of one operation on one rank. Its event is created when it ends, with or without an error, on the
thread that it ends on. Phases may contain others, overlap on several threads, and occur several times.

::

    phase                begins                      ends                      thread      caller     contains
    -------------------  --------------------------  ------------------------  ----------  ---------  ---------------
    save                 the call of a save          the commit, or the error  both        partly     all of these
      blocking           the call of a save          the call returns          caller's    waits      see below
      wait_for_previous  a save is in the way        that save is over         caller's    waits
      describe           the state is looked at      each leaf has a record    caller's    waits      exchange
      copy               the first leaf is copied    what can change is ours   caller's    waits
      claim              the location is asked for   it is this save's         background  goes on
      write              the first bytes are taken   this rank's bytes are in  background  goes on
      exchange           this rank's part is done    all outcomes are here     both        see below
      commit             the root is made            the checkpoint exists     background  goes on
    load                 the call of a load          the value is handed over  caller's    waits      all below
      open               the root is looked for      the tree is matched       caller's    waits
      read               the first bytes are read    all are there, in leaves  caller's    waits
      restore            an object's state is there  the object has taken it   caller's    waits
    delete               a step is about to go       its files are gone        background  goes on
      clean              what must go is looked for  what is found is gone     background  goes on    deletes
    upload               a step is about to be sent  the far tier has it       background  goes on

- ``blocking`` is the time for which the caller of a save cannot train. In an asynchronous save it contains
  ``wait_for_previous``, ``describe`` and ``copy``; with a limit of memory, copying continues while earlier parts are
  written. In a blocking save it contains all phases.
- ``save``, ``load``, ``delete`` and ``upload`` are whole operations. Their phases may occur in another order than here.
- A ``Checkpointer`` deletes and cleans: when it opens, it removes what interrupted saves left, and after each save the
  steps that its policy does not keep. A ``clean`` is an operation of its own, and so is each ``delete`` in it.
- A ``Checkpointer`` with a near tier uploads steps. Each ``upload`` is an operation of its own, even if the step is not
  uploaded: its error says why.
- ``exchange`` is in ``describe``, and follows ``claim``, ``write`` and ``commit``. If it is long, this rank waited
  for a slower one. A process without others has none. The caller waits for it if it waits for that stage.
- ``load_async`` has the phases of ``load``, on a background thread.
- Bytes are those of arrays and files that the phase moved on this rank; None if it moves none or they are unknown.

Every event is also logged at DEBUG by the logger ``ckptcore.events``, with the event itself as the attribute
``ckptcore_event`` of the log record.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self, TypeAlias

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.tree import JSON
from ckptcore.redaction import redacted

__all__ = [
    "ERROR_CHARACTERS",
    "MAX_EVENTS",
    "Event",
    "Observer",
    "Operation",
    "Phase",
    "Recording",
    "RunningPhase",
    "timeline_from_json",
    "timeline_to_json",
]

Operation: TypeAlias = Literal["save", "load", "delete", "upload"]
"""What is being done as a whole; also the name of the phase that spans it."""

Phase: TypeAlias = Literal[
    "save", "blocking", "wait_for_previous", "describe", "copy", "claim", "write", "exchange", "commit",
    "load", "open", "read", "restore",
    "delete", "clean",
    "upload",
]  # fmt: skip
"""A stretch of an operation; the table of the module says when each begins and ends."""

ERROR_CHARACTERS: Final = 500
"""The most characters that an event says of an error."""

_LOGGER: Final = logging.getLogger("ckptcore.events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A phase that is over.

    Attributes:
        phase: its name, a `Phase`; in a timeline that a newer version stored, possibly one that this version does not
            know.
        operation: the operation that it is part of.
        location: what is saved, loaded or deleted, as a path or URL without its secrets.
        step: the training step, or None outside a `Checkpointer`.
        rank: the process of the job.
        began: when, in seconds since the epoch, UTC. Within one operation the differences are those of a monotonic
            clock.
        seconds: how long it took, by a monotonic clock.
        nbytes: bytes that it moved, or None.
        error: why it failed, as ``Type: text`` of at most `ERROR_CHARACTERS`; None if it did not.
        save_id: the save that writes, or wrote, the checkpoint; None as long as it is not known.
        operation_id: the same for all events of one operation on one rank, and of no other; empty in a stored timeline.
    """

    phase: str
    operation: Operation
    location: str
    step: int | None
    rank: int
    began: float
    seconds: float
    nbytes: int | None = None
    error: str | None = None
    save_id: str | None = None
    operation_id: str = ""

    @property
    def ended(self) -> float:
        """When it was over, in seconds since the epoch, UTC."""
        return self.began + self.seconds


Observer: TypeAlias = Callable[[Event], None]
"""Called with each event, on the thread on which the phase ended, so perhaps on several threads at once. The operation
waits for it, so it should be quick. Its errors are logged and go no further."""


class RunningPhase:
    """A phase under way, as a context manager. It is over when the block is left; an error goes on to the caller.

    Attributes:
        nbytes: bytes that it has moved; to be set inside the block where they are not known before.
    """

    __slots__ = ("_began", "_name", "_recording", "nbytes")

    def __init__(self, recording: Recording, name: Phase, nbytes: int | None) -> None:
        self._recording = recording
        self._name: Phase = name
        self._began = 0.0
        self.nbytes = nbytes

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recording._add(self._name, self._began, self.nbytes, error)


class Recording:
    """The events of one operation on one rank. Any thread; the operation begins when this is made.

    Attributes:
        operation, location, step, rank: as given, for every event; the location without secrets.
        save_id: set once it is known. Events reported before have None; those of `events` all have it.
    """

    def __init__(
        self,
        operation: Operation,
        location: str,
        observers: Sequence[Observer] = (),
        *,
        step: int | None = None,
        rank: int = 0,
        save_id: str | None = None,
    ) -> None:
        self.operation: Operation = operation
        self.location = redacted(location)
        self.step = step
        self.rank = rank
        self.save_id = save_id
        self._observers = tuple(observers)
        self._failing: set[int] = set()  # by position
        self._operation_id = os.urandom(8).hex()
        # Tuples, because an Event costs more to make than the rest of a phase, and often there is no observer.
        # Appending to a list and copying it are atomic, so no lock is needed.
        self._rows: list[_Row] = []
        self._unfinished = threading.Lock()  # taken for good by the first that finishes
        self._began = time.perf_counter()
        self._epoch = time.time() - self._began

    def phase(self, name: Phase, nbytes: int | None = None) -> RunningPhase:
        """A phase, to be entered on the thread that does it. Costs about a microsecond without observers.

        Args:
            name: which.
            nbytes: bytes that it moves, where they are known before.
        """
        return RunningPhase(self, name, nbytes)

    def finish(self, nbytes: int | None = None, error: BaseException | None = None) -> None:
        """Say that the operation is over: the event that spans it, from when this recording was made until now.

        Only the first call counts, so that each thread that may be the one to end the operation can say so. Phases
        after it are still recorded.

        Args:
            nbytes: bytes that the operation moved on this rank.
            error: why it failed, or None.
        """
        if self._unfinished.acquire(blocking=False):
            self._add(self.operation, self._began, nbytes, error)

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the phases that have ended, in that order: the timeline that a checkpoint stores."""
        return tuple([self._event(row) for row in list(self._rows)])

    def _add(self, name: Phase, began: float, nbytes: int | None, error: BaseException | None) -> None:
        row = (name, began, time.perf_counter() - began, nbytes, None if error is None else _describe(error))
        self._rows.append(row)
        debugging = _LOGGER.isEnabledFor(logging.DEBUG)
        if self._observers or debugging:
            event = self._event(row)
            if debugging:
                _log(event)
            for position, observer in enumerate(self._observers):
                self._tell(position, observer, event)

    def _tell(self, position: int, observer: Observer, event: Event) -> None:
        try:
            observer(event)
        except Exception:
            # The only error that ckptcore catches to log. An observer watches; a collector of metrics that cannot be
            # reached is no reason to lose a checkpoint, and there is no caller that could do anything about it.
            if position not in self._failing:
                self._failing.add(position)
                _LOGGER.warning(
                    "the observer %r failed at the phase %s of the %s of %s; the %s goes on, and further errors of "
                    "this observer in it are not logged",
                    observer, event.phase, event.operation, event.location, event.operation,
                    exc_info=True,
                )  # fmt: skip

    def _event(self, row: _Row) -> Event:
        name, began, seconds, nbytes, error = row
        return Event(
            phase=name,
            operation=self.operation,
            location=self.location,
            step=self.step,
            rank=self.rank,
            began=self._epoch + began,
            seconds=seconds,
            nbytes=nbytes,
            error=error,
            save_id=self.save_id,
            operation_id=self._operation_id,
        )


_Row: TypeAlias = tuple[Phase, float, float, int | None, str | None]
"""Phase, when it began by the clock of `time.perf_counter`, seconds, bytes, error."""


def _describe(error: BaseException) -> str:
    text = redacted(str(error))
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:ERROR_CHARACTERS]


def _log(event: Event) -> None:
    _LOGGER.debug(
        "%s of %s, step %s, rank %d: %s took %.6f s, bytes: %s, error: %s",
        event.operation, event.location, event.step, event.rank, event.phase, event.seconds, event.nbytes, event.error,
        extra={"ckptcore_event": event},
    )  # fmt: skip


MAX_EVENTS: Final = 10_000
"""The most events that a stored timeline has."""

_OPERATIONS: Final[tuple[Operation, ...]] = ("save", "load", "delete", "upload")
_NAME: Final = r"[a-z][a-z_]{0,39}"
_SAVE_ID: Final = r"[0-9a-f]{16}"
_MOST_MICROSECONDS: Final = 1 << 52
"""In the year 2112; every such number is a float without loss, and a `datetime`."""

_MOST: Final = (1 << 63) - 1


def timeline_to_json(events: Sequence[Event]) -> dict[str, JSON]:
    """Events of one operation, perhaps of several ranks, as columns of JSON; times in whole microseconds.

    The location is left out: a checkpoint can be moved, and where it was written does not concern those who get a copy.
    So is the operation's id. Of more than `MAX_EVENTS` events the longest are kept.

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


def _text(name: str, found: Any, expected: str) -> str:
    if not isinstance(found, str) or re.fullmatch(expected, found) is None:
        _refuse(name, found, f"text that matches {expected}")
    return found


def _error(found: Any) -> str:
    if not isinstance(found, str) or len(found) > ERROR_CHARACTERS:
        _refuse("error", found, f"text of at most {ERROR_CHARACTERS} characters")
    return found


def _refuse(name: str, found: Any, expected: str) -> NoReturn:
    # Of a container only its size: it may be large or deep.
    shown = f"{type(found).__name__} of {len(found)}" if isinstance(found, list | dict) else repr(found)[:80]
    raise CorruptCheckpointError(f"a timeline cannot be read: {name} is {shown}, and expected is {expected}")
