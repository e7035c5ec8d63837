"""A run that saves every step, and is killed hundreds of times. It loses no step that was reported as committed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import ckptcore
from ckptcore.policies import StepInfo, what_to_delete
from tests.resume.numpy_training import POLICY, Training, digest, states
from tests.resume.trainers import Trainer, trainer

_SEED: Final = 7
_SAMPLE: Final = 15
_LEFT_BY_ONE: Final = 2
"""Hidden directories that one killed job leaves: a running save, and a deletion."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """Start the NumPy trainer."""
    with trainer("tests.resume.numpy_training", tmp_path_factory.mktemp("runs")) as started:
        yield started


class _Watched:
    """A directory of steps whose job is killed, with checks of its content."""

    def __init__(self, scratch: Path) -> None:
        self.directory = scratch / "run"
        self.journal = scratch / "journal"
        self._known: list[tuple[str, float]] = []  # the digest and the loss of each step
        self._states = states(_SEED)
        self._dead = 0  # number of kills since the last cleanup

    def entries(self, what: str) -> list[int]:
        """Return the steps of the entries `what` in the journal."""
        if not self.journal.exists():
            return []
        words = [line.split() for line in self.journal.read_text().splitlines()]
        return [int(step) for entry, step in words if entry == what]

    def expected(self, step: int) -> str:
        """Return the expected digest of a step."""
        while len(self._known) <= step:
            state = next(self._states)
            self._known.append((digest(state), state.loss))
        return self._known[step][0]

    def kept(self, steps: int) -> set[int]:
        """Return which of the steps 1 to `steps` the policy keeps."""
        self.expected(steps)
        losses = [loss for _, loss in self._known]
        infos = [StepInfo(step, created=0.0, metrics={"loss": losses[step]}) for step in range(1, steps + 1)]
        return {info.step for info in infos} - set(what_to_delete(POLICY, infos, 0.0))

    def hidden(self) -> list[str]:
        """Return the names next to the steps, without administrative ones."""
        if not self.directory.exists():
            return []
        names = [path.name for path in self.directory.iterdir()]
        return sorted(name for name in names if name.startswith(".") and name != ".ckptcore")

    def check(self) -> None:
        """Check the directory after the job was killed."""
        self._dead += 1
        assert len(self.hidden()) <= _LEFT_BY_ONE * self._dead
        committed = max(self.entries("committed"), default=0)
        begun = max(self.entries("begun"), default=0)
        reader = ckptcore.CheckpointReader(self.directory)
        latest = reader.latest or 0
        assert latest >= committed, "a step that was said to be committed is lost"
        # A save begins only after the previous save has ended.
        assert latest >= begun - 1, "more than one step is lost"
        assert self.kept(latest) <= set(reader.steps), "a step that is to be kept is lost"
        for step in reader.steps:
            training = Training(0)
            into = {"data": training.batches, "random": training.random}
            training.params = reader.load_checkpointables(step, ["params"], into=into)["params"]
            assert digest(training) == self.expected(step), f"step {step} holds something else"
            report = ckptcore.verify(self.directory / str(step))
            assert report.ok, report.problems

    def clean(self) -> None:
        """Open the run and wait, as the next job does. Check that the remains of killed jobs are gone."""
        with ckptcore.Checkpointer(self.directory) as checkpointer:
            checkpointer.wait()
            assert self.hidden() == []
        administration = self.directory / ".ckptcore"
        held = [path for purpose in administration.iterdir() if purpose.name != "owner" for path in purpose.iterdir()]
        assert held == [], "holds of the dead"
        self._dead = 0


def _kill_often(running: Trainer, scratch: Path, seed: int, kills: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    watched = _Watched(scratch)
    told = ["--directory", watched.directory, "--journal", watched.journal, "--seed", _SEED, "--steps"]
    attempts = killed = 0
    while killed < kills:
        attempts += 1
        assert attempts <= 2 * kills, "it is hardly ever caught alive"
        arguments = [*told, 1_000_000, "--ahead", chance.randrange(2)]
        _, was_killed = running.start_and_kill(chance, "committed", arguments)
        killed += was_killed
        if watched.directory.exists():
            watched.check()
            if chance.random() < 0.5:
                watched.clean()
    assert max(watched.entries("committed"), default=0) > kills // 2, "it hardly got on"

    last = max(watched.entries("begun")) + 5
    running.start(*told, last).finish()
    watched.check()
    assert watched.hidden() == []
    assert set(ckptcore.CheckpointReader(watched.directory).steps) == watched.kept(last)


def test_a_sample_of_kills(running: Trainer, tmp_path: Path) -> None:
    _kill_often(running, tmp_path, 1, _SAMPLE)


def test_the_checks_detect_lost_and_wrong_steps(running: Trainer, tmp_path: Path) -> None:
    watched = _Watched(tmp_path)
    arguments = "--directory", watched.directory, "--journal", watched.journal, "--seed", _SEED, "--steps", 9
    running.start(*arguments).finish()
    watched.check()

    steps = [watched.directory / str(step) for step in ckptcore.CheckpointReader(watched.directory).steps]
    steps[-1].rename(tmp_path / "newest")
    with pytest.raises(AssertionError, match="was said to be committed is lost"):
        watched.check()
    (tmp_path / "newest").rename(steps[-1])
    steps[0].rename(tmp_path / "best")
    with pytest.raises(AssertionError, match="is to be kept is lost"):
        watched.check()
    shutil.copytree(steps[-2], steps[0])
    with pytest.raises(AssertionError, match="holds something else"):
        watched.check()


@pytest.mark.slow
def test_no_step_is_lost_over_many_kills(full: bool, running: Trainer, tmp_path: Path) -> None:
    _kill_often(running, tmp_path, 2, 200 if full else 60)
