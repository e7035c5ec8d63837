"""What a chunk that blosc compressed says of itself: blosc takes as much memory as the chunk asks for, before it looks further."""

from __future__ import annotations

from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore_orbax.zarr.codecs import last_compressor
from ckptcore_orbax.zarr.formats import ArrayFormat

__all__ = ["expect_blosc_size", "is_blosc"]

_SIZE: Final = slice(4, 8)
"""Where in a chunk the bytes of its elements are counted, little endian (c-blosc 1, README_CHUNK_FORMAT)."""


def is_blosc(inner: ArrayFormat) -> bool:
    """Whether the read chunks of an array, as `inner_array` describes them, are what blosc made.

    Not where another codec or one more table of chunks lies around them: there nobody sees what they say.
    """
    if inner.zarr_format == 3:
        return last_compressor(inner.document["codecs"]) == "blosc"
    compressor = inner.document["compressor"]
    return isinstance(compressor, dict) and compressor.get("id") == "blosc"


def expect_blosc_size(inner: ArrayFormat, data: bytes, name: str) -> None:
    """Refuse a read chunk that says it has more bytes than one of its array: up to 2 GiB, in a chunk of any length.

    tensorstore 0.1.86 compares that when it is decoded, and where there is not so much memory the process is aborted.

    Args:
        inner: of the array, as `inner_array` has it; `is_blosc`.
        data: the chunk.
        name: of the array, for errors.

    Raises:
        CorruptCheckpointError
    """
    found = int.from_bytes(data[_SIZE], "little")
    if found > inner.inner_bytes:
        raise CorruptCheckpointError(
            f"{name!r} cannot be decoded: a chunk says that it has {found} bytes, where {inner.inner_bytes} are expected; restore the "
            "checkpoint from a copy, or load another one"
        )
