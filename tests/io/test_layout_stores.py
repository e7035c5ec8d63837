"""The stores of `ckptcore_testing` write and verify checksums like the engine, with their own code."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.layout_stores import DirectoryReadStore, DirectoryWriteStore
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import ChecksumError, CorruptCheckpointError
from ckptcore.model import Box, BytesSegment, Checksum, ChecksumSegment, ChunkRead, Segment
from tests.io.checksum_fakes import Crc32, Length
from tests.io.objects import stored, summed


@given(st.data())
def test_written_objects_contain_the_checksums_of_the_preceding_segments(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    checksum: Checksum = Crc32() if data.draw(st.booleans()) else Length()
    sources, plain, _, _ = data.draw(stored())
    segments, _, _, expected = data.draw(summed(checksum, sources, plain))
    directory = tmp_path_factory.mktemp("objects")
    DirectoryWriteStore(directory).write("x", segments)
    assert (directory / "x").read_bytes() == expected


@pytest.mark.parametrize(
    "segments",
    [
        [ChecksumSegment(Crc32())],
        [BytesSegment(b"a"), ChecksumSegment(Crc32(), 0)],
        [BytesSegment(b"a"), ChecksumSegment(Crc32(), 2)],
        [BytesSegment(b"a"), ChecksumSegment(Crc32()), ChecksumSegment(Crc32())],
    ],
)
def test_a_checksum_of_invalid_segments_is_refused(tmp_path: Path, segments: list[Segment]) -> None:
    with pytest.raises(AssertionError, match="a checksum of x is of"):
        DirectoryWriteStore(tmp_path).write("x", segments)


def read(offset: int, nbytes: int) -> ChunkRead:
    box = Box((0,), (nbytes,))
    return ChunkRead("x", offset, box, 1, ((0, Box((1,), (2,)), np.zeros(1, np.uint8)),), Crc32())


@pytest.mark.parametrize("with_digests", [True, False])
def test_tiles_are_verified_by_their_checksums(tmp_path: Path, with_digests: bool) -> None:
    DirectoryWriteStore(tmp_path).write("x", [BytesSegment(b"head"), BytesSegment(bytes(20)), ChecksumSegment(Crc32())])
    data = (tmp_path / "x").read_bytes()

    def store() -> DirectoryReadStore:
        content = (tmp_path / "x").read_bytes()
        return DirectoryReadStore(tmp_path, {"x": hashlib.sha256(content).digest()} if with_digests else None)

    assert list(store().read_chunks([read(4, 20)])) == [0]
    with pytest.raises(ChecksumError) as caught:  # the tile has fewer bytes than its checksum covers
        list(store().read_chunks([read(5, 19)]))
    assert (caught.value.start, caught.value.stop) == (5, 28)
    with pytest.raises(CorruptCheckpointError, match="expected crc32 in bytes 25 to 29"):
        list(store().read_chunks([read(4, 21)]))
    for place in (4, 23, 24, 27):
        damaged = bytearray(data)
        damaged[place] ^= 1
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(ChecksumError):
            list(store().read_chunks([read(4, 20)]))
