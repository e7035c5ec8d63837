"""Opcodes that repeat in a pickle, read from many rows at once: one opcode of each row at a time, with NumPy."""

from __future__ import annotations

from typing import Final, Self

import numpy as np

from ckptcore.model import HostArray

TRUE: Final = -1
FALSE: Final = -2
"""Stand for booleans among the items of `OpcodeRows.state`. Other items are numbers of memo entries."""

_PADDING: Final = 16
"""Zeros after the pickle, more than the longest opcode with a number has. Zero is not an opcode."""
_MAX_AXES: Final = 16
_MAX_ITEMS: Final = 8
_MAX_NUMBER: Final = 1 << 62
_MARK, _TUPLE, _EMPTY_TUPLE, _NONE, _TEXT, _SHORT_REFERENCE = b"(t)NXh"
_TUPLE_0, _NEW_TRUE, _NEW_FALSE, _LONG_1, _SHORT_TEXT, _MEMOIZE, _FRAME = b"\x84\x88\x89\x8a\x8c\x94\x95"
"""_TUPLE_0 is the opcode of a tuple of one to three items, minus the number of items."""


def _by_opcode(**values: int) -> HostArray:
    return np.array([values.get(chr(code), 0) for code in range(256)], np.int64)


_REFERENCE_WIDTH: Final = _by_opcode(h=2, j=5)
_NUMBER_WIDTH: Final = _by_opcode(K=2, M=3, J=5)
_NUMBER_MASK: Final = _by_opcode(K=0xFF, M=0xFFFF, J=0xFFFFFFFF, h=0xFF, j=0xFFFFFFFF, X=0xFFFFFFFF) | np.where(
    np.arange(256) == _SHORT_TEXT, 0xFF, 0
)


