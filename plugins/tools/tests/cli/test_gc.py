"""``ckptcore gc``."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptcore
from ckptcore.commit.leases import Holder
from ckptcore.commit.location import open_directory
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.runtime import runtime_of
from plugins.tools.tests.cli.conftest import Run, RunJson, flip, read_terminal
from plugins.tools.tests.cli.expected_documents import ErrorDocument, GcDocument
from plugins.tools.tests.cli.runs import save_run

LOSSES = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3}
POLICY = ("--policy", "latest_n=1,best_n=1:loss:min")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run of four steps, the second of which is the best."""
    save_run(tmp_path / "run", LOSSES)
    return tmp_path / "run"


def names(directory: Path) -> list[str]:
    """Return the names in a directory, without administration files."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".ckptcore")


def actions(document: dict[str, Any]) -> dict[int, str]:
    """Return the decision about each step."""
    return {entry["step"]: entry["action"] for entry in document["steps"]}


def test_a_dry_run_says_why_and_changes_nothing(run: Run, run_json: RunJson, directory: Path) -> None:
    before = sorted(str(path) for path in directory.rglob("*"))
    code, document = run_json(GcDocument, "gc", directory, *POLICY, "--dry-run")
    assert code == 0
    assert actions(document) == {1: "delete", 2: "keep", 3: "delete", 4: "keep"}
    assert [entry["reasons"] for entry in document["steps"]] == [[], ["the best 1 by loss (min)"], [], ["the latest 1"]]
    assert [entry["metrics"] for entry in document["steps"]] == [{"loss": loss} for loss in LOSSES.values()]
    assert document["steps"][0]["nbytes"] == (directory / "1" / "model.safetensors").stat().st_size
    assert (document["deleted"], document["dry_run"]) == ([], True)
    lines = run("gc", directory, *POLICY, "--dry-run").stdout.splitlines()
    assert lines[0].split() == ["step", "name", "age", "size", "metrics", "action", "why"]
    assert lines[1].split()[-2:] == ["loss=0.5", "delete"]
    assert lines[2].endswith("loss=0.1  keep    the best 1 by loss (min)")
    nbytes = sum((directory / step / "model.safetensors").stat().st_size for step in "13")
    assert lines[-1] == f"would delete: 2 of 4 steps, {nbytes} B"
    assert sorted(str(path) for path in directory.rglob("*")) == before


def test_deletes_what_the_dry_run_said(run: Run, run_json: RunJson, directory: Path) -> None:
    _, planned = run_json(GcDocument, "gc", directory, *POLICY, "--dry-run")
    code, document = run_json(GcDocument, "gc", directory, *POLICY, "--yes")
    assert code == 0
    assert (document["deleted"], document["dry_run"]) == ([1, 3], False)
    assert document["steps"] == planned["steps"]
    assert names(directory) == ["2", "4"]
    assert run("gc", directory, *POLICY, "--yes").stdout.splitlines()[-1] == "deleted: 0 of 2 steps, 0 B"


def test_the_directory_of_a_running_job_is_refused(run: Run, run_json: RunJson, directory: Path) -> None:
    with ckptcore.Checkpointer(directory):
        code, document = run_json(ErrorDocument, "gc", directory, *POLICY, "--yes")
        assert (code, document["error"]) == (8, "DirectoryInUseError")
        assert run("gc", directory, *POLICY, "--dry-run").exit_code == 0
    assert names(directory) == ["1", "2", "3", "4"]


def test_the_option_that_takes_over_is_named(run: Run, run_json: RunJson) -> None:
    memory = f"memory://{uuid.uuid4()}/run"
    save_run(memory, {1: 0.1, 2: 0.2})
    with ckptcore.Checkpointer(memory):
        code, document = run_json(ErrorDocument, "gc", memory, *POLICY, "--yes")
        assert code == 8
        assert "pass --take-over, which waits" in document["message"]
        assert document["message"] in run("gc", memory, *POLICY, "--yes").stderr


def test_a_pinned_step_stays(run_json: RunJson, directory: Path) -> None:
    with ckptcore.CheckpointReader(directory).pin(1):
        _, document = run_json(GcDocument, "gc", directory, *POLICY, "--dry-run")
        assert (actions(document)[1], document["steps"][0]["reasons"]) == ("keep", ["pinned by a reader"])
        _, document = run_json(GcDocument, "gc", directory, *POLICY, "--yes")
        assert document["deleted"] == [3]
    assert names(directory) == ["1", "2", "4"]


def test_leftovers_are_deleted(run: Run, run_json: RunJson, directory: Path) -> None:
    leftover = directory / ".5.0123456789abcdef.ckptcore"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    for step in "12":
        flip(directory / step / "checkpoint.json", 60)
    _, document = run_json(GcDocument, "gc", directory, "--policy", "preserve_all", "--dry-run")
    assert document["leftovers"] == [leftover.name]
    assert leftover.exists()
    assert f"leftover  {leftover.name}" in run("gc", directory, "--policy", "preserve_all", "--dry-run").stdout
    run_json(GcDocument, "gc", directory, "--policy", "preserve_all", "--yes")
    assert names(directory) == ["1", "2", "3", "4"]


def test_foreign_and_damaged_steps_are_not_deleted(run_json: RunJson, directory: Path) -> None:
    flip(directory / "1" / "checkpoint.json", 60)
    (directory / "5").mkdir()
    save_file({"w": np.ones(2)}, directory / "5" / "model.safetensors")
    (directory / "6").mkdir()
    (directory / "6" / "0.log").write_text("no checkpoint")
    (directory / "7").mkdir()
    (directory / "7" / "checkpoint.json").write_bytes(encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00")))
    _, document = run_json(GcDocument, "gc", directory, "--policy", "latest_n=1", "--yes")
    assert {entry["step"]: entry["reasons"] for entry in document["steps"]} == {
        1: ["damaged"],
        2: [],
        3: [],
        4: ["the latest 1"],
        5: ["written by other software"],
        6: ["not a checkpoint"],
        7: ["not committed"],
    }
    assert document["deleted"] == [2, 3]
    assert names(directory) == ["1", "4", "5", "6", "7"]


def test_policies_do_not_count_steps_with_missing_or_short_files(run: Run, run_json: RunJson, directory: Path) -> None:
    os.truncate(directory / "2" / "model.safetensors", 20)
    (directory / "4" / "model.safetensors").unlink()
    _, planned = run_json(GcDocument, "gc", directory, *POLICY, "--dry-run")
    assert {entry["step"]: entry["reasons"] for entry in planned["steps"]} == {
        1: [],
        2: ["a file is missing or has another size"],
        3: ["the latest 1", "the best 1 by loss (min)"],
        4: ["a file is missing or has another size"],
    }
    assert run("gc", directory, *POLICY, "--yes").exit_code == 0
    assert names(directory) == ["2", "3", "4"]


def test_the_only_step_that_loads_is_kept(run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "1", {"x": 1})
    ckptcore.save_checkpointables(tmp_path / "2", {"model": {"w": np.ones(2)}})
    flip(tmp_path / "2" / "model" / "checkpoint.json", 60)
    _, document = run_json(GcDocument, "gc", tmp_path, "--policy", "latest_n=1", "--dry-run")
    assert [entry["reasons"] for entry in document["steps"]] == [["the latest 1"], ["damaged"]]


def test_storage_without_directories(run_json: RunJson) -> None:
    directory = f"memory://{uuid.uuid4()}/run"
    save_run(directory, LOSSES)
    store = open_directory(directory, runtime_of(ckptcore.Context()).storages)
    store.put("5/checkpoint.json", encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00")))
    _, document = run_json(GcDocument, "gc", directory, *POLICY, "--dry-run")
    assert (sorted(actions(document)), document["leftovers"]) == ([1, 2, 3, 4], ["5"])
    _, document = run_json(GcDocument, "gc", directory, *POLICY, "--yes")
    assert document["deleted"] == [1, 3]
    assert [name for name in store.list_names() if not name.startswith(".")] == ["2/", "4/"]


def test_taking_over_from_failed_owners(run_json: RunJson) -> None:
    directory = f"memory://{uuid.uuid4()}/run"
    save_run(directory, LOSSES)
    store = open_directory(directory, runtime_of(ckptcore.Context()).storages)
    dead = Holder("0" * 16, "elsewhere", 7, "2026-01-01T00:00:00+00:00", lease_seconds=0.1)
    store.put(".ckptcore/owner.json", dead.encode())
    assert run_json(ErrorDocument, "gc", directory, *POLICY, "--yes")[0] == 8
    _, document = run_json(GcDocument, "gc", directory, *POLICY, "--yes", "--take-over")
    assert document["deleted"] == [1, 3]


def test_invalid_arguments_are_refused(run: Run, directory: Path) -> None:
    for arguments in (
        [],
        ["--policy", "latest_n"],
        ["--policy", "nonsense"],
        ["--policy", "latest_n=1"],  # without a terminal, the command cannot ask
        ["--policy", "latest_n=1", "--json"],
        ["--policy", "latest_n=1", "--yes", "--named", "epoch"],
    ):
        assert run("gc", directory, *arguments).exit_code == 2, arguments
    assert names(directory) == ["1", "2", "3", "4"]


def test_a_missing_directory_is_not_created(run_json: RunJson, tmp_path: Path) -> None:
    assert run_json(ErrorDocument, "gc", tmp_path / "nothing", *POLICY, "--yes")[0] == 3
    assert not (tmp_path / "nothing").exists()


def test_checkpointables_are_not_steps(run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "checkpoint", {"1": {"x": 1}, "2": {"x": 1}})
    assert run_json(ErrorDocument, "gc", tmp_path / "checkpoint", *POLICY, "--yes")[0] == 6
    assert ckptcore.load_checkpointables(tmp_path / "checkpoint") == {"1": {"x": 1}, "2": {"x": 1}}


def asked(directory: Path, answer: bytes, *arguments: str) -> tuple[int, str]:
    """Run the command on a terminal with typed input. Return the exit code and the output."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptcore", "gc", str(directory), *POLICY, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    seen = read_terminal(master, question=b"Delete?", answer=answer)
    return process.wait(), seen


@pytest.mark.system
def test_asks_on_a_terminal(directory: Path) -> None:
    code, seen = asked(directory, b"n\n")
    assert (code, names(directory)) == (130, ["1", "2", "3", "4"])
    assert "to delete: 2 of 4 steps" in seen
    assert "nothing was deleted" in seen
    code, seen = asked(directory, b"\x04")  # Ctrl-D, the end of the input
    assert (code, names(directory)) == (130, ["1", "2", "3", "4"])
    assert "interrupted" in seen
    assert "Traceback" not in seen
    code, seen = asked(directory, b"y\n")
    assert (code, names(directory)) == (0, ["2", "4"])
    assert "deleted: 2 of 4 steps" in seen
    code, seen = asked(directory, b"")
    assert code == 0
    assert "Delete?" not in seen
    assert "nothing to delete: 2 steps kept" in seen


@pytest.mark.system
def test_does_not_ask_about_a_directory_in_use(directory: Path) -> None:
    with ckptcore.Checkpointer(directory):
        code, seen = asked(directory, b"")
    assert code == 8
    assert "Delete?" not in seen
