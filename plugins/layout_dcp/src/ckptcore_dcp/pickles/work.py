"""What the encoder has yet to write: its work list stands in for the stack of the interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ckptcore_dcp.pickles.values import Global, Value

__all__ = ["Made", "Raw", "Work", "in_order", "is_flat"]

_FLAT: Final = frozenset({int, str, bool, float, type(None), bytes, Global})
"""Types that are written without looking further."""


class Raw:
    """Opcodes that come after what was put on the work list later."""

    __slots__ = ("opcodes",)

    def __init__(self, opcodes: bytes) -> None:
        self.opcodes = opcodes


class Work:
    """Several pieces of work, which are left out together if their object is there already."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces


class Made:
    """The point at which a tuple, frozenset or call is on the reader's stack, but for what made it."""

    __slots__ = ("discard", "opcodes", "value")

    def __init__(self, value: Any, opcodes: bytes, discard: bytes) -> None:
        self.value = value
        self.opcodes = opcodes
        self.discard = discard
        """What takes the parts from the reader's stack again, if the value has come to be made by one of them."""


def is_flat(value: tuple[Value, ...]) -> bool:
    """Whether a tuple holds numbers, texts and the like only, or tuples of these."""
    for each in value:
        if each.__class__ not in _FLAT and (each.__class__ is not tuple or not _FLAT.issuperset(map(type, each))):
            return False
    return True


def in_order(items: Iterable[Value]) -> list[Value]:
    """The items of a set, in an order that is the same in each process where they are of one plain kind."""
    found: list[Any] = list(items)
    kinds = set(map(type, found))
    if len(kinds) == 1 and kinds <= {str, bytes, int, float, bool} or kinds <= {int, float, bool}:
        found.sort()
    return found