class OpcodeRows:
    """Rows of one form in a pickle. Each method reads what comes next in all rows, and most add columns of it.

    A row with other opcodes is void from there on. A row that begins where an opcode does reads the same bytes in the
    same way as `read_pickle`, because it reads whole opcodes only. FRAME may precede any opcode and is skipped.

    Attributes:
        at: per row, the offset after the opcodes that were read; in a void row, the length of the pickle.
        columns: what was read, per row.
        kept: per row, its number before `drop_void` dropped others.
    """

    def __init__(self, padded: HostArray, at: HostArray) -> None:
        """Begin rows at offsets of the pickle. `padded` is what `padded_bytes` returned for it."""
        self._data = padded
        self._numbers: HostArray = np.ndarray(len(padded) - 3, "<u4", padded, strides=(1,))
        """The number in the four bytes at each offset."""
        self._end = len(padded) - _PADDING
        self.at = at
        self.columns: list[HostArray] = []
        self.kept: HostArray = np.arange(len(at))

    def following(self) -> Self:
        """Return rows that begin where these end."""
        return type(self)(self._data, self.at)

    def drop_void(self) -> None:
        """Drop void rows."""
        valid = self.at < self._end
        if not valid.all():
            self.at, self.kept, *self.columns = [column[valid] for column in (self.at, self.kept, *self.columns)]

    def opcodes(self) -> HostArray:
        """Return the next opcode of each row, and skip a FRAME before it that ends within the pickle."""
        codes = self._data[self.at]
        is_frame = codes == _FRAME
        if is_frame.any():
            framed = np.flatnonzero(is_frame)
            start = self.at[framed] + 9
            fits = (start <= self._end) & (self._long(self.at[framed] + 1, 8) <= np.maximum(self._end - start, 0))
            self.at = self.at.copy()
            self.at[framed] = np.where(fits, start, self._end)
            codes = self._data[self.at]
        return codes

    def exactly(self, opcodes: bytes, where: HostArray | None = None) -> None:
        """Read opcodes without arguments. `where` selects the rows that have them."""
        for opcode in opcodes:
            found = self.opcodes() == opcode
            self._advance(found, 1) if where is None else self._advance(found | ~where, where)

    def reference(self) -> None:
        """Read a reference to a memo entry. Adds its number."""
        codes = self.opcodes()
        width = _REFERENCE_WIDTH[codes]
        self.columns.append(self._argument(codes))
        self._advance(width > 0, width)

    def text(self) -> None:
        """Read a text, or a reference to one. Adds the number of the memo entry or -1, and the range of a new text."""
        codes = self.opcodes()
        width = _REFERENCE_WIDTH[codes]
        argument = self._argument(codes)
        start = self.at + np.where(codes == _TEXT, 5, 2)
        stop = np.minimum(start + argument, self._end)
        new = ((codes == _TEXT) | (codes == _SHORT_TEXT)) & (self._data[stop] == _MEMOIZE) & (stop == start + argument)
        self.columns += [np.where(new, -1, argument), start, stop]
        self._advance((width > 0) | new, np.where(new, stop + 1 - self.at, width))

    def number(self, *, optional: bool = False) -> None:
        """Read a number below 2**62, or None if it is optional. Adds the number; -1 for None."""
        numbers, width = self._number()
        none = (self._data[self.at] == _NONE) & optional
        self.columns.append(np.where(none, -1, numbers))
        self._advance((width > 0) | none, np.where(none, 1, width))

    def size(self) -> None:
        """Read a call of ``torch.Size``. Adds the reference to it, the number of axes, and a row of extents."""
        self.reference()
        marked = self.opcodes() == _MARK
        self._advance(True, marked)
        axes = np.zeros(len(marked), np.int64)
        extents: list[HostArray] = [axes]
        for _ in range(_MAX_AXES):
            numbers, width = self._number()
            if not width.any():
                break
            axes = axes + (width > 0)
            extents.append(np.where(width > 0, numbers, 0))
            self._advance(True, width)
        closing = np.where(marked, _TUPLE, np.where(axes > 0, _TUPLE_0 + axes, _EMPTY_TUPLE))
        self._advance((self.opcodes() == closing) & (marked == (axes > 3)), 1)
        self.exactly(b"\x94", axes > 0)
        self.exactly(b"\x85\x94R\x94")
        self.columns += [axes, np.stack(extents, axis=1)[:, 1:]]

    def state(self) -> None:
        """Read the creation of an object with a tuple of references and booleans as state, in rows that have one.

        Adds the number of items, 0 in other rows, and a row of them.
        """
        where = self.opcodes() == _EMPTY_TUPLE
        self.exactly(b")\x81\x94(", where)
        count = np.zeros(len(where), np.int64)
        items: list[HostArray] = [count]
        for _ in range(_MAX_ITEMS):
            codes = self.opcodes()
            width = np.where(where, _REFERENCE_WIDTH[codes] + ((codes == _NEW_TRUE) | (codes == _NEW_FALSE)), 0)
            if not width.any():
                break
            count = count + (width > 0)
            items.append(np.where(width == 1, np.where(codes == _NEW_TRUE, TRUE, FALSE), self._argument(codes)))
            self._advance(True, width)
        self._advance(~where | (count > 3), 0)
        self.exactly(b"t\x94b", where)
        padding = [np.zeros_like(count)] * (_MAX_ITEMS + 1 - len(items))
        self.columns += [count, np.stack([*items, *padding], axis=1)[:, 1:]]

    def _advance(self, good: HostArray | bool, width: HostArray | int) -> None:
        self.at = np.minimum(np.where(good, self.at + width, self._end), self._end)

    def _number(self) -> tuple[HostArray, HostArray]:
        """Return the next number of each row, and the width of its opcode: 0 for other opcodes and large numbers."""
        codes = self.opcodes()
        numbers = self._argument(codes)
        width = np.where(numbers < 1 << 31, _NUMBER_WIDTH[codes], 0)
        is_long = codes == _LONG_1
        if is_long.any():
            long = np.flatnonzero(is_long)
            nbytes = self._data[self.at[long] + 1].astype(np.uint64)
            values = self._long(self.at[long] + 2, nbytes)
            fits = (nbytes > 4) & (nbytes <= 8) & (values >> (8 * nbytes.clip(5, 8) - 1) == 0) & (values < _MAX_NUMBER)
            numbers[long] = np.where(fits, values, 0)
            width[long] = np.where(fits, 2 + nbytes, 0)
        return numbers, width

    def _argument(self, codes: HostArray) -> HostArray:
        """Return the number of one to four bytes after each opcode."""
        numbers: HostArray = self._data[self.at + 1].astype(np.int64)
        mask = _NUMBER_MASK[codes]
        wide = np.flatnonzero(mask > 0xFF)  # a few opcodes, and their bytes are not aligned
        numbers[wide] = self._numbers[self.at[wide] + 1] & mask[wide]
        return numbers

    def _long(self, at: HostArray, nbytes: HostArray | int) -> HostArray:
        """Return the numbers of at most 8 bytes at these offsets."""
        byte = np.arange(8)
        raw = self._data[at[:, None] + byte]
        raw[byte >= np.broadcast_to(nbytes, len(at))[:, None]] = 0
        numbers: HostArray = raw.view("<u8")[:, 0]
        return numbers


def padded_bytes(data: bytes) -> HostArray:
    """Return a pickle as `OpcodeRows` reads it."""
    return np.frombuffer(data + bytes(_PADDING), np.uint8)
