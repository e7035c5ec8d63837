"""Locations of files and directories inside zip and tar archives."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_formats.archives import open_archive
from ckptcore_testing import FaultPlan
from ckptcore_tools.cli import main

import ckptcore
from ckptcore import distributions
from ckptcore.builtin.local import LocalStorage
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    InvalidLocationError,
    MissingDistributionError,
    ObjectNotFoundError,
)
from ckptcore.protocols import StorageOptions
from plugins.formats.tests.counted import assert_same, counted, place

WEIGHTS = np.arange(60_000, dtype=np.float32).reshape(200, 300)
Files = Mapping[str, bytes]


def _torch_file() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.from_numpy(WEIGHTS)}, file)
    return file.getvalue()


FILES: Files = {"data": b"{}", "policy.pth": _torch_file(), "_version": b"2.3.0"}
"""The files of a Stable-Baselines3 model."""


def _zip(path: Path, files: Files = FILES, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def _tar(path: Path, files: Files = FILES, mode: Any = "w", kind: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, mode, format=kind) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "zip": ("model.zip", _zip),
    "deflated zip": ("model.zip", lambda path: _zip(path, compression=zipfile.ZIP_DEFLATED)),
    "pax tar": ("model.tar", _tar),
    "GNU tar": ("model.tar", lambda path: _tar(path, kind=tarfile.GNU_FORMAT)),
    "ustar": ("model.tar", lambda path: _tar(path, kind=tarfile.USTAR_FORMAT)),
    "gzip": ("model.tar.gz", lambda path: _tar(path, mode="w:gz")),
    "bzip2": ("model.tar.bz2", lambda path: _tar(path, mode="w:bz2")),
    "xz": ("model.tar.xz", lambda path: _tar(path, mode="w:xz")),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_in_an_archive(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, write = WRITERS[kind]
    write(tmp_path / name)
    inner = tmp_path / f"{name}!" / "policy.pth"
    assert_same(ckptcore.load(inner)["w"], WEIGHTS)
    assert_same(ckptcore.open(str(inner))["w"][3:5, 7:9], WEIGHTS[3:5, 7:9])
    assert ckptcore.verify(inner).ok
    for command in (["inspect", str(inner)], ["verify", str(inner)], ["ls", str(tmp_path / f"{name}!")]):
        with pytest.raises(SystemExit, match="^0$"):
            main(command)
    assert "policy.pth" in capsys.readouterr().out
    ckptcore.copy(inner, tmp_path / "copy", layout="safetensors")
    assert_same(ckptcore.load(tmp_path / "copy")["w"], WEIGHTS)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_error_lists_what_is_inside_and_can_be_followed(kind: str, tmp_path: Path) -> None:
    name, write = WRITERS[kind]
    write(tmp_path / name)
    with pytest.raises(CheckpointNotFoundError, match="It has .*policy.pth.*by its own location") as caught:
        ckptcore.load(tmp_path / name)
    assert_same(ckptcore.load(str(caught.value).rpartition("such as ")[2])["w"], WEIGHTS)
    with pytest.raises(CheckpointNotFoundError, match=r"check the path: .*! has _version, data, policy\.pth"):
        ckptcore.load(tmp_path / f"{name}!/wrong.pth")


def test_a_directory_in_an_archive_and_an_archive_in_an_archive(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "step_3", {"w": WEIGHTS, "n": 3})
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        archive.add(tmp_path / "step_3", ".")
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as outer:
        outer.write(tmp_path / "whole.tar", "a/whole.tar")
    (tmp_path / "one!").mkdir()  # a directory with an odd name, not an archive
    ckptcore.save(tmp_path / "one!/step_1", {"n": 1})
    for location in ("whole.tar!", "whole.tar!/", "outer.zip!/a/whole.tar!"):
        loaded = ckptcore.load(f"{tmp_path}/{location}")
        assert loaded["n"] == 3
        assert_same(loaded["w"], WEIGHTS)
    assert ckptcore.load(tmp_path / "one!/step_1") == {"n": 1}


def test_members_are_read_from_any_storage(tmp_path: Path) -> None:
    """Uncompressed members are read by ranges, so no byte is read twice."""
    _zip(tmp_path / "model.zip", {"other": bytes(1 << 20), **FILES})
    plan = FaultPlan()
    loaded = ckptcore.load(f"{place(tmp_path / 'model.zip')}!/policy.pth", context=counted(plan))
    assert_same(loaded["w"], WEIGHTS)
    assert plan.bytes_read < WEIGHTS.nbytes + (200 << 10)


def test_compressed_members_are_read_once(tmp_path: Path) -> None:
    _tar(tmp_path / "model.tar.gz", mode="w:gz")
    plan = FaultPlan()
    ckptcore.load(f"{place(tmp_path / 'model.tar.gz')}!/policy.pth", context=counted(plan))
    assert plan.bytes_read < 1.05 * (tmp_path / "model.tar.gz").stat().st_size + 4096


def test_a_compressed_file_that_is_no_tar(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "policy.pth.gz").write_bytes(gzip.compress(FILES["policy.pth"]))
    assert_same(ckptcore.load(tmp_path / "policy.pth.gz!/policy.pth")["w"], WEIGHTS)


@pytest.mark.parametrize("location", ["model.zip!", "model.zip!/policy", "model.zip!/a/new"])
def test_saving_is_refused(location: str, tmp_path: Path) -> None:
    _zip(tmp_path / "model.zip")
    before = (tmp_path / "model.zip").read_bytes()
    for overwrite in (False, True):
        with pytest.raises(InvalidLocationError, match=r"model\.zip is an archive, which is only read: save to a dir"):
            ckptcore.save(f"{tmp_path}/{location}", {"n": 1}, overwrite=overwrite)
    with pytest.raises(CheckpointError):
        ckptcore.delete(f"{tmp_path}/{location}")
    assert [path.name for path in tmp_path.iterdir()] == ["model.zip"]
    assert (tmp_path / "model.zip").read_bytes() == before


def test_without_this_distribution_errors_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _zip(tmp_path / "model.zip")
    monkeypatch.setitem(__import__("sys").modules, "ckptcore_formats.archives", None)
    hint = r"pip install 'ckptcore\[formats\]'"
    with pytest.raises(MissingDistributionError, match=rf"a location in the archive .*model\.zip needs .*{hint}"):
        ckptcore.load(tmp_path / "model.zip!/policy.pth")
    with pytest.raises(CheckpointNotFoundError, match=rf"is a zip archive that begins with data: unpack it.*{hint}"):
        ckptcore.load(tmp_path / "model.zip")
    assert distributions.install_hint(layout="pickle") == ""


@pytest.mark.parametrize("write", [_zip, _tar])
@pytest.mark.parametrize("name", ["../policy.pth", "/etc/policy.pth", "a/../../policy.pth", "."])
def test_member_names_outside_of_the_archive_are_refused(
    name: str, write: Callable[[Path, Files], None], tmp_path: Path
) -> None:
    write(tmp_path / "model", {**FILES, name: b"x"})
    assert_same(ckptcore.load(tmp_path / "model!/policy.pth")["w"], WEIGHTS)
    storage = open_archive(LocalStorage(str(tmp_path), StorageOptions()), "model", "model")
    assert list(storage.list()) == [f"model!/{member}" for member in sorted(FILES)]
    assert list(storage.list_names("model!")) == sorted(FILES)
    with pytest.raises(ObjectNotFoundError, match=f"has no member 'new'; '{name}' is outside of it and left out"):
        storage.size("model!/new")
    if name != ".":
        with pytest.raises(CheckpointError):
            storage.size(f"model!/{name}")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name(tmp_path: Path) -> None:
    """Only the duplicate name is rejected. The error for the archive names another member, and that one loads."""
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        for name, content in (*FILES.items(), ("optimizer.pth", FILES["policy.pth"]), ("policy.pth", b"2")):
            archive.writestr(name, content)
    with pytest.raises(InvalidLocationError, match=r"'policy.pth' in .*model\.zip is there twice: name another member"):
        ckptcore.load(tmp_path / "model.zip!/policy.pth")
    assert_same(ckptcore.load(tmp_path / "model.zip!/optimizer.pth")["w"], WEIGHTS)
    _tar(tmp_path / "model.tar", {**FILES, "./policy.pth": b"x"})
    with pytest.raises(InvalidLocationError, match=r"'policy.pth' in .*model\.tar is there twice: name another member"):
        ckptcore.load(tmp_path / "model.tar!/policy.pth")


def test_a_zip_in_several_parts(tmp_path: Path) -> None:
    """`zip -s` writes a marker at the beginning, and the number of the last part into the zip directory."""
    _zip(tmp_path / "whole.zip")
    whole = bytearray(b"PK\x07\x08" + (tmp_path / "whole.zip").read_bytes())
    whole[-18:-14] = b"\1\0\1\0"
    (tmp_path / "model.z01").write_bytes(whole[:100_000])
    (tmp_path / "model.z02").write_bytes(whole[100_000:150_000])  # a middle part can begin with any bytes
    (tmp_path / "model.zip").write_bytes(whole[150_000:])
    for name in ("model.z01", "model.z02", "model.zip"):
        with pytest.raises(CheckpointNotFoundError, match=r"several parts: join the parts, as `zip -s 0"):
            ckptcore.load(tmp_path / name)
        with pytest.raises((InvalidLocationError, CorruptCheckpointError), match=r"several parts.* `zip -s 0"):
            ckptcore.load(tmp_path / f"{name}!/policy.pth")


@pytest.mark.parametrize("suffix", ["001", "partaa"])
def test_an_archive_that_was_split(suffix: str, tmp_path: Path) -> None:
    """`split` and 7-Zip write such parts. The test follows the remedy of the error."""
    _zip(tmp_path / "model.zip")
    whole = (tmp_path / "model.zip").read_bytes()
    (tmp_path / "model.zip").unlink()
    last = suffix[:-1] + {"1": "2", "a": "b"}[suffix[-1]]
    parts = [tmp_path / f"model.zip.{suffix}", tmp_path / f"model.zip.{last}"]
    parts[0].write_bytes(whole[:100_000])
    parts[1].write_bytes(whole[100_000:])
    for part in parts:
        with pytest.raises(
            (CheckpointNotFoundError, CorruptCheckpointError), match="that was split: join the parts in"
        ):
            ckptcore.load(part)
        with pytest.raises(InvalidLocationError, match="that was split: join the parts in"):
            ckptcore.load(f"{part}!/policy.pth")
    (tmp_path / "model.zip").write_bytes(b"".join(part.read_bytes() for part in sorted(parts)))
    assert_same(ckptcore.load(tmp_path / "model.zip!/policy.pth")["w"], WEIGHTS)
    (tmp_path / "model.zip").rename(parts[0])
    assert_same(ckptcore.load(f"{parts[0]}!/policy.pth")["w"], WEIGHTS)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_not_followed(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "model.tar", "w") as archive:
        member = tarfile.TarInfo("policy.pth")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(InvalidLocationError, match=r"'policy.pth' in .*model\.tar is a (symbolic|hard|pipe|device)"):
        ckptcore.load(tmp_path / "model.tar!/policy.pth")


def test_an_encrypted_member(tmp_path: Path) -> None:
    _zip(tmp_path / "model.zip")
    content = bytearray((tmp_path / "model.zip").read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "model.zip").write_bytes(content)
    assert_same(ckptcore.load(tmp_path / "model.zip!/policy.pth")["w"], WEIGHTS)
    with pytest.raises(InvalidLocationError, match=r"'_version' in .*model\.zip is encrypted: name another member"):
        ckptcore.load(tmp_path / "model.zip!/_version")


def test_a_member_of_another_compression(tmp_path: Path) -> None:
    _zip(tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip", "a", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("log", b"1" * 100_000)
    assert_same(ckptcore.load(tmp_path / "model.zip!/policy.pth")["w"], WEIGHTS)
    with pytest.raises(InvalidLocationError, match=r"'log' in .*model\.zip is of compression 12: .* unpack"):
        ckptcore.load(tmp_path / "model.zip!/log")


def test_highly_compressed_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "model.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large", np.random.default_rng(0).bytes(3 << 20))
        archive.getinfo("large").file_size = 2_000_000_000  # written into the directory when the archive is closed
    with pytest.raises(InvalidLocationError, match=r"'large' in .* is compressed from 2000000000 to \d+ bytes, too mu"):
        ckptcore.load(tmp_path / "model.zip!/large")
    monkeypatch.setattr("ckptcore_formats.compressed_files.most_content_bytes", lambda size: 1 << 16)
    _tar(tmp_path / "model.tar.gz", {"zeros": bytes(1 << 20)}, "w:gz")
    with pytest.raises(CheckpointError, match="too much for a temporary copy: decompress it, and load the result"):
        ckptcore.load(tmp_path / "model.tar.gz!/zeros")


def test_damage(tmp_path: Path) -> None:
    _zip(tmp_path / "model.zip", compression=zipfile.ZIP_DEFLATED)
    content = bytearray((tmp_path / "model.zip").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "model.zip").write_bytes(content)
    with pytest.raises((ChecksumError, CorruptCheckpointError), match=r"model\.zip.*restore"):
        ckptcore.load(tmp_path / "model.zip!/policy.pth")
    _tar(tmp_path / "model.tar")
    whole = (tmp_path / "model.tar").read_bytes()
    for stop in (600, 1700, 100_000):
        (tmp_path / "model.tar").write_bytes(whole[:stop])
        with pytest.raises(CheckpointError, match=r"cut off|has _?|does not exist"):
            ckptcore.load(tmp_path / "model.tar!/policy.pth")
    negative = bytearray(whole)
    negative[124:136] = b"\xff" * 12
    (tmp_path / "model.tar").write_bytes(negative)
    with pytest.raises(CheckpointError):
        ckptcore.load(tmp_path / "model.tar!/policy.pth")
    (tmp_path / "model.tar").write_bytes(b"text")
    with pytest.raises(InvalidLocationError, match="is not a zip or tar archive"):
        ckptcore.load(tmp_path / "model.tar!/policy.pth")


def test_a_directory_with_an_exclamation_mark_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"a file beside it")
    (tmp_path / "run!").mkdir()
    ckptcore.save(tmp_path / "run!" / "1", {"w": np.ones(2)})
    assert ckptcore.load(tmp_path / "run!" / "1")["w"].tolist() == [1, 1]
