"""Tables of rows: all objects of one class in a pickle that may be rows, and columns of what they hold.

Where rows may begin is found by their first opcodes, anywhere in the pickle. Such a place may lie within a text, or be no row: what is
between two of them is compared with a layout, byte for byte where rows do not differ. The machine asks about places where an
object does begin, and a row that fits its layout ends where the next one begins; so what is read is what the machine would read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckptcore.model import HostArray
from ckptcore_dcp.pickles.row_layouts import NotARow, NumberField, RowLayout, RowScan

__all__ = ["BEGIN", "RowTable", "RowsOfTable"]

BEGIN: Final = b")\x81\x94}\x94("
"""EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: an object whose attributes follow."""
_MOST_BYTES: Final = 1 << 11
"""Longer rows are none."""
_BLOCK_BYTES: Final = 1 << 20
"""So many bytes of rows are compared at a time."""
_MOST: Final = 1 << 62
_BYTES_OF_COUNTING: Final = 64
"""To look at all rows for a layout takes as long as to compare so many bytes of each."""
_PASSES: Final = 96
"""How often all bytes of the pickle may be compared with layouts; a pickle whose rows have more is read as any other."""
_TRIES: Final = 12
"""How many rows of one length are looked at in search of layouts, before any is asked for."""
_MOST_FAILED: Final = 24
"""After so many objects one after the other that are no rows no other is looked at."""
_ALONE: Final = 4
"""Fewer rows of one length are not looked at before they are asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfTable:
    """Neighbouring rows that were asked for.

    Attributes:
        start, stop: their numbers.
        end: where they end in the pickle, in bytes.
        is_open: whether the last leads to an object that is no row of these, which the machine goes on with.
        memo: for each, how many entries those before it put into the memo; one more than there are rows.
    """

    start: int
    stop: int
    end: int
    is_open: bool
    memo: HostArray


