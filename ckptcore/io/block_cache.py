"""Block cache: an open object that remembers its verified blocks, and the blocks that were read last."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, cast

from ckptcore.errors import CorruptCheckpointError
from ckptcore.io.checksums import RecordedChecksums
from ckptcore.io.elements import new_bytes
from ckptcore.io.memory import PAGE_BYTES, map_pages
from ckptcore.io.threads import IOThreads, for_each
from ckptcore.protocols import Buffer, RangeReader, StampedReader

_FEW_RUNS: Final = 8
"""Below this number of runs of blocks, the calling thread reads them without other threads."""


_WINDOW_BYTES: Final = 256 << 10
"""Maximum bytes of blocks that are verified outside of the memory of the caller: they stay in the cache until they are
copied. A block may be larger."""

_HEAP_BYTES: Final = 64 << 10
"""The size of the smallest blocks. One such block is read directly into the memory of the caller, which malloc takes
from its heap: unlike memory of whole pages, it rarely begins where copies are slow, see `_Spare.take`."""


class _Spare(threading.local):
    """Memory in which a thread verifies blocks. It is freed when the thread ends.

    Attributes:
        memory: the memory of one block.
        block: the token of a cache, and the position and the bytes of its verified blocks, which are in `memory`; None
            if `memory` has no blocks that may be used again.
    """

    memory: memoryview | None = None
    block: tuple[object, int, int] | None = None

    def take(self, nbytes: int) -> memoryview:
        """Return memory to fill. It is reused, because mapping and touching a MiB takes longer than verifying it.

        It begins in the middle of a page. AMD processors since Zen 3 copy ten times slower to an address that is 1 to
        31 bytes after that of the source, modulo the size of a page. NumPy's memory begins 16 bytes after a page, and
        blocks of a file begin at a page: both the read and the copy to an array would be such copies.
        """
        self.block = None
        if self.memory is None or len(self.memory) < nbytes:
            self.memory = map_pages(nbytes + PAGE_BYTES).memory()[PAGE_BYTES // 2 :]
        return self.memory[:nbytes]


_spare: Final = _Spare()


class RecentBlocks:
    """The most recently read verified blocks of a checkpoint. Thread-safe."""

    def __init__(self, most: int) -> None:
        """Cache at most `most` blocks."""
        self._most = most
        self._blocks: OrderedDict[tuple[str, int], Buffer] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: str, start: int) -> Buffer | None:
        """Return the block of an object that starts at a byte, or None if it is not cached."""
        with self._lock:
            block = self._blocks.get((key, start))
            if block is not None:
                self._blocks.move_to_end((key, start))
            return block

    def keep(self, key: str, start: int, block: Buffer) -> None:
        """Cache a block. Drops the least recently used blocks beyond the limit."""
        with self._lock:
            self._blocks[key, start] = block
            self._blocks.move_to_end((key, start))
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)


class BlockCache:
    """An open object that remembers which blocks were verified. Verifies them again only if the object changes.

    Thread-safe.

    - The stamp of a `StampedReader` changes with the object, which may be mapped into memory. Verified blocks are
      remembered with the stamp. While the reader returns no stamp, a change could go unnoticed, so each thread caches
      only the block that it verified last.
    - Blocks of objects without a `StampedReader` are cached in memory, because reading them again costs as much as
      verifying them.
    - Without checksums nothing is verified, and mapped memory may be used after the first read.

    Silent changes of the disk, which leave the stamp unchanged, go unnoticed.

    Attributes:
        is_verified: True if bytes are compared with checksums, and therefore read as whole blocks.
        block_bytes: the size of the blocks.
    """

    def __init__(
        self,
        key: str,
        reader: RangeReader,
        size: int,
        sums: RecordedChecksums | None,
        *,
        block_bytes: int,
        recent: RecentBlocks,
        count: Callable[[int], None],
    ) -> None:
        """Read nothing yet.

        Args:
            key: the object, for errors.
            reader: the open object.
            size: its recorded size in bytes; may be hostile.
            sums: the checksums of its blocks; None: verify nothing.
            block_bytes: the bytes to read and verify together: those that one checksum covers, or a multiple of them.
            recent: caches blocks of objects without a `StampedReader`.
            count: called with the number of bytes after each read.
        """
        self.is_verified = sums is not None
        self._key = key
        self._reader = reader
        self._stamped = cast(StampedReader, reader) if _is_stamped(type(reader)) else None
        self._size = size
        self._sums = sums
        self.block_bytes = block_bytes
        self._recent = recent
        self._count = count
        self._memory: memoryview | None = None
        self._is_mapped = False
        self._was_read = False
        self._token = object()  # identifies this cache in `_spare`, which keeps no reference to it
        # The stamp, and a byte for each block: 1 if it was verified with this stamp. Replaced together.
        self._verified: tuple[Hashable | None, bytearray] = None, self._no_marks()

    def memory(self) -> memoryview | None:
        """Map the object into memory. Only ranges for which `is_cached` is True may be touched. None if impossible."""
        if not self._is_mapped:
            self._memory = None if self._stamped is None else self._stamped.memory()
            self._is_mapped = True
        return self._memory

    def is_cached(self, start: int, stop: int) -> bool:
        """Return True if bytes of `memory` may be used: they exist, and are verified. The range must not be empty."""
        stamped = self._stamped
        if stamped is None or not 0 <= start < stop <= self._size:
            return False
        if self._sums is None:
            return self._was_read and stop <= stamped.size()
        stamp, marks = self._verified
        first, last = start // self.block_bytes, (stop - 1) // self.block_bytes
        if not marks[first] or (first != last and marks.find(0, first, last + 1) >= 0):
            return False
        return stamped.stamp() == stamp

    def fetch(self, start: int, stop: int, threads: IOThreads) -> bool:
        """Read and verify the blocks of a range that are not verified yet. Return the result of `is_cached` for it.

        Reads nothing and returns False if the object cannot be mapped or has no stamp now. Reads nothing without
        checksums.

        Args:
            start, stop: the range in bytes; not empty.
            threads: read the blocks together with the calling thread, if there are many.

        Raises:
            ChecksumError
            CorruptCheckpointError: the object ends before `stop`.
        """
        self._expect(start, stop)
        if self._stamped is None or self.memory() is None:
            return False
        self._was_read = True
        if self._sums is not None:
            stamp = self._stamped.stamp()
            if stamp is None:
                return False  # without a stamp, each use would have to verify the blocks again
            marks, size = self._marks_of(stamp), self.block_bytes
            runs: list[range] = []  # of blocks that are not verified yet
            for number in range(start // size, -(-stop // size)):
                if marks[number]:
                    continue
                if runs and runs[-1].stop == number and len(runs[-1]) < _WINDOW_BYTES // size:
                    runs[-1] = range(runs[-1].start, number + 1)
                else:
                    runs.append(range(number, number + 1))
            if len(runs) < _FEW_RUNS:
                for run in runs:
                    self._verify_run(run)
            else:
                for_each(threads, runs, self._verify_run)
        return self.is_cached(start, stop)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill memory with the bytes from `start`.

        Raises:
            ChecksumError
            CorruptCheckpointError: the object ends too early.
        """
        stop = start + len(memory)
        if not 0 <= start < stop <= self._size:
            self._expect(start, stop)
            return
        if self._sums is None:
            self._fill(start, memory)
            self._was_read = True
            return
        stamp, marks = self._verified
        if marks.find(0, start // self.block_bytes, (stop - 1) // self.block_bytes + 1) < 0:
            self._fill(start, memory)
            # The stamp is compared after the read. If the object changed meanwhile, the bytes are read again below.
            if self._stamp() == stamp:
                return
            stamp = None
        if stamp is None:
            stamp = self._stamp()
        # Blocks may be marked for a stamp that the object had earlier: a mark counts only while it has that stamp.
        # Verify now. Many whole blocks are read directly into the memory. In an object without a `StampedReader` each
        # read is a request. Therefore, if at most one block is left to read, it is taken from the recent blocks, or
        # added to them.
        whole = stop if stop == self._size else stop - stop % self.block_bytes
        position = start
        while position < stop:
            begin = position - position % self.block_bytes
            if self._stamped is None:
                is_direct = begin < whole and stop - begin > self.block_bytes
            else:
                is_direct = whole - begin >= max(_WINDOW_BYTES, self.block_bytes) or whole - begin == _HEAP_BYTES
            if is_direct and position == begin:
                end = whole
                self._verify(begin, memory[position - start : end - start], stamp)
            else:
                blocks = self._blocks(begin, stop, stamp)
                end = min(begin + len(blocks), stop)
                memory[position - start : end - start] = blocks[position - begin : end - begin]
            position = end

    def _blocks(self, begin: int, stop: int, stamp: Hashable | None) -> Buffer:
        """Return the verified blocks from `begin` to `stop`, or the first of them.

        Their memory may be used until this thread verifies other blocks. `stamp` is one that the object had before.
        """
        if self._stamped is None:
            cached = self._recent.find(self._key, begin)
            if cached is None:
                cached = new_bytes(min(self.block_bytes, self._size - begin))
                self._verify(begin, cached, None)
                self._recent.keep(self._key, begin, cached)
            return cached
        stop = min(-(-stop // self.block_bytes) * self.block_bytes, self._size)
        nbytes = min(stop - begin, max(_WINDOW_BYTES, self.block_bytes))
        held = _spare.block
        if stamp is None and held is not None and held[0] is self._token and held[1] <= begin < held[1] + held[2]:
            assert _spare.memory is not None  # it has the block
            return _spare.memory[begin - held[1] : held[2]]
        blocks = _spare.take(nbytes)
        self._verify(begin, blocks, stamp)
        if stamp is None:
            _spare.block = self._token, begin, nbytes
        return blocks

    def _verify_run(self, run: range) -> None:
        begin, end = run.start * self.block_bytes, min(run.stop * self.block_bytes, self._size)
        self._verify(begin, _spare.take(end - begin), self._stamp())

    def _verify(self, start: int, memory: memoryview, stamp: Hashable | None) -> None:
        """Fill memory with whole blocks, verify them, and mark them for the stamp that the object had before."""
        assert self._sums is not None  # nothing is verified without checksums
        self._reader.get_into(((start, memory),))  # the lines of `_fill`, without its call
        self._count(len(memory))
        self._sums.verify(start, memory)
        if stamp is None:
            return
        known, marks = self._verified
        if known != stamp:
            marks = self._marks_of(stamp)
        first = start // self.block_bytes
        count = -(-len(memory) // self.block_bytes)
        marks[first : first + count] = b"\x01" * count

    def _stamp(self) -> Hashable | None:
        return None if self._stamped is None else self._stamped.stamp()

    def _no_marks(self) -> bytearray:
        return bytearray(-(-self._size // self.block_bytes) if self.is_verified else 0)

    def _marks_of(self, stamp: Hashable) -> bytearray:
        """Return the marks of the blocks that were verified with a stamp; no marks if the stamp is new."""
        known, marks = self._verified
        if known != stamp:
            marks = self._no_marks()
            self._verified = (stamp, marks)
        return marks

    def _fill(self, start: int, memory: memoryview) -> None:
        self._reader.get_into(((start, memory),))
        self._count(len(memory))

    def _expect(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._size:
            raise CorruptCheckpointError(
                f"{self._key!r} does not match the checkpoint: expected bytes {start} to {stop}, found "
                f"{self._size} bytes. The object was cut off, or the metadata is damaged: restore it from a copy, or "
                "load another checkpoint",
                key=self._key,
                start=start,
                stop=stop,
            )


@functools.lru_cache(maxsize=64)
def _is_stamped(kind: type[RangeReader]) -> bool:
    """Return True if readers of a type are `StampedReader`. Cached: the check is slow."""
    return issubclass(kind, StampedReader)
