"""Errors that reach users through adapters. They do not suggest options that the adapter lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from ckptcore_integrations.accelerate import CheckpointMixin
from ckptcore_integrations.lightning import CkptcoreIO

from ckptcore.errors import CheckpointExistsError, TreeMismatchError


class Checkpointed(CheckpointMixin, Accelerator):
    """The Accelerator that the tests use."""


def accelerator(directory: Path, outputs: int) -> Any:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    made = Checkpointed(cpu=True, project_config=ProjectConfiguration(str(directory)))
    made.prepare(torch.nn.Linear(2, outputs))
    return made


def test_accelerate(tmp_path: Path) -> None:
    accelerator(tmp_path, 3).save_state(str(tmp_path / "state"))
    with pytest.raises(TreeMismatchError) as raised:
        accelerator(tmp_path, 4).load_state(str(tmp_path / "state"))
    message = str(raised.value)
    assert "calls ckptcore.load_into itself can allow intended differences" in message
    assert "matching=" not in message and "transforms=" not in message


def test_lightning(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "notes.txt").write_text("mine")
    io = CkptcoreIO()
    with pytest.raises(CheckpointExistsError) as raised:
        io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "last")
        io.teardown()
    assert "overwrite=" not in str(raised.value)
