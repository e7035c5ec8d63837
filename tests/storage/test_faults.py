"""A faulty storage fails at the given calls, and only there."""

from __future__ import annotations

import pytest
from ckptcore_testing.faults import (
    CrashAt,
    FailAt,
    Fault,
    FaultPlan,
    FlipBitAt,
    FullAfter,
    ShortReadAt,
    SimulatedCrash,
)
from ckptcore_testing.faulty_storage import FaultyDirectories, FaultyStorage, with_faults
from ckptcore_testing.simulated_disk import SimulatedDisk
from ckptcore_testing.simulated_storage import open_simulated

from ckptcore.builtin.memory import MemoryStorages
from ckptcore.errors import CorruptCheckpointError, StorageError, StorageFullError
from ckptcore.protocols import AtomicDirectories, StorageBackend, StorageOptions


def faulty(*faults: Fault) -> tuple[FaultyStorage, StorageBackend, FaultPlan]:
    inner = MemoryStorages().open("memory://a", StorageOptions())
    plan = FaultPlan(*faults)
    return with_faults(inner, plan), inner, plan


def directories(*faults: Fault) -> tuple[FaultyDirectories, StorageBackend, FaultPlan]:
    inner = open_simulated(SimulatedDisk(), "", StorageOptions())
    plan = FaultPlan(*faults)
    storage = with_faults(inner, plan)
    assert isinstance(storage, FaultyDirectories)
    return storage, inner, plan


def use(storage: StorageBackend) -> None:
    """Run six operations."""
    storage.put("a", b"0123")
    writer = storage.open_writer("b", 8)
    writer.write_at(0, b"4567")
    writer.write_at(4, b"89ab")
    writer.finish()
    storage.delete(["a", "c"])


def test_operations_are_counted() -> None:
    storage, _, plan = faulty()
    use(storage)
    storage.get("b", 2, 4)
    storage.get_into("b", [(1, memoryview(bytearray(3)))])
    assert [(step.name, step.keys, step.offset, step.nbytes, step.changes) for step in plan.operations] == [
        ("put", ("a",), 0, 4, True),
        ("open_writer", ("b",), 0, 0, True),
        ("write_at", ("b",), 0, 4, True),
        ("write_at", ("b",), 4, 4, True),
        ("finish", ("b",), 0, 0, True),
        ("delete", ("a", "c"), 0, 0, True),
        ("get", ("b",), 2, 0, False),
        ("get_into", ("b",), 1, 3, False),
    ]
    assert [step.number for step in plan.operations] == list(range(8))
    assert (plan.bytes_written, plan.bytes_read) == (12, 5)


def test_a_faulty_storage_offers_directories_if_its_storage_does() -> None:
    assert not isinstance(faulty()[0], AtomicDirectories)
    assert isinstance(directories()[0], AtomicDirectories)


@pytest.mark.parametrize("operation", range(6))
def test_a_failing_operation_raises_once_and_changes_nothing(operation: int) -> None:
    storage, inner, plan = faulty(FailAt(operation, StorageError("as told")))
    with pytest.raises(StorageError, match="as told"):
        use(storage)
    assert len(plan.operations) == operation + 1
    assert list(inner.list()) == [[], ["a"], ["a"], ["a"], ["a"], ["a", "b"]][operation]
    use(storage)
    assert inner.get("b") == b"456789ab"


@pytest.mark.parametrize("operation", range(6))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_failed_process_does_nothing_more(operation: int, moment: str) -> None:
    storage, inner, plan = faulty(CrashAt(operation, moment))  # type: ignore[arg-type]  # `moment` is a plain string
    with pytest.raises(SimulatedCrash):
        use(storage)
    assert plan.crashed
    done = operation + (moment == "after")
    assert list(inner.list()) == [[], ["a"], ["a"], ["a"], ["a"], ["a", "b"], ["b"]][done]
    for call in (lambda: storage.put("z", b"1"), lambda: storage.get("a"), lambda: storage.open_writer("z")):
        with pytest.raises(SimulatedCrash):
            call()
    assert len(plan.operations) == operation + 1


