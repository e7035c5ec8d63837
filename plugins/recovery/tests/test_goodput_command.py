"""``ckptcore goodput``, and the panel of the page of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckptcore_recovery.watchdog.goodput_text import format_duration, panel
from ckptcore_testing.commands import runner
from click.testing import Result

import ckptcore
from ckptcore.context import default_context
from plugins.recovery.tests.run_logs import HEADER, write_incarnation, write_run, write_segment

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Return a function that runs ``ckptcore`` in this process."""

    def invoke(*arguments: object) -> Result:
        from ckptcore_tools.cli.application import application

        return runner().invoke(application, [str(argument) for argument in arguments])

    return invoke


def test_the_text_of_a_run(tmp_path: Path, run: Run) -> None:
    write_run(tmp_path)
    result = run("goodput", tmp_path)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "69.3 % of 41.8 min were productive, in 3 incarnations with 2 failures."
    assert [line.split()[0] for line in lines[3:12]] == [
        "productive", "repeated", "saving", "waiting", "starting", "loading", "between", "failures", "unfinished",
    ]  # fmt: skip
    assert "failed" in result.stdout and "running" in result.stdout
    assert "A save blocks the training for 2 s, every 100 s (12 steps). With 2 failures in 39.1 min" in result.stdout
    assert "An interval of 67.2 s (8 steps) loses least: 5.7 %." in result.stdout
    assert "it is from 34.7 s (4 steps) to 3.26 min (23 steps)." in result.stdout
    assert "Failed operations and stalls: save 1, stall 1." in result.stdout
    assert "\x1b" not in result.stdout


def test_the_document_of_a_run(tmp_path: Path, run: Run) -> None:
    write_run(tmp_path)
    result = run("goodput", tmp_path, "--json")
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["schema"] == "ckptcore.goodput/1"
    assert document["parts"] == pytest.approx({
        "productive": 1000 * 150 / 120 + 490, "repeated": 1000 * 30 / 120, "saving": 40, "starting": 240,
        "loading": 60, "between": 10, "stopped": 0, "unfinished": 5, "down": 75 + 90, "unrecorded": 0,
    }, abs=1e-5)  # fmt: skip
    assert document["seconds"] == 1900 + 610 == pytest.approx(sum(document["groups"].values()))
    assert (document["failures"], document["steps"], document["saves"]) == (2, 240, 20)
    interval = document["save_interval"]
    assert interval["cost"] == 2 and interval["shortest"] < interval["best"] < interval["longest"]
    first, second, third = document["incarnations"]
    assert (first["state"], first["last_step"], first["processes"]) == ("failed", 120, 8)
    assert first["began"] == "2026-09-21T14:13:20+00:00" and third["state"] == "running"
    assert [note["kind"] for note in second["notes"]] == ["save", "stall", "load"]
    assert second["notes"][1]["seconds"] == 60


def test_a_run_without_failures_has_no_best_interval(tmp_path: Path, run: Run) -> None:
    write_incarnation(tmp_path, 1, 0, [0, 7200, 1, 7190, 7190, 7190, 10, 0, 0, 10], outcome="finished")
    text = run("goodput", tmp_path).stdout
    assert "No failure was seen in 2 h, so the interval that loses least is not known." in text
    assert "With 95 % confidence it is at least 68.7 s (69 steps)." in text


def test_a_run_without_saves_says_so(tmp_path: Path, run: Run) -> None:
    write_incarnation(tmp_path, 1, 0, [0, 10, 1, 10, 10, 10, 0, 0, 0, 0], outcome="finished")
    assert "No step was saved" in run("goodput", tmp_path).stdout


def test_clocks_that_differ_are_named(tmp_path: Path, run: Run) -> None:
    for number, began in ((1, 100), (2, 50)):
        write_incarnation(tmp_path, number, began, [0, 10, 1, 10, 10, 10, 0, 0, 0, 0], outcome="failed")
    assert "Began before the previous incarnation ended: 2." in run("goodput", tmp_path).stdout


def test_a_run_without_a_log_is_an_error(tmp_path: Path, run: Run) -> None:
    result = run("goodput", tmp_path)
    assert result.exit_code == 3 and "RunLog" in result.stderr and str(tmp_path) in result.stderr
    assert run("goodput", tmp_path / "missing").exit_code == 3


def test_a_log_of_a_newer_version_is_an_error(tmp_path: Path, run: Run) -> None:
    write_segment(tmp_path, {**HEADER, "format": 2})
    result = run("goodput", tmp_path)
    assert result.exit_code == 5 and "update it" in result.stderr


@pytest.mark.parametrize(
    ("duration", "text"),
    [(0, "0 s"), (0.00125, "1.25 ms"), (42, "42 s"), (119.6, "120 s"), (750, "12.5 min"), (11_700, "3.25 h"),
     (1e6, "11.6 days"), (1e8, "1,157 days")],
)  # fmt: skip
def test_durations(duration: float, text: str) -> None:
    assert format_duration(duration) == text


def test_the_panel_of_a_run(tmp_path: Path) -> None:
    assert panel(tmp_path, default_context()) is None
    write_run(tmp_path)
    shown: Any = panel(tmp_path, default_context())
    assert shown["title"] == "Goodput" and len(shown["lines"]) == 3
    assert shown["bars"]["parts"] == ["productive", "repeated", "saving", "waiting", "failures"]
    assert [row["name"] for row in shown["bars"]["rows"]] == ["1, failed", "2, failed", "3, running"]
    assert sum(sum(row["seconds"]) for row in shown["bars"]["rows"]) == pytest.approx(2510)
    assert len(shown["table"]["rows"][0]) == len(shown["table"]["headings"])


def test_the_panel_of_a_long_run_has_its_newest_incarnations(tmp_path: Path) -> None:
    for number in range(1, 61):
        write_incarnation(tmp_path, number, 100 * number, [0, 10, 1, 10, 10, 10, 0, 0, 0, 0], outcome="failed")
    shown: Any = panel(tmp_path, default_context())
    names = [row["name"] for row in shown["bars"]["rows"]]
    assert (len(names), names[0], names[-1]) == (50, "11, failed", "60, failed")
    assert "`ckptcore goodput` shows all" in shown["lines"][-1]


def test_the_page_of_a_run_has_the_panel(tmp_path: Path) -> None:
    pytest.importorskip("ckptcore_view")
    from ckptcore_view.documents import Request, document_of
    from ckptcore_view.viewed import Viewed

    ckptcore.save(tmp_path / "210", {"w": 1})
    write_run(tmp_path)
    document: Any = document_of(Viewed(str(tmp_path), default_context()), "run", Request())
    assert [one["title"] for one in document["panels"]] == ["Goodput"] and "error" not in document["panels"][0]
