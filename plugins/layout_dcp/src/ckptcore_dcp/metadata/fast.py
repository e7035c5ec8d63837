"""Fast reader of the objects that fill a large ``.metadata``: all objects of a class at once.

Once the pickle has named classes and attributes, torch's pickler writes chunks (`ChunkStorageMetadata`), their
locations (`MetadataIndex` and `_StorageInfo`) and tensors of one chunk (`TensorStorageMetadata`) with the same opcodes
every time. NumPy finds such objects as rows, wherever bytes look like one (`RowTemplate`). When the machine comes to a
row, that row and those which follow it directly are read in one step. The machine never comes to bytes that look like a
row inside a text.

If the rows are all that a SETITEMS or APPENDS adds, they become one `CompactObject` with a list for each attribute,
which `MetadataDecoder` takes apart; no object is created for each row. Otherwise each object becomes a `CompactObject`.
It is not in the memo, and only `MetadataDecoder` can use it. A pickle that uses the objects differently is rejected and
read again without this module (see `read_metadata`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np

from ckptcore.model import HostArray
from ckptcore_dcp.metadata.entries import Sizes, torch_class_name
from ckptcore_dcp.metadata.joining import widened
from ckptcore_dcp.metadata.row_templates import FALSE, TRUE, NotARowError, RowTemplate, padded_bytes
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
_TEXT_COLUMNS: Final = 3
_MARK, _MEMOIZE, _FRAME = b"(\x94\x95"
_NAME_OPCODES: Final = b"hjX\x8c\x95"
_IS_NAME: Final = np.isin(np.arange(256), list(_NAME_OPCODES))
_ENDS_ITEM: Final = np.isin(np.arange(256), list(b"ut\x85\x86\x87"))
"""By opcode, whether a name of ``planner_data`` may begin with it, and whether it may end the item before."""
_PIECE_BYTES: Final = 1 << 19
"""Bytes searched for rows at a time: little memory if each byte may begin a row."""
_MAX_TEMPLATES: Final = 256
"""Maximum number of templates of a class. torch's numbers and references have few widths: in files of 100,000 chunks a
class had up to 57 combinations, with and without a FRAME at one of 15 places."""
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
        expected: what the rows refer to: classes and names of attributes.
        resolve: returns the lists, and adds memo entries.
        expand: returns the values that the lists stand for.
        closing: the opcode after rows that may become one `CompactObject`.
        is_named: True if a text precedes each row.
    """

    name: str
    read: Callable[[RowTemplate], None]
    expected: tuple[object, ...]
    resolve: Callable[..., tuple[Any, ...] | None]
    expand: Callable[..., list[Any]]
    closing: int = _SET_ITEMS
    is_named: bool = False


def _read_chunk(row: RowTemplate) -> None:
    row.reference()
    row.size()
    row.reference()
    row.size()
    row.exactly(b"ub")


def _read_item_range(row: RowTemplate) -> None:
    row.reference()
    row.text()
    row.reference()
    row.number(optional=True)
    row.reference()
    row.size()
    row.exactly(b"ub")
    row.reference()
    row.exactly(_NEW)
    row.reference()
    row.text()
    row.reference()
    row.number()
    row.reference()
    row.number()
    row.exactly(b"ub")


def _read_tensor(row: RowTemplate) -> None:
    row.reference()
    row.entry()
    row.state()
    row.reference()
    row.size()
    row.reference()
    row.exactly(b"]\x94")
    row.reference()
    row.exactly(_NEW)
    row.reference()
    row.size()
    row.reference()
    row.size()
    row.exactly(b"ubaub")


