"""Two jobs with the same directory. One job trains, and the other gets an error that names the owner."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import ckptcore
from tests.resume.numpy_training import Batches
from tests.resume.trainers import Run, Trainer, trainer

_ROUNDS: Final = 8
_FIRST: Final = 11
_SECOND: Final = 13


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """Start the NumPy trainer."""
    with trainer("tests.resume.numpy_training", tmp_path_factory.mktemp("runs")) as started:
        yield started


def _start(running: Trainer, scratch: Path, seed: int) -> Run:
    """Start a job that saves until it is killed. The steps contain its seed, or the seed of the resumed step."""
    journal = scratch / f"journal {seed}"
    return running.start("--directory", scratch / "run", "--journal", journal, "--seed", seed, "--steps", 1_000_000)


def _expect_refused(refused: Run, owner: Run) -> None:
    assert refused.wait() == 1
    assert refused.lines() == []
    told = refused.errors().splitlines()[-1]
    assert told.startswith("ckptcore.errors.DirectoryInUseError: ")
    assert str(owner.process) in told


def _committed(run: Run) -> int:
    return max((int(line.split()[1]) for line in run.lines() if line.startswith("committed")), default=0)


def _seeds(directory: Path) -> list[int]:
    """Return the seed of each step. Assert that no step is a mix of two jobs."""
    reader = ckptcore.CheckpointReader(directory)
    seeds = []
    for step in reader.steps:
        data = Batches(0)
        loaded = reader.load_checkpointables(step, ["params", "random"], into={"data": data})
        seed = loaded["params"]["seed"]
        assert (data.seed, data.position) == (seed, step)
        assert loaded["params"]["bias"].tolist() == [seed * step] * 7
        seeds.append(seed)
    return seeds


def test_the_second_owner_is_refused_and_takes_over_after_a_kill(running: Trainer, tmp_path: Path) -> None:
    first = _start(running, tmp_path, _FIRST)
    assert first.wait_for("committed", 1)
    _expect_refused(_start(running, tmp_path, _SECOND), first)
    assert first.wait_for("committed", len(first.lines()) + 3), "the first was disturbed"
    assert first.kill()

    second = _start(running, tmp_path, _SECOND)  # immediately, and with the same arguments
    assert second.wait_for("committed", 3), second.errors()
    assert second.lines()[0] in (f"resumed {_committed(first)}\n", f"resumed {_committed(first) + 1}\n")
    assert second.kill()
    assert set(_seeds(tmp_path / "run")) == {_FIRST}, "it continues the state that it loaded"


def test_one_of_two_jobs_that_start_together_trains(running: Trainer, tmp_path: Path) -> None:
    for number in range(_ROUNDS):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        chance = random.Random(number)
        jobs = {seed: _start(running, scratch, seed) for seed in chance.sample([_FIRST, _SECOND], 2)}
        while not any(job.has_ended() for job in jobs.values()):
            time.sleep(0.001)
        (other,) = (seed for seed, job in jobs.items() if job.has_ended())
        (owner,) = jobs.keys() - {other}
        assert jobs[owner].wait_for("committed", 2)
        _expect_refused(jobs[other], jobs[owner])
        assert jobs[owner].kill()
        assert set(_seeds(scratch / "run")) == {owner}


def test_jobs_that_take_turns_lose_no_step(running: Trainer, tmp_path: Path) -> None:
    """Each owner is killed while another job tries to open the run. The other job continues from the last step."""
    chance = random.Random(5)
    owner = _start(running, tmp_path, _FIRST)
    for _ in range(_ROUNDS):
        assert owner.wait_for("committed", chance.randint(1, 6))
        waiting = _start(running, tmp_path, _SECOND)
        if chance.random() < 0.5:
            _expect_refused(waiting, owner)
            waiting = _start(running, tmp_path, _SECOND)
        assert owner.kill()
        committed = _committed(owner)
        if waiting.wait_for("resumed", 1):
            owner = waiting
        else:  # it started before the owner was killed
            _expect_refused(waiting, owner)
            owner = _start(running, tmp_path, _SECOND)
            assert owner.wait_for("resumed", 1), owner.errors()
        assert int(owner.lines()[0].split()[1]) in (committed, committed + 1)
    assert owner.kill()
    assert set(_seeds(tmp_path / "run")) == {_FIRST}
