"""Every storage of ours does what every storage must."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptcore.builtin.local import open_local
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.protocols import AtomicDirectories, StorageBackend, StorageOptions
from ckptcore.testing.faults import FaultPlan
from ckptcore.testing.faulty_storage import FaultyDirectories, with_faults
from ckptcore.testing.simulated_disk import SimulatedDisk
from ckptcore.testing.simulated_storage import SimulatedStorage, open_simulated
from ckptcore.testing.storage import StorageBackendTests
from ckptcore.testing.storage_directories import AtomicDirectoriesTests, DirectoryStorage


class _OnDisk:
    options = StorageOptions(durable=True)
    directory: Path

    @pytest.fixture(autouse=True)
    def _give_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def open(self, directory: str) -> DirectoryStorage:
        return open_local(f"{self.directory}/{directory}", self.options)


class TestLocal(_OnDisk, StorageBackendTests):
    """The local storage, durable."""

    examples = 10


class TestLocalDirectories(_OnDisk, AtomicDirectoriesTests):
    """Its directories."""


class TestLocalNotDurable(_OnDisk, StorageBackendTests):
    """The local storage, not durable."""

    options = StorageOptions(durable=False)


class TestLocalDirectoriesNotDurable(_OnDisk, AtomicDirectoriesTests):
    """Its directories."""

    options = StorageOptions(durable=False)


class TestLocalThroughTheCache(_OnDisk, StorageBackendTests):
    """The local storage without direct I/O."""

    options = StorageOptions(durable=False, config={"direct_io": False})
    examples = 5


class _InMemory:
    storages: MemoryStorages

    @pytest.fixture(autouse=True)
    def _give_storages(self) -> None:
        self.storages = MemoryStorages()

    def open(self, directory: str) -> StorageBackend:
        return self.storages.open(f"memory://bucket/{directory}", StorageOptions())


class TestMemory(_InMemory, StorageBackendTests):
    """The memory storage."""

    def test_it_is_an_object_store(self, storage: StorageBackend) -> None:
        assert not isinstance(storage, AtomicDirectories)


class TestMemoryWithoutFaults(_InMemory, StorageBackendTests):
    """The wrapper, as long as nothing goes wrong."""

    examples = 5

    def open(self, directory: str) -> StorageBackend:
        return with_faults(super().open(directory), FaultPlan())


class _Simulated:
    disk: SimulatedDisk

    @pytest.fixture(autouse=True)
    def _give_disk(self) -> None:
        self.disk = SimulatedDisk()

    def open(self, directory: str) -> SimulatedStorage:
        return open_simulated(self.disk, f"disk://{directory}", StorageOptions())


class TestSimulated(_Simulated, StorageBackendTests):
    """The simulated disk."""


class TestSimulatedDirectories(_Simulated, AtomicDirectoriesTests):
    """Its directories."""


class TestSimulatedWithoutFaults(_Simulated, AtomicDirectoriesTests):
    """The wrapper keeps the directories."""

    def open(self, directory: str) -> FaultyDirectories:  # type: ignore[override]  # the other class that has both
        storage = with_faults(super().open(directory), FaultPlan())
        assert isinstance(storage, FaultyDirectories)
        return storage
