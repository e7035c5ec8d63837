"""Arguments: invalid arguments are refused before anything is written, and integers of frameworks are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptcore import Checkpointer
from ckptcore.policies import FixedInterval, LatestN
from tests.checkpointer.runs import ROOT, assert_is_step, save_steps, store_of, tree


def in_torch(number: int) -> Any:
    """Return a tensor with a whole number."""
    return pytest.importorskip("torch").tensor(number)


def in_jax(number: int) -> Any:
    """Return an array of JAX with a whole number."""
    return pytest.importorskip("jax.numpy").asarray(number)


@pytest.mark.parametrize("make", [np.int64, in_torch, in_jax])
def test_integers_of_frameworks_are_valid_steps(directory: str, make: Callable[[int], Any]) -> None:
    with Checkpointer(directory, preservation_policy=LatestN(2)) as run:
        for step in (1, 2, 3):
            run.save(make(step), tree(step), epoch=make(step))
        run.wait()
        assert list(run.steps) == [2, 3]
        assert {type(step) for step in run.steps} == {int}
        assert_is_step(run.load(make(2)), 2)
        assert type(run.restored_step) is int
        assert type(run.step_info(make(3)).step) is int
        assert run.should_save(make(4), epoch=make(4))
        run.delete(make(3))
        run.wait()
        assert list(run.steps) == [2]
    progress = json.loads(store_of(directory).get(f"2/{ROOT}"))["progress"]
    assert progress == {"step": 2, "epoch": 2}
    assert {type(number) for number in progress.values()} == {int}


@pytest.mark.parametrize("wrong", [True, "1", 1.0, None, np.bool_(True), {"w": 1}], ids=repr)
def test_other_types_are_invalid_steps(memory: str, wrong: Any) -> None:
    with Checkpointer(memory) as run:
        save_steps(run, [1, 2])
        calls: list[Callable[[], object]] = [
            lambda: run.save(wrong, tree(1)),
            lambda: run.save_checkpointables(wrong, {"model": tree(1)}),
            lambda: run.save_blocking(wrong, tree(1)),
            lambda: run.should_save(wrong),
            lambda: run.delete(wrong),
            lambda: run.step_info(wrong),
            lambda: run.metadata(wrong),
        ]
        if wrong is not None:
            calls += [lambda: run.load(wrong), lambda: run.save(3, tree(3), epoch=wrong)]
        for call in calls:
            with pytest.raises(TypeError, match="expected a whole number"):
                call()
        assert run.steps == (1, 2)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("save_policy", FixedInterval),
        ("save_policy", 10),
        ("save_policy", LatestN(3)),
        ("save_policy", [FixedInterval(2)]),
        ("preservation_policy", LatestN),
        ("preservation_policy", 3),
        ("preservation_policy", FixedInterval(3)),
        ("preservation_policy", [LatestN(3)]),
        ("step_names", "step_{:08d}"),
    ],
    ids=repr,
)
def test_arguments_of_a_wrong_type_are_refused_before_any_file_is_created(local: str, name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}="):
        Checkpointer(local, **{name: wrong})
    assert not Path(local).exists()
