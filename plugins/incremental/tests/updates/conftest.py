"""Fixtures of the tests of updates."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckptcore_testing.locations import new_place


@pytest.fixture(params=["file", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new directory of checkpoints: on a file system, which has renames, or in memory, with conditional puts."""
    return new_place(request.param, tmp_path)
