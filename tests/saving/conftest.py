"""Fixtures of the tests of saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckptcore_testing.locations import new_place


@pytest.fixture(params=["file", "memory"])
def top(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty directory, on a file system and in memory."""
    return new_place(request.param, tmp_path)
