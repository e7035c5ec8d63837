"""Ownership of a directory of steps. A second job is refused, or takes over from a failed job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import pytest
from ckptcore_testing.faults import FailAt, FaultPlan
from ckptcore_testing.faulty_storage import FaultyStorage, with_faults

from ckptcore.commit import leases
from ckptcore.commit.location import commit_method
from ckptcore.commit.locks import Lock, Locks
from ckptcore.errors import (
    CheckpointNotFoundError,
    ConditionFailedError,
    DirectoryInUseError,
    SaveLostError,
    StorageError,
    StorageFullError,
)
from ckptcore.protocols import AtomicDirectories, DirectoryLock, PutCondition, StorageBackend
from tests.ownership.fake_clock import FakeClock
from tests.ownership.lockable_storages import EVERYWHERE, LEASED, LOCKED, entered, memory, no_flock

Place = Callable[[Path], StorageBackend]
LEASE = ".ckptcore/owner.json"

everywhere = pytest.mark.parametrize("place", EVERYWHERE)
where_leased = pytest.mark.parametrize("place", LEASED)
where_locked = pytest.mark.parametrize("place", LOCKED)


@everywhere
def test_a_second_owner_is_refused_with_the_name_of_the_first(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    with commit_method(store).locks("the/run", clock=clock).own() as first:
        with pytest.raises(DirectoryInUseError, match=r"the/run is in use: this process, process \d+ on .* since 20"):
            commit_method(store).locks("the/run", clock=clock).own()
        first.check()
    commit_method(store).locks("the/run", clock=clock).own().close()


@where_locked
def test_a_refused_process_waits_for_the_record_of_the_owner(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, the owner may write its record long after it has the lock."""
    store, clock = place(tmp_path), FakeClock()
    put = store.put

    def late_put(key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        left = iter(range(20))

        def look(_: float) -> None:
            if next(left, None) == 15:
                put(key, data)

        monkeypatch.setattr(clock, "sleep", look)
        with pytest.raises(DirectoryInUseError, match=r"the/run is in use: this process, process \d+ on .* since 20"):
            commit_method(store).locks("the/run", clock=clock).own()
        return put(key, data, condition=condition)

    monkeypatch.setattr(store, "put", late_put)
    with commit_method(store).locks("the/run", clock=FakeClock()).own() as first:
        first.check()


@everywhere
def test_the_error_is_a_blocking_io_error(place: Place, tmp_path: Path) -> None:
    store = place(tmp_path)
    with commit_method(store).locks("run", clock=FakeClock()).own(), pytest.raises(BlockingIOError):
        commit_method(store).locks("run", clock=FakeClock()).own()


@everywhere
def test_close_releases_the_directory(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    first = commit_method(store).locks("run", clock=clock).own()
    first.close()
    first.close()
    with pytest.raises(SaveLostError, match="was closed"):
        first.check()
    with commit_method(store).locks("run", clock=clock).own() as second:
        first.close()
        second.check()


@everywhere
def test_the_directory_of_a_living_job_is_not_taken_over(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    with commit_method(store).locks("run", clock=clock).own() as first:
        with pytest.raises(DirectoryInUseError, match="is alive"):
            commit_method(store).locks("run", clock=clock).own(if_in_use="take over")
        first.check()


@where_locked
def test_an_owner_whose_record_was_removed_notices(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    first = commit_method(store).locks("run", clock=clock).own()
    store.delete([".ckptcore/owner/owner.json"])
    with pytest.raises(SaveLostError, match="run no longer belongs to this process"):
        first.check()
    first.close()
    with commit_method(store).locks("run", clock=clock).own() as second:
        with pytest.raises(SaveLostError):
            first.check()
        second.check()


@where_locked
def test_without_working_locks_the_first_owner_detects_the_second(place: Place, tmp_path: Path) -> None:
    """Some network file systems have locks that work only within one machine."""
    store, clock = place(tmp_path), FakeClock()
    first = commit_method(store).locks("run", clock=clock).own()
    store.put(".ckptcore/owner/owner.json", b"the record of an owner on another machine")
    for _ in range(2):
        with pytest.raises(SaveLostError):
            first.check()


# --- leases -----------------------------------------------------------------------------------------------------------


@where_leased
def test_a_lease_is_renewed_as_long_as_it_is_held(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    first = commit_method(store).locks("run", lease_seconds=60, clock=clock).own()
    tags = set()
    for _ in range(6):
        tags.add(store.get_with_tag(LEASE)[1])
        clock.sleep(60)
        first.check()
    assert len(tags) == 6
    first.close()
    _, released = store.get_with_tag(LEASE)
    clock.sleep(600)
    assert store.get_with_tag(LEASE)[1] == released, "nothing is renewed that was let go"


@where_leased
def test_a_failed_owner_is_reported_and_can_be_taken_over(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    dead = clock.process()
    commit_method(store).locks("run", lease_seconds=60, clock=dead).own()
    dead.is_frozen = True
    with pytest.raises(DirectoryInUseError, match=r"if_in_use='take over', which waits about 60 seconds"):
        commit_method(store).locks("run", clock=clock).own()
    before = clock.now()
    with commit_method(store).locks("run", clock=clock).own(if_in_use="take over") as second:
        assert 60 < clock.now() - before < 120
        second.check()


@where_leased
def test_a_takeover_uses_the_lease_time_of_the_former_owner(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    frozen = clock.process()
    commit_method(store).locks("run", lease_seconds=600, clock=frozen).own()
    frozen.is_frozen = True
    before = clock.now()
    commit_method(store).locks("run", lease_seconds=1, clock=clock).own(if_in_use="take over").close()
    assert clock.now() - before > 600


@where_leased
def test_a_former_owner_never_gets_its_directory_back(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    process = clock.process()
    zombie = commit_method(store).locks("run", clock=process).own()
    process.is_frozen = True
    second = commit_method(store).locks("run", clock=clock).own(if_in_use="take over")
    process.is_frozen = False
    with pytest.raises(SaveLostError, match="run was taken over by"):
        zombie.check()
    clock.sleep(1000)
    second.check()
    second.close()
    with pytest.raises(SaveLostError):
        zombie.check()
    _, tag = store.get_with_tag(LEASE)
    zombie.close()
    clock.sleep(1000)
    assert store.get_with_tag(LEASE)[1] == tag


@where_leased
def test_a_former_owner_does_not_release_the_lease_of_its_successor(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    process = clock.process()
    zombie = commit_method(store).locks("run", clock=process).own()
    process.is_frozen = True
    with commit_method(store).locks("run", clock=clock).own(if_in_use="take over") as second:
        zombie.close()
        second.check()
        with pytest.raises(DirectoryInUseError):
            commit_method(store).locks("run", clock=clock).own()


@where_leased
def test_a_paused_owner_continues_without_a_takeover(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    process = clock.process()
    first = commit_method(store).locks("run", clock=process).own()
    process.is_frozen = True
    clock.sleep(10_000)
    _, tag = store.get_with_tag(LEASE)
    first.check()
    assert store.get_with_tag(LEASE)[1] != tag, "what is done next must be done within the lease"


@where_leased
def test_an_owner_that_wakes_during_a_takeover_keeps_the_directory(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    process = clock.process()
    first = commit_method(store).locks("run", clock=process).own()
    process.is_frozen = True
    clock.sleep(1000)

    def wake() -> None:
        process.is_frozen = False

    clock.repeat(50, wake, wake)
    with pytest.raises(DirectoryInUseError, match="it renewed its lease"):
        commit_method(store).locks("run", clock=clock).own(if_in_use="take over")
    first.check()


@where_leased
def test_a_directory_released_during_a_takeover_is_taken_at_once(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    process = clock.process()
    first = commit_method(store).locks("run", clock=process).own()
    process.is_frozen = True
    clock.repeat(5, first.close, first.close)
    before = clock.now()
    commit_method(store).locks("run", clock=clock).own(if_in_use="take over").check()
    assert clock.now() - before < 60


@where_leased
def test_only_one_of_two_takeovers_succeeds(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    dead = clock.process()
    commit_method(store).locks("run", clock=dead).own()
    dead.is_frozen = True
    taken: list[Lock | None] = []

    def take_over() -> None:
        if not taken:
            taken.append(None)
            taken[0] = commit_method(store).locks("run", clock=clock).own(if_in_use="take over")

    clock.repeat(8, take_over, take_over)
    with pytest.raises(DirectoryInUseError):
        commit_method(store).locks("run", clock=clock).own(if_in_use="take over")
    assert taken[0] is not None
    taken[0].check()


class LyingStorage(FaultyStorage):
    """A storage that executes a put, but reports that it failed, or that its condition failed."""

    error: Exception | None = None

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        tag = super().put(key, data, condition=condition)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return tag


@where_leased
def test_a_renewal_with_a_lost_response_keeps_the_lease(place: Place, tmp_path: Path) -> None:
    store, clock = LyingStorage(place(tmp_path), FaultPlan()), FakeClock()
    process = clock.process()
    first = commit_method(store).locks("run", clock=process).own()
    process.is_frozen = True
    clock.sleep(40)
    store.error = StorageError("no answer came")
    with pytest.raises(StorageError, match="no answer came"):
        first.check()
    first.check()
    process.is_frozen = False
    clock.sleep(1000)
    first.check()
    first.close()
    commit_method(store).locks("run", clock=clock).own().close()


def test_an_acquisition_with_a_lost_response_succeeds(tmp_path: Path) -> None:
    """The repeated request finds the object of the first request."""
    store, clock = LyingStorage(memory(tmp_path), FaultPlan()), FakeClock()
    store.error = ConditionFailedError("there is one")
    first = commit_method(store).locks("run", clock=clock).own()
    first.check()
    store.error = ConditionFailedError("it has another tag")
    clock.sleep(21)
    first.check()


@where_leased
def test_a_removed_lease_is_lost(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    first = commit_method(store).locks("run", clock=clock).own()
    store.delete([LEASE])
    with pytest.raises(SaveLostError, match="was removed or replaced"):
        first.check()
    with commit_method(store).locks("run", clock=clock).own() as second:
        with pytest.raises(SaveLostError):
            first.check()
        second.check()


@pytest.mark.parametrize(
    "change",
    [
        {"host": "\x1b[31mred"},
        {"host": 7},
        {"host": "h" * 10_000},
        {"pid": True},
        {"pid": -1},
        {"pid": 1 << 80},
        {"lease_seconds": 1e300},
        {"lease_seconds": float("nan")},
        {"lease_seconds": -1},
        {"lease_seconds": "60"},
        {"released": 1},
        {"renewals": None},
        {"since": ["x"]},
        {"format": "another"},
    ],
    ids=str,
)
def test_a_hostile_record_is_not_trusted_or_printed(change: dict[str, object], tmp_path: Path) -> None:
    store, clock = memory(tmp_path), FakeClock()
    dead = clock.process()
    commit_method(store).locks("run", clock=dead).own()
    dead.is_frozen = True
    store.put(LEASE, json.dumps({**json.loads(store.get(LEASE)), **change}).encode())
    with pytest.raises(DirectoryInUseError, match="cannot be read") as caught:
        commit_method(store).locks("run", clock=clock).own()
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 1000
    before = clock.now()
    commit_method(store).locks("run", clock=clock).own(if_in_use="take over").check()
    assert clock.now() - before < 120


@pytest.mark.parametrize("data", [b"", b"[" * 4000, b"null", b"\xff", b"{}", b"9" * 4000, b"x" * 1_000_000], ids=len)
@everywhere
def test_invalid_records_are_ignored(place: Place, data: bytes, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    if place in LOCKED:
        with commit_method(store).locks("run", clock=clock).own():
            store.put(".ckptcore/owner/owner.json", data)
            with pytest.raises(DirectoryInUseError, match="a process without a record"):
                commit_method(store).locks("run", clock=clock).own()
    else:
        store.put(LEASE, data)
        with pytest.raises(DirectoryInUseError, match="cannot be read"):
            commit_method(store).locks("run", clock=clock).own()
        commit_method(store).locks("run", clock=clock).own(if_in_use="take over").check()


@everywhere
def test_an_owner_that_cannot_write_gets_no_directory(place: Place, tmp_path: Path) -> None:
    inner, clock = place(tmp_path), FakeClock()
    number = 0
    while True:
        try:
            owner = (
                commit_method(with_faults(inner, FaultPlan(FailAt(number, StorageError("broken")))))
                .locks("run", clock=clock)
                .own()
            )
        except StorageError as error:
            assert "broken" in str(error)
        else:
            owner.close()
            break
        commit_method(inner).locks("run", clock=clock).own().close()
        number += 1
    assert number >= 2


@everywhere
def test_invalid_arguments_are_refused(place: Place, tmp_path: Path) -> None:
    store = place(tmp_path)
    for seconds in (0, -1, 3601, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match="lease_seconds"):
            commit_method(store).locks("run", lease_seconds=seconds).own()
    with pytest.raises(ValueError, match="if_in_use"):
        commit_method(store).locks("run").own(if_in_use="steal")  # type: ignore[arg-type]  # the test is about that
    assert list(store.list()) == []


# --- identity of a process, and numbers of owners ---------------------------------------------------------------------


@everywhere
def test_a_process_of_a_restarted_container_is_another_process(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the host name and the process id of the earlier process."""
    store, clock = place(tmp_path), FakeClock()
    with commit_method(store).locks("the/run", clock=clock).own():
        own = leases._process_id
        assert own(1) != own(2), "a forked child is another process"
        monkeypatch.setattr(leases, "_process_id", lambda pid: "restarted")
        with pytest.raises(DirectoryInUseError, match=r"the/run is in use: process \d+ on"):
            commit_method(store).locks("the/run", clock=clock).own()
        pin = commit_method(store).locks("the/run", clock=clock).pin("1")
        monkeypatch.setattr(leases, "_process_id", own)
        assert commit_method(store).locks("the/run", clock=clock).may_expire("1") == (place in LEASED)
        pin.close()


@everywhere
def test_every_owner_has_a_higher_number(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    numbers = []
    for least in (0, 0, 7, 3):
        with commit_method(store).locks("run", clock=clock).own(at_least=least) as owned:
            numbers.append(owned.number)
    assert numbers == [0, 1, 7, 8]


# --- full disks and new mounts ----------------------------------------------------------------------------------------


@contextmanager
def full(store: StorageBackend) -> Iterator[None]:
    """Simulate a full disk inside the block."""

    def put(key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        raise StorageFullError(f"cannot write {key}: no room")

    def lock_directory(key: str) -> DirectoryLock | None:
        if f"{key.rpartition('/')[2]}/" not in store.list_names(key.rpartition("/")[0]):
            raise StorageFullError(f"cannot create the directory {key}: no room")
        return lock(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "put", put)
        if isinstance(store, AtomicDirectories) and store.has_locks():
            lock = store.lock_directory
            patch.setattr(store, "lock_directory", lock_directory)
        yield


@everywhere
def test_a_directory_without_room_for_a_record_is_owned(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    commit_method(store).locks("run", clock=clock).own().close()
    with full(store):
        first = commit_method(store).locks("run", clock=clock).own()
        for _ in range(2):
            first.check_without_room()
            with pytest.raises(StorageFullError, match="no room"):
                first.check()
    first.check()
    with pytest.raises(DirectoryInUseError):
        commit_method(store).locks("run", clock=clock).own()
    assert first.number == 1
    first.close()
    commit_method(store).locks("run", clock=clock).own().close()


@where_leased
def test_one_of_two_owners_without_room_loses(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    with full(store):
        first = commit_method(store).locks("run", clock=clock).own()
        second = commit_method(store).locks("run", clock=clock).own()
    second.check()
    for _ in range(2):
        with pytest.raises(SaveLostError, match="another process owns it"):
            first.check()
    second.check()


@where_locked
@pytest.mark.parametrize("is_full", [False, True])
def test_a_replaced_directory_is_locked_again(place: Place, is_full: bool, tmp_path: Path) -> None:
    """After a file system is mounted again, other processes do not see the lock of the old directory."""
    store, clock = place(tmp_path), FakeClock()
    commit_method(store).locks("run", clock=clock).own().close()
    with full(store) if is_full else nullcontext():
        first = commit_method(store).locks("run", clock=clock).own()
    _replace_owner(store)
    first.check()
    with pytest.raises(DirectoryInUseError):
        commit_method(store).locks("run", clock=clock).own()
    first.check()
    first.close()
    commit_method(store).locks("run", clock=clock).own().close()


@where_locked
def test_an_owner_without_room_that_lost_its_lock_loses_to_another(place: Place, tmp_path: Path) -> None:
    store, clock = place(tmp_path), FakeClock()
    commit_method(store).locks("run", clock=clock).own().close()
    with full(store):
        first = commit_method(store).locks("run", clock=clock).own()
        _replace_owner(store)
        second = commit_method(store).locks("run", clock=clock).own()
        for owner in (first, second):
            with pytest.raises((SaveLostError, StorageFullError)):
                owner.check()
        with pytest.raises(SaveLostError, match="its file system was mounted again, and is locked"):
            first.check_without_room()
        second.check_without_room()
    with pytest.raises(SaveLostError):
        first.check()
    second.check()
    first.close()
    second.check()


def _replace_owner(store: StorageBackend) -> None:
    """Replace the locked directory by a new directory with equal files."""
    record = store.get(".ckptcore/owner/owner.json")
    cast(AtomicDirectories, store).rename(".ckptcore/owner", ".ckptcore/unmounted")
    put = type(store).put  # bypasses the simulated full disk
    put(store, ".ckptcore/owner/owner.json", record)


@where_locked
def test_a_deletion_is_refused_if_others_cannot_see_its_announcement(place: Place, tmp_path: Path) -> None:
    store = place(tmp_path)
    intent = commit_method(store).locks("run", clock=FakeClock()).intend_deletion("1")
    assert intent is not None
    intent.check()
    (name,) = store.list_names(".ckptcore/deleting")
    cast(AtomicDirectories, store).rename(f".ckptcore/deleting/{name[:-1]}", ".ckptcore/unmounted")
    with pytest.raises(StorageError, match="is not there"):
        intent.check()


@everywhere
def test_an_owner_without_room_loses_to_an_owner_that_came_later(place: Place, tmp_path: Path) -> None:
    """Otherwise the saves of both owners would have the same number."""
    store, clock = place(tmp_path), FakeClock()
    with full(store):
        first = commit_method(store).locks("run", clock=clock).own()
        with pytest.raises(StorageFullError, match="no room"):
            first.check()
        first.check_without_room()
    with commit_method(store).locks("run", clock=clock).own() as second:
        second.check()
        with pytest.raises(SaveLostError, match="since this disk was full"):
            first.check()
        assert second.number == first.number
    for _ in range(2):
        with pytest.raises(SaveLostError, match="since this disk was full"):
            first.check()


# --- hosts with and without locks ------------------------------------------------------------------------------------


def both(path: Path, clock: FakeClock) -> tuple[Locks, Locks]:
    """Return the locks of a directory on a host with locks (an NFS server), and on a host without (its client)."""
    return commit_method(entered(path)).locks("run", clock=clock), commit_method(no_flock(path)).locks(
        "run", clock=clock
    )


def test_an_owner_with_a_lock_is_seen_without_locks(tmp_path: Path) -> None:
    server, client = both(tmp_path, FakeClock())
    with server.own() as first:
        assert client.owner() is not None
        with pytest.raises(DirectoryInUseError, match="with locks that this host cannot see"):
            client.own()
        first.check()
    assert client.owner() is None
    with client.own() as second:
        assert second.number == 1
        with pytest.raises(DirectoryInUseError):
            server.own()
        second.check()
    with server.own() as third:
        assert third.number == 2


def test_an_owner_with_a_lock_loses_to_an_owner_that_takes_over(tmp_path: Path) -> None:
    clock = FakeClock()
    server, client = both(tmp_path, clock)
    first = server.own()
    before = clock.now()
    with client.own("take over") as second:
        assert clock.now() - before >= 30, "for a commit after the last check of the first"
        with pytest.raises(SaveLostError, match="no longer belongs to this process"):
            first.check()
        second.check()
        first.close()
        second.check()
    with client.own() as third:
        assert third.number == 2


def test_two_owners_that_look_at_the_same_time_do_not_both_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes see no owner. Then the client writes its lease, and the server writes its record."""
    server, client = both(tmp_path, FakeClock())
    server.own().close()
    store, put = client._store, client._store.put
    owned: list[Lock] = []

    def put_later(key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        if not owned:
            owned.append(server.own())
        return put(key, data, condition=condition)

    monkeypatch.setattr(store, "put", put_later)
    with pytest.raises(DirectoryInUseError):
        client.own()
    owned[0].check()


def test_an_owner_with_a_lock_but_no_room_loses_to_a_lease(tmp_path: Path) -> None:
    """The disk is full, so the owner cannot write its record before the other process looks for it."""
    server, client = both(tmp_path, FakeClock())
    server.own().close()
    with full(server._store):
        first = server.own()
    with client.own() as second:
        for _ in range(2):
            with pytest.raises(SaveLostError):
                first.check()
        second.check()
    with pytest.raises(SaveLostError):
        first.check()


def test_pins_of_a_host_with_locks_are_seen_without_locks(tmp_path: Path) -> None:
    clock = FakeClock()
    server, client = both(tmp_path, clock)
    with server.pin("1"):
        for _ in range(5):
            assert client.intend_deletion("1") is None and not client.may_expire("1")
            clock.sleep(60)
    intent = client.intend_deletion("1")
    assert intent is not None
    intent.close()
    deleting = server.intend_deletion("1")
    assert deleting is not None
    with pytest.raises(CheckpointNotFoundError, match="is being deleted"):
        client.pin("1", wait_seconds=1)
    client.pin("1").close()  # the announcement expires after its lease time, as if the server had failed
