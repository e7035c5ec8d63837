"""``ckptcore inspect``."""

from __future__ import annotations

import io
import re
import sys
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
    metadata = ckptcore.metadata(checkpoint)
    assert result.stdout.splitlines() == [
        str(checkpoint),
        "  layout     safetensors",
        f"  written by {metadata.writer}",
        f"  created    {metadata.created}",
        f"  save id    {metadata.save_id}",
        f"  content    4 arrays of 66 B, 4 values, in 1 object of {next(iter(metadata.objects.values())).size} B",
        '  custom     {"accuracy": 0.5}',
        "",
        "<root>        dict                       66 B  4 arrays, 18 parameters",
        "├─ params     dict                       58 B  2 arrays, 17 parameters",
        "│  ├─ w       float32[3, 4]              48 B",
        "│  ├─ tied    float32[3, 4]                    = params/w",
        "│  └─ half    bfloat16[5]                10 B",
        "├─ moments    list                        8 B  2 arrays, 1 parameter",
        "│  ├─ [0]     tuple                       8 B  2 arrays, 1 parameter",
        "│  │  ├─ [0]  numpy.scalar int64[]        8 B",
        "│  │  └─ [1]  float64[0, 2]               0 B",
        "│  └─ [1]     dict                             empty",
        "├─ step       int                              5",
        '├─ rate       float                            "nan"',
        '├─ name       str                              "run"',
        "└─ missing    none                             null",
    ]


def test_depth_summarizes_deeper_levels(run: Run, checkpoint: Path) -> None:
    lines = run("inspect", checkpoint, "--depth", "1").stdout.splitlines()
    assert "├─ params   dict        58 B  2 arrays, 17 parameters …" in lines
    assert "├─ moments  list         8 B  2 arrays, 1 parameter …" in lines
    assert "├─ step     int               5" in lines


def test_names_with_dots_are_shown_as_a_tree(run: Run, tmp_path: Path) -> None:
    names = [f"layers.{number}.{name}" for number in range(2) for name in ("weight", "bias")]
    ckptcore.save(tmp_path / "c", {name: np.ones(3, np.float32) for name in (*names, "head.weight")})
    assert run("inspect", tmp_path / "c").stdout.splitlines()[-9:] == [
        "<root>           dict             60 B  5 arrays, 15 parameters",
        "├─ layers                         48 B  4 arrays, 12 parameters",
        "│  ├─ 0                           24 B  2 arrays, 6 parameters",
        "│  │  ├─ weight  float32[3]       12 B",
        "│  │  └─ bias    float32[3]       12 B",
        "│  └─ 1                           24 B  2 arrays, 6 parameters",
        "│     ├─ weight  float32[3]       12 B",
        "│     └─ bias    float32[3]       12 B",
        "└─ head.weight   float32[3]       12 B",
    ]
    lines = run("inspect", tmp_path / "c", "--depth", 2).stdout.splitlines()
    assert "│  ├─ 0                          24 B  2 arrays, 6 parameters …" in lines
    assert not any("bias" in line for line in lines)


@pytest.mark.parametrize(
    ("pattern", "leaves"),
    [
        ("half", ["params/half"]),
        ("params/", ["params/w", "params/tied", "params/half"]),
        ("moments/*/1", ["moments[0][1]"]),
        ("**/[wh]*", ["params/w", "params/half"]),
        ("mom*", ["moments[0][0]", "moments[0][1]"]),
        ("HALF", []),
    ],
)
def test_filter_chooses_leaves(run: Run, run_json: RunJson, checkpoint: Path, pattern: str, leaves: list[str]) -> None:
    code, document = run_json(InspectDocument, "inspect", checkpoint, "--filter", pattern)
    assert (code, [leaf["path"] for leaf in document["leaves"]]) == (0, leaves)
    assert document["totals"]["arrays"] == 4
    text = run("inspect", checkpoint, "--filter", pattern).stdout.partition("\n\n")[2]
    assert ("half" in text, "  step" in text) == ("params/half" in leaves, False)
    assert (text == "no leaf matches the filter\n") == (not leaves)


def test_a_filter_shows_totals_of_matching_leaves(run: Run, checkpoint: Path) -> None:
    assert run("inspect", checkpoint, "--filter", "half").stdout.splitlines()[-3:] == [
        "<root>      dict              10 B  1 array, 5 parameters",
        "└─ params   dict              10 B  1 array, 5 parameters",
        "   └─ half  bfloat16[5]       10 B",
    ]


def test_an_invalid_filter(run: Run, checkpoint: Path) -> None:
    result = run("inspect", checkpoint, "--filter", "a[")
    assert result.exit_code == 2
    assert "'[' is not closed" in result.stderr


