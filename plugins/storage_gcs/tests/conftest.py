"""GCS servers for tests. Each is started once per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ckptcore_gcs_server import StrictGcs
from ckptcore_testing.gcs_servers import GcsServer, gcs_server


@pytest.fixture
def gcs() -> Iterator[StrictGcs]:
    """A strict GCS server in this process with one bucket, ``bucket``, for tests that inspect its state."""
    with StrictGcs(["bucket"]) as server:
        yield server


@pytest.fixture(scope="session")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """The strict GCS server in its own process."""
    with gcs_server(tmp_path_factory.mktemp("strict")) as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """An independent implementation of GCS."""
    with gcs_server(tmp_path_factory.mktemp("fake-gcs-server"), "fake-gcs-server") as server:
        yield server
