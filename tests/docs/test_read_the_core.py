"""The design note that lists the files of a plain save and a plain load, compared with traces of both."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools.trace import Trace, listing, trace_plain_load, trace_plain_save

NOTE = Path(__file__).parents[2] / "docs" / "design" / "read-the-core.md"


def listed(heading: str) -> Sequence[str]:
    """Return the lines of the numbered list below a heading of the note."""
    section = NOTE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if re.match(r"\d+\. `", line)]


@pytest.mark.parametrize(
    ("heading", "traced", "most_files", "most_functions"),
    [("A save", trace_plain_save, 56, 344), ("A load", trace_plain_load, 39, 221)],
)
def test_the_note_lists_the_files_in_the_order_in_which_they_run(
    heading: str, traced: Callable[[Path], Trace], most_files: int, most_functions: int, tmp_path: Path
) -> None:
    files = traced(tmp_path)
    assert listed(heading) == listing(files), "update the lists with python -m tools.trace --markdown"
    assert len(files) <= most_files
    assert sum(map(len, files.values())) <= most_functions
