"""Results of the tests of replaced libraries: tables on the page, reasons for failures, and counts of calls."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from tools.foreign_results import NOTE, FileResult, LibraryResults, fill_tables, read_results, write_results
from tools.foreign_tests import run_file, with_result

RESULTS = read_results()

TESTS = """
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

def test_round_trip(tmp_path):
    save_file({"w": np.ones(3)}, tmp_path / "file")
    assert load_file(tmp_path / "file")["w"].sum() == 3

def test_of_nothing():
    pass

def test_that_fails():
    assert False

def test_of_the_library_alone():
    assert save_file.__module__ == "safetensors.numpy"

@pytest.mark.skip(reason="not here")
def test_elsewhere():
    pass
"""


def test_the_page_has_the_tables_of_the_stored_results() -> None:
    page = NOTE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == RESULTS.keys()
    assert fill_tables(page, RESULTS) == page, "write the tables with python -m tools.foreign_tests"


@pytest.mark.parametrize("library", RESULTS)
def test_the_page_gives_a_reason_for_each_test_that_passes_only_with_the_library(library: str) -> None:
    section = NOTE.read_text(encoding="utf-8").partition(f"<!-- table: {library} -->")[2].partition("\n## ")[0]
    rows = section.partition("| test | reason |")[2]
    listed = set(re.findall(r"`(test_\w+)`", rows))
    failed = {name.partition(".")[2] for file in RESULTS[library].files.values() for name in file.failed}
    assert listed == {re.sub(r"\d+$", "", name.partition("[")[0]) for name in failed}


def test_a_file_without_calls_is_listed_and_has_no_row(tmp_path: Path) -> None:
    files = {
        "tests/io/test_reads.py": FileResult(
            "00", tests=4, alone=3, replaced=2, reaching=2, calls=7, failed={"T.t": "x"}
        ),
        "tests/test_names.py": FileResult("01", tests=5, alone=5, replaced=5, reaching=0, calls=0),
        "tests/test_gpus.py": FileResult("02", tests=1, alone=0, replaced=0, reaching=0, calls=0),
    }
    write_results({"torch": LibraryResults("2.0", files)}, tmp_path / "results.json")
    results = read_results(tmp_path / "results.json")
    assert results == {"torch": LibraryResults("2.0", files)}
    filled = fill_tables("a\n<!-- table: torch -->\nold\n<!-- end of the table -->\nb\n", results)
    assert fill_tables(filled, results) == filled
    assert "| `io/test_reads.py` | 4 | 3 | 2 | 2 | 7 |\n| all | 4 | 3 | 2 | 2 | 7 |\n" in filled
    assert "prove nothing:\n\n- `test_names.py`, 5 tests\n" in filled
    assert "without accelerators:\n\n- `test_gpus.py`, 1 test\n" in filled
    assert "old" not in filled and filled.startswith("a\n") and filled.endswith("\nb\n")


def test_results_of_another_version_are_dropped() -> None:
    result = FileResult("00", tests=1, alone=1, replaced=1, reaching=1, calls=1)
    old = {"safetensors": LibraryResults("0.0.1", {"old": result})}
    first = with_result(old, "safetensors", "new", result)
    assert set(first["safetensors"].files) == {"new"}
    assert first["safetensors"].version == importlib.metadata.version("safetensors")
    assert set(with_result(first, "safetensors", "newer", result)["safetensors"].files) == {"new", "newer"}


def test_tables_without_results_are_empty() -> None:
    page = "a\n<!-- table: torch -->\nold\n<!-- end of the table -->\nb\n"
    assert fill_tables(page, {}) == "a\n<!-- table: torch -->\n\n<!-- end of the table -->\nb\n"


@pytest.mark.system
@pytest.mark.slow
def test_calls_are_counted_only_with_the_replacement(tmp_path: Path) -> None:
    (tmp_path / "test_files.py").write_text(TESTS)
    result = run_file("test_files.py", tmp_path, "safetensors")
    assert (result.tests, result.alone, result.replaced, result.reaching) == (4, 3, 2, 1)
    assert result.calls > 1
    assert list(result.failed) == ["test_files.test_of_the_library_alone"]
