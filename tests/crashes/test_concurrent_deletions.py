"""Concurrent deletions, and locks that cannot be released."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.locations import InterruptedPlan, faulty_context, new_place, through

import ckptcore
from ckptcore.builtin.local_directories import FileLock
from ckptcore.errors import CheckpointNotFoundError, SaveLostError, StorageError

_STATE = {"w": np.arange(4)}


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("several", [False, True])
def test_a_deletion_during_another_deletion_finds_nothing(scheme: str, several: bool, tmp_path: Path) -> None:
    errors: list[str] = []
    for number in itertools.count():
        place = new_place(scheme, tmp_path)
        if several:
            ckptcore.save_checkpointables(place, {"one": _STATE, "two": _STATE})
        else:
            ckptcore.save(place, _STATE)
        plan = InterruptedPlan(number, functools.partial(ckptcore.delete, place))
        try:
            ckptcore.delete(through(place), context=faulty_context(place, plan))
        except (CheckpointNotFoundError, SaveLostError) as error:
            assert scheme == "memory" or isinstance(error, CheckpointNotFoundError)
            errors.append(type(error).__name__)
        with pytest.raises(CheckpointNotFoundError):
            ckptcore.load(place)
        if not plan.interrupted:
            break
    assert "CheckpointNotFoundError" in errors


def test_a_run_can_delete_a_step_that_another_process_deleted(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path) as run:
        for step in range(3):
            run.save_blocking(step, _STATE)
        ckptcore.delete(tmp_path / "0")
        with contextlib.suppress(CheckpointNotFoundError):
            run.delete(0)
        assert run.steps == (1, 2)


@pytest.mark.parametrize("kind", ["save", "update"])
def test_a_lock_that_cannot_be_released_does_not_fail_the_save(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = FileLock.close

    def fail(self: FileLock) -> None:
        close(self)
        if self._path.startswith(str(tmp_path)) and self._path.endswith(".ckptcore"):  # the hidden directory of a save
            raise StorageError("the test fails to unlock")

    ckptcore.save(tmp_path / "base", _STATE)
    strategy = ckptcore.Update(tmp_path / "base") if kind == "update" else None
    state = {"n": 1} if kind != "update" else {"n": 1, "w": ckptcore.PLACEHOLDER}
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "ckptcore"):
        patched.setattr(FileLock, "close", fail)
        ckptcore.save(tmp_path / "x", state, strategy=strategy)
    assert "cannot be unlocked" in caplog.text
    assert ckptcore.load(tmp_path / "x")["n"] == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["base", "x"]
