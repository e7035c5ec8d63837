"""A program that saves, loads, resumes and deletes while system calls fail. It needs `missing_calls.c` preloaded.

Arguments: a directory, and rows ``CALLS:NUMBER``, with the names of calls joined by ``+`` and an error number. Prints
one line of JSON for each row: the results, how often each call failed, and the warnings.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptcore
from ckptcore.builtin import local_calls
from ckptcore.builtin.local_files import ColdReader
from ckptcore.errors import CheckpointError
from ckptcore.policies import LatestN

CALLS: Final = (
    "exchange", "no-replace", "flock-directory", "flock-file", "fallocate", "direct-open", "direct-read", "link",
    "openat2", "fsync-directory", "writeback",
)  # fmt: skip


def state(number: int) -> dict[str, Any]:
    """Return a state. Its file is so large that the storage allocates it in advance and reads it with direct I/O."""
    return {"w": np.full(300_000, number, np.float32), "n": number}


def check(loaded: Any, number: int) -> None:
    """Assert that a state was loaded."""
    assert loaded["n"] == number and (loaded["w"] == number).all()


def run(directory: Path, context: ckptcore.Context) -> None:
    """Save steps in two successive jobs, which delete older steps."""
    for first in (1, 4):
        with ckptcore.Checkpointer(directory, preservation_policy=LatestN(2), context=context) as run:
            assert run.latest == (None if first == 1 else 3)
            for step in range(first, first + 3):
                run.save(step, state(step))
            run.wait()
            check(ckptcore.CheckpointReader(directory, context=context).load(), first + 2)
            run.delete(first + 1)
            run.wait()
            run.save(first + 1, state(first + 1))
            run.save(first + 1, state(first + 2), overwrite=True)
        assert run.steps == (first + 1, first + 2)


def sessions(directory: Path, context: ckptcore.Context) -> None:
    """Save two sessions of a partial save, and finalize it."""
    for number in (1, 2):
        with ckptcore.partial(directory, context=context) as session:
            session.save({f"part{number}": state(number)})
    ckptcore.partial(directory, context=context).finalize()
    check(ckptcore.load(directory, context=context)["part2"], 2)


def steps(directory: Path, context: ckptcore.Context) -> list[tuple[str, Callable[[], Any]]]:
    """Return the tasks in their order."""
    first = directory / "one"
    large = {"w": np.zeros(5 << 20, np.uint8)}  # so large that its writeback begins early
    return [
        ("large", lambda: ckptcore.save(directory / "large", large, context=context)),
        ("save", lambda: ckptcore.save(first, state(1), context=context)),
        ("load", lambda: check(ckptcore.load(first, context=context), 1)),
        ("overwrite", lambda: ckptcore.save(first, state(2), overwrite=True, context=context)),
        ("non-atomic", lambda: ckptcore.save(first, state(3), overwrite="non-atomic", context=context)),
        ("load again", lambda: check(ckptcore.load(first, context=context), 3)),
        ("open", lambda: int(ckptcore.open(first, context=context)["w"][5])),
        ("sessions", lambda: sessions(directory / "partial", context)),
        ("save_async", lambda: ckptcore.save_async(directory / "two", state(4), context=context).result()),
        ("run", lambda: run(directory / "run", context)),
        ("delete", lambda: ckptcore.delete(first, context=context)),
    ]


def attempt(work: Callable[[], Any]) -> str:
    """Run a task. Return the text of its error, or "done"."""
    try:
        work()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  # all rows are reported
        return f"unexpected {type(error).__name__}: {error}"
    return "done"


class _Warnings(logging.Handler):
    """A handler that collects warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def main() -> None:
    """Run the tasks for each row."""
    library = ctypes.CDLL(None)
    warnings = _Warnings()
    logging.getLogger("ckptcore").addHandler(warnings)
    ColdReader.is_cold = lambda *_: True  # type: ignore[method-assign]  # new files are in the page cache
    for number, row in enumerate(sys.argv[2:]):
        names, _, error = row.partition(":")
        chosen = [CALLS.index(name) for name in names.split("+")]
        warnings.found.clear()
        local_calls._opener.cache_clear()
        before = [library.count_missing(call) for call in chosen]
        for call in chosen:
            library.set_missing(call, int(error))
        directory = Path(sys.argv[1]) / str(number)
        is_durable = "fsync" in names or "writeback" in names
        context = ckptcore.Context(durability="full" if is_durable else "none")
        happened = {name: attempt(work) for name, work in steps(directory, context)}
        for call in chosen:
            library.set_missing(call, 0)
        failed = [library.count_missing(call) - count for call, count in zip(chosen, before, strict=True)]
        left = sorted(os.path.relpath(path, directory) for path in directory.glob("**/.*"))
        print(
            json.dumps({"row": row, "happened": happened, "failed": failed, "warnings": warnings.found, "left": left})
        )


if __name__ == "__main__":
    main()
