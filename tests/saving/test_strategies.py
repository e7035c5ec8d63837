"""Strategies of saves that fail, or that a save or a run cannot use. `tests/toy_plugins` has a working strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks

import ckptcore
from ckptcore.errors import RankFailedError, StorageError
from ckptcore.protocols import SaveCommit


class FailsToBegin(ckptcore.PlainSave):
    """A strategy that fails on one rank before it claims."""

    def begin(self, save: Any) -> SaveCommit:
        if save.agreement.rank == 1:
            raise StorageError("the second storage cannot be opened")
        return super().begin(save)


def test_a_strategy_that_fails_to_begin_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    def save(rank: int, context: ckptcore.Context) -> None:
        with pytest.raises((StorageError, RankFailedError), match="cannot be opened"):
            ckptcore.save(tmp_path / "c", {"w": np.ones(3)}, strategy=FailsToBegin(), context=context)

    run_ranks(2, save, timeout_seconds=30)
    assert list(tmp_path.iterdir()) == []


def test_exports_cannot_be_nested(tmp_path: Path) -> None:
    inner = ckptcore.WithExports([ckptcore.Export(location=tmp_path / "a")])
    with pytest.raises(ValueError, match="Pass all exports to one WithExports"):
        ckptcore.WithExports([ckptcore.Export(location=tmp_path / "b")], inner)


def test_a_strategy_of_another_kind_is_refused(tmp_path: Path) -> None:
    exports: Any = ckptcore.WithExports([ckptcore.Export(location=tmp_path / "a")])
    with pytest.raises(TypeError, match="expected a StepStrategy"):
        ckptcore.Checkpointer(tmp_path / "run", strategy=exports)
    steps: Any = ckptcore.StepExports([ckptcore.StepExport(directory=tmp_path / "a")])
    with pytest.raises(TypeError, match="expected a SaveStrategy"):
        ckptcore.save(tmp_path / "c", {"w": np.ones(3)}, strategy=steps)


def test_a_run_refuses_updates_of_several_objects(tmp_path: Path) -> None:
    class Updates(ckptcore.StepExports):
        def for_step(self, step: int, name: str, strategy: Any) -> Any:
            return ckptcore.Update(base=tmp_path / "base")

    ckptcore.save(tmp_path / "base", {"w": np.ones(3)})
    with (
        ckptcore.Checkpointer(tmp_path / "run", strategy=Updates([])) as run,
        pytest.raises(ValueError, match="is for one tree"),
    ):
        run.save_checkpointables(1, {"a": {"w": np.ones(3)}, "b": {"w": np.ones(3)}})
