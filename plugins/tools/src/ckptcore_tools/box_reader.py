"""Reader of boxes of arrays of an open checkpoint, and the division of arrays into boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptcore.loading.reading import allocate_for, check_sizes, incomplete_read
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray
from ckptcore.on_demand.open_state import OpenState
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.planning import plan_read


def boxes_within(spec: ArraySpec, max_bytes: int) -> Iterator[Box]:
    """Divide an array into boxes of at most `max_bytes`, but at least one element each, in C order."""
    if spec.nbytes <= max_bytes or not spec.shape:
        yield Box.whole(spec.shape)
        return
    yield from _boxes(spec.shape, (), (), spec.numpy_dtype.itemsize, max_bytes)


def _boxes(
    shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...], itemsize: int, max_bytes: int
) -> Iterator[Box]:
    """Divide the part of an array at fixed indices of the leading axes. `shape` is the shape of the other axes."""
    row = ArraySpec(shape[1:], "uint8").size * itemsize
    rows = max_bytes // row if row else shape[0]
    if rows or len(shape) == 1:
        step = max(1, rows)
        for first in range(0, shape[0], step):
            last = min(first + step, shape[0])
            yield Box((*start, first, *(0,) * (len(shape) - 1)), (*stop, last, *shape[1:]))
        return
    for index in range(shape[0]):
        yield from _boxes(shape[1:], (*start, index), (*stop, index + 1), itemsize, max_bytes)


class BoxReader:
    """Reads boxes of the arrays of one checkpoint."""

    def __init__(self, state: OpenState) -> None:
        """Read from an open checkpoint."""
        self._state = state

    def read(self, boxes: Mapping[int, Box]) -> dict[int, HostArray]:
        """Read one box of each of these arrays. Keys are leaf numbers."""
        return self._state.guard(lambda opened: _read(opened, boxes))


def _read(opened: Checkpoint, boxes: Mapping[int, Box]) -> dict[int, HostArray]:
    check_sizes(opened, boxes)
    elements = {
        leaf: allocate_for(opened, leaf, ArraySpec(box.shape, record.spec.dtype))
        for leaf, box in boxes.items()
        if isinstance(record := opened.tree.leaves[leaf], ArrayRecord)
    }
    plan = plan_read(opened.tree, [(leaf, (box,)) for leaf, box in boxes.items()])
    missing = set(range(len(boxes))).difference(opened.read(plan, list(elements.values())))
    if missing:
        raise incomplete_read(opened, list(boxes)[min(missing)])
    return elements
