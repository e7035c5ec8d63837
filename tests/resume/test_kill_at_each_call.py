"""``kill -9`` before each system call of a Checkpointer that opens, saves a step, deletes older steps and closes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import ckptcore
from ckptcore.policies import LatestN
from tests.crashes.tracing import KillPoint, Saver, needs_strace
from tests.resume.step_saving import KEPT, make_state, step_at
from tests.resume.trainers import Run, Trainer, trainer

_FAST: Final = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1))
_BEFORE: Final = (1, 2, 3)
_NEW: Final = 4
_SAMPLE: Final = 10
_REACHED: Final = 0.7
"""Minimum fraction of the calls at which the process must have been killed. The order of calls of threads varies."""


class _StepSaver(Saver):
    """A starter of `tests.resume.step_saving` under strace."""

    def __init__(self, running: Trainer, scratch: Path) -> None:
        self._running = running
        self._scratch = scratch
        self._run: Run | None = None

    def _gate(self) -> Path:
        return self._scratch / "gate"

    def start(self, task: str, location: str, number: int = _NEW) -> int:
        """Start a process that waits at the gate."""
        if not self._gate().exists():
            os.mkfifo(self._gate())
        self._run = self._running.start(location, number, self._gate())
        assert self._run.wait_for("ready", 1), self._run.errors()
        return self._run.process

    def begin(self) -> None:
        """Open the gate."""
        with self._gate().open("wb", buffering=0) as gate:
            gate.write(b"!")

    def end(self) -> int:
        """Wait for the process. Return its exit status."""
        assert self._run is not None
        return self._run.wait()


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_StepSaver]:
    """Return the program that is traced and killed."""
    needs_strace()
    scratch = tmp_path_factory.mktemp("runs")
    with trainer("tests.resume.step_saving", scratch) as running:
        yield _StepSaver(running, scratch)


def _prepare(directory: Path) -> None:
    """Save three steps, and create the remains of a failed save."""
    with ckptcore.Checkpointer(directory, context=_FAST) as checkpointer:
        for step in _BEFORE:
            checkpointer.save_checkpointables(step, make_state(step))
    hidden = directory / f".{_BEFORE[0]}.0123456789abcdef.ckptcore"
    hidden.mkdir()
    (hidden / "model.safetensors").write_bytes(b"unfinished")


def _points(warm: Saver, scratch: Path) -> list[KillPoint]:
    directory = scratch / "traced"
    _prepare(directory)
    points = list(warm.kill_points("save", str(directory), scratch / "trace"))
    assert ckptcore.CheckpointReader(directory).steps == (_BEFORE[-1], _NEW)
    assert len(points) > 50, f"hardly any system call was traced: {points}"
    return points


def _try(warm: Saver, point: KillPoint, directory: Path) -> bool:
    """Kill the program at a point and check the result. Return True if the point was reached."""
    _prepare(directory)
    status = warm.killed("save", str(directory), point)
    assert status in (0, -9), f"it ended with {status}"
    reader = ckptcore.CheckpointReader(directory)
    if reader.latest == _NEW:
        assert {_BEFORE[-1], _NEW} <= set(reader.steps) <= {*_BEFORE, _NEW}
    else:
        assert status != 0, "a save that ended is not there"
        assert reader.steps == _BEFORE, "old steps were deleted before the new one was there"
    for step in reader.steps:
        assert step_at(reader, step) == step
        assert ckptcore.verify(directory / str(step)).ok

    with ckptcore.Checkpointer(directory, preservation_policy=LatestN(KEPT), context=_FAST) as checkpointer:
        checkpointer.save_checkpointables(_NEW + 1, make_state(_NEW + 1))
        checkpointer.wait()
        before = _NEW if reader.latest == _NEW else _BEFORE[-1]
        assert checkpointer.steps == (before, _NEW + 1)
        assert sorted(path.name for path in directory.iterdir()) == [".ckptcore", str(before), str(_NEW + 1)]
    return status != 0


def _kill_at(warm: Saver, points: list[KillPoint], scratch: Path) -> None:
    killed = 0
    for number, point in enumerate(points):
        try:
            killed += _try(warm, point, scratch / str(number))
        except Exception as error:
            error.add_note(f"killed at {point}, {number + 1} of {len(points)}")
            raise
    assert killed >= _REACHED * len(points), f"only {killed} of {len(points)} points were reached"


def test_a_sample_of_kills(warm: Saver, tmp_path: Path) -> None:
    points = _points(warm, tmp_path)
    _kill_at(warm, points[:: len(points) // _SAMPLE], tmp_path)


@pytest.mark.slow
def test_a_kill_at_every_call(full: bool, warm: Saver, tmp_path: Path) -> None:
    _kill_at(warm, _points(warm, tmp_path)[:: 1 if full else 5], tmp_path)
