"""Held objects: open for as long as somebody reads parts of them, with the blocks that were verified last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptcore.engine.checksums import RecordedChecksums
from ckptcore.errors import CorruptCheckpointError
from ckptcore.protocols import RangeReader

__all__ = ["HeldObject", "Window"]

_KEPT_BYTES: Final = 16 << 20
"""Verified bytes of an object that are kept for who asks for more of them."""


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes of an object in memory, that nobody changes.

    Attributes:
        start, stop: which ones.
        memory: they themselves.
    """

    start: int
    stop: int
    memory: memoryview


class HeldObject:
    """An object of which parts are read, large and small, near each other and not. Any thread."""

    def __init__(
        self,
        key: str,
        reader: RangeReader,
        size: int,
        sums: RecordedChecksums | None,
        block_bytes: int,
        count: Callable[[int], None],
    ) -> None:
        """Read nothing yet.

        Args:
            key: the object, for errors.
            reader: it, open.
            size: its bytes, as they are known; may be hostile.
            sums: the checksums of its blocks; None: what is read is not verified.
            block_bytes: of a block.
            count: is told how many bytes were read, each time.
        """
        self._key = key
        self._reader = reader
        self._size = size
        self._sums = sums
        self._block_bytes = block_bytes
        self._count = count
        self._kept: OrderedDict[int, Window] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    @property
    def is_verified(self) -> bool:
        """Whether what is read is compared with checksums, and read by whole blocks for it."""
        return self._sums is not None

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill memory from a byte on, without verifying it.

        Raises:
            CorruptCheckpointError: the object ends before.
        """
        self._check(start, start + len(memory))
        self._fill(start, memory)

    def window(self, start: int, stop: int) -> Window:
        """Bytes `start` to `stop`, with what else of their blocks was read to verify them.

        Raises:
            ChecksumError
            CorruptCheckpointError: the object ends before.
        """
        self._check(start, stop)
        if self._sums is None:
            return self._read(start, stop)
        block = self._block_bytes
        begin, end = start // block * block, min(-(-stop // block) * block, self._size)
        head = foot = None
        with self._lock:
            for first in reversed(self._kept):
                kept = self._kept[first]
                if kept.start <= start and stop <= kept.stop:
                    self._kept.move_to_end(first)
                    return kept
                if kept.start <= begin < kept.stop:
                    head = kept
                elif kept.start < end <= kept.stop:
                    foot = kept
        window = self._extended(begin, end, head, foot, self._sums)
        with self._lock:
            replaced = self._kept.pop(window.start, None)
            self._kept_bytes += len(window.memory) - (0 if replaced is None else len(replaced.memory))
            self._kept[window.start] = window
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1].memory)
        return window

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._size:
            raise CorruptCheckpointError(
                f"{self._key!r} does not hold what the checkpoint says: expected bytes {start} to {stop}, found {self._size} bytes; "
                "it was cut off, or what describes it is damaged: restore it from a copy, or load another checkpoint",
                key=self._key, start=start, stop=stop,
            )  # fmt: skip

    def _extended(
        self, begin: int, end: int, head: Window | None, foot: Window | None, sums: RecordedChecksums
    ) -> Window:
        """Whole blocks, verified, of which those at the ends may be in memory: who walks through an array comes from one to the next."""
        low = begin if head is None else head.stop
        high = end if foot is None else foot.start
        if low == begin and high == end:
            window = self._read(begin, end)
            sums.verify(begin, window.memory)
            return window
        memory = _memory(end - begin)
        if head is not None:
            memory[: low - begin] = head.memory[begin - head.start :]
        if foot is not None:
            memory[high - begin :] = foot.memory[: end - high]
        if low < high:
            between = memory[low - begin : high - begin]
            self._fill(low, between)
            sums.verify(low, between)
        return Window(begin, end, memory)

    def _read(self, start: int, stop: int) -> Window:
        memory = _memory(stop - start)
        self._fill(start, memory)
        return Window(start, stop, memory)

    def _fill(self, start: int, memory: memoryview) -> None:
        self._reader.get_into([(start, memory)])
        self._count(len(memory))


def _memory(nbytes: int) -> memoryview:
    return memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]  # NumPy's stubs know it from Python 3.12 on
