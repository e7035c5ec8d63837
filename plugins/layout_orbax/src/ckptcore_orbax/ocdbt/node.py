"""Nodes of the B+tree: leaves locate values, interior nodes locate other nodes.

Body, column-wise: ``height u8 | table of files | n | prefix_len[n-1] | suffix_len[n] |
subtree_common_prefix_len[n] (interior only) | suffixes``. Then in a leaf ``value_len[n] | kind
u8[n] (0 inline, 1 indirect) | file_id[] | offset[] (both of the indirect ones only) | inline
values``, and in an interior node ``file_id[n] | offset[n] | length[n] | num_keys[n] | tree_bytes[n]
| indirect_bytes[n]``. The documentation has the kind of a value as a varint; tensorstore writes a
byte. Keys ascend strictly, bytewise. The prefix that all keys of a subtree share is not stored: for
a child, ``key[: length of its parent's prefix + subtree_common_prefix_len]``; for the root,
nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptcore_orbax.ocdbt.cursor import Cursor, Place
from ckptcore_orbax.ocdbt.frame import NODE_MAGIC, decode_frame
from ckptcore_orbax.ocdbt.paths import DataFile, decode_files

__all__ = [
    "MOST_BYTES",
    "MOST_HEIGHT",
    "MOST_INLINE_BYTES",
    "MOST_KEY_BYTES",
    "Interior",
    "Leaf",
    "Node",
    "NodeReference",
    "Statistics",
    "Value",
    "decode_node",
]

MOST_BYTES: Final = (1 << 62) - 1
"""Limit for offsets and lengths, so that the sum of two is a signed 64-bit number."""

MOST_HEIGHT: Final = 63
"""A tree with two children per node and this height has more nodes than there are bytes."""

MOST_KEY_BYTES: Final = 65535
MOST_INLINE_BYTES: Final = 1 << 20
"""Limits of tensorstore."""

_ANY_KEYS: Final = 4 << 20
_MOST_GROWTH: Final = 64
"""Limit for the keys of a node: `_ANY_KEYS` bytes (Orbax limits a node to 100 MB), or
`_MOST_GROWTH` times its body.
"""

_ANY_ENTRIES: Final = 1 << 14
_MOST_ENTRIES: Final = 16
"""Limit for the entries of a node: `_ANY_ENTRIES`, or `_MOST_ENTRIES` per byte in the file. An
entry has 5 bytes before compression, and takes 30 times as much memory.
"""

_ENTRY_BYTES: Final = 150
"""Memory per entry in addition to its key, in bytes."""


@dataclass(frozen=True, slots=True)
class Value:
    """Location of the value of a key.

    Attributes:
        inline: the value itself, if the tree contains it.
        file: key of the object that contains it; empty if inline.
        offset, length: byte range in that object; an inline value has a length too.
    """

    inline: bytes | None
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a subtree, as stored.

    Attributes:
        num_keys: number of keys.
        tree_bytes: total size of its nodes.
        indirect_bytes: total size of its values that are not inline.
    """

    num_keys: int
    tree_bytes: int
    indirect_bytes: int


@dataclass(frozen=True, slots=True)
class NodeReference:
    """Location of a node.

    Attributes:
        file: the object.
        offset, length: byte range in the object.
        height: 0 for a leaf; one less than its parent's.
        statistics: statistics of its subtree.
    """

    file: DataFile
    offset: int
    length: int
    height: int
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Leaf:
    """Keys and locations of their values, as columns of equal length.

    Attributes:
        keys: ascending; without the prefix that all keys of the leaf share.
        inlines, files, offsets, lengths: the attributes of `Value`.
    """

    keys: Sequence[bytes]
    inlines: Sequence[bytes | None]
    files: Sequence[str]
    offsets: Sequence[int]
    lengths: Sequence[int]

    def values(self, start: int, stop: int) -> Iterator[Value]:
        """Yield the values of entries `start` to `stop`. Objects are created on demand."""
        part = slice(start, stop)
        return map(Value, self.inlines[part], self.files[part], self.offsets[part], self.lengths[part])

    @property
    def memory_bytes(self) -> int:
        """Approximate memory use, in bytes."""
        inline = sum(map(len, filter(None, self.inlines)))
        return sum(map(len, self.keys)) + inline + _ENTRY_BYTES * len(self.keys)


@dataclass(frozen=True, slots=True)
class Interior:
    """First keys of the nodes one level below, as columns of equal length.

    Attributes:
        keys: ascending; at most the first key of the child, and above the last key of the previous one.
        prefixes: number of bytes of the key that all keys of the child share.
        children: locations of the nodes.
    """

    keys: Sequence[bytes]
    prefixes: Sequence[int]
    children: Sequence[NodeReference]

    @property
    def memory_bytes(self) -> int:
        """Approximate memory use, in bytes."""
        return sum(map(len, self.keys)) + 3 * _ENTRY_BYTES * len(self.keys)


Node: TypeAlias = Leaf | Interior


