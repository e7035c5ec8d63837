"""Conformance tests of storages with real directories."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import pytest

from ckptcore.errors import AtomicityError, ConditionFailedError, InvalidLocationError, ObjectNotFoundError
from ckptcore.protocols import AtomicDirectories, StorageBackend
from ckptcore_testing.storage import HOSTILE_KEYS, DirectoryTests


class DirectoryStorage(StorageBackend, AtomicDirectories, Protocol):
    """A storage with real directories."""


class AtomicDirectoriesTests(DirectoryTests):
    """Tests of `AtomicDirectories`, in addition to `StorageBackendTests`. Subclass it and define `open`."""

    def open(self, directory: str) -> DirectoryStorage:
        """Open a directory. Equal names in one test open the same directory.

        Args:
            directory: the name of a directory, which does not exist before the test.
        """
        raise NotImplementedError("define the method `open`")

    def test_the_storage_implements_the_protocol(self, storage: DirectoryStorage) -> None:
        assert isinstance(storage, AtomicDirectories)

    # --- locks --------------------------------------------------------------------------------------------------------

    def test_a_lock_creates_its_directory_and_excludes_others(self, storage: DirectoryStorage, name: str) -> None:
        lock = storage.lock_directory("a/b")
        assert lock is not None
        with lock:
            assert list(storage.list_names("a")) == ["b/"]
            assert storage.lock_directory("a/b") is None
            assert self.open(name).lock_directory("a/b") is None
            other = storage.lock_directory("a/c")
            assert other is not None
            with other:
                pass
        again = self.open(name).lock_directory("a/b")
        assert again is not None
        with again:
            assert storage.lock_directory("a/b") is None

    def test_exit_releases_a_lock(self, storage: DirectoryStorage) -> None:
        lock = storage.lock_directory("a")
        assert lock is not None
        lock.__enter__()
        assert storage.lock_directory("a") is None
        lock.__exit__(None, None, None)
        again = storage.lock_directory("a")
        assert again is not None
        with again:
            pass

    def test_asking_for_locks_changes_nothing(self, storage: DirectoryStorage) -> None:
        assert storage.has_locks()
        assert list(storage.list_names()) == []
        lock = storage.lock_directory("a")
        assert lock is not None
        with lock:
            assert storage.has_locks()
            assert storage.lock_directory("a") is None

    def test_a_locked_directory_is_not_removed(self, storage: DirectoryStorage) -> None:
        lock = storage.lock_directory("a/b")
        assert lock is not None
        with lock:
            storage.put("a/b/c/d", b"1")
            storage.delete(["a/b/c/d"])
            assert list(storage.list_names("a")) == ["b/"]
            assert list(storage.list_names("a/b")) == []
            assert storage.lock_directory("a/b") is None

    def test_a_lock_follows_its_renamed_directory(self, storage: DirectoryStorage) -> None:
        lock = storage.lock_directory("hidden")
        assert lock is not None
        with lock:
            storage.put("hidden/a", b"1")
            storage.rename("hidden", "final")
            another = storage.lock_directory("hidden")
            assert another is not None, "a new directory with an old name has another lock"
            with another:
                pass
            assert storage.lock_directory("final") is None
        last = storage.lock_directory("final")
        assert last is not None
        with last:
            pass

    def test_a_lock_says_if_its_directory_is_still_there(self, storage: DirectoryStorage) -> None:
        lock = storage.lock_directory("a/b")
        assert lock is not None
        with lock:
            assert lock.is_in_place()
            storage.put("a/b/c", b"1")
            assert lock.is_in_place()
            storage.rename("a", "moved")
            assert not lock.is_in_place()
            storage.put("a/b/c", b"1")
            assert not lock.is_in_place()
            storage.delete_directory("a")
            storage.rename("moved", "a")
            assert lock.is_in_place()

    def test_a_lock_survives_the_deletion_of_its_directory(self, storage: DirectoryStorage) -> None:
        lock = storage.lock_directory("a")
        assert lock is not None
        with lock:
            storage.delete_directory("a")
            another = storage.lock_directory("a")
            assert another is not None
            with another:
                assert storage.lock_directory("a") is None

    def test_only_one_of_many_gets_the_lock(self, storage: DirectoryStorage) -> None:
        for number in range(5):
            answered = threading.Barrier(self.threads)

            def lock(_: int, key: str = f"a/{number}", answered: threading.Barrier = answered) -> bool:
                held = storage.lock_directory(key)
                if held is None:
                    answered.wait()
                    return False
                with held:
                    answered.wait()
                return True

            assert self._at_once(lock).count(True) == 1

    # --- rename -------------------------------------------------------------------------------------------------------

    def test_a_probe_leaves_nothing_and_tells_what_is_so(self, storage: DirectoryStorage) -> None:
        lock = storage.lock_directory("a")
        assert lock is not None
        with lock:
            storage.put("a/File", b"1")
            features = storage.probe("a")
            assert list(storage.list_names("a")) == ["File"]
            try:
                storage.size("a/file")
                is_one = True
            except ObjectNotFoundError:
                is_one = False
            assert ("case" in features.merges) == is_one
        storage.put("b/1", b"1")
        if features.exchanges:
            storage.exchange("a", "b")
            assert list(storage.list("b")) == ["b/File"]
        else:
            with pytest.raises(AtomicityError):
                storage.exchange("a", "b")

    def test_limits_are_known_before_a_directory_exists(self, storage: DirectoryStorage) -> None:
        limits = storage.limits("new")
        assert not limits.is_mount_point and (limits.name_bytes is None or limits.name_bytes > 64)
        assert list(storage.list_names()) == []

    def test_a_directory_can_be_moved(self, storage: DirectoryStorage) -> None:
        for directory in ("old", "hidden"):
            storage.put(f"{directory}/a", b"1")
        assert storage.can_move("old", "hidden")
        assert list(storage.list()) == ["hidden/a", "old/a"]

    def test_a_new_object_replaces_nothing(self, storage: DirectoryStorage) -> None:
        writer = storage.open_new("a/b", 3)
        writer.write_at(0, b"one")
        writer.finish()
        with pytest.raises(ConditionFailedError):
            storage.open_new("a/b", 3).finish()
        assert storage.get("a/b") == b"one"

    def test_rename_moves_everything(self, storage: DirectoryStorage) -> None:
        storage.put("old/a", b"1")
        storage.put("old/b/c", b"2")
        storage.rename("old", "deep/below/new")
        assert list(storage.list()) == ["deep/below/new/a", "deep/below/new/b/c"]
        assert storage.get("deep/below/new/b/c") == b"2"
        with pytest.raises(ObjectNotFoundError):
            storage.get("old/a")

    def test_rename_does_not_replace_objects(self, storage: DirectoryStorage) -> None:
        storage.put("old/a", b"1")
        storage.put("directory/b", b"2")
        storage.put("file", b"3")
        for destination in ("directory", "file"):
            with pytest.raises(ConditionFailedError):
                storage.rename("old", destination)
        assert {key: storage.get(key) for key in storage.list()} == {"old/a": b"1", "directory/b": b"2", "file": b"3"}

    def test_rename_replaces_an_empty_directory(self, storage: DirectoryStorage) -> None:
        storage.put("old/a", b"1")
        lock = storage.lock_directory("new")
        assert lock is not None
        with lock:
            pass
        storage.rename("old", "new")
        assert list(storage.list()) == ["new/a"]

    def test_rename_needs_a_directory(self, storage: DirectoryStorage) -> None:
        storage.put("file", b"1")
        for source in ("missing", "file", "file/below"):
            with pytest.raises(ObjectNotFoundError):
                storage.rename(source, "new")
        assert list(storage.list()) == ["file"]

    def test_only_one_of_many_renames_succeeds(self, storage: DirectoryStorage) -> None:
        for worker in range(self.threads):
            storage.put(f"old-{worker}/a", b"%d" % worker)

        def rename(worker: int) -> bool:
            try:
                storage.rename(f"old-{worker}", "new")
            except ConditionFailedError:
                return False
            return True

        won = self._at_once(rename)
        assert won.count(True) == 1
        assert storage.get("new/a") == b"%d" % won.index(True)
        assert len(list(storage.list())) == self.threads

    # --- exchange -----------------------------------------------------------------------------------------------------

    def test_exchange_swaps_two_directories(self, storage: DirectoryStorage) -> None:
        storage.put("one/a", b"1")
        storage.put("deep/other/b/c", b"2")
        _exchange_or_skip(storage, "one", "deep/other")
        assert {key: storage.get(key) for key in storage.list()} == {"deep/other/a": b"1", "one/b/c": b"2"}

    def test_readers_follow_an_exchange(self, storage: DirectoryStorage) -> None:
        """A storage may keep files open between reads. After an exchange, it must read the new files."""
        storage.put("one/a", b"first ")
        storage.put("other/a", b"second")
        memory = bytearray(6)
        storage.get_into("one/a", [(0, memoryview(memory))])
        assert memory == b"first "
        _exchange_or_skip(storage, "one", "other")
        storage.get_into("one/a", [(0, memoryview(memory))])
        assert memory == b"second"
        storage.rename("one", "elsewhere")
        with pytest.raises(ObjectNotFoundError):
            storage.get_into("one/a", [(0, memoryview(memory))])

    def test_exchange_needs_both_directories(self, storage: DirectoryStorage) -> None:
        storage.put("one/a", b"1")
        storage.put("file", b"2")
        for first, second in (("one", "missing"), ("missing", "one"), ("one", "file"), ("file", "one")):
            with pytest.raises((ObjectNotFoundError, AtomicityError)):
                storage.exchange(first, second)
        assert {key: storage.get(key) for key in storage.list()} == {"one/a": b"1", "file": b"2"}

    def test_readers_always_see_one_of_two_exchanged_directories(self, storage: DirectoryStorage) -> None:
        storage.put("one/a", b"1" * 1000)
        storage.put("other/a", b"2" * 1000)
        _exchange_or_skip(storage, "one", "other")
        done = threading.Event()
        seen: set[bytes] = set()

        def work(worker: int) -> None:
            if worker == 0:
                for _ in range(50):
                    storage.exchange("one", "other")
                done.set()
                return
            while not done.is_set():
                memory = bytearray(1000)
                storage.get_into("one/a", [(0, memoryview(memory))])
                seen.add(bytes(memory))
                seen.add(storage.get("one/a"))

        self._at_once(work)
        assert seen <= {b"1" * 1000, b"2" * 1000}

    # --- moves of objects ---------------------------------------------------------------------------------------------

    def test_placed_objects_replace_nothing(self, storage: DirectoryStorage) -> None:
        for key, data in {"new/a": b"1", "new/b/c": b"2", "new/d": b"3", "old/d": b"4", "old/e": b"5"}.items():
            storage.put(key, data)
        stamps = storage.stamps(["new/a", "new/b/c", "new/missing"])
        assert set(stamps) == {"new/a", "new/b/c"}
        storage.place("new", "old", ["a", "b/c"])
        with pytest.raises(ConditionFailedError):
            storage.place("new", "old", ["d"])
        objects = {key: storage.get(key) for key in storage.list()}
        assert objects == {"new/d": b"3", "old/a": b"1", "old/b/c": b"2", "old/d": b"4", "old/e": b"5"}
        assert storage.stamps(["old/a", "old/b/c"]) == {
            key.replace("new", "old"): stamp for key, stamp in stamps.items()
        }

    def test_a_changed_object_has_another_stamp(self, storage: DirectoryStorage) -> None:
        storage.put("a/b", b"1")
        before = storage.stamps(["a/b"])
        assert before == storage.stamps(["a/b"])
        storage.put("a/b", b"2")
        assert before != storage.stamps(["a/b"])

    def test_replace_renames_over_the_object_with_a_stamp(self, storage: DirectoryStorage) -> None:
        storage.put("new/a", b"1")
        storage.put("old/a", b"2")
        stamp = storage.stamps(["old/a"])["old/a"]
        for other in (None, storage.stamps(["new/a"])["new/a"]):
            with pytest.raises(ConditionFailedError):
                storage.replace("new/a", "old/a", other)
        assert {key: storage.get(key) for key in storage.list()} == {"new/a": b"1", "old/a": b"2"}
        storage.replace("new/a", "old/a", stamp)
        storage.put("new/b", b"3")
        with pytest.raises(ConditionFailedError):
            storage.replace("new/b", "old/b", stamp)
        storage.replace("new/b", "old/b", None)
        assert {key: storage.get(key) for key in storage.list()} == {"old/a": b"1", "old/b": b"3"}

    def test_only_unchanged_objects_are_deleted(self, storage: DirectoryStorage) -> None:
        for key in ("a/b", "a/c", "a/d/e"):
            storage.put(key, b"1")
        stamps = {**storage.stamps(["a/b", "a/c", "a/d/e"]), "a/missing": "1"}
        storage.put("a/c", b"2")
        storage.delete_unchanged(stamps)
        assert list(storage.list()) == ["a/c"] and list(storage.list_names("a")) == ["c"]

    def test_moves_need_objects_and_directories(self, storage: DirectoryStorage) -> None:
        storage.put("one/a", b"1")
        for source, destination in (("one", "missing"), ("missing", "one"), ("one/a", "one")):
            with pytest.raises(ObjectNotFoundError):
                storage.place(source, destination, ["b" if destination == "one" else "a"])
        for source, destination in (("one/a", "missing/a"), ("one/missing", "one/b")):
            with pytest.raises(ObjectNotFoundError):
                storage.replace(source, destination, None)
        assert {key: storage.get(key) for key in storage.list()} == {"one/a": b"1"}

    # --- attributes ---------------------------------------------------------------------------------------------------

    def test_attributes_are_kept_without_a_change_of_objects(self, storage: DirectoryStorage) -> None:
        storage.put("old/a", b"1")
        storage.put("old/b/c", b"2")
        storage.put("new/b/c", b"3")
        for old in ("old", "missing"):
            storage.hide_from_others(old, "new")
            storage.keep_attributes(old, "new")
        objects = {key: storage.get(key) for key in storage.list()}
        assert objects == {"new/b/c": b"3", "old/a": b"1", "old/b/c": b"2"}

    # --- syncing and deleting -----------------------------------------------------------------------------------------

    def test_sync_directory_succeeds(self, storage: DirectoryStorage) -> None:
        storage.put("a/b/c", b"1")
        storage.put("a/d", b"2")
        storage.sync_directory("a")
        storage.sync_directory("a/b")
        assert list(storage.list()) == ["a/b/c", "a/d"]

    def test_deferred_names_are_visible_at_once(self, storage: DirectoryStorage) -> None:
        storage.put("a/b", b"1")
        with storage.defer_names("a"):
            storage.put("a/c/d", b"2")
            writer = storage.open_writer("a/e")
            writer.write_at(0, b"3")
            writer.finish()
            storage.sync_directory("a")
            storage.rename("a", "f")
        assert list(storage.list()) == ["f/b", "f/c/d", "f/e"]

    def test_delete_directory_removes_everything_in_it(self, storage: DirectoryStorage) -> None:
        for key in ("a/b/c", "a/b/d/e", "a/f", "ab/c", "g"):
            storage.put(key, b"1")
        storage.delete_directory("missing")
        storage.delete_directory("missing/below")
        storage.delete_directory("a/b")
        assert list(storage.list()) == ["a/f", "ab/c", "g"]
        storage.delete_directory("a")
        assert list(storage.list()) == ["ab/c", "g"]
        assert list(storage.list_names()) == ["ab/", "g"]

    def test_an_empty_directory_can_be_deleted(self, storage: DirectoryStorage) -> None:
        lock = storage.lock_directory("a")
        assert lock is not None
        with lock:
            storage.delete_directory("a")
        assert list(storage.list_names()) == []

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
    def test_hostile_keys_are_refused(self, storage: DirectoryStorage, key: str) -> None:
        storage.put("a/b", b"1")
        calls: list[Callable[[], object]] = [
            lambda: storage.lock_directory(key),
            lambda: storage.rename(key, "new"),
            lambda: storage.rename("a", key),
            lambda: storage.exchange(key, "a"),
            lambda: storage.exchange("a", key),
            lambda: storage.place(key, "a", ["b"]),
            lambda: storage.place("a", key, ["b"]),
            lambda: storage.replace(key, "a/c", None),
            lambda: storage.replace("a/b", key, None),
            lambda: storage.stamps([key]),
            lambda: storage.delete_unchanged({key: "1"}),
            lambda: storage.hide_from_others(key, "a"),
            lambda: storage.keep_attributes("a", key),
            lambda: storage.delete_directory(key),
        ]
        for call in calls:
            with pytest.raises(InvalidLocationError):
                call()
        assert list(storage.list()) == ["a/b"]


def _exchange_or_skip(storage: DirectoryStorage, first: str, second: str) -> None:
    """Exchange two directories. If the storage does not support it, check that nothing changed, and skip the test."""
    before = list(storage.list())
    try:
        storage.exchange(first, second)
    except AtomicityError as error:
        assert list(storage.list()) == before
        pytest.skip(f"this storage cannot exchange directories: {error}")
