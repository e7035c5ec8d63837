"""Whether a tensor of which parts are wanted is read whole, for the sake of its one checksum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ckptcore.model import Box

__all__ = ["is_read_whole"]

_GAP_BYTES: Final = 1 << 16
"""Fewer bytes between elements that are wanted are read along with them, from a local disk or any slower storage."""


def is_read_whole(wanted: Iterable[Box], whole: Box, itemsize: int) -> bool:
    """Whether all elements of a tensor are to be read: if that is at most a tenth more than is read for what is wanted.

    A process of another mesh than the one that saved often wants just half of what another process had.

    Args:
        wanted: boxes that may reach beyond the tensor.
        whole: its box; its elements are in C order.
        itemsize: of its elements, in bytes.
    """
    read = sum([_read_bytes(common, whole, itemsize) for box in wanted if (common := box.intersect(whole)) is not None])
    return 11 * read >= 10 * whole.size * itemsize


def _read_bytes(box: Box, whole: Box, itemsize: int) -> int:
    """Bytes of a tensor that are read for a box of it, those in small gaps included."""
    # What is read for one step along an axis, how far it reaches, and how far it is to the next step.
    read = span = stride = itemsize
    for extent, outer in zip(reversed(box.shape), reversed(whole.shape), strict=True):
        gap = stride - span
        read = extent * read + ((extent - 1) * gap if gap <= _GAP_BYTES else 0)
        span += (extent - 1) * stride
        stride *= outer
    return read
