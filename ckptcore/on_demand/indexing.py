"""Basic indexing as in NumPy: converts an index to a box with the requested elements, and an index into that box."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any, Final, SupportsIndex, TypeAlias

import numpy as np

from ckptcore.model.arrays import Box
from ckptcore.records import dataclass

BasicIndex: TypeAlias = (
    "SupportsIndex | slice | EllipsisType | None | tuple[SupportsIndex | slice | EllipsisType | None, ...]"
)
"""A basic index of NumPy: an integer, a slice, ``...``, None (a new axis), or a tuple of them."""

_ADVICE: Final = "read a box that contains the elements, such as array[2:9], and index the result"


@dataclass(frozen=True, slots=True)
class AxisIndex:
    """An index of an array, by axis.

    Attributes:
        starts, steps, counts: along each axis, the lowest requested index, the positive step to the next index, and the
            number of indices.
        local: the index that converts an array of the requested elements, of shape `counts`, to the result.
        shape: shape of the result.
    """

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    local: tuple[int | slice | EllipsisType | None, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The smallest box that contains all requested elements."""
        stops = [
            start + (count - 1) * step + 1 if count else start
            for start, step, count in zip(self.starts, self.steps, self.counts, strict=True)
        ]
        return Box(self.starts, tuple(stops))

    @property
    def elements(self) -> Any:
        """The index of the array that returns a view of the requested elements, of shape `counts`."""
        # The ellipsis keeps an array without axes from becoming a scalar.
        return (*map(slice, self.starts, self.box.stop, self.steps), ...)

    @property
    def is_box(self) -> bool:
        """True if all elements of the box are requested."""
        return all(step == 1 or count <= 1 for step, count in zip(self.steps, self.counts, strict=True))

    @property
    def is_plain(self) -> bool:
        """True if the requested elements are the result: `local` removes, adds and reverses no axis."""
        return bool(self.local) and all(
            entry is ... or (isinstance(entry, slice) and entry.step is None) for entry in self.local
        )


def index_box(index: object, shape: tuple[int, ...]) -> AxisIndex:
    """Convert an index of an array of the given shape.

    Raises:
        IndexError: there are more indices than axes, an integer is out of bounds, or an index is not basic (arrays,
            lists, booleans).
        TypeError, ValueError: a bound of a slice is not an integer, or its step is 0.
    """
    entries = index if isinstance(index, tuple) else (index,)
    given = sum([entry is not None and entry is not ... for entry in entries])
    ellipses = sum([entry is ... for entry in entries])
    if ellipses > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if given > len(shape):
        raise IndexError(f"too many indices: the array has {len(shape)} axes, but {given} were indexed")
    left = len(shape) - given
    if not ellipses:
        entries = (*entries, ...)
    starts: list[int] = []
    steps: list[int] = []
    counts: list[int] = []
    local: list[int | slice | EllipsisType | None] = []
    result: list[int] = []
    for entry in entries:
        if entry is None:
            local.append(None)
            result.append(1)
            continue
        if entry is ...:
            whole = shape[len(starts) : len(starts) + left]
            starts.extend([0] * left)
            steps.extend([1] * left)
            counts.extend(whole)
            if ellipses:  # an explicit ellipsis keeps an array without axes from becoming a scalar
                local.append(...)
            else:
                local.extend([slice(None)] * left)
            result.extend(whole)
            continue
        axis = len(starts)
        if isinstance(entry, slice):
            chosen = range(shape[axis])[entry] or range(0)
            local.append(slice(None, None, -1) if chosen.step < 0 else slice(None))
            result.append(len(chosen))
            if chosen.step < 0:
                chosen = chosen[::-1]
        else:
            number = _integer_of(entry, axis, shape[axis])
            chosen = range(number, number + 1)
            local.append(0)
        starts.append(chosen.start)
        steps.append(chosen.step)
        counts.append(len(chosen))
    return AxisIndex(tuple(starts), tuple(steps), tuple(counts), tuple(local), tuple(result))


def rows_of(index: object, extent: int) -> tuple[int, int] | None:
    """Return the range of the first axis that an index needs; None if the range is empty, or `index_box` is needed.

    Does not check other axes. If the result is a range, the index has only integers and slices, so that it can be
    passed to NumPy.

    Args:
        index: an index of an array.
        extent: length of the first axis of the array.
    """
    kind = type(index)
    if kind is tuple:
        entries: tuple[object, ...] = index  # type: ignore[assignment]  # by its type
        for entry in entries:
            if type(entry) is not slice and type(entry) is not int:
                return None
        if not entries:
            return None
        index = entries[0]
        kind = type(index)
    if kind is slice:
        start, stop, step = index.indices(extent)  # type: ignore[attr-defined]  # by its type
        return (start, stop) if step > 0 and start < stop else None
    if kind is int:
        row: int = index  # type: ignore[assignment]  # by its type
        if -extent <= row < extent:
            return (row, row + 1) if row >= 0 else (row + extent, row + extent + 1)
    return None


def _integer_of(entry: object, axis: int, extent: int) -> int:
    if isinstance(entry, bool | np.bool_) or (
        isinstance(entry, np.ndarray) and (entry.ndim or entry.dtype.kind == "b")
    ):
        raise _not_basic(entry)
    try:
        number = operator.index(entry)  # type: ignore[arg-type]  # refused below if it is no index
    except TypeError:
        raise _not_basic(entry) from None
    if not -extent <= number < extent:
        raise IndexError(f"index {number} is out of bounds for axis {axis} with size {extent}")
    return number + extent if number < 0 else number


def _not_basic(entry: object) -> IndexError:
    return IndexError(
        f"a stored array is indexed with integers, slices, '...' and None (basic indexing of NumPy), not with a "
        f"{type(entry).__name__}: {_ADVICE}"
    )
