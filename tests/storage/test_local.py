"""Local storage: paths, links, durability, errors."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ckptcore_testing.locations import await_later_times

import ckptcore
from ckptcore.builtin.local import LocalStorage, open_local
from ckptcore.errors import (
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
)
from ckptcore.protocols import IF_ABSENT, IfTag, StorageOptions

NOT_DURABLE = StorageOptions(durable=False)


@pytest.fixture(params=[True, False], ids=["durable", "not durable"])
def storage(tmp_path: Path, request: pytest.FixtureRequest) -> LocalStorage:
    return open_local(str(tmp_path / "directory"), StorageOptions(durable=request.param))


# --- locations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("{path}/plain", "plain"),
        ("{path}/plain/", "plain"),
        ("{path}/a%20b", "a%20b"),
        ("{path}/q?x#y", "q?x#y"),
        ("file://{path}/plain", "plain"),
        ("file://localhost{path}/plain", "plain"),
        ("FILE://{path}/a%20b%25", "a b%"),
        ("file://{path}/q?x#y", "q?x#y"),
        ("file://{path}/%C3%BC", "ü"),
    ],
)
def test_paths_and_urls_lead_to_a_directory(tmp_path: Path, url: str, name: str) -> None:
    storage = open_local(url.format(path=tmp_path), NOT_DURABLE)
    storage.put("a", b"1")
    assert (tmp_path / name / "a").read_bytes() == b"1"


@pytest.mark.parametrize("url", ["", "nul\0", "file://host/path", "file://", "file://path", "file:///nul%00"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidLocationError):
        open_local(url, NOT_DURABLE)


def test_a_relative_path_is_resolved_at_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_local("a/../b", NOT_DURABLE)
    monkeypatch.chdir("/")
    storage.put("c", b"1")
    assert (tmp_path / "b" / "c").read_bytes() == b"1"


def test_the_address_opens_the_same_files(tmp_path: Path) -> None:
    name = "ü %41?#"
    storage = open_local(f"{tmp_path}/{name}", NOT_DURABLE)
    again = open_local(storage.address.url, NOT_DURABLE)
    storage.put("a", b"1")
    assert again.get("a") == b"1"
    assert storage.address.url.startswith("file:///")
    assert storage.address.url.endswith("/")


def test_opening_and_reading_create_nothing(tmp_path: Path) -> None:
    storage = open_local(f"{tmp_path}/a/b", StorageOptions())
    list(storage.list())
    storage.list_names("c")
    storage.delete(["c/d"])
    storage.delete_directory("c")
    with pytest.raises(ObjectNotFoundError):
        storage.get("c")
    assert list(tmp_path.iterdir()) == []


def test_the_whole_file_system_can_be_opened(tmp_path: Path) -> None:
    storage = open_local("/", NOT_DURABLE)
    key = str(tmp_path / "a")[1:]
    storage.put(key, b"1")
    assert storage.get(key) == b"1"
    assert storage.address.url == "file:///"


@pytest.mark.parametrize("config", [{"unknown": 1}, {"direct_io": "yes"}, {"direct_io": 1}])
def test_invalid_options_are_refused(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="direct_io"):
        open_local(str(tmp_path), StorageOptions(config=config))  # type: ignore[arg-type]  # invalid on purpose


# --- links, and other entries that are not files ----------------------------------------------------------------------


def test_a_location_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    storage = open_local(str(tmp_path / "link"), StorageOptions())
    storage.put("a/b", b"1")
    assert (tmp_path / "elsewhere/a/b").read_bytes() == b"1"
    assert read_into(storage, "a/b", 1) == b"1"
    assert list(storage.list()) == ["a/b"]


def test_a_link_to_another_target_is_followed_again(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(name.encode())
    link = tmp_path / "link"
    link.symlink_to("one")
    storage = open_local(str(link), NOT_DURABLE)
    assert read_into(storage, "a", 3) == b"one"
    link.unlink()
    link.symlink_to("other")
    assert read_into(storage, "a", 5) == b"other"
    assert storage.get("a") == b"other"


@pytest.mark.parametrize("target", ["file", "directory", "relative"])
def test_links_that_lead_out_are_not_followed(tmp_path: Path, target: str, storage: LocalStorage) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "directory"
    root.mkdir()
    if target == "file":
        (root / "a").mkdir()
        (root / "a/secret").symlink_to(outside / "secret")
    elif target == "directory":
        (root / "a").symlink_to(outside)
    else:
        (root / "a").symlink_to("../outside")
    for read in (storage.get, storage.get_with_tag, storage.size, lambda key: read_into(storage, key, 6)):
        with pytest.raises(InvalidLocationError, match="leads out"):
            read("a/secret")
    if target != "file":
        (outside / "kept").mkdir()
        for call in (
            lambda: list(storage.list("a")),
            lambda: storage.list_names("a"),
            lambda: storage.list_names("a/kept"),
            lambda: storage.delete(["b/c", "a/secret"]),
            lambda: storage.delete_directory("a/kept"),
            lambda: storage.rename("a/kept", "new"),
            lambda: storage.exchange("b", "a/kept"),
            lambda: storage.sync(["a/secret"]),
            lambda: storage.sync_directory("a/kept"),
            lambda: storage.open_writer("a/secret"),
            lambda: storage.put("a/secret", b"1"),
            lambda: storage.put("a/new", b"1"),
            lambda: storage.put("a/deep/new", b"1"),
            lambda: storage.open_writer("a/new"),
            lambda: storage.lock_directory("a/new"),
            lambda: storage.rename("b", "a/new"),
        ):
            storage.put("b/c", b"1")
            with pytest.raises(InvalidLocationError, match="leads out"):
                call()
        (outside / "kept").rmdir()
    assert files_in(outside) == {"secret": b"secret"}


def test_a_deletion_keeps_the_targets_of_links(tmp_path: Path, storage: LocalStorage) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"1")
    storage.put("a/b/c", b"1")
    (tmp_path / "directory/a/b/link").symlink_to(outside)
    (tmp_path / "directory/a/file").symlink_to(outside / "kept")
    (tmp_path / "directory/link").symlink_to(outside)
    storage.delete(["a/file"])
    storage.delete_directory("a")
    storage.delete_directory("link")
    assert (outside / "kept").read_bytes() == b"1"
    assert list((tmp_path / "directory").iterdir()) == []


def test_a_put_replaces_a_link_and_not_its_target(tmp_path: Path, storage: LocalStorage) -> None:
    outside = tmp_path / "kept"
    outside.write_bytes(b"1")
    (tmp_path / "directory").mkdir()
    for name in ("put", "written"):
        (tmp_path / "directory" / name).symlink_to(outside)
    storage.put("put", b"2")
    writer = storage.open_writer("written", 1)
    writer.write_at(0, b"3")
    writer.finish()
    assert outside.read_bytes() == b"1"
    assert storage.get("put") + storage.get("written") == b"23"


def test_links_inside_the_storage_are_followed(tmp_path: Path, storage: LocalStorage) -> None:
    storage.put("step/real/a", b"1")
    step = tmp_path / "directory/step"
    (step / "link").symlink_to("real")
    (step / "absolute").symlink_to(step / "real/a")
    (step / "real/above").symlink_to("../link/../real/./a")
    for key in ("step/link/a", "step/absolute", "step/real/above", "step/link/above"):
        assert storage.get(key) == b"1"
        assert storage.size(key) == 1
        assert read_into(storage, key, 1) == b"1"
    assert storage.list_names("step") == ["absolute", "link/", "real/"]
    assert storage.list_names("step/link") == ["a", "above"]
    assert list(storage.list()) == ["step/absolute", "step/real/a", "step/real/above"]
    storage.put("step/link/new", b"2")
    assert storage.get("step/real/new") == b"2"
    (tmp_path / "directory/file").symlink_to("step/real/a")
    assert storage.get("file") == b"1"


@pytest.fixture(params=[True, False], ids=["openat2", "each component"])
def opens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test both ways to open files, even if this system supports `openat2`."""
    if not request.param:
        for module in ("local_files", "local_directories"):
            monkeypatch.setattr(f"ckptcore.builtin.{module}.open_without_links", lambda path, flags: None)


