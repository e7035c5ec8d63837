"""Panels of other distributions, which the entry point group ``ckptcore.panels`` adds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plugins.view.tests.conftest import Load, add_panels

Documents = Callable[..., Load]


def test_panels_of_a_run(run: Path, tmp_path: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    add_panels(tmp_path / "guest", monkeypatch, bars="bars", nothing="nothing", text="text")
    panels = documents(run)("run")["panels"]
    assert [panel["title"] for panel in panels] == ["Time", f"Text of {run}"]
    assert documents(tmp_path)("run", at="run")["panels"] == panels


def test_a_panel_that_fails_hides_no_other(
    run: Path, tmp_path: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_panels(tmp_path / "guest", monkeypatch, a="broken", b="absent", c="no_json", d="bars")
    panels = documents(run)("run")["panels"]
    assert [panel["title"] for panel in panels] == ["a", "b", "c", "Time"]
    assert panels[0]["error"] == "ValueError: in https://user:***@host/x"
    assert panels[1]["error"].startswith("AttributeError") and panels[2]["error"].startswith("TypeError")


@pytest.mark.parametrize("panel", ["no_panel", "no_rows", "too_long"])
def test_a_panel_of_another_form_is_an_error(
    panel: str, run: Path, tmp_path: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_panels(tmp_path / "guest", monkeypatch, a=panel, b="bars")
    failed, shown = documents(run)("run")["panels"]
    assert failed["title"] == "a" and "which has not the form of a panel" in failed["error"]
    assert shown["title"] == "Time"


def test_a_panel_is_made_once_a_minute(
    run: Path, tmp_path: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_panels(tmp_path / "guest", monkeypatch, counted="counted")
    load = documents(run)
    assert [load("run")["panels"][0]["title"] for _ in range(3)] == ["1", "1", "1"]


def test_the_runs_of_a_folder_have_no_panels(
    run: Path, tmp_path: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_panels(tmp_path / "guest", monkeypatch, bars="bars")
    assert run.parent == tmp_path
    assert all("panels" not in entry for entry in documents(tmp_path)("runs")["runs"])
