"""Events: the phases of saves, loads and deletions, reported to observers.

A phase is a part of one operation on one rank. Its event is created when the phase ends, with or without an error, on
the thread where it ends. Phases may contain other phases, overlap on several threads, and occur several times.

::

    phase                begins                      ends                      thread      caller     contains
    -------------------  --------------------------  ------------------------  ----------  ---------  ---------------
    save                 the call of a save          the commit, or the error  both        partly     all of these
      blocking           the call of a save          the call returns          caller's    waits      see below
      wait_for_previous  another save is running     that save has ended       caller's    waits
      describe           the state is examined       each leaf has a record    caller's    waits      exchange
      copy               the first leaf is copied    all copies are complete   caller's    waits
      claim              the location is claimed     this save has the claim   background  continues
      write              the first write begins      this rank has written     background  continues
      exchange           this rank has finished      all ranks have reported   both        see below
      commit             the root is built           the checkpoint exists     background  continues
    load                 the call of a load          the value is returned     caller's    waits      all below
      open               the root is looked up       the tree is matched       caller's    waits
      read               the first read begins       all leaves are built      caller's    waits
      restore            an object's state is read   the object has taken it   caller's    waits
    delete               the deletion begins         its files are removed     background  continues
      clean              the steps are examined      the clean-up has ended    background  continues  deletes
    upload               the upload begins           the far tier has it       background  continues

- ``blocking`` is the time during which the caller of a save cannot train. In an asynchronous save it contains
  ``wait_for_previous``, ``describe`` and ``copy``. With a memory bound, copying continues while earlier parts are
  written. In a blocking save it contains all phases.
- ``save``, ``load``, ``delete`` and ``upload`` are whole operations. Their phases may run in an order that differs from
  the table.
- A ``Checkpointer`` deletes and cleans. When it opens, it removes the files of interrupted saves. After each save, it
  removes the steps that its policy does not keep. Each ``clean``, and each ``delete`` in it, is a separate operation.
- A ``Checkpointer`` with a near tier uploads steps. Each ``upload`` is a separate operation. If a step is not uploaded,
  the error of the event gives the reason.
- At least one ``exchange`` is part of ``describe``; others follow ``claim``, ``write`` and ``commit``. If an exchange
  is long, this rank waited for a slower rank. A single process has no ``exchange``. The caller waits for an exchange if
  it waits for the phase that the exchange belongs to.
- ``load_async`` has the phases of ``load``, on a background thread.
- The bytes of an event are the bytes of arrays and files that the phase moved on this rank. None if the phase moved no
  bytes, or if their number is unknown.

Every event is also logged at DEBUG by the logger ``ckptcore.events``. The log record has the event as the attribute
``ckptcore_event``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeAlias, cast, runtime_checkable

from ckptcore.model.tree import JSON
from ckptcore.progress import ByteProgress
from ckptcore.redaction import redacted, redacted_location

if TYPE_CHECKING:
    import logging

__all__ = [
    "ERROR_CHARACTERS",
    "MAX_EVENTS",
    "BeginObserver",
    "Event",
    "Observer",
    "Operation",
    "Phase",
    "Recording",
    "RunningPhase",
    "logger_named",
    "readable_events",
    "timeline_to_json",
]

Operation: TypeAlias = Literal["save", "load", "delete", "upload"]
"""A whole operation. Also the name of the phase that spans it."""

Phase: TypeAlias = Literal[
    "save", "blocking", "wait_for_previous", "describe", "copy", "claim", "write", "exchange", "commit",
    "load", "open", "read", "restore",
    "delete", "clean",
    "upload",
]  # fmt: skip
"""A part of an operation. The table in the docstring of the module lists when each phase begins and ends."""

ERROR_CHARACTERS: Final = 500
"""Maximum number of characters of an error in an event."""


def logger_named(name: str) -> logging.Logger:
    """Return a logger that removes the secrets of URLs from its records, including the errors of other libraries.

    If the program has not imported `logging`, which takes as long as a small save, the logger does so when it is used.
    """
    return _logger(name) if "logging" in sys.modules else cast("logging.Logger", _LaterLogger(name))


class _LaterLogger:
    """A logger that is not created before it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        return getattr(_logger(self._name), attribute)


