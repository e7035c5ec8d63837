"""Conformance of every storage, on every server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptcore_testing import StorageBackendTests

from ckptcore.protocols import StorageBackend
from tests.servers.samples import SERVERS, open_storage


class TestStorage(StorageBackendTests):
    """Found by its URL and the variables of the environment, as most programs find it."""

    examples = 2
    threads = 4

    @pytest.fixture(autouse=True, params=list(SERVERS))
    def _use_server(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
        with SERVERS[request.param].open(tmp_path) as location:
            self._location = location
            yield

    def open(self, directory: str) -> StorageBackend:
        """The same directory for the same name."""
        return open_storage(f"{self._location}/{directory}")
