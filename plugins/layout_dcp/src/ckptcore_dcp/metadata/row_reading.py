"""Reading the rows of a ``.metadata``: its chunks, the places of these, and tensors of one chunk, without an object for each.

They are what torch's pickler makes of `ChunkStorageMetadata`, of `MetadataIndex` with `_StorageInfo`, and of
`TensorStorageMetadata` with one chunk, from the second of a kind on, when classes and attributes are only referred to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from ckptcore.model import HostArray
from ckptcore_dcp.metadata.classes import class_of_torch
from ckptcore_dcp.pickles import Call, Global, Value
from ckptcore_dcp.pickles.refusals import malformed
from ckptcore_dcp.pickles.row_layouts import NotARow, RowScan
from ckptcore_dcp.pickles.row_tables import BEGIN, RowsOfTable, RowTable
from ckptcore_dcp.pickles.rows import UNSET, Row, RowRun

__all__ = ["MetadataRows", "Rows"]

Content: TypeAlias = Literal["chunks", "places", "tensors"]

_TEXT: Final = frozenset({str})
_BINGET: Final = 0x68
_LONG_BINGET: Final = 0x6A


@dataclass(slots=True, eq=False)
class Rows:
    """The rows of a class.

    Attributes:
        content: what they are.
        first: the number of the first as a `Row`.
        table: columns of them.
        texts: by number in the memo, the texts that rows refer to.
        properties: of tensors, by row; the value of the pickle.
    """

    content: Content
    first: int
    table: RowTable
    texts: dict[int, str] = field(default_factory=dict)
    properties: dict[int, Value] = field(default_factory=dict)

    def numbers(self, rows: HostArray, name: str) -> HostArray:
        """A column of some rows; -1 where they have none."""
        column = self.table.columns.get(name)
        found: HostArray = np.full(len(rows), -1, np.int64) if column is None else column[rows]
        return found

    def sizes(self, rows: HostArray, name: str, axes: int) -> HostArray:
        """A ``torch.Size`` of some rows, which has at most so many axes; zeros behind those it has."""
        found: HostArray = np.zeros((len(rows), axes), np.int64)
        for axis in range(axes):
            found[:, axis] = np.maximum(self.numbers(rows, f"{name}.{axis}"), 0)
        return found


class MetadataRows:
    """A `RowReader` for one pickle.

    Attributes:
        tables: those that rows were read of, in the order of the numbers of their rows.
    """

    def __init__(self, data: bytes, key: str) -> None:
        """`key` is of the file, for errors."""
        self._data = data
        self._key = key
        self._next = 0
        # By identity of the class in the pickle, which is held, so that no other gets its identity.
        self._of_class: dict[int, tuple[Global, Content | None]] = {}
        self._by_reference: dict[tuple[int, bytes], Rows] = {}
        self.tables: list[Rows] = []

    def run(self, function: Global, position: int, memo: list[Any]) -> RowRun | None:
        """See `RowReader`."""
        known = self._of_class.get(id(function))
        if known is None:
            known = self._of_class[id(function)] = (function, _CONTENTS.get(class_of_torch(function)))
        content = known[1]
        if content is None:
            return None
        rows = self._rows(content, function, position, memo)
        found = None if rows is None else rows.table.rows_at(position, memo)
        if rows is None or found is None:
            if rows is not None and rows.table.is_hopeless:
                self._of_class[id(function)] = (function, None)
            return None
        put = len(memo)
        memo += [UNSET] * int(found.memo[-1])
        numbers = list(map(Row, range(rows.first + found.start, rows.first + found.stop)))
        values: list[Any] = numbers
        if content == "places":
            values = [None] * (2 * len(numbers))
            values[::2] = values[1::2] = numbers
            self._name_texts(rows, "fqn", found, memo, put)
            self._name_texts(rows, "relative_path", found, memo, put)
            self._refer_to_texts(rows, "fqn", found, memo, put)
            self._refer_to_texts(rows, "relative_path", found, memo, put)
        elif content == "tensors":
            names = self._name_texts(rows, "next", found, memo, put)
            self._take_properties(rows, found, memo, put)
            values = [None] * (len(numbers) + len(names))
            values[::2], values[1::2] = numbers, names
        if found.is_open:
            values.append(function)
        return RowRun(values, found.end)

    def located(self, numbers: HostArray) -> Iterator[tuple[Rows, HostArray, HostArray]]:
        """For each table with some of the rows: which of the numbers are of it, and their rows in it."""
        firsts = np.array([rows.first for rows in self.tables], np.int64)
        table = np.searchsorted(firsts, numbers, side="right") - 1
        for number, rows in enumerate(self.tables):
            (chosen,) = np.nonzero(table == number)
            if len(chosen):
                yield rows, chosen, numbers[chosen] - rows.first

    def _rows(self, content: Content, function: Global, position: int, memo: list[Any]) -> Rows | None:
        """The table of a class as it is referred to just before a position."""
        data = self._data
        for code, nbytes in ((_BINGET, 1), (_LONG_BINGET, 4)):
            place = position - nbytes - 1
            if place < 0 or data[place] != code:
                continue
            number = int.from_bytes(data[place + 1 : position], "little")
            if number < len(memo) and memo[number] is function:
                break
        else:
            return None  # it is named here
        known = self._by_reference.get((id(function), data[place:position]))
        if known is None:
            table = RowTable(data, position, data[place:position], _SCANS[content], memo)
            known = Rows(content, self._next, table)
            self._by_reference[id(function), data[place:position]] = known
            self._next += len(table)
            self.tables.append(known)
        return known

    def _name_texts(self, rows: Rows, name: str, found: RowsOfTable, memo: list[Any], put: int) -> list[str]:
        """Put the texts that rows name into the memo."""
        columns = rows.table.columns
        if f"{name}.start" not in columns:
            return []
        run = slice(found.start, found.stop)
        starts = columns[f"{name}.start"][run]
        stops = columns[f"{name}.stop"][run]
        (named,) = np.nonzero(starts >= 0)
        places = found.memo[:-1] + columns[f"{name}.memo"][run] + put
        data = self._data
        # What is no text, the machine says.
        texts = [
            data[start:stop].decode("utf-8", "surrogatepass")
            for start, stop in zip(starts[named].tolist(), stops[named].tolist(), strict=True)
        ]
        for place, text in zip(places[named].tolist(), texts, strict=True):
            memo[place] = text
        if rows.content == "places":
            columns.setdefault(name, np.full(len(rows.table), -1, np.int64))[run][named] = places[named]
        return texts

    def _refer_to_texts(self, rows: Rows, name: str, found: RowsOfTable, memo: list[Any], put: int) -> None:
        """Keep the texts that rows refer to."""
        run = slice(found.start, found.stop)
        places = rows.table.columns[name][run]
        starts = rows.table.columns.get(f"{name}.start")
        referred = places if starts is None else np.where(starts[run] < 0, places, 0)
        if not (referred < put + found.memo[:-1]).all():
            raise malformed(self._key, found.end, "a row uses a memo entry that is not there")
        used = set(places.tolist())
        texts = [memo[place] for place in used]
        if not _TEXT.issuperset(map(type, texts)):
            raise malformed(self._key, found.end, "a row is of what has no name")
        rows.texts.update(zip(used, texts, strict=True))

    def _take_properties(self, rows: Rows, found: RowsOfTable, memo: list[Any], put: int) -> None:
        """Keep the properties of tensors."""
        table = rows.table
        run = range(found.start, found.stop)
        befores = (found.memo[:-1] + put).tolist()
        layouts = table.layout_of[found.start : found.stop].tolist()
        column = table.columns.get("properties")
        references = [-1] * len(run) if column is None else column[found.start : found.stop].tolist()
        for row, reference, layout, before in zip(run, references, layouts, befores, strict=True):
            if reference < 0:
                value, number = table.layouts[layout].values["properties"]
                rows.properties[row] = memo[before + number] = value
            elif reference < before:
                rows.properties[row] = memo[reference]
            else:
                raise malformed(self._key, found.end, "a tensor has no properties")


def _attributes(scan: RowScan, readers: Mapping[str, Callable[[RowScan], None]], required: int) -> None:
    """The attributes of an object, the first ones of which have to be there."""
    scan.opcodes(BEGIN)
    left = dict(readers)
    while scan.code != 0x75:  # SETITEMS
        name = scan.constant()
        read = left.pop(name, None) if type(name) is str else None
        if read is None:
            raise NotARow
        read(scan)
    if not left.keys().isdisjoint(list(readers)[:required]):
        raise NotARow
    scan.opcodes(b"ub")


def _class(scan: RowScan, name: str) -> Global:
    """A reference to a class of torch."""
    found = scan.constant()
    if not isinstance(found, Global) or class_of_torch(found) != name:
        raise NotARow
    return found


def _if_any(name: str, read: Callable[[RowScan, str], None], scan: RowScan) -> None:
    """A value that may be None."""
    if scan.code == 0x4E:
        scan.opcodes(b"N")
    else:
        read(scan, name)


def _scan_chunk(scan: RowScan) -> None:
    _chunk(scan)
    scan.end_body()


def _chunk(scan: RowScan) -> None:
    _attributes(scan, {name: partial(RowScan.size, name=name) for name in ("offsets", "sizes")}, 2)


def _scan_place(scan: RowScan) -> None:
    _attributes(
        scan,
        {
            "fqn": partial(RowScan.text, name="fqn"),
            "index": partial(_if_any, "index", RowScan.number),
            "offset": partial(_if_any, "offsets", RowScan.size),
        },
        1,
    )
    _class(scan, "_StorageInfo")
    _attributes(
        scan,
        {
            "relative_path": partial(RowScan.text, name="relative_path"),
            "offset": partial(RowScan.number, name="offset"),
            "length": partial(RowScan.number, name="length"),
            "transform_descriptors": lambda scan: scan.opcodes(b"N"),
        },
        3,
    )
    scan.end_body()


def _scan_tensor(scan: RowScan) -> None:
    _attributes(
        scan,
        {"properties": _properties, "size": partial(RowScan.size, name="size"), "chunks": _only_chunk},
        3,
    )
    scan.end_body()
    if scan.code in (_BINGET, _LONG_BINGET):
        raise NotARow  # a name that stood elsewhere before
    scan.text("next")


def _only_chunk(scan: RowScan) -> None:
    scan.opcodes(b"]\x94")
    _class(scan, "ChunkStorageMetadata")
    _chunk(scan)
    scan.opcodes(b"a")


def _properties(scan: RowScan) -> None:
    """What is referred to, or has the same references in all rows of a layout."""
    behind = scan.position + (2 if scan.code == _BINGET else 5)
    if scan.data[behind : behind + 1] != b")":  # EMPTY_TUPLE: a new object
        scan.reference("properties")
        return
    found = scan.constant()
    if not isinstance(found, Global) or class_of_torch(found) != "TensorProperties":
        raise NotARow
    number = scan.memoized
    scan.opcodes(b")\x81\x94(")
    state: list[Value] = []
    while scan.code != 0x74:  # TUPLE
        if scan.code in (0x88, 0x89):  # NEWTRUE, NEWFALSE
            state.append(scan.code == 0x88)
            scan.opcodes(b"\x88" if scan.code == 0x88 else b"\x89")
        else:
            state.append(scan.constant())
    scan.opcodes(b"t\x94b")
    scan.keep("properties", Call(found, state=tuple(state), new=True), number)


_CONTENTS: Final[Mapping[str, Content]] = {
    "ChunkStorageMetadata": "chunks",
    "MetadataIndex": "places",
    "TensorStorageMetadata": "tensors",
}
"""By class: what the rows are that begin with it."""
_SCANS: Final[Mapping[Content, Callable[[RowScan], None]]] = {
    "chunks": _scan_chunk,
    "places": _scan_place,
    "tensors": _scan_tensor,
}
