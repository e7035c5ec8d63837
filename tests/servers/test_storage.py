"""Conformance tests of every storage on every server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptcore_testing import StorageBackendTests

from ckptcore.protocols import StorageBackend
from tests.servers.samples import SERVERS, open_storage


class TestStorage(StorageBackendTests):
    """Tests of a storage that is configured by its URL and environment variables, as in most programs."""

    examples = 2
    threads = 4

    @pytest.fixture(autouse=True, params=list(SERVERS))
    def _use_server(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
        with SERVERS[request.param].open(tmp_path) as location:
            self._location = location
            yield

    def open(self, directory: str) -> StorageBackend:
        """Return the directory with this name."""
        return open_storage(f"{self._location}/{directory}")
