"""Commands on checkpoints with bases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptcore
from plugins.tools.tests.cli.conftest import Run, RunJson
from plugins.tools.tests.cli.expected_documents import InspectDocument, StepsDocument


@pytest.fixture
def updated(tmp_path: Path) -> Path:
    """A run with four steps. Step 3 is an update of step 1, and step 4 is an update of step 2."""
    place = tmp_path / "run"
    for step in (1, 2):
        ckptcore.save(place / str(step), {"a": np.ones(4), "n": step})
    ckptcore.save(place / "3", {"b": np.zeros(2)}, strategy=ckptcore.Update(place / "1"))
    ckptcore.save(place / "4", {"n": 4}, strategy=ckptcore.Update(place / "2"))
    return place


def test_inspect_names_the_bases(run: Run, run_json: RunJson, updated: Path) -> None:
    assert "  bases      1" in run("inspect", updated / "3").stdout.splitlines()
    assert "  bases " not in run("inspect", updated / "1").stdout
    assert ckptcore.metadata(updated / "3").bases == ("1",)
    for name, bases in (("3", ["1"]), ("1", [])):
        code, document = run_json(InspectDocument, "inspect", updated / name)
        assert code == 0 and document["bases"] == bases


def test_lost_files_of_bases_are_found(run: Run, run_json: RunJson, updated: Path) -> None:
    (updated / "1" / "model.safetensors").unlink()
    _, document = run_json(StepsDocument, "steps", updated)
    assert [one["state"] for one in document["steps"]] == ["incomplete", "committed", "incomplete", "committed"]
    assert document["steps"][2]["error"] == "../1/model.safetensors is missing"
    assert "damaged    ../1/model.safetensors is missing" in run("inspect", updated / "3").stdout


def test_a_dry_run_of_gc_names_the_bases_that_stay(run: Run, updated: Path) -> None:
    result = run("gc", updated, "--policy", "latest_n=1", "--dry-run")
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()[:1].isdigit()}
    assert lines["2"].endswith("keep    base of 4")
    assert all("delete" in lines[step] for step in "13") and "would delete: 2 of 4 steps" in result.stdout
    result = run("gc", updated, "--policy", "latest_n=1", "--yes")
    assert "deleted: 2 of 4 steps" in result.stdout and "stayed" not in result.stdout
    assert ckptcore.CheckpointReader(updated).steps == (2, 4)


def test_a_checkpoint_that_is_not_a_step_keeps_its_bases(run: Run, updated: Path) -> None:
    ckptcore.save(updated / "best", {}, strategy=ckptcore.Update(updated / "3"))
    result = run("gc", updated, "--policy", "latest_n=1", "--yes")
    assert "deleted: 0 of 4" in result.stdout or "nothing to delete" in result.stdout
    assert ckptcore.CheckpointReader(updated).steps == (1, 2, 3, 4)
