"""S3 servers for tests. Each is started once per process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptcore_s3.testing import S3Server, s3_server


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """MiniStack, which stores objects in files."""
    with s3_server(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Moto, an independent implementation."""
    with s3_server(tmp_path_factory.mktemp("moto"), "moto") as server:
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An empty directory."""
    return tmp_path
