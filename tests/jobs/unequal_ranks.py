"""Tasks of the programs of jobs: arrays that differ between the ranks, and a rank that calls late."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ckptcore
from ckptcore import Context, PerProcess
from ckptcore.errors import CheckpointError
from ckptcore.job.gathering import LateRanks
from tests.jobs.processes import Place

QUICK = Context(durability="none")


def refusals(place: Place, state: Mapping[str, Any], same: Callable[[Any, Any], bool]) -> dict[str, str]:
    """Save arrays of this rank in each layout, plain and in `PerProcess`. Return the errors for the plain arrays."""
    messages = {}
    for layout in place.layouts:
        location = place.directory / f"{place.size}-{layout}"
        for name, array in state.items():
            try:
                ckptcore.save(location, {"own": array}, layout=layout, context=QUICK)
            except CheckpointError as error:
                messages[f"{layout} {name}"] = str(error)
            assert not location.exists()
        small = {name: array for name, array in state.items() if array.nbytes < 1 << 20}
        wrapped = {name: PerProcess(array) for name, array in small.items()}
        ckptcore.save(location, wrapped, layout=layout, context=QUICK)
        loaded = ckptcore.load(location, wrapped, context=QUICK)
        assert all(same(loaded[name].value, array) for name, array in small.items())
    return messages


class _Lines(logging.Handler):
    """A handler that keeps the log lines, and creates a file for which the late rank waits."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._path.touch()


def wait_for_late_rank(place: Place) -> list[str]:
    """Save on all ranks. The last rank saves after the others have logged. Return the log lines of this rank."""
    LateRanks.first_seconds = 0.1 if place.rank < place.size - 1 else 1e6
    signs = [place.directory / f"logged-{rank}" for rank in range(place.size - 1)]
    lines = _Lines(place.directory / f"logged-{place.rank}")
    logging.getLogger("ckptcore.job").addHandler(lines)
    while place.rank == place.size - 1 and not all(sign.exists() for sign in signs):
        time.sleep(0.01)
    ckptcore.save(place.directory / "late", {"step": 1}, context=QUICK)
    LateRanks.first_seconds = 1e6
    return lines.texts
