"""Documents about two checkpoints: what differs without reading arrays, and how the elements of one array differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore_tools.comparison import ArrayPair, TreeComparison
from ckptcore_tools.elements import Tolerance

from ckptcore.model import JSON, format_path
from ckptcore.redaction import redacted, redacted_location
from ckptcore_view.documents.numbers import number_to_json
from ckptcore_view.documents.request import BadRequestError, Request
from ckptcore_view.open_tree import OpenTree
from ckptcore_view.viewed import Viewed

_MAX_ROWS: Final = 5_000


def differences_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return the differences that can be found without reading arrays, and the arrays that both trees have.

    Parameters: ``at`` and ``other``, the places of two trees.
    """
    return viewed.read_current(
        request.text("at"),
        lambda a: viewed.read_current(request.text("other"), lambda b: _differences(a, b, request)),
    )


def _differences(a: OpenTree, b: OpenTree, request: Request) -> Mapping[str, JSON]:
    comparison = TreeComparison(a.side, b.side, Tolerance())
    found = list(request.each(comparison.structure_differences(with_dtypes=True)))
    return {
        "a": redacted_location(a.location),
        "b": redacted_location(b.location),
        "version": a.version,
        "count": len(found),
        "differences": [
            {"path": one.path, "kind": one.kind, "a": _text(one.a), "b": _text(one.b)} for one in found[:_MAX_ROWS]
        ],
        "arrays": len(comparison.pairs),
        "pairs": [
            {"path": format_path(pair.path), "leaf": a.side.leaves[pair.path], "nbytes": a.record(pair.a).spec.nbytes}
            for pair in comparison.pairs[:_MAX_ROWS]
        ],
    }


def _text(value: JSON) -> JSON:
    return None if value is None else str(value)[:200]


def difference_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return how the elements of one array differ between two trees. Reads all of its elements from both.

    Parameters: ``at`` and ``other``, the places of the trees, and ``leaf``, the number of the array in the first.
    """
    return viewed.read(
        request.text("at"),
        lambda a: viewed.read(request.text("other"), lambda b: _difference(a, b, request)),
    )


def _difference(a: OpenTree, b: OpenTree, request: Request) -> Mapping[str, JSON]:
    leaf = request.array_of(a)
    path = a.path(leaf)
    pair = ArrayPair(path, a.stored(leaf), b.stored(b.leaf_at(path)))
    spec, other = a.record(pair.a).spec, b.record(pair.b).spec
    if spec.shape != other.shape:
        text = f"{format_path(path)} is {spec} in {a.location} and {other} in {b.location}"
        raise BadRequestError(redacted(text))
    comparison = TreeComparison(a.side, b.side, Tolerance())
    distance = comparison.distance_of(pair, lambda _: request.check_wanted())
    return {
        "path": format_path(path),
        "elements": spec.size,
        "differing": distance.differing,
        "largest": number_to_json(distance.largest),
        "norm": number_to_json(distance.norm),
        "worst": [
            {
                "index": list(one.position),
                "a": number_to_json(one.a),
                "b": number_to_json(one.b),
                "error": number_to_json(one.error),
            }
            for one in distance.worst
        ],
    }
