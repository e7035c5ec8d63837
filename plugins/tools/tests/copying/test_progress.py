"""Progress of copies and of `verify`. It ends at the total, even if the destination already had some data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from tests.checkpointer.runs import Meeting, save_steps
from tests.composites.objects import Files
from tests.io.test_progress import Reports
from tests.saving.test_progress import LAYOUTS, NBYTES, STATE


@pytest.fixture
def source(tmp_path: Path) -> Path:
    ckptcore.save(tmp_path / "source", STATE)
    return tmp_path / "source"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_counts_bytes_of_arrays(layout: str, source: Path, tmp_path: Path) -> None:
    reports = Reports()
    ckptcore.copy(source, tmp_path / "c", layout=layout, progress=reports)
    reports.end_at(NBYTES)


def test_a_subtree(source: Path, tmp_path: Path) -> None:
    reports = Reports()
    ckptcore.copy(source, tmp_path / "c", subtree=("tied",), progress=reports)
    reports.end_at(2 * 240_000)  # a tied array counts under both names


def test_files_are_converted_without_being_counted(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"files": Files({"a": bytes(50_000)}), "w": {"w": np.zeros(10)}})
    reports = Reports()
    ckptcore.copy(tmp_path / "c", tmp_path / "d", layout="zarr3", progress=reports)
    reports.end_at(80)


def test_a_copy_that_exists_is_complete(source: Path, tmp_path: Path) -> None:
    nbytes = ckptcore.copy(source, tmp_path / "c").nbytes
    reports = Reports()
    ckptcore.copy(source, tmp_path / "c", progress=reports)
    reports.end_at(nbytes)


def test_an_update_is_copied_with_its_arrays(source: Path, tmp_path: Path) -> None:
    update = ckptcore.Update(base=source)
    ckptcore.save(tmp_path / "update", {"number": np.array(4.0)}, strategy=update)
    reports = Reports()
    ckptcore.copy(tmp_path / "update", tmp_path / "c", progress=reports)
    reports.end_at(NBYTES)
    reports.clear()
    report = ckptcore.copy(tmp_path / "update", tmp_path / "c", progress=reports)
    assert report.kept_bytes == report.nbytes
    assert reports == [(report.nbytes, report.nbytes)]


def test_steps_count_as_one_copy(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as run:
        for step in range(3):
            run.save_blocking(step, {"w": np.zeros(1000 * (step + 1))})
    reports = Reports()
    copied = ckptcore.copy_steps(tmp_path / "run", tmp_path / "to", progress=reports)
    assert reports[-1] == (copied.nbytes, copied.nbytes)
    assert list(reports) == sorted(reports, key=lambda report: report[0])
    assert all(done <= total for done, total in reports)
    assert reports[0][1] == 3 * copied.steps[0].nbytes  # other steps are assumed to have the same size
    reports.clear()
    assert ckptcore.copy_steps(tmp_path / "run", tmp_path / "none", steps=[], progress=reports).nbytes == 0
    assert reports == [(0, 0)]


@pytest.mark.parametrize("chosen", [None, (2, 3)])
def test_steps_are_searched_concurrently(chosen: Sequence[int] | None, tmp_path: Path) -> None:
    meeting = Meeting()
    with ckptcore.Checkpointer("far://run", context=meeting.context) as run:
        save_steps(run, [1, 2, 3, 4])
    meeting.left = 1  # after the search, the steps are copied one after another
    copied = ckptcore.copy_steps("far://run", tmp_path / "to", steps=chosen, context=meeting.context)
    assert meeting.left == 0 and copied.steps.keys() == set(chosen or [1, 2, 3, 4])


def test_a_source_that_is_replaced_is_copied_again(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.zeros(1000)})
    first = ckptcore.metadata(tmp_path / "c").nbytes
    reports = Reports()

    def replace(done: int, total: int) -> None:
        if done and not any(before for before, _ in reports):
            ckptcore.save(tmp_path / "c", {"w": np.ones(5000)}, overwrite=True)
        reports(done, total)

    copied = ckptcore.copy(tmp_path / "c", tmp_path / "d", progress=replace)
    assert ckptcore.load(tmp_path / "d")["w"].shape == (5000,)
    reports.end_at(reports[-1][1])
    assert copied.nbytes < reports[-1][1] <= copied.nbytes + first + 2000


@pytest.mark.parametrize("how", ["tree", "composite", "update", "other", "values"])
def test_verify_ends_at_the_bytes_of_its_report(how: str, source: Path, tmp_path: Path) -> None:
    location, state = tmp_path / "c", dict[str, Any](STATE)
    if how == "composite":
        ckptcore.save_checkpointables(location, {"a": state, "files": Files({"a": bytes(50_000)})})
    elif how == "update":
        ckptcore.save(location, {"number": np.array(4.0)}, strategy=ckptcore.Update(base=source))
    elif how == "values":
        ckptcore.save(location, {"step": 3})
    else:
        ckptcore.save(location, state, layout=ckptcore.SafetensorsLayout(standalone=True))
    if how == "other":
        (location / "checkpoint.json").unlink()
    reports = Reports()
    report = ckptcore.verify(location, progress=reports)
    assert report.ok
    reports.end_at(report.nbytes)


def test_damage_is_not_a_failure_of_verify(source: Path) -> None:
    (data,) = source.glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:100_000])
    reports = Reports()
    assert not ckptcore.verify(source, progress=reports).ok
    reports.end_at(reports[0][1])
