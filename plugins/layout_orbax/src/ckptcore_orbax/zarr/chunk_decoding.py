"""Decoder of read chunks with tensorstore: in memory, or directly from the storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import xxhash

from ckptcore.errors import ChecksumError, CorruptCheckpointError
from ckptcore.model import Box, Chunk, HostArray
from ckptcore.protocols import ReadStore
from ckptcore_orbax.zarr.chunk_codec import ChunkCodec, DecodingChunk
from ckptcore_orbax.zarr.chunk_locations import DatabaseCache
from ckptcore_orbax.zarr.chunk_sizes import expect_justified, expect_reasonable
from ckptcore_orbax.zarr.native_reading import check_native_files, expect_chunks, native_store, read_native
from ckptcore_orbax.zarr.state import DIGEST_BYTES, ArraysState, BoxRead, ZarrArray
from ckptcore_orbax.zarr.tensorstore_guard import begin_use, clear_frames, using_tensorstore


class ChunkDecoder:
    """Decodes the read chunks of one array.

    Attributes:
        leaf: the array.
    """

    def __init__(self, state: ArraysState, leaf: int) -> None:
        """Create a decoder for a leaf."""
        self.leaf = leaf
        self._stored = state.arrays[leaf]
        self._digests = state.digests.get(leaf)
        self._codec = ChunkCodec(self._stored.name, self._stored.format, state.missing)
        self._whole = Box.whole(self._stored.format.spec.shape)

    def decode(self, chunk: Chunk, data: bytes) -> DecodedChunk:
        """Start to decode a chunk.

        Raises:
            CorruptCheckpointError: its bytes state a larger size than a read chunk has, or cannot decode to a read
                chunk.
            InsufficientMemoryError
        """
        expect_justified(self._stored, len(data))
        valid = chunk.box.intersect(self._whole)
        assert valid is not None  # a chunk contains elements of the array
        elements = np.empty(valid.shape, self._stored.format.spec.numpy_dtype)
        end_use = begin_use()
        try:
            decoding = self._codec.decode(data, _within(valid, chunk.box), elements)
        except BaseException as error:
            clear_frames(error)
            end_use()
            raise
        return DecodedChunk(self._stored, chunk, elements, self._digests, decoding, end_use)


class DecodedChunk:
    """A chunk that is being decoded; a `ckptcore.model.Pending`."""

    __slots__ = ("_chunk", "_decoding", "_digests", "_elements", "_end_use", "_stored")

    def __init__(
        self,
        stored: ZarrArray,
        chunk: Chunk,
        elements: HostArray,
        digests: bytes | None,
        decoding: DecodingChunk,
        end_use: Callable[[], None],
    ) -> None:
        self._stored = stored
        self._chunk = chunk
        self._elements = elements
        self._digests = digests
        self._decoding: DecodingChunk | None = decoding
        self._end_use = end_use

    def result(self) -> HostArray:
        """Wait for the elements, and verify their digest.

        Raises:
            CorruptCheckpointError: the bytes are not a valid chunk, or the digest of the elements
                differs (`ChecksumError`).
        """
        decoding = self._decoding
        if decoding is not None:
            try:
                decoding.result()
            except BaseException as error:
                clear_frames(error)
                raise
            finally:
                decoding.release()  # tensorstore does not write to the elements after this
                self._decoding = decoding = None
                self._end_use()
        if self._digests is not None:
            _verify(self._stored, self._chunk, self._elements, self._digests)
        return self._elements


def is_native(state: ArraysState, store: ReadStore) -> bool:
    """Return whether tensorstore supports the storage of the arrays."""
    return native_store(state, store.address) is not None


def read_natively(
    state: ArraysState,
    wanted: Mapping[int, Sequence[BoxRead]],
    store: ReadStore,
    databases: DatabaseCache,
) -> Iterator[int]:
    """Read boxes of arrays, by leaf, with tensorstore's own storage drivers. See `ckptcore.protocols.NativeReader`."""
    with using_tensorstore():
        native = native_store(state, store.address)
        assert native is not None  # see `is_native`
        for leaf in wanted:
            expect_reasonable(state.arrays[leaf])
        check_native_files(wanted, state, store, databases)
        try:
            yield from read_native(state, wanted, native)
        except CorruptCheckpointError:
            expect_chunks(wanted, state, store, databases)  # tensorstore does not report which file it read
            raise


def _verify(stored: ZarrArray, chunk: Chunk, elements: HostArray, digests: bytes) -> None:
    expected = digests[chunk.number * DIGEST_BYTES : (chunk.number + 1) * DIGEST_BYTES]
    digest = xxhash.xxh3_64_digest(elements.reshape(-1).view(np.uint8).data)
    if digest != expected:
        raise ChecksumError(
            f"the read chunk at {list(chunk.box.start)} of {stored.name!r} was not decoded to what was saved: expected "
            f"xxh3_64:{expected.hex()}, found {digest.hex()}; restore the checkpoint from a copy, or load another one"
        )


def _within(box: Box, outer: Box) -> Box:
    """Return a box relative to an enclosing box."""
    origin = outer.start
    return Box(tuple(map(int.__sub__, box.start, origin)), tuple(map(int.__sub__, box.stop, origin)))
