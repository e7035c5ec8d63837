"""Manifests: the configuration and the versions of a database.

Body: ``uuid[16] | manifest_kind u8 | max_inline_value_bytes | max_decoded_node_bytes |
version_tree_arity_log2 u8 | compression | its level i32 LE if it is zstd``. A manifest of kind 0
(single) continues with the table of files, the newest versions and references to nodes with older
versions, as columns of varints, except heights (u8) and times (u64 LE, ns). The documentation says
that manifest_kind is a varint; tensorstore writes a byte. A manifest of kind 1 (numbered) ends there:
the newest ``manifest.<16 hex digits>``, itself of kind 0, has the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptcore_orbax.ocdbt.cursor import ByteRange, Cursor, encode_varint
from ckptcore_orbax.ocdbt.frame import MANIFEST_MAGIC, decode_frame, encode_frame
from ckptcore_orbax.ocdbt.node import MAX_BYTES, MAX_HEIGHT, NodeReference, Statistics
from ckptcore_orbax.ocdbt.paths import decode_files, encode_files

_MISSING: Final = 2**64 - 1
"""Offset and length of the root of an empty tree."""

_MAX_INLINE: Final = 1 << 20
_MAX_ARITY_LOG2: Final = 16
"""Limits of tensorstore."""

_INLINE_BYTES: Final = 1024
_NODE_BYTES: Final = 100_000_000
_ARITY_LOG2: Final = 4
_ZSTD: Final = b"\1" + bytes(4)
"""The configuration that Orbax uses, so that Orbax can open and extend our databases: zstd at level
0, the default level. Nodes written here are uncompressed; each manifest and node states its own
compression.
"""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a database.

    Attributes:
        generation: number of the version, from 1.
        root: location of the root node; None if there are no keys.
        statistics: statistics of the whole tree.
        created_ns: time of writing, in nanoseconds since 1970.
    """

    generation: int
    root: NodeReference | None
    statistics: Statistics
    created_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest.

    Attributes:
        uuid: id of the database, 16 bytes.
        newest: the newest version, or None if numbered manifests contain the versions.
    """

    uuid: bytes
    newest: Version | None


def decode_manifest(data: bytes, directory: str, byte_range: ByteRange) -> Manifest:
    """Decode a manifest.

    Args:
        data: content of the object.
        directory: directory of the database: empty, or ending in ``/``.
        byte_range: location of the manifest, for errors.

    Raises:
        CorruptCheckpointError: the manifest is damaged.
        UnsupportedVersionError: the manifest has a newer format.
    """
    cursor = Cursor(decode_frame(data, MANIFEST_MAGIC, byte_range), byte_range)
    uuid = cursor.take(16, "the UUID")
    kind = cursor.byte("the kind of manifest")
    if kind > 1:
        raise byte_range.damage_error(f"the kind of manifest is {kind}, expected 0 (single) or 1 (numbered)")
    cursor.varint("max_inline_value_bytes", _MAX_INLINE)
    cursor.varint("max_decoded_node_bytes", 2**32 - 1)
    arity = cursor.byte("version_tree_arity_log2")
    if not 1 <= arity <= _MAX_ARITY_LOG2:
        raise byte_range.damage_error(f"version_tree_arity_log2 is {arity}, expected 1 to {_MAX_ARITY_LOG2}")
    if cursor.varint("the compression", 1):
        cursor.take(4, "the level of the compression")
    if kind == 1:
        cursor.finish()
        return Manifest(uuid, None)
    newest = _decode_versions(cursor, directory)
    cursor.finish()
    return Manifest(uuid, newest)


def _decode_versions(cursor: Cursor, directory: str) -> Version:
    byte_range = cursor.byte_range
    files = decode_files(cursor, directory)
    count = cursor.count("the number of versions")
    if count == 0:
        raise byte_range.damage_error("it has no version")
    generations = cursor.wide_varints(count, "the generation of a version")
    heights = cursor.bytes_column(count, "the height of a tree")
    numbers = cursor.varints(count, "the number of a file", len(files) - 1)
    offsets = cursor.wide_varints(count, "the offset of a root")
    lengths = cursor.wide_varints(count, "the length of a root")
    counts = cursor.varints(count, "the number of keys", MAX_BYTES)
    tree_bytes = cursor.varints(count, "the bytes of a tree", MAX_BYTES)
    indirect_bytes = cursor.varints(count, "the bytes of the values of a tree", MAX_BYTES)
    times = cursor.fixed64(count, "the time of a version")
    oldest = _decode_references(cursor, len(files))
    if generations[0] <= oldest or (generations[1:] <= generations[:-1]).any():
        raise byte_range.damage_error("the generations of its versions do not ascend")
    statistics = Statistics(int(counts[-1]), int(tree_bytes[-1]), int(indirect_bytes[-1]))
    height, file = int(heights[-1]), files[numbers[-1]]
    offset, length = int(offsets[-1]), int(lengths[-1])
    root = None
    if offset == length == _MISSING:
        if file.path or height or statistics != Statistics(0, 0, 0):
            raise byte_range.damage_error(
                f"its newest tree is empty, but has the height {height} and {statistics.num_keys} keys"
            )
    else:
        if not file.path or offset > MAX_BYTES or length > MAX_BYTES:
            raise byte_range.damage_error(
                f"its newest tree cannot be at byte {offset} of {file.path!r} with {length} bytes"
            )
        if height > MAX_HEIGHT:
            raise byte_range.damage_error(f"its newest tree has the height {height}, expected at most {MAX_HEIGHT}")
        root = NodeReference(file, offset, length, height, statistics)
    return Version(int(generations[-1]), root, statistics, int(times[-1]))


def _decode_references(cursor: Cursor, files: int) -> int:
    """Skip the references to nodes with older versions. Return the newest generation among them."""
    count = cursor.count("the number of nodes of versions")
    generations = cursor.wide_varints(count, "the generation of a node of versions")
    cursor.varints(count, "the number of a file", files - 1)
    for what in ("the offset", "the length", "the number of generations"):
        cursor.wide_varints(count, f"{what} of a node of versions")
    cursor.fixed64(count, "the time of a node of versions")
    cursor.take(count, "the height of a node of versions")
    return int(generations.max()) if count else 0


def encode_manifest(uuid: bytes, version: Version) -> bytes:
    """Return a single manifest with one version, whose paths are relative to the database."""
    root = version.root
    statistics = version.statistics
    byte_range = (_MISSING, _MISSING) if root is None else (root.offset, root.length)
    table = encode_varint(1) + bytes(2) if root is None else encode_files([root.file.path])
    body = b"".join(
        (
            uuid,
            b"\0",
            encode_varint(_INLINE_BYTES),
            encode_varint(_NODE_BYTES),
            bytes([_ARITY_LOG2]),
            _ZSTD,
            table,
            encode_varint(1),
            encode_varint(version.generation),
            bytes([0 if root is None else root.height]),
            encode_varint(0),
            *map(encode_varint, byte_range),
            encode_varint(statistics.num_keys),
            encode_varint(statistics.tree_bytes),
            encode_varint(statistics.indirect_bytes),
            np.array(version.created_ns, "<u8").tobytes(),
            encode_varint(0),
        )
    )
    return encode_frame(body, MANIFEST_MAGIC)
