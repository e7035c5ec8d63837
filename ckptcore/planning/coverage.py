"""Coverage: whether boxes make up arrays."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.arrays import ArraySpec, Box
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ItemColumns, Receipt
from ckptcore.model.tree import format_path

__all__ = ["check_coverage", "uncovered"]

_COLUMNS_PAY: Final = 16
"""Boxes of an array above which they are looked at together."""


def uncovered(spec: ArraySpec, boxes: Sequence[Box]) -> str | None:
    """Why boxes do not make up an array exactly, for a person; None if they do.

    Takes about ``n log n`` for a grid of n boxes, and longer where they do not make it up.
    """
    whole = Box.whole(spec.shape)
    if len(boxes) == 1 and boxes[0] == whole:
        return None
    if len(boxes) > _COLUMNS_PAY and all(len(box.start) == len(spec.shape) for box in boxes):
        from ckptcore.planning.partition import makes_up  # only a job needs it

        bounds = np.array([(*box.start, *box.stop) for box in boxes], np.int64).reshape(len(boxes), -1)
        if makes_up(spec.shape, bounds[:, : len(spec.shape)], bounds[:, len(spec.shape) :]):
            return None
    # A hostile box may end before it begins, on two axes, so that its size is positive.
    filled = [box for box in boxes if all(map(operator.lt, box.start, box.stop))]
    for box in filled:
        if len(box.start) != len(spec.shape) or not whole.contains(box):
            return f"{_span(box)} lies outside of it"
    total = sum(box.size for box in filled)
    expected = math.prod(spec.shape)
    if total < expected:
        return f"{expected - total} of its {expected} elements are in no box"
    active: list[Box] = []
    for box in sorted(filled, key=lambda box: box.start):
        active = [other for other in active if not other.stop or other.stop[0] > box.start[0]]
        for other in active:
            if other.intersect(box) is not None:
                return f"{_span(box)} and {_span(other)} overlap"
        active.append(box)
    return None


def check_coverage(tree: TreeMetadata, receipts: Sequence[Receipt]) -> None:
    """Make sure that what all processes wrote makes up every array of the tree: no gap, no overlap.

    Raises:
        CorruptCheckpointError: names the first array that is not whole.
    """
    arrays = [
        (leaf, record)
        for leaf, record in enumerate(tree.leaves)
        if isinstance(record, ArrayRecord) and leaf not in tree.aliases
    ]
    if any(isinstance(receipt.items, ItemColumns) for receipt in receipts):
        from ckptcore.planning.partition import WrittenBoxes, makes_up  # only a job needs it

        columns = WrittenBoxes(tree.leaves, [ItemColumns.of(tree.leaves, receipt.items) for receipt in receipts])
        for leaf, record in arrays:
            if not makes_up(record.spec.shape, *columns.bounds(leaf)):
                _expect_whole(tree, leaf, record, list(columns.boxes(leaf)))
        return
    written: dict[int, list[Box]] = {}
    for receipt in receipts:
        for item in receipt.items:
            written.setdefault(item.leaf, []).extend(item.boxes)
    for leaf, record in arrays:
        _expect_whole(tree, leaf, record, written.get(leaf, ()))


def _expect_whole(tree: TreeMetadata, leaf: int, record: ArrayRecord, boxes: Sequence[Box]) -> None:
    reason = uncovered(record.spec, boxes)
    if reason is not None:
        raise CorruptCheckpointError(
            f"{format_path(tree.paths[leaf])} ({record.spec}) was not written whole: {reason}; "
            "the save is not committed. The leaf handler's shards do not add up to the array it describes"
        )


def _span(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True)) + "]"
