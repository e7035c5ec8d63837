"""Every notebook of the documentation runs, and prints its stored output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.notebooks import notebooks, read_cells, run_cells


@pytest.mark.parametrize("notebook", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_prints_its_stored_output(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for cell, printed in run_cells(notebook):
        assert printed == cell.output, f"cell {cell.number}: store it with python -m tests.docs.notebooks {notebook}"


def test_notebooks_exist_and_have_the_format_of_jupyter() -> None:
    paths = notebooks()
    assert len(paths) >= 3
    for notebook in paths:
        document = json.loads(notebook.read_text(encoding="utf-8"))
        assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
        ids = [cell["id"] for cell in document["cells"]]
        assert len(set(ids)) == len(ids)


def test_a_failing_cell_is_reported_with_its_number(tmp_path: Path) -> None:
    notebook = tmp_path / "broken.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["1 / 0"], "outputs": []},
    ]
    notebook.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert [cell.number for cell in read_cells(notebook)] == [1]
    with pytest.raises(ZeroDivisionError) as raised:
        list(run_cells(notebook))
    assert "broken.ipynb[1]" in str(raised.traceback[-1].path)
