"""Layouts of rows: where numbers, texts and references stand between opcodes that all rows of a layout share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ckptcore_dcp.pickles.rows import UNSET
from ckptcore_dcp.pickles.values import Global, Value

__all__ = ["MOST_AXES", "NotARow", "NumberField", "RowLayout", "RowScan", "TextField"]

_NUMBERS: Final = {0x4B: (1, False), 0x4D: (2, False), 0x4A: (4, True)}
"""BININT1, BININT2 and BININT: how many bytes follow, and whether they are signed."""
_LONG1: Final = 0x8A
_MOST_LONG: Final = 8
_REFERENCES: Final = {0x68: 1, 0x6A: 4}
"""BINGET and LONG_BINGET: how many bytes follow."""
_MARK: Final = 0x28
MOST_AXES: Final = 8
"""Of a size in a row: what more axes take is not worth a column for each row."""
_SIZE: Final = Global("torch", "Size")
_CLOSED: Final = (b")", b"\x85\x94", b"\x86\x94", b"\x87\x94")
"""EMPTY_TUPLE, or TUPLE1 to TUPLE3 and MEMOIZE, by the number of items; from four on a tuple has a mark."""
_CALLED: Final = b"\x85\x94R\x94"
"""TUPLE1, MEMOIZE, REDUCE, MEMOIZE: a call with one argument."""


class NotARow(Exception):
    """An object is not of the pattern."""


@dataclass(frozen=True, slots=True)
class NumberField:
    """A number, from 0 on.

    Attributes:
        start, nbytes: where its bytes are in the row.
        signed: whether it may be negative, which no row is.
    """

    start: int
    nbytes: int
    signed: bool = False


@dataclass(frozen=True, slots=True)
class TextField:
    """A text that the row names.

    Attributes:
        start, stop: where its bytes are in the row.
        memo: its number in the memo, counted from the first that the row puts there.
    """

    start: int
    stop: int
    memo: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What rows of one layout share.

    Attributes:
        template: the bytes of one of them.
        varying: which bytes may differ, as ranges.
        body: how many bytes make the object; what follows leads to the next row.
        memo, body_memo: how many entries a row puts into the memo, and how many its body does.
        numbers: by name of a column; references to the memo are numbers too.
        texts: by name of a column.
        constants: by name of a column, a number that all of them have.
        values: by name, values that all of them have, each with its number in the memo as of a `TextField`.
    """

    template: bytes
    varying: tuple[tuple[int, int], ...]
    body: int
    memo: int
    body_memo: int
    numbers: dict[str, NumberField]
    texts: dict[str, TextField]
    constants: dict[str, int]
    values: dict[str, tuple[Value, int]]


@dataclass(slots=True)
class RowScan:
    """Looks at one row, opcode after opcode. Its methods raise `NotARow` where it is none.

    Attributes:
        data: the pickle.
        start: where the row begins.
        memo: what was put before it.
        position: of the next opcode.
        memoized: how many entries it has put so far.
    """

    data: bytes
    start: int
    memo: list[Any]
    position: int = field(init=False)
    memoized: int = field(default=0, init=False)
    _body: tuple[int, int] = field(default=(0, 0), init=False)
    _varying: list[tuple[int, int]] = field(default_factory=list, init=False)
    _numbers: dict[str, NumberField] = field(default_factory=dict, init=False)
    _texts: dict[str, TextField] = field(default_factory=dict, init=False)
    _constants: dict[str, int] = field(default_factory=dict, init=False)
    _values: dict[str, tuple[Value, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.position = self.start

    @property
    def code(self) -> int:
        """The opcode that is next."""
        if self.position >= len(self.data):
            raise NotARow
        return self.data[self.position]

    def opcodes(self, expected: bytes) -> None:
        """Opcodes without arguments."""
        if not self.data.startswith(expected, self.position):
            raise NotARow
        self.position += len(expected)
        self.memoized += expected.count(b"\x94")

    def constant(self) -> Value:
        """What a reference is to, which all rows of the layout make alike."""
        number = self._reference()
        if number >= len(self.memo) or self.memo[number] is UNSET:
            raise NotARow
        value: Value = self.memo[number]
        return value

    def number(self, name: str) -> None:
        """A number."""
        code = self.code
        begin = self.position + 1
        if code == _LONG1:
            nbytes, signed = self._byte(begin), True
            begin += 1
            if not 0 < nbytes <= _MOST_LONG:
                raise NotARow
        elif code in _NUMBERS:
            nbytes, signed = _NUMBERS[code]
        else:
            raise NotARow
        self._vary(begin, nbytes)
        self._numbers[name] = NumberField(begin - self.start, nbytes, signed)

    def text(self, name: str) -> None:
        """A text that is named, or a reference to one."""
        if self.code in _REFERENCES:
            self.reference(name)
            return
        if self.code != 0x8C:  # SHORT_BINUNICODE
            raise NotARow
        begin = self.position + 2
        nbytes = self._byte(begin - 1)
        self._vary(begin, nbytes)
        self._texts[name] = TextField(begin - self.start, begin - self.start + nbytes, self.memoized)
        self.opcodes(b"\x94")

    def reference(self, name: str) -> None:
        """A reference, to another value in each row."""
        begin = self.position + 1
        self._reference()
        nbytes = self.position - begin
        self._varying.append((begin - self.start, self.position - self.start))
        self._numbers[name] = NumberField(begin - self.start, nbytes)

    def size(self, name: str) -> None:
        """A ``torch.Size``; a column for each axis, and one that says how many there are."""
        if self.constant() != _SIZE:
            raise NotARow
        marked = self.code == _MARK
        if marked:
            self.position += 1
        axes = 0
        while self.code == _LONG1 or self.code in _NUMBERS:
            self.number(f"{name}.{axes}")
            axes += 1
            if axes > MOST_AXES:
                raise NotARow
        if marked != (axes >= len(_CLOSED)):
            raise NotARow
        self.opcodes((b"t\x94" if marked else _CLOSED[axes]) + _CALLED)
        self._constants[f"{name}.axes"] = axes

    def keep(self, name: str, value: Value, memo: int) -> None:
        """A value that all rows of the layout have, and put into the memo under a number (`memoized`)."""
        self._values[name] = value, memo

    def end_body(self) -> None:
        """Here the object is complete."""
        self._body = (self.position - self.start, self.memoized)

    def layout(self, stop: int) -> RowLayout:
        """What was found; the row has to end there."""
        if self.position != stop:
            raise NotARow
        body, body_memo = self._body
        return RowLayout(
            self.data[self.start : stop],
            tuple(self._varying),
            body,
            self.memoized,
            body_memo,
            self._numbers,
            self._texts,
            self._constants,
            self._values,
        )

    def _vary(self, begin: int, nbytes: int) -> None:
        self.position = begin + nbytes
        self._varying.append((begin - self.start, self.position - self.start))

    def _byte(self, place: int) -> int:
        if place >= len(self.data):
            raise NotARow
        return self.data[place]

    def _reference(self) -> int:
        nbytes = _REFERENCES.get(self.code)
        if nbytes is None:
            raise NotARow
        begin = self.position + 1
        self.position = begin + nbytes
        return int.from_bytes(self.data[begin : self.position], "little")
