"""The simulated disk loses exactly what a real disk may lose. Otherwise the tests that use it would prove nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from ckptcore_testing.faults import SimulatedCrash
from ckptcore_testing.simulated_disk import DiskDirectory, DiskFile, SimulatedDisk
from ckptcore_testing.simulated_storage import SimulatedStorage, open_simulated

from ckptcore.errors import ObjectNotFoundError
from ckptcore.protocols import StorageOptions

DURABLE = StorageOptions(durable=True)
NOT_DURABLE = StorageOptions(durable=False)


def states(disk: SimulatedDisk, count: int = 60) -> list[dict[str, bytes]]:
    """Return the states that a power failure could leave now."""
    return [contents(open_simulated(after, "", DURABLE)) for after in disk.after_power_loss(random.Random(1), count)]


def contents(storage: SimulatedStorage) -> dict[str, bytes]:
    return {key: storage.get(key) for key in storage.list()}


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_only_synced_bytes_and_names_survive_for_sure() -> None:
    disk, file = SimulatedDisk(), DiskFile()
    disk.change("create", (disk.root, "a", file))
    disk.write("write", file, 0, b"1" * 5000)
    assert {tuple(state) for state in states(disk)} == {(), ("a",)}
    disk.sync_directory("sync", disk.root)
    survivors = [state["a"] for state in states(disk)]
    assert survivors[0] == b"", "its name survives, its bytes need not"
    assert b"1" * 5000 in survivors
    assert bytes(5000) in survivors
    assert any(0 < data.count(b"1") < 5000 for data in survivors), "pages survive one by one"
    disk.sync_file("sync", file)
    assert states(disk) == [{"a": b"1" * 5000}] * 63
    disk.write("write", file, 0, b"2" * 5000)
    assert {b"1" * 5000, b"2" * 5000} < {state["a"] for state in states(disk)}


def test_syncing_a_file_does_not_save_its_name() -> None:
    disk, file = SimulatedDisk(), DiskFile()
    disk.change("create", (disk.root, "a", file))
    disk.sync_file("sync", file)
    assert {} in states(disk)


def test_syncing_a_directory_does_not_save_its_own_name() -> None:
    disk, directory, file = SimulatedDisk(), DiskDirectory(), DiskFile()
    disk.change("make", (disk.root, "d", directory))
    disk.change("create", (directory, "a", file))
    disk.sync_file("sync", file)
    disk.sync_directory("sync", directory)
    assert {} in states(disk)
    disk.sync_directory("sync", disk.root)
    assert states(disk) == [{"d/a": b""}] * 63


def test_a_rename_survives_whole_or_not_at_all() -> None:
    disk = SimulatedDisk()
    first, second, file = DiskDirectory(), DiskDirectory(), DiskFile()
    disk.change("make", (disk.root, "1", first))
    disk.change("make", (disk.root, "2", second))
    disk.change("create", (first, "a", file))
    for directory in (disk.root, first):
        disk.sync_directory("sync", directory)
    disk.change("rename", (first, "a", None), (second, "b", file))
    assert {tuple(state) for state in states(disk)} == {("1/a",), ("2/b",)}
    disk.sync_directory("sync", first)
    assert {tuple(state) for state in states(disk)} == {("2/b",)}, "one of its directories is enough"


def test_changes_of_one_name_survive_in_their_order() -> None:
    disk, file, other = SimulatedDisk(), DiskFile(), DiskFile()
    directory = DiskDirectory()
    disk.sync_file("sync", file)
    disk.write("write", other, 0, b"other")
    disk.sync_file("sync", other)
    disk.change("make", (disk.root, "d", directory))
    disk.sync_directory("sync", disk.root)
    disk.change("create", (directory, "a", file))
    disk.change("rename away", (directory, "a", None), (disk.root, "b", file))
    disk.sync_directory("sync", disk.root)
    assert states(disk) == [{"b": b""}] * 63, "the creation that came before does not come back"
    disk.change("create", (disk.root, "b", other))
    disk.change("remove", (disk.root, "b", None))
    disk.change("create", (disk.root, "b", file))
    assert {state.get("b") for state in states(disk)} == {b"", b"other", None}


def test_a_surviving_disk_is_independent_of_the_old_disk() -> None:
    disk = SimulatedDisk()
    open_simulated(disk, "disk://a", DURABLE).put("b", b"1")
    after = next(disk.after_power_loss(random.Random(0)))
    storage = open_simulated(after, "disk://a", DURABLE)
    storage.put("b", b"2")
    storage.put("c", b"3")
    assert contents(open_simulated(disk, "disk://a", DURABLE)) == {"b": b"1"}
    assert states(after) == [{"a/b": b"2", "a/c": b"3"}] * 63


# --- the storage on the disk ------------------------------------------------------------------------------------------


def put(storage: SimulatedStorage) -> None:
    storage.put("x/y", b"new")


def write(storage: SimulatedStorage) -> None:
    writer = storage.open_writer("x/y", 3)
    writer.write_at(0, b"new")
    writer.finish()


@pytest.mark.parametrize("action", [put, write])
def test_changes_of_durable_calls_survive(action: Callable[[SimulatedStorage], None]) -> None:
    disk = SimulatedDisk()
    action(open_simulated(disk, "disk://a/b", DURABLE))
    assert states(disk) == [{"a/b/x/y": b"new"}] * 63


@pytest.mark.parametrize("action", [put, write])
def test_changes_without_durability_may_be_lost(action: Callable[[SimulatedStorage], None]) -> None:
    disk = SimulatedDisk()
    storage = open_simulated(disk, "disk://a/b", NOT_DURABLE)
    action(storage)
    survivors = states(disk)
    assert {} in survivors
    assert {"a/b/x/y": b""} in survivors, "a name without its bytes"
    open_simulated(disk, "disk://a/b", DURABLE).sync(["x/y"])
    assert states(disk) == [{"a/b/x/y": b"new"}] * 63


@pytest.mark.parametrize("action", [put, write])
def test_deferred_names_survive_only_after_their_sync(action: Callable[[SimulatedStorage], None]) -> None:
    disk = SimulatedDisk()
    storage = open_simulated(disk, "disk://a/b", DURABLE)
    storage.put("kept", b"1")
    with storage.defer_names("x"):
        action(storage)
        assert {"a/b/kept": b"1"} in states(disk)
        storage.sync_directory("x")
        assert {"a/b/kept": b"1"} in states(disk), "the name of the directory is left to a rename"
        storage.rename("x", "z")
    assert states(disk) == [{"a/b/kept": b"1", "a/b/z/y": b"new"}] * 63


@pytest.mark.parametrize("action", [put, write])
def test_deferred_names_survive_after_the_block(action: Callable[[SimulatedStorage], None]) -> None:
    disk = SimulatedDisk()
    storage = open_simulated(disk, "disk://a/b", DURABLE)
    with storage.defer_names("x"):
        action(storage)
        assert {} in states(disk)
    assert states(disk) == [{"a/b/x/y": b"new"}] * 63


def test_a_directory_below_a_deferred_one_can_be_synced() -> None:
    disk = SimulatedDisk()
    storage = open_simulated(disk, "disk://a", DURABLE)
    with storage.defer_names("x"):
        storage.put("x/y/z", b"1")
        storage.sync_directory("x/y")
        disk.sync_directory("sync", storage._directory(("a", "x")))
        disk.sync_directory("sync", storage._directory(("a",)))
        disk.sync_directory("sync", disk.root)
        assert states(disk) == [{"a/x/y/z": b"1"}] * 63


def test_a_put_leaves_the_old_or_the_new_object_at_every_step() -> None:
    dry = SimulatedDisk()
    open_simulated(dry, "", DURABLE).put("x/y", b"old")
    first = len(dry.steps)
    put(open_simulated(dry, "", DURABLE))
    assert len(dry.steps) > first + 3
    for step in range(first, len(dry.steps)):
        disk = SimulatedDisk(crash_at=step)
        storage = open_simulated(disk, "", DURABLE)
        storage.put("x/y", b"old")
        with pytest.raises(SimulatedCrash):
            put(storage)
        with pytest.raises(SimulatedCrash):
            storage.get("x/y")
        for after in disk.after_power_loss(random.Random(step), 20):
            assert open_simulated(after, "", DURABLE).get("x/y") in (b"old", b"new")


def commit(storage: SimulatedStorage, *, careful: bool) -> None:
    """Overwrite a directory, as a commit by exchange does. Without `careful`, leave out its syncs."""
    storage.put("hidden/part", b"new part")
    storage.put("hidden/root", b"new part")
    if careful:
        storage.sync_directory("hidden")
    storage.exchange("hidden", "final")
    storage.delete_directory("hidden")


@pytest.mark.parametrize("careful", [True, False])
def test_a_commit_without_syncs_is_detected(careful: bool) -> None:
    """The simulated disk distinguishes a safe protocol from an unsafe protocol."""
    dry = SimulatedDisk()
    options = DURABLE if careful else NOT_DURABLE

    def prepare(disk: SimulatedDisk) -> SimulatedStorage:
        open_simulated(disk, "", DURABLE).put("final/part", b"old part")
        open_simulated(disk, "", DURABLE).put("final/root", b"old part")
        return open_simulated(disk, "", options)

    storage = prepare(dry)
    first = len(dry.steps)
    commit(storage, careful=careful)
    broken = 0
    for step in range(first, len(dry.steps) + 1):
        disk = SimulatedDisk(crash_at=step)
        storage = prepare(disk)
        try:
            commit(storage, careful=careful)
        except SimulatedCrash:
            pass
        else:
            assert step == len(dry.steps)
        for after in disk.after_power_loss(random.Random(step), 10):
            survivor = open_simulated(after, "", DURABLE)
            try:
                broken += survivor.get("final/root") not in (b"old part", b"new part")
                broken += survivor.get("final/root") != survivor.get("final/part")
            except ObjectNotFoundError:
                broken += 1
    assert (broken == 0) is careful


def test_a_power_loss_releases_locks() -> None:
    disk = SimulatedDisk()
    assert open_simulated(disk, "", DURABLE).lock_directory("a") is not None
    assert open_simulated(disk, "", DURABLE).lock_directory("a") is None
    for after in disk.after_power_loss(random.Random(0)):
        assert open_simulated(after, "", DURABLE).lock_directory("a") is not None
