"""The memory of a job as a storage: conformance, loss of hosts, corrupt copies, limits."""

from __future__ import annotations

import pytest
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.storage import PeerStorage
from ckptcore_testing import NewObjectTests, StorageBackendTests

from ckptcore.protocols import StorageBackend

pytestmark = pytest.mark.system


class OnThreeHosts:
    """A storage of three hosts, with one copy."""

    @pytest.fixture(autouse=True)
    def use_servers(self, three_hosts: Session) -> None:
        """Use the process on one of the hosts."""
        self.session = three_hosts

    def open(self, directory: str) -> StorageBackend:
        """Return the same directory for the same name."""
        return PeerStorage(self.session.job, f"{directory}/", self.session)


class TestConformance(OnThreeHosts, StorageBackendTests):
    """Conformance tests."""

    examples = 3
    threads = 4


class TestNewObjects(OnThreeHosts, NewObjectTests):
    """New objects."""
