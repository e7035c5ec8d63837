"""S3 as a storage: what every storage must do, on two servers."""

from __future__ import annotations

import pytest
from ckptcore_s3.plugin import S3Plugin
from ckptcore_s3.testing import S3Server

from ckptcore.protocols import StorageBackend, StorageOptions
from ckptcore.testing import StorageBackendTests


class TestMiniStack(StorageBackendTests):
    """On a server that keeps objects in files."""

    examples = 5

    @pytest.fixture(autouse=True)
    def use_server(self, ministack: S3Server) -> None:
        """A bucket of its own for each test."""
        self.plugin = S3Plugin()
        self.server = ministack
        self.bucket = ministack.create_bucket()

    def open(self, directory: str) -> StorageBackend:
        """The same directory for the same name."""
        config = {**self.server.options, "part_bytes": 5 << 20}
        return self.plugin.open(f"s3://{self.bucket}/{directory}", StorageOptions(config=config))
