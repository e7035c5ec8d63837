"""The commands on checkpoints of several checkpointables."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks

import ckptcore
from plugins.tools.tests.cli.conftest import Run, RunJson, flip
from plugins.tools.tests.cli.expected_documents import (
    CheckpointablesDocument,
    ConvertDocument,
    DiffDocument,
    ErrorDocument,
    InspectDocument,
    ListDocument,
    VerifyDocument,
)
from plugins.tools.tests.cli.runs import Iterator, Notes, checkpointables


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A checkpoint of several checkpointables."""
    location = tmp_path / "several"
    ckptcore.save_checkpointables(location, checkpointables(), metadata={"accuracy": 0.5})
    return location


def test_inspect_shows_each(run: Run, several: Path) -> None:
    metadata = ckptcore.metadata(several)
    model, data = (metadata.checkpointables[name].objects["model.safetensors"].size for name in ("model", "data"))
    result = run("inspect", several)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        str(several),
        f"  written by {metadata.writer}",
        f"  created    {metadata.created}",
        f"  save id    {metadata.save_id}",
        "  content    3 checkpointables of 153 B",
        '  custom     {"accuracy": 0.5}',
        "",
        f"model  safetensors, 1 array of 48 B, in 1 object of {model} B",
        "<root>  dict                48 B  1 array, 12 parameters",
        "└─ w    float32[3, 4]       48 B",
        "",
        f"data  safetensors, 1 value, in 1 object of {data} B",
        "<root>       dict",
        "└─ position  int              3",
        "",
        "notes  2 files of 105 B",
        "      5 B  deep/a.txt",
        "    100 B  deep/b.txt",
    ]


def test_inspect_with_statistics_and_a_filter(run: Run, run_json: RunJson, several: Path) -> None:
    lines = run("inspect", several, "--statistics", "--filter", "w").stdout.splitlines()
    assert "└─ w    float32[3, 4]       48 B         0        11       5.5      3.45      22.5  1 zero" in lines
    assert lines.count("no leaf matches the filter") == 1
    _, document = run_json(CheckpointablesDocument, "inspect", several, "--statistics")
    model, data, notes = document["checkpointables"]
    assert [leaf["statistics"]["maximum"] for leaf in model["leaves"]] == [11]
    assert ["statistics" in leaf for leaf in data["leaves"]] == [False] and notes["leaves"] == []


def test_inspect_as_json(run_json: RunJson, several: Path) -> None:
    code, document = run_json(CheckpointablesDocument, "inspect", several)
    assert code == 0
    assert document["custom"] == {"accuracy": 0.5}
    members = {entry["name"]: entry for entry in document["checkpointables"]}
    assert {name: entry["kind"] for name, entry in members.items()} == {
        "model": "tree",
        "data": "tree",
        "notes": "files",
    }
    assert [leaf["path"] for leaf in members["model"]["leaves"]] == ["w"]
    assert [(entry["key"], entry["size"]) for entry in members["notes"]["objects"]] == [
        ("deep/a.txt", 5),
        ("deep/b.txt", 100),
    ]
    assert (members["notes"]["leaves"], document["deleted"]) == ([], [])
    assert [event["phase"] for event in document["timeline"]] == [
        event.phase for event in ckptcore.metadata(several).timeline
    ]


def test_deleted_checkpointables_are_named(run: Run, run_json: RunJson, several: Path) -> None:
    ckptcore.delete(several / "data")
    assert "  deleted    data" in run("inspect", several).stdout.splitlines()
    assert run_json(CheckpointablesDocument, "inspect", several)[1]["deleted"] == ["data"]


def test_a_member_by_its_own_location(run: Run, run_json: RunJson, several: Path) -> None:
    assert run_json(InspectDocument, "inspect", several / "model")[1]["totals"]["nbytes"] == 48
    assert run("inspect", several / "notes").stdout.splitlines()[-2:] == [
        "      5 B  deep/a.txt",
        "    100 B  deep/b.txt",
    ]


def headline(lines: list[str]) -> str:
    """Return the first line of a timeline, which names the save."""
    (line,) = [line for line in lines if line.startswith("save ")]
    return line


