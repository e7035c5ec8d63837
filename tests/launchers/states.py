"""States that the jobs of the matrix save, and expect from other jobs."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

LAYOUTS: Final = ("safetensors", "ocdbt", "zarr3", "dcp")
STEP: Final = 7
_PATIENCE_SECONDS: Final = 300

ARRAYS: Final = {
    "w": np.arange(16 * 12, dtype=np.float32).reshape(16, 12),
    "e": (np.arange(8 * 6) % 128).reshape(8, 6).astype(ml_dtypes.bfloat16),
    "b": np.arange(7, dtype=np.float32) - 3,  # not divisible by the number of processes
    "i": np.arange(4, dtype=np.int64) << 40,
}
"""The whole arrays, by name."""


def assert_box(name: str, part: Any, box: tuple[slice, ...]) -> None:
    """Assert that a loaded part equals a box of the array."""
    expected = ARRAYS[name][box]
    part = np.asarray(part)
    assert part.dtype == expected.dtype and np.array_equal(part, expected), f"{name}{box}: {part} is not {expected}"


def run_job(
    name: str, leads: bool, save: Callable[[Path, str], None], load: Callable[[Path], None], end: Callable[[], None]
) -> None:
    """Save in every layout, wait for all jobs, and load every layout of every job.

    ``sys.argv`` has the directory and the names of all jobs. An error is written to the file ``NAME.failed`` in this
    directory, and ends all jobs.

    Args:
        name: the name of this job.
        leads: True in the first process of the job.
        save: saves to a directory in a layout.
        load: loads from a directory and compares.
        end: leaves the job.
    """
    directory, names = Path(sys.argv[1]), sys.argv[2].split(",")
    try:
        for layout in LAYOUTS:
            save(directory / f"{name}-{layout}", layout)
        if leads:
            (directory / f"{name}.saved").write_text("")
        _wait(directory, names)
        problems = {}
        for saver in names:
            for layout in LAYOUTS:
                try:
                    load(directory / f"{saver}-{layout}")
                except Exception:  # noqa: BLE001  # every combination is reported
                    problems[f"{saver}-{layout}"] = traceback.format_exc()
        assert not problems, json.dumps(problems, indent=1).replace("\\n", "\n")
        end()
    except BaseException:
        (directory / f"{name}.failed").write_text(traceback.format_exc())
        raise


def _wait(directory: Path, names: list[str]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all((directory / f"{name}.saved").exists() for name in names):
        failed = [name for name in names if (directory / f"{name}.failed").exists()]
        assert not failed, f"{failed} did not save"
        assert time.monotonic() < deadline, "the other jobs did not save in time"
        time.sleep(0.1)
