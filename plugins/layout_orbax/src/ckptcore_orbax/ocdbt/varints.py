"""Varints: unsigned LEB128 numbers of at most 64 bits, a column at a time."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["decode_varints", "encode_varint", "encode_varints"]

_MOST_BYTES: Final = 10
"""Of one number of 64 bits: nine groups of 7 bits, and one bit."""

_FEW: Final = 16
"""Numbers in a column below which a loop takes less time than NumPy."""


def decode_varints(data: npt.NDArray[np.uint8], position: int, count: int) -> tuple[npt.NDArray[np.uint64], int]:
    """Numbers that follow each other, and the position behind them. Numbers may be longer than they need be.

    Takes memory by the bytes that are there, whatever the count.

    Raises:
        ValueError: the bytes end before, or a number has more than 64 bits.
    """
    if count > len(data) - position:
        raise ValueError(f"{count} numbers cannot stand in {len(data) - position} bytes")
    if count <= _FEW:
        return _decode_few(data, position, count)
    window = data[position : position + count]
    if window.max() < 0x80:
        return window.astype(np.uint64), position + count
    # The ends of the numbers, first looked for where short ones would end.
    for width in (2, 4, _MOST_BYTES):
        window = data[position : position + width * count]
        ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) == count:
            break
    else:
        raise ValueError(f"the bytes end, or a number has more than {_MOST_BYTES} bytes, within {count} numbers")
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    sizes = ends - starts + 1
    longest = int(sizes.max())
    if longest > _MOST_BYTES:
        raise ValueError(f"a number has {longest} bytes, where at most {_MOST_BYTES} are expected")
    numbers = (window[starts] & 0x7F).astype(np.uint64)
    for place in range(1, longest):
        longer = np.flatnonzero(sizes > place)
        groups = (window[starts[longer] + place] & 0x7F).astype(np.uint64)
        if place == _MOST_BYTES - 1 and groups.max() > 1:
            raise ValueError("a number has more than 64 bits")
        numbers[longer] |= groups << np.uint64(7 * place)
    return numbers, position + int(ends[-1]) + 1


def _decode_few(data: npt.NDArray[np.uint8], position: int, count: int) -> tuple[npt.NDArray[np.uint64], int]:
    text = data[position : position + _MOST_BYTES * count].tobytes()
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
            if shift == 7 * _MOST_BYTES:
                raise ValueError(f"a number has more than {_MOST_BYTES} bytes")
        if number >> 64:
            raise ValueError("a number has more than 64 bits")
        numbers.append(number)
    return np.array(numbers, np.uint64), position + at


def encode_varint(number: int) -> bytes:
    """The bytes of one number, of 64 bits at most."""
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def encode_varints(numbers: npt.NDArray[np.uint64]) -> bytes:
    """The bytes of numbers, one behind the other, each as short as can be."""
    if not len(numbers):
        return b""
    largest = int(numbers.max())
    if largest < 0x80:
        return numbers.astype(np.uint8).tobytes()
    longest = -(-largest.bit_length() // 7)
    sizes = np.ones(len(numbers), np.int64)
    for place in range(1, longest):
        sizes += numbers >> np.uint64(7 * place) > 0
    starts = np.cumsum(sizes) - sizes
    encoded = np.zeros(int(sizes.sum()), np.uint8)
    for place in range(longest):
        longer = np.flatnonzero(sizes > place)
        groups = (numbers[longer] >> np.uint64(7 * place) & np.uint64(0x7F)).astype(np.uint8)
        groups[sizes[longer] > place + 1] |= 0x80
        encoded[starts[longer] + place] = groups
    return encoded.tobytes()
