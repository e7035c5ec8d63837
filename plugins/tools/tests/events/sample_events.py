"""Events with fixed times."""

from __future__ import annotations

from typing import Any

from ckptcore.events import Event, Operation

BEGAN = 1_700_000_000.0
"""The start of the operations in the tests, in seconds since the epoch."""


def event(phase: str, start: float, seconds: float, *, operation: Operation = "save", **others: Any) -> Event:
    """Return an event that begins `start` seconds after `BEGAN`."""
    fields: dict[str, Any] = {"location": "run/step_12", "step": 12, "rank": 0, "operation_id": "one", **others}
    return Event(phase=phase, operation=operation, began=BEGAN + start, seconds=seconds, **fields)


def async_save(**others: Any) -> tuple[Event, ...]:
    """Return the events of an asynchronous save in one process.

    Its caller waits 0.5 s, including 0.25 s for the previous save.
    """
    return (
        event("wait_for_previous", 0.0, 0.25, **others),
        event("describe", 0.25, 0.125, **others),
        event("copy", 0.375, 0.125, nbytes=4_000_000_000, **others),
        event("blocking", 0.0, 0.5, **others),
        event("claim", 0.5, 0.125, **others),
        event("write", 0.625, 2.0, nbytes=4_000_000_000, **others),
        event("commit", 2.625, 0.125, nbytes=1500, **others),
        event("save", 0.0, 2.75, nbytes=4_000_001_500, **others),
    )
