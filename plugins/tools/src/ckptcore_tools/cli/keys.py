"""Paths in JSON documents."""

from __future__ import annotations

from ckptcore.model import Attribute, TreePath
from ckptcore_tools.cli.documents import KeyDocument

__all__ = ["key_documents"]


def key_documents(path: TreePath) -> list[KeyDocument]:
    """The keys of a path, with attributes kept apart from text."""
    return [{"attr": key.name} if isinstance(key, Attribute) else key for key in path]
