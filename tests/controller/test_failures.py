"""Workers that fail or are killed: the error names them, no partial checkpoint remains, and the next save works."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ckptcore_jax.worker_saves import HeldElements
from ckptcore_jax.worker_stages import WriteStage
from ckptcore_testing import ThreadJob

import ckptcore
from ckptcore.errors import (
    CorruptCheckpointError,
    InvalidLocationError,
    NameCollisionError,
    NotSharedError,
    RankFailedError,
    UnsupportedLeafError,
)
from ckptcore.model import Pending
from ckptcore.runtime import runtime_of
from tests.controller.arrays import ROWS, SPEC, WHOLE, digests_of, make_rows
from tests.controller.conftest import controlling
from tests.controller.failing_layouts import EndingLayout, OneNameLayout, RaisingLayout, SlowRaisingLayout
from tests.controller.remote_arrays import RemoteArray
from tests.controller.worker_processes import WorkerProcesses


def assert_next_save_works(directory: Path, workers: WorkerProcesses, context: ckptcore.Context) -> None:
    """Save and load at the location of the failed save."""
    rows = make_rows(workers)
    ckptcore.save(directory / "it", {"rows": rows}, context=context)
    loaded = ckptcore.load(directory / "it", {"rows": rows}, context=context)
    assert workers.digests(loaded["rows"]) == digests_of(ROWS)


@pytest.mark.parametrize("layout", [RaisingLayout(failing=1), RaisingLayout(failing=2), SlowRaisingLayout(failing=2)])
def test_an_error_of_a_worker_fails_the_save(
    layout: RaisingLayout, workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    failing = f"worker-{layout.failing - 1}"
    with pytest.raises(RankFailedError, match=f"{failing} failed: ValueError: this rank is unwell"):
        ckptcore.save(tmp_path / "it", {"rows": make_rows(workers)}, layout=layout, context=context)
    assert list(tmp_path.iterdir()) == []
    handle = ckptcore.save_async(tmp_path / "it", {"rows": make_rows(workers)}, layout=layout, context=context)
    with pytest.raises(RankFailedError, match=failing):
        handle.result()
    assert list(tmp_path.iterdir()) == []
    assert_next_save_works(tmp_path, workers, context)


def test_a_controller_that_fails_waits_for_its_workers(
    workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="this rank is unwell"):
        ckptcore.save(
            tmp_path / "it", {"rows": make_rows(workers)}, layout=SlowRaisingLayout(failing=0), context=context
        )
    assert list(tmp_path.iterdir()) == []
    assert_next_save_works(tmp_path, workers, context)


def test_workers_that_write_one_name_are_refused(
    workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    """A worker must not replace the object of another worker, for example if a file system ignores case."""
    with pytest.raises(NameCollisionError, match="wrote notes twice"):
        ckptcore.save(tmp_path / "it", {"rows": make_rows(workers)}, layout=OneNameLayout(), context=context)
    assert list(tmp_path.iterdir()) == []
    assert_next_save_works(tmp_path, workers, context)


class _Awaited:
    """A pending report that records when its result is awaited."""

    def __init__(self, report: Pending[bytes], awaited: list[int], worker: int) -> None:
        self._report, self._awaited, self._worker = report, awaited, worker

    def result(self) -> bytes:
        self._awaited.append(self._worker)
        return self._report.result()


def test_workers_finish_if_another_cannot_start(
    workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first worker would write to files that are being removed."""
    run_write = WorkerProcesses.run_write
    awaited: list[int] = []

    def refused(self: WorkerProcesses, worker: int, stage: WriteStage, held: HeldElements) -> Pending[bytes]:
        if worker == 1:
            raise RankFailedError("the worker worker-1 is gone")
        return _Awaited(run_write(self, worker, stage, held), awaited, worker)

    rows = make_rows(workers)
    with monkeypatch.context() as patched:
        patched.setattr(WorkerProcesses, "run_write", refused)
        with pytest.raises(RankFailedError, match="worker-1 is gone"):
            ckptcore.save(tmp_path / "it", {"rows": rows}, context=context)
    assert awaited == [0] and list(tmp_path.iterdir()) == []
    assert_next_save_works(tmp_path, workers, context)


def test_the_error_names_a_failed_worker(tmp_path: Path) -> None:
    with WorkerProcesses(2) as workers:
        context = controlling(workers)
        rows = make_rows(workers)
        ckptcore.save(tmp_path / "before", {"rows": rows}, context=context)
        with pytest.raises(RankFailedError, match="worker-1 is gone"):
            ckptcore.save(tmp_path / "it", {"rows": rows}, layout=EndingLayout(failing=2), context=context)
        assert [path.name for path in tmp_path.iterdir()] == ["before"]
        with pytest.raises(RankFailedError, match="worker-1 is gone"):
            ckptcore.save_async(tmp_path / "it", {"rows": rows}, context=context)
        with pytest.raises(RankFailedError, match="worker-1 is gone"):
            ckptcore.load(tmp_path / "before", {"rows": rows}, context=context)
        assert [path.name for path in tmp_path.iterdir()] == ["before"]


def test_damage_found_by_workers_is_raised(workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "it", {"rows": make_rows(workers)}, context=context)
    damaged = sorted((tmp_path / "it").glob("*.safetensors"))[1]
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"rows") as caught:
        ckptcore.load(tmp_path / "it", {"rows": RemoteArray(SPEC, ROWS)}, context=context)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__notes__ == ["This was raised on the worker worker-1"]


@pytest.mark.slow  # a worker waits ten seconds for the claim of its controller
def test_a_storage_in_process_memory_is_refused(
    workers: WorkerProcesses, context: ckptcore.Context, request: pytest.FixtureRequest
) -> None:
    """Each worker has its own memory, so the controller cannot commit objects of workers."""
    location = f"memory://{request.node.name}/it"
    with pytest.raises(NotSharedError):
        ckptcore.save(location, {"rows": make_rows(workers)}, context=context)
    with pytest.raises(ckptcore.CheckpointError):
        ckptcore.load(location)


def test_the_error_names_leaves_without_elements(context: ckptcore.Context, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="rows: this RemoteArray has no elements"):
        ckptcore.save(tmp_path / "other", {"rows": RemoteArray(SPEC, WHOLE)}, context=context)


def test_a_session_and_a_file_are_refused(workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path) -> None:
    rows = make_rows(workers)
    asked = len(workers.crossings)
    with pytest.raises(UnsupportedLeafError, match=r"workers .* cannot be saved in sessions; save them with"):
        ckptcore.partial(tmp_path / "it", context=context).save({"rows": rows})
    for save in (ckptcore.save, ckptcore.save_async):
        with pytest.raises(InvalidLocationError, match="several processes hold the arrays"):
            save(tmp_path / "it.safetensors", {"rows": rows}, context=context)
    assert list(tmp_path.iterdir()) == [] and workers.crossings[asked:] == []  # refused before workers copy elements
    ckptcore.save(tmp_path / "here.safetensors", {"w": np.ones(3)}, context=context)


def test_an_executor_in_a_job_is_refused(workers: WorkerProcesses, tmp_path: Path) -> None:
    context = ckptcore.Context(
        job=ckptcore.context.JobOptions(executor=workers, coordinator=ThreadJob(2).coordinator(0))
    )
    with pytest.raises(ValueError, match="one of 2"):
        runtime_of(context).workers()
