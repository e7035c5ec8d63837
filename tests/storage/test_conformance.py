"""Conformance tests of all storages in the core and in `ckptcore_testing`."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckptcore_testing.far_storage import FarStorage
from ckptcore_testing.faults import FaultPlan
from ckptcore_testing.faulty_storage import FaultyDirectories, FaultyStorage, with_faults
from ckptcore_testing.simulated_disk import SimulatedDisk
from ckptcore_testing.simulated_storage import SimulatedStorage, open_simulated
from ckptcore_testing.storage import StorageBackendTests
from ckptcore_testing.storage_directories import AtomicDirectoriesTests, DirectoryStorage
from ckptcore_testing.storage_writers import NewObjectTests, UploadsTests

from ckptcore.builtin.local import open_local
from ckptcore.builtin.memory import MemoryStorage, MemoryStorages
from ckptcore.commit.subdirectory import Subdirectory
from ckptcore.protocols import AtomicDirectories, StorageBackend, StorageOptions


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
    """The directories of the durable local storage."""


class TestLocalNotDurable(_OnDisk, StorageBackendTests):
    """The local storage, not durable."""

    options = StorageOptions(durable=False)


class TestLocalDirectoriesNotDurable(_OnDisk, AtomicDirectoriesTests):
    """The directories of the local storage without durability."""

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

    def open(self, directory: str) -> MemoryStorage:
        return self.storages.open(f"memory://bucket/{directory}", StorageOptions())


class TestMemory(_InMemory, StorageBackendTests):
    """The memory storage."""

    def test_the_memory_storage_is_an_object_store(self, storage: StorageBackend) -> None:
        assert not isinstance(storage, AtomicDirectories)


class TestFar(StorageBackendTests):
    """A simulated remote storage, with the defaults of `StorageBackend`."""

    @pytest.fixture(autouse=True)
    def _give_storages(self) -> None:
        self.storages = MemoryStorages()

    def open(self, directory: str) -> StorageBackend:
        return FarStorage(self.storages.open(f"memory://bucket/{directory}", StorageOptions()))

    def test_no_unfinished_upload_is_kept(self, storage: StorageBackend) -> None:
        assert storage.abort_uploads() == 0


class TestFarAndThrottled(TestFar):
    """The simulated remote storage with latency and throttling."""

    examples = 2

    def open(self, directory: str) -> StorageBackend:
        inner = self.storages.open(f"memory://bucket/{directory}", StorageOptions())
        return FarStorage(inner, latency=0.0002, bytes_per_second=500e6, most_at_once=3)


class TestMemoryWithoutFaults(_InMemory, StorageBackendTests):
    """The wrapper for faults, without faults."""

    examples = 5

    def open(self, directory: str) -> FaultyStorage:  # type: ignore[override]  # has the same methods
        return with_faults(super().open(directory), FaultPlan())


class TestMemoryCreates(_InMemory, NewObjectTests):
    """Writers of new objects in the memory storage."""


class TestMemoryUploads(_InMemory, UploadsTests):
    """Unfinished uploads in the memory storage."""


class _InDirectory(_InMemory):
    def open(self, directory: str) -> Subdirectory:  # type: ignore[override]  # has the same methods
        return Subdirectory(self.storages.open("memory://bucket", StorageOptions()), directory)


class TestDirectoryCreates(_InDirectory, NewObjectTests):
    """A directory of a storage passes `open_new` on to the storage."""


class TestDirectoryUploads(_InDirectory, UploadsTests):
    """A directory of a storage passes `abort_uploads` on to the storage."""


class TestFaultyUploads(_InMemory, UploadsTests):
    """The wrapper for faults passes `abort_uploads` on to the storage."""

    def open(self, directory: str) -> FaultyStorage:  # type: ignore[override]  # has the same methods
        return with_faults(super().open(directory), FaultPlan())


class TestFarCreates(NewObjectTests):
    """The default of `open_new`: the writer checks that no object exists just before it completes its own object."""

    _give_storages = TestFar._give_storages
    open = TestFar.open


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
    """The directories of the simulated disk."""


class TestSimulatedWithoutFaults(_Simulated, AtomicDirectoriesTests):
    """The directories of the simulated disk through the wrapper for faults, without faults."""

    def open(self, directory: str) -> FaultyDirectories:  # type: ignore[override]  # has the same methods
        storage = with_faults(super().open(directory), FaultPlan())
        assert isinstance(storage, FaultyDirectories)
        return storage
