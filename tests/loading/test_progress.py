"""Progress of loads: bytes of arrays that this process has loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions, MemoryOptions
from ckptcore.errors import CorruptCheckpointError
from ckptcore.protocols import Coordinator
from tests.composites.objects import Files, Linear
from tests.io.test_progress import Reports
from tests.saving.test_progress import LAYOUTS, NBYTES, STATE

ONLY = ckptcore.Matching(unexpected="ignore")


@pytest.mark.parametrize("memory", [MemoryOptions(), MemoryOptions(load_bytes=400_000)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_progress_ends_at_bytes_of_arrays_in_every_layout(layout: str, memory: MemoryOptions, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", STATE, layout=layout)
    reports, context = Reports(), Context(memory=memory)
    ckptcore.load(tmp_path / "c", progress=reports, context=context)
    reports.end_at(NBYTES)
    assert len(reports) >= 3
    reports.clear()
    target = {"zeros": np.ones((1000, 300), np.float32), "step": 0}
    ckptcore.load_into(tmp_path / "c", target, matching=ONLY, progress=reports, context=context)
    assert not target["zeros"].any()  # type: ignore[attr-defined]  # an array
    reports.end_at(1_200_000)


def test_progress_is_reported_while_a_large_array_is_read(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.zeros(32 << 20, np.uint8)})
    reports = Reports()
    ckptcore.load(tmp_path / "c", progress=reports)
    reports.end_at(32 << 20)
    assert len(reports) > 3


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"empty": np.zeros(0)}])
def test_a_load_of_no_bytes_reports_once(state: Any, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", state)
    reports = Reports()
    ckptcore.load(tmp_path / "c", progress=reports)
    assert reports == [(0, 0)]


def test_changed_arrays_count_with_their_bytes_in_memory(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(1000, np.float32)})
    reports = Reports()
    wanted = {"w": ckptcore.AbstractArray((1000,), "float64")}
    ckptcore.load(tmp_path / "c", wanted, matching=ckptcore.Matching(cast="safe"), progress=reports)
    reports.end_at(8000)


def test_arrays_of_bases_are_counted(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "base", STATE)
    update = ckptcore.Update(base=tmp_path / "base")
    ckptcore.save(tmp_path / "c", {"number": np.array(4.0)}, strategy=update)
    reports = Reports()
    ckptcore.load(tmp_path / "c", progress=reports)
    reports.end_at(NBYTES)


def test_several_objects_count_as_one_load(tmp_path: Path) -> None:
    objects = {"files": Files({"a": bytes(50_000)}), "a": STATE, "layer": Linear(1)}
    ckptcore.save_checkpointables(tmp_path / "c", objects)
    reports = Reports()
    loaded = ckptcore.load_checkpointables(tmp_path / "c", ["a", "files"], progress=reports)
    assert list(loaded) == ["a", "files"]
    reports.end_at(NBYTES)
    assert {total for _, total in reports} == {NBYTES}
    reports.clear()
    wanted = {"a": ckptcore.LoadAs({"noise": np.zeros(300_000, np.uint8)}, matching=ONLY)}
    ckptcore.load_checkpointables(tmp_path / "c", wanted, into={"layer": Linear(1), "files": Files()}, progress=reports)
    layer = ckptcore.metadata(tmp_path / "c" / "layer").tree.nbytes
    reports.end_at(300_000 + layer)
    assert reports[0] == (0, NBYTES + layer)  # skipped bytes are known once the object is loaded
    reports.clear()
    ckptcore.load_checkpointables(tmp_path / "c", ["files"], progress=reports)
    assert reports == [(0, 0)]


def replacing_once(location: Path, state: Any, **options: Any) -> Callable[[int, int], None]:
    """Return a progress function that replaces the checkpoint on its first call."""
    replaced = threading.Event()

    def replace(done: int, total: int) -> None:
        if done and not replaced.is_set():
            replaced.set()
            ckptcore.save(location, state, overwrite=True, **options)

    return replace


def test_a_checkpoint_replaced_during_the_load_is_counted_again(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"a": np.zeros(1000), "b": np.zeros(1000)})
    reports = Reports()
    replace = replacing_once(tmp_path / "c", {"a": np.ones(3000), "b": np.ones(1000)})

    def report(done: int, total: int) -> None:
        reports(done, total)
        replace(done, total)

    assert ckptcore.load(tmp_path / "c", progress=report)["a"].tolist() == [1.0] * 3000
    assert reports[0] == (0, 16_000)
    before = reports[-1][1] - 32_000  # bytes of the first attempt
    assert 0 < before <= 16_000
    reports.end_at(before + 32_000)


@pytest.mark.parametrize("reads", ["all", "alone", "broadcast"])
def test_each_process_of_a_job_counts_what_it_loads(reads: Any, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"state": STATE, "more": {"w": np.zeros(10)}})
    job, network = ThreadJob(3, timeout_seconds=60), ThreadNetwork(3, timeout_seconds=60)

    def load(coordinator: Coordinator) -> None:
        options = JobOptions(coordinator=coordinator, collectives=network.collectives(coordinator.rank), reads=reads)
        reports = Reports()
        wanted: dict[str, Any] = {"state": ckptcore.LoadAs({"noise": STATE["noise"]}, matching=ONLY)}
        if coordinator.rank:
            wanted = {"state": None, "more": None}
        ckptcore.load_checkpointables(tmp_path / "c", wanted, progress=reports, context=Context(job=options))
        reports.end_at(NBYTES + 80 if coordinator.rank else 300_000)

    job.run(load)


def test_a_load_in_the_background_has_progress(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", STATE)
    handle = ckptcore.load_async(tmp_path / "c")
    handle.result()
    assert handle.progress == (NBYTES, NBYTES)
    missing = ckptcore.load_async(tmp_path / "nothing")
    assert missing.exception() is not None
    assert missing.progress == (0, 0)


def test_a_load_that_fails_does_not_report_100_percent(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.zeros(1000)})
    (data,) = (tmp_path / "c").glob("*.safetensors")
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    reports = Reports()
    with pytest.raises(CorruptCheckpointError):
        ckptcore.load(tmp_path / "c", progress=reports)
    assert reports == [(0, 8000)]
