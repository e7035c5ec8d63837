"""A process of a torch.distributed job that fails, dies or stands still, anywhere in a save or a run: real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch.distributed as dist

import ckptcore
from ckptcore.errors import CheckpointNotFoundError
from tests.jobs import failing_torch
from tests.jobs.failing_job import PATIENCE_SECONDS, Cell

SIZE: Final = 4

_OF_ALL: Final = [
    ("save", "describe"), ("save", "copy"), ("save", "write"), ("save", "written"), ("save", "export"), ("load", "build"),
    ("load", "get_into"), ("decide", "notice"),
]  # fmt: skip
"""Points that every rank comes to."""

_OF_LEADER: Final = [
    ("save", "lock_directory"), ("save", "finish"), ("save", "rename"), ("open", "lock_directory"), ("open", "list_names"),
    ("delete", "rename"),
]  # fmt: skip

_CANNOT_RAISE: Final = [
    "after exchange 1",
    "after exchange 2",
    "after exchange 4",
    "after exchange 5",
    "after exchange 6",
]
"""Ends of exchanges: of describing, of telling the trees, of planning with their union, of the claim, of writing."""

TABLE: Final = [
    *[Cell(*point, action, victim) for point in _OF_ALL for action in ("raise", "kill", "hang") for victim in (0, 2)],
    *[Cell(*point, action, 0) for point in _OF_LEADER for action in ("raise", "kill", "hang")],
    *[Cell("save", point, action, victim) for point in _CANNOT_RAISE for action in ("kill", "hang") for victim in (0, 2)],
    *[Cell("save", "after commit 1", action, 0) for action in ("kill", "hang")],
]  # fmt: skip

SAMPLE: Final = [
    Cell("save", "copy", "raise", 2),
    Cell("save", "written", "kill", 2),
    Cell("save", "finish", "kill", 0),
    Cell("save", "write", "hang", 2),
    Cell("load", "build", "raise", 0),
    Cell("decide", "notice", "kill", 2),
]

_MAY_COMMIT: Final = {
    "export",
    "rename",
    "finish",
    "after exchange 5",
    "after exchange 6",
    "after commit 1",
    "written",
    "write",
}
"""Where a save may commit without the victim, or by the leader after it stood still."""


class _Processes:
    """The processes of one job."""

    def __init__(self, cell: Cell, size: int, place: Path, *, leader_serves: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.jobs.failing_torch"])
        self.size = size
        self._told = place.with_name(f"{place.name}.told")
        self._errors = [f"{place}.{size}.{rank}.errors" for rank in range(size)]
        self._server = None
        if leader_serves:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                port = listener.getsockname()[1]
        else:
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # exported at run time
            port = self._server.port
        self._processes = [
            context.Process(
                target=failing_torch.run, args=(cell, rank, size, port, leader_serves, place, self._errors[rank])
            )
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    def end_of(self, rank: int) -> int | None:
        """How a process ended; None where it has not."""
        self._processes[rank].join(PATIENCE_SECONDS)
        return self._processes[rank].exitcode

    def wake(self, rank: int) -> None:
        """Let a process that stands still go on."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)

    def told(self, rank: int) -> dict[str, Any]:
        """How it was for a process."""
        file = self._told / str(rank)
        assert file.exists(), f"rank {rank}: {self.end_of(rank)}; {self.said()}"
        told: dict[str, Any] = json.loads(file.read_text())
        file.unlink()
        return told

    def said(self) -> str:
        """What they wrote to stderr."""
        texts = [Path(file).read_text(errors="replace")[-3000:] for file in self._errors if Path(file).exists()]
        return "\n".join(texts)

    def close(self) -> None:
        """End what is left of them."""
        for process in self._processes:
            process.kill()
            process.join()


def _expect_named(told: dict[str, Any], victim: int) -> None:
    """That a rank was told by an error of ours who failed."""
    assert told["ours"], told
    assert re.search(rf"rank {victim}\b|\[{victim}\]", told["text"]), told


def fail(cell: Cell, place: Path, *, leader_serves: bool = False) -> None:
    """Run a cell, judge what the ranks were told and what is there, and go on with a smaller job."""
    place.mkdir()
    job = _Processes(cell, SIZE, place, leader_serves=leader_serves)
    try:
        others = [rank for rank in range(SIZE) if rank != cell.victim]
        ends = {rank: job.end_of(rank) for rank in others}
        assert set(ends.values()) == {0}, (ends, job.said())
        told = {rank: job.told(rank) for rank in others}
        saved = [rank for rank, one in told.items() if one["error"] is None]
        for rank in others:
            if rank not in saved:
                _expect_named(told[rank], cell.victim)
        if cell.action == "kill":
            assert job.end_of(cell.victim) == -signal.SIGKILL, job.said()
        else:
            if cell.action == "hang":
                job.wake(cell.victim)
            assert job.end_of(cell.victim) == 0, job.said()
            victim = job.told(cell.victim)
            if cell.action == "raise":
                assert victim["error"] is not None and "trapped at" in victim["text"], victim
            elif victim["error"] is not None:
                assert victim["ours"], victim
        if cell.operation == "save" and not (cell.action == "raise" and cell.point != "export"):
            _expect_whole_or_nothing(cell, place, saved)
    finally:
        job.close()
    _resume(cell, place)


def _expect_whole_or_nothing(cell: Cell, place: Path, saved: Sequence[int]) -> None:
    assert (ckptcore.load(place / "before")["here"]["2"] == 1).all()
    try:
        loaded = ckptcore.load(place / "broken")
    except CheckpointNotFoundError:
        assert not saved
        return
    assert cell.point in _MAY_COMMIT or cell.action == "raise", "a save committed without one of its ranks"
    assert (np.asarray(loaded["rows"]) == 2).all() and loaded["step"] == 2


def _resume(cell: Cell, place: Path) -> None:
    size = 3 if cell.victim else 2
    job = _Processes(Cell("resume"), size, place, leader_serves=False)
    try:
        ends = [job.end_of(rank) for rank in range(size)]
        told = [job.told(rank) for rank in range(size)]
        assert ends == [0] * size and all(one["error"] is None for one in told), (told, job.said())
    finally:
        job.close()
    if cell.operation == "save" and cell.point != "export":
        assert {path.name for path in place.iterdir()} <= {"before", "broken"}, "leftovers"


def _name(value: object) -> str:
    assert isinstance(value, Cell)
    return f"{value.operation}-{value.point.replace(' ', '_')}-{value.action}-{value.victim}"


@pytest.mark.slow
@pytest.mark.parametrize("cell", SAMPLE, ids=_name)
def test_one_rank_fails(cell: Cell, tmp_path: Path) -> None:
    fail(cell, tmp_path / "place")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill", "hang"])
def test_the_rank_fails_that_serves_the_store(action: Any, tmp_path: Path) -> None:
    fail(Cell("save", "write", action, 0), tmp_path / "place", leader_serves=True)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in TABLE if cell not in SAMPLE], ids=_name)
def test_one_rank_fails_anywhere(cell: Cell, tmp_path: Path) -> None:
    fail(cell, tmp_path / "place")
