"""Errors with remedies for callers that cannot pass every option, such as users of an adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import CheckpointError, TreeMismatchError

STATE = {"model": {"w": np.ones(2)}, "step": np.ones(1)}


def mismatch(directory: Path, target: Any) -> None:
    ckptcore.save(directory / "c", STATE, overwrite=True)
    ckptcore.load_into(directory / "c", target)


def in_use(directory: Path) -> None:
    run = f"memory://{directory.parent.name}-{directory.name}/run"
    with ckptcore.Checkpointer(run) as first:
        first.save(1, STATE)
        ckptcore.Checkpointer(run).save(2, STATE)


def same_step(directory: Path) -> None:
    with ckptcore.Checkpointer(directory / "run") as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.save(1, STATE)


def other_names(directory: Path) -> None:
    for name in ("a_1", "b_2"):
        ckptcore.save(directory / "run" / name, STATE)
    ckptcore.CheckpointReader(directory / "run").load()


def existing(directory: Path) -> None:
    for _ in range(2):
        ckptcore.save(directory / "c", STATE)


def other_files(directory: Path) -> None:
    ckptcore.save(directory / "c", STATE)
    (directory / "c/notes.txt").write_text("mine")
    ckptcore.save(directory / "c", STATE, overwrite=True)


CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "dtypes": (
        lambda at: mismatch(at, {"model": {"w": np.ones(2, np.int8)}, "step": np.ones(1)}),
        "matching=",
        "calls ckptcore.load_into itself can allow intended differences, with ckptcore.Matching(",
    ),
    "moved": (
        lambda at: mismatch(at, {"params": {"w": np.ones(2)}, "step": np.ones(1)}),
        "transforms=",
        "by a call of ckptcore.load_into with the transforms [Rename",
    ),
    "exists": (existing, "overwrite=", "or delete it with ckptcore.delete"),
    "step": (same_step, "overwrite=", "delete it with ckptcore.delete to save it again"),
    "other files": (other_files, "pass overwrite='keep-other-files'", "wrote (notes.txt), which would be deleted with"),
    "in use": (in_use, "pass if_in_use=", "open the directory with ckptcore.Checkpointer(directory, if_in_use="),
    "names": (other_names, "step_names=", "open the directory with ckptcore.Checkpointer and the step names StepNames"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_names_only_options_that_the_caller_can_pass(tmp_path: Path, case: str) -> None:
    cause, option, remedy = CASES[case]
    with pytest.raises(CheckpointError) as as_raised:
        cause(tmp_path / "direct")
    assert option in str(as_raised.value)
    with pytest.raises(type(as_raised.value)) as raised, CheckpointError.offering():
        cause(tmp_path / "adapter")
    assert option not in str(raised.value) and remedy in str(raised.value)
    name = "keep-other-files" if cause is other_files else option.removeprefix("pass ").partition("=")[0]
    with pytest.raises(type(as_raised.value)) as offered, CheckpointError.offering(name):
        cause(tmp_path / "offered")
    assert option in str(offered.value)


def test_offering_is_also_a_decorator(tmp_path: Path) -> None:
    @CheckpointError.offering("overwrite")
    def load(location: Path) -> None:
        ckptcore.load_into(location, {"w": np.ones(2)})

    ckptcore.save(tmp_path / "c", STATE)
    for _ in range(2):
        with pytest.raises(TreeMismatchError) as raised:
            load(tmp_path / "c")
        assert "matching=" not in str(raised.value) and "transforms=" not in str(raised.value)
        assert raised.value.differences