def test_the_timeline_of_a_save(run: Run, run_json: RunJson, several: Path, checkpoint: Path) -> None:
    for location in (several, checkpoint):
        lines = run("inspect", "--timeline", location).stdout.splitlines()
        phases = [line.split()[0] for line in lines if line]
        assert " UTC" in headline(lines)
        assert {"phase", "claim", "write"} <= set(phases)
        assert "<root>" not in phases
    _, document = run_json(InspectDocument, "inspect", checkpoint)
    assert {"claim", "write"} <= {event["phase"] for event in document["timeline"]}
    assert all(event["seconds"] >= 0 for event in document["timeline"])


def test_no_timeline(run: Run, several: Path) -> None:
    result = run("inspect", "--timeline", several / "model")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("no timeline: ")


def test_metrics_of_a_step(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"x": 1}, metrics={"loss": float("nan"), "accuracy": 0.5})
    assert "  metrics    loss=nan accuracy=0.5" in run("inspect", tmp_path / "run" / "1").stdout.splitlines()
    assert run_json(InspectDocument, "inspect", tmp_path / "run" / "1")[1]["metrics"] == {
        "loss": "nan",
        "accuracy": 0.5,
    }


def test_ls(run: Run, run_json: RunJson, several: Path) -> None:
    _, document = run_json(ListDocument, "ls", several.parent)
    (entry,) = document["checkpoints"]
    assert (entry["state"], entry["layout"], entry["nbytes"], entry["arrays"]) == ("committed", "composite", 153, 1)
    assert entry["checkpointables"] == ["model", "data", "notes"]
    assert "  composite       153 B  3 checkpointables  " in run("ls", several.parent).stdout


def test_ls_of_a_run(run_json: RunJson, tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path) as checkpointer:
        for step in (9, 10, 100):
            checkpointer.save(step, {"x": 1})
    assert [entry["name"] for entry in run_json(ListDocument, "ls", tmp_path)[1]["checkpoints"]] == ["9", "10", "100"]


def test_verify(run: Run, run_json: RunJson, several: Path) -> None:
    assert run_json(VerifyDocument, "verify", several)[1]["ok"]
    flip(several / "notes" / "deep" / "a.txt", 0)
    code, document = run_json(VerifyDocument, "verify", several)
    assert (code, document["problems"][0]["object"]) == (1, "notes/deep/a.txt")
    assert run("verify", several).stdout.splitlines()[0].startswith("notes/deep/a.txt bytes 0")


def test_verify_names_deleted_checkpointables(run: Run, run_json: RunJson, several: Path) -> None:
    ckptcore.delete(several / "notes")
    result = run("verify", several)
    assert result.exit_code == 0
    assert run_json(VerifyDocument, "verify", several)[1]["deleted"] == ["notes"]
    assert "missing notes: deleted or lost" in result.stdout


def test_convert(run: Run, run_json: RunJson, several: Path, tmp_path: Path) -> None:
    code, document = run_json(ConvertDocument, "convert", several, tmp_path / "copy")
    assert (code, document["nbytes"], document["arrays"]) == (0, 153, 1)
    assert document["checkpointables"] == ["model", "data", "notes"]
    text = run("convert", several, tmp_path / "copy", "--overwrite").stdout
    assert text == f"written: 3 checkpointables of 153 B to {tmp_path / 'copy'} as safetensors\n"
    assert run("diff", several, tmp_path / "copy").exit_code == 0


def test_diff_of_equal_checkpoints(run: Run, run_json: RunJson, several: Path) -> None:
    code, document = run_json(DiffDocument, "diff", several, several)
    assert (code, document["leaves_compared"], document["files_compared"]) == (0, 2, 2)
    assert document["nbytes_compared"] == 153
    text = run("diff", several, several).stdout
    assert text == "the same: 2 leaves, 2 files, 153 B of elements and files compared\n"


