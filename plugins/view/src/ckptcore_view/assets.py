"""The files of the page."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from typing import Final

MODULES: Final = (
    "app", "array", "boxes", "charts", "checkpoint", "differences", "documents", "dom", "metrics", "norms", "panels",
    "run", "summary", "tree",
)  # fmt: skip
"""The modules of the page, each in a separate file. They import each other as ``view/NAME``."""


def page_file(name: str) -> str:
    """Return the text of a file of the page."""
    return (importlib.resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def import_map(addresses: Mapping[str, str]) -> str:
    """Return the import map of the page: the address of each module, as JSON."""
    return json.dumps({"imports": {f"view/{name}": address for name, address in addresses.items()}})


def page_html(*, imports: str, style: str, data: str, nonce: str, policy: str = "") -> str:
    """Return the HTML of the page.

    Args:
        imports: the import map, as JSON.
        style: HTML that includes the style.
        data: HTML with data for the page; empty if it is served.
        nonce: marks the scripts that the content security policy allows.
        policy: the content security policy, for a page without a server.
    """
    html = page_file("index.html")
    for name, text in (("policy", policy), ("imports", imports), ("style", style), ("data", data), ("nonce", nonce)):
        html = html.replace(f"{{{{{name}}}}}", text)
    return html
