"""Saves sync each directory once in each process that wrote names into it. See `StorageBackend.defer_names`."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks

import ckptcore
from ckptcore.builtin import local_calls, local_directories
from ckptcore.builtin.local import LocalStorage
from ckptcore.builtin.local_directories import LocalDirectories
from tests.saving.test_slices import Rows

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name open files")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[LocalDirectories]:
    """The directories of all local storages that a test opens."""
    opened: list[LocalDirectories] = []
    create = LocalStorage.__init__

    def record(self: LocalStorage, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        opened.append(self._directories)

    monkeypatch.setattr(LocalStorage, "__init__", record)
    return opened


@pytest.mark.parametrize("durability", ["full", "none"])
def test_no_deferral_is_left(durability: Any, opened: list[LocalDirectories], tmp_path: Path) -> None:
    context = ckptcore.Context(durability=durability)
    for step in range(3):
        ckptcore.save(tmp_path / f"{step}", {"a": np.ones(3)}, context=context)
    with pytest.raises(ckptcore.errors.CheckpointError):
        ckptcore.save(tmp_path / "failed", {"a": np.ones(3), "b": object()}, context=context)
    assert opened and [directories._deferred for directories in opened] == [[] for _ in opened]


def test_each_rank_syncs_the_directory_once(
    opened: list[LocalDirectories], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int | None, str]] = []
    of_thread = threading.local()
    sync = local_calls.sync_directory

    def record(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".ckptcore"):
            synced.append((getattr(of_thread, "rank", None), path))
        sync(descriptor)

    monkeypatch.setattr(local_directories, "sync_directory", record)

    def job(rank: int, context: ckptcore.Context) -> None:
        of_thread.rank = rank
        ckptcore.save(
            tmp_path / "c",
            {name: np.arange(64.0).reshape(16, 4) for name in "abcdef"},
            context=context,
            layout=ckptcore.SafetensorsLayout(max_file_bytes=64),
        )

    run_ranks(3, job, timeout_seconds=60, plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: Rows()}))
    assert sorted(rank for rank, _ in synced if rank is not None) == [0, 1, 2]
    assert len(synced) == 3, synced
    assert [directories._deferred for directories in opened] == [[] for _ in opened]
