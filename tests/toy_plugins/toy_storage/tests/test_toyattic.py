"""The toy storage satisfies the protocol of storages."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckptcore_testing import PluginTests, StorageBackendTests
from toyattic.storage import open_attic

from ckptcore.protocols import StorageBackend, StorageOptions


class TestAttic(StorageBackendTests):
    examples = 5
    database: Path

    @pytest.fixture(autouse=True)
    def _give_database(self, tmp_path: Path) -> None:
        self.database = tmp_path / "attic.sqlite"

    def open(self, directory: str) -> StorageBackend:
        return open_attic(f"toy://{self.database}/{directory}", StorageOptions(durable=False))


class TestPlugin(PluginTests):
    entry_point = "toyattic"
    heavy = ("sqlite3",)
