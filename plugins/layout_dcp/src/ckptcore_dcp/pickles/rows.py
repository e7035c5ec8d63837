"""Rows: values of a pickle that repeat one pattern of opcodes, and are read together by whoever knows the pattern.

The machine asks a `RowReader` where an object begins that may be the first of many alike. What it gets stands on the stack in the
place of the objects, one `Row` for each, so that every opcode that comes later does to them what it would do to objects. Only the
entries of the memo are not there: who refers to one is told that nothing was put. So a pickle that does anything else with rows
than to collect them is refused, or holds rows where objects are looked for; and is read again without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from ckptcore_dcp.pickles.values import Global

__all__ = ["UNSET", "Row", "RowReader", "RowRun", "Unset"]


class Row(int):
    """The number of a row, in the place of the value that it holds; equal to no other, as an object is."""

    # An int because millions are made: it takes no Python function to make one, and the garbage collector does not see it.

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


class Unset:
    """What stands in the memo where nothing was put, or a part of a row."""

    __slots__ = ()


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows that were read.

    Attributes:
        values: what they leave on the stack.
        stop: where they end in the pickle, in bytes.
    """

    values: list[Any]
    stop: int


class RowReader(Protocol):
    """Reads objects of the pickle that it was made for. One thread."""

    def run(self, function: Global, position: int, memo: list[Any]) -> RowRun | None:
        """Read rows, and add to the memo what they put there; None: read this object as any other.

        Args:
            function: the class of an object that begins; it is taken from the stack, and not among the values.
            position: of its EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK, in bytes.
            memo: what was put so far, always at the end. Nothing that stands in it is ever replaced.
        """
        ...