class RowTable:
    """The rows of a class. One thread.

    Attributes:
        columns: by name, a number for each row; -1 where it has none. Of a text where it begins and ends in the pickle, and its number
            in the memo counted from the first of its row.
        layouts: those found.
        layout_of: for each row, which it has; -1: none.
    """

    def __init__(self, data: bytes, begin: int, named: bytes, scan: Callable[[RowScan], None], memo: list[Any]) -> None:
        """Find the rows from a position on.

        Args:
            data: the pickle.
            begin: where the first row begins, behind the reference to its class.
            named: that reference.
            scan: looks at a row up to the reference to the class of the next one.
            memo: of the machine.
        """
        self._data = data
        self._bytes: HostArray = np.frombuffer(data, np.uint8)
        self._named = named
        self._scan = scan
        self._left = _PASSES * len(data)
        self._starts = _places(self._bytes, begin, named)
        count = len(self._starts)
        self._numbers: list[int] = self._starts.tolist()
        self._lengths: HostArray = np.diff(self._starts, append=len(data))
        self._is_last: HostArray = np.zeros(count, bool)
        self._tried: set[int] = set()
        self._failed = 0
        self._memo: HostArray = np.zeros(0, np.int64)
        self._stops: HostArray = np.zeros(0, np.int64)
        self._is_stale = True
        self.layouts: list[RowLayout] = []
        self.layout_of: HostArray = np.full(count, -1, np.int32)
        self.columns: dict[str, HostArray] = {}
        self._learn_frequent(memo)
        # What they refer to may be named later: rows that were none yet may be looked at again.
        self._tried.clear()
        self._failed = 0

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def is_hopeless(self) -> bool:
        """Whether no row was found, and none will be."""
        return not self.layouts and self._failed > _MOST_FAILED

    def rows_at(self, position: int, memo: list[Any]) -> RowsOfTable | None:
        """As many rows as follow each other from a position on, where an object begins; None if it is no row."""
        start = bisect_left(self._numbers, position)
        if start == len(self._numbers) or self._numbers[start] != position:
            return None
        stop = start
        while True:
            if self._is_stale:
                self._count()
            stop = int(self._stops[stop])
            if self._is_last[stop] or not self._learn(stop, memo):
                break
        end = self._numbers[stop]
        is_open = not self._is_last[stop]
        if not is_open:
            end += self.layouts[int(self.layout_of[stop])].body
            stop += 1
        elif stop == start:
            return None
        return RowsOfTable(start, stop, end, is_open, self._memo[start : stop + 1] - self._memo[start])

    def _count(self) -> None:
        """Say again what follows from the layouts of all rows."""
        whole = (self.layout_of >= 0) & ~self._is_last
        places = np.where(whole, len(whole), np.arange(len(whole)))  # the last place never leads to a row
        self._stops = np.minimum.accumulate(places[::-1])[::-1]
        of_layout = np.array([0, *[layout.memo for layout in self.layouts]], np.int64)
        of_body = np.array([0, *[layout.body_memo for layout in self.layouts]], np.int64)
        each = np.where(self._is_last, of_body[self.layout_of + 1], of_layout[self.layout_of + 1])
        self._memo = np.concatenate([np.zeros(1, np.int64), np.cumsum(each)])
        self._is_stale = False

    def _learn_frequent(self, memo: list[Any]) -> None:
        lengths, counts = np.unique(self._lengths[:-1], return_counts=True)
        for place in np.argsort(-counts, kind="stable").tolist():
            if counts[place] < _ALONE or lengths[place] > _MOST_BYTES:
                continue
            rows = np.flatnonzero(self._lengths == lengths[place])
            for _ in range(_TRIES):
                if len(rows) < _ALONE:
                    break
                self._learn(int(rows[0]), memo)
                rows = rows[1:]
                rows = rows[self.layout_of[rows] < 0]
        self._take_last()

    def _take_last(self) -> None:
        """Rows that no other follows: they begin as one of a layout does, and end where its object does."""
        for number in range(len(self.layouts)):
            rows = np.flatnonzero(self.layout_of < 0)
            if not len(rows):
                return
            self._compare(number, rows, self.layouts[number].body)

    def _learn(self, row: int, memo: list[Any]) -> bool:
        """See whether a row is of a layout that is not known, and which others are; whether it is one."""
        length = int(self._lengths[row])
        if row in self._tried or self._left < 0 or row + 1 == len(self._numbers) or length > _MOST_BYTES:
            return False
        if self._failed > _MOST_FAILED:
            return False
        self._tried.add(row)
        self._failed += 1
        start = self._numbers[row]
        scan = RowScan(self._data, start, memo)
        try:
            self._scan(scan)
            layout = scan.layout(start + length - len(self._named))
        except NotARow:
            return False
        whole = self._data[start : start + length]
        self._failed = 0
        self.layouts.append(layout)
        rows = np.flatnonzero((self._lengths[:-1] == length) & (self.layout_of[:-1] < 0))
        self._left -= _BYTES_OF_COUNTING * len(self._numbers)
        self._compare(len(self.layouts) - 1, rows, length, whole)
        return bool(self.layout_of[row] >= 0)

    def _compare(self, number: int, rows: HostArray, nbytes: int, whole: bytes | None = None) -> None:
        """Give rows that fit a layout that, and fill their columns; of those that are last only the body is compared."""
        layout = self.layouts[number]
        template = np.frombuffer(layout.template[:nbytes] if whole is None else whole, np.uint8)
        rows = rows[self._starts[rows] + nbytes <= len(self._data)]
        may_differ: HostArray = np.zeros(nbytes, bool)
        for start, stop in layout.varying:
            may_differ[start:stop] = True
        step = max(1, _BLOCK_BYTES // nbytes)
        windows = np.lib.stride_tricks.sliding_window_view(self._bytes, nbytes)
        for first in range(0, len(rows), step):
            block = rows[first : first + step]
            self._left -= len(block) * nbytes
            if self._left < 0:
                return
            found = windows[self._starts[block]]
            fits = ((found == template) | may_differ).all(axis=1)
            self._fill(number, block[fits], found[fits], nbytes, is_last=whole is None)

    def _fill(self, number: int, rows: HostArray, found: HostArray, nbytes: int, *, is_last: bool) -> None:
        layout = self.layouts[number]
        columns: dict[str, HostArray] = {}
        fits: HostArray = np.ones(len(rows), bool)
        for name, numbered in layout.numbers.items():
            if numbered.start < nbytes:
                columns[name] = column = _numbers(found, numbered)
                fits &= (column >= 0) & (column < _MOST)
        for name, text in layout.texts.items():
            if text.start < nbytes:
                columns[f"{name}.start"] = self._starts[rows] + text.start
                columns[f"{name}.stop"] = self._starts[rows] + text.stop
                columns[f"{name}.memo"] = np.full(len(rows), text.memo)
        for name, constant in layout.constants.items():
            columns[name] = np.full(len(rows), constant)
        if not fits.any():
            return
        for name, column in columns.items():
            kept = self.columns.get(name)
            if kept is None:
                kept = self.columns[name] = np.full(len(self._numbers), -1, np.int64)
            kept[rows[fits]] = column[fits]
        self.layout_of[rows[fits]] = number
        self._is_last[rows[fits]] = is_last
        self._is_stale = True


def _places(data: HostArray, begin: int, named: bytes) -> HostArray:
    """Where objects of a class begin, from a position on."""
    pattern = named + BEGIN
    newobj = len(named) + 1
    part = data[begin - len(named) :]
    found = np.flatnonzero(part == BEGIN[1])
    found = found[(found >= newobj) & (found < len(part) + newobj + 1 - len(pattern))] - newobj
    for offset, byte in enumerate(pattern):
        found = found[part[found + offset] == byte]
    places: HostArray = found + begin
    return places


def _numbers(rows: HostArray, numbered: NumberField) -> HostArray:
    """The column of a number."""
    raw: HostArray = np.zeros((len(rows), 8), np.uint8)
    raw[:, : numbered.nbytes] = rows[:, numbered.start : numbered.start + numbered.nbytes]
    column: HostArray = raw.view("<i8").reshape(-1).astype(np.int64, copy=False)
    if numbered.signed:
        shift = 64 - 8 * numbered.nbytes
        column = (column << shift) >> shift
    return column
