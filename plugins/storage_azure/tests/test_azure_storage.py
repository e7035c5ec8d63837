"""The storage conformance tests on Azure, with Azurite."""

from __future__ import annotations

import pytest
from ckptcore_azure.plugin import AzurePlugin
from ckptcore_azure.testing import Azurite
from ckptcore_obstore.storage import ObjectStoreDirectory
from ckptcore_testing import NewObjectTests, PluginTests, StorageBackendTests, UploadsTests

from ckptcore.protocols import StorageOptions

pytestmark = pytest.mark.system


class TestPlugin(PluginTests):
    """Conformance tests of the plugin."""

    entry_point = "azure"


class OnAzurite:
    """Tests on Azurite, with a new container for each test."""

    @pytest.fixture(autouse=True)
    def use_server(self, emulator: Azurite) -> None:
        """Create the container."""
        self.plugin = AzurePlugin()
        self.server = emulator
        self.container = emulator.create_bucket()

    def open(self, directory: str) -> ObjectStoreDirectory:
        """Return the directory with this name in the container."""
        config = {**self.server.options, "part_bytes": 5 << 20}
        storage = self.plugin.open(f"az://{self.container}/{directory}", StorageOptions(config=config))
        assert isinstance(storage, ObjectStoreDirectory)
        return storage


class TestAzurite(OnAzurite, StorageBackendTests):
    """Conformance tests."""

    examples = 1
    threads = 4
    refused_keys = ("...", "a..")


class TestNewObjects(OnAzurite, NewObjectTests):
    """Conformance tests of writers of new objects."""


class TestUploads(OnAzurite, UploadsTests):
    """Conformance tests of unfinished uploads."""

    upload_bytes = 11 << 20
