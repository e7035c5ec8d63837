"""Fast reader of the objects that fill a large ``.metadata``: all objects of a class at once.

Once the pickle has named classes and attributes, torch's pickler writes chunks (`ChunkStorageMetadata`), their
locations (`MetadataIndex` and `_StorageInfo`) and tensors of one chunk (`TensorStorageMetadata`) with the same opcodes
every time. NumPy reads such objects as rows, wherever bytes look like one (`OpcodeRows`). When the machine comes to a
row, that row and those which follow it directly are read in one step. The machine never comes to bytes that look like a
row inside a text.

If the rows are all that a SETITEMS or APPENDS adds, they become one `CompactObject` with a list for each attribute,
which `MetadataDecoder` takes apart; no object is created for each row. Otherwise each object becomes a `CompactObject`.
It is not in the memo, and only `MetadataDecoder` can use it. A pickle that uses the objects differently is rejected and
read again without this module (see `read_metadata`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ckptcore.model import HostArray
from ckptcore_dcp.metadata.entries import Sizes, torch_class_name
from ckptcore_dcp.metadata.joining import widened
from ckptcore_dcp.metadata.opcode_rows import FALSE, TRUE, OpcodeRows, padded_bytes
from ckptcore_dcp.pickles import UNSET, Call, CompactObject, Global, Value

CHUNKS: Final = "chunks"
ITEM_RANGES: Final = "item ranges"
TENSORS: Final = "tensors"
"""Names of a `CompactObject` with columns: of offsets and sizes; of names, offsets, paths, starts and lengths; of
names, properties, shapes, offsets and sizes. The last two are both key and value in their dict."""

_NEW: Final = b")\x81\x94}\x94("
"""EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: an object whose attributes follow."""
_APPENDS, _SET_ITEMS = b"eu"
_BOOLEANS: Final = {TRUE: True, FALSE: False}
_BLOCK_ROWS: Final = 1 << 13
"""Rows read at a time, so that they stay in the cache."""
_PIECE_BYTES: Final = 64 * _BLOCK_ROWS
"""Bytes searched for rows at a time: about `_BLOCK_ROWS` objects of torch, and little memory if each byte may begin a
row."""
_FEW: Final = 4
"""Fewer rows that are no `CompactObject` of lists are read by the machine, which is faster."""

_SIZE: Final = Global("torch", "Size")
# Sentinels: no value of a pickle equals them.
_CHUNK_CLASS: Final = object()
_STORAGE_INFO_CLASS: Final = object()
_PROPERTIES_CLASS: Final = object()
_CLASSES: Final[Mapping[str, object]] = {
    "ChunkStorageMetadata": _CHUNK_CLASS,
    "_StorageInfo": _STORAGE_INFO_CLASS,
    "TensorProperties": _PROPERTIES_CLASS,
}

_STR: Final = frozenset({str})


class _Form(NamedTuple):
    """A form of rows.

    Attributes:
        name: name of a `CompactObject` of lists.
        read: reads what follows `_NEW`.
        references: the columns that refer to classes and names of attributes.
        expected: what they refer to.
        resolve: returns the lists, and adds memo entries.
        expand: returns the values that the lists stand for.
        closing: the opcode after rows that may become one `CompactObject`.
        is_named: True if a text precedes each row.
    """

    name: str
    read: Callable[[OpcodeRows], None]
    references: Sequence[int]
    expected: tuple[object, ...]
    resolve: Callable[..., tuple[Any, ...] | None]
    expand: Callable[..., list[Any]]
    closing: int = _SET_ITEMS
    is_named: bool = False


def _read_chunk(rows: OpcodeRows) -> None:
    rows.reference()
    rows.size()
    rows.drop_void()
    rows.reference()
    rows.size()
    rows.exactly(b"ub")


def _read_item_range(rows: OpcodeRows) -> None:
    rows.reference()
    rows.text()
    rows.reference()
    rows.number(optional=True)
    rows.drop_void()
    rows.reference()
    rows.size()
    rows.exactly(b"ub")
    rows.reference()
    rows.exactly(_NEW)
    rows.reference()
    rows.text()
    rows.reference()
    rows.number()
    rows.reference()
    rows.number()
    rows.exactly(b"ub")


def _read_tensor(rows: OpcodeRows) -> None:
    rows.reference()
    rows.reference()
    rows.state()
    rows.reference()
    rows.drop_void()
    rows.size()
    rows.reference()
    rows.exactly(b"]\x94")
    rows.reference()
    rows.exactly(_NEW)
    rows.reference()
    rows.size()
    rows.reference()
    rows.size()
    rows.exactly(b"ubaub")


class _Table:
    """All rows of a form in a pickle.

    Attributes:
        form: their form.
        numbers: number of a row, by its offset.
        stops, codes: the offset after a row, and the opcode there.
        of_class: the reference to the class of the next row.
        names: the text before the next row, if rows are named.
        columns: what `_Form.read` read.
        ends: numbers of the rows that no row with the same references follows.
    """

    def __init__(self, padded: HostArray, starts: HostArray, bodies: HostArray, form: _Form) -> None:
        self.form = form
        blocks = [
            _read_block(padded, starts[first : first + _BLOCK_ROWS], bodies[first : first + _BLOCK_ROWS], form)
            for first in range(0, max(len(starts), 1), _BLOCK_ROWS)
        ]
        begins, self.stops, self.codes, follows, self.of_class, *rest = map(_joined, zip(*blocks, strict=True))
        self.names, self.columns = rest[: 3 * form.is_named], rest[3 * form.is_named :]
        self.numbers = dict(zip(begins.tolist(), range(len(begins)), strict=True))
        is_end = follows != np.append(begins[1:], -1)[: len(begins)]
        for number in form.references:
            is_end[:-1] |= np.diff(self.columns[number]) != 0
        is_end[1:] |= (np.diff(self.of_class) != 0) & ~is_end[:-1]
        self.ends = np.flatnonzero(is_end)


def _read_block(padded: HostArray, starts: HostArray, bodies: HostArray, form: _Form) -> Sequence[Any]:
    """Read rows that begin at `starts`, from the offsets after `_NEW`."""
    rows = OpcodeRows(padded, bodies)
    form.read(rows)
    rows.drop_void()
    codes = rows.opcodes()
    following = rows.following()
    if form.is_named:
        following.text()
    following.reference()
    following.opcodes()
    *name, of_class = following.columns
    return [starts[rows.kept], rows.at, codes, following.at, of_class, *name, *rows.columns]


def _joined(parts: Sequence[HostArray]) -> HostArray:
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    return np.concatenate([widened(part, width) for part in parts])


class FastObjectReader:
    """Reads objects of one pickle. Not thread-safe."""

    def __init__(self, data: bytes) -> None:
        """Create a reader of the pickle."""
        self._data = data
        self._padded = padded_bytes(data)
        pieces = [self._begins_of_objects(first) for first in range(0, len(self._padded), _PIECE_BYTES)]
        self._starts, self._bodies = map(np.concatenate, zip(*pieces, strict=True))
        self._tables: dict[str, _Table] = {}
        # By identity of the class. The tuple holds a reference, so that no other object gets this
        # identity.
        self._classes: dict[int, tuple[Global, str]] = {}

    def _begins_of_objects(self, first: int) -> tuple[HostArray, HostArray]:
        """Return the offsets of `_NEW` in the piece of the pickle at `first`, and the offsets after it."""
        starts = first + np.flatnonzero(self._padded[first : first + _PIECE_BYTES] == _NEW[0])
        rows = OpcodeRows(self._padded, starts)
        rows.exactly(_NEW)
        rows.drop_void()
        return starts[rows.kept], rows.at

    def read(self, stack: list[Any], position: int, memo: list[Any]) -> int | None:
        """Read consecutive objects. See `ObjectReader`."""
        function: Global = stack[-1]
        known = self._classes.get(id(function))
        if known is None:
            known = self._classes[id(function)] = (function, torch_class_name(function))
        form = _FORMS.get(known[1])
        if form is None:
            return None
        table = self._tables.get(known[1])
        if table is None:
            table = self._tables[known[1]] = _Table(self._padded, self._starts, self._bodies, form)
        number = table.numbers.get(position)
        if number is None:
            return None
        last = int(table.ends[table.ends.searchsorted(number)]) + 1
        is_whole = table.codes[last - 1] == form.closing
        if form.closing == _SET_ITEMS and (len(stack) - 1 - form.is_named) % 2:
            is_whole = False
        if not is_whole and last - number < _FEW:
            return None
        lists = self._lists(function, table, slice(number, last), stack, memo)
        if lists is None:
            table.numbers.clear()  # do not try each of these rows again
            return None
        del stack[-1 - form.is_named :]
        if not is_whole:
            stack += form.expand(*lists)
        elif form.closing == _SET_ITEMS:
            stack += [CompactObject((form.name, *lists))] * 2
        else:
            stack.append(CompactObject((form.name, *lists)))
        return int(table.stops[last - 1])

    def _lists(
        self, function: Global, table: _Table, rows: slice, stack: list[Any], memo: list[Any]
    ) -> tuple[Any, ...] | None:
        """Return the attributes of rows and add their memo entries, or return None and do neither."""
        form = table.form
        columns = [column[rows] for column in table.columns]
        if not _refer_to([int(columns[number][0]) for number in form.references], form.expected, memo):
            return None
        count = rows.stop - rows.start
        if count > 1 and not _refer_to([int(table.of_class[rows.start])], (function,), memo):
            return None
        before = len(memo)
        lists = form.resolve(self, table, columns, slice(rows.start, rows.stop - 1), stack, memo)
        if lists is None:
            del memo[before:]
        return lists

    def chunks(
        self, table: _Table, columns: Sequence[Any], links: slice, stack: list[Any], memo: list[Any]
    ) -> tuple[Any, ...] | None:
        """Return the offsets and sizes of chunks."""
        offsets, sizes = columns[2:4], columns[6:8]
        memo += [UNSET] * int(6 * len(columns[0]) + np.count_nonzero(offsets[0]) + np.count_nonzero(sizes[0]))
        return tuple(offsets), tuple(sizes)

    def item_ranges(
        self, table: _Table, columns: Sequence[Any], links: slice, stack: list[Any], memo: list[Any]
    ) -> tuple[Any, ...] | None:
        """Return names, offsets, paths, starts and lengths of the locations of chunks."""
        name, path, offsets = columns[1:4], columns[12:15], columns[8:10]
        before_path = 6 + (offsets[0] > 0) + (name[0] < 0)
        begins = _begins(before_path + (path[0] < 0), memo)
        names = self._texts(name, begins + 2, memo)
        paths = self._texts(path, begins + before_path, memo)
        if names is None or paths is None:
            return None
        return names, tuple(offsets), paths, columns[16], columns[18]

    def tensors(
        self, table: _Table, columns: Sequence[Any], links: slice, stack: list[Any], memo: list[Any]
    ) -> tuple[Any, ...] | None:
        """Return names, properties, shapes, offsets and sizes of tensors of one chunk."""
        name = [column[links] for column in table.names]
        is_new = columns[2] > 0
        shape, offsets, sizes = columns[6:8], columns[12:14], columns[16:18]
        entries = 11 + 2 * is_new + sum([(axes > 0).astype(np.int64) for axes in (shape[0], offsets[0], sizes[0])])
        begins = _begins(entries + np.append(name[0] < 0, False), memo)
        names = self._texts(name, begins[:-1] + entries[:-1], memo)
        if names is None or stack[-2].__class__ is not str:
            return None
        made: dict[tuple[int, ...], Call] = {}
        for row in np.flatnonzero(is_new).tolist():
            key = (int(columns[1][row]), *columns[3][row, : columns[2][row]].tolist())
            properties = made.get(key) or _properties(key, int(begins[row]), memo)
            if properties is None:
                return None
            made[key] = memo[begins[row] + 2] = properties
        at = np.where(is_new, begins + 2, columns[1])
        if (columns[1] >= begins + 2).any():
            return None
        of_rows = [memo[entry] for entry in at.tolist()]
        return [stack[-2], *names], of_rows, tuple(shape), tuple(offsets), tuple(sizes)

    def _texts(self, text: Sequence[HostArray], entries: HostArray, memo: list[Any]) -> list[str] | None:
        """Return texts, with memo entries if they are new; None if one must be read by the machine."""
        at, start, stop = text
        new = np.flatnonzero(at < 0)
        try:
            for entry, first, last in zip(entries[new].tolist(), start[new].tolist(), stop[new].tolist(), strict=True):
                memo[entry] = self._data[first:last].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return None
        if (at >= entries).any():
            return None
        texts = [memo[entry] for entry in np.where(at < 0, entries, at).tolist()]
        return texts if _STR.issuperset(map(type, texts)) else None


def _begins(entries: HostArray, memo: list[Any]) -> HostArray:
    """Return the first memo entry of each row, and add all entries without values."""
    ends = len(memo) + np.cumsum(entries)
    memo += [UNSET] * int(ends[-1] - len(memo))
    return ends - entries


def _properties(key: tuple[int, ...], before: int, memo: list[Any]) -> Call | None:
    """Return new tensor properties: a class, and the items of a tuple. They refer to entries before this one."""
    if max(key) >= before or not _refer_to(key[:1], (_PROPERTIES_CLASS,), memo):
        return None
    state = tuple([_BOOLEANS[item] if item in _BOOLEANS else memo[item] for item in key[1:]])
    return None if UNSET in state else Call(memo[key[0]], (), state, new=True)


def _refer_to(references: Sequence[int], expected: Sequence[object], memo: list[Any]) -> bool:
    """Return whether the references point to the expected values."""
    for reference, value in zip(references, expected, strict=True):
        entry = memo[reference] if reference < len(memo) else UNSET
        if type(entry) is Global:
            entry = _CLASSES.get(torch_class_name(entry), entry) if value.__class__ is object else entry
        if entry != value:
            return False
    return True


def _tuples(sizes: Sizes) -> list[tuple[int, ...]]:
    axes, extents = sizes
    return [tuple(row[:count]) for row, count in zip(extents.tolist(), axes.tolist(), strict=True)]


def _expand_chunks(offsets: Sizes, sizes: Sizes) -> list[Any]:
    boxes = zip(_tuples(offsets), _tuples(sizes), strict=True)
    return [CompactObject(("ChunkStorageMetadata", *box)) for box in boxes]


def _expand_item_ranges(
    names: Sequence[str], offsets: Sizes, paths: Sequence[str], start: HostArray, length: HostArray
) -> list[Any]:
    indices = [CompactObject(("MetadataIndex", *index)) for index in zip(names, _tuples(offsets), strict=True)]
    ranges = zip(paths, start.tolist(), length.tolist(), strict=True)
    infos = [CompactObject(("_StorageInfo", *item_range)) for item_range in ranges]
    return [value for pair in zip(indices, infos, strict=True) for value in pair]


def _expand_tensors(names: Sequence[str], properties: Sequence[Value], *sizes: Sizes) -> list[Any]:
    attributes = zip(properties, *map(_tuples, sizes), strict=True)
    tensors = [CompactObject(("TensorStorageMetadata", *tensor)) for tensor in attributes]
    return [value for pair in zip(names, tensors, strict=True) for value in pair]


_BOX: Final = ("offsets", _SIZE, "sizes", _SIZE)
_FORMS: Final[Mapping[str, _Form]] = {
    "ChunkStorageMetadata": _Form(
        CHUNKS, _read_chunk, (0, 1, 4, 5), _BOX, FastObjectReader.chunks, _expand_chunks, closing=_APPENDS
    ),
    "MetadataIndex": _Form(
        ITEM_RANGES,
        _read_item_range,
        (0, 4, 6, 7, 10, 11, 15, 17),
        ("fqn", "index", "offset", _SIZE, _STORAGE_INFO_CLASS, "relative_path", "offset", "length"),
        FastObjectReader.item_ranges,
        _expand_item_ranges,
    ),
    "TensorStorageMetadata": _Form(
        TENSORS,
        _read_tensor,
        (0, 4, 5, 8, 9, 10, 11, 14, 15),
        ("properties", "size", _SIZE, "chunks", _CHUNK_CLASS, *_BOX),
        FastObjectReader.tensors,
        _expand_tensors,
        is_named=True,
    ),
}
