"""``ckptcore steps``."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
from ckptcore_tools import run_steps
from ckptcore_tools.formatting import format_age
from safetensors.numpy import save_file

import ckptcore
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.commit.stored_root import root_bytes
from ckptcore.protocols import StorageBackend
from plugins.tools.tests.cli.conftest import Run, RunJson, flip
from plugins.tools.tests.cli.expected_documents import ErrorDocument, StepsDocument
from plugins.tools.tests.cli.runs import checkpointables, save_run


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run with steps in several states."""
    directory = tmp_path / "run"
    save_run(directory, {9: 0.5, 10: float("nan"), 11: 0.25})
    flip(directory / "10" / "checkpoint.json", 60)
    (directory / "12").mkdir()
    (directory / "12" / "checkpoint.json").write_bytes(encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00")))
    (directory / "checkpoint-13").mkdir()
    save_file({"w": np.ones(2)}, directory / "checkpoint-13" / "model.safetensors")
    (directory / "14").mkdir()
    (directory / "14" / "0.log").write_text("no checkpoint")
    (directory / ".15.0123456789abcdef.ckptcore").mkdir()
    (directory / "logs").mkdir()
    return directory


def test_steps_have_their_states(run_json: RunJson, directory: Path) -> None:
    code, document = run_json(StepsDocument, "steps", directory)
    assert code == 0
    assert [(entry["step"], entry["name"], entry["state"]) for entry in document["steps"]] == [
        (9, "9", "committed"),
        (10, "10", "corrupt"),
        (11, "11", "committed"),
        (12, "12", "uncommitted"),
        (13, "checkpoint-13", "foreign"),
        (14, "14", "other"),
    ]
    first, broken, last = document["steps"][:3]
    assert first["nbytes"] == (directory / "9" / "model.safetensors").stat().st_size
    assert first["created"] == ckptcore.metadata(directory / "9").created
    assert (first["metrics"], last["metrics"]) == ({"loss": 0.5}, {"loss": 0.25})
    assert "checkpoint.json" in broken["error"]
    assert document["leftovers"] == [".15.0123456789abcdef.ckptcore"]
    assert (document["older"], document["owner"]) == (0, None)


def test_text(run: Run, tmp_path: Path) -> None:
    save_run(tmp_path / "run", {100: 0.5, 1000: float("inf")})
    (tmp_path / "run" / ".7.0123456789abcdef.ckptcore").mkdir()
    nbytes = (tmp_path / "run" / "100" / "model.safetensors").stat().st_size
    with ckptcore.CheckpointReader(tmp_path / "run").pin(1000):
        lines = run("steps", tmp_path / "run").stdout.splitlines()
    ages = [line.split()[5:7] for line in lines[1:3]]  # "0 s", or older on a slow machine
    first, second = (" ".join(age).rjust(3) for age in ages)
    assert lines == [
        f"step  name  state         size  {'age':>3}  metrics   notes",
        f" 100  100   committed    {nbytes} B  {first}  loss=0.5",
        f"1000  1000  committed  8.13 kB  {second}  loss=inf  pinned",
        "",
        "2 steps, 9.06 kB",
        "owner     none",
        "leftover  .7.0123456789abcdef.ckptcore, of a save that is running or failed",
    ]


def test_missing_and_short_files_are_found(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    save_run(tmp_path / "run", {1: 0.5, 2: 0.25, 3: 0.75})
    (tmp_path / "run" / "1" / "model.safetensors").unlink()
    os.truncate(tmp_path / "run" / "2" / "model.safetensors", 20)
    code, document = run_json(StepsDocument, "steps", tmp_path / "run")
    assert (code, [entry["state"] for entry in document["steps"]]) == (0, ["incomplete", "incomplete", "committed"])
    first, second, third = document["steps"]
    assert (first["error"], first["metrics"], third["error"]) == ("model.safetensors is missing", {"loss": 0.5}, None)
    assert second["error"].startswith("model.safetensors has 20 bytes instead of ")
    assert [problem["start"] for problem in second["problems"]] == [20] and "problems" not in third
    lines = run("steps", tmp_path / "run").stdout.splitlines()
    assert lines[1].split()[2] == "incomplete" and lines[1].endswith("model.safetensors is missing")
    code, document = run_json(StepsDocument, "steps", tmp_path / "run", "--verify")
    assert (code, [entry["sound"] for entry in document["steps"]]) == (1, [False, False, True])
    assert document["steps"][0]["error"] == "model.safetensors is missing"


def test_a_lost_file_of_one_of_several_checkpointables(run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "run" / "1", checkpointables())
    (tmp_path / "run" / "1" / "notes" / "deep" / "a.txt").unlink()
    (tmp_path / "run" / "1" / "notes" / "deep" / "b.txt").unlink()
    _, document = run_json(StepsDocument, "steps", tmp_path / "run")
    (step,) = document["steps"]
    assert (step["state"], step["error"]) == ("incomplete", "notes/deep/a.txt is missing, and 1 more problem")
    assert [problem["object"] for problem in step["problems"]] == ["notes/deep/a.txt", "notes/deep/b.txt"]


def test_last_shows_only_the_newest_steps(run: Run, run_json: RunJson, directory: Path) -> None:
    _, document = run_json(StepsDocument, "steps", directory, "--last", 2)
    assert [entry["step"] for entry in document["steps"]] == [13, 14]
    assert document["older"] == 4
    assert "; 4 older steps not shown" in run("steps", directory, "--last", 2).stdout
    assert run("steps", directory, "--last", 0).exit_code == 2


def test_roots_of_omitted_steps_are_not_read(
    run_json: RunJson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path / "run", dict.fromkeys(range(1, 20), 0.5))
    read = []

    def counted(store: StorageBackend) -> bytes | None:
        read.append(store)
        return root_bytes(store)

    monkeypatch.setattr(run_steps, "root_version", counted)
    run_json(StepsDocument, "steps", tmp_path / "run", "--last", 3)
    assert len(read) == 3


def test_verify_reads_every_byte(run: Run, run_json: RunJson, directory: Path) -> None:
    flip(directory / "11" / "model.safetensors", -1)
    code, document = run_json(StepsDocument, "steps", directory, "--verify")
    assert code == 1
    by_step = {entry["step"]: entry for entry in document["steps"]}
    assert {step: entry.get("sound") for step, entry in by_step.items()} == {
        9: True, 10: False, 11: False, 12: None, 13: None, 14: None,
    }  # fmt: skip
    assert by_step[11]["problems"][0]["object"] == "model.safetensors"
    assert by_step[11]["error"] == by_step[11]["problems"][0]["message"]
    assert by_step[13]["unverified"] == ["model.safetensors"]
    assert (by_step[9]["unverified"], by_step[9]["problems"]) == ([], [])
    result = run("steps", directory, "--verify")
    assert result.exit_code == 1
    states = [line.split()[2] + " " + line.split()[7] for line in result.stdout.splitlines() if " loss=" in line]
    assert states == ["committed sound", "committed damaged"]


def test_a_sound_run_verifies(run: Run, tmp_path: Path) -> None:
    save_run(tmp_path / "run", {1: 0.5, 2: 0.25})
    assert run("steps", tmp_path / "run", "--verify").exit_code == 0


def test_several_checkpointables(run_json: RunJson, tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_checkpointables(1, checkpointables(), metrics={"loss": 1})
        checkpointer.save_checkpointables(2, checkpointables())
    _, document = run_json(StepsDocument, "steps", tmp_path / "run")
    files = [path for path in (tmp_path / "run" / "1").rglob("*") if path.is_file() and path.name != "checkpoint.json"]
    assert len(files) == 4
    assert [entry["state"] for entry in document["steps"]] == ["committed"] * 2
    assert document["steps"][0]["nbytes"] == sum(path.stat().st_size for path in files)
    flip(tmp_path / "run" / "1" / "data" / "checkpoint.json", 80)
    _, document = run_json(StepsDocument, "steps", tmp_path / "run")
    assert [entry["state"] for entry in document["steps"]] == ["corrupt", "committed"]
    assert document["steps"][0]["error"].startswith("data: ")


def test_deleted_checkpointables_are_not_counted(run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "run" / "1", checkpointables())
    ckptcore.delete(tmp_path / "run" / "1" / "model")
    _, document = run_json(StepsDocument, "steps", tmp_path / "run")
    (step,) = document["steps"]
    assert (step["state"], step["nbytes"]) == (
        "committed",
        105 + (tmp_path / "run" / "1" / "data" / "model.safetensors").stat().st_size,
    )


def test_the_owner_of_the_directory_is_shown(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_blocking(1, {"x": 1})
        _, document = run_json(StepsDocument, "steps", tmp_path / "run")
        assert (document["owner"]["alive"], document["owner"]["pid"]) == (True, os.getpid())
        assert "this process, process " in run("steps", tmp_path / "run").stdout
        checkpointer.save_blocking(2, {"x": 1})  # the command did not take the ownership away
    _, document = run_json(StepsDocument, "steps", tmp_path / "run")
    assert document["owner"] is None


@pytest.mark.system
def test_a_failed_owner_does_not_count_as_owner(run_json: RunJson, tmp_path: Path) -> None:
    program = "import sys, os, ckptcore; c = ckptcore.Checkpointer(sys.argv[1]); c.save_blocking(1, 1); os._exit(1)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=False)
    _, document = run_json(StepsDocument, "steps", tmp_path / "run")
    assert document["owner"] is None
    assert (tmp_path / "run" / ".ckptcore" / "owner" / "owner.json").exists()
    assert [entry["step"] for entry in document["steps"]] == [1]


def test_storage_without_locks(run_json: RunJson) -> None:
    """Without locks it is unknown whether the owner is alive."""
    directory = f"memory://{uuid.uuid4()}/run"
    with ckptcore.Checkpointer(directory) as checkpointer:
        checkpointer.save_blocking(1, {"x": np.ones(3)})
        with ckptcore.CheckpointReader(directory).pin(1):
            _, document = run_json(StepsDocument, "steps", directory)
            assert (document["owner"]["alive"], document["owner"]["pid"]) == (None, os.getpid())
            assert [(entry["step"], entry["pinned"]) for entry in document["steps"]] == [(1, True)]
    _, document = run_json(StepsDocument, "steps", directory)
    assert document["owner"] is None


def test_steps_with_custom_names(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    names = ckptcore.step_names.StepNames.of("epoch-0001")
    with ckptcore.Checkpointer(tmp_path / "run", step_names=names) as checkpointer:
        checkpointer.save(3, {"x": 1})
    for named in ([], ["--named", "epoch-0001"]):
        _, document = run_json(StepsDocument, "steps", tmp_path / "run", *named)
        assert [(entry["step"], entry["name"]) for entry in document["steps"]] == [(3, "epoch-0003")]
    assert run("steps", tmp_path / "run", "--named", "epoch").exit_code == 2


def test_a_metric_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"x": 1}, metrics={"\x1b[31mloss": 1})
    assert "\\x1b[31mloss=1" in run("steps", tmp_path / "run").stdout


def test_locations_without_steps(run: Run, run_json: RunJson, tmp_path: Path, checkpoint: Path) -> None:
    assert run_json(ErrorDocument, "steps", tmp_path / "nothing")[0] == 3
    (tmp_path / "empty").mkdir()
    assert run("steps", tmp_path / "empty").stdout.splitlines()[0] == f"no steps in {tmp_path / 'empty'}"
    code, document = run_json(ErrorDocument, "steps", checkpoint)
    assert (code, document["error"]) == (6, "InvalidLocationError")
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (-3, "0 s"), (-3600, "in the future"), (119, "119 s"), (120, "2 min"), (7199, "119 min"),
     (7200, "2 h"), (172_800, "2 days"), (400 * 86_400, "400 days")],
)  # fmt: skip
def test_ages(seconds: int, text: str) -> None:
    assert format_age("2026-01-01T00:00:00+00:00", 1_767_225_600 + seconds) == text


def test_an_age_that_cannot_be_read() -> None:
    assert format_age("yesterday", 0) == "yesterday"
