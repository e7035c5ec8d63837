"""Sphinx configuration: Markdown pages by MyST, a reference from docstrings, and every warning is an error."""

from __future__ import annotations

import sys
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.util.inspect import TypeAliasForwardRef

if TYPE_CHECKING:
    from docutils import nodes
    from docutils.nodes import Element
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "ckptcore"
copyright = "The ckptcore authors"
release = version = distribution_version("ckptcore")

extensions = [
    "api_pages",
    "myst_parser",
    "notebooks",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_inline_tabs",
    "traces",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ckptcore {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = [("folding.js", {"defer": "defer"})]
copybutton_selector = "div.highlight-python pre, div.highlight-console pre, div.highlight-toml pre"
copybutton_prompt_text = "$ "
html_search_scorer = str(Path(__file__).parent / "_static" / "search_ranking.js")
default_role = "py:obj"
suppress_warnings = ["ref.python"]  # several classes have an attribute `rank`, and docstrings refer to it by name

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

python_maximum_signature_line_length = 88  # one parameter per line in longer signatures
autodoc_mock_imports = [
    "deepspeed",
    "keras",
    "lightning",
    "lightning_utilities",
    "mlflow",
    "pyarrow",
    "ray.train",
    "torchtitan",
    "verl",
    "vllm",
    "wandb",
]
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Signatures show the names of these aliases instead of their values.
autodoc_type_aliases = {
    name: name
    for name in (
        "Buffer", "HostArray", "JSON", "Key", "LayoutFactory", "LeafRecord", "LocationLike", "NodeKind", "Overwrite",
        "ProgressCallback", "PutCondition", "Segment", "Skeleton", "TreePath",
    )
}  # fmt: skip
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Sphinx 9.0 prints the `repr` of an alias inside another type, such as `Mapping[str, JSON]`.
TypeAliasForwardRef.__repr__ = lambda alias: alias.name

MEMBERS = {"attribute", "method", "property", "classmethod", "staticmethod"}


def find_short_name(
    app: Sphinx, environment: BuildEnvironment, node: pending_xref, content: Element
) -> nodes.reference | None:
    """Link `Box`, or the ``ckptcore.model.arrays.Box`` of a signature, to its entry in the reference.

    A name with a dot may be a member, such as `StorageBackend.put`. A name without one is a class, function or value.
    """
    if node.get("refdomain") != "py":
        return None
    domain = environment.domains.python_domain
    target = str(node["reftarget"]).removesuffix("()")
    wanted = target.rpartition(".")[2] if target.startswith("ckptcore") else target
    candidates = [
        name
        for name, entry in domain.objects.items()
        if name.endswith(f".{wanted}") and ("." in wanted or entry.objtype not in MEMBERS)
    ]
    if not candidates:
        return None
    nearest = min(candidates, key=lambda name: (name.count("."), name))
    node["reftype"], node["reftarget"] = "obj", nearest
    found: nodes.reference | None = domain.resolve_xref(
        environment, node["refdoc"], app.builder, "obj", nearest, node, content
    )
    return found


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.connect("missing-reference", find_short_name)
