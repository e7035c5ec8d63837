"""JSON files of a checkpoint: parsing, validation and encoding.

`key` is the key of the file, and `what` describes the checked part of it. Both are for error messages.
"""

from __future__ import annotations

import json
from typing import TypeVar

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import JSON

T = TypeVar("T")


def parse_json(data: bytes, key: str) -> JSON:
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


def encode_json(document: JSON) -> bytes:
    """Return a document as ASCII bytes."""
    return json.dumps(document).encode("ascii")


def expect_type(value: JSON, kind: type[T], key: str, what: str) -> T:
    """Return `value` if it has the type `kind`. A bool does not count as an int.

    Raises:
        CorruptCheckpointError: it has another type.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise unexpected(key, f"a {kind.__name__} as {what}", value)
    return value


def expect_object(value: JSON, key: str, what: str) -> dict[str, JSON]:
    """Return `value` if it is a JSON object.

    Raises:
        CorruptCheckpointError: it is not.
    """
    if not isinstance(value, dict):
        raise unexpected(key, f"an object as {what}", value)
    return value


def expect_text(value: JSON, key: str, what: str) -> str:
    """Return `value` if it is text without lone surrogates, which names cannot contain.

    Raises:
        CorruptCheckpointError: it is not.
    """
    text = expect_type(value, str, key, what)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise unexpected(key, f"text of Unicode characters as {what}", value)
    return text


def expect_shape(value: JSON, key: str, what: str) -> tuple[int, ...]:
    """Return `value` if it is the shape of an array, with at most 64 axes.

    Raises:
        CorruptCheckpointError: it is not.
    """
    shape = expect_counts(value, key, what)
    if len(shape) > 64:
        raise unexpected(key, f"at most 64 extents as {what}", len(shape))
    return shape


def expect_counts(value: JSON, key: str, what: str) -> tuple[int, ...]:
    """Return `value` if it is a list of non-negative integers below 2**63.

    Raises:
        CorruptCheckpointError: it is not.
    """
    numbers = expect_type(value, list, key, what)
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise unexpected(key, f"whole numbers as {what}", number)
    return tuple(numbers)


def unexpected(key: str, expected: str, value: object) -> CorruptCheckpointError:
    """Return an error for a file whose content is not as expected."""
    return CorruptCheckpointError(
        f"{key}: expected {expected}, found {str(value)[:80]!r}. The file is damaged, or something else wrote it",
        key=key,
    )
