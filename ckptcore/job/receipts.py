"""Receipts on their way to the leader: bytes in which numbers are columns, read there without an object for each.

They live as long as one exchange. All processes of a job have the same version of this package, or are refused by the version here.

The bytes are one line of JSON and after it the columns that it lists. A column is as narrow as the numbers in it allow, of the
numbers themselves or of the differences from one to the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from ckptcore.errors import PluginError, UnsupportedVersionError
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.transfer import IntegerColumn, ItemColumns, Receipt
from ckptcore.model.tree import JSON

__all__ = ["decode_receipts", "encode_receipts"]

_VERSION: Final = 1
_FEW: Final = 8
"""Numbers up to which a list stays as it is."""

_WIDTHS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LARGEST: Final = (1 << 63) - 1

_Path: TypeAlias = tuple[str | int, ...]


def encode_receipts(trees: Sequence[TreeMetadata], receipts: Sequence[Receipt]) -> bytes:
    """The bytes of what one process wrote.

    Args:
        trees: that of each receipt.
        receipts: of the parts of a save, in an order that all processes share.

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
    """The inverse of `encode_receipts`, for bytes of another process of this job.

    Raises:
        UnsupportedVersionError: that process has another version of this package.
    """
    line, _, rest = data.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    if head["version"] != _VERSION:
        raise UnsupportedVersionError(
            f"a process of the job tells of what it wrote in version {head['version']!r}, and the leader knows "
            f"{_VERSION}: install one version of ckptcore in all of them"
        )
    columns = _read_columns(head["columns"], memoryview(rest))
    return [_decode(encoded, tree, columns) for encoded, tree in zip(head["receipts"], trees, strict=True)]


def _encode(receipt: Receipt, tree: TreeMetadata, writer: _Columns) -> dict[str, JSON]:
    items = ItemColumns.of(tree.leaves, receipt.items)
    places: list[JSON] = []
    state = _without_columns(receipt.state, (), places, writer)
    objects = receipt.objects
    return {
        "rank": receipt.rank,
        "items": [writer.add(items.leaf), writer.add(items.counts), writer.add(items.bounds)],
        "state": state,
        "places": places,
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


def _without_columns(document: JSON, path: _Path, places: list[JSON], writer: _Columns) -> JSON:
    """A document without its long lists of whole numbers, which become columns; `places` is told where they were."""
    if isinstance(document, Mapping):
        return {name: _without_columns(inner, (*path, name), places, writer) for name, inner in document.items()}
    if isinstance(document, IntegerColumn):
        places.append([path, writer.add(document.array)])
        return None
    if not isinstance(document, list | tuple):
        return document
    if len(document) > _FEW and set(map(type, document)) == {int}:
        try:
            column = np.array(document, np.int64)
        except OverflowError:
            return document  # numbers that no column has room for
        places.append([path, writer.add(column)])
        return None
    return [_without_columns(inner, (*path, number), places, writer) for number, inner in enumerate(document)]


class _Columns:
    """Columns as they are collected.

    Attributes:
        described: of each, whether it has differences, its width in bytes, how many numbers it has, and what is to be added to each.
        data: their bytes.
    """

    def __init__(self) -> None:
        self.described: list[JSON] = []
        self.data: list[bytes] = []

    def add(self, numbers: HostArray) -> int:
        """Add numbers; the number of the column."""
        if not len(numbers):
            return self._add("numbers", 1, 0, 0, b"")
        plain = _narrowed(numbers)
        steps = _narrowed(np.diff(numbers, prepend=numbers[:1])) if len(numbers) > _FEW else None
        if steps is not None and steps[0].itemsize < plain[0].itemsize:
            kind, (narrow, least), first = "steps", steps, int(numbers[0])
        else:
            kind, (narrow, least), first = "numbers", plain, 0
        return self._add(kind, narrow.itemsize, len(numbers), least, narrow.tobytes(), first)

    def add_bytes(self, data: bytes) -> int:
        """Add bytes; the number of the column."""
        return self._add("numbers", 1, len(data), 0, data)

    def _add(self, kind: str, width: int, count: int, least: int, data: bytes, first: int = 0) -> int:
        self.described.append([kind, width, count, least, first])
        self.data.append(data)
        return len(self.data) - 1


def _narrowed(numbers: HostArray) -> tuple[HostArray, int]:
    """Numbers less the least of them in the narrowest dtype that holds them, and the least."""
    least, most = int(numbers.min()), int(numbers.max())
    span = most - least
    if span > _LARGEST:
        return numbers.view(np.uint64), 0  # differences in 64 bits come out the same, whatever overflows
    width = next(width for width in _WIDTHS if span < 1 << 8 * width)
    return (numbers - np.int64(least)).astype(_WIDTHS[width]), least


def _read_columns(described: Sequence[Any], data: memoryview) -> list[HostArray]:
    columns: list[HostArray] = []
    position = 0
    for kind, width, count, least, first in described:
        narrow: HostArray = np.frombuffer(data, _WIDTHS[width], count, position)
        position += width * count
        if kind == "numbers" and not least and width < 8:
            columns.append(narrow)
            continue
        numbers = narrow.astype(np.int64) + np.int64(least)
        if kind == "steps":
            numbers = np.cumsum(numbers) + np.int64(first)
        columns.append(numbers)
    return columns
