"""Checksums of blocks, whose data is added in any order."""

from __future__ import annotations

import itertools
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import ChecksumError, CorruptCheckpointError
from ckptcore.io.checksums import BlockChecksums, RecordedChecksums
from ckptcore.model import ObjectRecord


def expected(data: bytes, block: int) -> bytes:
    sums = [xxhash.xxh3_64_intdigest(data[start : start + block]) for start in range(0, len(data), block)]
    return struct.pack(f"<{len(sums)}Q", *sums)


@given(st.binary(max_size=300), st.integers(1, 40), st.data())
def test_the_order_of_blocks_does_not_matter(data: bytes, block: int, draw: st.DataObject) -> None:
    blocks = st.integers(0, len(data) // block).map(lambda number: number * block)
    cuts = sorted({0, len(data), *draw.draw(st.lists(blocks, max_size=8))})
    pieces = draw.draw(st.permutations([(a, data[a:b]) for a, b in itertools.pairwise(cuts)]))
    sums = BlockChecksums(len(data), block_bytes=block)
    for offset, piece in pieces:
        sums.add(offset, draw.draw(st.sampled_from([bytes, bytearray, memoryview]))(piece))
    assert sums.encode() == expected(data, block)


def test_missing_blocks_and_invalid_ranges_are_refused() -> None:
    sums = BlockChecksums(100, block_bytes=30)
    sums.add(0, bytes(30))
    with pytest.raises(ValueError, match="3 of 4 blocks are incomplete, the first is 1"):
        sums.encode()
    for offset, nbytes in [(-1, 5), (90, 11), (101, 0)]:
        with pytest.raises(ValueError, match="are not in an object of 100 bytes"):
            sums.add(offset, bytes(nbytes))
    for offset, nbytes in [(30, 15), (45, 15), (30, 69)]:
        with pytest.raises(ValueError, match="are not whole blocks of 30 bytes"):
            sums.add(offset, bytes(nbytes))


def test_a_block_has_one_mebibyte() -> None:
    data = bytes(1 << 20) + b"x"
    sums = BlockChecksums(len(data))
    sums.add(0, data)
    assert sums.encode() == expected(data, 1 << 20)
    assert len(sums.encode()) == 16


def test_the_error_names_the_damaged_block() -> None:
    data = bytes(range(100))
    record = ObjectRecord("a/b", 100, expected(data, 30))
    sums = RecordedChecksums(record, block_bytes=30)
    sums.verify(0, memoryview(data))
    sums.verify(30, memoryview(data)[30:90])
    sums.verify(90, memoryview(data)[90:])
    damaged = bytearray(data)
    damaged[95] ^= 4
    sums.verify(0, memoryview(damaged)[:90])
    with pytest.raises(ChecksumError) as caught:
        sums.verify(30, memoryview(damaged)[30:])
    want, actual = (f"xxh3_64:{xxhash.xxh3_64_hexdigest(bytes(each[90:]))}" for each in (data, damaged))
    assert f"'a/b' is damaged in bytes 90 to 100: expected {want}, found {actual}" in str(caught.value)
    assert (caught.value.key, caught.value.start, caught.value.stop) == ("a/b", 90, 100)


@given(st.binary(min_size=1, max_size=300), st.integers(1, 40), st.data())
def test_a_block_may_be_verified_in_several_pieces(data: bytes, block: int, draw: st.DataObject) -> None:
    sums = RecordedChecksums(ObjectRecord("a", len(data), expected(data, block)), block_bytes=block)
    start = draw.draw(st.integers(0, (len(data) - 1) // block)) * block
    last = draw.draw(st.integers(start // block, (len(data) - 1) // block))
    stop = min((last + 1) * block, len(data))
    cuts = sorted({start, stop, *draw.draw(st.lists(st.integers(start, stop), max_size=8))})
    damaged = bytearray(data)
    sums.verify_pieces(start, [memoryview(damaged)[a:b] for a, b in itertools.pairwise(cuts)])
    place = draw.draw(st.integers(start, stop - 1))
    damaged[place] ^= 1
    with pytest.raises(ChecksumError) as caught:
        sums.verify_pieces(start, [memoryview(damaged)[a:b] for a, b in itertools.pairwise(cuts)])
    assert (caught.value.start, caught.value.stop) == (
        place // block * block,
        min(place // block * block + block, len(data)),
    )


def test_a_wrong_number_of_checksums_is_damage() -> None:
    for checksums in (b"", bytes(24), bytes(40), bytes(31)):
        with pytest.raises(CorruptCheckpointError, match="expected 32 bytes for an object of 100 bytes"):
            RecordedChecksums(ObjectRecord("a", 100, checksums), block_bytes=30)
