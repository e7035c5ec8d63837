"""Inline checksums for tests. They count calls, and can be slow or fail at a given call."""

from __future__ import annotations

import random
import threading
import time
import zlib


class Crc32:
    """CRC-32, encoded in little endian. Joined checksums equal the checksum of one pass.

    Attributes:
        summed: sizes in bytes of the pieces, in the order of calls.
        fail_at: the number of the piece that fails, counted from zero.
        jitter: the maximum random delay of a piece, in seconds.
    """

    name = "crc32"
    nbytes = 4
    is_enough = False

    def __init__(self, *, fail_at: int | None = None, jitter: float = 0.0) -> None:
        self.summed: list[int] = []
        self.fail_at = fail_at
        self.jitter = jitter
        self._lock = threading.Lock()

    def of(self, data: memoryview) -> int:
        assert data.format == "B" and data.ndim == 1
        with self._lock:
            number = len(self.summed)
            self.summed.append(len(data))
        if self.jitter:
            time.sleep(random.uniform(0, self.jitter))
        if number == self.fail_at:
            raise RuntimeError(f"sum {number} failed because the test said so")
        return zlib.crc32(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        zeros = bytes(second_bytes)
        return zlib.crc32(zeros, first) ^ zlib.crc32(zeros) ^ second

    def encode(self, value: int) -> bytes:
        return value.to_bytes(4, "little")


class Length:
    """The number of bytes and their sum, in 11 bytes. No real checksum has this unusual size."""

    name = "length"
    nbytes = 11
    is_enough = False

    def of(self, data: memoryview) -> int:
        return len(data) << 40 | sum(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        assert second >> 40 == second_bytes
        return first + second

    def encode(self, value: int) -> bytes:
        return value.to_bytes(11, "big")