class _Table:
    """Rows of a form in a pickle that begin after a reference to one class, in order.

    Attributes:
        form: their form.
        begins: the offset of each row.
        stops: the offset after it.
        templates: the number of its template.
        references, closing, linked: by template, the memo entries that it refers to, the opcode after it, and whether
            another row may follow.
        columns: what `_Form.read` read, and the text after a row, if rows are named.
        ends: numbers of the rows that no row follows.
    """

    def __init__(self, data: bytes, starts: HostArray, form: _Form, class_entry: int | None) -> None:
        self.form = form
        self.references: list[Sequence[int]] = []
        self.closing: list[int] = []
        self.linked: list[bool] = []
        padded = np.frombuffer(data, np.uint8)
        parts: list[Sequence[HostArray]] = []
        # Templates are compared with one place for each byte: files of torch need a 25th of that. Rows do not overlap.
        left = room = len(data)
        for _ in range(_MAX_TEMPLATES):
            left -= len(starts)
            if not len(starts) or left < 0:
                break
            middle = len(starts) // 2  # its template matches more rows than that of the first
            template, is_row = self._template(data, int(starts[middle]), class_entry)
            matched = template.match(padded, starts, room)
            if matched is None:
                parts.clear()
                break
            rows, nexts, columns = matched
            if is_row:
                room -= int((nexts - starts[rows]).sum())
                count = len(rows)
                number = len(self.references) - 1
                whole = [column if isinstance(column, np.ndarray) else np.full(count, column) for column in columns]
                parts.append([starts[rows], nexts, np.full(count, number), *whole])
            is_left = np.ones(len(starts), bool)
            is_left[rows] = is_left[middle] = False
            starts = starts[is_left]
        width = max([sum([column[:1].size for column in part]) for part in parts], default=0)
        if not parts or width * sum([len(part[0]) for part in parts]) > len(data):
            # A few long paths among many short ones would take much memory.
            self.begins: HostArray = np.zeros(0, np.int64)
            return
        begins, *rest = map(_joined, zip(*parts, strict=True))
        order = np.argsort(begins)
        self.begins = begins[order]
        nexts, self.templates, self.stops, *self.columns = [column[order] for column in rest]
        is_last = (nexts != np.append(self.begins[1:], -1)) | ~np.array(self.linked)[self.templates]
        self.ends = np.flatnonzero(is_last)

    def _template(self, data: bytes, start: int, class_entry: int | None) -> tuple[RowTemplate, bool]:
        """Return the template of a row; or False and one of the opcodes up to the first that fits no row."""
        template = RowTemplate(data, start)
        try:
            if class_entry is not None:
                template.exactly(_NEW)
            self.form.read(template)
        except NotARowError:
            template.any_opcode()
            return template, False
        template.place()
        self.references.append(template.references)
        self.closing.append(template.opcode())
        self.linked.append(True)
        if class_entry is None:
            return template, True
        count = template.count + _TEXT_COLUMNS * self.form.is_named
        try:
            if self.form.is_named:
                template.text()
            template.link(class_entry)
        except NotARowError:
            self.linked[-1] = False  # any bytes may follow, even if they end where another row begins
            template.any_opcode()
            while template.count < count:
                template.constant(0)
        return template, True


def _joined(parts: Sequence[HostArray]) -> HostArray:
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    return np.concatenate([widened(part, width) for part in parts])


