"""Attributes of replaced directories and files: owner, group, mode, ACL and extended attributes."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import ckptcore
from ckptcore.builtin.local import LocalStorage
from ckptcore.builtin.local_attributes import hide_from_others, keep_attributes_below, read_attributes
from ckptcore.errors import AtomicityError
from ckptcore.plain_safetensors import encode_header, replace_file
from ckptcore.protocols import StorageOptions

_STATE: Final = {"n": 1, "w": np.arange(6)}
_PRIVATE_GROUP: Final = 54321

_ACL: Final = struct.pack("<I", 2) + b"".join([
    struct.pack("<HHI", tag, permissions, identity)
    for tag, permissions, identity in (
        (0x01, 7, 0xFFFFFFFF), (0x02, 5, 12345), (0x04, 5, 0xFFFFFFFF), (0x10, 5, 0xFFFFFFFF), (0x20, 0, 0xFFFFFFFF),
    )
])  # fmt: skip
"""rwx for the owner, r-x for the user 12345, the group and the mask, nothing for all others (acl_ea.h of Linux)."""


class _Attributes(NamedTuple):
    mode: str
    group: int
    extended: dict[str, bytes]


def _attributes(path: Path) -> _Attributes:
    status = path.stat()
    extended = {name: os.getxattr(path, name) for name in os.listxattr(path) if not name.startswith("security.")}
    return _Attributes(oct(stat.S_IMODE(status.st_mode)), status.st_gid, extended)


def _mark(path: Path, mode: int, *, acl: bool = False) -> _Attributes:
    if os.getuid() == 0:
        os.chown(path, -1, _PRIVATE_GROUP)
    for name, value in {"user.note": b"mine", **({"system.posix_acl_access": _ACL} if acl else {})}.items():
        try:
            os.setxattr(path, name, value)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
    if not acl:
        path.chmod(mode)
    return _attributes(path)


def _overwrite(location: Path) -> None:
    ckptcore.save(location, _STATE, overwrite=True)


def _overwrite_in_background(location: Path) -> None:
    ckptcore.save_async(location, _STATE, overwrite=True).result()


def _keep(location: Path) -> None:
    ckptcore.save(location, _STATE, overwrite="keep-other-files")


def _copy(location: Path) -> None:
    ckptcore.save(location.parent / "source", _STATE)
    ckptcore.copy(location.parent / "source", location, overwrite=True)


def _convert(location: Path) -> None:
    ckptcore.save(location.parent / "source", _STATE)
    ckptcore.copy(location.parent / "source", location, layout="zarr3", overwrite=True)


def _export(location: Path) -> None:
    exports = ckptcore.WithExports([ckptcore.Export(location=location)])
    ckptcore.save(location.parent / "source", _STATE, strategy=exports, overwrite=True)


def _step(location: Path) -> None:
    with ckptcore.Checkpointer(location.parent) as run:
        run.save_blocking(int(location.name), _STATE, overwrite=True)


_REPLACING: Final = [_overwrite, _overwrite_in_background, _keep, _copy, _convert, _export, _step]


@pytest.mark.parametrize("mode", [0o700, 0o2775, 0o750, 0o1777])
@pytest.mark.parametrize("replace", _REPLACING)
def test_a_replaced_directory_keeps_its_attributes(tmp_path: Path, replace: Callable[[Path], None], mode: int) -> None:
    location = tmp_path / "1"
    ckptcore.save(location, {"n": 0})
    before = _mark(location, mode)
    replace(location)
    assert _attributes(location) == before
    assert ckptcore.load(location)["n"] == 1


@pytest.mark.parametrize("replace", _REPLACING)
def test_a_replaced_directory_keeps_its_access_control_list(tmp_path: Path, replace: Callable[[Path], None]) -> None:
    location = tmp_path / "1"
    ckptcore.save(location, {"n": 0})
    before = _mark(location, 0, acl=True)
    if "system.posix_acl_access" not in before.extended:
        pytest.skip("this file system has no access control lists")
    replace(location)
    assert _attributes(location) == before


@pytest.mark.parametrize("replace", [_overwrite, _keep, _overwrite_in_background])
@pytest.mark.parametrize("mode", [0o700, 0o2775])
def test_an_empty_directory_keeps_its_attributes(tmp_path: Path, replace: Callable[[Path], None], mode: int) -> None:
    location = tmp_path / "1"
    location.mkdir()
    before = _mark(location, mode)
    replace(location)
    assert _attributes(location) == before


def test_two_renames_keep_the_attributes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AtomicityError("the test has no exchange")

    location = tmp_path / "1"
    ckptcore.save(location, {"n": 0})
    before = _mark(location, 0o2770)
    monkeypatch.setattr(LocalStorage, "exchange", refuse)
    ckptcore.save(location, _STATE, overwrite="non-atomic")
    assert _attributes(location) == before


def test_private_directories_and_files_inside_stay_private(tmp_path: Path) -> None:
    location = tmp_path / "1"
    ckptcore.save_checkpointables(location, {"model": {"n": 0}, "own": {"n": 0}})
    private = {location / "model": 0o700, location / "own/checkpoint.json": 0o600, location / "own": 0o2711}
    before = {path: _mark(path, mode) for path, mode in private.items()}
    ckptcore.save_checkpointables(location, {"model": _STATE, "own": {"n": 1}}, overwrite=True)
    assert {path: _attributes(path) for path in private} == before
    assert _attributes(location / "model/checkpoint.json").mode == "0o644"


@pytest.mark.parametrize("path", ["1", "1/model.safetensors", "1/checkpoint.json"])
def test_no_user_has_more_access_while_save_writes(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptcore.save(tmp_path / "1", {"n": 0})
    (tmp_path / path).chmod(0o700)
    open_new, modes = LocalStorage.open_new, []

    def look(self: LocalStorage, key: str, size: int | None = None) -> object:
        hidden = [entry for entry in tmp_path.iterdir() if entry.name.endswith(".ckptcore")]
        modes.extend([stat.S_IMODE(entry.stat().st_mode) & 0o077 for entry in hidden])
        return open_new(self, key, size)

    monkeypatch.setattr(LocalStorage, "open_new", look)
    ckptcore.save(tmp_path / "1", _STATE, overwrite=True)
    assert set(modes) == {0}
    assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o700
    assert _attributes(tmp_path / "1").mode == ("0o700" if path == "1" else "0o755")


def test_a_replaced_object_keeps_its_attributes(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path), StorageOptions(durable=False, config={}))
    storage.put("a", b"1")
    before = _mark(tmp_path / "a", 0o640)
    storage.put("a", b"2")
    assert _attributes(tmp_path / "a") == before
    writer = storage.open_writer("a", 1)
    assert _attributes(tmp_path / "a") == before
    writer.write_at(0, b"3")
    writer.finish()
    assert _attributes(tmp_path / "a") == before
    replace_file(tmp_path / "a", [encode_header({})[0]])
    assert _attributes(tmp_path / "a") == before


def test_group_that_cannot_be_kept_gives_no_access_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if os.getuid():
        pytest.skip("only root can give the directory a group that a process is not a member of")
    ckptcore.save(tmp_path / "1", {"n": 0})
    _mark(tmp_path / "1", 0o2770)
    monkeypatch.setattr(os, "chown", refuse)
    ckptcore.save(tmp_path / "1", _STATE, overwrite=True)
    assert _attributes(tmp_path / "1").mode == "0o700"


def test_a_file_system_without_extended_attributes_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    ckptcore.save(tmp_path / "1", {"n": 0})
    (tmp_path / "1").chmod(0o710)
    for name in ("listxattr", "getxattr", "setxattr", "removexattr"):
        monkeypatch.setattr(os, name, refuse)
    ckptcore.save(tmp_path / "1", _STATE, overwrite=True)
    monkeypatch.undo()
    assert _attributes(tmp_path / "1").mode == "0o710"


def _directories(tmp_path: Path, **files: int) -> tuple[Path, Path]:
    """Create an old directory with files of these modes, and a new one."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    for name, mode in files.items():
        (old / name).write_bytes(b"")
        (old / name).chmod(mode)
    return old, new


