"""Jupyter notebooks of the documentation: run their cells, and store what they print.

``python -m tests.docs.notebooks [NOTEBOOK ...]`` runs notebooks and stores the output of each cell.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.architecture.sources import ROOT
from tests.docs.pages import CodeBlock
from tests.docs.running import page_module, run_python


@dataclass(frozen=True)
class Cell:
    """A code cell.

    Attributes:
        number: the position among all cells, from 0.
        code: the source of the cell.
        output: the stored output.
    """

    number: int
    code: str
    output: str


def notebooks() -> list[Path]:
    """Return every notebook of the documentation."""
    return sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def read_cells(notebook: Path) -> Sequence[Cell]:
    """Return the code cells of a notebook."""
    cells = []
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            output = "".join("".join(stored["text"]) for stored in cell["outputs"])
            cells.append(Cell(number, "".join(cell["source"]), output))
    return cells


def run_cells(notebook: Path) -> Iterator[tuple[Cell, str]]:
    """Run the cells in the working directory. Yield each cell with its printed output."""
    module = page_module(notebook, "notebook")
    for cell in read_cells(notebook):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            run_python(CodeBlock("python", cell.code, 1), notebook.with_name(f"{notebook.name}[{cell.number}]"), module)
        yield cell, printed.getvalue()


def _store_outputs(notebook: Path) -> None:
    document: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        for count, (cell, printed) in enumerate(run_cells(notebook), 1):
            text = printed.splitlines(keepends=True)
            outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
            document["cells"][cell.number].update(execution_count=count, outputs=outputs)
    notebook.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for path in [Path(name).absolute() for name in sys.argv[1:]] or notebooks():
        _store_outputs(path)
