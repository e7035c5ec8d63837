"""Directories of steps: on a file system, which has locks, and in memory, which has conditional puts only."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One that is not there yet."""
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def local(tmp_path: Path) -> str:
    """One on a file system."""
    return str(tmp_path / "run")


@pytest.fixture
def memory() -> str:
    """One in memory."""
    return f"memory://{uuid.uuid4().hex}/run"