def _logger(name: str) -> logging.Logger:
    import logging  # slow: see `logger_named`

    package = logging.getLogger("ckptcore")
    if not package.handlers:
        # If a program does not configure logging, Python prints the warnings of libraries. This handler prevents it.
        package.addHandler(logging.NullHandler())
    logger = logging.getLogger(name)
    logger.addFilter(_hide_secrets)  # does nothing the second time
    return logger


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Redact the message and the traceback of a log record. Keep the record."""
    message = record.getMessage()
    if (hidden := redacted(message)) != message:
        record.msg, record.args = hidden, ()
    if record.exc_info and record.exc_info[1] is not None:
        import traceback  # only errors need it

        printed = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
        if (hidden := redacted(printed)) != printed:
            record.exc_info, record.exc_text = None, hidden
    return True


_LOGGER: Final = logger_named("ckptcore.events")

_DEBUG: Final = 10
"""The level `logging.DEBUG`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A phase that has ended.

    Attributes:
        phase: the name of the phase, a `Phase`. A timeline that a newer version stored may have further names.
        operation: the operation that the phase is part of.
        location: the path or URL that is saved, loaded, deleted or uploaded, without secrets.
        step: the training step; None outside a `Checkpointer`.
        rank: the rank of the process in the job.
        began: start of the phase in seconds since the epoch, UTC. Differences within one operation are measured by a
            monotonic clock.
        seconds: duration, measured by a monotonic clock.
        nbytes: number of bytes moved; None if no bytes were moved, or if their number is unknown.
        error: the error as ``Type: text``, at most `ERROR_CHARACTERS` long; None if the phase succeeded.
        save_id: the id of the save that writes, or wrote, the checkpoint; None while it is unknown.
        operation_id: a unique id of the operation on this rank; empty in a stored timeline.
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
        """End of the phase in seconds since the epoch, UTC."""
        return self.began + self.seconds


Observer: TypeAlias = Callable[[Event], None]
"""A function that is called with each event, on the thread where the phase ended. Several threads may call it
concurrently. It should be quick, because the operation waits for it. Its errors are logged and not raised. An observer
may be a `BeginObserver`, too."""


@runtime_checkable
class BeginObserver(Protocol):
    """An `Observer` that also hears when phases begin, such as one that looks for phases that do not end."""

    def __call__(self, event: Event) -> None:
        """See `Observer`."""

    def began(self, event: Event) -> None:
        """Called when a phase begins, on the thread that enters it. `seconds` is 0, and `nbytes` may be None.

        The event with which the phase ends has the same `phase`, `operation_id` and `began`.
        """


