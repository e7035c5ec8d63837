"""Documents: the content of the page, as JSON. Each has a name and a few parameters, as in a URL.

::

    view         the viewed location and its kind
    run          the steps of a run, its events, the log of a Trainer, and panels of other distributions
    runs         the runs of a folder
    checkpoint   a checkpoint: its origin, files and timeline, and its checkpointables
    tree         the rows of a tree
    array        an array without its elements: shards, chunks and objects
    statistics   statistics of all elements of an array
    elements     a slice of an array
    differences  differences between two trees, without elements of arrays
    difference   differences between the elements of one array

Arrays have numbers within their tree. The document of the tree has a member ``version``. Pass it as a parameter to the
documents about arrays, which are refused if the checkpoint was replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from ckptcore.model import JSON
from ckptcore.redaction import redacted_location
from ckptcore_view.documents.array import array_document
from ckptcore_view.documents.checkpoint import checkpoint_document, tree_document
from ckptcore_view.documents.elements import (
    difference_document,
    differences_document,
    elements_document,
    statistics_document,
)
from ckptcore_view.documents.request import BadRequestError, CancelledError, Request
from ckptcore_view.documents.run import run_document, runs_document
from ckptcore_view.viewed import Viewed

__all__ = ["DOCUMENTS", "BadRequestError", "CancelledError", "Document", "Request", "document_of"]

Document: TypeAlias = Mapping[str, JSON]


def _view_document(viewed: Viewed, request: Request) -> Document:
    return {
        "location": redacted_location(viewed.location),
        "kind": viewed.kind,
        "other": redacted_location(viewed.other) or None,
        "other_has_parts": viewed.other_has_parts,
        "policy": viewed.policy,
        "children": dict(viewed.children),
    }


DOCUMENTS: Final[Mapping[str, Callable[[Viewed, Request], Document]]] = {
    "view": _view_document,
    "run": run_document,
    "runs": runs_document,
    "checkpoint": checkpoint_document,
    "tree": tree_document,
    "array": array_document,
    "statistics": statistics_document,
    "elements": elements_document,
    "differences": differences_document,
    "difference": difference_document,
}
"""The function that makes each document, by name."""


def document_of(viewed: Viewed, name: str, request: Request) -> Document:
    """Return a document.

    Raises:
        BadRequestError: there is no such document, or a parameter is wrong.
        CheckpointError: the checkpoint cannot be read.
    """
    make = DOCUMENTS.get(name)
    if make is None:
        raise BadRequestError(f"there is no document {name[:80]!r}")
    return make(viewed, request)
