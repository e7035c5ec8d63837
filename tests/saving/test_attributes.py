"""Attributes of replaced directories and files: owner, group, mode, ACL and extended attributes."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest

import ckptcore
from ckptcore.builtin.local import LocalStorage
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
def test_nobody_has_more_access_while_a_save_writes(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptcore.save(tmp_path / "1", {"n": 0})
    (tmp_path / path).chmod(0o700)
    open_writer, modes = LocalStorage.open_writer, []

    def look(self: LocalStorage, key: str, size: int | None = None) -> object:
        hidden = [one for one in tmp_path.iterdir() if one.name.endswith(".ckptcore")]
        modes.extend([stat.S_IMODE(one.stat().st_mode) & 0o077 for one in hidden])
        return open_writer(self, key, size)

    monkeypatch.setattr(LocalStorage, "open_writer", look)
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


def test_a_group_that_cannot_be_kept_gives_no_access_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
