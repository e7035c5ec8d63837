"""A Sphinx extension for pages of the API: a table of names at their top, and links from source code back to them."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_BACK = re.compile(r'(<a class="viewcode-back" href=")([^"#]+)\.html#([\w.]+)"')


def add_table(app: Sphinx, document: nodes.document) -> None:
    """Insert a table of the functions, classes and values of a page before its first section or entry."""
    if not app.env.docname.startswith("reference/"):
        return
    rows = [row for entry in document.findall(addnodes.desc) if (row := _row(entry)) is not None]
    page = next(document.findall(nodes.section), None)
    if len(rows) < 3 or page is None:
        return
    heads = nodes.row("", *[nodes.entry("", nodes.paragraph("", text)) for text in ("name", "does")])
    columns = [nodes.colspec(colwidth=width) for width in (30, 70)]
    group = nodes.tgroup("", *columns, nodes.thead("", heads), nodes.tbody("", *rows), cols=2)
    before = (at for at, node in enumerate(page.children) if isinstance(node, (nodes.section, addnodes.desc)))
    page.insert(next(before, len(page.children)), nodes.table("", group, classes=["api-table"]))


def _row(entry: addnodes.desc) -> nodes.row | None:
    """Return the row of an entry; None for members of a class, and for entries without an anchor."""
    signature = next(entry.findall(addnodes.desc_signature))
    if isinstance(entry.parent, addnodes.desc_content) or not signature["ids"]:
        return None
    name = signature["ids"][0].rpartition(".")[2]
    link = nodes.reference("", "", nodes.literal("", name), refid=signature["ids"][0], internal=True)
    text = next((node.astext() for node in entry[-1].children if isinstance(node, nodes.paragraph)), "")
    first = re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0]
    return nodes.row("", *[nodes.entry("", nodes.paragraph("", "", node)) for node in (link, nodes.Text(first))])


def mend_back_links(
    app: Sphinx, name: str, template: str, context: dict[str, str], document: nodes.document | None
) -> None:
    """Correct the anchors of ``[docs]`` links of a page of source code.

    Sphinx takes all names of a module to be documented under the module of the first one.
    """
    if not name.startswith("_modules/"):
        return
    documented = app.env.domains.python_domain.objects

    def mended(link: re.Match[str]) -> str:
        page = posixpath.normpath(posixpath.join(posixpath.dirname(name), link[2]))
        parts = link[3].split(".")
        ends = ["." + ".".join(parts[at:]) for at in range(len(parts))]
        here = [found for found, entry in documented.items() if entry.docname == page]
        pairs = ((end, found) for names in (here, documented) for end in ends for found in names)
        found = next((found for end, found in pairs if f".{found}".endswith(end)), None)
        if found is None:
            return link[0]
        target = posixpath.relpath(documented[found].docname, posixpath.dirname(name))
        return f'{link[1]}{target}.html#{documented[found].node_id}"'

    context["body"] = _BACK.sub(mended, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register both."""
    app.connect("doctree-read", add_table)
    app.connect("html-page-context", mend_back_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
