"""Decides whether to read a tensor whole, so that its checksum can be verified."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ckptcore.model import Box

__all__ = ["is_read_whole"]

_GAP_BYTES: Final = 1 << 16
"""Smaller gaps between requested elements are read too. This is cheaper on disks and slower storages."""


def is_read_whole(wanted: Iterable[Box], whole: Box, itemsize: int) -> bool:
    """Return whether to read all elements: if that adds at most a tenth to the bytes read.

    Common after resharding: a process often needs half of what another process saved.

    Args:
        wanted: requested boxes; may reach beyond the tensor.
        whole: box of the tensor, whose elements are in C order.
        itemsize: bytes per element.
    """
    read = sum([_read_bytes(common, whole, itemsize) for box in wanted if (common := box.intersect(whole)) is not None])
    return 11 * read >= 10 * whole.size * itemsize


def _read_bytes(box: Box, whole: Box, itemsize: int) -> int:
    """Return the bytes read for a box of a tensor, small gaps included."""
    # Per step along an axis: bytes read, bytes from first to last, and distance to the next step.
    read = span = stride = itemsize
    for extent, outer in zip(reversed(box.shape), reversed(whole.shape), strict=True):
        gap = stride - span
        read = extent * read + ((extent - 1) * gap if gap <= _GAP_BYTES else 0)
        span += (extent - 1) * stride
        stride *= outer
    return read
