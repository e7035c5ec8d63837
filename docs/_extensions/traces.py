"""A Sphinx extension that lists the files of a plain save and a plain load, as they run when the pages are built."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.trace import listing, trace_plain_load, trace_plain_save  # the clone, not an installation

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_TRACES = {"save": trace_plain_save, "load": trace_plain_load}


class TraceDirective(SphinxDirective):
    """Show the files that a plain save or load runs through, in the order in which they are first called."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Trace it now."""
        with tempfile.TemporaryDirectory() as directory:
            files = _TRACES[self.arguments[0]](Path(directory))
        count = f"{len(files)} files, {sum(map(len, files.values()))} functions."
        return [nodes.paragraph("", count), *self.parse_text_to_nodes("\n".join(listing(files)))]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("trace", TraceDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
