"""Fixtures of the tests of several checkpointables."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptcore
from tests.composites.foreign_format import ShelfPlugin
from tests.composites.objects import staged


@pytest.fixture
def context() -> ckptcore.Context:
    """Return a Context with the layout of the foreign format."""
    return ckptcore.Context(plugins=ckptcore.context.PluginOptions(extra=(ShelfPlugin(),)))


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a location for checkpoints, on a storage with directories and on one without."""
    return str(tmp_path / "run") if request.param == "file" else f"memory://{tmp_path.name}"


@pytest.fixture(autouse=True)
def _nothing_stays_staged(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a new temporary directory for files of objects, and check that it is empty afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("staging")))
    yield
    assert not staged()
