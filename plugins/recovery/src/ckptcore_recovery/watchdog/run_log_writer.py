"""RunLog: writes the log of one incarnation of a job. `read_run_log` reads it."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from ckptcore.commit.location import LocationLike, open_directory, shown_location
from ckptcore.context import Context, default_context
from ckptcore.errors import CheckpointError
from ckptcore.events import ERROR_CHARACTERS, Event, logger_named
from ckptcore.model import JSON
from ckptcore.protocols import StorageBackend
from ckptcore.redaction import redacted
from ckptcore.runtime import runtime_of
from ckptcore.training.path_directory import as_run_directory
from ckptcore.training.run_directory import RunDirectory
from ckptcore_recovery.watchdog.run_log import (
    FORMAT,
    LOG_DIRECTORY,
    MAX_NOTES,
    MAX_SEGMENT_BYTES,
    NOTE_KIND,
    Outcome,
    checked_step,
    next_number,
    outcome_of,
)
from ckptcore_recovery.watchdog.time_account import SECOND, Activity, TimeAccount

_LOGGER: Final = logger_named("ckptcore.recovery")

_WRITE_SECONDS: Final = 10.0
"""Time between two writes. If a process is killed that writes its own log, at most this time is missing."""

_CLOSE_SECONDS: Final = 30.0
"""Time that `close` waits for the last write."""

_SEGMENT_BYTES: Final = 1 << 17
"""Size after which a new segment begins. Every write puts the whole segment, because object stores cannot append."""

_ACTIVITIES: Final[Mapping[str, Activity]] = {"blocking": "save", "load": "load"}
"""The phases during which their caller waits."""


class RunLog:
    """Writes how an incarnation of a job spends its time, from now on. Thread-safe.

    A `Watchdog` writes this log from its monitor, which outlives the training process. Without one, create it in every
    process of the job, once the process has joined the job, pass it as an observer, report the steps, and close it::

        with RunLog("runs/1") as log:
            context = ckptcore.Context(observers=[log])
            with ckptcore.Checkpointer("runs/1", context=context) as run:
                for step in range(...):
                    log.step(step)
                    ...

    Only rank 0 writes. A thread writes every 10 s, so no call waits for the storage. Errors of the storage are logged,
    and the next write repeats what is missing. Calls after `close` do nothing.

    All methods take `at`, the time of the event by ``time.monotonic()`` on this host, also of another process; None:
    now.
    """

    def __init__(
        self,
        directory: LocationLike | RunDirectory,
        *,
        processes: int | None = None,
        began: float | None = None,
        context: Context | None = None,
    ) -> None:
        """Begin an incarnation.

        Args:
            directory: the directory of the run.
            processes: the size of the job. This process then writes the log. None: the size and the rank of the job of
                the context.
            began: when the program began; see `at` above. None: now.
            context: options of the storage.

        Raises:
            InvalidLocationError: the directory is neither a path nor a URL.
            UnknownPluginError: no plugin supports the scheme.
        """
        context = context or default_context()
        location = as_run_directory(directory).location
        job = runtime_of(context).job() if processes is None else None
        now = time.monotonic()
        self._epoch = now if began is None else began
        wall = round((time.time() - now + self._epoch) * SECOND)
        header: dict[str, JSON] = {"format": FORMAT, "began": wall, "processes": processes or (job.size if job else 1)}
        self._header = json.dumps(header)
        self._display = shown_location(location)
        self._store: StorageBackend = open_directory(location, runtime_of(context).storages, to_write=True)
        self._id = os.urandom(4).hex()
        self._directory: str | None = None
        self._account = TimeAccount()
        self._lock = threading.RLock()  # a handler of a signal may save while this thread reports a step
        self._lines: list[str] = []
        self._segment = 0
        self._notes = 0
        self._outcome: Outcome | None = None if job is None or job.rank == 0 else "finished"
        self._is_failing = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self._outcome is None:
            self._thread = threading.Thread(target=self._write_until_closed, name="ckptcore-run-log", daemon=True)
            self._thread.start()

    def _time(self, at: float | None) -> int:
        return max(0, round(((time.monotonic() if at is None else at) - self._epoch) * SECOND))

    # --- what happens -------------------------------------------------------------------------------------------------

    def step(self, step: int, *, at: float | None = None) -> None:
        """Report that a step begins. The previous step ends, unless a save, a load or `end_step` has ended it.

        Args:
            step: its number. A number that is not larger than the last one sets the run back.
            at: see the class.
        """
        step = checked_step(step)
        with self._lock:
            if self._outcome is None:
                self._account.begin_step(step, self._time(at))

    def end_step(self, *, at: float | None = None) -> None:
        """Report that the step has ended and the next does not begin yet, for example before an evaluation."""
        with self._lock:
            if self._outcome is None:
                self._account.end_step(self._time(at))

    def began(self, event: Event, *, at: float | None = None) -> None:
        """Report that a phase of a save or load begins. See `ckptcore.events.BeginObserver`."""
        activity = _ACTIVITIES.get(event.phase)
        with self._lock:
            if activity is not None and self._outcome is None:
                self._account.begin(_key(event), activity, self._time(at))

    def __call__(self, event: Event, *, at: float | None = None) -> None:
        """Report that a phase of a save, load or upload has ended. See `ckptcore.events.Observer`."""
        is_saved = event.phase == "blocking" and event.error is None and event.step is not None
        with self._lock:
            if event.phase in _ACTIVITIES and self._outcome is None:
                self._account.end(_key(event), self._time(at), saved=is_saved)
        if event.phase == "load" or (event.phase == event.operation and event.error is not None):
            self.note(event.phase, step=event.step, seconds=event.seconds, text=event.error, at=at)

    def note(
        self,
        kind: str,
        *,
        step: int | None = None,
        seconds: float | None = None,
        text: str | None = None,
        at: float | None = None,
    ) -> None:
        """Add a note, such as a stall. The log of an incarnation has at most 1,000.

        Args:
            kind: a word in small letters.
            step: the step that it concerns.
            seconds: how long it took.
            text: what happened. Secrets of URLs are removed, and at most 500 characters are kept.
            at: the time of its end; see the class.

        Raises:
            ValueError: `kind` is not a word.
        """
        if NOTE_KIND.fullmatch(kind) is None:
            raise ValueError(f"note({kind!r:.60}): expected a word of small letters, such as 'stall'")
        note = {
            "note": kind,
            "at": self._time(at),
            "step": step,
            "took": None if seconds is None else round(seconds * SECOND),
            "text": None if text is None else redacted(text)[:ERROR_CHARACTERS],
        }
        with self._lock:
            self._notes += 1
            if self._notes <= MAX_NOTES and self._outcome is None:
                self._lines.append(json.dumps({name: value for name, value in note.items() if value is not None}))

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, outcome: Outcome = "finished", *, at: float | None = None) -> None:
        """End the incarnation, and write. Waits up to 30 s for a slow storage. Further calls do nothing.

        Args:
            outcome: "finished" if the job ended as intended, or will continue later. "failed" if it must start again
                because of an error.
            at: see the class.
        """
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
            now = self._time(at)
            if outcome == "finished":
                self._account.end_step(now)
            else:
                self._account.advance(now)
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the log. See `outcome_of`."""
        self.close(outcome_of(error))

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._closing.is_set()
            try:
                self._write()
                self._is_failing = False
            except (CheckpointError, OSError) as error:
                if not self._is_failing:
                    _LOGGER.warning(
                        "the log of the run %s cannot be written; the training continues, and it is tried again: %s",
                        self._display, error,
                    )  # fmt: skip
                self._is_failing = True
            if not is_closing:
                self._closing.wait(_WRITE_SECONDS)

    def _write(self) -> None:
        """Put the current segment. Begin a new one if it is large."""
        with self._lock:
            self._lines += [json.dumps(period) for period in self._account.take_closed()]
            while sum(map(len, self._lines)) > MAX_SEGMENT_BYTES // 2:  # the storage has failed for days
                del self._lines[: len(self._lines) // 2 + 1]
            lines = [self._header, *self._lines, self._state()]
            written = len(self._lines)
        if self._directory is None:
            self._directory = f"{LOG_DIRECTORY}/{next_number(self._store):06d}-{self._id}"
        data = "\n".join([*lines, ""]).encode("ascii")
        self._store.put(f"{self._directory}/{self._segment:06d}.jsonl", data)
        if len(data) > _SEGMENT_BYTES:
            self._segment += 1
            with self._lock:
                del self._lines[:written]

    def _state(self) -> str:
        """Return the line with the state. Until the end, the running activity lasts up to now."""
        now = self._time(None)
        account = copy.copy(self._account)  # events of another process may arrive later than they happened
        if self._outcome is None:
            account.advance(now)
        period = account.open_period()
        alive = period.ended + account.unfinished
        state = {
            "alive": alive,
            "wall": round(time.time() * SECOND) - now + alive,
            "period": period,
            "unfinished": account.unfinished,
            "outcome": self._outcome,
        }
        return json.dumps(state)


def _key(event: Event) -> str:
    return f"{event.operation_id} {event.phase}"
