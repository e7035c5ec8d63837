"""Checksums of blocks, which are recorded in tables, and of chunks, which are inside the data files."""

from __future__ import annotations

import bisect
import struct
import threading
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

from ckptcore.errors import ChecksumError, CorruptCheckpointError, PluginError
from ckptcore.model import BLOCK_BYTES, Checksum, ChecksumSegment, ObjectRecord, Segment
from ckptcore.model.metadata import CHECKSUM_ALGORITHM, CHECKSUM_BYTES, block_bytes_of
from ckptcore.protocols import Buffer

_SUM: Final = struct.Struct("<Q")
_SHOWN_BYTES: Final = 8
"""Bytes of the longest inline checksum that errors show."""


def checksums_of(data: Buffer, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Return the checksums of all blocks of an object, in the form of `ObjectRecord.checksums`."""
    view = memoryview(data)
    if 0 < len(view) <= block_bytes:  # a slice: half the time of the general case
        return _SUM.pack(xxh3_64_intdigest(view))
    sums = [xxh3_64_intdigest(view[start : start + block_bytes]) for start in range(0, len(view), block_bytes)]
    return struct.pack(f"<{len(sums)}Q", *sums)


class BlockChecksums:
    """The checksums of an object that is being written, computed from whole blocks in any order. Thread-safe."""

    def __init__(self, size: int, *, block_bytes: int = BLOCK_BYTES) -> None:
        """Expect an object of `size` bytes."""
        self._size: Final = size
        self._block_bytes: Final = block_bytes
        self._sums: list[int | None] = [None] * -(-size // block_bytes)

    def add(self, offset: int, data: Buffer) -> None:
        """Add whole blocks; the last block of the object may be shorter. Each block is added once.

        Raises:
            ValueError: bytes are outside the object, or are not whole blocks.
        """
        view = memoryview(data)
        stop = offset + len(view)
        if offset < 0 or stop > self._size:
            raise ValueError(f"bytes {offset} to {stop} are not in an object of {self._size} bytes")
        if offset % self._block_bytes or (stop % self._block_bytes and stop != self._size):
            raise ValueError(f"bytes {offset} to {stop} are not whole blocks of {self._block_bytes} bytes")
        for begin in range(0, len(view), self._block_bytes):
            # Without a lock: one thread has all bytes of this block, and setting an item of a list is atomic.
            block = (offset + begin) // self._block_bytes
            self._sums[block] = xxh3_64_intdigest(view[begin : begin + self._block_bytes])

    def encode(self) -> bytes:
        """Return all checksums, in the form of `ObjectRecord.checksums`.

        Raises:
            ValueError: some bytes were not added yet.
        """
        missing = [block for block, value in enumerate(self._sums) if value is None]
        if missing:
            raise ValueError(f"{len(missing)} of {len(self._sums)} blocks are incomplete, the first is {missing[0]}")
        return struct.pack(f"<{len(self._sums)}Q", *self._sums)


class RecordedChecksums:
    """The checksums of an object that is being read. Thread-safe.

    Attributes:
        block_bytes: the bytes that one checksum covers.
    """

    __slots__ = ("_key", "_size", "_sums", "block_bytes")

    def __init__(self, record: ObjectRecord, *, block_bytes: int = BLOCK_BYTES) -> None:
        """Use the checksums of a record, which may be hostile. `block_bytes` is the size of the largest blocks.

        Raises:
            CorruptCheckpointError: the number of checksums is not the number of blocks.
        """
        count, rest = divmod(len(record.checksums), CHECKSUM_BYTES)
        self.block_bytes = 0 if rest else block_bytes_of(record.size, count, block_bytes)
        if not self.block_bytes:
            least = -(-record.size // block_bytes)
            raise CorruptCheckpointError(
                f"the checksums of {record.key!r} are damaged: expected {least * CHECKSUM_BYTES} bytes for an object "
                f"of {record.size} bytes, or more with smaller blocks, found {len(record.checksums)}; restore the "
                "checkpoint from a copy",
                key=record.key,
            )
        self._key = record.key
        self._size = record.size
        self._sums = record.checksums  # not unpacked: a read of a slice needs only a few of them

    def verify(self, start: int, data: memoryview) -> None:
        """Verify bytes from `start`, a block boundary, up to another block boundary or the end of the object.

        Raises:
            ChecksumError: names the first block that differs.
        """
        computed = checksums_of(data, self.block_bytes)
        first = start // self.block_bytes * CHECKSUM_BYTES
        if computed != self._sums[first : first + len(computed)]:
            raise self._difference(start, computed)

    def verify_pieces(self, start: int, pieces: Sequence[memoryview]) -> None:
        """Verify bytes that are contiguous in the object but in several buffers. See `verify`.

        Raises:
            ChecksumError
        """
        digest: xxh3_64 | None = None  # of the first bytes of a block that is in several pieces
        position = start
        for piece in pieces:
            at = 0
            while at < len(piece):
                begin = position - position % self.block_bytes
                end = min(begin + self.block_bytes, self._size)
                left = len(piece) - at
                if position == begin and left >= end - begin:
                    nbytes = left if position + left == self._size else left - left % self.block_bytes
                    self.verify(begin, piece[at : at + nbytes])
                else:
                    nbytes = min(left, end - position)
                    digest = digest or xxh3_64()
                    digest.update(piece[at : at + nbytes])
                    if position + nbytes == end:
                        computed, first = digest.intdigest(), begin // self.block_bytes * CHECKSUM_BYTES
                        if computed != _SUM.unpack_from(self._sums, first)[0]:
                            raise self._difference(begin, _SUM.pack(computed))
                        digest = None
                position += nbytes
                at += nbytes

    def _difference(self, start: int, computed: bytes) -> ChecksumError:
        """Return the error for the first block from `start` whose checksum differs from the computed one."""
        first = start // self.block_bytes * CHECKSUM_BYTES
        expected = self._sums[first : first + len(computed)]
        for (found,), (recorded,) in zip(_SUM.iter_unpack(computed), _SUM.iter_unpack(expected), strict=True):
            if found != recorded:
                break
            start += self.block_bytes
        return _checksum_error(
            self._key,
            start,
            min(start + self.block_bytes, self._size),
            f"expected {CHECKSUM_ALGORITHM}:{recorded:016x}, found {CHECKSUM_ALGORITHM}:{found:016x}",
        )


def _checksum_error(key: str, start: int, stop: int, difference: str) -> ChecksumError:
    return ChecksumError(
        f"{key!r} is damaged in bytes {start} to {stop}: {difference}; it changed after it was written, or the storage "
        "returned wrong bytes: restore it from a copy, or load another checkpoint",
        key=key,
        start=start,
        stop=stop,
    )


class InlineChecksum:
    """A checksum that an object stores right after the covered bytes. Computed from pieces in any order.

    Attributes:
        checksum: its algorithm.
        nbytes: the number of bytes that it covers.
        data: the checksum as stored in the object, or None until all pieces are added.
    """

    __slots__ = ("_missing", "_pieces", "checksum", "data", "nbytes")

    def __init__(self, checksum: Checksum, nbytes: int) -> None:
        self.checksum = checksum
        self.nbytes = nbytes
        self.data: bytes | None = None
        self._missing = nbytes
        self._pieces: list[tuple[int, int, int]] = []
        if nbytes == 0:
            self.add(0, 0, checksum.of(memoryview(b"")))

    def add(self, start: int, nbytes: int, value: int) -> bool:
        """Add the checksum of the piece that begins at `start`. Return True if it was the last missing piece.

        The caller holds a lock, or has all bytes in one piece.

        Raises:
            PluginError: the checksum does not have the number of bytes that its algorithm states.
        """
        self._pieces.append((start, nbytes, value))
        self._missing -= nbytes
        if self._missing:
            return False
        self._pieces.sort()
        _, _, value = self._pieces[0]
        for _, length, piece in self._pieces[1:]:
            value = self.checksum.join(value, piece, length)
        self.data = encoded(self.checksum, value)
        return True


def encoded(checksum: Checksum, value: int) -> bytes:
    """Return a checksum as stored in an object.

    Raises:
        PluginError: it does not have the stated number of bytes.
    """
    data = checksum.encode(value)
    if len(data) != checksum.nbytes:
        raise PluginError(
            f"the checksum {checksum.name} states a size of {checksum.nbytes} bytes and encodes to {len(data)} bytes: "
            "the layout has a bug"
        )
    return data


def first_covered(segments: Sequence[Segment], number: int, segment: ChecksumSegment, before: int) -> int:
    """Return the number of the first segment that the checksum in segment `number` covers.

    The checksum covers all segments from that segment to the segment before its own. `before` is the number of the
    previous checksum segment, or -1.

    Raises:
        PluginError: it covers no segment, another checksum, or more segments than precede it.
    """
    first = number - segment.segments
    if not before < first < number:
        raise PluginError(
            f"segment {number} of {len(segments)} is the checksum of {segment.segments} segments before it: expected "
            f"1 to {number - before - 1}, because it may not cover another checksum; the layout has a bug"
        )
    return first


def inline_checksums(segments: Sequence[Segment], sizes: Sequence[int]) -> dict[int, InlineChecksum]:
    """Return the inline checksum for each checksum segment and for each segment that it covers, by segment number.

    Raises:
        PluginError: a checksum covers invalid segments.
    """
    checksums: dict[int, InlineChecksum] = {}
    before = -1
    for number, segment in enumerate(segments):
        if not isinstance(segment, ChecksumSegment):
            continue
        first = first_covered(segments, number, segment, before)
        inline = InlineChecksum(segment.checksum, sum(sizes[first:number]))
        for covered in range(first, number + 1):
            checksums[covered] = inline
        before = number
    return checksums


class ChunkCheck:
    """The comparison of a chunk with its inline checksum. The chunk is read in one part or several. Thread-safe.

    Attributes:
        start, stop: the range of the object that the checksum covers. The checksum begins at `stop`.
        end: the end of the checksum.
        numbers: the targets that wait for the comparison, if the chunk is read in several parts; else empty.
    """

    __slots__ = ("_key", "_lock", "_stored", "_sum", "end", "numbers", "start", "stop")

    def __init__(self, key: str, start: int, stop: int, checksum: Checksum, numbers: Sequence[int] = ()) -> None:
        self._key = key
        self._sum = InlineChecksum(checksum, stop - start)
        self._stored = b""
        self._lock = threading.Lock()
        self.start = start
        self.stop = stop
        self.end = stop + checksum.nbytes
        self.numbers = numbers

    def compare(self, start: int, stop: int, buffers: Sequence[tuple[int, memoryview]]) -> bool:
        """Add a part of the object. Compare and return True if it was the last part of the chunk.

        Args:
            start, stop: the range of the part. It does not end within the checksum.
            buffers: (position in the object, bytes): the memory of the part, in order and without a gap.

        Raises:
            ChecksumError
        """
        low, high = max(start, self.start), min(stop, self.stop)
        checksum = self._sum.checksum
        pieces = _between(buffers, low, high)
        value = checksum.of(pieces[0])
        for piece in pieces[1:]:
            value = checksum.join(value, checksum.of(piece), len(piece))
        with self._lock:
            if stop >= self.end:
                self._stored = b"".join(_between(buffers, high, self.end))
            if not self._sum.add(low, high - low, value):
                return False
        computed = self._sum.data or b""
        if computed != self._stored:
            difference = f"expected the stored {checksum.name} {self._stored.hex()}, found {computed.hex()}"
            if checksum.nbytes > _SHOWN_BYTES:  # the format stores more than a checksum there
                difference = f"they do not match their {checksum.name} in bytes {self.stop} to {self.end}"
            raise _checksum_error(self._key, self.start, self.end, difference)
        return True


def _between(buffers: Sequence[tuple[int, memoryview]], start: int, stop: int) -> list[memoryview]:
    """Return bytes `start` to `stop` of an object from buffers (position in the object, bytes)."""
    index = bisect.bisect_right(buffers, start, key=itemgetter(0)) - 1
    position, buffer = buffers[index]
    parts = [buffer[start - position : stop - position]]
    while (position := position + len(buffer)) < stop:
        index += 1
        buffer = buffers[index][1]
        parts.append(buffer[: stop - position])
    return parts
