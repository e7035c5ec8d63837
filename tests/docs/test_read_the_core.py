"""The design note that lists the main calls of a plain save and load, compared with traces of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.counts import Trace
from tools.trace import NOTE, SPINE, listing, spine_table, trace_plain_load, trace_plain_save


@pytest.mark.parametrize(
    ("traced", "most_files", "most_functions"), [(trace_plain_save, 48, 341), (trace_plain_load, 38, 217)]
)
def test_a_plain_save_and_load_make_few_calls(
    traced: Callable[[Path], Trace], most_files: int, most_functions: int, tmp_path: Path
) -> None:
    files = traced(tmp_path)
    assert len(files) <= most_files
    assert sum(map(len, files.values())) <= most_functions
    assert len(listing(files)) == len(files)


def test_the_note_lists_the_traced_calls(tmp_path: Path) -> None:
    traces = {"save": trace_plain_save(tmp_path), "load": trace_plain_load(tmp_path)}
    assert spine_table(traces) in NOTE.read_text(encoding="utf-8"), "run python -m tools.trace --write"
    assert sum(map(len, SPINE.values())) == 12


def test_a_listed_function_that_does_not_run_is_refused() -> None:
    with pytest.raises(ValueError, match="perform_save of SPINE ran in \\[\\]"):
        spine_table({"save": {}, "load": {}})


def test_design_notes_are_few_and_listed_in_the_index() -> None:
    notes = {path.stem for path in NOTE.parent.glob("*.md")} - {"index"}
    index = (NOTE.parent / "index.md").read_text(encoding="utf-8").splitlines()
    assert len(notes) <= 26
    assert notes <= set(index)
