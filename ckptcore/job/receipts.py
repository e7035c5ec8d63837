"""Receipts as messages to the leader. Numbers are encoded as columns, and decoded as arrays.

A message is one line of JSON, followed by the columns that it lists. A column stores either its numbers or the
differences between neighbours. The smallest value is subtracted from all values, which then have the narrowest dtype
that fits. Messages are not stored: all processes must have the same version of this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from ckptcore.errors import PluginError, UnsupportedVersionError
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import ObjectRecord, TreeMetadata
from ckptcore.model.transfer import IntegerColumn, ItemColumns, Receipt
from ckptcore.model.tree import JSON

_VERSION: Final = 1
_FEW: Final = 8
"""Maximum length of a list of integers that stays in the JSON."""

_WIDTHS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LARGEST: Final = (1 << 63) - 1

_Path: TypeAlias = tuple[str | int, ...]


def encode_receipts(trees: Sequence[TreeMetadata], receipts: Sequence[Receipt]) -> bytes:
    """Encode the receipts of one process.

    Args:
        trees: the tree of each receipt.
        receipts: the receipts of the parts of a save, in the same order on all processes.

    Raises:
        PluginError: the state of a layout is not JSON.
    """
    writer = _Columns()
    encoded = [_encode(receipt, tree, writer) for receipt, tree in zip(receipts, trees, strict=True)]
    head = {"version": _VERSION, "receipts": encoded, "columns": writer.described}
    try:
        line = json.dumps(head, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError) as error:
        raise PluginError(f"the receipt of a layout is not JSON: {error}") from error
    return b"".join((line, b"\n", *writer.data))


def decode_receipts(trees: Iterable[TreeMetadata], data: bytes) -> list[Receipt]:
    """Decode receipts that another process of this job encoded.

    Raises:
        UnsupportedVersionError: the other process uses another version of the message format.
    """
    line, _, rest = data.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    if head["version"] != _VERSION:
        raise UnsupportedVersionError(
            f"a process of the job sent a receipt of version {head['version']!r}, and the leader reads version "
            f"{_VERSION}: install the same version of ckptcore in all processes"
        )
    columns = _read_columns(head["columns"], memoryview(rest))
    return [_decode(encoded, tree, columns) for encoded, tree in zip(head["receipts"], trees, strict=True)]


def _encode(receipt: Receipt, tree: TreeMetadata, writer: _Columns) -> dict[str, JSON]:
    items = ItemColumns.of(tree.leaves, receipt.items)
    column_paths: list[JSON] = []
    state = _without_columns(receipt.state, (), column_paths, writer)
    objects = receipt.objects
    return {
        "rank": receipt.rank,
        "items": [writer.add(items.leaf), writer.add(items.counts), writer.add(items.bounds)],
        "state": state,
        "places": column_paths,
        "keys": [record.key for record in objects],
        "sizes": writer.add(np.array([record.size for record in objects], np.int64)),
        "sums": writer.add(np.array([len(record.checksums) for record in objects], np.int64)),
        "checksums": writer.add_bytes(b"".join([record.checksums for record in objects])),
    }


def _decode(encoded: dict[str, Any], tree: TreeMetadata, columns: Sequence[HostArray]) -> Receipt:
    leaf, counts, bounds = (columns[number] for number in encoded["items"])
    state: JSON = encoded["state"]
    for path, number in encoded["places"]:
        column = IntegerColumn(columns[number])
        if not path:
            state = column
            continue
        inside: Any = state
        for step in path[:-1]:
            inside = inside[step]
        inside[path[-1]] = column
    checksums = columns[encoded["checksums"]].tobytes()
    objects = []
    start = 0
    sizes, sums = columns[encoded["sizes"]].tolist(), columns[encoded["sums"]].tolist()
    for key, size, length in zip(encoded["keys"], sizes, sums, strict=True):
        objects.append(ObjectRecord(key, size, checksums[start : start + length]))
        start += length
    return Receipt(encoded["rank"], ItemColumns(tree.leaves, leaf, counts, bounds), state, tuple(objects))


def _without_columns(document: JSON, path: _Path, column_paths: list[JSON], writer: _Columns) -> JSON:
    """Replace long lists of integers in a document by columns, and append their paths to `column_paths`."""
    if isinstance(document, Mapping):
        return {name: _without_columns(inner, (*path, name), column_paths, writer) for name, inner in document.items()}
    if isinstance(document, IntegerColumn):
        column_paths.append([path, writer.add(document.array)])
        return None
    if not isinstance(document, list | tuple):
        return document
    if len(document) > _FEW and set(map(type, document)) == {int}:
        try:
            column = np.array(document, np.int64)
        except OverflowError:
            return document  # too large for a column
        column_paths.append([path, writer.add(column)])
        return None
    return [_without_columns(inner, (*path, number), column_paths, writer) for number, inner in enumerate(document)]


class _Columns:
    """The columns of a message that is being encoded.

    Attributes:
        described: for each column: kind (``"numbers"``, or ``"steps"`` for differences), width in bytes, count,
            an offset to add to each entry, and the first number (0 for ``"numbers"``).
        data: the bytes of each column.
    """

    def __init__(self) -> None:
        self.described: list[JSON] = []
        self.data: list[bytes] = []

    def add(self, numbers: HostArray) -> int:
        """Add a column of numbers. Return the index of the column."""
        if not len(numbers):
            return self._add("numbers", 1, 0, 0, b"")
        plain = _as_narrow_column(numbers)
        steps = _as_narrow_column(np.diff(numbers, prepend=numbers[:1])) if len(numbers) > _FEW else None
        if steps is not None and steps[0].itemsize < plain[0].itemsize:
            kind, (narrow, least), first = "steps", steps, int(numbers[0])
        else:
            kind, (narrow, least), first = "numbers", plain, 0
        return self._add(kind, narrow.itemsize, len(numbers), least, narrow.tobytes(), first)

    def add_bytes(self, data: bytes) -> int:
        """Add a column of bytes. Return the index of the column."""
        return self._add("numbers", 1, len(data), 0, data)

    def _add(self, kind: str, width: int, count: int, least: int, data: bytes, first: int = 0) -> int:
        self.described.append([kind, width, count, least, first])
        self.data.append(data)
        return len(self.data) - 1


def _as_narrow_column(numbers: HostArray) -> tuple[HostArray, int]:
    """Subtract the smallest number. Returns the narrowest array of the differences, and the smallest number.

    If a difference could exceed 63 bits, returns the numbers unchanged, as 64 bits each, and 0.
    """
    least, most = int(numbers.min()), int(numbers.max())
    span = most - least
    if span > _LARGEST:
        return numbers.view(np.uint64), 0  # 64-bit differences may wrap around; their sums wrap back
    width = next(width for width in _WIDTHS if span < 1 << 8 * width)
    return (numbers - np.int64(least)).astype(_WIDTHS[width]), least


def _read_columns(described: Sequence[Any], data: memoryview) -> list[HostArray]:
    columns: list[HostArray] = []
    position = 0
    for kind, width, count, least, first in described:
        narrow: HostArray = np.frombuffer(data, _WIDTHS[width], count, position)
        position += width * count
        if kind == "numbers" and not least and width < 8:  # no copy; 8 bytes are unsigned, and must become int64
            columns.append(narrow)
            continue
        numbers = narrow.astype(np.int64) + np.int64(least)
        if kind == "steps":
            numbers = np.cumsum(numbers) + np.int64(first)
        columns.append(numbers)
    return columns
