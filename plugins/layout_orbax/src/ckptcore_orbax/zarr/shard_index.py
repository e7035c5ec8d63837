"""Index of a shard: locates its inner chunks (codec ``sharding_indexed``)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from ckptcore.errors import ChecksumError, CorruptCheckpointError
from ckptcore_orbax.crc32c import CRC32C, crc32c_of
from ckptcore_orbax.zarr.formats import ArrayFormat

MISSING: Final = -1
"""Offset of an inner chunk that is not stored."""

_Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_ABSENT: Final = (1 << 64) - 1
"""Offset and length of a missing inner chunk in a file (zarr 3 specification, ``sharding_indexed``)."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """Location of the inner chunks of one write chunk in its object.

    Attributes:
        offsets: offset of each inner chunk in bytes, in C order; `MISSING` if not stored.
        lengths: length of each inner chunk in bytes, with its checksum; 0 if not stored.
    """

    offsets: _Numbers
    lengths: _Numbers


def index_range(format: ArrayFormat, chunk_bytes: int, key: str) -> tuple[int, int]:
    """Return the half-open byte range of the index in the object of a chunk.

    Args:
        format: format of a sharded array.
        chunk_bytes: length of the object.
        key: key of the object, for errors.

    Raises:
        CorruptCheckpointError: the object is too short for an index.
    """
    expected = format.index_bytes
    if chunk_bytes < expected:
        raise CorruptCheckpointError(
            f"the chunk {key} has {chunk_bytes} bytes, but its index alone needs {expected}; it is cut off", key=key
        )
    return (0, expected) if format.index_at == "start" else (chunk_bytes - expected, chunk_bytes)


def decode_index(format: ArrayFormat, data: bytes, chunk_bytes: int, key: str) -> ShardIndex:
    """Decode the index of a chunk, which may be hostile.

    Args:
        format: format of a sharded array.
        data: the bytes of `index_range`.
        chunk_bytes: length of the object; all inner chunks must be within it.
        key: key of the object, for errors.

    Raises:
        ChecksumError: the checksum of the index differs.
        CorruptCheckpointError: the index is invalid for this format.
    """
    start, stop = index_range(format, chunk_bytes, key)
    if len(data) != stop - start:
        raise CorruptCheckpointError(
            f"the index of the chunk {key} has {len(data)} bytes; expected {stop - start}",
            key=key,
            start=start,
            stop=stop,
        )
    view = memoryview(data)
    if format.index_checksum:
        checksum, expected = crc32c_of(view[:-4]), int.from_bytes(view[-4:], "little")
        if checksum != expected:
            raise ChecksumError(
                f"the index of the chunk {key} is damaged: its crc32c is {checksum:08x}, and {expected:08x} was "
                "recorded",
                key=key,
                start=start,
                stop=stop,
            )
        view = view[:-4]
    entries = np.frombuffer(view, "<u8").reshape(-1, 2)
    missing = entries == _ABSENT
    absent = missing.all(axis=1)
    offsets, lengths = entries[:, 0], entries[:, 1]
    # Compare offsets and lengths separately first, because their sum may overflow.
    wrong = (missing.any(axis=1) | (offsets > chunk_bytes) | (lengths > chunk_bytes)) & ~absent
    wrong |= ~absent & ~wrong & (lengths > chunk_bytes - np.minimum(offsets, chunk_bytes))
    if format.direct:
        wrong |= ~absent & (lengths != format.inner_stored_bytes)
    if wrong.any():
        number = int(np.flatnonzero(wrong)[0])
        expected_bytes = f"{format.inner_stored_bytes} bytes within" if format.direct else "bytes within"
        raise CorruptCheckpointError(
            f"the index of the chunk {key} states {int(lengths[number])} bytes at byte {int(offsets[number])} for "
            f"inner chunk {number}; expected {expected_bytes} the {chunk_bytes} of the chunk",
            key=key,
            start=start,
            stop=stop,
        )
    return ShardIndex(
        np.where(absent, np.uint64(0), offsets).astype(np.int64) - absent,
        np.where(absent, np.uint64(0), lengths).astype(np.int64),
    )


def encode_index(format: ArrayFormat, index: ShardIndex) -> bytes:
    """Return the bytes of an index, with its checksum if the format has one."""
    entries = np.empty((len(index.offsets), 2), "<u8")
    absent = index.offsets == MISSING
    entries[:, 0] = index.offsets.astype(np.uint64)
    entries[:, 1] = index.lengths
    entries[absent] = _ABSENT
    data = entries.tobytes()
    return data + CRC32C.encode(crc32c_of(data)) if format.index_checksum else data


def inner_offsets(format: ArrayFormat) -> _Numbers:
    """Return the offset of each inner chunk of a dense chunk, in bytes, in C order.

    In a dense chunk the inner chunks are contiguous in C order and complete. Valid only if
    `direct`.
    """
    first = format.index_bytes if format.index_at == "start" else 0
    return first + np.arange(prod(format.inner_grid), dtype=np.int64) * format.inner_stored_bytes


def dense_index(format: ArrayFormat) -> ShardIndex:
    """Return the index of a dense chunk; see `inner_offsets`."""
    offsets = inner_offsets(format)
    return ShardIndex(offsets, np.full(len(offsets), format.inner_stored_bytes, np.int64))