LINKS_OUT = {
    "a neighbour": ("step/a", "../other/secret"),
    "an absolute path of a neighbour": ("step/a", "{root}/other/secret"),
    "a sibling file": ("step/a", "../secret"),
    "a directory of a neighbour": ("step/d", "../other"),
    "the directory above": ("step/d", ".."),
    "itself from above": ("step/d", "../step"),
    "the checkpoint itself": ("step", "other"),
    "the absolute path of it": ("step", "{root}/other"),
    "two links": ("step/a", "d/../../other/secret"),
    "a name that begins alike": ("step/a", "{root}/step_2/secret"),
    "the root": ("step/d", "/"),
}
"""By the target of a link: the path of the link, and its text."""


@pytest.mark.parametrize("what", LINKS_OUT)
def test_links_from_a_checkpoint_to_its_neighbours_are_not_followed(
    tmp_path: Path, opens: None, what: str, storage: LocalStorage
) -> None:
    root = tmp_path / "directory"
    for key in ("other/secret", "step_2/secret", "secret"):
        storage.put(key, b"secret")
    place, target = LINKS_OUT[what]
    if what == "two links":
        (root / "step").mkdir()
        (root / "step/d").symlink_to(".")
    (root / place).parent.mkdir(exist_ok=True)
    (root / place).symlink_to(target.format(root=root))
    key = "step/secret" if place == "step" else place if place == "step/a" else "step/d/secret"
    for read in (
        storage.get,
        storage.get_with_tag,
        storage.size,
        storage.open_reader,
        storage.open_stamped,
        lambda key: read_into(storage, key, 6),
    ):
        with pytest.raises(InvalidLocationError, match="leads out"):
            read(key)
    if place == "step/a":
        return
    directory = key.rpartition("/")[0]
    for call in (
        lambda: list(storage.list(directory)),
        lambda: storage.list_names(directory),
        lambda: storage.delete([key]),
        lambda: storage.sync([key]),
        lambda: storage.sync_directory(f"{directory}/x"),
        lambda: storage.delete_directory(f"{directory}/x"),
        lambda: storage.open_writer(key),
        lambda: storage.put(key, b"1"),
        lambda: storage.put(f"{directory}/new", b"1"),
        lambda: storage.lock_directory(f"{directory}/new"),
        lambda: storage.rename("step_2", f"{directory}/new"),
    ):
        with pytest.raises(InvalidLocationError, match="leads out"):
            call()
    assert files_in(root / "other") == {"secret": b"secret"}
    assert storage.get("step_2/secret") == storage.get("secret") == b"secret"


