"""The table of objects that programs save has a row for each mark `brings` of the tests."""

from __future__ import annotations

import pytest

from tests.architecture.sources import ROOT
from tools.brought import Row, Rows, pinned_versions, written_page


def test_rows_are_sorted_and_have_versions() -> None:
    versions = pinned_versions("# pinned\nTorch==2.13.0\ngalore-torch==1.0\n")
    rows = {
        Row("torch", "`SGD`", "same", "test_b.py::test_it"),
        Row("torch", "`Adam`", "refused", "test_b.py::test_it"),
        Row("Python", "numbers", "same", "test_a.py::test_it"),
        Row("galore-torch", "`GaLoreAdamW`", "plain form", "test_c.py::test_it"),
    }
    table = written_page(rows, versions).partition("|---|---|---|---|\n")[2]
    assert table.splitlines() == [
        "| `GaLoreAdamW` | galore-torch 1.0 | plain form | `test_c.py::test_it` |",
        "| numbers | Python | same | `test_a.py::test_it` |",
        "| `Adam` | torch 2.13.0 | refused | `test_b.py::test_it` |",
        "| `SGD` | torch 2.13.0 | same | `test_b.py::test_it` |",
    ]
    with pytest.raises(ValueError, match=r"test_d.py::test_it: constraints.txt has no version of other"):
        written_page([Row("other", "x", "same", "test_d.py::test_it")], versions)


def test_an_unknown_result_is_a_problem() -> None:
    rows = Rows()
    rows.add("test_a.py::test_it", "x", "torch", "good")
    assert rows.problems == ["test_a.py::test_it: the result 'good' is not one of same, plain form, refused"]


def test_the_table_is_long_enough() -> None:
    page = (ROOT / "docs/reference/what-programs-bring.md").read_text(encoding="utf-8")
    assert page.count("\n| ") > 60