@pytest.mark.parametrize(("private", "mode"), [(0o600, "0o600"), (0o640, "0o640"), (0o604, "0o604"), (0o644, "0o644")])
def test_a_file_with_a_new_name_is_as_private_as_most_private_old_file(tmp_path: Path, private: int, mode: str) -> None:
    old, new = _directories(tmp_path, first=0o644, model=private)
    (new / "first").write_bytes(b"")
    (new / "below").mkdir()
    for name in ("model-1", "below/model-2"):
        (new / name).write_bytes(b"")
        (new / name).chmod(0o644)
    list(keep_attributes_below(str(old), str(new)))
    assert _attributes(new / "model-1").mode == _attributes(new / "below/model-2").mode == mode
    assert _attributes(new / "first").mode == "0o644"
    assert new.stat().st_mode == old.stat().st_mode


def test_a_checkpoint_stays_private_if_the_names_of_its_files_change(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "1", {"n": 0})
    for path in (tmp_path / "1").iterdir():
        path.chmod(0o600)
    ckptcore.save(tmp_path / "source", _STATE)
    ckptcore.copy(tmp_path / "source", tmp_path / "1", layout="zarr3", overwrite=True)
    files = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    assert len(files) > 2
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_the_group_of_a_new_file_gets_only_the_access_that_all_users_had(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a file a group that a process is not a member of")
    old, new = _directories(tmp_path, model=0o640)
    os.chown(old / "model", -1, _PRIVATE_GROUP)
    (new / "other").write_bytes(b"")
    list(keep_attributes_below(str(old), str(new)))
    assert _attributes(new / "other").mode == "0o600"


def test_the_members_of_the_group_may_not_write_while_a_save_writes(tmp_path: Path) -> None:
    old, new = _directories(tmp_path, model=0o666)
    old.chmod(0o2777)
    hide_from_others(str(old), str(new))
    assert _attributes(new).mode == "0o2755"


@pytest.mark.parametrize("by_name", [True, False])
def test_attributes_are_never_given_to_the_target_of_a_link(
    tmp_path: Path, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link is not followed, even if it replaces the file just before `chmod`."""
    monkeypatch.setattr("ckptcore.builtin.local_attributes._has_descriptor_paths", lambda: by_name)
    old, new = _directories(tmp_path, model=0o666, other=0o666)
    (tmp_path / "victim").write_bytes(b"")
    (tmp_path / "victim").chmod(0o600)
    (new / "other").symlink_to(tmp_path / "victim")
    model = new / "model"
    model.write_bytes(b"")
    chmod = os.chmod

    def exchanged(path: int | str, mode: int) -> None:
        if not model.is_symlink():
            model.rename(new / "moved")
            model.symlink_to(tmp_path / "victim")
        chmod(path, mode)

    monkeypatch.setattr(os, "chmod", exchanged)
    list(keep_attributes_below(str(old), str(new)))
    assert model.is_symlink(), "the mode was set"
    assert _attributes(tmp_path / "victim").mode == "0o600"


@pytest.mark.parametrize("refused", ["getxattr", "setxattr"])
def test_a_mask_without_its_access_control_list_gives_no_access(
    tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = _directories(tmp_path)
    if "system.posix_acl_access" not in _mark(old, 0, acl=True).extended:
        pytest.skip("this file system has no access control lists")
    original = getattr(os, refused)

    def refuse(path: str, name: str, *arguments: object, **options: object) -> object:
        if name == "system.posix_acl_access":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return original(path, name, *arguments, **options)

    assert stat.S_IMODE(old.stat().st_mode) == 0o750, "r-x is the mask"
    monkeypatch.setattr(os, refused, refuse)
    hide_from_others(str(old), str(new))
    list(keep_attributes_below(str(old), str(new)))
    monkeypatch.undo()
    assert _attributes(new).mode == "0o700"
    assert _attributes(new).extended == {"user.note": b"mine"}, "all others are kept"


def test_no_access_control_list_is_set_for_another_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if os.getuid():
        pytest.skip("only root can give the directory a group that a process is not a member of")
    old, new = _directories(tmp_path)
    if "system.posix_acl_access" not in _mark(old, 0, acl=True).extended:
        pytest.skip("this file system has no access control lists")
    monkeypatch.setattr(os, "chown", refuse)
    list(keep_attributes_below(str(old), str(new)))
    assert _attributes(new) == _Attributes("0o700", new.stat().st_gid, {"user.note": b"mine"})


def test_a_file_system_with_fixed_modes_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    ckptcore.save(tmp_path / "1", {"n": 0})
    (tmp_path / "1").chmod(0o700)
    (tmp_path / "1" / "checkpoint.json").chmod(0o600)
    monkeypatch.setattr(os, "chmod", refuse)
    ckptcore.save(tmp_path / "1", _STATE, overwrite=True)
    assert ckptcore.load(tmp_path / "1")["n"] == 1


@pytest.mark.parametrize("call", ["listxattr", "getxattr"])
def test_old_file_that_disappears_has_no_attributes(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(*arguments: object, **options: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    old, new = _directories(tmp_path, model=0o600)
    for path in (old, old / "model"):
        if not _mark(path, 0o700).extended:
            pytest.skip("this file system has no extended attributes")
    monkeypatch.setattr(os, call, remove)
    assert read_attributes(str(old / "model")) is None
    hide_from_others(str(old), str(new))
    monkeypatch.undo()
    assert _attributes(new).mode == "0o755", "there is nothing to hide"


_READ_ONLY: Final = """
import os, sys
import ckptcore

def replace(location, mode):
    ckptcore.save(location, {"n": 0}, overwrite=True)
    for number in (1, 2):
        os.chmod(location, mode)
        ckptcore.save(location, {"n": number}, overwrite=True)
    assert ckptcore.load(location)["n"] == 2
    ckptcore.delete(location)

os.makedirs(sys.argv[2])
replace(sys.argv[2] + "/1", 0o755)  # imports everything, because another user may not read the modules
os.setgid(65534)
os.setuid(65534)
replace(sys.argv[1] + "/1", 0o555)
assert os.listdir(sys.argv[1]) == []
"""


def test_nobody_else_has_access_if_a_part_of_the_old_directory_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private file in it would go unnoticed."""
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "part").mkdir(parents=True)
    new.mkdir()
    for path in (old, old / "part"):
        path.chmod(0o755)
    scandir = os.scandir

    def fail(path: str) -> Any:
        if os.fspath(path).endswith("/part"):
            raise OSError(errno.EIO, "bad disk", path)
        return scandir(path)

    hide_from_others(str(old), str(new))
    assert stat.S_IMODE(new.stat().st_mode) == 0o755
    monkeypatch.setattr(os, "scandir", fail)
    hide_from_others(str(old), str(new))
    assert stat.S_IMODE(new.stat().st_mode) == 0o700


@pytest.mark.system
def test_the_owner_of_a_read_only_directory_may_replace_and_delete_it(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as place:  # other users cannot enter the directories of pytest
        os.chown(place, 65534, 65534)
        command = [sys.executable, "-W", "error", "-c", _READ_ONLY, place, str(tmp_path / "warm")]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
