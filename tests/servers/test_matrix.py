"""Every framework and layout on the servers that are not in the matrix of installed plugins."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore_testing import StorageMatrixTests, StorageSample, installed_samples

from tests.servers.samples import SERVERS


class TestMatrix(StorageMatrixTests):
    """The tests of the matrix that need a storage, on the other servers."""

    def storages(self) -> Mapping[str, StorageSample]:
        """Return the other servers by name."""
        installed = list(installed_samples().storages.values())
        return {name: sample for name, sample in SERVERS.items() if sample not in installed}
