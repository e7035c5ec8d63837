"""Objects that write files. A load restores every file exactly or reports the problem."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.builtin.files import empty_directories, state_of_files
from ckptcore.commit.root import NO_LEAVES
from ckptcore.commit.root_json import encode_root
from ckptcore.context import default_context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    NameCollisionError,
    PluginError,
    UnsupportedLeafError,
)
from ckptcore.loading.load import Load
from ckptcore.model import BLOCK_BYTES, ObjectRecord, Receipt, WritePlan
from ckptcore.opening.open_checkpoints import open_checkpoint
from ckptcore.saving.requests import CommitInfo, SavePart
from ckptcore.saving.writing import finish_part, recorder_of
from tests.composites.objects import Files, Linear
from tests.io.watched_storage import memory_storage

LARGE = (16 << 20) + 12345


def test_files_of_every_size_and_name_are_restored(place: str) -> None:
    content = random.Random(0).randbytes(LARGE)
    files = {
        "empty": b"", "one": b"1", "a/b/c/d": b"deep", "a/b/empty": b"", "large": content, "block": bytes(BLOCK_BYTES),
        "with space/ä語": b"x", ".hidden": b"h", "a.b": b"", "sub/checkpoint.json": b"{}",
        "model.safetensors": b"no such",
    }  # fmt: skip
    ckptcore.save_checkpointables(place + "/c", {"files": Files(files)})
    target = Files()
    ckptcore.load_checkpointables(place + "/c", into={"files": target})
    assert target.files == files
    assert ckptcore.load_checkpointables(place + "/c")["files"] == files
    assert set(ckptcore.metadata(place + "/c/files").objects) == set(files)
    assert ckptcore.metadata(place + "/c").nbytes == sum(map(len, files.values()))
    assert ckptcore.verify(place + "/c").ok


def test_an_object_can_write_no_files(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {"files": Files()})
    target = Files({"a": b""})
    ckptcore.load_checkpointables(place + "/c", into={"files": target})
    assert target.files == {}


def test_a_load_of_files_fills_the_report(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {"files": Files({"a": b"12345", "b": b""})})
    report = ckptcore.results.LoadReport()
    assert ckptcore.load(place + "/c/files", report=report) == {"a": b"12345", "b": b""}
    assert report == ckptcore.results.LoadReport(bytes_read=5, restored=[], defaulted=[], skipped=[], ignored=[])


class Directories:
    """An object that writes empty directories."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys
        self.found: list[str] = []

    def save(self, directory: Path) -> None:
        """Create the directories, and a file in another directory."""
        (directory / "full").mkdir()
        (directory / "full" / "file").write_bytes(b"x")
        for key in self.keys:
            (directory / key).mkdir(parents=True)

    def load(self, directory: Path) -> None:
        """List the directories."""
        self.found = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_dir())


def test_empty_directories_are_restored(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {"it": Directories("shards", "a/b/ä", "full/none", "a/.hidden", "x.y")})
    target = Directories()
    ckptcore.load_checkpointables(place + "/c", into={"it": target})
    assert target.found == ["a", "a/.hidden", "a/b", "a/b/ä", "full", "full/none", "shards", "x.y"]
    assert ckptcore.load_checkpointables(place + "/c")["it"] == {"full/file": b"x"}
    assert ckptcore.verify(place + "/c").ok


@pytest.mark.parametrize("key", ["checkpoint.dir", "/".join("d" * 201)])
def test_invalid_empty_directories_are_refused(key: str, place: str) -> None:
    with pytest.raises(CheckpointError, match=r"in 'it'.*(checkpoint\.dir|201 directories deep)"):
        ckptcore.save_checkpointables(place + "/c", {"it": Directories(key)})


def test_a_state_of_files_lists_only_empty_directories() -> None:
    assert empty_directories(state_of_files(())) == ()
    assert list(empty_directories(state_of_files(["a/b", "c"]))) == ["a/b", "c"]
    assert list(empty_directories({"of a later version": 1})) == []


@pytest.mark.parametrize(
    "state",
    [3, "text", ["a"], {"empty_directories": "a"}, {"empty_directories": [1]}, {"empty_directories": {"a": 1}}]
    + [
        {"empty_directories": [key]}
        for key in ("", "/a", "../a", "a/..", "a//b", "a/", ".", "a\0", "/".join("d" * 201))
    ]
    + [{"empty_directories": [f"{number}" + "/d" * 199 for number in range(700)]}],
)
def test_a_hostile_state_of_files_is_refused(state: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        empty_directories(state)


@pytest.mark.parametrize("key", ["full/file", "full/file/below", "../../escaped"])
def test_hostile_empty_directories_of_a_checkpoint_are_refused(key: str, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"it": Directories()})
    root = open_checkpoint(tmp_path / "c" / "it", default_context()).root
    assert root is not None
    data, _ = encode_root(dataclasses.replace(root, state={"empty_directories": [key]}))
    (tmp_path / "c" / "it" / "checkpoint.json").write_bytes(data)
    target = Directories()
    target.found = ["as it was"]
    with pytest.raises(CorruptCheckpointError):
        ckptcore.load_checkpointables(tmp_path / "c", into={"it": target})
    assert target.found == ["as it was"]
    assert not list(tmp_path.parent.rglob("escaped"))
    (problem,) = ckptcore.verify(tmp_path / "c").problems
    assert problem.key == "it/checkpoint.json" and "directory" in problem.message


