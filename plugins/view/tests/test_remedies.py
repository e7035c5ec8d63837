"""Remedies in the errors of the viewer. Each test follows the text of an error, and gets the requested data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.commands import runner
from ckptcore_view.command import command
from ckptcore_view.documents import BadRequestError

import ckptcore
from ckptcore.errors import CheckpointNotFoundError
from plugins.view.tests.conftest import Load, state


@pytest.mark.parametrize(
    ("leaf", "index", "text", "instead", "shape"),
    [
        (0, "[:, :, :]", "[:, :, :] has 3 axes: select one index on all but two axes", "[1, :, :]", [2, 2]),
        (1, "...", "more than 65,536: use smaller ranges or steps, such as 0:4096:16", "[0:200, 0:300]", [200, 300]),
        (1, "...", "more than 65,536: use smaller ranges or steps, such as 0:4096:16", "[0:4096:16, ...]", [19, 300]),
        (1, "[x]", "expected integers and ranges, such as [0, 0:64, ::8]", "[0, 0:64]", [64]),
        (0, "[x]", "expected integers and ranges, such as [0, 0:64, ::8]", "[0, 0:64, ::8]", [2, 1]),
    ],
)
def test_a_corrected_index(
    tmp_path: Path, documents: Callable[..., Load], leaf: int, index: str, text: str, instead: str, shape: list[int]
) -> None:
    ckptcore.save(tmp_path / "c", {"cube": np.ones((2, 2, 2)), "large": np.ones((300, 300))})
    load = documents(tmp_path / "c")
    with pytest.raises(BadRequestError) as caught:
        load("elements", at="", leaf=leaf, index=index)
    assert text in str(caught.value)
    elements = load("elements", at="", leaf=leaf, index=instead)
    assert elements["shape"] == shape
    assert elements["rows"][0][0] == 1.0


def test_a_corrected_location_of_the_other_checkpoint(
    tmp_path: Path, checkpoint: Path, documents: Callable[..., Load]
) -> None:
    ckptcore.save(tmp_path / "other", {**state(), "step": 6})
    with pytest.raises(CheckpointNotFoundError, match="no other checkpoint to compare with: use --compare"):
        documents(checkpoint)("tree", at="//other")
    compared: Any = documents(checkpoint, other=str(tmp_path / "other"))
    assert compared("tree", at="//other")["leaves"] == compared("tree", at="")["leaves"]


def test_reloading_the_page_of_a_replaced_checkpoint(checkpoint: Path, documents: Callable[..., Load]) -> None:
    load = documents(checkpoint)
    version = load("tree", at="")["version"]
    ckptcore.save(checkpoint, {"aaa": np.full(4, 7.0)}, overwrite=True)
    with pytest.raises(BadRequestError, match="load the page again"):
        load("elements", at="", leaf=0, version=version)
    again = documents(checkpoint)
    assert again("elements", at="", leaf=0, version=again("tree", at="")["version"])["rows"] == [[7.0] * 4]


@pytest.mark.parametrize(
    ("arguments", "text", "instead"),
    [
        (["--arrays", "cube"], "add --out", ["--arrays", "cube", "--out", "OUT"]),
        (["--out", "OUT", "--port", "80"], "leave out --port and --open", ["--out", "OUT"]),
        (["--out", "OUT", "--policy", "latest_n=1"], "leave the policy out", ["--out", "OUT"]),
        (["--out", "CHECKPOINT/report.html"], "would be in a checkpoint: write it elsewhere", ["--out", "OUT"]),
    ],
)
def test_options_of_the_command(
    tmp_path: Path, checkpoint: Path, arguments: list[str], text: str, instead: list[str]
) -> None:
    report = tmp_path / "report.html"

    def run(options: list[str]) -> Any:
        given = [option.replace("OUT", str(report)).replace("CHECKPOINT", str(checkpoint)) for option in options]
        return runner().invoke(command, [str(checkpoint), *given])

    refused = run(arguments)
    assert refused.exit_code == 2
    assert text in " ".join(refused.stderr.replace("│", "").split())
    assert not report.exists()
    assert run(instead).exit_code == 0
    assert report.exists()


def test_a_directory_for_a_report(tmp_path: Path, checkpoint: Path) -> None:
    report = tmp_path / "reports" / "report.html"
    run = [str(checkpoint), "--out", str(report)]
    text = " ".join(runner().invoke(command, run).stderr.replace("│", "").split())
    assert "the directory of the report does not exist: create " in text
    report.parent.mkdir()
    assert runner().invoke(command, run).exit_code == 0
    assert report.exists()
