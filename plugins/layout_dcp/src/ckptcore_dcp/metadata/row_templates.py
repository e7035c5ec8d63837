"""Templates of opcodes that repeat in a pickle: the bytes of one row, matched with many places at once with NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ckptcore.model import HostArray

TRUE: Final = -1
FALSE: Final = -2
"""Stand for booleans among the items of `RowTemplate.state`. Other items are numbers of memo entries."""
MAX_ITEMS: Final = 8

_PADDING: Final = 16
"""Zeros after the pickle, more than the longest opcode with a number has. Zero is not an opcode."""
_MAX_AXES: Final = 16
_MAX_STEPS: Final = 16
_MAX_NUMBER: Final = 1 << 62
_WORD: Final = 8
_BLOCK_ROWS: Final = 1 << 13
"""Rows matched at a time, so that they stay in the cache."""
_MARK, _TUPLE, _EMPTY_TUPLE, _NONE, _TEXT = b"(t)NX"
_TUPLE_0, _NEW_TRUE, _NEW_FALSE, _LONG_1, _SHORT_TEXT, _MEMOIZE, _FRAME = b"\x84\x88\x89\x8a\x8c\x94\x95"
"""_TUPLE_0 is the opcode of a tuple of one to three items, minus the number of items."""
_REFERENCE_BYTES: Final = {ord("h"): 1, ord("j"): 4}
_NUMBER_BYTES: Final = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
"""Bytes of the argument of each opcode."""

_Values: TypeAlias = Sequence[HostArray]
_Column: TypeAlias = Callable[[_Values], HostArray | int]


class NotARowError(Exception):
    """A place in a pickle has other opcodes than the form."""


class _Field(NamedTuple):
    """A number whose bytes differ between rows: its offset in the segment, its bytes, and a limit of its value."""

    offset: int
    nbytes: int
    limit: int


class _Segment:
    """Consecutive bytes of a row.

    Attributes:
        pattern, mask: the bytes, and which of their bits are equal in all rows.
        fields: the numbers among them.
        has_text: the last number is the length of a text that follows.
        has_frame: the last number is the length of a FRAME that begins after it.
        has_place: the offset after the segment is a value.
    """

    def __init__(self) -> None:
        self.pattern = bytearray()
        self.mask = bytearray()
        self.fields: list[_Field] = []
        self.has_text = False
        self.has_frame = False
        self.has_place = False

    def rows(self, data: HostArray, at: HostArray) -> HostArray:
        """Return the bytes at each offset, as rows of whole words."""
        width = -(-len(self.pattern) // _WORD) * _WORD
        places: HostArray = np.ndarray(len(data) - width + 1, f"V{width}", data, strides=(1,))
        return places[at].view(np.uint8).reshape(len(at), width)

    def equal(self, rows: HostArray) -> HostArray:
        """Return which rows have the pattern."""
        words = rows.view("<u8")
        pattern, mask = [
            np.frombuffer(bytes(part.ljust(rows.shape[1], b"\0")), "<u8") for part in (self.pattern, self.mask)
        ]
        found = np.ones(len(rows), bool)
        for number in range(words.shape[1]):
            found &= (words[:, number] ^ pattern[number]) & mask[number] == 0
        return found


class RowTemplate:
    """The opcodes of one row. Rows match if they differ from it only in numbers, texts and references to texts.

    The methods that read opcodes follow those of one row, at an offset that may be no row: they raise `NotARowError` at
    the first opcode that does not fit. A row that begins where an opcode does reads the same bytes in the same way as
    `read_pickle`, because templates consist of whole opcodes, up to the place of `any_opcode`, which reads only a part
    of one. FRAME may precede any opcode and is skipped.

    Attributes:
        at: the offset after the opcodes that were read.
        references: the memo entries that all rows refer to, without those in `columns`.
        count: number of columns that `match` returns.
    """

    def __init__(self, data: bytes, at: int) -> None:
        """Begin at an offset of the pickle, which has the zeros of `padded_bytes`."""
        self._data = data
        self._end = len(data) - _PADDING
        self.at = at
        self.references: list[int] = []
        self._segments = [_Segment()]
        self._values = 0
        self._columns: list[_Column] = []

    @property
    def count(self) -> int:
        """The number of columns so far."""
        return len(self._columns)

    def opcode(self) -> int:
        """Return the next opcode, after a FRAME before it."""
        if self._data[self.at] == _FRAME:
            self._literal(1)
            self._field(8, self._end)
            self._segments[-1].has_frame = True
            self._segments.append(_Segment())
        if self.at > self._end:
            raise NotARowError
        return self._data[self.at]

    def exactly(self, opcodes: bytes) -> None:
        """Read opcodes without arguments."""
        for opcode in opcodes:
            self._expect(self.opcode() == opcode)
            self._literal(1)

    def reference(self) -> None:
        """Read a reference to a memo entry, which is the same for all rows."""
        nbytes = self._reference_bytes()
        self.references.append(int.from_bytes(self._data[self.at + 1 : self.at + 1 + nbytes], "little"))
        self._literal(1 + nbytes)

    def entry(self) -> None:
        """Read a reference to a memo entry. Adds a column of its number."""
        nbytes = self._reference_bytes()
        self._literal(1)
        self._column(self._field(nbytes))

    def text(self) -> None:
        """Read a text, or a reference to one. Adds the number of the memo entry or -1, and the range of a new text."""
        self._columns += self._text()

    def path(self) -> None:
        """Read a text and a tuple of texts. Adds the number of texts; and what `text` adds, as rows."""
        texts = [self._text()]
        marked = self.opcode() == _MARK
        if marked:
            self._literal(1)
        while len(texts) <= _MAX_STEPS and self.opcode() in (_TEXT, _SHORT_TEXT, *_REFERENCE_BYTES):
            texts.append(self._text())
        count = len(texts) - 1
        self._expect(marked == (count > 3) and count > 0)
        self.exactly(bytes([_TUPLE if marked else _TUPLE_0 + count, _MEMOIZE]))
        self.constant(len(texts))
        self._columns += [_stacked(columns) for columns in zip(*texts, strict=True)]

    def _text(self) -> tuple[_Column, _Column, _Column]:
        code = self.opcode()
        if code in _REFERENCE_BYTES:
            self._literal(1)
            value = self._field(_REFERENCE_BYTES[code])
            return lambda of: of[value], lambda of: 0, lambda of: 0
        self._expect(code in (_TEXT, _SHORT_TEXT))
        self._literal(1)
        begin, nbytes = self.at, 4 if code == _TEXT else 1
        value = self._field(nbytes, self._end)
        stop = self.at + int.from_bytes(self._data[begin : self.at], "little")
        self._expect(stop < self._end)
        self._segments[-1].has_text = True
        self._segments.append(_Segment())
        self._values += 1  # the offset after the text; the length becomes the offset of the text
        self.at = stop
        self.exactly(bytes([_MEMOIZE]))
        return lambda of: -1, lambda of: of[value], lambda of: of[value + 1]

    def number(self, *, optional: bool = False) -> None:
        """Read a number below 2**62, or None if it is optional. Adds the number; -1 for None."""
        if optional and self.opcode() == _NONE:
            self._literal(1)
            self.constant(-1)
        else:
            value = self._number()
            self._expect(value is not None)
            self._column(value or 0)

    def size(self) -> None:
        """Read a call of ``torch.Size``. Adds the number of axes, and a row of extents."""
        self.reference()
        marked = self.opcode() == _MARK
        if marked:
            self._literal(1)
        values: list[int] = []
        while len(values) < _MAX_AXES and (value := self._number()) is not None:
            values.append(value)
        self._expect(marked == (len(values) > 3))
        self.exactly(bytes([_TUPLE if marked else _TUPLE_0 + len(values) if values else _EMPTY_TUPLE]))
        self.exactly((b"\x94" if values else b"") + b"\x85\x94R\x94")
        self.constant(len(values))
        self._columns.append(_stacked([_value(value) for value in values]))

    def state(self) -> None:
        """Read the creation of an object with a tuple of references and booleans as state, if there is one.

        Adds the number of items, 0 without an object, and a row of them.
        """
        items: list[int] = []
        if self.opcode() == _EMPTY_TUPLE:
            self.exactly(b")\x81\x94(")
            while len(items) < MAX_ITEMS and (code := self.opcode()) in (_NEW_TRUE, _NEW_FALSE, *_REFERENCE_BYTES):
                if code in _REFERENCE_BYTES:
                    self.reference()
                    items.append(self.references.pop())
                else:
                    self._literal(1)
                    items.append(TRUE if code == _NEW_TRUE else FALSE)
            self._expect(len(items) > 3)
            self.exactly(b"t\x94b")
        padded = np.array([*items, *[0] * (MAX_ITEMS - len(items))])
        self.constant(len(items))
        self._columns.append(lambda of: np.broadcast_to(padded, (len(of[-1]), MAX_ITEMS)))

    def constant(self, value: int) -> None:
        """Add a column with the same number in each row."""
        self._columns.append(lambda of: value)

    def place(self) -> None:
        """Add a column of the offset after what was read, before the other columns."""
        self._segments[-1].has_place = True
        self._segments.append(_Segment())
        value = self._values
        self._values += 1
        self._columns.insert(0, _value(value))

    def link(self, class_entry: int) -> None:
        """Read the reference to a class that precedes another row."""
        self.reference()
        self._expect(self.references.pop() == class_entry)
        self.opcode()

    def any_opcode(self) -> None:
        """Read the next opcode without its argument, whatever it is. It is the same for all rows."""
        self._literal(1)

    def match(
        self, data: HostArray, at: HostArray, most_bytes: int
    ) -> tuple[HostArray, HostArray, Sequence[HostArray | int]] | None:
        """Return the numbers of the rows that match, the offset after each of them, and their columns.

        Args:
            data: the pickle, as `padded_bytes` returns it.
            at: offsets at which rows may begin, ascending.
            most_bytes: return None if the rows have more bytes than this: they overlap, and would take much memory.
        """
        blocks: list[tuple[HostArray, Sequence[HostArray]]] = []
        for first in range(0, len(at), _BLOCK_ROWS):
            kept, values = self._block(data, at[first : first + _BLOCK_ROWS])
            kept += first
            most_bytes -= int((values[0] - at[kept]).sum())
            if most_bytes < 0:
                return None
            blocks.append((kept, values))
        kept = np.concatenate([block[0] for block in blocks])
        stops, *values = [np.concatenate([block[1][number] for block in blocks]) for number in range(1 + self._values)]
        return kept, stops, [column([*values, stops]) for column in self._columns]

    def _block(self, data: HostArray, at: HostArray) -> tuple[HostArray, Sequence[HostArray]]:
        """Return the numbers of the rows of a block that match; and the offsets after them, and their values."""
        kept = np.arange(len(at))
        values: list[HostArray] = []
        for segment in self._segments:
            fits = at <= self._end - len(segment.pattern)
            rows = segment.rows(data, np.where(fits, at, 0))
            good = segment.equal(rows) & fits
            at = at + len(segment.pattern)
            for field in segment.fields:
                number = _number_at(rows, field)
                good &= (number >= 0) & (number < field.limit)
                values.append(number)
            if segment.has_frame:
                good &= values[-1] <= self._end - at
            if segment.has_place:
                values.append(at)
            if segment.has_text:
                values[-1], at = at, at + values[-1]
                values.append(at)
                good &= at < self._end
            if not good.all():
                at, kept, *values = [column[good] for column in (at, kept, *values)]
        return kept, [at, *values]

    def _expect(self, fits: bool) -> None:
        if not fits:
            raise NotARowError

    def _reference_bytes(self) -> int:
        nbytes = _REFERENCE_BYTES.get(self.opcode(), 0)
        self._expect(nbytes > 0)
        return nbytes

    def _number(self) -> int | None:
        """Read a number. Return the number of its value, or None before another opcode or a large number."""
        code = self.opcode()
        nbytes, header = _NUMBER_BYTES.get(code, 0), 1
        if code == _LONG_1:
            nbytes, header = self._data[self.at + 1], 2
            if not 4 < nbytes <= 8:
                return None
        if not nbytes:
            return None
        # J and LONG1 are signed
        limit = min(1 << 8 * nbytes - (nbytes >= 4), _MAX_NUMBER)
        at = self.at + header
        if int.from_bytes(self._data[at : at + nbytes], "little") >= limit:
            return None
        self._literal(header)
        return self._field(nbytes, limit)

    def _literal(self, count: int) -> None:
        segment = self._segments[-1]
        segment.pattern += self._data[self.at : self.at + count]
        segment.mask += b"\xff" * count
        self.at += count

    def _field(self, nbytes: int, limit: int = 1 << 32) -> int:
        segment = self._segments[-1]
        segment.fields.append(_Field(len(segment.pattern), nbytes, limit))
        segment.pattern += bytes(nbytes)
        segment.mask += bytes(nbytes)
        self.at += nbytes
        self._values += 1
        return self._values - 1

    def _column(self, value: int) -> None:
        self._columns.append(_value(value))


def _value(number: int) -> _Column:
    return lambda of: of[number]


def _stacked(columns: Sequence[_Column]) -> _Column:
    """Return a column of rows with the numbers of these columns."""

    def stacked(of: _Values) -> HostArray:
        rows = np.empty((len(of[-1]), len(columns)), np.int64)
        for number, column in enumerate(columns):
            rows[:, number] = column(of)
        return rows

    return stacked


def _number_at(rows: HostArray, field: _Field) -> HostArray:
    """Return the number in a field of each row; negative if it does not fit."""
    offset, nbytes, _ = field
    raw = rows[:, offset : offset + nbytes]
    if nbytes in (1, 2, 4):
        numbers: HostArray = np.ascontiguousarray(raw).view(f"<u{nbytes}")[:, 0]
        return numbers.astype(np.int64)
    whole = np.zeros((len(rows), 8), np.uint8)
    whole[:, :nbytes] = raw
    signed: HostArray = whole.view("<i8")[:, 0]
    return signed


def padded_bytes(data: bytes) -> bytes:
    """Return a pickle with the zeros that `RowTemplate` reads after it."""
    return data + bytes(_PADDING)
