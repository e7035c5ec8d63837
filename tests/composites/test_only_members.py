"""Composites with a single member, which can be loaded without its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import CompositeCheckpointError, CorruptCheckpointError

ONE = np.arange(3.0)


def test_the_tree_of_the_only_member_is_loaded(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"state": {"w": ONE}})
    assert ckptcore.load(tmp_path / "c")["w"].tolist() == [0, 1, 2]
    target = {"w": np.zeros(3)}
    ckptcore.load_into(tmp_path / "c", target)
    assert target["w"].tolist() == [0, 1, 2]
    assert list(ckptcore.load_checkpointables(tmp_path / "c")) == ["state"]
    with Checkpointer(tmp_path / "run") as run:
        run.save_checkpointables(1, {"state": {"w": ONE}})
        run.wait()
        assert run.load()["w"].tolist() == [0, 1, 2]
    assert CheckpointReader(tmp_path / "run").load()["w"].tolist() == [0, 1, 2]


def test_several_members_need_a_name(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"one": {"w": ONE}, "other": {"w": ONE}})
    with pytest.raises(CompositeCheckpointError, match="one, other"):
        ckptcore.load(tmp_path / "c")


def test_a_member_of_another_save_is_refused(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"state": {"w": ONE}})
    ckptcore.save(tmp_path / "other", {"other": ONE})
    shutil.rmtree(tmp_path / "c" / "state")
    shutil.copytree(tmp_path / "other", tmp_path / "c" / "state")
    with pytest.raises(CorruptCheckpointError, match="was replaced by a checkpoint of another save"):
        ckptcore.load(tmp_path / "c")


def test_a_composite_in_a_composite_is_refused(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"state": {"w": ONE}})
    ckptcore.save_checkpointables(tmp_path / "inner", {"state": {"w": ONE}})
    (tmp_path / "c" / "state" / "checkpoint.json").write_bytes((tmp_path / "inner" / "checkpoint.json").read_bytes())
    with pytest.raises(CorruptCheckpointError):
        ckptcore.load(tmp_path / "c")