def test_an_object_that_writes_a_file_in_two_processes_fails_the_save() -> None:
    part = SavePart("it", ckptcore.SafetensorsLayout(), WritePlan(NO_LEAVES, (), 0, 2, "", "it"), is_files=True)
    part.receipts = [Receipt(rank, (), None, (ObjectRecord("a.txt", rank, b""),)) for rank in range(2)]
    recorder = recorder_of(memory_storage(), default_context())
    with pytest.raises(PluginError, match=r"^the object wrote a\.txt twice, perhaps from several processes"):
        finish_part(CommitInfo("0123456789abcdef", ""), part, recorder)


def _link(directory: Path) -> None:
    (directory / "link").symlink_to("/etc/passwd")


def _linked_directory(directory: Path) -> None:
    (directory / "sub").mkdir(exist_ok=True)
    (directory / "sub" / "link").symlink_to("/etc")


def _pipe(directory: Path) -> None:
    os.mkfifo(directory / "pipe")


@pytest.mark.parametrize("make", [_link, _linked_directory, _pipe])
def test_special_files_are_refused(make: object, place: str) -> None:
    odd = Files({"fine": b""})
    odd.then = make  # type: ignore[assignment]  # one of the functions above
    with pytest.raises(UnsupportedLeafError, match=r"in 'odd'.*(link|pipe)"):
        ckptcore.save_checkpointables(place + "/c", {"model": Linear(1), "odd": odd})
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load_checkpointables(place + "/c")


@pytest.mark.parametrize("key", ["checkpoint.json", "checkpoint.x", "checkpoint.dir/x"])
def test_reserved_file_names_are_refused(key: str, place: str) -> None:
    with pytest.raises(NameCollisionError, match=f"in 'files'.*{key}"):
        ckptcore.save_checkpointables(place + "/c", {"files": Files({key: b"x"})})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every directory")
def test_an_unreadable_directory_is_an_error(place: str) -> None:
    odd = Files({"sub/fine": b""})
    odd.then = lambda directory: (directory / "sub").chmod(0)
    with pytest.raises(PermissionError):
        ckptcore.save_checkpointables(place + "/c", {"odd": odd})


@pytest.mark.parametrize("position", [0, BLOCK_BYTES, LARGE - 1])
def test_a_flipped_bit_is_detected(position: int, tmp_path: Path) -> None:
    files = {"sub/large": random.Random(0).randbytes(LARGE), "other": b"fine"}
    ckptcore.save_checkpointables(tmp_path / "c", {"model": Linear(3), "files": Files(files)})
    path = tmp_path / "c" / "files" / "sub" / "large"
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)
    target, model = Files({"as it": b"was"}), Linear(0)
    with pytest.raises(ChecksumError, match="sub/large"):
        ckptcore.load_checkpointables(tmp_path / "c", into={"files": target})
    with pytest.raises(ChecksumError, match="sub/large"):
        ckptcore.load_checkpointables(tmp_path / "c")
    assert target.files == {"as it": b"was"}
    with pytest.raises(CheckpointError):
        ckptcore.copy(tmp_path / "c", tmp_path / "d", layout="safetensors")
    assert not (tmp_path / "d").exists()
    (problem,) = ckptcore.verify(tmp_path / "c").problems
    assert problem.key == "files/sub/large" and problem.start == position // BLOCK_BYTES * BLOCK_BYTES
    ckptcore.load_checkpointables(tmp_path / "c", into={"model": model})
    assert model.bias.tolist() == Linear(3).bias.tolist()


@pytest.mark.parametrize("change", ["cut", "longer", "gone"])
def test_a_changed_file_is_detected(change: str, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"files": Files({"a": b"0123456789", "b": b""})})
    path = tmp_path / "c" / "files" / "a"
    match change:
        case "cut":
            path.write_bytes(b"01234")
        case "longer":
            path.write_bytes(b"0123456789" * 3)
        case _:
            path.unlink()
    report = ckptcore.verify(tmp_path / "c")
    assert [problem.key for problem in report.problems] == ["files/a"]
    if change != "longer":
        target = Files({"as it": b"was"})
        with pytest.raises(CheckpointError, match="a"):
            ckptcore.load_checkpointables(tmp_path / "c", into={"files": target})
        assert target.files == {"as it": b"was"}
    with pytest.raises(CheckpointError):
        ckptcore.copy(tmp_path / "c", tmp_path / "d", layout="safetensors")


def test_a_load_of_a_tree_replaced_by_files_returns_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptcore.save_checkpointables(tmp_path / "a", {"m": {"w": np.ones(3)}})
    ckptcore.save_checkpointables(tmp_path / "b", {"m": Files({"f": b"1"})})
    read = Load.read

    def replace_first(load: Any, *arguments: Any) -> Any:
        if (tmp_path / "b").exists():
            shutil.rmtree(tmp_path / "a")
            (tmp_path / "b").rename(tmp_path / "a")
        return read(load, *arguments)

    monkeypatch.setattr(Load, "read", replace_first)
    assert ckptcore.load(tmp_path / "a" / "m") == {"f": b"1"}
