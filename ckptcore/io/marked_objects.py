"""Marked objects: held ones of which it is noted what was verified, so that this is read again without that, unless it changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Final

import numpy as np

from ckptcore.io.checksums import RecordedChecksums
from ckptcore.io.errands import run_each
from ckptcore.io.held_objects import NearObject
from ckptcore.io.threads import IOThreads
from ckptcore.protocols import HeldReader

__all__ = ["LastBlock", "MarkedObject"]

_FEW_BLOCKS: Final = 8
"""Fewer are read by the calling thread alone."""


_spares: Final = threading.local()
"""The memory in which each thread verifies a block, given back when the thread ends."""


class LastBlock:
    """The block that was verified last of an object that may change unseen; its memory is used for the next one. For who holds the lock.

    Attributes:
        lock: of this.
        key: the object; None while there is no block.
        start: its first byte.
    """

    def __init__(self, block_bytes: int) -> None:
        """None yet, of so many bytes at most."""
        self.lock = threading.Lock()
        self.key: str | None = None
        self.start = 0
        self.block_bytes = block_bytes
        self._memory: memoryview | None = None

    def memory(self) -> memoryview:
        """Memory for a block; taken when it is first needed."""
        if self._memory is None:
            self._memory = _memory(self.block_bytes)
        return self._memory


class MarkedObject(NearObject):
    """One that is near, of which a block is verified when something of it is read first, and again where the object was changed since.

    What was verified is read as it would be without checksums. That a disk gives other bytes for a page that it gave before, without
    anybody having written to the object, is not noticed by that.
    """

    is_verified = True

    def __init__(
        self,
        key: str,
        reader: HeldReader,
        size: int,
        count: Callable[[int], None],
        sums: RecordedChecksums,
        last: LastBlock,
    ) -> None:
        """Read nothing yet.

        Args:
            key, size, count: as of a `HeldObject`.
            reader: it, open.
            sums: the checksums of its blocks.
            last: memory to verify blocks in.
        """
        super().__init__(key, reader, size, count)
        self._sums = sums
        self._last = last
        self._block_bytes = last.block_bytes
        # The stamp of the object, and a byte for each block that is 1 where it was verified with that. Replaced together.
        self._marked: tuple[Hashable | None, bytearray] = (None, self._no_marks())

    def _no_marks(self) -> bytearray:
        return bytearray(-(-self._size // self._block_bytes))

    def _marks_of(self, stamp: Hashable) -> bytearray:
        """What was verified with a stamp; none if that is another one than before."""
        known, marks = self._marked
        if known != stamp:
            marks = self._no_marks()
            self._marked = (stamp, marks)
        return marks

    def is_at_hand(self, start: int, stop: int) -> bool:
        """See `HeldObject.is_at_hand`."""
        if not 0 <= start < stop <= self._size:
            return False
        stamp, marks = self._marked
        first, last = start // self._block_bytes, (stop - 1) // self._block_bytes
        if not marks[first] or (first != last and marks.find(0, first, last + 1) >= 0):
            return False
        return self._near.stamp() == stamp

    def bring(self, start: int, stop: int, threads: IOThreads) -> bool:
        """See `HeldObject.bring`."""
        self._expect(start, stop)
        stamp = self._near.stamp()
        if self.memory() is None or stamp is None:
            return False  # what is verified now would have to be verified again
        marks = self._marks_of(stamp)
        block = self._block_bytes
        missing = [number for number in range(start // block, -(-stop // block)) if not marks[number]]
        if len(missing) < _FEW_BLOCKS:
            for number in missing:
                self._verify_block(number)
        else:
            run_each(threads, missing, self._verify_block)
        return self.is_at_hand(start, stop)

    def _verify_block(self, number: int) -> None:
        begin = number * self._block_bytes
        self._verify(begin, _spare(min(self._block_bytes, self._size - begin)), self._near.stamp())

    def read_into(self, start: int, memory: memoryview) -> None:
        """See `HeldObject.read_into`."""
        stop = start + len(memory)
        self._expect(start, stop)
        if start == stop:
            return
        stamp, marks = self._marked
        if marks.find(0, start // self._block_bytes, (stop - 1) // self._block_bytes + 1) < 0:
            self._fill(start, memory)
            if self._near.stamp() == stamp:
                return
        self._read_verified(start, stop, memory)

    def _read_verified(self, start: int, stop: int, memory: memoryview) -> None:
        """Fill memory with bytes that are verified now; whole blocks straight into it."""
        position = start
        while position < stop:
            begin = position - position % self._block_bytes
            end = min(begin + self._block_bytes, self._size)
            if position == begin and end <= stop:
                end = stop if stop == self._size else stop - stop % self._block_bytes
                self._verify(begin, memory[position - start : end - start], self._near.stamp())
            else:
                end = min(end, stop)
                self._read_part(begin, position, memory[position - start : end - start])
            position = end

    def _read_part(self, begin: int, position: int, memory: memoryview) -> None:
        """Fill memory with a part of the block that begins at a byte."""
        nbytes, within = min(self._block_bytes, self._size - begin), position - begin
        last, stamp = self._last, self._near.stamp()
        if stamp is not None or not last.lock.acquire(blocking=False):  # threads do not wait for each other
            block = _spare(nbytes)
            self._verify(begin, block, stamp)
            memory[:] = block[within : within + len(memory)]
            return
        # Nothing can be noted of it: who reads the rest of the block next finds it in memory.
        try:
            if last.key != self._key or last.start != begin:
                last.key = None
                self._verify(begin, last.memory()[:nbytes], None)
                last.key, last.start = self._key, begin
            memory[:] = last.memory()[within : within + len(memory)]
        finally:
            last.lock.release()

    def _verify(self, start: int, memory: memoryview, stamp: Hashable | None) -> None:
        """Fill memory with whole blocks, verify them, and note it for the stamp that the object had before."""
        self._fill(start, memory)
        self._sums.verify(start, memory)
        if stamp is None:
            return  # who changed it now would not be noticed
        marks = self._marks_of(stamp)
        first = start // self._block_bytes
        count = -(-len(memory) // self._block_bytes)
        marks[first : first + count] = b"\x01" * count


def _spare(nbytes: int) -> memoryview:
    """Memory of this thread, to be used until it asks for it again. To take a MiB from the system and touch it takes longer than to verify one."""
    memory: memoryview | None = getattr(_spares, "memory", None)
    if memory is None or len(memory) < nbytes:
        memory = _spares.memory = _memory(nbytes)
    return memory[:nbytes]


def _memory(nbytes: int) -> memoryview:
    return memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]  # NumPy's stubs know it from Python 3.12 on
