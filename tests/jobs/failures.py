"""Jobs of real processes with a failing process. They are started, checked, and continued by a smaller job."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from ckptcore_testing.servers import free_port

import ckptcore
from ckptcore.errors import CheckpointNotFoundError
from tests.jobs.failing_job import PATIENCE_SECONDS, Cell, told_file

_MAY_COMMIT: Final = {
    "export",
    "rename",
    "finish",
    "after exchange 4",
    "after exchange 5",
    "after commit 1",
    "written",
    "write",
}
"""Points at which a save may commit without the victim, or by the leader after it paused.

Exchange 4 of a save ends the stage "claim", exchange 5 the stage "write".
"""


class _Processes:
    """The processes of one job."""

    def __init__(self, program: ModuleType, cell: Cell, size: int, place: Path, *, leader_serves: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        self.size = size
        self._place = place
        for rank in range(size):
            told_file(place, rank).unlink(missing_ok=True)  # remains from the previous job
        self._errors = [f"{place}.{size}.{rank}.errors" for rank in range(size)]
        port = free_port()
        self._server = None if leader_serves else program.serve(port)
        self._processes = [
            context.Process(target=program.run, args=(cell, rank, size, port, leader_serves, place, self._errors[rank]))
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    def end_of(self, rank: int) -> int | None:
        """Wait for a process. Return its exit code, or None if it has not ended in time."""
        self._processes[rank].join(PATIENCE_SECONDS)
        return self._processes[rank].exitcode

    def wake(self, rank: int) -> None:
        """Resume a paused process."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)

    def told(self, rank: int) -> dict[str, Any]:
        """Return the outcome of a process."""
        file = told_file(self._place, rank)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not file.exists() and self._processes[rank].is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert file.exists(), f"rank {rank}: {self._processes[rank].exitcode}; {self.said()}"
        told: dict[str, Any] = json.loads(file.read_text())
        return told

    def said(self) -> str:
        """Return what the processes wrote to stderr."""
        texts = [Path(file).read_text(errors="replace")[-3000:] for file in self._errors if Path(file).exists()]
        return "\n".join(texts)

    def close(self) -> None:
        """Kill the remaining processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _expect_named(told: dict[str, Any], victim: int) -> None:
    """Assert that a rank raised an error of ckptcore that names the failed rank."""
    assert told["ours"], told
    assert re.search(rf"rank {victim}\b|\[{victim}\]", told["text"]), told


def fail(program: ModuleType, cell: Cell, size: int, place: Path, *, leader_serves: bool) -> None:
    """Run a job with a failure, check the errors and the checkpoints, and continue with a smaller job.

    Args:
        program: the program of a process: `failing_torch` or a similar module.
        cell: the failure and its place.
        size: the number of processes.
        place: the directory of the job. This function creates it.
        leader_serves: True if the process of rank 0 runs the service for the exchanges of the job.
    """
    place.mkdir()
    job = _Processes(program, cell, size, place, leader_serves=leader_serves)
    try:
        others = [rank for rank in range(size) if rank != cell.victim]
        told = {rank: job.told(rank) for rank in others}
        saved = [rank for rank, outcome in told.items() if outcome["error"] is None]
        for rank in others:
            if rank not in saved:
                _expect_named(told[rank], cell.victim)
        if cell.action == "kill":
            assert job.end_of(cell.victim) == -signal.SIGKILL, job.said()
        else:
            if cell.action == "hang":
                job.wake(cell.victim)
            victim = job.told(cell.victim)
            assert job.end_of(cell.victim) == 0, job.said()
            if cell.action == "raise":
                assert victim["error"] is not None and "trapped at" in victim["text"], victim
            elif victim["error"] is not None:
                assert victim["ours"], victim
        ends = {rank: job.end_of(rank) for rank in others}
        assert set(ends.values()) == {0}, (ends, job.said())
        if cell.operation == "save" and not (cell.action == "raise" and cell.point != "export"):
            _expect_whole_or_nothing(cell, place, saved)
    finally:
        job.close()
    _resume(program, cell, size - 1 if cell.victim else size - 2, place, leader_serves=leader_serves)


def _expect_whole_or_nothing(cell: Cell, place: Path, saved: Sequence[int]) -> None:
    assert (ckptcore.load(place / "before")["here"]["2"] == 1).all()
    try:
        loaded = ckptcore.load(place / "broken")
    except CheckpointNotFoundError:
        assert not saved
        return
    assert cell.point in _MAY_COMMIT or cell.action == "raise", "a save committed without one of its ranks"
    assert (np.asarray(loaded["rows"]) == 2).all() and loaded["step"] == 2


def _resume(program: ModuleType, cell: Cell, size: int, place: Path, *, leader_serves: bool) -> None:
    job = _Processes(program, Cell("resume"), size, place, leader_serves=leader_serves)
    try:
        told = [job.told(rank) for rank in range(size)]
        ends = [job.end_of(rank) for rank in range(size)]
        assert ends == [0] * size and all(outcome["error"] is None for outcome in told), (told, job.said())
    finally:
        job.close()
    if cell.operation == "save" and cell.point != "export":
        assert {path.name for path in place.iterdir()} <= {"before", "broken"}, "leftovers"


def name_of(cell: object) -> str:
    """Return the name of a cell for test ids."""
    assert isinstance(cell, Cell)
    return f"{cell.operation}-{cell.point.replace(' ', '_')}-{cell.action}-{cell.victim}"
