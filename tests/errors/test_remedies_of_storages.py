"""Remedies in errors of storages and of the system. Each test follows the text of a remedy."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value
from safetensors.numpy import save_file

import ckptcore
from ckptcore import Checkpointer
from ckptcore.errors import (
    InvalidLocationError,
    MissingDistributionError,
    SaveLostError,
    StorageError,
    StorageFullError,
)
from tests.errors.refusals import ONE, TWO


@pytest.mark.skipif(sys.platform != "linux", reason="the path of a descriptor is in /proc")
@pytest.mark.parametrize("follow", ["free", "delete", "elsewhere"])
def test_a_full_file_system(follow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One directory has space for 10,000 bytes. The remedies are more space, a deletion, and another directory."""
    rooms = {tmp_path / "small": 10_000, tmp_path / "large": 1 << 30}

    def write(real: Any, descriptor: int, data: Any, *offset: int) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        for directory, room in rooms.items():
            used = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file() and file != path)
            if path.is_relative_to(directory) and used + len(data) + sum(offset) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(real(descriptor, data, *offset))

    for name in ("write", "pwrite"):
        monkeypatch.setattr(os, name, partial(write, getattr(os, name)))
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    first, second = {"w": ONE.repeat(100)}, {"w": TWO.repeat(300)}
    ckptcore.save(tmp_path / "small" / "a", first)
    refused(
        lambda: ckptcore.save(tmp_path / "small" / "c", second),
        "Free some space, delete old checkpoints or save elsewhere. Committed checkpoints are intact",
        error=StorageFullError,
    )
    assert same_value(ckptcore.load(tmp_path / "small" / "a"), first)
    location = tmp_path / "small" / "c"
    match follow:
        case "free":
            rooms[tmp_path / "small"] *= 2
        case "delete":
            ckptcore.delete(tmp_path / "small" / "a")
        case _:
            location = tmp_path / "large" / "c"
    ckptcore.save(location, second)
    assert same_value(ckptcore.load(location), second)


def test_a_working_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    advice = "Pass an absolute path, or change to another directory"
    refused(lambda: ckptcore.save("c", {"w": ONE}), advice, error=InvalidLocationError)
    ckptcore.save(tmp_path / "c", {"w": ONE})
    os.chdir(tmp_path)
    assert same_value(ckptcore.load("c"), {"w": ONE})


def test_a_link_that_leads_out(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    save_file({"w": ONE}, tmp_path / "weights.safetensors")
    (tmp_path / "c" / "model.safetensors").symlink_to(tmp_path / "weights.safetensors")
    advice = "Copy the file into the checkpoint, or pass the target of the link as the location"
    refused(lambda: ckptcore.load(tmp_path / "c"), "c/model.safetensors leads out", advice, error=InvalidLocationError)
    assert same_value(ckptcore.load(tmp_path / "weights.safetensors"), {"w": ONE})
    content = (tmp_path / "weights.safetensors").read_bytes()
    (tmp_path / "c" / "model.safetensors").unlink()
    (tmp_path / "c" / "model.safetensors").write_bytes(content)
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    advice = "it or a parent exists and is not a directory. Move that away, or use another location"
    refused(lambda: ckptcore.save(tmp_path / "run" / "1", {"w": ONE}), advice, error=StorageError)
    ckptcore.save(tmp_path / "other" / "1", {"w": ONE})
    (tmp_path / "run").rename(tmp_path / "notes")
    ckptcore.save(tmp_path / "run" / "1", {"w": ONE})
    for run in ("run", "other"):
        assert same_value(ckptcore.load(tmp_path / run / "1"), {"w": ONE})
    assert (tmp_path / "notes").read_text() == "mine"


class Tokens:
    """An object that writes its own files."""

    def save(self, directory: Path) -> None:
        """Write a file."""
        (directory / "text").write_text("abc")

    def load(self, directory: Path) -> None:
        """Read nothing."""


def test_a_temporary_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))

    def save() -> None:
        ckptcore.save_checkpointables(tmp_path / "c", {"tokens": Tokens()})

    refused(save, "set TMPDIR to a directory of a local disk that can be written to and locked", error=StorageError)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # as in a new process
    save()
    assert ckptcore.load(tmp_path / "c" / "tokens") == {"text": b"abc"}
    assert not list((tmp_path / "temporary").iterdir())


def test_a_progress_bar_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for name in ("rich", "rich.progress", "tqdm", "tqdm.auto"):
            patch.setitem(sys.modules, name, None)
        refused(
            lambda: ckptcore.save(tmp_path / "c", {"w": ONE}, progress=True),
            "`pip install rich`, or pass a function of bytes done and total bytes",
            error=MissingDistributionError,
        )
        shown: list[tuple[int, int]] = []
        ckptcore.save(tmp_path / "c", {"w": ONE}, progress=lambda done, total: shown.append((done, total)))
        assert shown[-1][0] == shown[-1][1] > 0
    ckptcore.save(tmp_path / "d", {"w": ONE}, progress=True)
    for name in ("c", "d"):
        assert same_value(ckptcore.load(tmp_path / name), {"w": ONE})


def test_an_owner_whose_record_was_removed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_blocking(1, {"w": ONE})
        (tmp_path / "run" / ".ckptcore" / "owner" / "owner.json").unlink()
        refused(
            lambda: checkpointer.save_blocking(2, {"w": TWO}),
            "Do not change .ckptcore/ by hand. Open the directory again when no other process writes there",
            error=SaveLostError,
        )
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_blocking(2, {"w": TWO})
        assert same_value(checkpointer.load(), {"w": TWO})
