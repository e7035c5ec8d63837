"""Locks of steps: pinned steps are kept, pins wait for deletions, and remains of failed processes are removed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ckptcore_testing.faults import FaultPlan, SimulatedCrash
from ckptcore_testing.faulty_storage import FaultyDirectories, FaultyStorage, with_faults

from ckptcore.builtin.local import open_local
from ckptcore.commit.location import commit_method
from ckptcore.commit.subdirectory import AtomicSubdirectories, subdirectory
from ckptcore.errors import (
    CheckpointNotFoundError,
    SaveLostError,
    StepPinnedError,
    StorageError,
    StorageFullError,
)
from ckptcore.protocols import AtomicDirectories, DirectoryLock, PutCondition, StorageBackend, StorageOptions
from tests.ownership.fake_clock import FakeClock
from tests.ownership.lockable_storages import EVERYWHERE, LEASED, LOCKED, OPTIONS

Place = Callable[[Path], StorageBackend]
NAMES = ["step_5", "5", "a.b.0123456789abcdef", "schritt-äöü", ".hidden", "x" * 200]

everywhere = pytest.mark.parametrize("place", EVERYWHERE)
where_leased = pytest.mark.parametrize("place", LEASED)
where_locked = pytest.mark.parametrize("place", LOCKED)


def holds_of_the_dead(store: StorageBackend) -> list[str]:
    """Return the contents of the lock directories."""
    return [*store.list_names(".ckptcore/pins"), *store.list_names(".ckptcore/deleting")]


@pytest.mark.parametrize("name", NAMES)
@everywhere
def test_a_pinned_step_is_not_deleted(place: Place, name: str, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    reader, owner = (
        commit_method(store).locks("run", clock=clock),
        commit_method(store).locks("run", clock=clock),
    )
    with reader.pin(name) as pin:
        pin.check()
        assert owner.pinned() == reader.pinned() == {name}
        assert owner.intend_deletion(name) is None
        other = owner.intend_deletion(name + "0")
        assert other is not None, "another step is another matter"
        other.close()
        clock.sleep(1000)
        owner.sweep()
        assert owner.intend_deletion(name) is None
    assert owner.pinned() == frozenset()
    intent = owner.intend_deletion(name)
    assert intent is not None
    with intent:
        intent.check()
    assert holds_of_the_dead(store) == []


@everywhere
def test_a_step_is_pinned_until_its_last_pin_is_released(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    holds = commit_method(store).locks("run", clock=clock)
    first, second = holds.pin("1"), holds.pin("1")
    first.close()
    first.close()
    assert holds.intend_deletion("1") is None
    second.close()
    assert holds.pinned() == frozenset()


@everywhere
def test_a_pin_waits_while_the_step_is_being_deleted(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    reader, owner = (
        commit_method(store).locks("run", clock=clock),
        commit_method(store).locks("run", clock=clock),
    )
    intent = owner.intend_deletion("1")
    assert intent is not None
    clock.repeat(100, intent.close, intent.close)
    reader.pin("2").close()
    assert clock.now() == 0, "no other step waits"
    with reader.pin("1"):
        assert 100 <= clock.now() < 110
        assert owner.intend_deletion("1") is None


@everywhere
def test_a_pin_has_a_timeout(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    holds = commit_method(store).locks("run", clock=clock)
    intent = holds.intend_deletion("1")
    assert intent is not None
    with pytest.raises(CheckpointNotFoundError, match=r"the step 1 in run .* 300 seconds"):
        holds.pin("1", wait_seconds=300)
    intent.check()
    assert holds.pinned() == frozenset(), "what failed pins nothing"


@where_locked
def test_locks_of_failed_processes_are_ignored(place: Place, tmp_path: Path) -> None:
    store, clock, plan = place(tmp_path), FakeClock(), FaultPlan()
    dying = commit_method(with_faults(store, plan)).locks("run", clock=clock)
    pin = dying.pin("1")
    intent = dying.intend_deletion("2")
    with pytest.raises(SimulatedCrash):
        plan.crash()
    assert len(holds_of_the_dead(store)) == 2
    living = commit_method(store).locks("run", clock=clock)
    living.pin("2").close()
    assert living.pinned() == frozenset()
    living.sweep()
    assert holds_of_the_dead(store) == []
    assert clock.now() == 0
    del pin, intent


@where_leased
def test_a_lease_expires_if_it_does_not_change(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    process = clock.process()
    dying = commit_method(store).locks("run", clock=process)
    pin = dying.pin("1")
    intent = dying.intend_deletion("2")
    process.is_frozen = True
    clock.sleep(10_000)
    owner = commit_method(store).locks("run", clock=clock)
    owner.sweep()
    assert owner.pinned() == {"1"}, "the time before the first observation is unknown"
    for _ in range(4):
        clock.sleep(20)
        owner.sweep()
    assert owner.pinned() == frozenset()
    assert holds_of_the_dead(store) == []
    for hold in (pin, intent):
        assert hold is not None
        with pytest.raises(SaveLostError):
            hold.check()


@where_leased
def test_a_slow_observer_does_not_expire_active_leases(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    reader, owner = (
        commit_method(store).locks("run", clock=clock),
        commit_method(store).locks("run", clock=clock),
    )
    with reader.pin("1"):
        for seconds in (1, 7, 59, 61, 500, 10_000, 3, 20, 40):
            clock.sleep(seconds)
            assert owner.pinned() == {"1"}


@where_leased
def test_an_observer_paused_with_the_reader_lets_it_renew(place: Place, tmp_path: Path) -> None:
    """A scheduler can pause and continue all processes of a job at once, while their clocks continue."""
    store, clock = place(tmp_path), FakeClock()
    process = clock.process()
    reader, owner = (
        commit_method(store).locks("run", clock=process),
        commit_method(store).locks("run", clock=clock),
    )
    pin = reader.pin("1")
    assert owner.pinned() == {"1"}
    process.is_frozen = True
    clock.sleep(10_000)
    assert owner.pinned() == {"1"}
    process.is_frozen = False
    clock.sleep(20)
    assert owner.pinned() == {"1"}
    pin.check()


@where_leased
def test_a_pin_waits_for_a_failed_deletion_to_expire_and_breaks_it(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    process = clock.process()
    intent = commit_method(store).locks("run", clock=process).intend_deletion("1")
    process.is_frozen = True
    assert intent is not None
    with commit_method(store).locks("run", clock=clock).pin("1"):
        assert 60 < clock.now() < 120
        process.is_frozen = False
        with pytest.raises(SaveLostError):
            intent.check()
    intent.close()


@where_leased
def test_leases_that_were_not_released_are_removed_later(place: Place, tmp_path: Path) -> None:
    """A process marked the lease as released, and failed before it deleted the lease."""
    store, clock = place(tmp_path), FakeClock()
    pin = commit_method(store).locks("run", clock=clock).pin("1")
    key = ".ckptcore/pins/" + store.list_names(".ckptcore/pins")[0]
    store.put(key, store.get(key).replace(b'"released": false', b'"released": true'))
    for _ in range(2):
        clock.sleep(100)
        with pytest.raises(SaveLostError, match="did not renew its lease"):
            pin.check()
    owner = commit_method(store).locks("run", clock=clock)
    assert owner.pinned() == frozenset()
    assert holds_of_the_dead(store) == []
    pin.close()


class LastMoment(FaultyStorage):
    """A storage that runs a function right before its first change."""

    def __init__(self, inner: StorageBackend, happening: Callable[[], None]) -> None:
        super().__init__(inner, FaultPlan())
        self._happenings = [happening]

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        while self._happenings:
            self._happenings.pop()()
        return super().put(key, data, condition=condition)

    def delete(self, keys: Sequence[str]) -> None:
        while self._happenings:
            self._happenings.pop()()
        super().delete(keys)


@where_leased
def test_a_reader_that_renews_at_the_last_moment_keeps_its_pin(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    process = clock.process()
    pin = commit_method(store).locks("run", clock=process).pin("1")
    process.is_frozen = True
    woken = []

    def wake() -> None:
        woken.append(clock.now())
        process.is_frozen = False
        pin.check()

    owner = commit_method(LastMoment(store, wake)).locks("run", clock=clock)
    while not woken:
        assert owner.pinned() == {"1"}
        clock.sleep(31)
    assert woken[0] > 60
    pin.check()


class OnlyWhatIsHeld(FaultyDirectories):
    """A storage that asserts that deleted directories are locked. Otherwise another process could lock them."""

    def delete_directory(self, key: str) -> None:
        assert self._directories.lock_directory(key) is None, f"{key} is not locked"
        super().delete_directory(key)


@where_locked
def test_leases_are_removed_under_their_locks(place: Place, tmp_path: Path) -> None:
    store, clock, plan = place(tmp_path), FakeClock(), FaultPlan()
    assert isinstance(store, AtomicDirectories)
    dying = commit_method(with_faults(store, plan)).locks("run", clock=clock)
    held = [dying.pin("1"), dying.pin("2")]
    with pytest.raises(SimulatedCrash):
        plan.crash()
    careful = commit_method(OnlyWhatIsHeld(store, store, FaultPlan())).locks("run", clock=clock)
    careful.sweep()
    careful.pin("1").close()
    assert holds_of_the_dead(store) == []
    del held


@everywhere
def test_other_files_are_not_removed(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    keys = [
        ".ckptcore/pins/notes.txt",
        ".ckptcore/pins/1.json",
        ".ckptcore/pins/.0123456789abcdef.json",
        ".ckptcore/pins/1.0123456789abcdeg/x",
        ".ckptcore/deleting/1.0123456789ABCDEF/x",
    ]
    for key in keys:
        store.put(key, b"{}")
    holds = commit_method(store).locks("run", clock=clock)
    for _ in range(5):
        holds.sweep()
        clock.sleep(100)
    holds.pin("1").close()
    assert sorted(key for key in store.list() if key in keys) == sorted(keys)


@where_leased
def test_an_unreadable_lease_is_active_until_it_expires(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    store.put(".ckptcore/pins/1.0123456789abcdef.json", b"\0\1\2")
    holds = commit_method(store).locks("run", clock=clock)
    assert holds.intend_deletion("1") is None
    for _ in range(4):
        clock.sleep(30)
        holds.sweep()
    assert holds.pinned() == frozenset()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_pin_on_read_only_storage_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps").chmod(0o500)
    expect_a_clear_refusal(open_local(str(tmp_path / "steps"), StorageOptions()))


def test_a_pin_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".ckptcore").write_bytes(b"")
    expect_a_clear_refusal(open_local(str(tmp_path), StorageOptions()))


def expect_a_clear_refusal(store: StorageBackend) -> None:
    holds = commit_method(store).locks("the/run", clock=FakeClock())
    assert holds.pinned() == frozenset()
    with pytest.raises(StorageError, match="cannot pin the step 1 in the/run.*read without a pin") as caught:
        holds.pin("1")
    assert caught.value.errno is not None


@everywhere
def test_invalid_arguments_are_refused(place: Place, tmp_path: Path) -> None:
    store = place(tmp_path)
    with pytest.raises(ValueError, match="lease_seconds"):
        commit_method(store).locks("run", lease_seconds=0)
    holds = commit_method(store).locks("run")
    for name in ("", "a/b"):
        with pytest.raises(ValueError, match="not the name of a step"):
            holds.pin(name)
        with pytest.raises(ValueError, match="not the name of a step"):
            holds.intend_deletion(name)
    assert list(store.list()) == []


class FullDisk(AtomicSubdirectories):
    """A directory of a file system without room for the announcement of a deletion."""

    def lock_directory(self, key: str) -> DirectoryLock | None:
        if key.startswith(".ckptcore/deleting"):
            raise StorageFullError(f"cannot create the directory {key}: the file system is full")
        return super().lock_directory(key)


def test_a_deletion_without_an_announcement_still_respects_pins(tmp_path: Path) -> None:
    """Otherwise no step could be deleted from a full disk."""
    owner = commit_method(FullDisk(open_local(str(tmp_path), OPTIONS), "steps")).locks("run")
    reader = commit_method(subdirectory(open_local(str(tmp_path), OPTIONS), "steps")).locks("run")
    with reader.pin("1"):
        assert owner.intend_deletion("1") is None
    intent = owner.intend_deletion("1")
    assert intent is not None
    with intent:
        intent.check()
        with reader.pin("1"), pytest.raises(StepPinnedError, match="pinned by a reader; delete it later"):
            intent.check()
        intent.check()
