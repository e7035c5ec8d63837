"""Fixtures for two tiers: a near one on the local disk, and a far one on the local disk or in memory."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from ckptcore_tiers import uploader


@pytest.fixture
def near(tmp_path: Path) -> str:
    """A directory on the local disk that does not exist yet."""
    return str(tmp_path / "near" / "run")


@pytest.fixture(params=["local", "memory"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new location: on a file system, which has renames, or in memory, with conditional puts."""
    return str(tmp_path / "far" / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the uploader retry after short pauses."""
    monkeypatch.setattr(uploader, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(uploader, "_LONGEST_PAUSE_SECONDS", 0.05)
