"""Fixtures for two tiers: a near one on the local disk, and a far one on the local disk or in memory."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins.tiers.tests.signals import Signals


@pytest.fixture
def near(tmp_path: Path) -> str:
    """A directory on the local disk that does not exist yet."""
    return str(tmp_path / "near" / "run")


@pytest.fixture(params=["local", "memory"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new location: on a file system, which has renames, or in memory, with conditional puts."""
    return str(tmp_path / "far" / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def signals(caplog: pytest.LogCaptureFixture) -> Iterator[Signals]:
    """Signals of all log records of ckptcore from level INFO on. Pass them to a run as an observer."""
    caplog.set_level(logging.INFO, "ckptcore")
    signals = Signals()
    logging.getLogger("ckptcore").addHandler(signals)
    yield signals
    logging.getLogger("ckptcore").removeHandler(signals)
