"""Sphinx configuration: Markdown pages by MyST, the reference from docstrings, every warning an error."""

from __future__ import annotations

from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docutils import nodes
    from docutils.nodes import Element
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "ckptcore"
copyright = "The ckptcore authors"
release = version = distribution_version("ckptcore")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ckptcore {release}"
default_role = "py:obj"
suppress_warnings = ["ref.python"]  # an attribute in a docstring (`rank`) that several classes have

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Shown by their names, not as what they stand for.
autodoc_type_aliases = {
    name: name
    for name in (
        "Buffer", "HostArray", "JSON", "Key", "LayoutFactory", "LeafRecord", "LocationLike", "NodeKind", "Overwrite",
        "ProgressCallback", "PutCondition", "Segment", "Skeleton", "TreePath",
    )
}  # fmt: skip
napoleon_numpy_docstring = False
napoleon_use_ivar = True

MEMBERS = {"attribute", "method", "property", "classmethod", "staticmethod"}


def find_short_name(
    app: Sphinx, environment: BuildEnvironment, node: pending_xref, content: Element
) -> nodes.reference | None:
    """Link `Box`, or the ``ckptcore.model.arrays.Box`` of a signature, to where it is documented.

    A name with a dot may be that of a member (`StorageBackend.put`); one without is that of a class, function or value.
    """
    if node.get("refdomain") != "py":
        return None
    domain = environment.domains.python_domain
    target = str(node["reftarget"]).removesuffix("()")
    wanted = target.rpartition(".")[2] if target.startswith("ckptcore.") else target
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
