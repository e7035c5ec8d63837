"""Entries of the encoder's work list, which replaces recursion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ckptcore_dcp.pickles.values import Global, Value

__all__ = ["Made", "Raw", "Work", "in_order", "is_flat"]

_FLAT: Final = frozenset({int, str, bool, float, type(None), bytes, Global})
"""Types that are written without the work list."""


class Raw:
    """Opcodes to write."""

    __slots__ = ("opcodes",)

    def __init__(self, opcodes: bytes) -> None:
        self.opcodes = opcodes


class Work:
    """Several steps, skipped together if their object was already written."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces


class Made:
    """Creates a tuple, frozenset or call from the parts on the reader's stack."""

    __slots__ = ("discard", "opcodes", "value")

    def __init__(self, value: Any, opcodes: bytes, discard: bytes) -> None:
        self.value = value
        self.opcodes = opcodes
        self.discard = discard
        """Opcodes that remove the parts from the reader's stack, if one of them already created the value."""


def is_flat(value: tuple[Value, ...]) -> bool:
    """Return whether a tuple contains only numbers, texts and the like, or tuples of these."""
    for each in value:
        if each.__class__ not in _FLAT and (each.__class__ is not tuple or not _FLAT.issuperset(map(type, each))):
            return False
    return True


def in_order(items: Iterable[Value]) -> list[Value]:
    """Return the items of a set, in an order that is equal in all processes if they have one plain type."""
    found: list[Any] = list(items)
    kinds = set(map(type, found))
    if len(kinds) == 1 and kinds <= {str, bytes, int, float, bool} or kinds <= {int, float, bool}:
        found.sort()
    return found
