"""``ckptcore ls``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.hostile_json import sealed
from safetensors.numpy import save_file

import ckptcore
from ckptcore.commit.root import Claim, Root
from ckptcore.commit.root_json import decode_root, encode_claim, encode_root
from plugins.tools.tests.cli.conftest import Run, RunJson, flip
from plugins.tools.tests.cli.expected_documents import ErrorDocument, ListDocument


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with one entry of each state."""
    ckptcore.save(tmp_path / "step_1", {"w": np.ones(1000, np.float32)})
    ckptcore.save(tmp_path / "step_2", {"w": np.ones(1000, np.float32)})
    flip(tmp_path / "step_2" / "checkpoint.json", 50)
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "checkpoint.json").write_bytes(encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00")))
    (tmp_path / ".step_4.0123456789abcdef.ckptcore").mkdir()
    (tmp_path / "hugging_face").mkdir()
    save_file({"w": np.ones(2)}, tmp_path / "hugging_face" / "model.safetensors")
    save_file({"w": np.ones(3)}, tmp_path / "bare.safetensors")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0.log").write_text("neither")
    return tmp_path


def test_entries_have_their_states(run_json: RunJson, directory: Path) -> None:
    code, document = run_json(ListDocument, "ls", directory)
    assert code == 0
    assert {entry["name"]: entry["state"] for entry in document["checkpoints"]} == {
        ".step_4.0123456789abcdef.ckptcore": "leftover",
        "bare.safetensors": "foreign",
        "hugging_face": "foreign",
        "step_1": "committed",
        "step_2": "corrupt",
        "step_3": "uncommitted",
    }
    entries = {entry["name"]: entry for entry in document["checkpoints"]}
    assert (entries["step_1"]["layout"], entries["step_1"]["arrays"], entries["step_1"]["nbytes"]) == (
        "safetensors",
        1,
        4000,
    )
    assert entries["step_1"]["created"] == ckptcore.metadata(directory / "step_1").created
    assert entries["step_1"]["writer"].startswith("ckptcore ") and "writer" not in entries["step_2"]
    assert "checkpoint.json" in entries["step_2"]["error"]


def test_text_has_a_line_for_each_entry(run: Run, directory: Path) -> None:
    lines = run("ls", directory).stdout.splitlines()
    assert len(lines) == 6
    created = ckptcore.metadata(directory / "step_1").created
    (line,) = [line for line in lines if line.startswith("step_1")]
    assert line.split() == ["step_1", "committed", "safetensors", "4.00", "kB", "1", "array", created]
    (line,) = [line for line in lines if line.startswith("bare.safetensors")]
    assert line.endswith(f"1 array  by {ckptcore.metadata(directory / 'bare.safetensors').writer}")


def test_tied_arrays_count_once(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    assert run_json(ListDocument, "ls", checkpoint)[1]["checkpoints"][0]["arrays"] == 4
    assert " 66 B           4 arrays  " in run("ls", checkpoint).stdout


@pytest.mark.parametrize("created", ["\x1b]0;title\x07", "\ud800"])
def test_a_time_cannot_steer_the_terminal(run: Run, tmp_path: Path, created: str) -> None:
    ckptcore.save(tmp_path / "c", {"x": 1})
    path = tmp_path / "c" / "checkpoint.json"
    root = decode_root(path.read_bytes(), lambda key, size: b"")
    assert isinstance(root, Root)
    path.write_bytes(encode_root(dataclasses.replace(root, created=created))[0])
    result = run("ls", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith(f"  {ascii(created)[1:-1]}\n")


def test_a_newer_version_is_unreadable_here(run_json: RunJson, tmp_path: Path) -> None:
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "checkpoint.json").write_bytes(sealed({"format": "ckptcore", "version": 999}))
    code, document = run_json(ListDocument, "ls", tmp_path)
    assert code == 0
    assert document["checkpoints"][0]["state"] == "unreadable"
    assert "upgrade" in document["checkpoints"][0]["error"]


def test_missing_files_are_found(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    for name in ("good", "bad"):
        ckptcore.save(tmp_path / name, {"w": np.ones(4)})
    (tmp_path / "bad" / "model.safetensors").unlink()
    code, document = run_json(ListDocument, "ls", tmp_path)
    bad, good = document["checkpoints"]
    assert (code, bad["state"], good["state"]) == (0, "incomplete", "committed")
    assert (bad["error"], bad["nbytes"]) == ("model.safetensors is missing", 32)
    assert bad["problems"][0]["object"] == "model.safetensors" and "problems" not in good
    (line,) = [line for line in run("ls", tmp_path).stdout.splitlines() if line.startswith("bad")]
    assert line.startswith("bad   incomplete  safetensors") and line.endswith("  model.safetensors is missing")


def test_a_checkpoint_lists_itself(run_json: RunJson, checkpoint: Path) -> None:
    _, document = run_json(ListDocument, "ls", checkpoint)
    assert [entry["state"] for entry in document["checkpoints"]] == ["committed"]


def test_an_empty_directory(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    code, document = run_json(ListDocument, "ls", tmp_path)
    assert (code, document["checkpoints"]) == (0, [])
    assert run("ls", tmp_path).stdout == f"no checkpoints in {tmp_path}\n"


def test_a_missing_directory_is_an_error(run_json: RunJson, tmp_path: Path) -> None:
    code, document = run_json(ErrorDocument, "ls", tmp_path / "nothing")
    assert code == 3
    assert document["error"] == "CheckpointNotFoundError"


def test_a_file_is_not_a_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no checkpoint")
    assert run("ls", tmp_path / "notes.txt").exit_code == 3


def test_a_url(run_json: RunJson, directory: Path) -> None:
    code, document = run_json(ListDocument, "ls", f"file://{directory}")
    assert code == 0
    assert len(document["checkpoints"]) == 6


@pytest.mark.parametrize("name", ["100%20", "a b", "#1?", "é"])
def test_a_name_that_a_url_escapes(run_json: RunJson, tmp_path: Path, name: str) -> None:
    ckptcore.save(tmp_path / name, {"x": 1})
    for directory in (tmp_path, tmp_path.as_uri()):
        _, document = run_json(ListDocument, "ls", directory)
        assert [(entry["name"], entry["state"]) for entry in document["checkpoints"]] == [(name, "committed")]


def test_a_url_that_nothing_opens(run_json: RunJson) -> None:
    code, document = run_json(ErrorDocument, "ls", "nothing://directory")
    assert code == 5
    assert document["error"] == "UnknownPluginError"
