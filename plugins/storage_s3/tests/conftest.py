"""The S3 servers of the tests, each started once for all of them in a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptcore_s3.testing import S3Server, s3_server


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """MiniStack, which keeps objects in files."""
    with s3_server(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Moto, as a second opinion."""
    with s3_server(tmp_path_factory.mktemp("moto"), "moto") as server:
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An empty directory."""
    return tmp_path