def test_link_cannot_leave_checkpoint_through_another_link(tmp_path: Path, opens: None, storage: LocalStorage) -> None:
    """The text of the first link stays inside the checkpoint, but the target of the second link has fewer parts."""
    storage.put("secret", b"secret")
    storage.put("step/sub/b", b"1")
    step = tmp_path / "directory/step"
    (step / "sub/here").symlink_to("..")
    (step / "a").symlink_to("sub/here/../secret")
    with pytest.raises(InvalidLocationError, match="leads out"):
        storage.get("step/a")


def test_a_parent_of_a_location_may_be_a_link(tmp_path: Path, opens: None) -> None:
    (tmp_path / "real/run/step/d").mkdir(parents=True)
    (tmp_path / "real/run/step/d/a").write_bytes(b"1")
    (tmp_path / "link").symlink_to("real")
    storage = open_local(str(tmp_path / "link/run"), StorageOptions())
    assert storage.get("step/d/a") == b"1"
    assert storage.list_names("step/d") == ["a"]
    storage.put("step/d/b", b"2")
    assert list(storage.list()) == ["step/d/a", "step/d/b"]


def test_the_cache_of_the_hugging_face_hub_can_be_read(tmp_path: Path, opens: None) -> None:
    """Files of snapshots in this cache are links to blobs next to the snapshots."""
    repository = tmp_path / "hub/models--owner--name"
    snapshot = repository / "snapshots/0123abcd"
    (snapshot / "sub").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs/ffff").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/ffff")
    (snapshot / "sub/model.safetensors").symlink_to("../../../blobs/ffff")
    (snapshot / "absolute").symlink_to(repository / "blobs/ffff")
    deep = open_local(str(snapshot), NOT_DURABLE)
    assert deep.get("sub/model.safetensors") == b"weights"
    assert deep.get("absolute") == b"weights"
    (snapshot / "absolute").unlink()
    for location, prefix in ((snapshot, ""), (snapshot.parent, "0123abcd/")):
        storage = open_local(str(location), NOT_DURABLE)
        assert storage.get(f"{prefix}model.safetensors") == b"weights"
        assert read_into(storage, f"{prefix}sub/model.safetensors", 7) == b"weights"
        assert list(storage.list()) == [f"{prefix}model.safetensors", f"{prefix}sub/model.safetensors"]