class FastObjectReader:
    """Reads objects of one pickle. Not thread-safe."""

    def __init__(self, data: bytes) -> None:
        """Create a reader of the pickle."""
        self._data = padded_bytes(data)
        self._stop = len(data)
        self._text = data.decode("latin-1")
        self._padded = np.frombuffer(self._data, np.uint8)
        pieces = [self._begins_of_objects(first) for first in range(0, len(data), _PIECE_BYTES)]
        self._starts: HostArray = np.concatenate([np.zeros(0, np.int64), *pieces])
        # By identity of the class. The tuple holds a reference, so that no other object gets this identity.
        self._classes: dict[int, tuple[Global, _Form | None]] = {}
        # By form. A pickle of torch creates each class once; a table for each of many would take quadratic time.
        self._tables: dict[_Form, _Table] = {}
        self._paths = _Table(b"", np.zeros(0, np.int64), _PATHS, None)
        self._paths_stop = 0

    def _begins_of_objects(self, first: int) -> HostArray:
        """Return the offsets of `_NEW` in the piece of the pickle at `first`."""
        starts = first + np.flatnonzero(self._padded[first : first + _PIECE_BYTES] == _NEW[0])
        for offset in range(1, len(_NEW)):
            starts = starts[self._padded[starts + offset] == _NEW[offset]]
        return starts

    def _class_entry(self, position: int, function: Global, memo: list[Any]) -> int | None:
        """Return the memo entry of a class if a reference to it is before a position, else None."""
        before = position - 9 * (self._data[position - 9] == _FRAME)
        for nbytes in (1, 4):
            entry = int.from_bytes(self._data[before - nbytes : before], "little")
            if self._data.endswith(_reference(entry), 0, before) and entry < len(memo) and memo[entry] is function:
                return entry
        return None

    def _starts_after(self, entry: int) -> HostArray:
        """Return the offsets of `_NEW` after a reference to this memo entry."""
        starts = self._starts[self._starts > 9 + 5]
        before = starts - 9 * (self._padded[starts - 9] == _FRAME)
        for offset, byte in enumerate(reversed(_reference(entry)), 1):
            found = self._padded[before - offset] == byte
            starts, before = starts[found], before[found]
        return starts

    def read(self, stack: list[Any], position: int, memo: list[Any]) -> int | None:
        """Read consecutive objects. See `ObjectReader`."""
        if not stack:
            return self._read_paths(stack, position, memo)
        function: Global = stack[-1]
        known = self._classes.get(id(function))
        if known is None:
            known = self._classes[id(function)] = (function, _FORMS.get(torch_class_name(function)))
        form = known[1]
        if form is None:
            return None
        table = self._tables.get(form)
        if table is None:
            entry = self._class_entry(position, function, memo)
            if entry is None:
                return None
            table = self._tables[form] = _Table(self._data, self._starts_after(entry), form, entry)
        number = int(table.begins.searchsorted(position))
        if number == len(table.begins) or table.begins[number] != position:
            return None
        last = int(table.ends[table.ends.searchsorted(number)]) + 1
        is_whole = table.closing[table.templates[last - 1]] == form.closing
        if form.closing == _SET_ITEMS and (len(stack) - 1 - form.is_named) % 2:
            is_whole = False
        if not is_whole and last - number < _FEW:
            return None
        lists = self._lists(table, slice(number, last), stack, memo)
        if lists is None:
            table.begins = table.begins[:0]  # do not try each of these rows again
            return None
        del stack[-1 - form.is_named :]
        if not is_whole:
            stack += form.expand(*lists)
        elif form.closing == _SET_ITEMS:
            stack += [CompactObject((form.name, *lists))] * 2
        else:
            stack.append(CompactObject((form.name, *lists)))
        return int(table.stops[last - 1])

    def _read_paths(self, stack: list[Any], position: int, memo: list[Any]) -> int | None:
        """Read consecutive names and paths, the items of ``planner_data``."""
        try:
            RowTemplate(self._data, position).path()
        except NotARowError:
            return None
        if position >= self._paths_stop:
            self._paths = _Table(self._data, self._begins_of_paths(position), _PATHS, None)
        table = self._paths
        number = int(table.begins.searchsorted(position))
        if number == len(table.begins) or table.begins[number] != position:
            return None
        last = int(table.ends[table.ends.searchsorted(number)]) + 1
        lists = self._lists(table, slice(number, last), stack, memo)
        if lists is None:
            table.begins = table.begins[:0]
            return None
        stack += _PATHS.expand(*lists)
        return int(table.stops[last - 1])

    def _begins_of_paths(self, position: int) -> HostArray:
        """Return a position, and the offsets after it at which a name may begin, until a piece has none.

        Before a name are TUPLE and MEMOIZE, or SETITEMS and MARK.
        """
        found: list[HostArray] = [np.array([position])]
        while len(found[-1]):
            piece = self._padded[position : min(position + _PIECE_BYTES, self._stop)]
            at = position + np.flatnonzero((piece == _MEMOIZE) | (piece == _MARK))
            at = at[_IS_NAME[self._padded[at + 1]]]
            found.append(at[_ENDS_ITEM[self._padded[at - 1]]] + 1)
            position = self._paths_stop = position + _PIECE_BYTES
        return np.concatenate(found)

    def _lists(self, table: _Table, rows: slice, stack: list[Any], memo: list[Any]) -> tuple[Any, ...] | None:
        """Return the attributes of rows and add their memo entries, or return None and do neither."""
        for template in np.unique(table.templates[rows]).tolist():
            if not _refer_to(table.references[template], table.form.expected, memo):
                return None
        before = len(memo)
        lists = table.form.resolve(self, [column[rows] for column in table.columns], stack, memo)
        if lists is None:
            del memo[before:]
        return lists

    def chunks(self, columns: Sequence[Any], stack: list[Any], memo: list[Any]) -> tuple[Any, ...] | None:
        """Return the offsets and sizes of chunks."""
        offsets, sizes = columns[:2], columns[2:4]
        memo += [UNSET] * int(6 * len(offsets[0]) + np.count_nonzero(offsets[0]) + np.count_nonzero(sizes[0]))
        return tuple(offsets), tuple(sizes)

    def item_ranges(self, columns: Sequence[Any], stack: list[Any], memo: list[Any]) -> tuple[Any, ...] | None:
        """Return names, offsets, paths, starts and lengths of the locations of chunks."""
        name, offsets, path = columns[:3], columns[4:6], columns[6:9]
        before_path = 6 + (offsets[0] > 0) + (name[0] < 0)
        begins = _begins(before_path + (path[0] < 0), memo)
        names = self._texts(name, begins + 2, memo)
        paths = self._texts(path, begins + before_path, memo)
        if names is None or paths is None:
            return None
        return names, tuple(offsets), paths, columns[9], columns[10]

    def tensors(self, columns: Sequence[Any], stack: list[Any], memo: list[Any]) -> tuple[Any, ...] | None:
        """Return names, properties, shapes, offsets and sizes of tensors of one chunk."""
        entry, items, state = columns[:3]
        is_new = items > 0
        shape, offsets, sizes = columns[3:5], columns[5:7], columns[7:9]
        name = [column[:-1] for column in columns[9:]]
        entries = 11 + 2 * is_new + sum([(axes > 0).astype(np.int64) for axes in (shape[0], offsets[0], sizes[0])])
        begins = _begins(entries + np.append(name[0] < 0, False), memo)
        names = self._texts(name, begins[:-1] + entries[:-1], memo)
        if names is None or stack[-2].__class__ is not str:
            return None
        made: dict[tuple[int, ...], Call] = {}
        for row in np.flatnonzero(is_new).tolist():
            key = (int(entry[row]), *state[row, : items[row]].tolist())
            properties = made.get(key) or _properties(key, int(begins[row]), memo)
            if properties is None:
                return None
            made[key] = memo[begins[row] + 2] = properties
        at = np.where(is_new, begins + 2, entry)
        if (entry >= begins + 2).any():
            return None
        of_rows = [memo[number] for number in at.tolist()]
        return [stack[-2], *names], of_rows, tuple(shape), tuple(offsets), tuple(sizes)

    def paths(self, columns: Sequence[Any], stack: list[Any], memo: list[Any]) -> tuple[Any, ...] | None:
        """Return names and their paths."""
        count, *texts = columns
        is_text = np.arange(texts[0].shape[1]) < count[:, None]
        new = (texts[0] < 0) & is_text
        begins = _begins(new.sum(axis=1) + 1, memo)
        entries = begins[:, None] + new.cumsum(axis=1) - new
        is_text[:, 0] = False
        names = self._texts([column[:, 0] for column in texts], entries[:, 0], memo)
        steps = names and self._texts([column[is_text] for column in texts], entries[is_text], memo)
        if steps is None:
            return None
        depth, each = int(count[0]) - 1, iter(steps)
        if (count == depth + 1).all():
            paths = list(zip(*[each] * depth, strict=True))
        else:
            paths = [tuple(islice(each, length - 1)) for length in count.tolist()]
        for entry, path in zip((begins + new.sum(axis=1)).tolist(), paths, strict=True):
            memo[entry] = path
        return names, paths

    def _texts(self, text: Sequence[HostArray], entries: HostArray, memo: list[Any]) -> list[str] | None:
        """Return texts, with memo entries if they are new; None if one must be read by the machine."""
        at, start, stop = text
        is_new = at < 0
        new = np.flatnonzero(is_new)
        data = self._text
        # A slice of a text is one object, and decoding bytes makes two.
        texts = [data[first:last] for first, last in zip(start[new].tolist(), stop[new].tolist(), strict=True)]
        if not "".join(texts).isascii():
            try:
                texts = [text.encode("latin-1").decode("utf-8", "surrogatepass") for text in texts]
            except UnicodeDecodeError:
                return None
        for entry, text_of_row in zip(entries[new].tolist(), texts, strict=True):
            memo[entry] = text_of_row
        if len(new) == len(at):
            return texts
        if (at >= entries).any():
            return None
        texts = [memo[entry] for entry in np.where(is_new, entries, at).tolist()]
        return texts if _STR.issuperset(map(type, texts)) else None


