"""Hostile database nodes, which have valid checksums and invalid contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
import zstandard
from ckptcore_orbax.crc32c import crc32c_of
from ckptcore_orbax.ocdbt.cursor import ByteRange, encode_varint, encode_varints
from ckptcore_orbax.ocdbt.node import InteriorNode, LeafNode, NodeReference, Statistics, ValueLocation, decode_node
from ckptcore_orbax.ocdbt.paths import DataFile
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.errors import CorruptCheckpointError, UnsupportedVersionError
from plugins.layout_orbax.tests.ocdbt_files import encode_column, little_memory

_NODE: Final = bytes.fromhex("0cdb20de")


def _frame(body: bytes, magic: bytes = _NODE, *, version: int = 0, compression: int = 0) -> bytes:
    total = 4 + 8 + 2 + len(body) + 4
    encoded = magic + total.to_bytes(8, "little") + bytes([version, compression]) + body
    return encoded + crc32c_of(encoded).to_bytes(4, "little")


_PLACE: Final = ByteRange("B+tree node", "d/0123", 0, 0)


def _decode(body: bytes, *, height: int = 0, count: int = 1, base: str = "") -> LeafNode | InteriorNode:
    data = _frame(body)
    reference = NodeReference(DataFile(f"{base}d/0123", base), 0, len(data), height, Statistics(count, 0, 0))
    return decode_node(data, reference, _PLACE)


@settings(deadline=None)
@given(st.binary(max_size=120), st.integers(0, 3), st.integers(0, 5))
def test_any_bytes_raise_only_corruption_errors(body: bytes, height: int, count: int) -> None:
    for data in (body, bytes([height]) + body):
        try:
            _decode(data, height=height, count=count)
        except CorruptCheckpointError:
            continue


def _leaf(
    *,
    height: int = 0,
    files: bytes = encode_column(1, 6, 0) + b"d/0123",
    count: bytes = encode_column(2),
    shared: Sequence[int] = (1,),
    lengths: Sequence[int] = (2, 1),
    text: bytes = b"abc",
    value_lengths: Sequence[int] = (3, 9),
    kinds: bytes = b"\0\1",
    numbers: Sequence[int] = (0,),
    offsets: Sequence[int] = (7,),
    inlines: bytes = b"xyz",
) -> bytes:
    """Return a leaf node: ``ab`` has the inline value ``xyz``, and ``ac`` has 9 bytes of ``d/0123`` at offset 7."""
    columns = (*shared, *lengths)
    return b"".join(
        (
            bytes([height]),
            files,
            count,
            encode_column(*columns),
            text,
            encode_column(*value_lengths),
            kinds,
            encode_column(*numbers),
            encode_column(*offsets),
            inlines,
        )
    )


def _interior(
    *,
    files: bytes = encode_column(1, 6, 0) + b"d/0123",
    lengths: Sequence[int] = (2, 1),
    child_shares: Sequence[int] = (0, 0),
    places: Sequence[int] = (0, 0, 0, 50, 50, 50, 2, 2, 0, 0, 0, 0),
) -> bytes:
    """Return an interior node with the keys ``ab`` and ``ac``. Its children are leaves of 50 bytes and two keys."""
    columns = encode_column(1, *lengths) + encode_column(*child_shares)
    return b"\1" + files + encode_column(2) + columns + b"abc" + encode_column(*places)


def test_valid_nodes_are_decoded() -> None:
    leaf = _decode(_leaf(), count=2, base="ocdbt.process_0/")
    assert isinstance(leaf, LeafNode) and leaf.keys == [b"ab", b"ac"]
    assert list(leaf.values(0, 2)) == [
        ValueLocation(b"xyz", "", 0, 3),
        ValueLocation(None, "ocdbt.process_0/d/0123", 7, 9),
    ]
    assert _decode(_interior(), height=1, count=4).keys == [b"ab", b"ac"]


_HUGE: Final = 2**64 - 1
_LEAVES: Final = {
    "another height": _leaf(height=1),
    "no entries": b"\0" + encode_column(0, 0),
    "more entries than bytes": _leaf(count=encode_column(1000)),
    "a huge count": _leaf(count=encode_column(_HUGE)),
    "a count without an end": _leaf(count=b"\xff" * 11),
    "more keys than stated": _leaf(
        count=encode_column(1), shared=(), lengths=(3,), value_lengths=(3,), kinds=b"\0", numbers=(), offsets=()
    ),
    "keys that descend": _leaf(text=b"cbb", shared=(0,)),
    "a key twice": _leaf(text=b"abb"),
    "a shared length too long": _leaf(shared=(3,)),
    "a huge shared length": _leaf(shared=(_HUGE,)),
    "a key too long": _leaf(lengths=(65536, 1), text=b"a" * 65537),
    "a key that ends too late": _leaf(lengths=(2, 1000)),
    "a huge key": _leaf(lengths=(_HUGE, 1)),
    "a huge value": _leaf(value_lengths=(3, 1 << 62)),
    "a huge inline value": _leaf(value_lengths=(_HUGE, 9)),
    "an inline value too long": _leaf(value_lengths=(4, 9)),
    "an inline value too short": _leaf(value_lengths=(2, 9)),
    "a huge offset": _leaf(offsets=(1 << 62,)),
    "an unknown kind": _leaf(kinds=b"\0\2"),
    "an unknown file number": _leaf(numbers=(1,)),
    "a huge file number": _leaf(numbers=(_HUGE,)),
    "no files": _leaf(files=encode_column(0)),
    "a huge number of files": _leaf(files=encode_column(_HUGE)),
    "a file without a name": _leaf(files=encode_column(1, 0, 0)),
    "an absolute path": _leaf(files=encode_column(1, 6, 0) + b"/d/012"),
    "a path that leads out": _leaf(files=encode_column(1, 6, 0) + b"../012"),
    "a path that leads out at its end": _leaf(files=encode_column(1, 6, 0) + b"d/../x"),
    "a base path that leads out": _leaf(files=encode_column(1, 6, 3) + b"../d/x"),
    "a path of dots": _leaf(files=encode_column(1, 6, 0) + b"././01"),
    "a path of a directory": _leaf(files=encode_column(1, 6, 0) + b"d/012/"),
    "a NUL character": _leaf(files=encode_column(1, 6, 0) + b"d/0\x0012"),
    "a path that is not UTF-8": _leaf(files=encode_column(1, 6, 0) + b"d/\xff\xfe12"),
    "a base that ends within a character": _leaf(files=encode_column(1, 6, 1) + "ééé".encode()),
    "a base longer than its path": _leaf(files=encode_column(1, 6, 7) + b"d/0123"),
    "a path that shares too much": _leaf(files=encode_column(2, 7, 6, 1, 0, 0) + b"d/0123x"),
    "a path too long": _leaf(files=encode_column(2, 65535, 65535, 1, 0, 0) + b"x" * 65536),
    "bytes after its end": _leaf() + b"\0",
    "a truncated end": _leaf()[:-1],
}


@pytest.mark.parametrize("name", _LEAVES)
def test_hostile_leaves_are_refused(name: str) -> None:
    with little_memory(4 << 20), pytest.raises(CorruptCheckpointError, match="d/0123"):
        _decode(_LEAVES[name], count=2)


_INTERIORS: Final = {
    "a shared length greater than that of the key": _interior(child_shares=(3, 0)),
    "a huge shared length": _interior(child_shares=(_HUGE, 0)),
    "a huge length": _interior(places=(0, 0, 0, 50, 1 << 62, 50, 2, 2, 0, 0, 0, 0)),
    "a huge offset": _interior(places=(0, 0, 1 << 62, 50, 50, 50, 2, 2, 0, 0, 0, 0)),
    "a huge number of keys": _interior(places=(0, 0, 0, 50, 50, 50, 2, _HUGE, 0, 0, 0, 0)),
    "other keys than stated": _interior(places=(0, 0, 0, 50, 50, 50, 2, 3, 0, 0, 0, 0)),
    "an unknown file number": _interior(places=(0, 1, 0, 50, 50, 50, 2, 2, 0, 0, 0, 0)),
    "a file without a name": _interior(files=encode_column(1, 0, 0)),
    "a truncated end": _interior()[:-1],
    "bytes after its end": _interior() + b"\0",
}


@pytest.mark.parametrize("name", _INTERIORS)
def test_hostile_interior_nodes_are_refused(name: str) -> None:
    with little_memory(4 << 20), pytest.raises(CorruptCheckpointError, match="d/0123"):
        _decode(_INTERIORS[name], height=1, count=4)


# --- frames -----------------------------------------------------------------------------------------------------------


def _decode_data(data: bytes) -> LeafNode | InteriorNode:
    return decode_node(data, NodeReference(DataFile("d/0123", ""), 0, len(data), 0, Statistics(2, 0, 0)), _PLACE)


def _zstd(data: bytes, *, stated: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=stated).compress(data)


@pytest.mark.parametrize("stated", [True, False])
def test_compressed_nodes_are_decoded(stated: bool) -> None:
    leaf = _decode_data(_frame(_zstd(_leaf(), stated=stated), compression=1))
    assert leaf.keys == [b"ab", b"ac"]


def test_frames_of_unknown_versions_and_compressions_are_refused() -> None:
    for unknown in (_frame(_leaf(), version=1), _frame(_leaf(), compression=2)):
        with pytest.raises(UnsupportedVersionError, match="newer ckptcore"):
            _decode_data(unknown)


_FRAMES: Final = {
    "no bytes": b"",
    "a manifest": _frame(_leaf(), bytes.fromhex("0cdb3a2a")),
    "too short": _frame(b"")[:17],
    "a length too long": _NODE + (1000).to_bytes(8, "little") + _frame(_leaf())[12:],
    "a huge length": _NODE + b"\xff" * 8 + _frame(_leaf())[12:],
    "no body": _frame(b""),
    "not zstd": _frame(b"no zstd at all", compression=1),
    "empty zstd": _frame(b"", compression=1),
    "truncated zstd": _frame(_zstd(_leaf())[:-1], compression=1),
    "truncated zstd without a stated size": _frame(_zstd(_leaf(), stated=False)[:-1], compression=1),
    "a byte after zstd": _frame(_zstd(_leaf()) + b"x", compression=1),
    "many bytes after zstd": _frame(_zstd(_leaf()) + bytes(5000), compression=1),
}


@pytest.mark.parametrize("name", _FRAMES)
def test_hostile_frames_are_refused(name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="d/0123"):
        _decode_data(_FRAMES[name])


@pytest.mark.parametrize("stated", [True, False])
def test_nodes_that_decompress_to_a_huge_size_are_refused(stated: bool) -> None:
    """300 MiB of zeros, which zstd compresses to less than 60 kB."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=300 << 20 if stated else -1)
    body = b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(300)), compressor.flush()])
    assert len(body) < 60_000
    frame = _frame(body, compression=1)
    with (
        little_memory((4 if stated else 160) << 20),
        pytest.raises(CorruptCheckpointError, match="decompress(es)? to"),
    ):
        _decode_data(frame)


