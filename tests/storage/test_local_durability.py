"""The order of the system calls with which the local storage makes files and names durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptcore.builtin import local_calls
from ckptcore.builtin.local import LocalStorage, open_local
from ckptcore.errors import StorageError
from ckptcore.protocols import IF_ABSENT, StorageOptions

_RENAME_EXCHANGE = 2  # a flag of renameat2 on Linux

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name open files")


class Calls:
    """A record of the system calls that matter for durability, with their paths."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = str(directory)
        self.seen: list[str] = []
        for name in ("fsync", "fdatasync", "close"):
            monkeypatch.setattr(os, name, self._of_descriptor(name, getattr(os, name)))
        for name in ("rename", "mkdir"):
            monkeypatch.setattr(os, name, self._of_path(name, getattr(os, name)))
        monkeypatch.setattr(local_calls, "c_function", self._of_c_function(local_calls.c_function))

    def _short(self, path: str) -> str:
        path = path.replace(self.directory, "", 1) or "/"
        head, separator, tail = path.partition(".ckptcore-put-")
        return head + "TEMPORARY" if separator and len(tail) == 16 else path

    def _of_descriptor(self, name: str, call: Callable[[int], None]) -> Callable[[int], None]:
        def recorded(descriptor: int) -> None:
            if name != "close":
                self.seen.append(f"sync {self._short(os.readlink(f'/proc/self/fd/{descriptor}'))}")
            call(descriptor)

        return recorded

    def _of_path(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def recorded(*paths: Any) -> None:
            self.seen.append(" ".join([name, *[self._short(path) for path in paths if isinstance(path, str)]]))
            call(*paths)

        return recorded

    def _of_c_function(
        self, find: Callable[..., Callable[..., int] | None]
    ) -> Callable[..., Callable[..., int] | None]:
        def find_recorded(name: str, types: tuple[type, ...]) -> Callable[..., int] | None:
            call = find(name, types)
            if call is None or name != "renameat2":
                return call

            def recorded(*arguments: Any) -> int:
                _, first, _, second, flag = arguments
                paths = [self._short(os.fsdecode(path)) for path in (first, second)]
                self.seen.append(" ".join(["exchange" if flag == _RENAME_EXCHANGE else "rename", *paths]))
                return call(*arguments)

            return recorded

        return find_recorded

    def take(self) -> list[str]:
        """Return the calls since the last `take`."""
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(tmp_path, monkeypatch)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return open_local(f"{tmp_path}/new/root", StorageOptions())


@pytest.mark.parametrize("condition", [None, IF_ABSENT], ids=["replacing", "if absent"])
def test_a_put_syncs_the_file_and_its_directories(storage: LocalStorage, calls: Calls, condition: Any) -> None:
    storage.put("a/b", b"1", condition=condition)
    assert calls.take() == [
        "mkdir /new",
        "mkdir /new/root",
        "mkdir /new/root/a",
        "sync /new/root/a/TEMPORARY",
        "rename /new/root/a/TEMPORARY /new/root/a/b",
        "sync /new/root/a",
        "sync /new/root",
        "sync /new",
        "sync /",
    ]
    storage.put("a/c", b"1", condition=condition)
    assert calls.take() == [
        "sync /new/root/a/TEMPORARY",
        "rename /new/root/a/TEMPORARY /new/root/a/c",
        "sync /new/root/a",
    ], "what is durable already is not synced again"


def test_a_writer_syncs_the_file_and_its_directories(storage: LocalStorage, calls: Calls) -> None:
    storage.put("a", b"1")
    calls.take()
    writer = storage.open_writer("b/c/d", 9 << 20)
    writer.write_at(0, bytes(9 << 20))
    assert calls.take() == ["mkdir /new/root/b", "mkdir /new/root/b/c"]
    writer.finish()
    assert calls.take() == ["sync /new/root/b/c/d", "sync /new/root/b/c", "sync /new/root/b", "sync /new/root"]


def test_a_directory_that_is_created_again_is_synced_again(storage: LocalStorage, calls: Calls) -> None:
    storage.put("a/b", b"1")
    storage.delete(["a/b"])
    calls.take()
    storage.put("keep/b", b"1")
    storage.put("a/b", b"1")
    assert calls.take()[-2:] == ["sync /new/root/a", "sync /new/root"]


def test_a_directory_of_a_failed_process_is_synced(tmp_path: Path, calls: Calls) -> None:
    (tmp_path / "new/root/a").mkdir(parents=True)
    calls.take()
    open_local(f"{tmp_path}/new/root", StorageOptions()).put("a/b", b"1")
    assert calls.take()[2:] == ["sync /new/root/a", "sync /new/root", "sync /new"]


def test_sync_covers_files_and_their_directories(storage: LocalStorage, calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "new/root/a/b").mkdir(parents=True)
    (tmp_path / "new/root/a/b/c").write_bytes(b"1")
    (tmp_path / "new/root/d").write_bytes(b"1")
    calls.take()
    storage.sync(["a/b/c", "d"])
    seen = calls.take()
    assert seen[:2] == ["sync /new/root/a/b/c", "sync /new/root/d"]
    assert set(seen[2:]) == {"sync /new/root/a/b", "sync /new/root/a", "sync /new/root", "sync /new"}


def test_a_commit_syncs_in_a_safe_order(storage: LocalStorage, calls: Calls) -> None:
    """A commit by rename is safe only in this order: files, names inside the directory, name of the directory."""
    lock = storage.lock_directory("hidden")
    assert lock is not None
    with lock:
        storage.put("hidden/a/b", b"1")
        calls.take()
        storage.sync_directory("hidden")
        synced = calls.take()
        assert synced.index("sync /new/root/hidden/a") < synced.index("sync /new/root/hidden")
        storage.rename("hidden", "deep/final")
        assert calls.take() == [
            "mkdir /new/root/deep",
            "rename /new/root/hidden /new/root/deep/final",
            "sync /new/root/deep",
            "sync /new/root",
            "sync /new/root",
        ]
    storage.put("hidden/c", b"2")
    calls.take()
    storage.exchange("hidden", "deep/final")
    assert calls.take() == [
        "exchange /new/root/hidden /new/root/deep/final",
        "sync /new/root",
        "sync /new/root/deep",
    ]
    storage.delete_directory("hidden")
    assert calls.take() == ["sync /new/root"]


def test_deferred_names_are_synced_once(storage: LocalStorage, calls: Calls) -> None:
    with storage.defer_names("hidden"):
        for key in ("hidden/a/b", "hidden/a/c", "hidden/d"):
            storage.put(key, b"1")
        writer = storage.open_writer("hidden/e")
        writer.write_at(0, b"1")
        writer.finish()
        synced = [call for call in calls.take() if call.startswith("sync")]
        assert synced == [
            "sync /new/root/hidden/a/TEMPORARY",
            "sync /new/root/hidden/a/TEMPORARY",
            "sync /new/root/hidden/TEMPORARY",
            "sync /new/root/hidden/e",
        ]
        storage.put("hidden-too/a", b"1")  # a name that only begins with the deferred one
        assert calls.take()[-4:-2] == ["sync /new/root/hidden-too", "sync /new/root"]
        storage.sync_directory("hidden")
        assert calls.take() == ["sync /new/root/hidden/a", "sync /new/root/hidden"]
        storage.put("hidden/f", b"1")
        assert calls.take()[-2:] == ["sync /new/root/hidden", "sync /new/root"]
    assert calls.take() == []


def test_names_are_not_deferred_in_a_directory_that_is_made_again(storage: LocalStorage, calls: Calls) -> None:
    with storage.defer_names("hidden"):
        storage.put("hidden/a", b"1")
        storage.delete_directory("hidden")
        calls.take()
        storage.put("hidden/a", b"1")
        assert "sync /new/root/hidden" in calls.take()


def test_the_end_of_a_deferral_syncs_only_directories_with_new_names(storage: LocalStorage, calls: Calls) -> None:
    for number in range(20):
        storage.put(f"hidden/{number}/c/0", b"1")
    with storage.defer_names("hidden"):
        storage.put("hidden/0/c/1", b"1")
        storage.put("hidden/0/c/2", b"1")
        storage.put("hidden/gone/a", b"1")
        storage.delete_directory("hidden/gone")
        calls.take()
    assert calls.take() == [f"sync /new/root/hidden{below}" for below in ("/0/c", "/0", "")]
    storage.put("hidden/0/c/3", b"1")
    assert calls.take()[-1] == "sync /new/root/hidden/0/c"


def test_an_error_ends_a_deferral(storage: LocalStorage, calls: Calls) -> None:
    with pytest.raises(KeyError), storage.defer_names("hidden"):
        storage.put("hidden/a", b"1")
        calls.take()
        raise KeyError
    assert calls.take() == []
    storage.put("hidden/b", b"1")
    assert "sync /new/root/hidden" in calls.take()


def test_each_of_two_deferrals_syncs_its_names(storage: LocalStorage, calls: Calls) -> None:
    with storage.defer_names("hidden"):
        with storage.defer_names("hidden"):
            storage.put("hidden/a/b", b"1")
            calls.take()
        storage.put("hidden/c/d", b"1")
        calls.take()
    assert {"sync /new/root/hidden/c", "sync /new/root/hidden/a", "sync /new/root/hidden"} <= set(calls.take())


def test_a_directory_below_a_deferred_one_can_be_synced(storage: LocalStorage, calls: Calls) -> None:
    with storage.defer_names("hidden"):
        storage.put("hidden/a/b", b"1")
        storage.put("hidden/a/c/d", b"1")
        calls.take()
        storage.sync_directory("hidden/a")
        assert calls.take() == ["sync /new/root/hidden/a/c", "sync /new/root/hidden/a"]


@pytest.mark.parametrize("unlisted", ["hidden", "hidden/a"])
def test_a_directory_that_cannot_be_listed_is_not_durable(
    unlisted: str, storage: LocalStorage, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def failing(path: str) -> Any:
        if str(path).endswith(unlisted):
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return scandir(path)

    with storage.defer_names("hidden"):
        storage.put("hidden/a/b", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", failing)
            with pytest.raises(StorageError, match=f"cannot list .*/{unlisted}: Stale"):
                storage.sync_directory("hidden")
        calls.take()
        storage.put("hidden/c", b"1")
        assert "sync /new/root/hidden" not in calls.take(), "the deferral ended although names were not synced"
        storage.sync_directory("hidden")
        assert calls.take() == ["sync /new/root/hidden/a", "sync /new/root/hidden"]


def test_a_storage_without_durability_syncs_nothing(tmp_path: Path, calls: Calls) -> None:
    storage = open_local(str(tmp_path / "root"), StorageOptions(durable=False))
    storage.put("a/b", b"1")
    writer = storage.open_writer("a/c", 5 << 20)
    writer.write_at(0, bytes(5 << 20))
    writer.finish()
    storage.sync(["a/b"])
    storage.sync_directory("a")
    with storage.defer_names("a"):
        storage.put("a/e", b"1")
    storage.rename("a", "d")
    storage.put("a/b", b"1")
    storage.exchange("a", "d")
    storage.delete_directory("a")
    assert [call for call in calls.take() if call.startswith("sync")] == []