def test_a_crash_is_not_an_exception() -> None:
    assert not issubclass(SimulatedCrash, Exception)


def test_a_crash_midway_leaves_half_of_the_operation() -> None:
    storage, inner, _ = directories(CrashAt(2, "midway"))
    with pytest.raises(SimulatedCrash):
        use(storage)
    assert inner.get("b") == b"45"
    storage, inner, _ = directories(CrashAt(0, "midway"))
    for key in ("a/1", "a/2", "a/3", "a/4"):
        inner.put(key, b"1")
    with pytest.raises(SimulatedCrash):
        storage.delete_directory("a")
    assert list(inner.list()) == ["a/3", "a/4"]
    storage, inner, _ = directories(CrashAt(0, "midway"))
    with pytest.raises(SimulatedCrash):
        storage.put("a", b"1")
    assert list(inner.list()) == []


def test_a_failed_process_holds_no_locks() -> None:
    storage, inner, _ = directories(CrashAt(2))
    assert isinstance(inner, AtomicDirectories)
    lock = storage.lock_directory("a")
    assert lock is not None
    lock.__enter__()
    assert storage.lock_directory("a") is None
    assert inner.lock_directory("a") is None
    with pytest.raises(SimulatedCrash):
        storage.put("b", b"1")
    assert inner.lock_directory("a") is not None
    lock.__exit__(None, None, None)
    assert inner.lock_directory("a") is None, "its late exit lets nothing go that another holds"


def test_a_failed_process_aborts_nothing() -> None:
    storage, inner, _ = directories(CrashAt(1))
    writer = storage.open_writer("a", 2)
    with pytest.raises(SimulatedCrash):
        writer.write_at(0, b"1")
    writer.abort()
    assert list(inner.list()) == ["a"]


def test_an_abort_that_fails_leaves_the_object() -> None:
    storage, inner, _ = directories(FailAt(1, StorageError("as told")))
    writer = storage.open_writer("a", 2)
    writer.abort()
    assert list(inner.list()) == ["a"]


def test_a_full_storage_refuses_writes() -> None:
    storage, inner, plan = faulty(FullAfter(7))
    storage.put("a", b"0123")
    with pytest.raises(StorageFullError, match="full"):
        storage.put("b", b"0123")
    storage.put("c", b"012")
    assert list(inner.list()) == ["a", "c"]
    assert plan.bytes_written == 7


def test_short_reads_return_less_data() -> None:
    storage, inner, _ = faulty(*[ShortReadAt(number, 3) for number in range(4)])
    inner.put("a", b"0123456789")
    assert storage.get("a", 0, 5) == b"01"
    assert storage.get_with_tag("a")[0] == b"0123456"
    assert storage.size("a") == 7
    with pytest.raises(CorruptCheckpointError) as caught:
        storage.get_into("a", [(0, memoryview(bytearray(10)))])
    assert (caught.value.key, caught.value.start, caught.value.stop) == ("a", 7, 10)
    assert storage.get("a") == b"0123456789"


def test_one_bit_of_a_read_or_write_is_flipped() -> None:
    storage, inner, _ = faulty(FlipBitAt(0, 9), FlipBitAt(1, 17), FlipBitAt(2, 80 + 8))
    inner.put("a", bytes(10))
    assert storage.get("a") == b"\0\2" + bytes(8)
    memory = [bytearray(2), bytearray(2)]
    storage.get_into("a", [(0, memoryview(memory[0])), (8, memoryview(memory[1]))])
    assert memory == [b"\0\0", b"\2\0"]
    storage.put("b", bytes(10))
    assert inner.get("b") == b"\0\1" + bytes(8)
    assert inner.get("a") == bytes(10)


def test_a_plan_counts_the_operations_of_several_storages() -> None:
    stores = MemoryStorages()
    plan = FaultPlan(CrashAt(1))
    first, second = (with_faults(stores.open(f"memory://{name}", StorageOptions()), plan) for name in "ab")
    first.put("a", b"1")
    with pytest.raises(SimulatedCrash):
        second.put("a", b"1")
    with pytest.raises(SimulatedCrash):
        first.get("a")
