"""Hostile variants of JSON documents: unexpected values in one or two places, and roots with correct checksums."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import xxhash

from ckptcore.model import JSON

_DEEP: Any = []
for _ in range(60):
    _DEEP = [_DEEP]

HOSTILE: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1, 2**31, 2**62, 2**70, 1.5, -0.0, 1e308, "", "..", "../../etc/passwd", "/etc/passwd", "a\0b",
    "\ud800", "x" * 5000, "0", [], {}, [[]], [-1], [2**62], [2**62, 2**62], ["a", 0], {"": None}, {"a": 1}, _DEEP,
)  # fmt: skip
"""Values that parsers often mishandle."""


def sealed(root: Mapping[str, Any] | bytes) -> bytes:
    """Return the bytes of a root with a correct checksum. A checksum in a mapping is replaced; bytes must have none."""
    if not isinstance(root, bytes):
        unsealed = {name: value for name, value in root.items() if name != "checksum"}
        root = json.dumps(unsealed, separators=(",", ":")).encode()
    body = root[:-1]
    return body + f',"checksum":"xxh3_64:{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode()


def tampered(document: JSON, count: int, seed: int = 0) -> Iterator[JSON]:
    """Yield copies of a document with hostile changes. Equal arguments give equal copies.

    The first copies have one hostile value in one place: all combinations of places and values, or `count` random ones
    if there are more. Then ``count // 4`` copies have one or two random changes.
    """
    choices = random.Random(seed)
    pairs = [(place, value) for place in range(len(list(_places([document])))) for value in range(len(HOSTILE))]
    for place, value in pairs if len(pairs) <= count else choices.sample(pairs, count):
        holder = [copy.deepcopy(document)]
        container, key = list(_places(holder))[place]
        container[key] = copy.deepcopy(HOSTILE[value])
        yield holder[0]
    for _ in range(count // 4):
        changed = document
        for _ in range(choices.choice((1, 1, 1, 2))):
            changed = tamper(changed, choices)
        yield changed


def tamper(document: JSON, choices: random.Random) -> JSON:
    """Return a copy of a document with one random change."""
    holder: list[Any] = [copy.deepcopy(document)]
    places = list(_places(holder))
    container, key = choices.choice(places)
    action = choices.randrange(8)
    value = container[key]
    if action == 0 and container is not holder:
        del container[key]
    elif action == 1 and isinstance(container, list):
        container.insert(key, copy.deepcopy(value))
    elif action == 2 and isinstance(value, int) and not isinstance(value, bool):
        container[key] = value + choices.choice((-1, 1, 7, 8, 4096, -(2**40), 2**40))
    elif action == 3:
        other_container, other_key = choices.choice(places)
        container[key] = copy.deepcopy(other_container[other_key])
    else:
        container[key] = copy.deepcopy(choices.choice(HOSTILE))
    changed: JSON = holder[0]
    return changed


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a document with each of its keys or indices."""
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _places(container[key])
