"""Reports, without a browser."""

from __future__ import annotations

import base64
import datetime
import gzip
import json
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.commands import runner
from ckptcore_view.report import write_report
from click.testing import Result
from safetensors.numpy import save_file

import ckptcore
from ckptcore.errors import CheckpointNotFoundError
from plugins.view.tests.conftest import damage, state


def documents_of(report: Path) -> dict[str, Any]:
    """Return the documents of a report."""
    match = re.search(r'id="documents">([^<]*)<', report.read_text())
    assert match is not None
    documents: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return documents


def names(documents: dict[str, Any]) -> set[str]:
    return {key.partition("\n")[0] for key in documents}


def test_a_report_of_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", checkpoint)
    documents = documents_of(tmp_path / "report.html")
    assert names(documents) == {"view", "checkpoint", "tree", "array", "statistics", "elements"}
    assert documents["statistics\nat=\nleaf=0"]["maximum"] == 64 * 48 - 1


def test_nothing_in_a_report_is_loaded_from_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", checkpoint)
    html = (tmp_path / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', html) == []
    assert "default-src 'none'" in html
    assert "{{" not in html


def test_chosen_arrays(checkpoint: Path, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", checkpoint, arrays=["bias", "cu*"])
    documents = documents_of(tmp_path / "report.html")
    read = [key for key in documents if key.startswith("statistics")]
    assert [documents[key.replace("statistics", "array", 1)]["path"] for key in read] == [
        "model['layers.0.bias']",
        "model['layers.1.bias']",
        "cube",
    ]


def test_large_checkpoints_are_not_read(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptcore_view.report._READ_BYTES", 100)
    write_report(tmp_path / "report.html", checkpoint)
    assert names(documents_of(tmp_path / "report.html")) == {"view", "checkpoint", "tree", "array"}


def test_a_report_of_a_run(run: Path, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", run, policy="latest_n=1")
    documents = documents_of(tmp_path / "report.html")
    assert documents["run\npolicy=latest_n=1"]["steps"][0]["kept"] is False
    assert documents["run"] == documents["run\npolicy=latest_n=1"]
    assert documents["checkpoint\nat=30"]["layout"] == "safetensors"
    assert documents["statistics\nat=10\nleaf=0\nof=30"]["norm"] > 0
    assert documents["difference\nat=30\nother=20\nleaf=0"]["differing"] == 64 * 48 - 1


def test_a_report_names_its_host_time_and_version(run: Path, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", run)
    made = documents_of(tmp_path / "report.html")["view"]["report"]
    assert (made["host"], made["version"]) == (platform.node(), ckptcore.__version__)
    assert datetime.datetime.fromisoformat(made["time"]).tzinfo is not None


def test_older_steps_are_in_a_report_of_a_run(run: Path, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", run)
    documents = documents_of(tmp_path / "report.html")
    assert {"tree\nat=10", "array\nat=10\nleaf=0", "tree\nat=20"} <= documents.keys()
    assert documents["statistics\nat=10\nleaf=0"] == {"same": "statistics\nat=10\nleaf=0\nof=30"}


def test_a_report_has_a_limited_number_of_rows_of_older_steps(tmp_path: Path) -> None:
    for step, rows in ((10, 1), (20, 20_000), (30, 1)):
        ckptcore.save(tmp_path / "run" / str(step), {str(row): [] for row in range(rows)})
    write_report(tmp_path / "report.html", tmp_path / "run")
    documents = documents_of(tmp_path / "report.html")
    assert "checkpoint\nat=20" in documents
    assert "checkpoint\nat=10" not in documents


def test_a_report_of_a_folder_of_runs(run: Path, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "parts", {"model": state()})
    ckptcore.save(tmp_path / "single", state())
    write_report(tmp_path / "report.html", tmp_path)
    documents = documents_of(tmp_path / "report.html")
    assert [run_entry["name"] for run_entry in documents["runs"]["runs"]] == ["parts", "run", "single"]
    assert "tree\nat=parts/model" in documents
    assert {"run\nat=run", "tree\nat=run/30", "tree\nat=run/10", "tree\nat=single"} <= documents.keys()
    assert "statistics" not in names(documents)


def test_the_read_limit_counts_arrays_of_all_steps(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = ckptcore.metadata(run / "30").nbytes
    for limit, is_read in ((3 * nbytes, True), (3 * nbytes - 1, False)):
        monkeypatch.setattr("ckptcore_view.report._READ_BYTES", limit)
        write_report(tmp_path / "report.html", run)
        assert ("statistics" in names(documents_of(tmp_path / "report.html"))) is is_read


def test_a_report_of_several_checkpointables(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": state(), "rng": np.random.default_rng(0)})
    write_report(tmp_path / "report.html", tmp_path / "c")
    documents = documents_of(tmp_path / "report.html")
    assert {"checkpoint\nat=model", "tree\nat=model", "checkpoint\nat=rng"} <= documents.keys()


def test_a_report_with_a_comparison(checkpoint: Path, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "other", state(3.0))
    write_report(tmp_path / "report.html", checkpoint, compare=tmp_path / "other")
    documents = documents_of(tmp_path / "report.html")
    assert documents["differences\nat=\nother=//other"]["count"] == 0
    assert documents["difference\nat=\nother=//other\nleaf=0"]["differing"] == 64 * 48 - 1


def test_damaged_arrays_are_errors_in_the_report(checkpoint: Path, tmp_path: Path) -> None:
    damage(checkpoint / "model.safetensors")
    write_report(tmp_path / "report.html", checkpoint)
    documents = documents_of(tmp_path / "report.html")
    assert any("model.safetensors" in str(document.get("error")) for document in documents.values())


def test_a_failed_report_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(CheckpointNotFoundError):
        write_report(tmp_path / "report.html", tmp_path / "nothing")
    assert (tmp_path / "report.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def view(*arguments: object) -> Result:
    from ckptcore_tools.cli.application import application

    return runner().invoke(application, ["view", *map(str, arguments)])


def test_the_command_writes_a_report(checkpoint: Path, tmp_path: Path) -> None:
    result = view(checkpoint, "--out", tmp_path / "report.html", "--arrays", "cube")
    assert (result.exit_code, result.stdout) == (0, f"written: {tmp_path / 'report.html'}\n")
    document = json.loads(view(checkpoint, "--out", tmp_path / "report.html", "--json").stdout)
    assert document["schema"] == "ckptcore.view/1"


def test_errors_of_the_command(tmp_path: Path, run: Path) -> None:
    assert view(tmp_path / "nothing").exit_code == 3
    assert view(run, "--named", "x", "--out", tmp_path / "r").exit_code == 2
    result = view(run, "--policy", "nonsense", "--out", tmp_path / "r")
    assert result.exit_code == 2
    assert "nonsense" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "OUT", "--arrays", "["], "--arrays"),
        (["--arrays", "w"], "add --out"),
        (["--out", "OUT", "--port", "80"], "leave out --port"),
        (["--out", "OUT", "--open"], "leave out --port and --open"),
        (["--out", "OUT", "--policy", "latest_n=1"], "leave the policy out"),
        (["--policy", "latest_n=1"], "leave the policy out"),
        (["--out", "missing/report.html"], "the directory of the report does not exist"),
        (["--out", "CHECKPOINT/report.html"], "would be in a checkpoint"),
        (["--out", "CHECKPOINT/model.safetensors"], "would be in a checkpoint"),
    ],
)
def test_invalid_combinations_of_options(arguments: list[str], text: str, checkpoint: Path, tmp_path: Path) -> None:
    names = {"OUT": str(tmp_path / "report.html")}
    given = [names.get(argument, argument).replace("CHECKPOINT", str(checkpoint)) for argument in arguments]
    result = view(checkpoint, *given)
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.stderr.replace("│", "").split())
    assert not (tmp_path / "report.html").exists()
    assert ckptcore.verify(checkpoint).ok
    assert len(list(checkpoint.iterdir())) == 2


def test_patterns_that_match_no_array(checkpoint: Path, tmp_path: Path) -> None:
    result = view(checkpoint, "--out", tmp_path / "report.html", "--arrays", "cube", "--arrays", "nothing")
    assert result.exit_code == 3
    assert "has no array that matches 'nothing'" in result.stderr
    with pytest.raises(TypeError, match="expected a sequence of patterns"):
        write_report(tmp_path / "report.html", checkpoint, arrays="cube")
    with pytest.raises(ValueError, match="nonsense"):
        write_report(tmp_path / "report.html", checkpoint, policy="nonsense")
    assert not (tmp_path / "report.html").exists()


def test_a_report_of_one_file_does_not_replace_it(tmp_path: Path) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="would be in a checkpoint"):
        write_report(tmp_path / "model.safetensors", tmp_path / "model.safetensors")
    write_report(tmp_path / "report.html", tmp_path / "model.safetensors")


def test_read_limit_counts_all_checkpointables_and_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {name: {"w": np.ones(10)} for name in "abc"})
    for location, compare in (("c", None), ("c", "c")):
        for limit, is_read in ((240 * (2 if compare else 1), True), (239 * (2 if compare else 1), False)):
            monkeypatch.setattr("ckptcore_view.report._READ_BYTES", limit)
            write_report(tmp_path / "r.html", tmp_path / location, compare=compare and tmp_path / compare)
            assert ("statistics" in names(documents_of(tmp_path / "r.html"))) is is_read


def test_steps_with_several_checkpointables_are_compared_by_name(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "run" / "1", {"a": {"w": np.ones(3)}, "b": {"w": np.zeros(3)}})
    ckptcore.save_checkpointables(tmp_path / "other", {"a": {"w": np.ones(3)}, "b": {"w": np.ones(3)}})
    write_report(tmp_path / "r.html", tmp_path / "run", compare=tmp_path / "other")
    documents = documents_of(tmp_path / "r.html")
    differing = {
        part: documents[f"difference\nat=1/{part}\nother=//other/{part}\nleaf=0"]["differing"] for part in "ab"
    }
    assert differing == {"a": 0, "b": 3}
