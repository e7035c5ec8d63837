"""Varints: unsigned LEB128 numbers of at most 64 bits. Encodes and decodes columns."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_MAX_BYTES: Final = 10
"""Maximum length of a 64-bit number in bytes: nine groups of 7 bits, and one bit."""

_FEW: Final = 16
"""Up to this number of values, a loop is faster than NumPy."""


def decode_varints(data: npt.NDArray[np.uint8], position: int, count: int) -> tuple[npt.NDArray[np.uint64], int]:
    """Return `count` consecutive numbers, and the position after them.

    Accepts encodings with more bytes than necessary. Memory use depends on the available bytes, not
    on `count`.

    Raises:
        ValueError: the data ends too early, or a number has more than 64 bits.
    """
    if count > len(data) - position:
        raise ValueError(f"{count} numbers do not fit in {len(data) - position} bytes")
    if count <= _FEW:
        return _decode_few(data, position, count)
    window = data[position : position + count]
    if window.max() < 0x80:
        return window.astype(np.uint64), position + count
    # Find the ends of the numbers; assume short numbers first.
    for width in (2, 4, _MAX_BYTES):
        window = data[position : position + width * count]
        ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) == count:
            break
    else:
        raise ValueError(f"the bytes end, or a number has more than {_MAX_BYTES} bytes, within {count} numbers")
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    sizes = ends - starts + 1
    longest = int(sizes.max())
    if longest > _MAX_BYTES:
        raise ValueError(f"a number has {longest} bytes; at most {_MAX_BYTES} are expected")
    numbers = (window[starts] & 0x7F).astype(np.uint64)
    for digit in range(1, longest):
        longer = np.flatnonzero(sizes > digit)
        groups = (window[starts[longer] + digit] & 0x7F).astype(np.uint64)
        if digit == _MAX_BYTES - 1 and groups.max() > 1:
            raise ValueError("a number has more than 64 bits")
        numbers[longer] |= groups << np.uint64(7 * digit)
    return numbers, position + int(ends[-1]) + 1


def _decode_few(data: npt.NDArray[np.uint8], position: int, count: int) -> tuple[npt.NDArray[np.uint64], int]:
    text = data[position : position + _MAX_BYTES * count].tobytes()
    numbers = []
    at = 0
    for _ in range(count):
        number = shift = 0
        while True:
            if at == len(text):
                raise ValueError(f"the bytes end within {count} numbers")
            byte = text[at]
            at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift == 7 * _MAX_BYTES:
                raise ValueError(f"a number has more than {_MAX_BYTES} bytes")
        if number >> 64:
            raise ValueError("a number has more than 64 bits")
        numbers.append(number)
    return np.array(numbers, np.uint64), position + at


def encode_varint(number: int) -> bytes:
    """Return the encoding of a number of at most 64 bits."""
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def encode_varints(numbers: npt.NDArray[np.uint64]) -> bytes:
    """Return the concatenated shortest encodings of numbers."""
    if not len(numbers):
        return b""
    largest = int(numbers.max())
    if largest < 0x80:
        return numbers.astype(np.uint8).tobytes()
    longest = -(-largest.bit_length() // 7)
    sizes = np.ones(len(numbers), np.int64)
    for digit in range(1, longest):
        sizes += numbers >> np.uint64(7 * digit) > 0
    starts = np.cumsum(sizes) - sizes
    encoded = np.zeros(int(sizes.sum()), np.uint8)
    for digit in range(longest):
        longer = np.flatnonzero(sizes > digit)
        groups = (numbers[longer] >> np.uint64(7 * digit) & np.uint64(0x7F)).astype(np.uint8)
        groups[sizes[longer] > digit + 1] |= 0x80
        encoded[starts[longer] + digit] = groups
    return encoded.tobytes()
