"""Held objects: open for as long as somebody reads parts of them, with the blocks that were verified last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.checksums import RecordedChecksums
from ckptcore.io.threads import IOThreads
from ckptcore.protocols import HeldReader, RangeReader

__all__ = ["HeldObject", "KeptObject", "NearObject", "VerifiedBlocks", "Window"]

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

    def find(self, key: str, position: int) -> Window | None:
        """The block that a byte of an object is in, if it is kept."""
        found = self._kept.get((key, position - position % self.block_bytes))
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
    """An object of which parts are read, large and small, near each other and not; nothing is verified. Any thread.

    Attributes:
        is_verified: whether what is read is compared with checksums, and read by whole blocks for it.
    """

    is_verified: ClassVar[bool] = False

    def __init__(self, key: str, reader: RangeReader, size: int, count: Callable[[int], None]) -> None:
        """Read nothing yet.

        Args:
            key: the object, for errors.
            reader: it, open.
            size: its bytes, as they are known; may be hostile.
            count: is told how many bytes were read, each time.
        """
        self._key = key
        self._reader = reader
        self._size = size
        self._count = count

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill memory from a byte on.

        Raises:
            ChecksumError
            CorruptCheckpointError: the object ends before.
        """
        self._expect(start, start + len(memory))
        self._fill(start, memory)

    def memory(self) -> memoryview | None:
        """All of it as memory, of which only what `is_at_hand` may be touched; None where it is no memory."""
        return None

    def is_at_hand(self, start: int, stop: int) -> bool:
        """Whether bytes of `memory` are there now, and verified where this verifies. Never raises for what is damaged."""
        return False

    def bring(self, start: int, stop: int, threads: IOThreads) -> bool:
        """Read and verify what it takes for bytes to be at hand; False where they cannot be.

        Args:
            start, stop: which bytes.
            threads: what reads, where it is much, together with the calling thread.

        Raises:
            ChecksumError
            CorruptCheckpointError: the object ends before.
        """
        return False

    def _fill(self, start: int, memory: memoryview) -> None:
        self._reader.get_into(((start, memory),))
        self._count(len(memory))

    def _expect(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._size:
            raise CorruptCheckpointError(
                f"{self._key!r} does not hold what the checkpoint says: expected bytes {start} to {stop}, found {self._size} bytes; "
                "it was cut off, or what describes it is damaged: restore it from a copy, or load another checkpoint",
                key=self._key, start=start, stop=stop,
            )  # fmt: skip


class NearObject(HeldObject):
    """One that is near, so that it may be memory."""

    def __init__(self, key: str, reader: HeldReader, size: int, count: Callable[[int], None]) -> None:
        """See `HeldObject`."""
        super().__init__(key, reader, size, count)
        self._near = reader
        self._memory: memoryview | None = None
        self._is_mapped = False
        self._was_read = False

    def memory(self) -> memoryview | None:
        """See `HeldObject.memory`. Mapped when it is asked for first."""
        if not self._is_mapped:
            self._memory = self._near.memory()
            self._is_mapped = True
        return self._memory

    def is_at_hand(self, start: int, stop: int) -> bool:
        """See `HeldObject.is_at_hand`."""
        return self._was_read and 0 <= start <= stop <= self._size and stop <= self._near.size()

    def bring(self, start: int, stop: int, threads: IOThreads) -> bool:
        """See `HeldObject.bring`. There is nothing to do."""
        self._expect(start, stop)
        self._was_read = True
        return self.memory() is not None and self.is_at_hand(start, stop)

    def read_into(self, start: int, memory: memoryview) -> None:
        """See `HeldObject.read_into`."""
        super().read_into(start, memory)
        self._was_read = True


class KeptObject(HeldObject):
    """One whose verified blocks are kept in memory, because to read them again would cost as much."""

    is_verified = True

    def __init__(
        self,
        key: str,
        reader: RangeReader,
        size: int,
        count: Callable[[int], None],
        sums: RecordedChecksums,
        blocks: VerifiedBlocks,
    ) -> None:
        """Read nothing yet.

        Args:
            key, reader, size, count: as of a `HeldObject`.
            sums: the checksums of its blocks.
            blocks: where those that are verified are kept.
        """
        super().__init__(key, reader, size, count)
        self._sums = sums
        self._blocks = blocks

    def read_into(self, start: int, memory: memoryview) -> None:
        """See `HeldObject.read_into`."""
        stop = start + len(memory)
        self._expect(start, stop)
        if start == stop:
            return
        # Blocks at the ends are kept, because who reads a part of one asks for the rest next; those between are the caller's alone.
        first = self._block(start)
        position = min(stop, first.stop)
        memory[: position - start] = first.memory[start - first.start : position - first.start]
        if position == stop:
            return
        last = self._block(stop - 1)
        if position < last.start:
            between = memory[position - start : last.start - start]
            self._fill(position, between)
            self._sums.verify(position, between)
        memory[last.start - start :] = last.memory[: stop - last.start]

    def _block(self, position: int) -> Window:
        """The verified block that a byte is in."""
        kept = self._blocks.find(self._key, position)
        if kept is not None:
            return kept
        start = position - position % self._blocks.block_bytes
        stop = min(start + self._blocks.block_bytes, self._size)
        memory = memoryview(np.empty(stop - start, np.uint8))  # type: ignore[arg-type]  # NumPy's stubs know it from Python 3.12 on
        self._fill(start, memory)
        self._sums.verify(start, memory)
        block = Window(start, stop, memory)
        self._blocks.keep(self._key, block)
        return block
