"""The storage conformance tests on fsspec."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckptcore_fsspec.opening import open_url
from ckptcore_testing import StorageBackendTests

from ckptcore.protocols import StorageBackend, StorageOptions


class TestMemory(StorageBackendTests):
    """An object store. Writers collect their data before they upload it."""

    conditional = False
    examples = 5

    def open(self, directory: str) -> StorageBackend:
        return open_url(f"fsspec+memory://{directory}", StorageOptions())


class TestFile(StorageBackendTests):
    """Files and directories. Writers rename a complete file to its final name."""

    conditional = False
    examples = 5

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def open(self, directory: str) -> StorageBackend:
        return open_url(f"fsspec+file://{self.directory}/{directory}", StorageOptions())
