"""Encoding and decoding of varints, compared with the definition of LEB128."""

from __future__ import annotations

import numpy as np
import pytest
from ckptcore_orbax.ocdbt.cursor import decode_varints, encode_varint, encode_varints
from hypothesis import given
from hypothesis import strategies as st

_NUMBERS = st.one_of(
    st.integers(0, 127), st.integers(0, 2**14 + 1), st.integers(0, 2**64 - 1), st.sampled_from([2**63, 2**64 - 1])
)


def _encode(number: int, nbytes: int = 0) -> bytes:
    groups = [number >> 7 * place & 0x7F for place in range(max(nbytes, -(-number.bit_length() // 7), 1))]
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])


def _array(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


def test_encodings_of_known_numbers() -> None:
    assert encode_varint(300) == b"\xac\x02"
    assert encode_varints(np.array([0, 127, 128, 2**64 - 1], np.uint64)) == b"\x00\x7f\x80\x01" + b"\xff" * 9 + b"\x01"
    assert encode_varints(np.array([], np.uint64)) == b""


# The sizes include lists that are short enough for the loop, and longer lists.
@given(st.lists(_NUMBERS, max_size=60), st.binary(max_size=5), st.binary(max_size=30))
def test_encoded_numbers_are_decoded(numbers: list[int], before: bytes, after: bytes) -> None:
    encoded = b"".join(map(_encode, numbers))
    assert encode_varints(np.array(numbers, np.uint64)) == encoded == b"".join(map(encode_varint, numbers))
    decoded, position = decode_varints(_array(before + encoded + after), len(before), len(numbers))
    assert decoded.tolist() == numbers
    assert position == len(before) + len(encoded)


@given(st.lists(st.tuples(_NUMBERS, st.integers(1, 10)), min_size=1, max_size=60))
def test_encodings_longer_than_necessary_are_decoded(numbers: list[tuple[int, int]]) -> None:
    encoded = b"".join(_encode(number, nbytes) for number, nbytes in numbers)
    assert decode_varints(_array(encoded), 0, len(numbers))[0].tolist() == [number for number, _ in numbers]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
@pytest.mark.parametrize(
    ("last", "message"),
    [
        (b"\x80", "end|more than 10 bytes"),
        (b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\xff" * 10 + b"\x01", "bytes"),
        (b"\x80" * 30 + b"\x01", "bytes"),
        (b"", "do not fit|end"),
    ],
)
def test_invalid_encodings_of_64_bit_numbers_are_refused(count: int, last: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_varints(_array(b"\x85\x01" * (count - 1) + last), 0, count)


@pytest.mark.parametrize("count", [2**31, 2**62, 2**64 - 1])
def test_a_huge_count_is_refused_before_memory_is_allocated(count: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        decode_varints(_array(bytes(100)), 0, count)
