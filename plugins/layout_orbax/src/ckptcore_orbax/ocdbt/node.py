"""Nodes of the B+tree: leaves, that tell where values are, and interior nodes, that tell where other nodes are.

Body, column-wise: ``height u8 | table of files | n | prefix_len[n-1] | suffix_len[n] | subtree_common_prefix_len[n]
(interior only) | suffixes``; then of a leaf ``value_len[n] | kind u8[n] (0 inline, 1 indirect) | file_id[] | offset[]
(both of the indirect ones only) | inline values``, of an interior node ``file_id[n] | offset[n] | length[n] |
num_keys[n] | tree_bytes[n] | indirect_bytes[n]``. The documentation has the kind of a value as a varint; tensorstore
writes a byte. Keys ascend strictly, bytewise. They lack what all keys of the subtree share: of a child, that is ``key[:
what its parent's lack + subtree_common_prefix_len]``, of the root nothing.
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
"""An offset or length, so that the sum of two is a signed number of 64 bits."""

MOST_HEIGHT: Final = 63
"""A tree whose nodes have two children each has more nodes than there are bytes."""

MOST_KEY_BYTES: Final = 65535
MOST_INLINE_BYTES: Final = 1 << 20
"""As tensorstore has them."""

_ANY_KEYS: Final = 4 << 20
_MOST_GROWTH: Final = 64
"""The keys of a node may have `_ANY_KEYS` bytes (Orbax bounds a node at 100 MB), or `_MOST_GROWTH` times what its body has."""

_ANY_ENTRIES: Final = 1 << 14
_MOST_ENTRIES: Final = 16
"""A node may have `_ANY_ENTRIES` entries, or `_MOST_ENTRIES` for each of its bytes in the file. An entry has 5 bytes
before compression, and takes 30 times as many in memory."""

_ENTRY_BYTES: Final = 150
"""What an entry takes in memory beside its key, in bytes."""


@dataclass(frozen=True, slots=True)
class Value:
    """Where the value of a key is.

    Attributes:
        inline: the value itself, where it stands in the tree.
        file: the key of the object it is in, or empty where it is inline.
        offset, length: where it is in that object, in bytes; an inline value has its length too.
    """

    inline: bytes | None
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a subtree states of itself.

    Attributes:
        num_keys: keys in it.
        tree_bytes: bytes of its nodes.
        indirect_bytes: bytes of its values that are not inline.
    """

    num_keys: int
    tree_bytes: int
    indirect_bytes: int


@dataclass(frozen=True, slots=True)
class NodeReference:
    """Where a node is.

    Attributes:
        file: the object.
        offset, length: where it is in it, in bytes.
        height: 0 for a leaf; children have one less than their parent.
        statistics: of it and all below.
    """

    file: DataFile
    offset: int
    length: int
    height: int
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Leaf:
    """Keys and where their values are; columns of one length.

    Attributes:
        keys: ascending; without what all keys here share.
        inlines, files, offsets, lengths: what `Value` has.
    """

    keys: Sequence[bytes]
    inlines: Sequence[bytes | None]
    files: Sequence[str]
    offsets: Sequence[int]
    lengths: Sequence[int]

    def values(self, start: int, stop: int) -> Iterator[Value]:
        """Values of the entries `start` to `stop`, made as they are asked for."""
        part = slice(start, stop)
        return map(Value, self.inlines[part], self.files[part], self.offsets[part], self.lengths[part])

    @property
    def memory_bytes(self) -> int:
        """What it takes, about."""
        inline = sum(map(len, filter(None, self.inlines)))
        return sum(map(len, self.keys)) + inline + _ENTRY_BYTES * len(self.keys)


@dataclass(frozen=True, slots=True)
class Interior:
    """The first keys of nodes one lower; columns of one length.

    Attributes:
        keys: ascending; each at most the first of the keys below it, and above the last of those before it.
        prefixes: how many bytes of its key all keys below share and lack.
        children: where the nodes are.
    """

    keys: Sequence[bytes]
    prefixes: Sequence[int]
    children: Sequence[NodeReference]

    @property
    def memory_bytes(self) -> int:
        """What it takes, about."""
        return sum(map(len, self.keys)) + 3 * _ENTRY_BYTES * len(self.keys)


Node: TypeAlias = Leaf | Interior


def decode_node(data: bytes, reference: NodeReference, place: Place) -> Node:
    """Decode a whole node, and hold it to what its parent said of it.

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
    prefixes = cursor.varints(count, "what the keys of a child share", MOST_KEY_BYTES).tolist()
    keys = _decode_keys(cursor, *lengths_of_keys)
    if any(map(operator.gt, prefixes, map(len, keys))):
        raise place.damaged("the keys of a child share more than its first key has")
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
    """Numbers of files that can be referred to, and offsets."""
    numbers = cursor.varints(count, f"the number of the file of {what}", len(files) - 1)
    for number, file in enumerate(files):
        if not file.path and (numbers == number).any():
            raise cursor.place.damaged(f"{what} is said to lie in a file without a name")
    return numbers, cursor.varints(count, f"the offset of {what}", MOST_BYTES)


def _decode_lengths(cursor: Cursor, count: int, body_bytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many bytes each key shares with the one before it, and how many follow."""
    place = cursor.place
    shared = np.zeros(count, np.int64)
    shared[1:] = cursor.varints(count - 1, "what a key shares", MOST_KEY_BYTES)
    suffixes = cursor.varints(count, "the length of a key", MOST_KEY_BYTES)
    lengths = shared + suffixes
    if (longest := int(lengths.max())) > MOST_KEY_BYTES:
        raise place.damaged(f"a key has {longest} bytes, expected at most {MOST_KEY_BYTES}")
    if (shared[1:] > lengths[:-1]).any():
        raise place.damaged("a key shares more with the one before it than that one has")
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
