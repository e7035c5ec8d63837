"""``ckptcore inspect``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptcore
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim
from plugins.tools.tests.cli.conftest import Run, RunJson, flip
from plugins.tools.tests.cli.expected_documents import ErrorDocument, InspectDocument


def test_shows_everything_in_the_tree(run: Run, checkpoint: Path) -> None:
    result = run("inspect", checkpoint)
    assert result.exit_code == 0, result.stderr
    found = ckptcore.metadata(checkpoint)
    assert result.stdout.splitlines() == [
        str(checkpoint),
        "  layout     safetensors",
        f"  written by {found.writer}",
        f"  created    {found.created}",
        f"  save id    {found.save_id}",
        f"  content    5 arrays of 66 B, 4 values, in 1 object of {next(iter(found.objects.values())).size} B",
        '  custom     {"accuracy": 0.5}',
        "",
        "<root>        dict",
        "├─ params     dict",
        "│  ├─ w       float32[3, 4]              48 B",
        "│  ├─ tied    float32[3, 4]                    = params/w",
        "│  └─ half    bfloat16[5]                10 B",
        "├─ moments    list",
        "│  ├─ [0]     tuple",
        "│  │  ├─ [0]  numpy.scalar int64[]        8 B",
        "│  │  └─ [1]  float64[0, 2]               0 B",
        "│  └─ [1]     dict                             empty",
        "├─ step       int                              5",
        '├─ rate       float                            "nan"',
        '├─ name       str                              "run"',
        "└─ missing    none                             null",
    ]


def test_depth_sums_up_what_lies_deeper(run: Run, checkpoint: Path) -> None:
    lines = run("inspect", checkpoint, "--depth", "1").stdout.splitlines()
    assert "├─ params   dict        58 B  … 3 leaves" in lines
    assert "├─ moments  list         8 B  … 2 leaves" in lines
    assert "├─ step     int               5" in lines


def test_objects_are_listed(run: Run, checkpoint: Path) -> None:
    assert run("inspect", checkpoint, "--objects").stdout.splitlines()[-1].endswith("B  model.safetensors")


def test_json_has_everything(run_json: RunJson, checkpoint: Path) -> None:
    code, document = run_json(InspectDocument, "inspect", checkpoint)
    assert code == 0
    assert document["custom"] == {"accuracy": 0.5}
    assert document["totals"]["arrays"] == 5
    assert document["totals"]["values"] == 4
    assert document["totals"]["nbytes"] == 66
    assert document["totals"]["object_bytes"] == (checkpoint / "model.safetensors").stat().st_size
    assert [(one["path"], one["kind"], one["children"]) for one in document["containers"]] == [
        ("<root>", "dict", 6),
        ("params", "dict", 3),
        ("moments", "list", 2),
        ("moments[0]", "tuple", 2),
        ("moments[1]", "dict", 0),
    ]
    leaves = {leaf["path"]: leaf for leaf in document["leaves"]}
    assert leaves["params/w"] == {
        "path": "params/w",
        "keys": ["params", "w"],
        "kind": "array",
        "dtype": "float32",
        "shape": [3, 4],
        "nbytes": 48,
        "shares": None,
        "notes": {},
    }
    assert (leaves["params/tied"]["shares"], leaves["params/tied"]["nbytes"]) == ("params/w", 0)
    assert leaves["moments[0][1]"]["keys"] == ["moments", 0, 1]
    assert leaves["step"]["value"] == 5
    assert leaves["missing"]["value"] is None


def test_missing_files_are_found(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    assert run_json(InspectDocument, "inspect", checkpoint)[1]["problems"] == []
    assert "damaged" not in run("inspect", checkpoint).stdout
    (checkpoint / "model.safetensors").unlink()
    result = run("inspect", checkpoint)
    assert result.exit_code == 0
    assert (
        f"  damaged    model.safetensors is missing. Run `ckptcore verify {checkpoint}` to check every byte"
        in result.stdout.splitlines()
    )
    assert "<root>" in result.stdout
    code, document = run_json(InspectDocument, "inspect", checkpoint)
    assert code == 0
    assert [problem["message"] for problem in document["problems"]] == ["model.safetensors is missing"]


def test_a_file_of_other_software(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    save_file({"a.b": np.ones((2, 3), np.float16)}, tmp_path / "model.safetensors", {"format": "pt"})
    code, document = run_json(InspectDocument, "inspect", tmp_path / "model.safetensors")
    assert code == 0
    assert (document["layout"], document["save_id"], document["created"]) == ("safetensors", None, None)
    assert [leaf["path"] for leaf in document["leaves"]] == ["['a.b']"]
    text = run("inspect", tmp_path / "model.safetensors").stdout
    assert "a.b  float16[2, 3]       12 B" in text
    assert "save id" not in text


def test_names_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    hostile = {"\x1b[31mred": np.ones(1), "[bold]x[/bold]": "\x1b]0;title\x07", "new\nline": 1}
    ckptcore.save(tmp_path / "hostile", hostile)
    text = run("inspect", tmp_path / "hostile").stdout
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b[31mred" in text
    assert "[bold]x[/bold]" in text
    assert "new\\nline" in text


def test_a_tree_that_is_one_leaf(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "leaf", np.ones(3))
    assert run("inspect", tmp_path / "leaf").stdout.splitlines()[-1] == "<root>  float64[3]       24 B"
    _, document = run_json(InspectDocument, "inspect", tmp_path / "leaf")
    assert document["containers"] == []
    assert document["leaves"][0]["keys"] == []


def test_nothing_there(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "nothing")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "does not exist or is empty" in result.stderr
    assert result.stderr.count("\n") == 1
    code, document = run_json(ErrorDocument, "inspect", tmp_path / "nothing")
    assert code == document["exit_code"] == 3
    assert document["error"] == "CheckpointNotFoundError"


def test_an_unfinished_save(run_json: RunJson, tmp_path: Path) -> None:
    (tmp_path / "claimed").mkdir()
    (tmp_path / "claimed" / "checkpoint.json").write_bytes(encode_claim(Claim("0" * 16, "2026-01-01T00:00:00+00:00")))
    code, document = run_json(ErrorDocument, "inspect", tmp_path / "claimed")
    assert code == 3
    assert document["error"] == "UncommittedCheckpointError"


@pytest.mark.parametrize("offset", [0, 100, -3])
def test_a_damaged_root(run: Run, checkpoint: Path, offset: int) -> None:
    flip(checkpoint / "checkpoint.json", offset)
    result = run("inspect", checkpoint)
    assert result.exit_code == 4
    assert "checkpoint.json" in result.stderr
    assert result.stderr.count("\n") == 1
