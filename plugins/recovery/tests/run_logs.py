"""Run logs that tests write by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ckptcore_recovery.watchdog.run_log import LOG_DIRECTORY
from ckptcore_recovery.watchdog.time_account import SECOND

HEADER: Final = {"format": 1, "began": 1000, "processes": 2}


def write_segment(run: Path, *lines: object, incarnation: str = "000001-00000000", number: int = 0) -> Path:
    """Write a segment. Texts are lines as they are; other values are JSON."""
    segment = run / LOG_DIRECTORY / incarnation / f"{number:06d}.jsonl"
    segment.parent.mkdir(parents=True, exist_ok=True)
    segment.write_text("\n".join([line if isinstance(line, str) else json.dumps(line) for line in lines]) + "\n")
    return segment


def write_incarnation(run: Path, number: int, began: int, *periods: list[int], notes: Any = (), **state: Any) -> None:
    """Write the log of an incarnation. All times are seconds, also those of the periods; see `Period`."""
    scaled = [
        [value * SECOND if at in (0, 1, 5, 6, 7, 8) else value for at, value in enumerate(one)] for one in periods
    ]
    ended = scaled[-1][1]
    alive = ended + state.get("unfinished", 0) * SECOND
    epoch = (1_790_000_000 + began) * SECOND
    last = [ended, ended, *[0] * 8]
    write_segment(
        run,
        {**HEADER, "began": epoch, "processes": 8},
        *scaled,
        *notes,
        {"alive": alive, "wall": epoch + alive, "period": last, **state, "unfinished": alive - ended},
        incarnation=f"{number:06d}-00000000",
    )


def write_run(run: Path) -> None:
    """Write a run of three incarnations. The first two fail; the last one may be running."""
    notes = [
        {"note": "save", "at": 9 * SECOND, "step": 40, "text": "StorageError: \x1b[31mfull"},
        {"note": "stall", "at": 9 * SECOND, "step": 50, "took": 60 * SECOND},
        {"note": "load", "at": 10 * SECOND, "step": 100, "took": 5 * SECOND},
    ]
    start = [0, 100, 0, 0, 0, 0, 0, 0, 100, 0]
    write_incarnation(run, 1, 0, start, [100, 1120, 1, 120, 120, 1000, 20, 0, 0, 10], unfinished=5, outcome="failed")
    write_incarnation(
        run, 2, 1200, [0, 100, 0, 0, 0, 0, 0, 60, 40, 0], [100, 610, 101, 160, 60, 500, 10, 0, 0, 5],
        notes=notes, outcome="failed",
    )  # fmt: skip
    write_incarnation(run, 3, 1900, start, [100, 610, 151, 210, 60, 490, 10, 0, 10, 5])
