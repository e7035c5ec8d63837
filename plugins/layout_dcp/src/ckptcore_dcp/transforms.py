"""What torch.distributed.checkpoint did to an item after it was written, undone.

torch 2.13.0 has one such extension, that compresses (``_extension.py``: ``stream.zstd/1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zstandard

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError

__all__ = ["undone"]

_KNOWN: Final = "stream.zstd/1"


def undone(item: bytes | memoryview, transforms: Sequence[str], *, what: str, key: str, limit: int) -> bytes:
    """An item as torch.save wrote it.

    Args:
        item: as it is stored.
        transforms: in the order in which a reader undoes them.
        what: whose item it is, for errors.
        key: the object it is in, for errors.
        limit: the most bytes it may have in the end.

    Raises:
        UnsupportedLeafError: if one of them is not known.
        CorruptCheckpointError: if it cannot be decompressed, or is longer.
    """
    for transform in transforms:
        if transform != _KNOWN:
            raise UnsupportedLeafError(
                f"{what} was stored through {transform[:80]!r}, which only the software knows that wrote it; "
                f"expected no transform, or {_KNOWN!r}; load it with that software and save it again without"
            )
        pieces: list[bytes] = []
        left = limit
        try:
            with zstandard.ZstdDecompressor().stream_reader(item, read_across_frames=True) as reader:
                while left >= 0 and (piece := reader.read(1 << 20)):
                    pieces.append(piece)
                    left -= len(piece)
        except zstandard.ZstdError as error:
            raise CorruptCheckpointError(
                f"{what} in {key!r} cannot be decompressed: {error}; restore the file from a copy, or load another "
                "checkpoint",
                key=key,
            ) from error
        if left < 0:
            raise CorruptCheckpointError(
                f"{what} in {key!r} has more than {limit} bytes once decompressed; restore the file from a copy, or "
                "load another checkpoint",
                key=key,
            )
        item = b"".join(pieces)
    return bytes(item)
