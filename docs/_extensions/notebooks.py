"""A Sphinx extension that shows Jupyter notebooks as pages, with the outputs stored in them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from myst_parser.sphinx_ import Parser

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx


class NotebookParser(Parser):
    """Parse a notebook: Markdown cells are MyST, and code cells become blocks of code, each with its output."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse the JSON of a notebook."""
        super().parse("\n\n".join(map(_as_markdown, json.loads(inputstring)["cells"])), document)


def _as_markdown(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    shown = "".join("".join(output["text"]) for output in cell["outputs"])
    output = f"\n\n```{{code-block}} text\n:class: output\n\n{shown}```" if shown else ""
    return f"```python\n{source}\n```{output}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the parser."""
    app.setup_extension("myst_parser")
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
