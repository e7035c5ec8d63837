"""Reads of a checkpoint that is already open. They need a single attempt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ckptcore
from ckptcore.context import default_context
from ckptcore.opening.open_checkpoints import ConsistentRead, tree_attempts


def test_an_open_checkpoint_is_read_in_one_attempt(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.arange(3)})
    first = tree_attempts(tmp_path / "c", default_context())
    checkpoint = first.open()
    second = tree_attempts(checkpoint, default_context())
    assert vars(first).keys() <= vars(second).keys()  # methods of the base class need these attributes
    assert second.open() is checkpoint
    assert second.retry_if_replaced(lambda attempt: attempt) is checkpoint
    assert ConsistentRead.is_current(second) and ConsistentRead.is_unchanged(second)
