"""The commands on checkpoints with several checkpointables that other software wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore import plugins
from ckptcore.context import default_context
from plugins.tools.tests.cli.conftest import Run, RunJson, flip
from plugins.tools.tests.cli.expected_documents import (
    CheckpointablesDocument,
    ConvertDocument,
    DiffDocument,
    ErrorDocument,
    InspectDocument,
    ListDocument,
    StepsDocument,
    VerifyDocument,
)
from tests.composites.foreign_format import ShelfPlugin, put_on_shelf

CREATED = "2026-01-02T03:04:05+00:00"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the plugin of the test layout, because commands use only installed plugins."""
    having = plugins.installed_plugins().with_plugins([ShelfPlugin()], {})
    monkeypatch.setattr("ckptcore.runtime.installed_plugins", lambda: having)
    default_context.cache_clear()
    yield
    default_context.cache_clear()


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A checkpoint with a tree and files."""
    directory = tmp_path / "theirs" / "step_7"
    params = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    put_on_shelf(
        directory,
        {"params": params},
        {"data": {"a": b"hello"}},
        created=CREATED,
        custom={"run": 1},
        metrics={"loss": 0.5},
    )
    return directory


def strange(shelf: Path) -> Path:
    (shelf / "ema").mkdir()
    (shelf / "ema" / "strange").write_bytes(b"?")
    return shelf


def test_inspect(run: Run, run_json: RunJson, shelf: Path) -> None:
    code, document = run_json(CheckpointablesDocument, "inspect", shelf)
    assert (code, document["save_id"], document["created"], document["writer"]) == (0, None, CREATED, "shelfware 3")
    assert document["custom"] == {"run": 1} and document["metrics"] == {"loss": 0.5} and "unreadable" not in document
    assert [(member["name"], member["kind"], member["layout"]) for member in document["checkpointables"]] == [
        ("data", "files", "files"),
        ("params", "tree", "shelf"),
    ]
    text = run("inspect", shelf).stdout
    assert "save id" not in text and "params  shelf, 1 array of 48 B" in text
    assert run_json(InspectDocument, "inspect", shelf / "params")[1]["totals"]["nbytes"] == 48


def test_inspect_shows_all_members_if_a_plain_load_returns_one(run_json: RunJson, tmp_path: Path) -> None:
    put_on_shelf(tmp_path / "c", {"tree": {"w": np.ones(2)}, "ema": {"w": np.ones(2)}})
    _, document = run_json(CheckpointablesDocument, "inspect", tmp_path / "c")
    assert [member["name"] for member in document["checkpointables"]] == ["ema", "tree"]
    put_on_shelf(tmp_path / "one", {"tree": {"w": np.ones(2)}})
    assert run_json(InspectDocument, "inspect", tmp_path / "one")[1]["schema"] == "ckptcore.inspect/1"


def test_unsupported_members_are_named(run: Run, run_json: RunJson, shelf: Path) -> None:
    code, document = run_json(CheckpointablesDocument, "inspect", strange(shelf))
    assert code == 0 and list(document["unreadable"]) == ["ema"]
    assert "ema  cannot be read: " in run("inspect", shelf).stdout
    assert run_json(VerifyDocument, "verify", shelf)[1]["problems"][0]["object"] == "ema"
    code, error = run_json(ErrorDocument, "diff", shelf, shelf)
    assert (code, error["error"]) == (3, "CheckpointNotFoundError") and "'ema'" in error["message"]
    assert "To compare another checkpointable, give its own location" in error["message"]
    assert run("diff", shelf / "params", shelf / "params").exit_code == 0


def test_ls(run_json: RunJson, shelf: Path) -> None:
    (entry,) = run_json(ListDocument, "ls", shelf.parent)[1]["checkpoints"]
    assert (entry["name"], entry["state"], entry["layout"], entry["created"]) == (
        "step_7",
        "foreign",
        "composite",
        CREATED,
    )
    assert entry["checkpointables"] == ["data", "params"] and (entry["nbytes"], entry["arrays"]) == (53, 1)


def test_steps(run_json: RunJson, shelf: Path) -> None:
    (step,) = run_json(StepsDocument, "steps", shelf.parent)[1]["steps"]
    assert (step["step"], step["state"], step["nbytes"], step["metrics"]) == (7, "foreign", 53, {"loss": 0.5})


def test_verify(run: Run, run_json: RunJson, shelf: Path) -> None:
    code, document = run_json(VerifyDocument, "verify", shelf)
    assert (code, document["ok"], document["nbytes"]) == (0, True, 53)
    assert document["unverified"] == ["data/a", "params/0.bin"]
    (shelf / "params" / "0.bin").write_bytes(b"")
    assert run("verify", shelf).exit_code == 1


def test_convert(run: Run, run_json: RunJson, shelf: Path, tmp_path: Path) -> None:
    code, document = run_json(ConvertDocument, "convert", shelf, tmp_path / "ours")
    assert (code, document["checkpointables"], document["nbytes"]) == (0, ["data", "params"], 53)
    assert list(ckptcore.load_checkpointables(tmp_path / "ours")["params"]) == ["w"]
    assert run("diff", shelf, tmp_path / "ours").exit_code == 0
    assert run_json(ConvertDocument, "convert", tmp_path / "ours", tmp_path / "back", "--layout", "shelf")[0] == 0
    assert list(json.loads((tmp_path / "back" / "SHELF").read_text())["members"]) == ["data", "params"]


def test_diff(run: Run, run_json: RunJson, shelf: Path, tmp_path: Path) -> None:
    assert run("diff", shelf, shelf).stdout == "the same: 1 leaf, 1 file, 53 B of elements and files compared\n"
    ckptcore.copy(shelf, tmp_path / "ours", layout="safetensors")
    flip(shelf / "data" / "a", 0)
    code, document = run_json(DiffDocument, "diff", shelf, tmp_path / "ours")
    assert code == 1
    assert [
        (difference["checkpointable"], difference["path"], difference["kind"]) for difference in document["differences"]
    ] == [("data", "a", "bytes")]