class RunningPhase:
    """A running phase, as a context manager. The phase ends with the block. Errors propagate.

    Attributes:
        nbytes: number of bytes moved. Set it inside the block if the number is not known before.
    """

    __slots__ = ("_began", "_name", "_recording", "nbytes")

    def __init__(self, recording: Recording, name: Phase, nbytes: int | None) -> None:
        self._recording = recording
        self._name: Phase = name
        self._began = 0.0
        self.nbytes = nbytes

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        if self._recording._begin_observers:
            self._recording._begin(self._name, self._began, self.nbytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recording._add(self._name, self._began, self.nbytes, error)


class Recording:
    """The events of one operation on one rank. Thread-safe. The operation begins when this object is created.

    Attributes:
        operation, location, step, rank: the values for all events; the location has no secrets.
        save_id: the id of the save, set once it is known. Events that were reported earlier have None instead, but all
            events in `events` have the id.
        progress: counts the bytes of arrays that the operation moves; None if they are not counted.

    Args:
        spans: False if the operation is not reported as begun: `finish` is never called, as for a ``clean``, or
            `begin` is called later.
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
        progress: ByteProgress | None = None,
        spans: bool = True,
    ) -> None:
        self.operation: Operation = operation
        self.location = redacted_location(location)
        self.step = step
        self.rank = rank
        self.save_id = save_id
        self.progress = progress
        self._observers = tuple(observers)
        self._begin_observers = tuple([observer for observer in self._observers if isinstance(observer, BeginObserver)])
        self._failing: list[Observer] = []  # may not be hashable
        self._operation_id = os.urandom(8).hex()
        # Store tuples: creating an Event costs more than the rest of a phase, and often it is never read.
        # Appending to a list and copying it are atomic, so no lock is needed.
        self._rows: list[_Row] = []
        self._unfinished = threading.Lock()  # acquired by the first `finish`, and never released
        self._began = time.perf_counter()
        self._epoch = time.time() - self._began
        if spans and self._begin_observers:
            self.begin()

    def begin(self) -> None:
        """Report to a `BeginObserver` that the operation begins, if ``spans=False`` has postponed it."""
        self._begin(self.operation, self._began, None)

    def phase(self, name: Phase, nbytes: int | None = None) -> RunningPhase:
        """Return a phase. Enter it on the thread that does the work. Costs about a microsecond without observers.

        Args:
            name: the name of the phase.
            nbytes: number of bytes that it moves, if this is known before.
        """
        return RunningPhase(self, name, nbytes)

    def finish(self, nbytes: int | None = None, error: BaseException | None = None) -> None:
        """End the operation: report the event that spans the time since this object was created.

        Only the first call has an effect, so every thread that may end the operation can call this method. Phases that
        end later are still recorded.

        Args:
            nbytes: number of bytes that the operation moved on this rank.
            error: the error that ended it, or None.
        """
        if self._unfinished.acquire(blocking=False):
            self._add(self.operation, self._began, nbytes, error)

    @property
    def events(self) -> tuple[Event, ...]:
        """The phases that have ended, in the order in which they ended. A checkpoint stores them as its timeline."""
        return tuple([self._event(row) for row in list(self._rows)])

    def _begin(self, name: Phase, began: float, nbytes: int | None) -> None:
        for observer in self._begin_observers:
            self._report(observer.began, self._event((name, began, 0.0, nbytes, None)))

    def _add(self, name: Phase, began: float, nbytes: int | None, error: BaseException | None) -> None:
        row = (name, began, time.perf_counter() - began, nbytes, None if error is None else _describe(error))
        self._rows.append(row)
        debugging = "logging" in sys.modules and _LOGGER.isEnabledFor(_DEBUG)
        if self._observers or debugging:
            event = self._event(row)
            if debugging:
                _log(event)
            for observer in self._observers:
                self._report(observer, event)

    def _report(self, observer: Observer, event: Event) -> None:
        try:
            observer(event)
        except Exception:
            # Logged and not raised: a failed observer, such as a metrics collector that cannot be reached, must not
            # fail a save.
            if observer not in self._failing:
                self._failing.append(observer)
                _LOGGER.warning(
                    "the observer %r failed at the phase %s of the %s of %s; the %s continues, and further errors of "
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
"""Phase, start by `time.perf_counter`, seconds, bytes, error."""


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
"""Maximum number of events in a stored timeline."""

_OPERATIONS: Final[tuple[Operation, ...]] = ("save", "load", "delete", "upload")
_COLUMNS: Final = ("phase", "rank", "offset", "duration", "nbytes", "error")
_NAME: Final = r"[a-z][a-z_]{0,39}"
_SAVE_ID: Final = r"[0-9a-f]{16}"
_MAX_MICROSECONDS: Final = 1 << 52
"""Maximum time (in the year 2112) or duration. All smaller numbers are exact as floats and valid for `datetime`."""

_MAX_INTEGER: Final = (1 << 63) - 1


def timeline_to_json(events: Sequence[Event]) -> dict[str, JSON]:
    """Return the events of one operation, perhaps of several ranks, as columns of JSON. Times are whole microseconds.

    The location is left out, because a checkpoint can be moved, and copies of it should not reveal the location. The
    id of the operation is left out, too. If there are more than `MAX_EVENTS` events, only the longest are kept.

    Raises:
        ValueError: there is no event, or the events belong to several operations.
    """
    operations = {(event.operation, event.step) for event in events}
    save_ids = {event.save_id for event in events} - {None}
    if len(operations) != 1 or len(save_ids) > 1:
        raise ValueError(
            "a timeline describes one operation, but these events belong to the operations "
            f"{sorted(operations, key=repr)} and the saves {sorted(save_ids, key=repr)}"
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


def readable_events(timeline: JSON, *, location: str = "") -> tuple[Event, ...]:
    """Return the valid events of a stored timeline, which may be hostile. Leave out invalid events.

    An invalid timeline is no reason to refuse a checkpoint, because the checkpoint can be read without it. If a field
    of the timeline as a whole is invalid, return no events.

    Args:
        timeline: a result of `timeline_to_json`, perhaps with unknown phases of a newer version.
        location: the current location of the checkpoint, for the events.
    """
    columns: list[Any] = [timeline.get(name) for name in _COLUMNS] if isinstance(timeline, dict) else []
    if {*map(type, columns)} != {list}:
        return ()
    try:
        event = _row_reader(timeline, location)
    except _InvalidFieldError:
        return ()
    events: list[Event] = []
    for row in itertools.islice(zip(*columns, strict=False), MAX_EVENTS):
        with contextlib.suppress(_InvalidFieldError):
            events.append(event(row))
    return tuple(events)


class _InvalidFieldError(Exception):
    """A field of a stored timeline is invalid."""


def _row_reader(timeline: JSON, location: str) -> Callable[[Sequence[Any]], Event]:
    """Check the fields that all events of a stored timeline share. Return a function that converts a row to an event.

    Raises:
        _InvalidFieldError: a field is invalid. The returned function also raises this error, for an invalid row.
    """
    if not isinstance(timeline, dict) or timeline.get("operation") not in _OPERATIONS:
        raise _InvalidFieldError
    operation: Any = timeline["operation"]
    step = None if timeline.get("step") is None else _whole(timeline["step"], -_MAX_INTEGER - 1, _MAX_INTEGER)
    save_id = None if timeline.get("save_id") is None else _text(timeline["save_id"], _SAVE_ID)
    first = _whole(timeline.get("began"), 0, _MAX_MICROSECONDS)

    def event(row: Sequence[Any]) -> Event:
        phase, rank, offset, duration, nbytes, error = row
        return Event(
            phase=_text(phase, _NAME),
            operation=operation,
            location=location,
            step=step,
            rank=_whole(rank, 0, 1 << 31),
            began=(first + _whole(offset, 0, _MAX_MICROSECONDS - first)) / 1e6,
            seconds=_whole(duration, 0, _MAX_MICROSECONDS) / 1e6,
            nbytes=None if nbytes is None else _whole(nbytes, 0, _MAX_INTEGER),
            error=None if error is None else _error(error),
            save_id=save_id,
        )

    return event


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _whole(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _InvalidFieldError
    return value


def _text(value: Any, expected: str) -> str:
    if not isinstance(value, str) or re.fullmatch(expected, value) is None:
        raise _InvalidFieldError
    return value


def _error(value: Any) -> str:
    if not isinstance(value, str) or len(value) > ERROR_CHARACTERS:
        raise _InvalidFieldError
    return value