@pytest.mark.parametrize(
    ("directory", "target"),
    [
        ("models--a/snapshots/b", "outside"),
        ("models--a/snapshots/b", "models--a/elsewhere/file"),
        ("plain/snapshots/b", "plain/blobs/file"),
        ("models--a/snapshots/b", "models--b/blobs/file"),
        ("models--a/snapshots/b", "models--a/blobs/deep/file"),
        ("models--a/snapshots/b", "models--a/snapshots/c/file"),
        ("models--a/snapshots/b", "models--a/snapshots/blobs/file"),
        ("models--a", "blobs/file"),
        ("x/snapshots/models--a", "x/blobs/file"),
    ],
)
def test_links_of_other_directories_are_not_those_of_the_hub_cache(
    tmp_path: Path, opens: None, directory: str, target: str
) -> None:
    (tmp_path / directory).mkdir(parents=True)
    (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / target).write_bytes(b"secret")
    (tmp_path / directory / "a").symlink_to(tmp_path / target)
    with pytest.raises(InvalidLocationError, match="leads out"):
        open_local(str(tmp_path / directory), NOT_DURABLE).get("a")
    with pytest.raises(InvalidLocationError, match="leads out"):
        open_local(str((tmp_path / directory).parent), NOT_DURABLE).get(f"{Path(directory).name}/a")


@pytest.mark.parametrize("what", ["blob", "blobs"])
def test_blobs_of_the_hub_cache_must_not_be_links(tmp_path: Path, opens: None, what: str) -> None:
    repository = tmp_path / "hub/models--a"
    (repository / "snapshots/b").mkdir(parents=True)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/file").write_bytes(b"secret")
    if what == "blobs":
        (repository / "blobs").symlink_to(tmp_path / "secrets")
    else:
        (repository / "blobs").mkdir()
        (repository / "blobs/file").symlink_to(tmp_path / "secrets/file")
    (repository / "snapshots/b/a").symlink_to("../../blobs/file")
    with pytest.raises((InvalidLocationError, StorageError)):
        open_local(str(repository / "snapshots"), NOT_DURABLE).get("b/a")


def test_a_checkpoint_cannot_contain_a_hub_cache(tmp_path: Path, opens: None) -> None:
    """Links to blobs are followed only if the user names the snapshot, not for paths inside another checkpoint."""
    inside = tmp_path / "checkpoint/models--a/snapshots/b"
    inside.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/file").write_bytes(b"secret")
    (tmp_path / "checkpoint/models--a/blobs").symlink_to(tmp_path / "blobs")
    (inside / "a").symlink_to("../../blobs/file")
    with pytest.raises(InvalidLocationError, match="leads out"):
        open_local(str(tmp_path), NOT_DURABLE).get("checkpoint/models--a/snapshots/b/a")


