"""JSON documents in files that other software wrote: read, and held to what is expected of them."""

from __future__ import annotations

import json
from typing import TypeVar

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import JSON

__all__ = ["corrupt", "encode_document", "expect", "extents", "naturals", "object_of", "parse_document", "text_of"]

T = TypeVar("T")


def parse_document(data: bytes, key: str) -> JSON:
    """The JSON that a file holds.

    Raises:
        CorruptCheckpointError: if it is none.
    """
    try:
        document: JSON = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{key}: expected a JSON document, found {len(data)} bytes that are none: {error or 'too deep'}. "
            "The file is damaged or was not written to its end",
            key=key,
        ) from error
    return document


def encode_document(document: JSON) -> bytes:
    """A document as the bytes of a file, in ASCII."""
    return json.dumps(document).encode("ascii")


def expect(found: JSON, kind: type[T], key: str, what: str) -> T:
    """`found` itself, if it is of a type; a bool is no int.

    Raises:
        CorruptCheckpointError
    """
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise corrupt(key, f"a {kind.__name__} as {what}", found)
    return found


def object_of(found: JSON, key: str, what: str) -> dict[str, JSON]:
    """`found` itself, if it is a JSON object.

    Raises:
        CorruptCheckpointError
    """
    if not isinstance(found, dict):
        raise corrupt(key, f"an object as {what}", found)
    return found


def text_of(found: JSON, key: str, what: str) -> str:
    """`found` itself, if it is text that can be in a name: without surrogates that stand alone.

    Raises:
        CorruptCheckpointError
    """
    text = expect(found, str, key, what)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise corrupt(key, f"text of Unicode characters as {what}", found)
    return text


def extents(found: JSON, key: str, what: str) -> tuple[int, ...]:
    """The shape of an array.

    Raises:
        CorruptCheckpointError
    """
    shape = naturals(found, key, what)
    if len(shape) > 64:
        raise corrupt(key, f"at most 64 extents as {what}", len(shape))
    return shape


def naturals(found: JSON, key: str, what: str) -> tuple[int, ...]:
    """Whole numbers that are not negative and fit into 63 bits.

    Raises:
        CorruptCheckpointError
    """
    numbers = expect(found, list, key, what)
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise corrupt(key, f"whole numbers as {what}", number)
    return tuple(numbers)


def corrupt(key: str, expected: str, found: object) -> CorruptCheckpointError:
    """The error to raise for something in a file that is not what is expected."""
    return CorruptCheckpointError(
        f"{key}: expected {expected}, found {str(found)[:80]!r}. The file is damaged, or something else wrote it",
        key=key,
    )
