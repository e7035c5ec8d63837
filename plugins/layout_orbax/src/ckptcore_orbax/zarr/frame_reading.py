"""Reader of read chunks that are zstd frames of plain elements: threads decode them into the memory of the arrays."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final, NamedTuple, cast

import numpy as np
import zstandard

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model import Chunk, HostArray
from ckptcore.model.file_kinds import FILE_HEAD_BYTES, kind_in_place_of
from ckptcore.protocols import ChunkIndex, ReadStore
from ckptcore_orbax.zarr.chunk_sizes import expect_justified
from ckptcore_orbax.zarr.state import ArraysState, BoxRead, ZarrArray

_PIECE_BYTES: Final = 1 << 20
"""Bytes of a frame that are read and decoded at a time.

Pieces stay in the cache of the processor, and use the same memory again. To read a whole frame of 64 MB first takes 1.4
times the processor time, because the memory for it has 16,000 pages to fault in.
"""

_COPIED_BYTES: Final = 128 << 20
"""Maximum bytes of the started chunks that are not decoded into place, unless there is only one."""

_BATCH_CHUNKS: Final = 1 << 12
"""Maximum number of chunks that are located, or started, at a time. A few hostile bytes may state millions."""


def read_frames(
    state: ArraysState, wanted: Mapping[int, Sequence[BoxRead]], index: ChunkIndex, store: ReadStore
) -> Iterator[int]:
    """Fill the destinations. Yields the number of each when it is complete.

    Args:
        state: formats and locations of the arrays.
        wanted: the boxes to read, by leaf. The format of each array satisfies `codecs.is_framed`.
        index: finds the chunks.
        store: reads objects.

    Raises:
        CorruptCheckpointError: bytes are missing or wrong.
        InsufficientMemoryError
    """
    started: deque[tuple[_Decoding, Sequence[int]]] = deque()
    copied_bytes = 0  # of the started chunks
    try:
        for frame, numbers in _frames(state, wanted, index, store):
            copied = frame.copied_bytes
            while started and (
                started[0][0].is_complete
                or len(started) == _BATCH_CHUNKS
                or (copied and copied_bytes and copied_bytes + copied > _COPIED_BYTES)
            ):
                decoding, complete = started[0]
                decoding.result()
                started.popleft()  # only now: all started chunks are cancelled below, also after an interrupt
                copied_bytes -= decoding.copied_bytes
                yield from complete
            copied_bytes += copied
            decoding = _Decoding(frame, store, copied)
            started.append((decoding, numbers))
            store.start(decoding.run)
        for decoding, complete in started:
            decoding.result()
            yield from complete
    finally:
        for decoding, _ in started:
            decoding.cancel()  # after an error, no thread writes into a destination


class _Decoding:
    """A chunk that is decoded once, by the first thread that asks for it.

    Attributes:
        copied_bytes: see `_Frame.copied_bytes`.
        is_complete: True once it was decoded, or failed.
    """

    def __init__(self, frame: _Frame, store: ReadStore, copied_bytes: int) -> None:
        self._frame: _Frame | None = frame
        self._store = store
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.copied_bytes = copied_bytes
        self.is_complete = False

    def run(self) -> None:
        """Decode the chunk, or wait for the thread that does. Return at once if it was decoded or cancelled."""
        with self._lock:
            frame, self._frame = self._frame, None
            if frame is None:
                return
            try:
                frame.decode(self._store)
            except BaseException as error:  # noqa: BLE001  # raised by `result`
                self._error = error
            self.is_complete = True

    def result(self) -> None:
        """Decode the chunk on this thread, unless another thread did. Never waits for a thread that is not decoding it.

        Raises:
            The error of `_Frame.decode`.
        """
        self.run()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # break the cycle between the error and this frame

    def cancel(self) -> None:
        """Wait for the thread that decodes the chunk. If there is none, the chunk is not decoded."""
        with self._lock:
            self._frame = None


def _frames(
    state: ArraysState, wanted: Mapping[int, Sequence[BoxRead]], index: ChunkIndex, store: ReadStore
) -> Iterator[tuple[_Frame, Sequence[int]]]:
    """Yield each chunk once per batch, with the numbers of the boxes that are complete when it and all before are."""
    for leaf, reads in wanted.items():
        requested: dict[int, tuple[Chunk, list[BoxRead]]] = {}
        for read in reads:
            chunks = 0
            for chunk in index.boxes(leaf, read.box):
                if len(requested) == _BATCH_CHUNKS and chunk.number not in requested:
                    yield from [(frame, ()) for frame in _located(state.arrays[leaf], requested, index, store)]
                    requested = {}
                requested.setdefault(chunk.number, (chunk, []))[1].append(read)
                chunks += 1
            if not chunks:
                raise CorruptCheckpointError(
                    f"{state.arrays[leaf].name!r} is {state.arrays[leaf].format.spec} and has no box {read.box}; its "
                    "metadata is damaged: restore it from a copy, or load another checkpoint"
                )
        *others, last = _located(state.arrays[leaf], requested, index, store)
        yield from [(frame, ()) for frame in others]
        yield last, [read.number for read in reads]


def _located(
    stored: ZarrArray, requested: Mapping[int, tuple[Chunk, list[BoxRead]]], index: ChunkIndex, store: ReadStore
) -> Sequence[_Frame]:
    located = index.locate([chunk for chunk, _ in requested.values()], store)
    rows = zip(requested.values(), located.keys, located.starts, strict=True)
    return [
        _Frame(stored, chunk, reads, key, start, located.stops.get(row), located.inline.get(row))
        for row, ((chunk, reads), key, start) in enumerate(rows)
    ]


class _Frame(NamedTuple):
    """An encoded read chunk.

    Attributes:
        stored, chunk: the array and the chunk.
        reads: the boxes that need elements of it; at least one.
        key, start, stop: bytes of an object. If `stop` is None, all bytes from `start` on.
        inline: the object, if it is a value that the database contains.
    """

    stored: ZarrArray
    chunk: Chunk
    reads: Sequence[BoxRead]
    key: str
    start: int
    stop: int | None
    inline: bytes | None

    def decode(self, store: ReadStore) -> None:
        """Decode the chunk into its destinations.

        Raises:
            CorruptCheckpointError: bytes are missing or wrong.
            InsufficientMemoryError
        """
        try:
            stop = self.stop
            if stop is None:
                stop = store.size(self.key) if self.inline is None else len(self.inline)
            expect_justified(self.stored, stop - self.start)
            place = self._place()
            elements = np.empty(self.chunk.box.shape, self.stored.format.spec.numpy_dtype) if place is None else place
            encoded = _Bytes(store, self.key, self.start, stop, self.inline)
            problem = _decompress(encoded, elements.reshape(-1).view(np.uint8).data)
            head = store.get(self.key, 0, FILE_HEAD_BYTES) if problem and self.inline is None else b""
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(
                f"a chunk is missing: {error}; restore it from a copy, or load another checkpoint", key=self.key
            ) from error
        if problem:
            if head and (kind := kind_in_place_of(head)) is not None:
                raise CorruptCheckpointError(f"{self.key} is {kind}", key=self.key)
            raise CorruptCheckpointError(
                f"{self.stored.name!r} cannot be decoded: {problem}, in its chunk at {list(self.chunk.box.start)}; "
                "restore the checkpoint from a copy, or load another one",
                key=self.key or None,
            )
        if place is None:
            for read in self.reads:
                common = read.box.intersect(self.chunk.box)
                assert common is not None  # the index returned the chunk for this box
                read.buffer[common.within(read.box)] = elements[common.within(self.chunk.box)]

    @property
    def copied_bytes(self) -> int:
        """Bytes of memory for elements that `decode` copies to their destinations; 0 if it decodes into place."""
        return 0 if self._place() is not None else self.stored.format.inner_bytes

    def _place(self) -> HostArray | None:
        """Return the only destination's part for the whole chunk, if it has one whose elements are in C order."""
        read, box = self.reads[0], self.chunk.box
        if len(self.reads) > 1 or not read.box.contains(box):
            return None
        slices: tuple[Any, ...] = (*box.within(read.box), ...)  # the ellipsis keeps an array without axes an array
        part = read.buffer[slices]
        return part if part.flags.c_contiguous else None


