"""The file `_strings.json`: the strings of a tree, each at the JSON pointer that ``/`` and its name make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ckptcore.model import JSON
from ckptcore_orbax.orbax.documents import corrupt, encode_document, expect, object_of, parse_document

__all__ = ["STRINGS_FILE", "Strings", "encode_strings"]

STRINGS_FILE: Final = "_strings.json"

_BAD_ESCAPE: Final = re.compile("~(?![01])")


class Strings:
    """What such a file holds; it may be hostile.

    Raises:
        CorruptCheckpointError: also from `text`, if there is no string at the name.
    """

    def __init__(self, data: bytes, key: str) -> None:
        self._key = key
        self._document = object_of(parse_document(data, key), key, "the file")

    def text(self, name: str) -> str:
        """The string of a leaf."""
        found: JSON = self._document
        for token in _tokens(name) or ():
            found = found.get(token) if isinstance(found, dict) else None
        if not isinstance(found, str):
            raise corrupt(self._key, f"the string {name[:80]!r}", found)
        return expect(found, str, self._key, "a string")


def encode_strings(strings: Mapping[str, str]) -> bytes:
    """The file of strings by name.

    A name that is no JSON pointer (it has a ``~`` that escapes nothing), or one that goes on with ``/`` from the name of
    another string, is left out: Orbax finds nothing there.
    """
    document: dict[str, Any] = {}
    addressed = {name: tokens for name in strings if (tokens := _tokens(name)) is not None}
    for name, tokens in sorted(addressed.items(), key=lambda item: len(item[1])):
        inner: Any = document
        for token in tokens[:-1]:
            inner = inner.setdefault(token, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            # Readers in other languages refuse a whole file that has surrogates that stand alone.
            inner.setdefault(tokens[-1], strings[name].encode("utf-8", "replace").decode())
    return encode_document(document)


def _tokens(name: str) -> list[str] | None:
    """The keys that lead to a string, as RFC 6901 has them; None where the name is no JSON pointer."""
    if _BAD_ESCAPE.search(name) or any("\ud800" <= character <= "\udfff" for character in name):
        return None
    return [token.replace("~1", "/").replace("~0", "~") for token in name.split("/")]
