"""Rules for keys of dicts and items of sets, which limit the cost of hashing them.

A hostile file chooses its keys. Python hashes tuples recursively, and a shared tuple once per
occurrence. Thousands of integers, floats or tuples can be chosen with one hash, which makes
building a dict quadratic. Both costs are limited here. Strings and bytes are safe, because Python
hashes them with a secret.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

from ckptcore_dcp.pickles.values import Call, CompactObject, Global, Persistent, brief, malformed

PLAIN_KEYS: Final = frozenset({str, bytes, bool, type(None), Call, CompactObject, Global})
"""Types whose hashes a file cannot choose. A `Call` or a `CompactObject` is hashed by identity."""

_MAX_EQUAL_HASHES: Final = 64
"""Maximum number of keys with the same hash in one dict."""
MAX_KEY_PARTS: Final = 100
"""Maximum number of values that make up a key."""
_LARGE: Final = sys.hash_info.modulus
"""Larger integers share their hashes with smaller ones."""


class KeyCheck:
    """Counts equal hashes in the dicts and sets of one pickle. Not thread-safe."""

    def __init__(self, key: str) -> None:
        self._key = key
        # By identity. The tuple holds a reference to the container, so that no other object gets
        # this identity.
        self._seen: dict[int, tuple[object, dict[int, int]]] = {}

    def check(self, container: object, keys: Iterable[Any], position: int) -> None:
        """Check that the keys can be added to the dict or set at limited cost.

        Args:
            container: the dict or set.
            keys: the keys or items to add.
            position: offset in the pickle, in bytes, for the error.

        Raises:
            CorruptCheckpointError: a key is unhashable or too large, or too many keys have one hash.
        """
        for each in keys:
            kind = type(each)
            if kind in PLAIN_KEYS or (kind is int and -_LARGE < each < _LARGE):
                continue
            self._check_parts(each, position)
            counts = self._seen.setdefault(id(container), (container, {}))[1]
            code = hash(each)
            counts[code] = count = counts.get(code, 0) + 1
            if count > _MAX_EQUAL_HASHES:
                raise malformed(
                    self._key, position, f"more than {_MAX_EQUAL_HASHES} keys of one dict or set have the same hash"
                )

    def _check_parts(self, value: Any, position: int) -> None:
        level = [value]
        count = 1
        # Each round goes one level deeper and adds at least one part, so the number of parts limits
        # the depth.
        while level:
            inner: list[Any] = []
            for each in level:
                kind = type(each)
                if kind is tuple or kind is frozenset:
                    count += len(each)
                    if count > MAX_KEY_PARTS:
                        raise malformed(
                            self._key, position, f"a key of a dict or set consists of more than {MAX_KEY_PARTS} values"
                        )
                    inner.extend(each)
                elif kind is Persistent:
                    count += 1
                    inner.append(each.id)
                elif kind not in PLAIN_KEYS and kind is not int and kind is not float:
                    raise malformed(self._key, position, f"a {brief(each)} cannot be a key of a dict or set")
                if count > MAX_KEY_PARTS:
                    raise malformed(
                        self._key, position, f"a key of a dict or set consists of more than {MAX_KEY_PARTS} values"
                    )
            level = inner
