"""Reverses the transforms that torch.distributed.checkpoint applies to items.

torch 2.13.0 has one transform, which compresses (``_extension.py``: ``stream.zstd/1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zstandard

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError

_KNOWN: Final = "stream.zstd/1"


def undo_transforms(item: bytes | memoryview, transforms: Sequence[str], *, what: str, key: str, limit: int) -> bytes:
    """Return an item as torch.save wrote it.

    Args:
        item: the stored bytes.
        transforms: in the order in which a reader reverses them.
        what: description of the item, for errors.
        key: the object that contains it, for errors.
        limit: maximum length of the result, in bytes.

    Raises:
        UnsupportedLeafError: a transform is unknown.
        CorruptCheckpointError: the item cannot be decompressed, or is too long.
    """
    for transform in transforms:
        if transform != _KNOWN:
            raise UnsupportedLeafError(
                f"{what} was stored with the transform {transform[:80]!r}, known only to the software that wrote it; "
                f"expected no transform, or {_KNOWN!r}; load it with that software and save it without the transform"
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
