"""Reproducible saves with fixed save ids and times, for comparison with golden checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from ckptcore.commit.root import new_save_id, this_writer
from ckptcore.events import Event, timeline_to_json
from ckptcore.model.tree import JSON
from ckptcore.saving.requests import save_created

_CREATED: Final = "2026-01-02T03:04:05.678+00:00"
_CREATED_NANOSECONDS: Final = 1_767_323_045_678_000_000


@contextmanager
def fixed_saves(first: int = 1) -> Iterator[None]:
    """Give saves ascending ids, a fixed time, a fixed writer, and a timeline without durations.

    Affects all threads of the process. The ids are reproducible only if one thread saves.

    Args:
        first: the first save id, as a number.
    """
    numbers = itertools.count(first)

    def next_save_id() -> str:
        return f"{next(numbers):016x}"

    def fixed_created() -> str:
        return _CREATED

    def fixed_writer() -> Mapping[str, str]:
        return {"ckptcore": "0.1.0"}

    fixed: Sequence[tuple[object, object]] = [
        (new_save_id, next_save_id),
        (save_created, fixed_created),
        (this_writer, fixed_writer),
        (timeline_to_json, _fixed_timeline),
    ]
    time_ns = time.time_ns
    _replace(fixed)
    time.time_ns = lambda: _CREATED_NANOSECONDS
    try:
        yield
    finally:
        time.time_ns = time_ns
        _replace([(replacement, original) for original, replacement in fixed])


def _fixed_timeline(events: Sequence[Event]) -> JSON:
    """Return a timeline without times, sorted by rank and name of the phase.

    It is sorted, because two threads can end their phases in any order. The phase "blocking" is left out, because it
    may end after the commit.
    """
    kept = sorted([event for event in events if event.phase != "blocking"], key=lambda event: (event.rank, event.phase))
    return timeline_to_json([dataclasses.replace(event, began=0.0, seconds=0.0) for event in kept])


def _replace(functions: Sequence[tuple[object, object]]) -> None:
    """Replace functions in every module of ckptcore and of its distributions that has imported them."""
    for module in [module for name, module in sys.modules.items() if name.startswith("ckptcore")]:
        if module.__name__ == __name__:
            continue
        for name, value in list(vars(module).items()):
            for original, replacement in functions:
                if value is original:
                    setattr(module, name, replacement)
