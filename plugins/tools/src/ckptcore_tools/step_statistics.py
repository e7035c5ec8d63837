"""Events as step statistics: one record per save and per load, with the names that goodput tools read.

The names and their meaning are those of `SaveStepStatistics` and `RestoreStepStatistics` in
``orbax/checkpoint/_src/logging/step_statistics.py`` (orbax-checkpoint 0.12). ``checkpoint_badput_calculator.py`` of
ml-goodput-measurement 0.2 reads them from log entries; it takes each duration of a record as a number, so none is None.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from ckptcore.events import Event

__all__ = ["StepStatisticsObserver", "log_step_statistics"]

_MOST_OPEN: Final = 64
"""Operations that are remembered at once; an older one has not ended as it should and is forgotten."""

_TO_COMMIT: Final = ("write", "exchange", "commit")
_OF_A_SAVE: Final = ("save", "blocking", "wait_for_previous", *_TO_COMMIT)

_LOGGER: Final = logging.getLogger("ckptcore.statistics")


def log_step_statistics(record: Mapping[str, object]) -> None:
    """Log a record at INFO by the logger ``ckptcore.statistics``; it is the attribute ``ckptcore_statistics`` of the entry."""
    _LOGGER.info(
        "%s of step %s in %s", record["event_type"], record["step"], record["directory"],
        extra={"ckptcore_statistics": dict(record)},
    )  # fmt: skip


class StepStatisticsObserver:
    """An observer that gathers the events of an operation into one record. Any thread.

    A save gives a record once it is over and its call has returned, a load when it is over. One that failed while its
    caller waited gives none; a save that failed later does, because its caller has waited all the same. Times are
    seconds since the epoch. What ckptcore does not tell by events is as in a record of a job where it did not happen:
    ``reached_preemption`` is False and ``preemption_received_at`` None. Old steps are found in the background, so
    ``get_old_steps_duration_secs`` is 0.

    Every rank that has this observer writes records of its own.

    Args:
        write: is given each record, on the thread on which the operation ended. An error of its own goes where those of
            observers go: into the log.
    """

    def __init__(self, write: Callable[[Mapping[str, object]], None] = log_step_statistics) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._open: dict[str, dict[str, Event]] = {}
        self._last_saved: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Take an event; the last one of an operation writes its record."""
        with self._lock:
            if event.operation == "load":
                record = self._take_of_load(event)
            elif event.operation == "save" and event.phase in _OF_A_SAVE:
                record = self._take_of_save(event)
            else:
                record = None
        if record is not None:
            self._write(record)

    def _take_of_load(self, event: Event) -> Mapping[str, object] | None:
        phases = self._phases(event)
        if event.phase != "load":
            # The first phase of all is where the checkpoint itself begins to be looked at.
            phases.setdefault("first", event)
            return None
        del self._open[event.operation_id]
        return None if event.error is not None else _restored(event, phases.get("first"))

    def _take_of_save(self, event: Event) -> Mapping[str, object] | None:
        phases = self._phases(event)
        phases[event.phase] = event
        whole, blocking = phases.get("save"), phases.get("blocking")
        # A small save may be over before its call has returned, so either can come last.
        if whole is None or blocking is None:
            return None
        del self._open[event.operation_id]
        before = self._last_saved.get(_directory(event))
        if whole.error is None:
            self._last_saved[_directory(event)] = whole.ended
        return None if blocking.error is not None else _saved(phases, whole, blocking, before)

    def _phases(self, event: Event) -> dict[str, Event]:
        phases = self._open.setdefault(event.operation_id, {})
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        return phases


def _saved(phases: Mapping[str, Event], whole: Event, blocking: Event, before: float | None) -> Mapping[str, object]:
    wait = phases.get("wait_for_previous")
    waited_from = blocking.began if wait is None else wait.began
    waited = 0.0 if wait is None else wait.seconds
    # What its caller waited for is the previous save until the wait is over, and this one from then on.
    own = blocking.began if wait is None else wait.ended
    return {
        "step": whole.step,
        "event_type": "save",
        "directory": _directory(whole),
        "reached_preemption": False,
        "preemption_received_at": None,
        # By the last that was done for the commit: whether the save is told of as over before or after its call returns
        # is chance where both happen at once.
        "synchronous": max([phases[name].ended for name in _TO_COMMIT if name in phases], default=whole.ended)
        <= blocking.ended,
        "wait_for_prev_start_time": waited_from,
        "wait_for_prev_duration_secs": waited,
        "time_between_consecutive_saves_sec": None if before is None else waited_from - before,
        "checkpointer_blocking_start_time": own,
        "checkpointer_blocking_duration_secs": max(blocking.ended - own, 0.0),
        "get_old_steps_start_time": blocking.ended,
        "get_old_steps_duration_secs": 0.0,
        "checkpoint_manager_blocking_start_time": blocking.began,
        "checkpoint_manager_blocking_duration_secs": blocking.seconds,
    }


def _restored(whole: Event, first: Event | None) -> Mapping[str, object]:
    own = whole.began if first is None else first.began
    return {
        "step": whole.step,
        "event_type": "restore",
        "directory": _directory(whole),
        "checkpointer_start_time": own,
        "checkpointer_duration_secs": max(whole.ended - own, 0.0),
        "checkpoint_manager_start_time": whole.began,
        "checkpoint_manager_duration_secs": whole.seconds,
    }


def _directory(event: Event) -> str:
    """Where the steps are; the location itself if it is no step."""
    return event.location if event.step is None else event.location.rpartition("/")[0] or event.location
