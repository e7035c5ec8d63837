"""JSON documents written by other software: parsing and validation."""

from __future__ import annotations

import json
from typing import TypeVar

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import JSON

__all__ = ["corrupt", "encode_document", "expect", "extents", "naturals", "object_of", "parse_document", "text_of"]

T = TypeVar("T")


def parse_document(data: bytes, key: str) -> JSON:
    """Return the JSON document in a file.

    Raises:
        CorruptCheckpointError: the file is not JSON.
    """
    try:
        document: JSON = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{key}: expected a JSON document, found {len(data)} bytes that are not JSON: {error or 'too deep'}. "
            "The file is damaged or incomplete",
            key=key,
        ) from error
    return document


def encode_document(document: JSON) -> bytes:
    """Return a document as ASCII bytes."""
    return json.dumps(document).encode("ascii")


def expect(found: JSON, kind: type[T], key: str, what: str) -> T:
    """Return `found` if it has this type; a bool does not count as an int.

    Raises:
        CorruptCheckpointError
    """
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise corrupt(key, f"a {kind.__name__} as {what}", found)
    return found


def object_of(found: JSON, key: str, what: str) -> dict[str, JSON]:
    """Return `found` if it is a JSON object.

    Raises:
        CorruptCheckpointError
    """
    if not isinstance(found, dict):
        raise corrupt(key, f"an object as {what}", found)
    return found


def text_of(found: JSON, key: str, what: str) -> str:
    """Return `found` if it is text without lone surrogates, which names cannot contain.

    Raises:
        CorruptCheckpointError
    """
    text = expect(found, str, key, what)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise corrupt(key, f"text of Unicode characters as {what}", found)
    return text


def extents(found: JSON, key: str, what: str) -> tuple[int, ...]:
    """Return `found` if it is the shape of an array.

    Raises:
        CorruptCheckpointError
    """
    shape = naturals(found, key, what)
    if len(shape) > 64:
        raise corrupt(key, f"at most 64 extents as {what}", len(shape))
    return shape


def naturals(found: JSON, key: str, what: str) -> tuple[int, ...]:
    """Return `found` if it is a list of non-negative integers below 2**63.

    Raises:
        CorruptCheckpointError
    """
    numbers = expect(found, list, key, what)
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise corrupt(key, f"whole numbers as {what}", number)
    return tuple(numbers)


def corrupt(key: str, expected: str, found: object) -> CorruptCheckpointError:
    """Return the error for unexpected content of a file."""
    return CorruptCheckpointError(
        f"{key}: expected {expected}, found {str(found)[:80]!r}. The file is damaged, or something else wrote it",
        key=key,
    )
