"""A run that is killed again and again ends with exactly the losses and weights of an uninterrupted run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from ckptcore_testing.trees import same_value

import ckptcore
from tests.resume.trainers import Trainer, trainer

_STEPS: Final = 60
_SAVE_EVERY: Final = 3
_KILLS: Final = 3
_SAMPLE: Final = 1

_LATE: Final = {"examples.train_torch": ["torch._dynamo"], "examples.train_jax": []}
"""Modules that the examples import late."""

_NEEDS: Final = {
    "examples.train_torch": ("sklearn", "torch", "torchdata"),
    "examples.train_jax": ("grain", "jax", "optax", "sklearn"),
}


_TRAINERS: Final = ["examples.train_torch", pytest.param("examples.train_jax", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Straight:
    """An uninterrupted run.

    Attributes:
        trainer: starts runs of the same example.
        losses: the printed losses, by step.
        last: all objects of the last step.
    """

    trainer: Trainer
    losses: dict[str, str]
    last: dict[str, Any]


@pytest.fixture(scope="module", params=_TRAINERS)
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Straight]:
    """Run each example without interruption."""
    for module in _NEEDS[request.param]:
        pytest.importorskip(module)
    scratch = tmp_path_factory.mktemp("straight")
    with trainer(request.param, scratch, _LATE[request.param]) as running:
        losses = _losses(running.start(*_arguments(scratch / "run")).finish())
        assert len(losses) == _STEPS
        yield Straight(running, losses, _last(scratch / "run"))


def _arguments(directory: Path) -> Sequence[object]:
    return "--directory", directory, "--steps", _STEPS, "--save-every", _SAVE_EVERY


def _losses(lines: Sequence[str]) -> dict[str, str]:
    words = [line.split() for line in lines]
    return {fields[1]: fields[-1] for fields in words if fields[0] == "step"}


def _last(directory: Path) -> dict[str, Any]:
    reader = ckptcore.CheckpointReader(directory)
    assert reader.latest == _STEPS
    return reader.load_checkpointables()


def _check(straight: Straight, seed: int, directory: Path) -> int:
    """Kill a run at random moments, let it finish, and compare it. Return how many times it was killed."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    lines: list[str] = []
    killed = 0
    for _ in range(_KILLS):
        run, was_killed = straight.trainer.start_and_kill(chance, "step", _arguments(directory))
        lines.extend(run.lines())
        killed += was_killed
    printed = [*lines, *straight.trainer.start(*_arguments(directory)).finish()]
    # The lines include steps that were repeated after a kill.
    wrong = [
        line for line in printed if line.startswith("step") and straight.losses[line.split()[1]] != line.split()[-1]
    ]
    assert not wrong
    assert _losses(printed) == straight.losses
    assert same_value(_last(directory), straight.last)
    return killed


def test_a_sample_of_killed_runs(straight: Straight, tmp_path: Path) -> None:
    # One test, so that only one worker of pytest makes the uninterrupted run.
    for seed in range(_SAMPLE):
        assert _check(straight, seed, tmp_path / str(seed)) > 0


def test_a_run_ends_if_it_is_past_its_target(straight: Straight, tmp_path: Path) -> None:
    """The second target is lower than the number of steps that were done."""
    arguments = ("--directory", tmp_path / "run", "--save-every", 2, "--steps")
    straight.trainer.start(*arguments, 4).finish()
    run = straight.trainer.start(*arguments, 3)
    try:
        assert not run.wait_for("step 5", 1)
        assert run.finish() == ["resumed from step 4\n"]
    finally:
        if not run.has_ended():
            run.kill()


@pytest.mark.slow
def test_many_killed_runs(straight: Straight, full: bool, tmp_path: Path) -> None:
    for seed in range(100, 120 if full else 103):
        assert _check(straight, seed, tmp_path / str(seed)) > 0


@pytest.mark.parametrize("straight", ["examples.train_torch"], indirect=True)
@pytest.mark.parametrize("part", ["data", "model", "numpy_rng", "optimizer", "scheduler", "torch_rng"])
def test_a_part_of_another_step_changes_the_losses(straight: Straight, part: str, tmp_path: Path) -> None:
    """Every part of the state matters: with a part of the previous save, the losses differ."""
    run = straight.trainer.start(*_arguments(tmp_path / "run"))
    assert run.wait_for("step", 20)
    assert run.kill()
    reader = ckptcore.CheckpointReader(tmp_path / "run")
    before, step = reader.steps[-2:]
    mixed = reader.load_checkpointables(step)
    mixed[part] = reader.load_checkpointables(before)[part]
    ckptcore.save_checkpointables(tmp_path / "run" / str(step), mixed, overwrite=True)

    losses = _losses(straight.trainer.start(*_arguments(tmp_path / "run")).finish())
    assert len(losses) == _STEPS - step
    assert any(straight.losses[number] != loss for number, loss in losses.items())
