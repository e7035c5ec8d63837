"""Databases with hostile trees and manifests, whose checksums are valid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from ckptcore_orbax.ocdbt.cursor import encode_varint
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.frame import MANIFEST_MAGIC, NODE_MAGIC, encode_frame
from ckptcore_orbax.ocdbt.manifest import Version, encode_manifest
from ckptcore_orbax.ocdbt.node import NodeReference, Statistics, ValueLocation
from ckptcore_orbax.ocdbt.paths import DataFile
from ckptcore_testing.layout_stores import DirectoryReadStore

from ckptcore.errors import CorruptCheckpointError
from plugins.layout_orbax.tests.ocdbt_files import encode_column, little_memory, put

_NODE_FILE: Final = "d/0123"
_UUID: Final = bytes(range(16))
_HUGE: Final = 2**64 - 1
_LEAF: Final = b"".join((b"\0\1\6\0d/0123", b"\2", b"\1\2\1abc", b"\3\x09", b"\0\1", b"\0", b"\7", b"xyz"))
"""A leaf node with two keys: ``ab`` has the inline value ``xyz``, and ``ac`` has 9 bytes of ``d/0123`` at offset 7."""


def _list(directory: Path) -> list[tuple[bytes, ValueLocation]]:
    return list(Database.open(DirectoryReadStore(directory), "").range())


# --- trees ------------------------------------------------------------------------------------------------------------


def _write_tree(directory: Path, bodies: Sequence[bytes], num_keys: int, *, root_length: int | None = None) -> None:
    """Write the nodes into one file, with the root last, and a manifest."""
    frames = [encode_frame(body, NODE_MAGIC) for body in bodies]
    put(directory, _NODE_FILE, b"".join(frames))
    offset = sum(map(len, frames[:-1]))
    length = len(frames[-1]) if root_length is None else root_length
    statistics = Statistics(num_keys, 0, 0)
    root = NodeReference(DataFile(_NODE_FILE, ""), offset, length, bodies[-1][0], statistics)
    put(directory, "manifest.ocdbt", encode_manifest(_UUID, Version(1, root, statistics, 0)))


def _parent(
    height: int, keys: Sequence[bytes], children: Sequence[tuple[int, int, int]], shares: Sequence[int]
) -> bytes:
    """Return an interior node. Each child has an offset and a length in the node file, and a number of keys."""
    count = len(keys)
    files = encode_column(1, len(_NODE_FILE), 0) + _NODE_FILE.encode()
    lengths = encode_column(*[0] * (count - 1), *map(len, keys), *shares)
    columns = ([0] * count, *zip(*children, strict=True), [0] * count, [0] * count)
    encoded = b"".join([encode_column(*column) for column in columns])
    return bytes([height]) + files + encode_varint(count) + lengths + b"".join(keys) + encoded


def test_a_valid_tree_is_listed(tmp_path: Path) -> None:
    nbytes = len(_LEAF) + 18
    parent = _parent(1, [b"1ab", b"2ab"], [(0, nbytes, 2), (0, nbytes, 2)], [1, 1])
    _write_tree(tmp_path, [_LEAF, parent], 4)
    assert [key for key, _ in _list(tmp_path)] == [b"1ab", b"1ac", b"2ab", b"2ac"]


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ([b"aa", b"ac"], [0, 0]),  # the last key of the first child equals the stated first key of the second
        ([b"ab", b"ad"], [0, 0]),  # the first key of the second child is less than its stated first key
        (
            [b"aa", b"ab1ab"],
            [0, 3],
        ),  # the last key of the first child is greater than the stated first key of the second
        ([b"b", b"c"], [0, 0]),
        ([b"1ab", b"1ac"], [1, 1]),
    ],
)
def test_children_with_keys_outside_of_their_bounds(tmp_path: Path, keys: list[bytes], shares: list[int]) -> None:
    nbytes = len(_LEAF) + 18
    _write_tree(tmp_path, [_LEAF, _parent(1, keys, [(0, nbytes, 2), (0, nbytes, 2)], shares)], 4)
    with pytest.raises(CorruptCheckpointError, match="are not within the bounds"):
        _list(tmp_path)


@pytest.mark.parametrize("length", [17, 18, 5000, 1 << 30, 1 << 40, (1 << 62) - 1])
def test_a_root_of_a_wrong_length(tmp_path: Path, length: int) -> None:
    _write_tree(tmp_path, [_LEAF], 2, root_length=length)
    with little_memory(4 << 20), pytest.raises(CorruptCheckpointError, match=_NODE_FILE):
        _list(tmp_path)


def test_a_node_that_refers_to_itself(tmp_path: Path) -> None:
    parent = _parent(1, [b"a"], [(0, 0, 2)], [0])
    nbytes = len(parent) + 18
    _write_tree(tmp_path, [_parent(1, [b"a"], [(0, nbytes, 2)], [0])], 2)
    with pytest.raises(CorruptCheckpointError, match="height"):
        _list(tmp_path)


def test_a_tree_that_is_too_high(tmp_path: Path) -> None:
    _write_tree(tmp_path, [_parent(64, [b"a"], [(0, 50, 2)], [0])], 2)
    with pytest.raises(CorruptCheckpointError, match="height"):
        _list(tmp_path)


def test_a_tree_with_too_many_keys_to_list(tmp_path: Path) -> None:
    """Each of forty nodes refers twice to the next node, so 3 kB state 2**41 keys."""
    bodies = [_LEAF]
    offset, keys = 0, 2
    for height in range(1, 41):
        nbytes = len(bodies[-1]) + 18
        bodies.append(_parent(height, [b"1", b"2"], [(offset, nbytes, keys)] * 2, [1, 1]))
        offset += nbytes
        keys *= 2
    _write_tree(tmp_path, bodies, keys)
    database = Database.open(DirectoryReadStore(tmp_path), "")
    assert database.num_keys == 2**41
    with little_memory(64 << 20), pytest.raises(CorruptCheckpointError, match="leads to it more than"):
        list(database.range())
    assert database.get(b"12" * 20 + b"ab") == ValueLocation(b"xyz", "", 0, 3)


# --- manifests --------------------------------------------------------------------------------------------------------


def _manifest(
    *,
    kind: int = 0,
    inline: int = 1024,
    node: int = 8 << 20,
    arity: int = 4,
    compression: bytes = b"\1" + bytes(4),
    files: bytes = encode_column(1, 6, 0) + b"d/0123",
    generations: Sequence[int] = (1, 2),
    heights: bytes = b"\0\0",
    places: Sequence[int] = (0, 0, 0, 0, 50, 60, 2, 2, 0, 0, 0, 0),
    references: bytes = b"\0",
) -> bytes:
    versions = (
        encode_varint(len(generations))
        + encode_column(*generations)
        + heights
        + encode_column(*places)
        + bytes(8 * len(generations))
    )
    config = _UUID + bytes([kind]) + encode_column(inline, node) + bytes([arity]) + compression
    return config + files + versions + references


_MANIFESTS: Final = {
    "an unknown kind": _manifest(kind=2),
    "numbered with versions": _manifest(kind=1),
    "inline values too large": _manifest(inline=(1 << 20) + 1),
    "nodes too large": _manifest(node=1 << 32),
    "no arity": _manifest(arity=0),
    "an arity too large": _manifest(arity=17),
    "an unknown compression": _manifest(compression=b"\2"),
    "no versions": _manifest(generations=(), heights=b"", places=()),
    "more versions than bytes": _manifest(generations=(1,) * 1000),
    "versions that descend": _manifest(generations=(2, 1)),
    "a version twice": _manifest(generations=(2, 2)),
    "a version 0": _manifest(generations=(0, 1)),
    "a tree too high": _manifest(heights=b"\0\x40"),
    "an unknown file number": _manifest(places=(0, 1, 0, 0, 50, 60, 2, 2, 0, 0, 0, 0)),
    "a file without a name": _manifest(files=encode_column(1, 0, 0)),
    "a path that leads out": _manifest(files=encode_column(1, 6, 0) + b"../abc"),
    "no files": _manifest(files=encode_column(0)),
    "a huge offset": _manifest(places=(0, 0, 0, 1 << 62, 50, 60, 2, 2, 0, 0, 0, 0)),
    "a huge length": _manifest(places=(0, 0, 0, 0, 50, 1 << 62, 2, 2, 0, 0, 0, 0)),
    "a huge number of keys": _manifest(places=(0, 0, 0, 0, 50, 60, 2, _HUGE, 0, 0, 0, 0)),
    "an empty tree with keys": _manifest(
        files=encode_column(1, 0, 0), places=(0, 0, 0, _HUGE, 50, _HUGE, 2, 2, 0, 0, 0, 0)
    ),
    "an empty tree in a file": _manifest(places=(0, 0, 0, _HUGE, 50, _HUGE, 2, 0, 0, 0, 0, 0)),
    "an empty tree with a height": _manifest(
        files=encode_column(1, 0, 0), heights=b"\0\1", places=(0, 0, 0, _HUGE, 50, _HUGE, 2, 0, 0, 0, 0, 0)
    ),
    "older versions that are newer": _manifest(references=encode_column(1, 1, 0, 0, 50, 1) + bytes(8) + b"\1"),
    "older versions in an unknown file": _manifest(
        generations=(2, 3), references=encode_column(1, 1, 9, 0, 50, 1) + bytes(8) + b"\1"
    ),
    "more older versions than bytes": _manifest(references=encode_varint(_HUGE)),
    "bytes after its end": _manifest() + b"\0",
    "a truncated end": _manifest()[:-1],
}


def test_valid_manifests_are_read(tmp_path: Path) -> None:
    references = encode_column(1, 1, 0, 0, 50, 1) + bytes(8) + b"\1"
    for body in (_manifest(), _manifest(generations=(2, 3), references=references), _manifest(compression=b"\0")):
        put(tmp_path, "manifest.ocdbt", encode_frame(body, MANIFEST_MAGIC))
        assert Database.open(DirectoryReadStore(tmp_path), "").num_keys == 2


@pytest.mark.parametrize("name", _MANIFESTS)
def test_hostile_manifests_are_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path, "manifest.ocdbt", encode_frame(_MANIFESTS[name], MANIFEST_MAGIC))
    with little_memory(4 << 20), pytest.raises(CorruptCheckpointError, match="manifest.ocdbt"):
        Database.open(DirectoryReadStore(tmp_path), "")


@pytest.mark.parametrize("stated", [10, 1 << 16, 1 << 40])
def test_a_large_file_that_is_not_a_manifest(tmp_path: Path, stated: int) -> None:
    put(tmp_path, "manifest.ocdbt", MANIFEST_MAGIC + stated.to_bytes(8, "little") + bytes(1 << 20))
    with pytest.raises(CorruptCheckpointError, match="manifest.ocdbt"):
        Database.open(DirectoryReadStore(tmp_path), "")


def test_a_large_manifest_is_read(tmp_path: Path) -> None:
    count = 20_000
    places = encode_column(*[0] * count, *[0] * count, *[50] * count, *[2] * count, *[0] * count, *[0] * count)
    body = _manifest(generations=range(1, count + 1), heights=bytes(count), places=())
    body = body[: -8 * count - 1] + places + body[-8 * count - 1 :]
    put(tmp_path, "manifest.ocdbt", encode_frame(body, MANIFEST_MAGIC))
    assert (tmp_path / "manifest.ocdbt").stat().st_size > 1 << 17
    assert Database.open(DirectoryReadStore(tmp_path), "").num_keys == 2
