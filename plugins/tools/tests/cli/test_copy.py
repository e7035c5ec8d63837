"""``ckptcore copy``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.locations import objects_at, store_at

import ckptcore
from ckptcore.training.path_directory import read_directory_metadata
from plugins.tools.tests.cli.conftest import Run, RunJson, flip
from plugins.tools.tests.cli.expected_documents import CopyDocument, CopyStepsDocument, ErrorDocument


def _run_of(directory: Path, steps: range) -> str:
    with ckptcore.Checkpointer(directory, metadata={"model": "tiny"}) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"x": np.arange(1000) + step})
    return str(directory)


def test_copies_a_checkpoint(run: Run, run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    there = f"memory://{tmp_path.name}-copy/step"
    code, document = run_json(CopyDocument, "copy", checkpoint, there)
    copied = document["copied"]
    assert (code, copied["sent"], copied["kept"], copied["unverified"]) == (0, copied["nbytes"], 0, [])
    assert objects_at(there) == objects_at(str(checkpoint))
    result = run("copy", checkpoint, there, "--verify")
    assert result.exit_code == 0
    assert f"to {there}; " in result.stdout
    assert "already existed, 0 B sent" in result.stdout
    assert run("diff", checkpoint, there).exit_code == 0


def test_errors(run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "there", {"x": 1})
    code, document = run_json(ErrorDocument, "copy", checkpoint, tmp_path / "there")
    assert (code, document["error"]) == (7, "CheckpointExistsError")
    code, document = run_json(ErrorDocument, "copy", tmp_path / "missing", tmp_path / "copy")
    assert (code, document["error"]) == (3, "CheckpointNotFoundError")
    flip(checkpoint / "model.safetensors", 300)
    code, document = run_json(ErrorDocument, "copy", checkpoint, tmp_path / "copy")
    assert (code, document["error"]) == (4, "ChecksumError")
    assert run_json(ErrorDocument, "copy", tmp_path / "copy", tmp_path / "again")[0] == 3


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_copies_a_run(run: Run, run_json: RunJson, tmp_path: Path, scheme: str) -> None:
    here = _run_of(tmp_path / "run", range(4))
    there = str(tmp_path / "copy") if scheme == "file" else f"memory://{tmp_path.name}-run/copy"
    code, document = run_json(CopyStepsDocument, "copy", here, there, "--steps", "3,1")
    assert (code, [(step["step"], step["state"]) for step in document["steps"]]) == (0, [(1, "copied"), (3, "copied")])
    code, document = run_json(CopyStepsDocument, "copy", here, there)
    assert [bool(step["copied"]["sent"]) for step in document["steps"]] == [True, False, True, False]
    assert read_directory_metadata(store_at(there)) == {"model": "tiny"}
    with ckptcore.Checkpointer(there) as copied:
        assert copied.steps == (0, 1, 2, 3)
        np.testing.assert_array_equal(copied.load(2)["x"], np.arange(1000) + 2)
    result = run("copy", here, there)
    assert result.stdout.count("already exists") == 4
    assert run("copy", here, there, "--steps", "1,x").exit_code == 2
    assert run_json(ErrorDocument, "copy", here, there, "--steps", "9")[0] == 3


def test_a_damaged_step_does_not_stop_the_others(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    here = _run_of(tmp_path / "run", range(3))
    flip(tmp_path / "run" / "1" / "model.safetensors", 300)
    code, document = run_json(CopyStepsDocument, "copy", here, tmp_path / "copy")
    assert (code, [step["state"] for step in document["steps"]]) == (1, ["copied", "damaged", "copied"])
    assert "is damaged" in document["steps"][1]["error"]
    result = run("copy", here, tmp_path / "copy")
    assert result.exit_code == 1
    assert "step 1  damaged: " in result.stdout


def test_a_destination_in_use_or_with_steps_is_refused(run_json: RunJson, tmp_path: Path) -> None:
    here = _run_of(tmp_path / "run", range(1))
    with ckptcore.Checkpointer(tmp_path / "copy"):
        code, document = run_json(ErrorDocument, "copy", here, tmp_path / "copy")
    assert (code, document["error"]) == (8, "DirectoryInUseError")
    (tmp_path / "other").mkdir()
    _run_of(tmp_path / "other", range(1))
    code, document = run_json(ErrorDocument, "copy", here, tmp_path / "other")
    assert (code, document["error"]) == (7, "CheckpointExistsError")


def test_options_of_storages_are_used(run: Run, run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    assert run("copy", checkpoint, tmp_path / "copy", "--option", "file.direct_io=false").exit_code == 0
    refused = run("inspect", checkpoint, "--option", 'file.direct_io="no"')
    assert refused.exit_code == 2
    assert "direct_io" in refused.stderr
    assert run("ls", os.fspath(tmp_path), "--option", "file").exit_code == 2
    listed: Any = run("ls", os.fspath(tmp_path), "--option", "file.direct_io=false")
    assert listed.exit_code == 0
