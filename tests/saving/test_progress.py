"""Progress of saves: bytes of arrays, equal for every layout, complete once the save is committed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks

import ckptcore
from ckptcore.builtin.local import LocalStorage
from ckptcore.context import MemoryOptions
from ckptcore.errors import StorageError
from tests.composites.objects import Files
from tests.io.test_progress import Reports

LAYOUTS = ["safetensors", "dcp", "ocdbt", "zarr", "zarr3"]

SHARED = np.arange(30_000, dtype=np.int64)
STATE = {
    "zeros": np.zeros((1000, 300), np.float32),  # compresses well
    "noise": np.random.default_rng(0).integers(0, 255, 300_000, np.uint8),
    "tied": [SHARED, SHARED],
    "transposed": np.arange(60_000.0).reshape(200, 300).T,
    "empty": np.zeros((0, 3)),
    "number": np.array(3.0),
    "step": 3,
}
NBYTES = 1_200_000 + 300_000 + 240_000 + 480_000 + 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_ends_at_the_bytes_of_the_arrays(layout: str, tmp_path: Path) -> None:
    reports = Reports()
    ckptcore.save(tmp_path / "c", STATE, layout=layout, progress=reports)
    reports.end_at(NBYTES)
    assert any(0 < done < NBYTES - 1 for done, _ in reports)  # not only at the end
    handle = ckptcore.save_async(tmp_path / "d", STATE, layout=layout)
    handle.result()
    assert handle.progress == (NBYTES, NBYTES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_in_bounded_memory_counts_the_same_bytes(layout: str, tmp_path: Path) -> None:
    context = ckptcore.Context(memory=MemoryOptions(save_bytes=500_000))
    handle = ckptcore.save_async(tmp_path / "c", STATE, layout=layout, context=context)
    handle.result()
    assert handle.progress == (NBYTES, NBYTES)


def test_a_large_array_is_counted_in_steps_while_it_is_written(tmp_path: Path) -> None:
    reports = Reports()
    ckptcore.save(tmp_path / "c", {"w": np.zeros(16 << 20, np.uint8)}, progress=reports)
    reports.end_at(16 << 20)
    assert len(reports) >= 16


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"empty": np.zeros(0)}])
def test_a_save_without_bytes(state: Any, tmp_path: Path) -> None:
    reports = Reports()
    ckptcore.save(tmp_path / "c", state, progress=reports)
    assert reports == [(0, 0)]
    handle = ckptcore.save_async(tmp_path / "d", state)
    handle.result()
    assert handle.progress == (0, 0)


def test_files_of_objects_are_not_counted(tmp_path: Path) -> None:
    reports = Reports()
    ckptcore.save_checkpointables(tmp_path / "c", {"files": Files({"a": bytes(50_000)})}, progress=reports)
    assert reports == [(0, 0)]
    reports.clear()
    objects = {"files": Files({"a": bytes(50_000)}), "a": STATE, "b": {"w": np.zeros(5)}}
    ckptcore.save_checkpointables(tmp_path / "d", objects, progress=reports)
    reports.end_at(NBYTES + 40)


def test_an_update_counts_only_what_it_stores(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "base", STATE)
    reports = Reports()
    update = ckptcore.Update(base=tmp_path / "base")
    ckptcore.save(tmp_path / "c", {"number": np.array(4.0)}, strategy=update, progress=reports)
    reports.end_at(8)
    reports.clear()
    ckptcore.save(tmp_path / "d", {"step": 4}, strategy=update, progress=reports)
    assert reports == [(0, 0)]


def test_exports_are_counted(tmp_path: Path) -> None:
    reports = Reports()
    strategy = ckptcore.WithExports([ckptcore.Export(location=tmp_path / "e", subtree="zeros", layout="zarr3")])
    ckptcore.save(tmp_path / "c", STATE, strategy=strategy, progress=reports)
    reports.end_at(NBYTES + 1_200_000)


def test_each_process_of_a_job_counts_its_own_bytes(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> None:
        part = ckptcore.ShardedArray.part(np.ones((4, 6)), (4 * rank, 0), (12, 6))
        reports = Reports()
        ckptcore.save(tmp_path / "c", {"w": part}, context=context, progress=reports)
        reports.end_at(4 * 6 * 8)

    run_ranks(3, job, timeout_seconds=60)


def test_100_percent_is_not_reported_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails releases all its arrays, and this must not count as progress."""
    reports = Reports()

    def fail(self: LocalStorage, *arguments: Any) -> None:
        raise StorageError("the disk does not answer")

    monkeypatch.setattr(LocalStorage, "rename", fail)
    with pytest.raises(StorageError):
        ckptcore.save(tmp_path / "c", STATE, progress=reports)
    handle = ckptcore.save_async(tmp_path / "c", STATE)
    assert isinstance(handle.exception(), StorageError)
    assert reports[0] == (0, NBYTES)
    assert max(done for done, _ in reports) < NBYTES
    assert handle.progress.done < handle.progress.total == NBYTES


def test_save_written_and_not_committed_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on, rename = threading.Event(), threading.Event(), LocalStorage.rename

    def wait(self: LocalStorage, source: str, destination: str) -> None:
        reached.set()
        assert go_on.wait(60)
        rename(self, source, destination)

    monkeypatch.setattr(LocalStorage, "rename", wait)
    handle = ckptcore.save_async(tmp_path / "c", STATE)
    assert reached.wait(60)
    assert handle.progress == (NBYTES - 1, NBYTES)
    go_on.set()
    handle.result()
    assert handle.progress == (NBYTES, NBYTES)


def test_an_error_of_the_progress_function_stops_the_save(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        ckptcore.save(tmp_path / "c", STATE, progress=stop)
    assert list(tmp_path.iterdir()) == []