def test_statistics(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    lines = run("inspect", checkpoint, "--statistics").stdout.partition("\n\n")[2].splitlines()
    assert lines[0].split() == ["size", "min", "max", "mean", "std", "norm"]
    assert lines[3].split()[2:] == ["w", "float32[3,", "4]", "48", "B", "0", "11", "5.5", "3.45", "22.5", "1", "zero"]
    assert lines[4].split("]")[1].split() == ["0", "11", "5.5", "3.45", "22.5", "1", "zero,", "=", "params/w"]
    assert lines[5].split()[3:] == ["bfloat16[5]", "10", "B", "1", "1", "1", "0", "2.24"]
    assert {line.index("11") for line in lines[3:5]} == {lines[0].index("max") + 1}
    assert next(line for line in lines if "float64[0, 2]" in line).endswith(" 0 B")
    _, document = run_json(InspectDocument, "inspect", checkpoint, "--statistics")
    statistics = {leaf["path"]: leaf.get("statistics") for leaf in document["leaves"]}
    assert statistics["params/w"] == statistics["params/tied"] == {
        "elements": 12, "nan": 0, "infinite": 0, "zeros": 1, "minimum": 0.0, "maximum": 11.0, "mean": 5.5,
        "deviation": pytest.approx(3.452, abs=1e-3), "norm": pytest.approx(22.494, abs=1e-3),
    }  # fmt: skip
    assert (statistics["step"], statistics["moments[0][1]"]["minimum"]) == (None, None)


def test_statistics_count_special_elements(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    array = np.array([np.nan, np.inf, -np.inf, 0, 0, 3], np.float32)
    ckptcore.save(tmp_path / "c", {"w": array, "text": "none", "when": np.array(["2026-01-01"], "M8[D]")})
    text = run("inspect", tmp_path / "c", "--statistics").stdout
    assert "1 NaN, 2 inf, 2 zeros" in text
    _, document = run_json(InspectDocument, "inspect", tmp_path / "c", "--statistics")
    assert [leaf.get("statistics", {}).get("norm") for leaf in document["leaves"]] == [3.0, None, None]


def test_statistics_read_no_text(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save(
        tmp_path / "c", {"none": np.empty(0, "U3"), "text": np.full(1 << 9, "a" * (1 << 10)), "x": np.ones(2)}
    )
    flip(tmp_path / "c" / "model.safetensors", 3 << 19)  # in a block that contains only text
    result = run("inspect", tmp_path / "c", "--statistics")
    assert result.exit_code == 0, result.stderr
    _, document = run_json(InspectDocument, "inspect", tmp_path / "c", "--statistics")
    assert ["statistics" in leaf for leaf in document["leaves"]] == [False, False, True]


@pytest.mark.parametrize("arguments", [("--filter", "params/a"), ("--depth", "1"), ("--timeline",)])
def test_statistics_read_only_the_shown_arrays(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    state = {"params": {"a": np.ones(3), "b": np.ones(1 << 18)}, "x": np.full(5, 2.0)}
    ckptcore.save(tmp_path / "c", state)
    flip(tmp_path / "c" / "model.safetensors", 3 << 19)  # in a block that contains only "b"
    result = run("inspect", tmp_path / "c", "--statistics", *arguments)
    assert result.exit_code == 0, result.stderr
    assert run("inspect", tmp_path / "c", "--statistics").exit_code == 4


class _Terminal(io.StringIO):
    """A terminal that records its output."""

    def isatty(self) -> bool:
        return True


def test_lines_fit_a_terminal(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptcore_tools.cli.application import application

    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, text in (("COLUMNS", "45"), ("TERM", "xterm")):
        monkeypatch.setenv(name, text)
    application(["inspect", str(checkpoint)], standalone_mode=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).partition("\n\n")[2].splitlines()
    assert lines[:3] == [
        "<root>        dict                       66 B",
        "├─ params     dict                       58 B",
        "│  ├─ w       float32[3, 4]              48 B",
    ]
    assert "\x1b[36mfloat32[3, 4]" in terminal.getvalue()


def test_objects_are_listed(run: Run, checkpoint: Path) -> None:
    assert run("inspect", checkpoint, "--objects").stdout.splitlines()[-1].endswith("B  model.safetensors")


def test_json_has_everything(run_json: RunJson, checkpoint: Path) -> None:
    code, document = run_json(InspectDocument, "inspect", checkpoint)
    assert code == 0
    assert document["custom"] == {"accuracy": 0.5}
    assert document["totals"]["arrays"] == 4
    assert document["totals"]["values"] == 4
    assert document["totals"]["nbytes"] == 66
    assert document["totals"]["object_bytes"] == (checkpoint / "model.safetensors").stat().st_size
    assert [(container["path"], container["kind"], container["children"]) for container in document["containers"]] == [
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


def test_long_lists_of_numbers(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"v": [*range(2000), float("nan")], "d": dict.fromkeys(range(1000), 2)})
    shown = run("inspect", tmp_path / "c").stdout
    assert "2,001 int or float" in shown
    assert "1,000 int" in shown
    _, document = run_json(InspectDocument, "inspect", tmp_path / "c")
    leaves = {leaf["path"]: leaf for leaf in document["leaves"]}
    assert leaves["v"]["value"] == [*range(2000), "nan"]
    assert leaves["d"]["value"] == {str(key): 2 for key in range(1000)}


def test_a_tree_that_is_one_leaf(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "leaf", np.ones(3))
    assert run("inspect", tmp_path / "leaf").stdout.splitlines()[-1] == "<root>  float64[3]       24 B"
    _, document = run_json(InspectDocument, "inspect", tmp_path / "leaf")
    assert document["containers"] == []
    assert document["leaves"][0]["keys"] == []


def test_a_missing_checkpoint_is_an_error(run: Run, run_json: RunJson, tmp_path: Path) -> None:
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
