"""Documents about the elements of an array: statistics, slices, and differences between two checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Final

import numpy as np
from ckptcore_tools.comparison import ArrayPair, TreeComparison
from ckptcore_tools.elements import Tolerance, are_numbers, numbers_of
from ckptcore_tools.statistics import statistics_of

from ckptcore.model import JSON, format_path
from ckptcore.on_demand.arrays import StoredArray
from ckptcore.on_demand.indexing import index_box
from ckptcore.redaction import redacted, redacted_location
from ckptcore_view.documents.request import BadRequestError, Request, number_to_json
from ckptcore_view.open_tree import OpenTree
from ckptcore_view.viewed import Viewed

_MAX_ROWS: Final = 5_000
_MAX_ELEMENTS: Final = 1 << 16
_WINDOW: Final = 64
"""Number of rows and of columns in the first shown slice."""

_MAX_INDEX_CHARACTERS: Final = 4_096
_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")


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
    differences = list(request.each(comparison.structure_differences(with_dtypes=True)))
    return {
        "a": redacted_location(a.location),
        "b": redacted_location(b.location),
        "version": a.version,
        "count": len(differences),
        "differences": [
            {"path": row.path, "kind": row.kind, "a": _text(row.a), "b": _text(row.b)}
            for row in differences[:_MAX_ROWS]
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
                "index": list(element.position),
                "a": number_to_json(element.a),
                "b": number_to_json(element.b),
                "error": number_to_json(element.error),
            }
            for element in distance.worst
        ],
    }


def statistics_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return the statistics of an array. Reads all of its elements.

    Parameters: ``at``, the place of its tree, and ``leaf``, its number. With ``of``, the number is that of an array in
    the tree at that place, and the array with the same path in ``at`` is read. The page uses this to follow an array
    over steps.
    """
    if "of" not in request.parameters:
        return viewed.read(
            request.text("at"), lambda open_tree: _statistics(open_tree, request.array_of(open_tree), request)
        )
    path = viewed.read(request.text("of"), lambda open_tree: open_tree.path(request.array_of(open_tree)))
    return viewed.read(request.text("at"), lambda open_tree: _statistics(open_tree, open_tree.leaf_at(path), request))


def _statistics(open_tree: OpenTree, leaf: int, request: Request) -> Mapping[str, JSON]:
    if not are_numbers(open_tree.record(leaf).spec.numpy_dtype):
        return {"numbers": False}
    statistics = statistics_of(request.each(open_tree.boxes(leaf)))
    assert statistics is not None  # for numbers
    histogram = statistics.histogram
    return {
        "numbers": True,
        "elements": statistics.elements,
        "nan": statistics.nan,
        "infinite": statistics.infinite,
        "zeros": statistics.zeros,
        "minimum": number_to_json(statistics.minimum),
        "maximum": number_to_json(statistics.maximum),
        "mean": number_to_json(statistics.mean),
        "deviation": number_to_json(statistics.deviation),
        "norm": number_to_json(statistics.norm),
        "histogram": None
        if histogram is None
        else {"start": histogram.start, "stop": histogram.stop, "counts": list(histogram.counts)},
    }


def elements_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return a slice of an array with at most two axes.

    Parameters: ``at`` and ``leaf`` as for the statistics; ``index``, an index of NumPy such as ``[0, 0:64, ::8]``, by
    default the first rows and columns.
    """
    text = request.text("index")
    request.check_wanted()
    return viewed.read(
        request.text("at"), lambda open_tree: _elements(open_tree.array(request.array_of(open_tree)), text)
    )


def _elements(array: StoredArray, text: str) -> Mapping[str, JSON]:
    index = parse_index(text) if text.strip() else _first_window(array.shape)
    try:
        shape = index_box(index, array.shape).shape
    except (IndexError, ValueError) as error:
        raise BadRequestError(f"{text[:80]!r}: {error}") from error
    if len(shape) > 2:
        raise BadRequestError(f"{format_index(index)} has {len(shape)} axes: select one index on all but two axes")
    if int(np.prod(shape, dtype=object)) > _MAX_ELEMENTS:
        raise BadRequestError(
            f"{format_index(index)} has {' × '.join(map(str, shape))} elements, more than {_MAX_ELEMENTS:,}: "
            "use smaller ranges or steps, such as 0:4096:16"
        )
    elements = np.asarray(array[index])
    numbers = numbers_of(elements)
    if numbers is not None and numbers.dtype.kind == "c":
        numbers = np.abs(numbers)
    shown = list(map(_element_text, elements.ravel())) if numbers is None else numbers.ravel().tolist()
    columns = shape[-1] if shape else 1
    return {
        "index": format_index(index),
        "shape": list(shape),
        "numbers": numbers is not None,
        "complex": "complex" in elements.dtype.name,
        "rows": [
            [number_to_json(element) for element in shown[first : first + columns]]
            for first in range(0, len(shown), columns or 1)
        ],
    }


def _element_text(element: object) -> str:
    """Return an element that is not a number as text."""
    if isinstance(element, bytes):
        return element.decode("ascii", "backslashreplace")
    if isinstance(element, np.datetime64 | np.timedelta64) and np.datetime_data(element)[0] == "generic":
        return str(element.astype(np.int64))
    return str(element)


def parse_index(text: str) -> tuple[int | slice | EllipsisType, ...]:
    """Parse an index of integers, slices and ``...``, with or without brackets.

    Raises:
        BadRequestError: it is something else.
    """
    if len(text) > _MAX_INDEX_CHARACTERS:
        raise BadRequestError(f"{text[:80]!r}... is longer than an index of an array can be")
    parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
    try:
        return tuple([_part_of(part) for part in parts]) if parts != [""] else ()
    except ValueError as error:
        raise BadRequestError(
            f"{text[:80]!r} is not an index: expected integers and ranges, such as [0, 0:64, ::8]"
        ) from error


def _part_of(text: str) -> int | slice | EllipsisType:
    """Parse a part of an index.

    Raises:
        ValueError: it is not an integer, a slice or ``...``.
    """
    if text == "...":
        return ...
    ends = [end.strip() for end in text.split(":")]
    if len(ends) > 3 or not all(_NUMBER.fullmatch(end) for end in ends if end or len(ends) == 1):
        raise ValueError(text)
    return int(text) if len(ends) == 1 else slice(*[int(end) if end else None for end in ends])


def format_index(index: Sequence[int | slice | EllipsisType]) -> str:
    """Return an index as text."""
    return f"[{', '.join(map(_part_text, index))}]"


def _part_text(part: int | slice | EllipsisType) -> str:
    if part is ...:
        return "..."
    if not isinstance(part, slice):
        return str(part)
    start, stop = ("" if end is None else str(end) for end in (part.start, part.stop))
    return f"{start}:{stop}" + ("" if part.step is None else f":{part.step}")


def _first_window(shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Return the first rows and columns of the last two axes. For an array with one axis, return more elements."""
    window = _WINDOW if len(shape) > 1 else _WINDOW * 8
    return tuple([0 if axis < len(shape) - 2 else slice(0, min(extent, window)) for axis, extent in enumerate(shape)])
