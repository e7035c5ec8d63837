"""Chunks and the locations of their items, which ``.metadata`` lists apart, joined as columns.

Nothing here creates an object for each chunk that Python's garbage collector would visit: with the objects of torch in
memory, that took more time than reading a file of 100,000 chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np

from ckptcore.model import HostArray
from ckptcore_dcp.metadata.entries import DcpChunkColumns, DcpTensors, ItemRange, Sizes, TensorHead, padded_sizes

_WINDOW_ROWS: Final = 1 << 10
_KEY_COLUMNS: Final = 16
"""Maximum number of columns of a row whose bytes are its key."""


class SizeRows:
    """Sizes that are added one by one, or as columns."""

    def __init__(self) -> None:
        """Create rows without sizes."""
        self._parts: list[Sizes | list[tuple[int, ...]]] = []
        self._single: list[tuple[int, ...]] = []

    def append(self, size: tuple[int, ...]) -> None:
        """Add a size."""
        self._single.append(size)

    def extend(self, sizes: Sizes) -> None:
        """Add columns."""
        self._parts += [self._single, sizes] if self._single else [sizes]
        self._single = []

    def shape(self) -> tuple[int, int]:
        """Return the shape of the extents in `columns`, without creating them."""
        count = width = 0
        for part in (*self._parts, self._single):
            rows, axes = (len(part), max(map(len, part), default=0)) if isinstance(part, list) else part[1].shape
            count, width = count + rows, max(width, axes)
        return count, width

    def columns(self) -> Sizes:
        """Return all sizes."""
        if self._single or not self._parts:
            self._parts.append(self._single)
        parts = [padded_sizes(part) if isinstance(part, list) else part for part in self._parts]
        if len(parts) > 1:
            width = max(extents.shape[1] for _, extents in parts)
            axes = np.concatenate([axes for axes, _ in parts])
            parts = [(axes, np.concatenate([widened(extents, width) for _, extents in parts]))]
        self._parts, self._single = [*parts], []
        return parts[0]


def widened(extents: HostArray, width: int) -> HostArray:
    """Return rows with zeros up to this width."""
    missing = width - extents.shape[1]
    return np.pad(extents, ((0, 0), (0, missing))) if missing else extents


def row_keys(*columns: HostArray) -> list[bytes]:
    """Return the bytes of each row, or a digest of them if there are many. A file cannot choose their hashes."""
    keys: list[bytes] = []
    for window in _windows(len(columns[0])):
        rows = np.ascontiguousarray(np.column_stack([column[window] for column in columns]), np.int64)
        wide: list[bytes] = rows.view(f"V{rows.shape[1] * 8}").ravel().tolist()
        keys += wide if rows.shape[1] <= _KEY_COLUMNS else [blake2b(row, digest_size=32).digest() for row in wide]
    return keys


def _windows(count: int) -> Iterator[slice]:
    """Yield slices of rows. Columns computed from a slice take little memory, although a row may have 64 axes."""
    return (slice(first, first + _WINDOW_ROWS) for first in range(0, count, _WINDOW_ROWS))


@dataclass(slots=True)
class ListedItems:
    """The items that ``.metadata`` locates.

    Attributes:
        names: the name of each item of a tensor.
        offsets: the offsets of its chunk.
        file: its file, as a number.
        start, length: its byte range.
        transforms: transforms of items that have any, by their number.
        values: the byte ranges of values, by name.
        files: number of each file.
    """

    names: list[str] = field(default_factory=list)
    offsets: SizeRows = field(default_factory=SizeRows)
    file: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    transforms: dict[int, tuple[str, ...]] = field(default_factory=dict)
    values: dict[str, ItemRange] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    def append(self, name: str, offsets: tuple[int, ...] | None, item_range: ItemRange) -> None:
        """Add an item; without offsets, that of a value."""
        path, start, length, transforms = item_range
        file = self.files.setdefault(path, len(self.files))
        if offsets is None:
            self.values[name] = item_range
            return
        if transforms:
            self.transforms[len(self.names)] = transforms
        self.names.append(name)
        self.offsets.append(offsets)
        self.file.append(file)
        self.start.append(start)
        self.length.append(length)

    def extend(
        self, names: Sequence[str], offsets: Sizes, paths: Sequence[str], start: HostArray, length: HostArray
    ) -> None:
        """Add items of tensors."""
        for path in {*paths}:
            self.files.setdefault(path, len(self.files))
        self.names += names
        self.offsets.extend(offsets)
        self.file += map(self.files.__getitem__, paths)
        self.start += start.tolist()
        self.length += length.tolist()


@dataclass(slots=True)
class ListedTensors:
    """The tensors that ``.metadata`` describes, and their chunks.

    Attributes:
        heads: dtype, shape and requires_grad, by name.
        shapes: the shape of each tensor.
        counts: its number of chunks.
        offsets, sizes: the boxes of all chunks.
    """

    heads: dict[str, TensorHead] = field(default_factory=dict)
    shapes: SizeRows = field(default_factory=SizeRows)
    counts: list[int] = field(default_factory=list)
    offsets: SizeRows = field(default_factory=SizeRows)
    sizes: SizeRows = field(default_factory=SizeRows)


class Joined(NamedTuple):
    """Tensors, with the chunks that have locations.

    Attributes:
        tensors: the tensors.
        unknown: numbers of items of other names.
    """

    tensors: DcpTensors
    unknown: Sequence[int]


def padded_extents(tensors: ListedTensors, items: ListedItems) -> int:
    """Return the number of extents in the largest columns that `find_outside` and `join` create."""
    shapes = [rows.shape() for rows in (tensors.shapes, tensors.offsets, tensors.sizes, items.offsets)]
    return max(count for count, _ in shapes) * max(width for _, width in shapes)


def find_outside(tensors: ListedTensors) -> tuple[int, int] | None:
    """Return the number of the first chunk that exceeds its tensor, and of the tensor."""
    owner = np.repeat(np.arange(len(tensors.counts)), tensors.counts)
    (rank, shape), (start_axes, start), (axes, size) = [
        rows.columns() for rows in (tensors.shapes, tensors.offsets, tensors.sizes)
    ]
    width = max(extents.shape[1] for extents in (shape, start, size))
    for window in _windows(len(owner)):
        of = owner[window]
        starts, sizes, shapes = [widened(extents, width) for extents in (start[window], size[window], shape[of])]
        exceeds = (starts + sizes > shapes).any(axis=1)
        wrong = np.flatnonzero(exceeds | (start_axes[window] != rank[of]) | (axes[window] != rank[of]))
        if len(wrong):
            return window.start + int(wrong[0]), int(of[wrong[0]])
    return None


def join(tensors: ListedTensors, items: ListedItems) -> Joined:
    """Return the chunks that have locations, without duplicates. Of equal locations the last one counts."""
    numbers = dict(zip(tensors.heads, range(len(tensors.heads)), strict=True))
    owner = np.repeat(np.arange(len(tensors.counts)), tensors.counts)
    (axes, offsets), (_, sizes) = tensors.offsets.columns(), tensors.sizes.columns()
    item_axes, item_offsets = items.offsets.columns()
    width = max(offsets.shape[1], item_offsets.shape[1])
    item_owner = np.fromiter(map(numbers.get, items.names, repeat(-1)), np.int64, len(items.names))
    known = dict(
        zip(row_keys(item_owner, item_axes, widened(item_offsets, width)), range(len(item_owner)), strict=True)
    )
    chunks = row_keys(owner, axes, widened(offsets, width))
    item = np.fromiter(map(known.get, chunks, repeat(-1)), np.int64, len(chunks))
    file, start, length = list(items.file), list(items.start), list(items.length)
    transforms = dict(items.transforms)
    names = list(tensors.heads)
    for row in np.flatnonzero(item < 0).tolist():
        place = items.values.get(names[owner[row]]) if tensors.counts[owner[row]] == 1 else None
        if place is not None:  # a tensor of one chunk may be located by its name only
            item[row] = len(file)
            if place[3]:
                transforms[len(file)] = place[3]
            file.append(items.files[place[0]])
            start.append(place[1])
            length.append(place[2])
    kept = item >= 0
    if len(chunks) > len({*chunks}):
        seen: set[bytes] = set()
        for row, key in enumerate(row_keys(owner, axes, offsets, sizes)):
            kept[row] &= key not in seen
            seen.add(key)
    rows = np.flatnonzero(kept)
    item = item[rows]
    columns = DcpChunkColumns(
        axes[rows],
        offsets[rows],
        sizes[rows],
        np.array(file, np.int64)[item],
        np.array(start, np.int64)[item],
        np.array(length, np.int64)[item],
        list(items.files),
        {row: transforms[of] for row, of in enumerate(item.tolist()) if of in transforms} if transforms else {},
    )
    bounds = np.searchsorted(owner[rows], np.arange(len(names) + 1))
    unknown: list[int] = np.flatnonzero(item_owner < 0).tolist()
    return Joined(DcpTensors(tensors.heads, columns, bounds, numbers), unknown)