def test_nodes_with_too_many_entries_are_refused() -> None:
    """Half a million keys of 3 bytes with empty values: less than 10 kB with zstd, but 75 MB as objects."""
    count = 1 << 19
    keys = np.arange(count, dtype=">u4").view(np.uint8).reshape(-1, 4)[:, 1:]
    shared = (keys[1:] == keys[:-1]).cumprod(1).sum(1).astype(np.uint64)
    suffixes = b"".join([bytes(key[share:]) for key, share in zip(keys[1:], shared, strict=True)])
    body = b"".join(
        (
            encode_column(0, 0),
            encode_varint(count),
            encode_varints(shared),
            encode_varints(np.append(np.uint64(3), 3 - shared)),
            bytes(keys[0]) + suffixes,
            bytes(2 * count),
        )
    )
    frame = _frame(_zstd(body), compression=1)
    assert len(frame) < 10_000
    with little_memory(10 << 20), pytest.raises(CorruptCheckpointError, match="state 524288 entries"):
        _decode_data(frame)


def test_keys_that_expand_to_a_huge_size_are_refused() -> None:
    """300,000 keys of 60,003 bytes. Each key shares 60,000 bytes with the previous key."""
    count = 300_000
    ends = b"".join([number.to_bytes(3, "big") for number in range(count)])
    body = b"".join(
        (
            encode_column(0, 0),
            encode_varint(count),
            encode_varints(np.full(count - 1, 60_000, np.uint64)),
            encode_varint(60_003) + bytes([3]) * (count - 1),
            b"k" * 60_000 + ends,
        )
    )
    with little_memory(100 << 20), pytest.raises(CorruptCheckpointError, match="its keys have"):
        _decode(body, count=count)


def test_paths_that_expand_to_a_huge_size_are_refused() -> None:
    count = 100_000
    body = b"".join(
        (
            b"\0",
            encode_varint(count),
            encode_varints(np.full(count - 1, 60_000, np.uint64)),
            encode_varint(60_000) + bytes(count - 1),
            bytes(count),
            b"p" * 60_000,
        )
    )
    with little_memory(100 << 20), pytest.raises(CorruptCheckpointError, match="paths of files"):
        _decode(body, count=1)