def decode_node(data: bytes, reference: NodeReference, place: Place) -> Node:
    """Decode a node, and check it against the reference from its parent.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError
    """
    body = decode_frame(data, NODE_MAGIC, place)
    cursor = Cursor(body, place)
    height = cursor.byte("the height")
    if height != reference.height:
        raise place.damaged(f"it has the height {height}, expected {reference.height}")
    files = decode_files(cursor, reference.file.base)
    count = cursor.count("the number of entries")
    if count == 0:
        raise place.damaged("it has no entries")
    if count > (most := max(_ANY_ENTRIES, _MOST_ENTRIES * len(data))):
        raise place.damaged(f"its {len(data)} bytes grow to {count} entries, expected at most {most}")
    node: Node
    if height:
        node = _decode_interior(cursor, files, count, height, len(body))
        found = sum(child.statistics.num_keys for child in node.children)
    else:
        node = _decode_leaf(cursor, files, count, len(body))
        found = count
    cursor.finish()
    if found != reference.statistics.num_keys:
        raise place.damaged(f"it has {found} keys, expected {reference.statistics.num_keys}")
    return node


def _decode_leaf(cursor: Cursor, files: Sequence[DataFile], count: int, body_bytes: int) -> Leaf:
    place = cursor.place
    lengths_of_keys = _decode_lengths(cursor, count, body_bytes)
    keys = _decode_keys(cursor, *lengths_of_keys)
    lengths = cursor.varints(count, "the length of a value", MOST_BYTES)
    kinds = cursor.bytes_column(count, "the kind of a value")
    if kinds.max() > 1:
        raise place.damaged(f"the kind of a value is {kinds.max()}, expected 0 (inline) or 1 (indirect)")
    indirect = np.flatnonzero(kinds)
    numbers, offsets = _decode_places(cursor, files, len(indirect), "a value")
    paths = np.array([file.path for file in files], object)
    if len(indirect) == count:
        return Leaf(keys, [None] * count, paths[numbers].tolist(), offsets.tolist(), lengths.tolist())
    inlines: list[bytes | None] = [None] * count
    for entry in np.flatnonzero(kinds == 0).tolist():
        inlines[entry] = cursor.take(int(lengths[entry]), "an inline value")
    all_files = np.full(count, "", object)
    all_offsets = np.zeros(count, np.int64)
    if len(indirect):
        all_files[indirect] = paths[numbers]
        all_offsets[indirect] = offsets
    return Leaf(keys, inlines, all_files.tolist(), all_offsets.tolist(), lengths.tolist())


def _decode_interior(cursor: Cursor, files: Sequence[DataFile], count: int, height: int, body_bytes: int) -> Interior:
    place = cursor.place
    lengths_of_keys = _decode_lengths(cursor, count, body_bytes)
    prefixes = cursor.varints(count, "the shared prefix of a child's keys", MOST_KEY_BYTES).tolist()
    keys = _decode_keys(cursor, *lengths_of_keys)
    if any(map(operator.gt, prefixes, map(len, keys))):
        raise place.damaged("the shared prefix of a child's keys is longer than its first key")
    numbers, offsets = _decode_places(cursor, files, count, "a node")
    lengths = cursor.varints(count, "the length of a node", MOST_BYTES).tolist()
    statistics = map(
        Statistics,
        cursor.varints(count, "the number of keys", MOST_BYTES).tolist(),
        cursor.varints(count, "the bytes of a tree", MOST_BYTES).tolist(),
        cursor.varints(count, "the bytes of the values of a tree", MOST_BYTES).tolist(),
    )
    children = [
        NodeReference(files[number], offset, length, height - 1, stated)
        for number, offset, length, stated in zip(numbers.tolist(), offsets.tolist(), lengths, statistics, strict=True)
    ]
    return Interior(keys, prefixes, children)


def _decode_places(
    cursor: Cursor, files: Sequence[DataFile], count: int, what: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return file numbers and offsets. Checks that the files have paths."""
    numbers = cursor.varints(count, f"the number of the file of {what}", len(files) - 1)
    for number, file in enumerate(files):
        if not file.path and (numbers == number).any():
            raise cursor.place.damaged(f"{what} refers to a file without a name")
    return numbers, cursor.varints(count, f"the offset of {what}", MOST_BYTES)


def _decode_lengths(cursor: Cursor, count: int, body_bytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return how many bytes each key shares with the previous key, and how many follow."""
    place = cursor.place
    shared = np.zeros(count, np.int64)
    shared[1:] = cursor.varints(count - 1, "the shared prefix of a key", MOST_KEY_BYTES)
    suffixes = cursor.varints(count, "the length of a key", MOST_KEY_BYTES)
    lengths = shared + suffixes
    if (longest := int(lengths.max())) > MOST_KEY_BYTES:
        raise place.damaged(f"a key has {longest} bytes, expected at most {MOST_KEY_BYTES}")
    if (shared[1:] > lengths[:-1]).any():
        raise place.damaged("a key shares more with the previous key than that key has")
    most = max(_ANY_KEYS, _MOST_GROWTH * body_bytes)
    if (total := int(lengths.sum())) > most:
        raise place.damaged(f"its keys have {total} bytes, expected at most {most}")
    return shared, suffixes


def _decode_keys(cursor: Cursor, shared: npt.NDArray[np.int64], suffixes: npt.NDArray[np.int64]) -> list[bytes]:
    ends = np.cumsum(suffixes)
    text = cursor.take(int(ends[-1]), "the text of its keys")
    starts = (ends - suffixes).tolist()
    keys = []
    key = b""
    for prefix, start, stop in zip(shared.tolist(), starts, ends.tolist(), strict=True):
        key = key[:prefix] + text[start:stop]
        keys.append(key)
    if not all(map(operator.lt, keys, islice(keys, 1, None))):
        raise cursor.place.damaged("its keys do not ascend")
    return keys
