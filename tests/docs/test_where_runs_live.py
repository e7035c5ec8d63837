"""The table of storages for runs has a row for each mark `lives` of the tests."""

from __future__ import annotations

import pytest

from tools.places import Row, main, rows_of, written_page

_SOURCE = """
@pytest.mark.lives("S3", "moto", "everything", "nothing")
@pytest.mark.lives("another", "Linux 6.1", "loads", "saves")
def test_it(): ...
"""


def test_the_page_has_the_rows_of_the_tests() -> None:
    assert main(["--check"]) == 0


def test_rows_are_sorted_and_have_versions() -> None:
    rows = list(rows_of("test_a.py", _SOURCE))
    assert rows[0] == Row("S3", "moto", "everything", "nothing", "test_a.py::test_it")
    assert written_page(rows, {"moto": "5.2"}).splitlines()[-2:] == [
        "| another | Linux 6.1 | loads | saves | `test_a.py::test_it` |",
        "| S3 | moto 5.2 | everything | nothing | `test_a.py::test_it` |",
    ]


def test_a_mark_has_four_texts() -> None:
    with pytest.raises(ValueError, match=r"test_a.py::test_it: expected four texts"):
        list(rows_of("test_a.py", _SOURCE.replace(', "nothing"', "")))
