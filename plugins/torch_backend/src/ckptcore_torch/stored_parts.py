"""Stored parts of tensors: the text that describes the composed tensor, and the shapes of blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.errors import CorruptCheckpointError, TreeMismatchError
from ckptcore.model import JSON, PARTS, AbstractArray


def stored_text(kind: str, shape: Sequence[int], **others: JSON) -> str:
    """Return the text that describes a tensor of a type and shape."""
    return json.dumps({"type": kind, "shape": list(shape), **others})


def parse_text(text: object) -> Mapping[str, Any]:
    """Decode a stored result of `stored_text`. The text may be hostile.

    Raises:
        CorruptCheckpointError: if the text is not a JSON object.
    """
    try:
        document = json.loads(str(text))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"the text {PARTS!r} of the parts of a tensor cannot be read: {str(text)[:80]!r}")
    return document


def expect_parts(own: object, stored: object, *, may_differ: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return the stored parts. Raise an error if they do not belong to a tensor like the requested one.

    Args:
        own: the text of the requested tensor.
        stored: value that is stored at the path of the tensor.
        may_differ: names of entries of the text that are not compared.

    Raises:
        TreeMismatchError: if the parts belong to another kind of tensor, or if the stored value does not consist of
            parts.
        CorruptCheckpointError: if their text is damaged.
    """
    requested = parse_text(own)
    kind = requested["type"]
    if not isinstance(stored, Mapping) or PARTS not in stored:
        what = f"an array of {stored.dtype.name}" if isinstance(stored, AbstractArray) else "another value"
        difference = f"the parts of a {kind} are requested, {what} is stored"
        raise TreeMismatchError(
            f"{difference}; request what is stored, such as a plain tensor, and convert it", [difference]
        )
    entries, requested = _entries(parse_text(stored[PARTS])), _entries(requested)
    differences = [
        f"{name}: {requested.get(name)} is requested, {entries.get(name)} is stored"
        for name in dict.fromkeys([*requested, *entries])
        if requested.get(name) != entries.get(name) and name not in may_differ
    ]
    if differences:
        remedy = "create the tensor as it was when it was saved, or load its parts without it, as a dict"
        if requested.get("shards") != entries.get("shards"):
            remedy = "the mesh cuts blocks of the quantised tensor: load it on a mesh that divides it as the saving one"
        raise TreeMismatchError(f"{'; '.join(differences)}; {remedy}", differences)
    return stored


def _entries(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entries of a text.

    Entries of a context that is a dict are returned one by one, as ``context.NAME``.
    """
    context = text.get("context")
    if not isinstance(context, dict):
        return text
    return {**text, "context": None, **{f"context.{name}": entry for name, entry in context.items()}}


def flat_shape(shape: tuple[int, ...], block: int) -> tuple[int, ...] | None:
    """Return the stored shape of a flat part of a whole tensor, in which shards of rows are boxes.

    Return None if the blocks have no such shape. The part then keeps its own shape.

    Args:
        shape: the shape of the whole tensor.
        block: elements of the tensor for each element of the part.
    """
    row = math.prod(shape[1:])
    if len(shape) < 2 or not block or not row:
        return None if len(shape) != 1 or not block or shape[0] % block else (shape[0] // block,)
    if not shape[-1] % block:
        return (*shape[:-1], shape[-1] // block)
    if not row % block:
        return (shape[0], row // block)
    if not block % row and not shape[0] % (block // row):
        return (shape[0] * row // block,)
    return None