def test_named_pipes_and_sockets_are_not_objects(tmp_path: Path, opens: None, storage: LocalStorage) -> None:
    storage.put("a", b"1")
    os.mkfifo(tmp_path / "directory/pipe")
    # A relative path, because the absolute path may be too long for a socket.
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(tmp_path / "directory"):
        listening.bind("socket")
    for key in ("pipe", "socket"):
        for read in (storage.get, storage.size, storage.open_stamped, lambda key: read_into(storage, key, 1)):
            with pytest.raises(ObjectNotFoundError):
                read(key)
    assert list(storage.list()) == ["a"]
    assert storage.list_names() == ["a"]


def test_a_link_to_itself_is_an_error_until_it_is_replaced(tmp_path: Path, storage: LocalStorage) -> None:
    storage.put("a", b"1")
    (tmp_path / "directory/circle").symlink_to("circle")
    with pytest.raises(StorageError):
        storage.get("circle")
    storage.put("circle", b"2")
    assert storage.get("circle") == b"2"


# --- temporary files --------------------------------------------------------------------------------------------------


def test_a_file_of_a_killed_put_is_hidden_and_deleted_with_its_directory(tmp_path: Path, storage: LocalStorage) -> None:
    storage.put("a/b", b"1")
    leftover = tmp_path / "directory/a/.ckptcore-put-0123456789abcdef"
    leftover.write_bytes(b"half")
    assert list(storage.list()) == ["a/b"]
    assert storage.list_names("a") == ["b"]
    storage.delete_directory("a")
    assert not leftover.exists()


def test_keys_with_the_names_of_temporary_files_are_refused(storage: LocalStorage) -> None:
    for write in (storage.open_writer, lambda key: storage.put(key, b"1")):
        with pytest.raises(InvalidLocationError):
            write("a/.ckptcore-put-x")


def test_a_put_that_fails_leaves_nothing(tmp_path: Path, storage: LocalStorage) -> None:
    tag = storage.put("a/b", b"1")
    for key, condition in (("a/b", IF_ABSENT), ("a/b", IfTag("other")), ("new/c", IfTag(tag))):
        with pytest.raises(ConditionFailedError):
            storage.put(key, b"2", condition=condition)
    assert files_in(tmp_path) == {"directory/a/b": b"1"}
    assert storage.list_names() == ["a/"]


def test_a_put_at_the_key_of_a_directory_is_refused(tmp_path: Path, storage: LocalStorage) -> None:
    storage.put("a/b", b"1")
    for condition in (None, IF_ABSENT, IfTag("x")):
        with pytest.raises(StorageError):
            storage.put("a", b"2", condition=condition)
    with pytest.raises(StorageError):
        storage.open_writer("a", 1)
    with pytest.raises(StorageError, match="not a directory"):
        storage.put("a/b/c", b"2")
    assert files_in(tmp_path) == {"directory/a/b": b"1"}


# --- writers ----------------------------------------------------------------------------------------------------------


def test_a_writer_refuses_another_size(storage: LocalStorage) -> None:
    writer = storage.open_writer("a", 10)
    for offset, data in ((8, b"123"), (-1, b"1"), (10, b"1"), (0, bytes(11))):
        with pytest.raises(ValueError, match="cannot write bytes"):
            writer.write_at(offset, data)
    writer.write_at(0, bytes(9))
    with pytest.raises(StorageError, match="expected 10 bytes"):
        writer.finish()
    writer.write_at(9, b"1")
    writer.finish()
    assert storage.get("a") == bytes(9) + b"1"


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_nothing_is_written_after_the_end(storage: LocalStorage, end: str) -> None:
    writer = storage.open_writer("a", 0)
    getattr(writer, end)()
    with pytest.raises(ValueError, match="complete or was aborted"):
        writer.write_at(0, b"")
    with pytest.raises(ValueError, match="complete or was aborted"):
        writer.finish()
    writer.abort()
    assert list(storage.list()) == (["a"] if end == "finish" else [])


