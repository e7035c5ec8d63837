"""Encodes new databases: a manifest and the nodes of a tree, from keys and locations of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.errors import InvalidLocationError, NameCollisionError, UnsupportedLeafError
from ckptcore_orbax.ocdbt.cursor import encode_varint, encode_varints
from ckptcore_orbax.ocdbt.frame import NODE_MAGIC, encode_frame
from ckptcore_orbax.ocdbt.manifest import Version, encode_manifest
from ckptcore_orbax.ocdbt.node import (
    MAX_BYTES,
    MAX_INLINE_BYTES,
    MAX_KEY_BYTES,
    NodeReference,
    Statistics,
    ValueLocation,
)
from ckptcore_orbax.ocdbt.paths import DataFile, encode_files

_ENTRY_BYTES: Final = 16
"""Approximate size of an entry in a node, without its key and an inline value."""

_SHARED_BYTES: Final = 512
"""Maximum number of bytes that a key omits because it shares them with the previous key.

Readers also accept keys that omit fewer bytes than they share.
"""

_COMPARED_BYTES: Final = 1 << 22
"""Size of the keys compared at a time, in bytes."""


@dataclass(frozen=True, slots=True)
class EncodedDatabase:
    """An encoded database.

    Attributes:
        manifest: content of the object ``manifest.ocdbt``.
        nodes: content of the object for nodes; empty if there are no keys.
    """

    manifest: bytes
    nodes: bytes


class ValueRanges(NamedTuple):
    """Values in files, as columns with one row for each value.

    Attributes:
        keys: the keys. They are sorted faster if many of them are in order.
        files: all files, relative to the directory of the database.
        numbers: position of the file in `files`.
        offsets, lengths: byte range in the file.
    """

    keys: Sequence[bytes]
    files: Sequence[str]
    numbers: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


_NO_RANGES: Final = ValueRanges((), (), *np.empty((3, 0), np.int64))


def encode_database(
    entries: Iterable[tuple[bytes, ValueLocation]],
    ranges: ValueRanges = _NO_RANGES,
    *,
    uuid: bytes,
    node_file: str,
    created_ns: int,
    node_bytes: int = 1 << 20,
) -> EncodedDatabase:
    """Encode a database with one version.

    Nodes are not compressed: all readers support this, and encoding and decoding are faster. The
    manifest states the configuration of Orbax, so that tensorstore writes later versions like
    Orbax.

    Args:
        entries: keys and locations of their values, in any order. Files are relative to the directory
            of the database.
        ranges: further keys with values in files, of which there may be millions.
        uuid: 16 bytes, unique for each database.
        node_file: file for the nodes, relative to the directory of the database, such as
            ``d/<32 hex digits>``.
        created_ns: current time, in nanoseconds since 1970.
        node_bytes: approximate size of a node, in bytes.

    Raises:
        NameCollisionError: two entries have the same key.
        InvalidLocationError: a key or a file name is invalid in a database.
        UnsupportedLeafError: an inline value is too large.
    """
    if len(uuid) != 16 or node_bytes < 1:
        raise ValueError(f"expected a UUID of 16 bytes and nodes of 1 byte or more, found {len(uuid)} and {node_bytes}")
    pairs = list(entries)
    unordered = [*[key for key, _ in pairs], *ranges.keys]
    order = sorted(range(len(unordered)), key=unordered.__getitem__)
    keys = [unordered[row] for row in order]
    _check_keys(keys)
    columns = _ValueColumns.of([value for _, value in pairs], ranges, np.array(order, np.int64))
    nodes: list[bytes] = []
    root = _encode_tree(keys, columns, DataFile(node_file, ""), node_bytes, nodes) if keys else None
    statistics = Statistics(0, 0, 0) if root is None else root.statistics
    return EncodedDatabase(encode_manifest(uuid, Version(1, root, statistics, created_ns)), b"".join(nodes))


def _check_keys(keys: Sequence[bytes]) -> None:
    for key, following in zip(keys, islice(keys, 1, None), strict=False):
        if key == following:
            raise NameCollisionError(
                f"two values have the key {key[:200]!r} in one OCDBT database, expected one of each"
            )
    longest = max(keys, key=len, default=b"")
    if len(longest) > MAX_KEY_BYTES:
        raise InvalidLocationError(
            f"the key {longest[:80]!r}... has {len(longest)} bytes; OCDBT allows at most {MAX_KEY_BYTES}: "
            "shorten the names of the leaves"
        )


@dataclass(frozen=True, slots=True)
class _EncodedNode:
    """An encoded node: its first and last key, the length of its shared prefix, and its location."""

    first: bytes
    last: bytes
    prefix: int
    reference: NodeReference


def _encode_tree(
    keys: Sequence[bytes], columns: _ValueColumns, file: DataFile, node_bytes: int, nodes: list[bytes]
) -> NodeReference:
    """Append the bytes of all nodes to `nodes`, children before their parents. Return the location of the root."""
    offset = 0

    def add(
        first: bytes, last: bytes, prefix: int, height: int, body: bytes, below: Sequence[_EncodedNode], own: Statistics
    ) -> _EncodedNode:
        nonlocal offset
        data = encode_frame(body, NODE_MAGIC)
        nodes.append(data)
        statistics = _sum([own, Statistics(0, len(data), 0), *(child.reference.statistics for child in below)])
        reference = NodeReference(file, offset, len(data), height, statistics)
        offset += len(data)
        return _EncodedNode(first, last, prefix, reference)

    sizes = np.fromiter(map(len, keys), np.int64, len(keys))
    runs = _split(sizes + columns.inline_bytes + _ENTRY_BYTES, node_bytes, 1)
    level = []
    for start, stop in runs:
        prefix = 0 if len(runs) == 1 else _shared(keys[start], keys[stop - 1])
        body = b"\0" + _encode_leaf(keys[start:stop], prefix, columns, start, stop)
        level.append(add(keys[start], keys[stop - 1], prefix, 0, body, (), columns.statistics(start, stop)))
    height = 0
    while len(level) > 1:
        height += 1
        sizes = np.array([len(child.first) for child in level], np.int64)
        runs = _split(sizes + 2 * _ENTRY_BYTES, node_bytes, 2)
        above = []
        for start, stop in runs:
            children = level[start:stop]
            first, last = children[0].first, children[-1].last
            prefix = 0 if len(runs) == 1 else _shared(first, last)
            body = bytes([height]) + _encode_interior(children, prefix)
            above.append(add(first, last, prefix, height, body, children, Statistics(0, 0, 0)))
        level = above
    return level[0].reference


def _sum(statistics: Sequence[Statistics]) -> Statistics:
    return Statistics(
        sum(each.num_keys for each in statistics),
        sum(each.tree_bytes for each in statistics),
        sum(each.indirect_bytes for each in statistics),
    )


@dataclass(frozen=True, slots=True)
class _ValueColumns:
    """Values as columns.

    Attributes:
        inlines: inline values by row.
        lengths: lengths of the values, in bytes.
        inline_bytes: lengths of inline values, 0 for others.
        paths: all files, sorted.
        numbers: index of the file in `paths`; -1 for inline values.
        offsets: offset in the file.
    """

    inlines: Mapping[int, bytes]
    lengths: npt.NDArray[np.int64]
    inline_bytes: npt.NDArray[np.int64]
    paths: Sequence[str]
    numbers: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, values: Sequence[ValueLocation], ranges: ValueRanges, order: npt.NDArray[np.int64]) -> _ValueColumns:
        """Return the columns of `values` and then `ranges`, in an order of their rows."""
        paths = sorted({*[value.file for value in values], *ranges.files} - {""})
        numbers_of = {path: number for number, path in enumerate(paths)}
        own = np.array([[numbers_of.get(value.file, -1), value.offset, value.length] for value in values], np.int64)
        files = np.array([numbers_of.get(file, -1) for file in ranges.files], np.int64)
        theirs = np.stack([files[ranges.numbers], ranges.offsets, ranges.lengths], axis=1)
        columns = np.concatenate([own.reshape(-1, 3), theirs])
        is_inline = np.zeros(len(columns), np.bool_)
        for row, value in enumerate(values):
            if value.inline is None:
                continue
            if len(value.inline) > MAX_INLINE_BYTES:
                raise UnsupportedLeafError(
                    f"an inline value has {len(value.inline)} bytes; OCDBT allows at most {MAX_INLINE_BYTES}"
                )
            is_inline[row] = True
            columns[row] = -1, value.offset, len(value.inline)
        wrong = ~is_inline & ((columns < 0).any(axis=1) | (columns[:, 1:] > MAX_BYTES).any(axis=1))
        if wrong.any():
            number, offset, length = columns[int(np.argmax(wrong))].tolist()
            found = ValueLocation(None, paths[number] if number >= 0 else "", offset, length)
            raise InvalidLocationError(f"invalid location of a value: {found}; expected a file and a byte range")
        columns, is_inline = columns[order], is_inline[order]
        numbers, offsets, lengths = np.ascontiguousarray(columns.T)
        inlines = {row: values[order[row]].inline or b"" for row in np.flatnonzero(is_inline).tolist()}
        return cls(inlines, lengths, np.where(is_inline, lengths, 0), paths, numbers, offsets)

    def statistics(self, start: int, stop: int) -> Statistics:
        """Return the statistics of a leaf with these entries, without the size of the leaf itself."""
        indirect = int(self.lengths[start:stop].sum() - self.inline_bytes[start:stop].sum())
        return Statistics(stop - start, 0, indirect)


def _split(sizes: npt.NDArray[np.int64], node_bytes: int, least: int) -> list[tuple[int, int]]:
    """Split entries into ranges of about `node_bytes` bytes with at least `least` entries."""
    ends = np.cumsum(sizes)
    runs: list[tuple[int, int]] = []
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + node_bytes, "right")), start + least)
        if len(sizes) - stop < least:
            stop = len(sizes)
        runs.append((start, stop))
        start = stop
    return runs


def _encode_leaf(keys: Sequence[bytes], prefix: int, values: _ValueColumns, start: int, stop: int) -> bytes:
    numbers = values.numbers[start:stop]
    indirect = np.flatnonzero(numbers >= 0)
    used, own = np.unique(numbers[indirect], return_inverse=True)
    lengths, suffixes = _encode_keys(keys, prefix)
    return b"".join(
        (
            encode_files([values.paths[number] for number in used.tolist()]),
            encode_varint(len(keys)),
            lengths,
            suffixes,
            encode_varints(values.lengths[start:stop].astype(np.uint64)),
            (numbers >= 0).astype(np.uint8).tobytes(),
            encode_varints(own.astype(np.uint64)),
            encode_varints(values.offsets[start:stop][indirect].astype(np.uint64)),
            *[values.inlines[start + entry] for entry in np.flatnonzero(numbers < 0).tolist()],
        )
    )


def _encode_interior(children: Sequence[_EncodedNode], prefix: int) -> bytes:
    references = [child.reference for child in children]
    paths = sorted({reference.file.path for reference in references})
    numbers = {path: number for number, path in enumerate(paths)}
    lengths, suffixes = _encode_keys([child.first for child in children], prefix)
    columns = (
        [numbers[reference.file.path] for reference in references],
        [reference.offset for reference in references],
        [reference.length for reference in references],
        [reference.statistics.num_keys for reference in references],
        [reference.statistics.tree_bytes for reference in references],
        [reference.statistics.indirect_bytes for reference in references],
    )
    return b"".join(
        (
            encode_files(paths),
            encode_varint(len(children)),
            lengths,
            encode_varints(np.array([child.prefix - prefix for child in children], np.uint64)),
            suffixes,
            *[encode_varints(np.array(column, np.uint64)) for column in columns],
        )
    )


def _encode_keys(keys: Sequence[bytes], prefix: int) -> tuple[bytes, bytes]:
    """Return the encoded lengths of keys without their prefix, and the concatenated suffixes."""
    relative = [key[prefix:] for key in keys] if prefix else keys
    sizes = np.fromiter(map(len, relative), np.int64, len(relative))
    shared = _shared_with_previous(relative, sizes)
    rests = [key[count:] for key, count in zip(relative, shared.tolist(), strict=True)]
    lengths = encode_varints(shared[1:].astype(np.uint64)) + encode_varints((sizes - shared).astype(np.uint64))
    return lengths, b"".join(rests)


def _shared_with_previous(keys: Sequence[bytes], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many bytes each key shares with the previous key, up to `_SHARED_BYTES`; 0 for the first."""
    width = max(1, min(int(sizes.max()), _SHARED_BYTES))
    rows = max(2, _COMPARED_BYTES // width)
    shared = np.zeros(len(keys), np.int64)
    for start in range(0, len(keys) - 1, rows - 1):
        part = np.array(keys[start : start + rows], f"S{width}").view(np.uint8).reshape(-1, width)
        differ = part[1:] != part[:-1]
        first = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
        # Shorter keys are padded with NUL bytes, which do not count.
        bounds = np.minimum(sizes[start : start + rows - 1][: len(first)], sizes[start + 1 : start + rows])
        shared[start + 1 : start + 1 + len(first)] = np.minimum(first, bounds)
    return shared


def _shared(first: bytes, last: bytes) -> int:
    """Return the length of the common prefix of two keys. All keys between them share it too."""
    shorter = min(len(first), len(last))
    if first[:shorter] == last[:shorter]:
        return shorter
    low, high = 0, shorter
    while high - low > 1:
        middle = (low + high) // 2
        if first[:middle] == last[:middle]:
            low = middle
        else:
            high = middle
    return low
