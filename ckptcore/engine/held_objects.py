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

__all__ = ["HeldObject", "VerifiedBlocks", "Window"]

_KEPT_BYTES: Final = 32 << 20
"""Verified bytes that are kept for who asks for more of them."""


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


class VerifiedBlocks:
    """The blocks of all held objects of a checkpoint that were verified last. Any thread."""

    def __init__(self, block_bytes: int) -> None:
        """None yet, of so many bytes each."""
        self.block_bytes = block_bytes
        self._most = max(2, _KEPT_BYTES // block_bytes)
        self._kept: OrderedDict[tuple[str, int], Window] = OrderedDict()
        self._lock = threading.Lock()

    def peek(self, key: str, position: int) -> Window | None:
        """The block that a byte of an object is in, if it is kept; does not count as a use."""
        return self._kept.get((key, position - position % self.block_bytes))

    def find(self, key: str, position: int) -> Window | None:
        """The block that a byte of an object is in, if it is kept."""
        found = self.peek(key, position)
        if found is not None:
            self.keep(key, found)
        return found

    def keep(self, key: str, block: Window) -> None:
        """Keep a block, in the place of the one that nobody has asked for longest."""
        with self._lock:
            self._kept[key, block.start] = block
            self._kept.move_to_end((key, block.start))
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)


class HeldObject:
    """An object of which parts are read, large and small, near each other and not. Any thread."""

    def __init__(
        self,
        key: str,
        reader: RangeReader,
        size: int,
        sums: RecordedChecksums | None,
        blocks: VerifiedBlocks,
        count: Callable[[int], None],
    ) -> None:
        """Read nothing yet.

        Args:
            key: the object, for errors.
            reader: it, open.
            size: its bytes, as they are known; may be hostile.
            sums: the checksums of its blocks; None: what is read is not verified.
            blocks: where those that are verified are kept.
            count: is told how many bytes were read, each time.
        """
        self._key = key
        self._reader = reader
        self._size = size
        self._sums = sums
        self._blocks = blocks
        self._count = count

    @property
    def is_verified(self) -> bool:
        """Whether what is read is compared with checksums, and read by whole blocks for it."""
        return self._sums is not None

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill memory from a byte on.

        Raises:
            ChecksumError
            CorruptCheckpointError: the object ends before.
        """
        stop = start + len(memory)
        if not 0 <= start <= stop <= self._size:
            raise CorruptCheckpointError(
                f"{self._key!r} does not hold what the checkpoint says: expected bytes {start} to {stop}, found {self._size} bytes; "
                "it was cut off, or what describes it is damaged: restore it from a copy, or load another checkpoint",
                key=self._key, start=start, stop=stop,
            )  # fmt: skip
        sums = self._sums
        if sums is None or start == stop:
            self._fill(start, memory)
            return
        # Blocks at the ends are kept, because who reads a part of one asks for the rest next; those between are the caller's alone.
        first = self._block(start, sums)
        position = min(stop, first.stop)
        memory[: position - start] = first.memory[start - first.start : position - first.start]
        if position == stop:
            return
        last = self._block(stop - 1, sums)
        if position < last.start:
            between = memory[position - start : last.start - start]
            self._fill(position, between)
            sums.verify(position, between)
        memory[last.start - start :] = last.memory[: stop - last.start]

    def peek(self, position: int) -> Window | None:
        """The verified block that a byte is in, if it is in memory."""
        return self._blocks.peek(self._key, position)

    def _block(self, position: int, sums: RecordedChecksums) -> Window:
        """The verified block that a byte is in."""
        kept = self._blocks.find(self._key, position)
        if kept is not None:
            return kept
        start = position - position % self._blocks.block_bytes
        stop = min(start + self._blocks.block_bytes, self._size)
        memory = memoryview(np.empty(stop - start, np.uint8))  # type: ignore[arg-type]  # NumPy's stubs know it from Python 3.12 on
        self._fill(start, memory)
        sums.verify(start, memory)
        block = Window(start, stop, memory)
        self._blocks.keep(self._key, block)
        return block

    def _fill(self, start: int, memory: memoryview) -> None:
        self._reader.get_into([(start, memory)])
        self._count(len(memory))
