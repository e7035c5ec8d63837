"""Every framework and layout through every server that the matrix of what is installed does not go through."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore_testing import StorageMatrixTests, StorageSample, installed_samples

from tests.servers.samples import SERVERS


class TestMatrix(StorageMatrixTests):
    """The tests of the matrix that need a storage, with the other storages."""

    def storages(self) -> Mapping[str, StorageSample]:
        """By name of the server."""
        installed = list(installed_samples().storages.values())
        return {name: sample for name, sample in SERVERS.items() if sample not in installed}
