"""Reshaped arrays: the elements of another array in C order, with another shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

from ckptcore.derivations.arrays import copy_parts
from ckptcore.io.elements import copy_elements, plain
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.planning import boxes_of_range
from ckptcore.protocols import DerivedArray, Part
from ckptcore.records import dataclass

_MAX_PARTS: Final = 1024
"""Maximum number of input boxes for one box. If there are more, their bounding box is read instead."""

_Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""A start and a stop for each axis, in elements."""


@dataclass(frozen=True, slots=True)
class _AxisGroup:
    """Adjacent axes of the input, and the adjacent axes of the result to which they are reshaped.

    Attributes:
        inner: the extents in the input.
        outer: the extents in the result.
    """

    inner: tuple[int, ...]
    outer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _ContiguousPart:
    """A box along the input axes of a group, whose elements are contiguous in the box of the result.

    Attributes:
        ranges: the box.
        offset: the position of its first element in the box of the result, in C order.
        count: its number of elements.
    """

    ranges: _Ranges
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The elements of an array in C order, with another shape.

    Attributes:
        of: the array.
        shape: shape of the result, with the same number of elements.
    """

    of: DerivedArray
    shape: tuple[int, ...]

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of the result."""
        return ArraySpec(self.shape, self.of.spec.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The array."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return boxes of the input with exactly the elements of `box`; their bounding box if there are too many."""
        groups = self._pieces(box)
        if groups is None:
            ranges = [_bounding_ranges(group, of_box) for group, of_box in self._of_groups(box)]
            return (Part(0, _box(ranges)),)
        return [Part(0, _box([piece.ranges for piece in pieces])) for pieces in itertools.product(*groups)]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return a view of the memory for each part; None if NumPy cannot view the elements in this order."""
        groups = self._pieces(box)
        if groups is None:
            return None
        sizes = [_size(of_box) for _, of_box in self._of_groups(box)]
        merged = out.reshape(sizes)
        if not np.may_share_memory(merged, out):
            return None  # NumPy copied
        views = []
        for pieces in itertools.product(*groups):
            view = merged[tuple([slice(piece.offset, piece.offset + piece.count) for piece in pieces])]
            views.append(view.reshape(_box([piece.ranges for piece in pieces]).shape))
        return views

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the elements."""
        groups = self._pieces(box)
        if groups is None:
            (part,) = parts
            copy_elements(out, self._pick(box, part))
            return
        target: HostArray = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        views = self.views(box, target)
        assert views is not None  # views of memory in C order always exist
        copy_parts(views, parts)
        if target is not out:
            copy_elements(out, target)

    def _pick(self, box: Box, around: HostArray) -> HostArray:
        """Return a view of the elements of a box in the memory of their bounding box."""
        groups = list(self._of_groups(box))
        ranges = [_bounding_ranges(group, of_box) for group, of_box in groups]
        merged = plain(around).reshape([_size(of_group) for of_group in ranges])
        start, shape, strides = [], [], []
        for (group, of_box), of_group, stride in zip(groups, ranges, merged.strides, strict=True):
            steps = _steps(group.outer)
            first = sum([low * step for (low, _), step in zip(of_box, steps, strict=True)])
            start.append(
                first - sum([low * step for (low, _), step in zip(of_group, _steps(group.inner), strict=True)])
            )
            shape.extend([high - low for low, high in of_box])
            strides.extend([step * stride for step in steps])
        origin: HostArray = merged[tuple([slice(offset, None) for offset in start])]
        return np.lib.stride_tricks.as_strided(origin, shape, strides, writeable=False).view(around.dtype)

    def _of_groups(self, box: Box) -> Iterator[tuple[_AxisGroup, _Ranges]]:
        """Yield each group of axes with the part of the box along its result axes."""
        ranges = tuple(zip(box.start, box.stop, strict=True))
        first = 0
        for group in _groups(self.of.spec.shape, self.shape):
            yield group, ranges[first : first + len(group.outer)]
            first += len(group.outer)

    def _pieces(self, box: Box) -> list[list[_ContiguousPart]] | None:
        """Return the input boxes for each group of axes; None if there are too many."""
        groups, most = [], _MAX_PARTS
        for group, of_box in self._of_groups(box):
            pieces = list(itertools.islice(_pieces(group, of_box), most + 1))
            if len(pieces) > most:
                return None
            most //= len(pieces)
            groups.append(pieces)
        return groups


def reshape(of: DerivedArray, shape: Sequence[int]) -> DerivedArray:
    """Reshape an array in C order.

    Args:
        of: the array.
        shape: shape of the result, in elements; one extent may be -1, to be computed from the others.

    Raises:
        ValueError: if the number of elements differs, or an extent is negative.
    """
    wanted = list(shape)
    spec = of.spec
    if wanted.count(-1) == 1:
        others = math.prod([extent for extent in wanted if extent != -1])
        if others > 0 and spec.size % others == 0:
            wanted[wanted.index(-1)] = spec.size // others
    if math.prod(wanted) != spec.size or min(wanted, default=0) < 0:
        raise ValueError(f"{spec} has {spec.size} elements and cannot be reshaped to {list(shape)}")
    if isinstance(of, Reshaped):
        return reshape(of.of, wanted)
    return of if tuple(wanted) == spec.shape else Reshaped(of, tuple(wanted))


def _groups(inner: tuple[int, ...], outer: tuple[int, ...]) -> Iterator[_AxisGroup]:
    """Split the axes of two shapes with the same number of elements, above 0, into the smallest matching groups."""
    i = j = 0
    while i < len(inner) or j < len(outer):
        first_i, first_j = i, j
        inside, outside = 1, 1
        if i < len(inner):
            inside, i = inner[i], i + 1
        if j < len(outer):
            outside, j = outer[j], j + 1
        while inside != outside:
            if inside < outside:
                inside, i = inside * inner[i], i + 1
            else:
                outside, j = outside * outer[j], j + 1
        yield _AxisGroup(inner[first_i:i], outer[first_j:j])


def _pieces(group: _AxisGroup, of_box: _Ranges) -> Iterator[_ContiguousPart]:
    """Yield, in order, the boxes along the input axes of a group that make up a box along its result axes."""
    if group.inner == group.outer:
        yield _ContiguousPart(of_box, 0, _size(of_box))
        return
    steps = _steps(group.outer)
    # Elements are contiguous along the trailing axes that the box covers completely, and along the axis before them.
    whole = len(of_box)
    while whole and of_box[whole - 1] == (0, group.outer[whole - 1]):
        whole -= 1
    along = max(whole - 1, 0)
    length = _size(of_box[along:])
    within = sum([low * step for (low, _), step in zip(of_box[along:], steps[along:], strict=True)])
    offset = 0
    for index in itertools.product(*[range(low, high) for low, high in of_box[:along]]):
        first = within + sum([number * step for number, step in zip(index, steps[:along], strict=True)])
        for part in boxes_of_range(group.inner, first, first + length):
            yield _ContiguousPart(tuple(zip(part.start, part.stop, strict=True)), offset, part.size)
            offset += part.size


def _bounding_ranges(group: _AxisGroup, of_box: _Ranges) -> _Ranges:
    """Return the smallest contiguous box along the input axes that contains a box along the result axes."""
    if group.inner == group.outer:
        return of_box
    steps = _steps(group.outer)
    first = sum([low * step for (low, _), step in zip(of_box, steps, strict=True)])
    last = sum([(high - 1) * step for (_, high), step in zip(of_box, steps, strict=True)])
    ranges: list[tuple[int, int]] = []
    for axis, step in enumerate(_steps(group.inner)):
        low, high = first // step, last // step
        ranges.append((low, high + 1))
        if low != high:  # the following axes are complete, so that the box is contiguous
            return (*ranges, *[(0, extent) for extent in group.inner[axis + 1 :]])
        first, last = first - low * step, last - low * step
    return tuple(ranges)


def _steps(shape: tuple[int, ...]) -> list[int]:
    """Return the stride of each axis in C order, in elements."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _size(ranges: _Ranges) -> int:
    return math.prod([high - low for low, high in ranges])


def _box(ranges: Sequence[_Ranges]) -> Box:
    axes = [bounds for of_group in ranges for bounds in of_group]
    return Box(tuple([low for low, _ in axes]), tuple([high for _, high in axes]))