def _reference(entry: int) -> bytes:
    """Return the opcode that refers to a memo entry."""
    return b"h" + entry.to_bytes(1, "little") if entry < 256 else b"j" + entry.to_bytes(4, "little")


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


def _expand_paths(names: Sequence[str], paths: Sequence[tuple[str, ...]]) -> list[Any]:
    return [value for pair in zip(names, paths, strict=True) for value in pair]


_PATHS: Final = _Form("paths", RowTemplate.path, (), FastObjectReader.paths, _expand_paths)
_BOX: Final = ("offsets", _SIZE, "sizes", _SIZE)
_FORMS: Final[Mapping[str, _Form]] = {
    "ChunkStorageMetadata": _Form(CHUNKS, _read_chunk, _BOX, FastObjectReader.chunks, _expand_chunks, closing=_APPENDS),
    "MetadataIndex": _Form(
        ITEM_RANGES,
        _read_item_range,
        ("fqn", "index", "offset", _SIZE, _STORAGE_INFO_CLASS, "relative_path", "offset", "length"),
        FastObjectReader.item_ranges,
        _expand_item_ranges,
    ),
    "TensorStorageMetadata": _Form(
        TENSORS,
        _read_tensor,
        ("properties", "size", _SIZE, "chunks", _CHUNK_CLASS, *_BOX),
        FastObjectReader.tensors,
        _expand_tensors,
        is_named=True,
    ),
}