def test_an_abort_removes_only_its_own_file(storage: LocalStorage) -> None:
    writer = storage.open_writer("a", 10)
    storage.put("a", b"of another")
    writer.abort()
    assert storage.get("a") == b"of another"


def test_abort_waits_for_writes_on_other_threads(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the abort would close the descriptor, and the write could continue in another file with its number."""
    writer = storage.open_writer("a", 100)
    began, go_on = threading.Event(), threading.Event()
    pwrite = os.pwrite

    def slow(*arguments: object) -> int:
        began.set()
        assert go_on.wait(60)
        return pwrite(*arguments)  # type: ignore[arg-type]  # the arguments of the call

    monkeypatch.setattr(os, "pwrite", slow)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            writer.write_at(0, b"12345")
        except BaseException as error:  # noqa: BLE001  # shown to the test
            errors.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    assert began.wait(60)
    aborting = threading.Thread(target=writer.abort)
    aborting.start()
    aborting.join(0.1)
    assert aborting.is_alive()
    go_on.set()
    writing.join(60)
    aborting.join(60)
    assert errors == []
    assert not aborting.is_alive()
    assert list(storage.list()) == []


def test_readers_keep_the_object_that_is_replaced(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("a", b"old")
    with open(tmp_path / "directory/a", "rb") as reader:
        writer = storage.open_writer("a", 3)
        writer.write_at(0, b"new")
        writer.finish()
        assert reader.read() == b"old"


def test_files_are_closed(storage: LocalStorage) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to count open files")
    before = open_files()
    for number in range(300):
        storage.put(f"a/{number}", bytes(400_000))
        read_into(storage, f"a/{number}", 400_000)
        writer = storage.open_writer(f"b/{number}", 1)
        writer.write_at(0, b"1")
        writer.finish()
        storage.open_writer(f"c/{number}", 1).abort()
        with pytest.raises(ConditionFailedError):
            storage.put(f"a/{number}", b"1", condition=IF_ABSENT)
    assert open_files() <= before + 3 * 64, "only so many are kept open"
    storage.close()
    assert open_files() <= before + 1
    assert read_into(storage, "a/7", 1) == b"\0", "a closed storage can still be used"


def test_permissions_are_those_of_the_user(storage: LocalStorage, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        storage.put("put", b"1")
        storage.open_writer("written").finish()
    finally:
        os.umask(old)
    for name in ("put", "written"):
        assert stat.S_IMODE((tmp_path / "directory" / name).stat().st_mode) == 0o640


# --- messages of failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_its_own_error(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    storage.put("kept", b"1")

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "write", full)
    writer = storage.open_writer("a", 12345)
    with pytest.raises(StorageFullError, match=r"directory/a \(12345 bytes\).*(?i:free some space)") as caught:
        writer.write_at(0, bytes(12345))
    assert caught.value.errno == number
    assert isinstance(caught.value.__cause__, OSError)
    writer.abort()
    with pytest.raises(StorageFullError, match=r"\(3 bytes\)"):
        storage.put("kept", b"new")
    assert files_in(tmp_path) == {"directory/kept": b"1"}


def test_other_errors_are_storage_errors_too(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = storage.open_writer("a", 3)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        with pytest.raises(StorageError, match="cannot write .*/a .*Input/output error") as caught:
            writer.write_at(0, b"123")
    assert not isinstance(caught.value, StorageFullError)
    writer.write_at(0, b"123")
    writer.finish()
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        patched.setattr(os, "pread", fail)
        for read in (storage.get, lambda key: read_into(storage, key, 3)):
            with pytest.raises(StorageError, match="cannot read .*/a"):
                read("a")


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_a_failed_sync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    storage = open_local(str(tmp_path), StorageOptions())

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = storage.open_writer("a", 1)
    writer.write_at(0, b"1")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match="durable"):
        writer.finish()
    writer.abort()
    with pytest.raises(StorageError):
        storage.put("b", b"1")


def test_a_name_that_is_too_long(storage: LocalStorage) -> None:
    with pytest.raises(StorageError, match="too long"):
        storage.put("x" * 300, b"1")
    with pytest.raises(StorageError, match="too long"):
        storage.get("x" * 300)


def test_a_file_that_shrinks_while_it_is_read(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("a", bytes(1_000_000))
    read_into(storage, "a", 1_000_000)
    os.truncate(tmp_path / "directory/a", 500_000)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_into(storage, "a", 1_000_000)
    assert (caught.value.key, caught.value.start, caught.value.stop) == ("a", 500_000, 1_000_000)


def test_surrogates_are_refused(storage: LocalStorage) -> None:
    with pytest.raises(InvalidLocationError):
        storage.put("\ud800", b"1")


# --- real full disks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["size known", "size unknown"])
def test_a_file_system_that_is_full(small_file_system: Path, known: bool) -> None:
    storage = open_local(str(small_file_system / "a"), StorageOptions())
    storage.put("kept", b"1" * 1000)
    nbytes = 16 << 20

    def write() -> None:
        writer = storage.open_writer("big", nbytes if known else None)
        try:
            for offset in range(0, nbytes, 1 << 20):
                writer.write_at(offset, bytes(1 << 20))
            writer.finish()
        except BaseException:
            writer.abort()
            raise

    with pytest.raises(StorageFullError, match="big"):
        write()
    with pytest.raises(StorageFullError, match="kept"):
        storage.put("kept", bytes(nbytes))
    assert files_in(small_file_system) == {"a/kept": b"1" * 1000}
    storage.put("b", b"2")
    assert storage.get("b") == b"2"


@pytest.fixture
def small_file_system(tmp_path: Path) -> object:
    """Mount a tmpfs of 4 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    if sys.platform != "linux":
        pytest.skip("needs a tmpfs")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(target)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def read_into(storage: LocalStorage, key: str, nbytes: int) -> bytes:
    """Read the first bytes of an object with `get_into`."""
    memory = bytearray(nbytes)
    storage.get_into(key, [(0, memoryview(memory))])
    return bytes(memory)


def files_in(directory: Path) -> dict[str, bytes]:
    """Return the content of all files, including temporary files."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- held files -------------------------------------------------------------------------------------------------------


def test_the_stamp_of_a_held_file_appears_after_some_time_and_changes_with_the_file(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("data", b"first" * 100)
    held = storage.open_stamped("data")
    path = tmp_path / "directory" / "data"
    changed = path.stat().st_ctime_ns
    clock = changed
    monkeypatch.setattr("ckptcore.builtin.local_files.time.time_ns", lambda: clock)
    assert held.stamp() is None
    clock += 3_000_000_000
    stamp = held.stamp()
    assert stamp is not None and held.stamp() == stamp
    await_later_times(tmp_path)
    with path.open("r+b") as written:
        written.write(b"other")
    clock = path.stat().st_ctime_ns + 1_000_000_000
    assert held.stamp() is None
    clock += 3_000_000_000
    assert held.stamp() not in (None, stamp)
    os.truncate(path, 7)
    assert held.stamp() != stamp and held.size() == 7


def test_a_link_to_itself_is_not_listed(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("directory/object", b"data")
    (path,) = tmp_path.rglob("object")
    (path.parent / "loop").symlink_to("loop")
    assert list(storage.list()) == ["directory/object"]
    assert list(storage.list_names("directory")) == ["object"]


def test_a_relative_location_without_a_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidLocationError, match="working directory"):
        open_local("relative", StorageOptions())
    with pytest.raises(InvalidLocationError, match="working directory"):
        ckptcore.load("relative")
    monkeypatch.chdir(tmp_path)


def test_a_file_system_without_new_directories_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /proc, `os.mkdir` reports that the parent is missing. This must not become an endless loop."""

    def refuse(path: str, *_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"cannot create the directory .*/run: .* its parent is missing"):
        ckptcore.save(tmp_path / "run" / "step", {"a": 1})
