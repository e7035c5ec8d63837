"""Temporary directories for files of objects: removal, owners and failures."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

import ckptcore
from ckptcore.builtin.staging import StagingDirectory
from ckptcore.errors import StorageError
from tests.composites.objects import Files, staged


def _left_behind() -> Path:
    """Create the staging directory of a killed process, which no process locks."""
    with closing(StagingDirectory()) as directory:
        prefix = directory.path.name.rpartition("-")[0]
    left = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=directory.path.parent))
    (left / "file").write_text("x")
    return left


def test_unlocked_staged_files_are_removed_by_the_next_process() -> None:
    left = _left_behind()
    held = StagingDirectory()
    assert not left.exists()
    StagingDirectory().close()
    assert held.path.exists()
    held.close()


def test_staged_files_of_another_machine_are_not_removed() -> None:
    """A process of that machine may use it. On some network file systems, locks exist on one machine only."""
    path = Path(tempfile.mkdtemp(prefix="ckptcore-staging-0123456789abcdef-"))
    (path / "file").write_text("x")
    StagingDirectory().close()
    assert (path / "file").read_text() == "x"
    (path / "file").unlink()
    path.rmdir()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOLCK])
def test_a_failed_lock_is_an_error_unless_locks_are_unsupported(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if "ckptcore-staging" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    if number == errno.ENOLCK:
        ckptcore.save_checkpointables(tmp_path / "c", {"files": Files({"a": b""})})
    else:
        with pytest.raises(StorageError, match="Input/output error.*TMPDIR") as caught:
            ckptcore.save_checkpointables(tmp_path / "c", {"files": Files({"a": b""})})
        assert caught.value.errno == number
        assert list(tmp_path.iterdir()) == []
    assert not staged()


def test_a_missing_temporary_directory_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
        with pytest.raises(StorageError, match="not there.*TMPDIR"):
            ckptcore.save_checkpointables(tmp_path / "c", {"files": Files({"a": b""})})