def test_diff_name_by_name(run: Run, run_json: RunJson, several: Path, tmp_path: Path) -> None:
    other: dict[str, Any] = checkpointables()
    other["model"]["w"][1, 1] += 2
    other["notes"] = Notes(a="hallo", b="x" * 99, c="new")
    other["rng"] = {"seed": 1}
    del other["data"]
    ckptcore.save_checkpointables(tmp_path / "other", other)
    code, document = run_json(DiffDocument, "diff", several, tmp_path / "other")
    assert code == 1
    assert [(entry["checkpointable"], entry["path"], entry["kind"]) for entry in document["differences"]] == [
        ("data", "<root>", "only_in_a"),
        ("notes", "deep/b.txt", "size"),
        ("notes", "deep/c.txt", "only_in_b"),
        ("rng", "<root>", "only_in_b"),
        ("model", "w", "values"),
        ("notes", "deep/a.txt", "bytes"),
    ]
    assert run("diff", several, tmp_path / "other").stdout.splitlines() == [
        "- data  only in A: tree",
        "~ notes: deep/b.txt  size: 100 -> 99 bytes",
        "+ notes: deep/c.txt  only in B: file",
        "+ rng  only in B: tree",
        "~ model: w  1 of 12 elements differ, max abs error 2",
        "~ notes: deep/a.txt  1 of 5 bytes differ",
        "6 differences: 1 leaf, 2 files, 53 B of elements and files compared",
    ]
    _, document = run_json(DiffDocument, "diff", several, tmp_path / "other", "--no-values")
    assert len(document["differences"]) == 4


def test_diff_of_different_kinds(run: Run, run_json: RunJson, several: Path, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "tree", {"w": 1})
    code, document = run_json(DiffDocument, "diff", several, tmp_path / "tree")
    assert code == 1
    (difference,) = document["differences"]
    assert (difference["kind"], difference["a"], difference["b"]) == (
        "structure",
        "checkpointables model, data, notes",
        "one tree",
    )
    ckptcore.save_checkpointables(tmp_path / "other", {**checkpointables(), "notes": {"x": 1}})
    text = run("diff", several, tmp_path / "other").stdout
    assert text.splitlines()[0] == "~ notes  structure: files -> tree"


def test_damage_to_a_file_is_an_error_and_not_a_difference(run_json: RunJson, several: Path, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "other", checkpointables())
    flip(several / "notes" / "deep" / "a.txt", 0)
    assert run_json(ErrorDocument, "diff", several, tmp_path / "other")[0] == 4


def test_a_damaged_member_gives_no_traceback(run: Run, several: Path) -> None:
    flip(several / "model" / "checkpoint.json", 70)
    for command in ("inspect", "verify", "ls"):
        result = run(command, several)
        assert result.exit_code in (1, 4) or (command == "ls" and "corrupt" in result.stdout), result.output
        assert "Traceback" not in result.output


def test_states_of_several_processes(run: Run, run_json: RunJson) -> None:
    location = f"memory://{uuid.uuid4()}/step"

    def save(rank: int, context: ckptcore.Context) -> None:
        values = {
            "model": {"w": np.ones(3)},
            "data": ckptcore.PerProcess(Iterator(rank)),
        }
        ckptcore.save_checkpointables(location, values, context=context)

    run_ranks(2, save)
    _, document = run_json(CheckpointablesDocument, "inspect", location)
    assert {entry["name"]: entry["processes"] for entry in document["checkpointables"]} == {"model": None, "data": 2}
    text = run("inspect", location).stdout
    assert "; saved by 2 processes separately, showing data.rank_0" in text
    assert run_json(InspectDocument, "inspect", f"{location}/data.rank_1")[1]["leaves"][0]["value"] == 1
    _, document = run_json(DiffDocument, "diff", location, location)
    assert (document["same"], document["leaves_compared"]) == (True, 3)


def test_the_first_state_that_exists_is_shown(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    def save(rank: int, context: ckptcore.Context) -> None:
        values = {"data": ckptcore.PerProcess({"w": np.full(3, rank)})}
        ckptcore.save_checkpointables(tmp_path / "c", values, context=context)

    run_ranks(3, save)
    shutil.rmtree(tmp_path / "c" / "data.rank_0")
    text = run("inspect", tmp_path / "c").stdout
    assert "; saved by 3 processes separately, showing data.rank_1" in text
    _, document = run_json(CheckpointablesDocument, "inspect", tmp_path / "c", "--statistics")
    assert document["checkpointables"][0]["leaves"][0]["statistics"]["maximum"] == 1
