"""Open objects that remember which blocks were verified."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, Final, cast

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.checksums import RecordedChecksums
from ckptcore.io.sources import is_held_reader
from ckptcore.io.threads import IOThreads, run_each
from ckptcore.protocols import HeldReader, RangeReader

__all__ = [
    "HeldObject",
    "Holding",
    "KeptObject",
    "LastBlock",
    "MarkedObject",
    "NearObject",
    "VerifiedBlocks",
    "Window",
]

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


class Holding:
    """Makes held objects of a checkpoint. Any thread."""

    def __init__(self, block_bytes: int, count: Callable[[int], None]) -> None:
        """Hold nothing yet.

        Args:
            block_bytes: what one checksum covers.
            count: is told how many bytes were read, each time.
        """
        self._count = count
        self._last = LastBlock(block_bytes)
        self._blocks = VerifiedBlocks(block_bytes)

    def of(self, key: str, reader: RangeReader, size: int, sums: RecordedChecksums | None) -> HeldObject:
        """An object to read parts of.

        Args:
            key: the object, for errors.
            reader: it, open.
            size: its bytes, as they are known; may be hostile.
            sums: the checksums of its blocks; None: what is read is not verified.
        """
        if is_held_reader(type(reader)):
            near = cast(HeldReader, reader)
            if sums is None:
                return NearObject(key, near, size, self._count)
            return MarkedObject(key, near, size, self._count, sums, self._last)
        if sums is None:
            return HeldObject(key, reader, size, self._count)
        return KeptObject(key, reader, size, self._count, sums, self._blocks)


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
