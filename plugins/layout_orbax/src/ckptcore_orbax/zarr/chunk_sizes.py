"""Limits of the size of read chunks, which are checked before tensorstore allocates or decodes one."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError, InsufficientMemoryError
from ckptcore_orbax.zarr.array_files import inner_array
from ckptcore_orbax.zarr.codecs import codec_names
from ckptcore_orbax.zarr.formats import ArrayFormat
from ckptcore_orbax.zarr.state import ZarrArray

_MAX_CHUNK_BYTES: Final = 1 << 30
"""Read chunks above this size, in bytes, must be at most 4 times the array, because hostile metadata may state any
size."""

_SMALL_CHUNK_BYTES: Final = 16 << 20
"""Read chunks up to this size, in bytes, are decoded regardless of their encoded size."""

_GROWTH: Final[Mapping[str, int]] = {
    "blosc": 1 << 16,  # the limit of zstd, its compressor with the highest ratio
    "bytes": 1,
    "bz2": 1 << 21,  # a block of 32 bytes decodes to 46 MB
    "crc32c": 1,
    "gzip": 1 << 11,  # at most 1032 (https://zlib.net/zlib_tech.html)
    "transpose": 1,
    "zlib": 1 << 11,
    "zstd": 1 << 16,  # a block of 4 bytes decodes to 128 KiB (RFC 8878, 3.1.1.2)
}
"""Limit of the decoded bytes per encoded byte, by codec."""

_OTHER_GROWTH: Final = 1 << 21
"""The same limit for other codecs, and for shards inside read chunks, whose missing chunks take few bytes."""


def expect_reasonable(stored: ZarrArray) -> None:
    """Reject read chunks that are far larger than their array.

    Raises:
        CorruptCheckpointError: read chunks have more than 1 GiB, and more than 4 times the size of
            the array.
    """
    format = stored.format
    if format.inner_bytes > max(_MAX_CHUNK_BYTES, 4 * format.spec.nbytes):
        raise CorruptCheckpointError(
            f"{stored.name!r} is {format.spec} and states read chunks of {list(format.inner)} elements, "
            f"{format.inner_bytes} bytes; its metadata is damaged: restore it from a copy, or load another "
            "checkpoint"
        )


def expect_justified(stored: ZarrArray, encoded_bytes: int) -> None:
    """Reject a read chunk that does not fit in memory, or is larger than what its bytes can decode to.

    tensorstore 0.1.86 allocates the read chunk before it decodes, and aborts the process if memory is insufficient.

    Args:
        stored: the array.
        encoded_bytes: size of the encoded read chunk, or of a write chunk that contains it.

    Raises:
        CorruptCheckpointError, InsufficientMemoryError
    """
    format = stored.format
    nbytes = format.inner_bytes
    if nbytes <= _SMALL_CHUNK_BYTES:
        return
    most = _max_decoded_bytes(inner_array(format), encoded_bytes)
    if nbytes > most:
        raise CorruptCheckpointError(
            f"{stored.name!r} cannot be decoded: its metadata states read chunks of {list(format.inner)} elements, "
            f"{nbytes} bytes, and one has {encoded_bytes} encoded bytes, which decode to at most {most}; restore the "
            "checkpoint from a copy, or load another one"
        )
    # This shows only that the address space suffices, which `ulimit -v` can limit. It does not show that memory is
    # free.
    try:
        np.empty(2 * nbytes, np.uint8)  # decoded bytes and elements; no page is touched
    except (MemoryError, ValueError) as error:
        raise InsufficientMemoryError(
            f"{stored.name!r} cannot be decoded: not enough memory for a read chunk of {list(format.inner)} elements, "
            f"{nbytes} bytes; use a machine with more memory, or load another checkpoint"
        ) from error


def _max_decoded_bytes(inner: ArrayFormat, encoded_bytes: int) -> int:
    """Return the most bytes to which an encoded chunk can decode.

    Args:
        inner: the format of one inner chunk, from `inner_array`.
        encoded_bytes: size of the encoded chunk.
    """
    if inner.zarr_format == 3:
        names = codec_names(inner.document["codecs"])
    else:
        compressor = inner.document["compressor"]
        names = [str(compressor.get("id"))] if isinstance(compressor, dict) else []
    return encoded_bytes * prod([_GROWTH.get(name, _OTHER_GROWTH) for name in names])
