"""Preferred sizes of requests, and storages that wrap others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ckptcore_testing import FaultPlan, with_faults
from ckptcore_testing.far_storage import FarStorage
from ckptcore_testing.faulty_storage import FaultyStorage
from ckptcore_testing.simulated_disk import SimulatedDisk
from ckptcore_testing.simulated_storage import open_simulated
from ckptcore_tiers.fallback_storage import FallbackStorage

from ckptcore.builtin.local import open_local
from ckptcore.commit.fenced_store import FencedStore
from ckptcore.commit.subdirectory import AtomicSubdirectories, Subdirectory, subdirectory
from ckptcore.io.threads import requests_of
from ckptcore.protocols import AtomicDirectories, StampedReader, StorageBackend, StorageCapabilities, StorageOptions

from .watched_storage import WatchedStorage, memory_storage


class ManyAtOnce(WatchedStorage):
    """A storage that prefers many concurrent requests."""

    concurrency = 12
    part_bytes = 8 << 20


class Immodest(WatchedStorage):
    """A storage with capabilities that would need too much memory."""

    concurrency = 100_000
    part_bytes = 5 << 40


class Senseless(WatchedStorage):
    """A storage with invalid capabilities."""

    concurrency = 0
    part_bytes = -1


def test_default_capabilities_of_a_storage() -> None:
    storage = WatchedStorage(memory_storage())
    assert requests_of(storage) == StorageCapabilities(1 << 20, 1, 1)


STORAGES: dict[str, Callable[[Path], StorageBackend]] = {
    "local": lambda path: open_local(str(path), StorageOptions()),
    "memory": lambda _: memory_storage(),
    "many at once": lambda _: ManyAtOnce(memory_storage()),
    "far": lambda _: FarStorage(concurrency=7, part_bytes=3 << 20, request_bytes=5 << 20),
    "simulated": lambda _: open_simulated(SimulatedDisk(), "disk://directory", StorageOptions()),
}


@pytest.fixture(params=list(STORAGES))
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> StorageBackend:
    """Yield each kind of storage."""
    return STORAGES[request.param](tmp_path)


def test_wrapping_storages_pass_capabilities_on(storage: StorageBackend) -> None:
    for before in (
        subdirectory(storage, "a"),
        subdirectory(subdirectory(storage, "a"), "b"),
        with_faults(storage, FaultPlan()),
        FallbackStorage(storage, "step", memory_storage(), "step"),
    ):
        assert before.capabilities == storage.capabilities
        assert requests_of(before) == requests_of(storage)


def test_a_subdirectory_behaves_like_its_storage(storage: StorageBackend) -> None:
    inside = subdirectory(storage, "a")
    assert isinstance(inside, AtomicDirectories) == isinstance(storage, AtomicDirectories)
    storage.put("a/data", b"1234")
    for method in ("open_reader", "open_stamped"):
        of_storage, of_directory = getattr(storage, method)("a/data"), getattr(inside, method)("data")
        assert type(of_directory) is type(of_storage)
        assert isinstance(of_directory, StampedReader) == isinstance(of_storage, StampedReader)
    seen: list[list[str]] = []
    writers = [storage.open_new("a/b", 1), inside.open_new("c", 1)]
    assert type(writers[0]) is type(writers[1])
    for writer in writers:
        writer.abort()
    inside.delete_while(["data", "missing"], lambda: seen.append(list(storage.list())))
    assert seen == [["a/data"]] and list(storage.list()) == []


@pytest.mark.parametrize("kind", [Subdirectory, AtomicSubdirectories, FencedStore, FallbackStorage, FaultyStorage])
def test_wrapping_storages_forward_every_method(kind: type[StorageBackend]) -> None:
    names = {name for name in vars(StorageBackend) if not name.startswith("_")}
    inherited = {name for name in names if getattr(kind, name) is getattr(StorageBackend, name)}
    # FaultyStorage inherits these methods, so that the reads and deletions that they call can fail.
    assert inherited == ({"open_reader", "open_stamped", "delete_while"} if kind is FaultyStorage else set())


def test_extreme_and_invalid_capabilities_are_limited() -> None:
    limited = requests_of(Immodest(memory_storage()))
    assert 12 < limited.concurrency < 1000
    assert 8 << 20 < limited.part_bytes < 1 << 30
    storage: StorageBackend = Senseless(memory_storage())
    assert requests_of(storage) == StorageCapabilities(1 << 20, 1, 1)
