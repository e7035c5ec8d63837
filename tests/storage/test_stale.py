"""Stale handles of a network file system. They are no sign of damage, so readers do not fall back to an older step."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import ckptcore
from ckptcore.builtin.local_files import LocalFile
from ckptcore.errors import CheckpointNotFoundError, StorageError
from tests.storage.mounts import Mounts, mounts

__all__ = ["mounts"]

_FAST: Final = ckptcore.Context(durability="none")


def _save_steps(directory: Path) -> None:
    with ckptcore.Checkpointer(directory, context=_FAST) as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(100_000, step)})


@pytest.mark.lives(
    "NFS, stale handles",
    "FUSE by fusepy that answers ESTALE",
    "no reader takes an older step, and `verify` reports no damage; the next load works",
    "a load that meets it fails",
)
@pytest.mark.system
@pytest.mark.parametrize("stale", ["/run/2", "/2/", "/2/model", "/2/checkpoint.json"])
def test_no_reader_takes_an_older_step(stale: str, mounts: Mounts, tmp_path: Path) -> None:
    run = mounts.odd("none") / "run"
    _save_steps(run)
    reader = ckptcore.CheckpointReader(run, context=_FAST)
    (tmp_path / "source.stale").write_text(stale)
    for known in (True, False):
        with pytest.raises(StorageError, match="says nothing about the file: try again") as caught:
            (reader if known else ckptcore.CheckpointReader(run, context=_FAST)).load()
        assert not isinstance(caught.value, CheckpointNotFoundError) and caught.value.errno == errno.ESTALE
    with pytest.raises(StorageError, match="Stale"):
        ckptcore.verify(run / "2", context=_FAST)
    with pytest.raises(StorageError, match="Stale"), ckptcore.Checkpointer(run, context=_FAST) as owner:
        owner.load()
    (tmp_path / "source.stale").unlink()
    assert reader.load()["w"][0] == 2 and ckptcore.verify(run / "2", context=_FAST).ok


def test_a_file_is_opened_again_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save_steps(tmp_path / "run")
    failed: list[int] = []
    preadv = os.preadv

    def stale_once(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if not flags and not failed:
            failed.append(descriptor)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", stale_once)
    assert ckptcore.CheckpointReader(tmp_path / "run", context=_FAST).load()["w"][0] == 2
    assert failed


def test_a_file_that_was_replaced_is_not_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"old")
    file = LocalFile("a", str(tmp_path / "a"), str(tmp_path))
    (tmp_path / "b").write_bytes(b"new")
    (tmp_path / "b").replace(tmp_path / "a")

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "preadv", stale)
    with pytest.raises(StorageError, match="Stale"):
        file.get_into([(0, memoryview(bytearray(3)))])
