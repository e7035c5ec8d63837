"""Nodes of the B+tree: leaves locate values, interior nodes locate other nodes.

Body, column-wise: ``height u8 | table of files | n | prefix_len[n-1] | suffix_len[n] |
subtree_common_prefix_len[n] (interior only) | suffixes``. Then in a leaf ``value_len[n] | kind
u8[n] (0 inline, 1 indirect) | file_id[] | offset[] (both only for indirect values) | inline
values``, and in an interior node ``file_id[n] | offset[n] | length[n] | num_keys[n] | tree_bytes[n]
| indirect_bytes[n]``. The documentation says that the kind of a value is a varint; tensorstore
writes a byte.

Keys ascend strictly, bytewise. A key is stored as the number of bytes that it shares with the
previous key (``prefix_len``), and the rest (``suffixes``). In addition, each node omits a prefix
from all its keys. The prefix of the root is empty. The prefix of a child is its parent's prefix
followed by the first ``subtree_common_prefix_len`` bytes of the child's key in the parent.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptcore_orbax.ocdbt.cursor import ByteRange, Cursor
from ckptcore_orbax.ocdbt.frame import NODE_MAGIC, decode_frame
from ckptcore_orbax.ocdbt.paths import DataFile, decode_files

MAX_BYTES: Final = (1 << 62) - 1
"""Limit for offsets and lengths, so that the sum of two is a signed 64-bit number."""

MAX_HEIGHT: Final = 63
"""Maximum height of a node. A tree of this height with two children per node has 2**63 leaves."""

MAX_KEY_BYTES: Final = 65535
MAX_INLINE_BYTES: Final = 1 << 20
"""Limits of tensorstore."""

_ALWAYS_ALLOWED_KEYS: Final = 4 << 20
_MAX_GROWTH: Final = 64
"""Limit for the total size of a node's keys: shared prefixes can make them much larger than the body.

The limit is the larger of `_ALWAYS_ALLOWED_KEYS` bytes and `_MAX_GROWTH` times the body's size.
"""

_ALWAYS_ALLOWED_ENTRIES: Final = 1 << 14
_MAX_ENTRIES: Final = 16
"""Limit for the number of entries of a node, because an entry may have only 5 bytes before
compression, but takes about 150 bytes of memory.

