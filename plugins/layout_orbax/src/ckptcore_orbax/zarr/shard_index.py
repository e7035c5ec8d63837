"""The index of a chunk that holds inner chunks: where each of them lies in the object (codec ``sharding_indexed``)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from ckptcore.errors import ChecksumError, CorruptCheckpointError
from ckptcore_orbax.crc32c import CRC32C, crc32c_of
from ckptcore_orbax.zarr.formats import ArrayFormat

__all__ = ["MISSING", "ShardIndex", "decode_index", "dense_index", "encode_index", "index_range", "inner_offsets"]

MISSING: Final = -1
"""The offset of an inner chunk that was never written."""

_Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_ABSENT: Final = (1 << 64) - 1
"""What offset and length of a missing inner chunk are in a file (zarr 3 specification, ``sharding_indexed``)."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """Where the inner chunks of one write chunk lie in its object.

    Attributes:
        offsets: in bytes, of each inner chunk in C order; `MISSING` for those that are not there.
        lengths: in bytes, with checksums; 0 for those that are not there.
    """

    offsets: _Numbers
    lengths: _Numbers


def index_range(format: ArrayFormat, chunk_bytes: int, key: str) -> tuple[int, int]:
    """Where in the object of a chunk its index stands: (start, stop), in bytes.

    Args:
        format: of an array whose chunks have an index.
        chunk_bytes: how long the object is.
        key: its name, for errors.

    Raises:
        CorruptCheckpointError: if it is too short to have one.
    """
    expected = format.index_bytes
    if chunk_bytes < expected:
        raise CorruptCheckpointError(
            f"the chunk {key} has {chunk_bytes} bytes, and its index alone takes {expected}; it is cut off", key=key
        )
    return (0, expected) if format.index_at == "start" else (chunk_bytes - expected, chunk_bytes)


def decode_index(format: ArrayFormat, data: bytes, chunk_bytes: int, key: str) -> ShardIndex:
    """Read the index of a chunk; its bytes may be hostile.

    Args:
        format: of an array whose chunks have an index.
        data: the bytes that `index_range` names.
        chunk_bytes: how long the object is; no inner chunk lies outside of it.
        key: its name, for errors.

    Raises:
        ChecksumError: if its checksum says that it is not what was written.
        CorruptCheckpointError: if it is none of this format.
    """
    start, stop = index_range(format, chunk_bytes, key)
    if len(data) != stop - start:
        raise CorruptCheckpointError(
            f"the index of the chunk {key} has {len(data)} bytes, where {stop - start} are expected",
            key=key,
            start=start,
            stop=stop,
        )
    view = memoryview(data)
    if format.index_checksum:
        found, expected = crc32c_of(view[:-4]), int.from_bytes(view[-4:], "little")
        if found != expected:
            raise ChecksumError(
                f"the index of the chunk {key} is damaged: its crc32c is {found:08x}, and {expected:08x} was recorded",
                key=key,
                start=start,
                stop=stop,
            )
        view = view[:-4]
    entries = np.frombuffer(view, "<u8").reshape(-1, 2)
    missing = entries == _ABSENT
    absent = missing.all(axis=1)
    offsets, lengths = entries[:, 0], entries[:, 1]
    # Each is compared by itself first: their sum may wrap around.
    wrong = (missing.any(axis=1) | (offsets > chunk_bytes) | (lengths > chunk_bytes)) & ~absent
    wrong |= ~absent & ~wrong & (lengths > chunk_bytes - np.minimum(offsets, chunk_bytes))
    if format.direct:
        wrong |= ~absent & (lengths != format.inner_stored_bytes)
    if wrong.any():
        number = int(np.flatnonzero(wrong)[0])
        expected_bytes = f"{format.inner_stored_bytes} bytes within" if format.direct else "bytes within"
        raise CorruptCheckpointError(
            f"the index of the chunk {key} says that inner chunk {number} has {int(lengths[number])} bytes at byte "
            f"{int(offsets[number])}, where {expected_bytes} the {chunk_bytes} of the chunk are expected",
            key=key,
            start=start,
            stop=stop,
        )
    return ShardIndex(
        np.where(absent, np.uint64(0), offsets).astype(np.int64) - absent,
        np.where(absent, np.uint64(0), lengths).astype(np.int64),
    )


def encode_index(format: ArrayFormat, index: ShardIndex) -> bytes:
    """The bytes of an index, with its checksum where the format has one."""
    entries = np.empty((len(index.offsets), 2), "<u8")
    absent = index.offsets == MISSING
    entries[:, 0] = index.offsets.astype(np.uint64)
    entries[:, 1] = index.lengths
    entries[absent] = _ABSENT
    data = entries.tobytes()
    return data + CRC32C.encode(crc32c_of(data)) if format.index_checksum else data


def inner_offsets(format: ArrayFormat) -> _Numbers:
    """Where in its object each inner chunk of a dense chunk lies, in bytes, in C order.

    Dense: the inner chunks lie in C order with nothing between them, none is missing. Only where elements are `direct`.
    """
    first = format.index_bytes if format.index_at == "start" else 0
    return first + np.arange(prod(format.inner_grid), dtype=np.int64) * format.inner_stored_bytes


def dense_index(format: ArrayFormat) -> ShardIndex:
    """The index of a dense chunk, as `inner_offsets` has it."""
    offsets = inner_offsets(format)
    return ShardIndex(offsets, np.full(len(offsets), format.inner_stored_bytes, np.int64))
