"""Saves on a file system without locks. Leases show which files belong to running saves, and which to killed saves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ckptcore_incremental.session_claims import PlannedSession, begin_session

from ckptcore.builtin.local import LocalStorage
from ckptcore.commit.conditional_put import new_claim
from ckptcore.commit.leases import Clock
from ckptcore.commit.location import Location
from ckptcore.commit.method import StorageSupport, find_partial
from ckptcore.commit.names import name_of_replaced
from ckptcore.commit.root import Base, PartialSave, new_save_id
from ckptcore.context import Context
from ckptcore.errors import AtomicityError, SaveLostError, StorageError, StorageFullError
from ckptcore.opening.bases import base_location
from ckptcore.protocols import PutCondition, StorageBackend, Transaction
from ckptcore.step_names import StepNames
from ckptcore.training.steps import StepDirectory
from tests.ownership.fake_clock import FakeClock
from tests.ownership.lockable_storages import no_flock

ROOT = b"committed"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def process(tmp_path: Path) -> Callable[[Clock], Location]:
    """Return a function from the clock of a process to the location "a" of this process."""
    store = no_flock(tmp_path)

    def see(clock: Clock) -> Location:
        return Location("a", store, "a", f"file:{tmp_path}/steps/a", support=StorageSupport(clock=clock))

    return see


def begin(location: Location) -> Transaction:
    return location.commit_method.begin(location, new_claim(new_save_id()), True)


def hidden(location: Location) -> list[str]:
    return [name for name in location.parent.list_names() if name.startswith(".a.")]


def leases(store: StorageBackend) -> list[str]:
    return list(store.list_names(".ckptcore/saving"))


def test_a_save_removes_its_lease(process: Callable[[Clock], Location], clock: FakeClock) -> None:
    location = process(clock)
    saved = begin(location)
    saved.store.put("w.safetensors", b"1")  # a file name that saves use, because this root lists no files
    assert len(leases(location.parent)) == 1
    saved.commit(ROOT, {})
    begin(location).abort()
    begin(location).commit(ROOT, {})
    assert list(location.parent.list_names()) == ["a/"], "no hidden directories, and no directory of leases"


def test_the_files_of_a_killed_save_are_removed_when_its_lease_has_expired(
    process: Callable[[Clock], Location], clock: FakeClock
) -> None:
    dead, alive = clock.process(), process(clock)
    killed = begin(process(dead))
    killed.store.put("w", b"1")
    dead.is_frozen = True
    for _ in range(3):
        assert len(hidden(alive)) == 1
        begin(alive).abort()  # the killed save does not block other saves
        clock.sleep(30)
    begin(alive).abort()
    assert hidden(alive) == [] and leases(alive.parent) == []


def test_files_that_fill_the_disk_are_removed_without_a_lease(
    process: Callable[[Clock], Location], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no room for a new lease, or for a mark in an expired lease. Valid leases are respected."""
    dead, alive = clock.process(), process(clock)
    running, killed = begin(process(clock)), begin(process(dead))
    killed.store.put("w", b"1")
    dead.is_frozen = True
    put = LocalStorage.put

    def put_if_room(self: LocalStorage, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        if len(hidden(alive)) > 1:
            raise StorageFullError("no room")
        return put(self, key, data, condition=condition)

    for _ in range(3):
        with monkeypatch.context() as full:
            full.setattr(LocalStorage, "put", put_if_room)
            with pytest.raises(StorageFullError):
                begin(alive)
        assert len(hidden(alive)) == 2
        clock.sleep(30)
    monkeypatch.setattr(LocalStorage, "put", put_if_room)
    begin(alive).abort()
    assert len(hidden(alive)) == 1
    running.commit(ROOT, {})
    assert leases(alive.parent) == []


def test_a_slow_save_keeps_its_files(process: Callable[[Clock], Location], clock: FakeClock) -> None:
    slow, other = begin(process(clock)), process(clock)
    slow.store.put("w", b"1")
    for _ in range(10):
        clock.sleep(30)
        assert other.commit_method.is_changing(other)
        begin(other).abort()
    slow.commit(ROOT, {})
    assert not other.commit_method.is_changing(other)
    assert sorted(other.store.list()) == ["checkpoint.json", "w"]


@pytest.mark.parametrize("writes", [True, False])
def test_a_save_that_lost_its_lease_commits_nothing(
    writes: bool, process: Callable[[Clock], Location], clock: FakeClock
) -> None:
    """The save was suspended while another save removed its files. It must not commit only its later files."""
    suspended, other = clock.process(), process(clock)
    zombie = begin(process(suspended))
    zombie.store.put("first", b"1")
    suspended.is_frozen = True
    for _ in range(4):
        begin(other).abort()
        clock.sleep(30)
    assert hidden(other) == []
    suspended.is_frozen = False
    if writes:
        zombie.store.put("second", b"2")
        with pytest.raises(SaveLostError):
            zombie.commit(ROOT, {})
    zombie.abort()
    assert list(other.parent.list_names()) == []


def test_a_deletion_is_announced_by_a_lease(process: Callable[[Clock], Location], clock: FakeClock) -> None:
    location, other = process(clock), process(clock)
    announced = location.commit_method.announce_deletion(location, location.commit_method.locks("steps"), "a.base")
    assert announced is not None
    assert other.commit_method.is_changing(other)
    announced.check()
    announced.close()
    assert not other.commit_method.is_changing(other)
    assert list(other.parent.list_names()) == []


def session(location: Location) -> Transaction:
    before = find_partial(location)
    first = PartialSave(new_save_id(), "2026-01-01T00:00:00+00:00", "safetensors", "", 0, None)
    partial = (first if before is None else before).with_next_owner(1)
    return begin_session(location, PlannedSession(before, partial, frozenset())).transaction


def test_a_session_waits_until_the_lease_of_a_killed_session_has_expired(
    process: Callable[[Clock], Location], clock: FakeClock
) -> None:
    dead = clock.process()
    session(process(dead))
    dead.is_frozen = True
    next_one = session(process(clock))
    assert 60 < clock.now() < 120
    next_one.leave()
    assert leases(process(clock).parent) == []


def test_a_session_does_not_wait_for_a_running_session(process: Callable[[Clock], Location], clock: FakeClock) -> None:
    running = session(process(clock))
    with pytest.raises(SaveLostError, match="another process is writing a session"):
        session(process(clock))
    assert clock.now() < 60, "it saw a renewal"
    running.leave()
    session(process(clock)).leave()


def test_a_resumed_save_waits_for_lease_of_killed_save(process: Callable[[Clock], Location], clock: FakeClock) -> None:
    """An interrupted copy resumes with the same save id, and so with the same hidden directory."""
    claim, dead, location = new_claim(new_save_id()), clock.process(), process(clock)
    process(dead).commit_method.begin(process(dead), claim, False).store.put("w", b"1")
    dead.is_frozen = True
    resumed = location.commit_method.begin(location, claim, False, resume=True)
    assert clock.now() > 60
    resumed.commit(ROOT, {})
    assert sorted(location.store.list()) == ["checkpoint.json", "w"]


def test_an_error_about_locks_is_not_cached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, support = no_flock(tmp_path), StorageSupport()
    answers: list[StorageError | bool] = [StorageError("away"), False]

    def has_locks() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    store.has_locks = has_locks  # type: ignore[attr-defined]  # the storage of this test
    assert support.leases(store) is None
    known_leases = support.leases(store)
    assert known_leases is not None and support.leases(store) is known_leases
    assert len(caplog.records) == 1, "said once"


def test_a_directory_that_does_not_answer_does_not_block_others(tmp_path: Path) -> None:
    hung, other, support = no_flock(tmp_path / "hung"), no_flock(tmp_path / "other"), StorageSupport()
    asked, answer = threading.Event(), threading.Event()

    def has_locks() -> bool:
        asked.set()
        return answer.wait()

    hung.has_locks = has_locks  # type: ignore[attr-defined]  # the storage of this test
    thread = threading.Thread(target=support.leases, args=(hung,), daemon=True)
    thread.start()
    assert asked.wait(60)
    assert support.leases(other) is not None
    answer.set()
    thread.join()


def test_the_lists_of_a_run_ask_once_for_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: LocalStorage, key: str) -> None:
        (tmp_path / key).mkdir(parents=True, exist_ok=True)
        raise AtomicityError("the file system has no locks")

    monkeypatch.setattr(LocalStorage, "has_locks", lambda self: False)
    monkeypatch.setattr(LocalStorage, "lock_directory", refuse)
    steps = StepDirectory(tmp_path, StepNames(), Context())
    for name in ("1", "2"):
        hidden = tmp_path / name_of_replaced(name)
        hidden.mkdir()
        (hidden / "checkpoint.json").write_bytes(ROOT)
        assert name in steps.list_names().values()
    assert steps.commit_method().locks().owner() is None
    assert len(caplog.records) == 1


def test_a_base_shares_storage_support_of_its_update(process: Callable[[Clock], Location], clock: FakeClock) -> None:
    location = process(clock)
    base = base_location(location, Base("b", new_save_id()), Context())
    assert base.support is location.support
    assert (base.name, base.identity) == ("b", location.identity.removesuffix("a") + "b")
