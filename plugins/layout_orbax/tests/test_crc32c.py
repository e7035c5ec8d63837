"""CRC32C: published values, and checksums of joined pieces."""

from __future__ import annotations

import copy
import pickle

import numpy as np
from ckptcore_orbax.crc32c import CRC32C, crc32c_of
from hypothesis import given
from hypothesis import strategies as st


def test_published_values() -> None:
    # RFC 3720, appendix B.4, and the check value of the catalogue of parametrised CRC algorithms.
    assert crc32c_of(b"123456789") == 0xE3069283
    assert crc32c_of(bytes(32)) == 0x8A9136AA
    assert crc32c_of(b"\xff" * 32) == 0x62A8AB43
    assert crc32c_of(bytes(range(32))) == 0x46DD794E
    assert crc32c_of(b"") == 0


def test_name_length_and_encoding() -> None:
    assert (CRC32C.name, CRC32C.nbytes) == ("crc32c", 4)
    assert CRC32C.encode(0xE3069283) == bytes.fromhex("839206e3")
    assert len(CRC32C.encode(0)) == CRC32C.nbytes


def test_copies_and_pickles_return_the_same_object() -> None:
    assert pickle.loads(pickle.dumps(CRC32C)) is CRC32C
    assert copy.deepcopy(CRC32C) is CRC32C


def test_checksums_of_any_contiguous_memory() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    expected = crc32c_of(array.tobytes())
    for view in (array.data, array.data.cast("B"), memoryview(bytearray(array.tobytes()))):
        assert CRC32C.of(view) == expected


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_joining_pieces_gives_the_checksum_of_the_whole(pieces: list[bytes]) -> None:
    joined = 0
    for piece in pieces:
        joined = CRC32C.join(joined, CRC32C.of(memoryview(piece)), len(piece))
    assert joined == crc32c_of(b"".join(pieces))


def test_joining_long_pieces() -> None:
    data = np.random.default_rng(1).integers(0, 256, (1 << 20) + 7, np.uint8).tobytes()
    whole = crc32c_of(data)
    for cut in (0, 1, 4096, 1 << 19, (1 << 20) + 6, len(data)):
        first, second = data[:cut], data[cut:]
        assert CRC32C.join(crc32c_of(first), crc32c_of(second), len(second)) == whole


def test_joining_is_associative_for_lengths_beyond_memory() -> None:
    first, second, third = (crc32c_of(data) for data in (b"a", b"bc", b"def"))
    for second_bytes, third_bytes in ((1 << 40, 3), (5, 1 << 50), ((1 << 33) + 1, (1 << 41) + 7)):
        left = CRC32C.join(CRC32C.join(first, second, second_bytes), third, third_bytes)
        right = CRC32C.join(first, CRC32C.join(second, third, third_bytes), second_bytes + third_bytes)
        assert left == right