The limit is the larger of `_ALWAYS_ALLOWED_ENTRIES` and `_MAX_ENTRIES` per byte in the file.
"""

_ENTRY_BYTES: Final = 150
"""Memory per entry in addition to its key, in bytes."""


@dataclass(frozen=True, slots=True)
class ValueLocation:
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
class LeafNode:
    """Keys and locations of their values, as columns of equal length.

    Attributes:
        keys: ascending; without the prefix that all keys of the leaf share.
        inlines, files, offsets, lengths: the attributes of `ValueLocation`.
    """

    keys: Sequence[bytes]
    inlines: Sequence[bytes | None]
    files: Sequence[str]
    offsets: Sequence[int]
    lengths: Sequence[int]

    def values(self, start: int, stop: int) -> Iterator[ValueLocation]:
        """Yield the values of entries `start` to `stop`. Objects are created on demand."""
        part = slice(start, stop)
        return map(ValueLocation, self.inlines[part], self.files[part], self.offsets[part], self.lengths[part])

    @property
    def memory_bytes(self) -> int:
        """Approximate memory use, in bytes."""
        inline = sum(map(len, filter(None, self.inlines)))
        return sum(map(len, self.keys)) + inline + _ENTRY_BYTES * len(self.keys)


@dataclass(frozen=True, slots=True)
class InteriorNode:
    """Key bounds and locations of the nodes one level below, as columns of equal length.

    Attributes:
        keys: lower bound of the keys of each child, ascending; above all keys of the previous child.
        prefixes: number of leading bytes of each key that all keys of its child share.
        children: locations of the nodes.
    """

    keys: Sequence[bytes]
    prefixes: Sequence[int]
    children: Sequence[NodeReference]

    @property
    def memory_bytes(self) -> int:
        """Approximate memory use, in bytes."""
        return sum(map(len, self.keys)) + 3 * _ENTRY_BYTES * len(self.keys)


Node: TypeAlias = LeafNode | InteriorNode


def decode_node(data: bytes, reference: NodeReference, byte_range: ByteRange) -> Node:
    """Decode a node, and check it against the reference from its parent.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError
    """
    body = decode_frame(data, NODE_MAGIC, byte_range)
    cursor = Cursor(body, byte_range)
    height = cursor.byte("the height")
    if height != reference.height:
        raise byte_range.damage_error(f"it has the height {height}, expected {reference.height}")
    files = decode_files(cursor, reference.file.base)
    count = cursor.count("the number of entries")
    if count == 0:
        raise byte_range.damage_error("it has no entries")
    if count > (limit := max(_ALWAYS_ALLOWED_ENTRIES, _MAX_ENTRIES * len(data))):
        raise byte_range.damage_error(f"its {len(data)} bytes state {count} entries, expected at most {limit}")
    node: Node
    if height:
        node = _decode_interior(cursor, files, count, height, len(body))
        total = sum(child.statistics.num_keys for child in node.children)
    else:
        node = _decode_leaf(cursor, files, count, len(body))
        total = count
    cursor.finish()
    if total != reference.statistics.num_keys:
        raise byte_range.damage_error(f"it has {total} keys, expected {reference.statistics.num_keys}")
    return node


def _decode_leaf(cursor: Cursor, files: Sequence[DataFile], count: int, body_bytes: int) -> LeafNode:
    byte_range = cursor.byte_range
    lengths_of_keys = _decode_lengths(cursor, count, body_bytes)
    keys = _decode_keys(cursor, *lengths_of_keys)
    lengths = cursor.varints(count, "the length of a value", MAX_BYTES)
    kinds = cursor.bytes_column(count, "the kind of a value")
    if kinds.max() > 1:
        raise byte_range.damage_error(f"the kind of a value is {kinds.max()}, expected 0 (inline) or 1 (indirect)")
    indirect = np.flatnonzero(kinds)
    numbers, offsets = _decode_locations(cursor, files, len(indirect), "a value")
    paths = np.array([file.path for file in files], object)
    if len(indirect) == count:
        return LeafNode(keys, [None] * count, paths[numbers].tolist(), offsets.tolist(), lengths.tolist())
    inlines: list[bytes | None] = [None] * count
    for entry in np.flatnonzero(kinds == 0).tolist():
        inlines[entry] = cursor.take(int(lengths[entry]), "an inline value")
    all_files = np.full(count, "", object)
    all_offsets = np.zeros(count, np.int64)
    if len(indirect):
        all_files[indirect] = paths[numbers]
        all_offsets[indirect] = offsets
    return LeafNode(keys, inlines, all_files.tolist(), all_offsets.tolist(), lengths.tolist())


def _decode_interior(
    cursor: Cursor, files: Sequence[DataFile], count: int, height: int, body_bytes: int
) -> InteriorNode:
    byte_range = cursor.byte_range
    lengths_of_keys = _decode_lengths(cursor, count, body_bytes)
    prefixes = cursor.varints(count, "the shared prefix of a child's keys", MAX_KEY_BYTES).tolist()
    keys = _decode_keys(cursor, *lengths_of_keys)
    if any(map(operator.gt, prefixes, map(len, keys))):
        raise byte_range.damage_error("the shared prefix of a child's keys is longer than its first key")
    numbers, offsets = _decode_locations(cursor, files, count, "a node")
    lengths = cursor.varints(count, "the length of a node", MAX_BYTES).tolist()
    statistics = map(
        Statistics,
        cursor.varints(count, "the number of keys", MAX_BYTES).tolist(),
        cursor.varints(count, "the bytes of a tree", MAX_BYTES).tolist(),
        cursor.varints(count, "the bytes of the values of a tree", MAX_BYTES).tolist(),
    )
    children = [
        NodeReference(files[number], offset, length, height - 1, stated)
        for number, offset, length, stated in zip(numbers.tolist(), offsets.tolist(), lengths, statistics, strict=True)
    ]
    return InteriorNode(keys, prefixes, children)


def _decode_locations(
    cursor: Cursor, files: Sequence[DataFile], count: int, what: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return file numbers and offsets. Checks that the files have paths."""
    numbers = cursor.varints(count, f"the number of the file of {what}", len(files) - 1)
    if np.array([not file.path for file in files], bool)[numbers].any():
        raise cursor.byte_range.damage_error(f"{what} refers to a file without a name")
    return numbers, cursor.varints(count, f"the offset of {what}", MAX_BYTES)


def _decode_lengths(cursor: Cursor, count: int, body_bytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return how many bytes each key shares with the previous key, and how many follow."""
    byte_range = cursor.byte_range
    shared = np.zeros(count, np.int64)
    shared[1:] = cursor.varints(count - 1, "the shared prefix of a key", MAX_KEY_BYTES)
    suffixes = cursor.varints(count, "the length of a key", MAX_KEY_BYTES)
    lengths = shared + suffixes
    if (longest := int(lengths.max())) > MAX_KEY_BYTES:
        raise byte_range.damage_error(f"a key has {longest} bytes, expected at most {MAX_KEY_BYTES}")
    if (shared[1:] > lengths[:-1]).any():
        raise byte_range.damage_error("the shared prefix of a key is longer than the previous key")
    limit = max(_ALWAYS_ALLOWED_KEYS, _MAX_GROWTH * body_bytes)
    if (total := int(lengths.sum())) > limit:
        raise byte_range.damage_error(f"its keys have {total} bytes, expected at most {limit}")
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
        raise cursor.byte_range.damage_error("its keys do not ascend")
    return keys
