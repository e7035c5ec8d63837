"""``ckptcore verify``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptcore
from plugins.tools.tests.cli.conftest import Run, RunJson, flip
from plugins.tools.tests.cli.expected_documents import ErrorDocument, StepsDocument, VerifyDocument


def test_a_sound_checkpoint(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    code, document = run_json(VerifyDocument, "verify", checkpoint)
    assert (code, document["ok"], document["problems"], document["unverified"]) == (0, True, [], [])
    assert document["objects"] == 2 and document["state"] == "sound"
    assert document["nbytes"] >= (checkpoint / "model.safetensors").stat().st_size
    result = run("verify", checkpoint)
    assert result.exit_code == 0
    assert result.stdout.startswith("sound: 2 objects, ")


def test_a_problem_names_object_array_and_range(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    mebibyte = np.zeros(1 << 18, np.float32)
    ckptcore.save(tmp_path / "c", {name: mebibyte.copy() for name in "abcd"})
    path = tmp_path / "c" / "model.safetensors"
    place = path.stat().st_size - (5 << 19)  # in the middle of the second array
    flip(path, place)
    code, document = run_json(VerifyDocument, "verify", tmp_path / "c")
    assert (code, document["ok"], document["state"]) == (1, False, "damaged")
    (problem,) = document["problems"]
    assert problem["object"] == "model.safetensors"
    assert problem["start"] <= place < problem["stop"] <= problem["start"] + (1 << 20)
    assert "b" in problem["arrays"]
    assert "d" not in problem["arrays"]
    result = run("verify", tmp_path / "c")
    assert result.exit_code == 1
    assert f"model.safetensors bytes {problem['start']}–{problem['stop']}" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 problem: ")
    assert result.stderr == ""


def test_a_file_that_is_cut_off(run_json: RunJson, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, document = run_json(VerifyDocument, "verify", checkpoint)
    assert code == 1
    assert {problem["object"] for problem in document["problems"]} == {"model.safetensors"}


def test_a_file_that_is_missing(run_json: RunJson, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    code, document = run_json(VerifyDocument, "verify", checkpoint)
    assert code == 1
    assert document["problems"][0]["object"] == "model.safetensors"
    assert "params/w" in document["problems"][0]["arrays"]


def test_a_damaged_root(run_json: RunJson, checkpoint: Path) -> None:
    flip(checkpoint / "checkpoint.json", 60)
    code, document = run_json(VerifyDocument, "verify", checkpoint)
    assert code == 1
    assert document["problems"][0]["object"] == "checkpoint.json"


@pytest.mark.parametrize("writer", ["safetensors", "without checksums", "no arrays"])
def test_a_checkpoint_without_checksums_is_complete_and_not_sound(
    writer: str, run: Run, run_json: RunJson, tmp_path: Path
) -> None:
    location = tmp_path / "1"
    if writer == "without checksums":
        context = ckptcore.Context(io=ckptcore.context.IOOptions(checksums=False))
        ckptcore.save(location, {"w": np.ones(3)}, context=context)
    else:
        location.mkdir()
        save_file({} if writer == "no arrays" else {"w": np.ones(3)}, location / "model.safetensors")
    code, document = run_json(VerifyDocument, "verify", location)
    assert (code, document["ok"], document["state"]) == (0, True, "complete")
    assert document["unverified"] == ([] if writer == "no arrays" else ["model.safetensors"])
    assert ckptcore.verify(location).state == "complete"
    text = run("verify", location).stdout
    assert text.startswith("complete: ") and "sound" not in text
    assert ("no checksums for model.safetensors" in text) is (writer != "no arrays")
    code, steps = run_json(StepsDocument, "steps", tmp_path, "--verify")
    assert (code, [step["sound"] for step in steps["steps"]]) == (0, [None])
    text = run("steps", tmp_path, "--verify").stdout
    assert "complete" in text and "sound" not in text


def test_a_missing_checkpoint_is_an_error(run_json: RunJson, tmp_path: Path) -> None:
    assert run_json(ErrorDocument, "verify", tmp_path / "nothing")[0] == 3
