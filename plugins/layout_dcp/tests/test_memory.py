"""The layout dcp keeps no reference to tensors after a save or load, and frees the memory of snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptcore
from ckptcore.runtime import runtime_of
from plugins.torch_backend.tests.held_memory import OPERATIONS, State, without_collector


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_tensor_is_referenced_afterwards(tmp_path: Path, name: str) -> None:
    state = State()
    watched = state.held
    with without_collector():
        kept = OPERATIONS[name](tmp_path, state, "dcp")
        assert state.held == watched
        state.forget()
        assert state.held == 0
    for each in kept if isinstance(kept, tuple) else [kept]:
        if isinstance(each, ckptcore.Context):
            runtime_of(each).staging.release_unused()
            assert runtime_of(each).staging.held_bytes == 0
