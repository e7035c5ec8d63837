"""The state of the machine: the values that the opcodes of a pickle have built so far."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final, TypeAlias

from ckptcore_dcp.pickles.literals import Window, line
from ckptcore_dcp.pickles.values import Call, KeyCheck, Places, Value


class _Unset:
    """A memo entry without a value: not set by the pickle, or a part of a `CompactObject`."""

    __slots__ = ()


UNSET: Final = _Unset()
ObjectReader: TypeAlias = Callable[[list[Any], int, list[Any]], int | None]
"""Reads objects in one step: replaces their class on the stack by values, and adds the memo entries of their opcodes.

Receives the values above the last MARK, of which the class of the first object is the last; the offset of EMPTY_TUPLE,
NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK in the pickle; and the memo, in which no entry was ever replaced. Or, after
the MARK of items of a dict: no values, and the offset of the first item. Returns the offset after the objects or items,
or None if the machine must execute the opcodes. Memo entries without a value are `UNSET`; a pickle that refers to one
is rejected.
"""
RawReader: TypeAlias = Callable[[Call, int], tuple[Value, int] | None]
"""Finds bytes between the opcodes of a pickle, as joblib writes them. Returns None if there are no such bytes.

Receives an object whose state was just set, and the offset after it. Returns the value that takes its place on the
stack, and the offset at which the pickle continues.
"""
_UINT2: Final = Struct("<H")
_UINT4: Final = Struct("<I")
_INT4: Final = Struct("<i")
_UINT8: Final = Struct("<Q")


class State:
    """The state of the machine. Values are Any, because their types are known only after a check.

    Attributes:
        data: the pickle, or a `Window` of it, which has the methods of bytes that opcodes call.
        key: the object that contains the data, for errors.
        begin: offset of the pickle in `data`.
        position: offset after the last line or text, for errors while it is decoded.
        stack: the values above the last MARK.
        outer: the values below each MARK. A MARK starts a new stack, so that no opcode can remove values below it.
        memo: values that the pickle may refer to.
        keys: checks the keys of dicts and the items of sets.
        objects: see `ObjectReader`. None after an opcode that may replace memo entries.
        places: see `read_pickle`.
        raw: see `RawReader`.
        uint2, uint4, int4, uint8: functions that return a tuple with the number at an offset of the data.
    """

    __slots__ = (
        "begin", "data", "int4", "key", "keys", "memo", "objects", "outer", "places", "position", "raw", "stack",
        "uint2", "uint4", "uint8",
    )  # fmt: skip

    def __init__(
        self,
        data: bytes,
        begin: int,
        key: str,
        *,
        objects: ObjectReader | None = None,
        places: Places | None = None,
        raw: RawReader | None = None,
    ) -> None:
        self.data = data
        self.key = key
        self.begin = begin
        self.position = begin
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: list[Any] = []
        self.keys = KeyCheck(key)
        self.objects = objects
        self.places = places
        self.raw = raw
        self.uint2, self.uint4, self.int4, self.uint8 = [
            data.unpacker(numbers) if isinstance(data, Window) else numbers.unpack_from
            for numbers in (_UINT2, _UINT4, _INT4, _UINT8)
        ]

    def pop_mark(self) -> list[Any]:
        """Remove the last MARK and the values above it. Return the values."""
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def line(self, position: int) -> tuple[bytes, int]:
        """Return the rest of a line, and the offset after it."""
        text, self.position = line(self.data, position, self.key)
        return text, self.position
