"""Export of events as step statistics: one record per save and per load, with the field names of goodput tools.

The fields are those of `SaveStepStatistics` and `RestoreStepStatistics` in
``orbax/checkpoint/_src/logging/step_statistics.py`` (orbax-checkpoint 0.12). ``checkpoint_badput_calculator.py`` of
ml-goodput-measurement 0.2 reads them from log entries. It requires a number for each duration, so no duration is None.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

from ckptcore.events import Event, logger_named

__all__ = ["StepStatisticsObserver", "log_step_statistics"]

_MAX_OPEN_OPERATIONS: Final = 64
"""Maximum number of unfinished operations. Beyond it, the oldest one is dropped: its last event is probably lost."""

_COMMIT_PHASES: Final = ("write", "exchange", "commit")
_SAVE_PHASES: Final = ("save", "blocking", "wait_for_previous", *_COMMIT_PHASES)

_LOGGER: Final = logger_named("ckptcore.statistics")


def log_step_statistics(record: Mapping[str, object]) -> None:
    """Log a record at INFO by the logger ``ckptcore.statistics``, as the attribute ``ckptcore_statistics``."""
    _LOGGER.info(
        "%s of step %s in %s", record["event_type"], record["step"], record["directory"],
        extra={"ckptcore_statistics": dict(record)},
    )  # fmt: skip


class StepStatisticsObserver:
    """An observer that combines the events of an operation into one record. Thread-safe.

    The record of a load is written when the load ends. The record of a save is written when the save has ended and its
    call has returned. An operation that failed while its caller was blocked is not recorded. A save that failed later,
    in the background, is recorded, because it blocked its caller as long as a successful save. Times are seconds since
    the epoch. ckptcore has no events about preemption, so ``reached_preemption`` is False and
    ``preemption_received_at`` is None. Old steps are listed in the background, so ``get_old_steps_duration_secs`` is 0.

    Each rank with this observer writes its own records.

    Args:
        write: called with each record, on the thread on which the operation ended. Its errors are logged.
    """

    def __init__(self, write: Callable[[Mapping[str, object]], None] = log_step_statistics) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._open: dict[str, dict[str, Event]] = {}
        self._last_saved: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Add an event. The last event of an operation writes the record."""
        with self._lock:
            if event.operation == "load":
                record = self._add_load_event(event)
            elif event.operation == "save" and event.phase in _SAVE_PHASES:
                record = self._add_save_event(event)
            else:
                record = None
        if record is not None:
            self._write(record)

    def _add_load_event(self, event: Event) -> Mapping[str, object] | None:
        phases = self._phases(event)
        if event.phase != "load":
            # Keep the first phase, because the record counts the checkpointer's own time from its start.
            phases.setdefault("first", event)
            return None
        del self._open[event.operation_id]
        return None if event.error is not None else _load_record(event, phases.get("first"))

    def _add_save_event(self, event: Event) -> Mapping[str, object] | None:
        phases = self._phases(event)
        phases[event.phase] = event
        whole, blocking = phases.get("save"), phases.get("blocking")
        # A small save can end before its call returns, so either event can come last.
        if whole is None or blocking is None:
            return None
        del self._open[event.operation_id]
        before = self._last_saved.get(_directory(event))
        if whole.error is None:
            self._last_saved[_directory(event)] = whole.ended
        return None if blocking.error is not None else _save_record(phases, whole, blocking, before)

    def _phases(self, event: Event) -> dict[str, Event]:
        phases = self._open.setdefault(event.operation_id, {})
        if len(self._open) > _MAX_OPEN_OPERATIONS:
            del self._open[next(iter(self._open))]
        return phases


def _save_record(
    phases: Mapping[str, Event], whole: Event, blocking: Event, before: float | None
) -> Mapping[str, object]:
    wait = phases.get("wait_for_previous")
    wait_start = blocking.began if wait is None else wait.began
    wait_seconds = 0.0 if wait is None else wait.seconds
    # The caller first waits for the previous save. After this wait, the new save blocks the caller.
    own_start = blocking.began if wait is None else wait.ended
    return {
        "step": whole.step,
        "event_type": "save",
        "directory": _directory(whole),
        "reached_preemption": False,
        "preemption_received_at": None,
        # Uses the end of the commit, because the order of the events "save" and "blocking" is random if both end at
        # about the same time.
        "synchronous": max([phases[name].ended for name in _COMMIT_PHASES if name in phases], default=whole.ended)
        <= blocking.ended,
        "wait_for_prev_start_time": wait_start,
        "wait_for_prev_duration_secs": wait_seconds,
        "time_between_consecutive_saves_sec": None if before is None else wait_start - before,
        "checkpointer_blocking_start_time": own_start,
        "checkpointer_blocking_duration_secs": max(blocking.ended - own_start, 0.0),
        "get_old_steps_start_time": blocking.ended,
        "get_old_steps_duration_secs": 0.0,
        "checkpoint_manager_blocking_start_time": blocking.began,
        "checkpoint_manager_blocking_duration_secs": blocking.seconds,
    }


def _load_record(whole: Event, first: Event | None) -> Mapping[str, object]:
    own_start = whole.began if first is None else first.began
    return {
        "step": whole.step,
        "event_type": "restore",
        "directory": _directory(whole),
        "checkpointer_start_time": own_start,
        "checkpointer_duration_secs": max(whole.ended - own_start, 0.0),
        "checkpoint_manager_start_time": whole.began,
        "checkpoint_manager_duration_secs": whole.seconds,
    }


def _directory(event: Event) -> str:
    """Return the directory of the steps. If the operation has no step, return its location."""
    return event.location if event.step is None else event.location.rpartition("/")[0] or event.location
