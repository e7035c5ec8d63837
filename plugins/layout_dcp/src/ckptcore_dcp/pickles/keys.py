"""Which values may be keys of a dict or items of a set, and what it may cost to hash them.

A file chooses its keys. Python hashes a tuple by recursion, and a shared one as often as it stands inside itself;
integers, floats and tuples can be chosen such that thousands have one hash, which makes a dict of them quadratic. Both
are bounded here. Strings and bytes are safe: Python hashes them with a secret.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

from ckptcore_dcp.pickles.refusals import malformed
from ckptcore_dcp.pickles.values import Call, Compact, Global, Persistent, brief

__all__ = ["PLAIN_KEYS", "KeyCheck"]

PLAIN_KEYS: Final = frozenset({str, bytes, bool, type(None), Call, Compact, Global})
"""Types whose hashes a file cannot choose; a `Call` or a `Compact` is hashed by identity."""

_ALIKE: Final = 64
"""How many keys of one dict may have one hash."""
_PARTS: Final = 100
"""How many values a key may be made of."""
_LARGE: Final = sys.hash_info.modulus
"""From this on integers have hashes of smaller ones."""


class KeyCheck:
    """What is known of the hashes in the dicts and sets of one pickle. One thread."""

    def __init__(self, key: str) -> None:
        self._key = key
        # By identity of the container, which is held, so that no other gets its identity.
        self._seen: dict[int, tuple[object, dict[int, int]]] = {}

    def check(self, container: object, keys: Iterable[Any], position: int) -> None:
        """See that all the keys can go into the dict or set at a bounded cost.

        Args:
            position: in the pickle, in bytes, for the error.

        Raises:
            CorruptCheckpointError: if one is no key, or is too large, or too many have one hash.
        """
        for each in keys:
            kind = type(each)
            if kind in PLAIN_KEYS or (kind is int and -_LARGE < each < _LARGE):
                continue
            self._check_parts(each, position)
            counts = self._seen.setdefault(id(container), (container, {}))[1]
            code = hash(each)
            counts[code] = count = counts.get(code, 0) + 1
            if count > _ALIKE:
                raise malformed(self._key, position, f"more than {_ALIKE} keys of one dict or set have the same hash")

    def _check_parts(self, value: Any, position: int) -> None:
        level = [value]
        count = 1
        # Each round goes one deeper, and adds a part at least: so the depth is bounded by the number of parts.
        while level:
            inner: list[Any] = []
            for each in level:
                kind = type(each)
                if kind is tuple or kind is frozenset:
                    count += len(each)
                    if count > _PARTS:
                        raise malformed(
                            self._key, position, f"a key of a dict or set is made of more than {_PARTS} values"
                        )
                    inner.extend(each)
                elif kind is Persistent:
                    count += 1
                    inner.append(each.id)
                elif kind not in PLAIN_KEYS and kind is not int and kind is not float:
                    raise malformed(self._key, position, f"a {brief(each)} is a key of a dict or set and cannot be one")
                if count > _PARTS:
                    raise malformed(self._key, position, f"a key of a dict or set is made of more than {_PARTS} values")
            level = inner
