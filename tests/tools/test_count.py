"""The tool that counts code: correct counts for samples, and a report about the whole project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.architecture.sources import core_sources
from tools.count import ROOMS, Count, count_packages, count_source, main, public_names, rooms_table, table

_SAMPLE = '''"""Module docstring.

Of three lines.
"""

import os  # not a line of comments

# a comment
LIMIT = 3
"""A docstring of an attribute."""


def call(value: str) -> str:
    """Return a string."""
    text = """not
    a docstring"""
    return text.join(
        # inside a statement
        [value],
    )
'''


def test_docstrings_comments_and_blank_lines_are_not_code() -> None:
    assert count_source(_SAMPLE) == Count(files=1, short=1, lines=20, code=8, docstrings=6, comments=2)


def test_an_empty_file_has_no_lines() -> None:
    assert count_source("") == Count(files=1, short=1)


def test_a_long_file_is_not_counted_as_short() -> None:
    assert count_source("x = 1\n" * 100) == Count(files=1, lines=100, code=100)


def test_files_are_counted_by_package(tmp_path: Path) -> None:
    for name in (
        "ckptcore/__init__.py",
        "ckptcore/save/write.py",
        "ckptcore/save/deep/er.py",
        "plugins/x/src/ckptcore_x/__init__.py",
        "plugins/x/tests/test_x.py",
        "plugins/x/build/lib/ckptcore_x/__init__.py",
        "tests/test_all.py",
        ".venv/lib/numpy.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('__all__ = ["a", "b"]\n', encoding="utf-8")
    single = Count(1, 1, 1, 1)
    assert count_packages(tmp_path) == {
        "ckptcore (modules)": single,
        "ckptcore.save": single + single,
        "ckptcore_x": single,
        "tests of plugins": single,
        "tests": single,
    }
    assert public_names(tmp_path) == ["a", "b"]


def test_the_report_covers_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    files = sum(
        count["files"] for name, count in report["packages"].items() if name.startswith(("ckptcore.", "ckptcore "))
    )
    assert files == len(core_sources())
    assert "save" in report["public_names"]
    assert "ckptcore" in report["modules_of_a_save_and_a_load"]


def test_the_table_names_packages_and_sums(capsys: pytest.CaptureFixture[str]) -> None:
    print(*table({"ckptcore.save": Count(1, 0, 200, 150), "ckptcore_x": Count(1, 1, 50, 1_040)}), sep="\n")
    lines = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["ckptcore_x"] == ["ckptcore_x", "1", "1", "50", "1,040", "0", "0"]
    assert lines["everything"] == ["everything", "2", "1", "250", "1,190", "0", "0"]


def test_the_design_note_lists_the_packages_of_the_core() -> None:
    root = Path(__file__).parents[2]
    note = (root / "docs" / "design" / "small-core.md").read_text(encoding="utf-8")
    rows = rooms_table(count_packages(root)).splitlines()
    assert len(rows) == len(ROOMS) + 3
    for row in rows:  # the numbers may be of an older version
        assert row.split("|")[1] in note and row.split("|")[3] in note, "run python -m tools.count --write"