_MARK: Final = b"end of the chunk"
_MARK_FRAME: Final = zstandard.ZstdCompressor().compress(_MARK)
"""A frame that follows each chunk. It is decoded only if the frame of the chunk is complete, which the decoder does not
report otherwise. As the rest of a frame that was cut off, it is not valid."""


class _Bytes:
    """Bytes of an object, and `_MARK_FRAME`, as a file that is read from start to end."""

    def __init__(self, store: ReadStore, key: str, start: int, stop: int, inline: bytes | None) -> None:
        self._store, self._key, self._inline = store, key, inline
        self._position, self._stop = start, stop
        self._after = _MARK_FRAME

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; none at the end."""
        start = self._position
        # The store verifies whole blocks of an object, so that pieces end where blocks end.
        stop = min(self._stop, (start // _PIECE_BYTES + 1) * _PIECE_BYTES)
        if start < stop:
            data = self._store.get(self._key, start, stop) if self._inline is None else self._inline[start:stop]
            self._position = start + len(data)
            if data:
                return data
        data, self._after = self._after, b""
        return data


_MAX_WINDOW: Final = 1 << 31
"""The largest window of a frame, in bytes, which `zstd --long=31` writes. The decoder reserves address space for the
window, but uses no more pages of it than the frame has elements."""


def _decompress(encoded: _Bytes, memory: memoryview) -> str:
    """Decode frames into memory. Return what is wrong with them, or nothing if they have exactly as many bytes."""
    filled = 0
    try:
        decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        reader = decoder.stream_reader(cast(IO[bytes], encoded), read_size=_PIECE_BYTES)
        while filled < len(memory) and (count := reader.readinto(memory[filled:])):
            filled += count
        # A read returns bytes of one frame only.
        is_exact = filled == len(memory) and reader.read(len(_MARK) + 1) == _MARK and not reader.read(1)
    except zstandard.ZstdError as error:
        return f"{error} after {filled} of {len(memory)} bytes"
    return "" if is_exact else f"its zstd frames do not have {len(memory)} bytes"
