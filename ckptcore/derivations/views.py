"""Arrays whose elements are those of others in other places: cut out, concatenated, padded; and constants."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptcore.derivations.casts import copy_rounded, is_complex, is_whole
from ckptcore.derivations.derivation import OfNothing, place
from ckptcore.derivations.dtype_values import may_become
from ckptcore.io.elements import copy_elements
from ckptcore.model.arrays import ArraySpec, Box, HostArray, name_of_dtype
from ckptcore.protocols import DerivedArray, Part

__all__ = ["Concatenation", "Constant", "Cut", "concatenate", "constant", "cut", "pad"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A box of an array, as an array of its own.

    Attributes:
        of: the array.
        box: where in it.
    """

    of: DerivedArray
    box: Box

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        return ArraySpec(self.box.shape, self.of.spec.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The array that it is cut out of."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """The same elements."""
        return (Part(0, _shifted(box, self.box.start)),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray]:
        """All of it."""
        return (out,)

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the elements."""
        place((out,), parts)


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Arrays one after the other along an axis.

    Attributes:
        inputs: at least one; all of one dtype, and of one shape but for the axis.
        axis: along which.
    """

    inputs: tuple[DerivedArray, ...]
    axis: int
    starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Where along the axis each input begins, and where the last one ends, in elements."""

    def __post_init__(self) -> None:
        extents = [one.spec.shape[self.axis] for one in self.inputs]
        object.__setattr__(self, "starts", (0, *itertools.accumulate(extents)))

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        first, axis = self.inputs[0].spec, self.axis
        return ArraySpec((*first.shape[:axis], self.starts[-1], *first.shape[axis + 1 :]), first.dtype)

    def needed(self, box: Box) -> Sequence[Part]:
        """What lies in the box, of each input that has some of it."""
        return [
            Part(number, Box(_at(box.start, self.axis, low - begin), _at(box.stop, self.axis, high - begin)))
            for number, begin, low, high in self._pieces(box)
        ]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray]:
        """Bands of it."""
        origin, before = box.start[self.axis], (slice(None),) * self.axis
        return [out[(*before, slice(low - origin, high - origin))] for _, _, low, high in self._pieces(box)]

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the elements."""
        place(self.views(box, out), parts)

    def _pieces(self, box: Box) -> list[tuple[int, int, int, int]]:
        """By input that has some of a box: its number, where it begins, and from where to where the box has it."""
        start, stop = box.start[self.axis], box.stop[self.axis]
        first = bisect.bisect_right(self.starts, start) - 1
        pieces = []
        for number in range(first, len(self.inputs)):
            begin, end = self.starts[number], self.starts[number + 1]
            if begin >= stop:
                break
            low, high = max(begin, start), min(end, stop)
            if low < high:
                pieces.append((number, begin, low, high))
        return pieces


@dataclass(frozen=True, slots=True, eq=False)
class Constant(OfNothing):
    """Elements that are not stored.

    Attributes:
        spec: the array.
        value: an array of its dtype that is of its shape, or is repeated to it as NumPy does.
    """

    spec: ArraySpec
    value: HostArray

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the elements."""
        copy_elements(out, np.broadcast_to(self.value, self.spec.shape)[box.slices])


def cut(of: DerivedArray, box: Box) -> DerivedArray:
    """A box of an array, as an array of its own.

    Raises:
        ValueError: if the array has no such box.
    """
    shape = of.spec.shape
    if len(box.start) != len(shape) or not Box.whole(shape).contains(box):
        raise ValueError(f"{list(zip(box.start, box.stop, strict=True))} is no box of {of.spec}")
    if box == Box.whole(shape):
        return of
    if isinstance(of, Cut):
        return Cut(of.of, _shifted(box, of.box.start))
    if isinstance(of, Concatenation) and box.size:  # of layers that are stacked and taken apart again nothing is left
        return concatenate([cut(of.inputs[part.number], part.box) for part in of.needed(box)], of.axis)
    return Cut(of, box)


def concatenate(inputs: Sequence[DerivedArray], axis: int) -> DerivedArray:
    """Arrays one after the other along an axis.

    Raises:
        ValueError: if they do not fit, or there are none.
    """
    if not inputs:
        raise ValueError("there is no array to concatenate")
    first = inputs[0].spec
    if not 0 <= axis < len(first.shape):
        raise ValueError(f"{first} has no axis {axis} to concatenate along")
    for one in inputs:
        spec = one.spec
        fits = len(spec.shape) == len(first.shape) and _at(spec.shape, axis, 0) == _at(first.shape, axis, 0)
        if spec.dtype != first.dtype or not fits:
            raise ValueError(
                f"{first} and {spec} cannot be concatenated along axis {axis}: they are to differ in that extent only"
            )
    return inputs[0] if len(inputs) == 1 else Concatenation(tuple(inputs), axis)


def pad(of: DerivedArray, before: Sequence[int], after: Sequence[int], value: Any) -> DerivedArray:
    """An array with a value around it.

    Args:
        of: the array.
        before, after: by axis how many elements are put before its first and after its last.
        value: of these elements; a number that the array's dtype has.

    Raises:
        ValueError: if they are not one number for each axis, or below zero, or the dtype has no such value.
    """
    if not len(before) == len(after) == len(of.spec.shape) or min((*before, *after), default=0) < 0:
        raise ValueError(f"{of.spec} cannot be padded by {list(before)} before and {list(after)} after")
    for axis, sizes in enumerate(zip(before, after, strict=True)):
        around = [
            constant(ArraySpec(_at(of.spec.shape, axis, size), of.spec.dtype), value) if size else None
            for size in sizes
        ]
        parts = [one for one in (around[0], of, around[1]) if one is not None]
        of = concatenate(parts, axis)
    return of


def constant(spec: ArraySpec, value: Any) -> DerivedArray:
    """An array of elements that are not stored.

    Args:
        spec: the array.
        value: a number, or an array of that shape or one that NumPy repeats to it; every value one that the dtype has.

    Raises:
        ValueError: if it is no such array.
    """
    dtype = spec.numpy_dtype
    found = np.asarray(value)
    elements: HostArray = np.empty(found.shape, dtype)
    if found.dtype == dtype:
        copy_elements(elements, found)
    else:
        _convert(elements, found, value)
    try:
        np.broadcast_to(elements, spec.shape)
    except ValueError as error:
        raise ValueError(f"an array of shape {list(found.shape)} cannot be repeated to {spec}") from error
    return Constant(spec, elements)


def _convert(elements: HostArray, found: HostArray, value: Any) -> None:
    """Fill an array with values of another dtype.

    Raises:
        ValueError: if its own has no such values.
    """
    told, own = name_of_dtype(found.dtype), name_of_dtype(elements.dtype)
    try:
        if own == "bool":
            elements[...] = found
            lost = is_whole(found.dtype) and bool((elements != found).any())
            if lost or not is_whole(found.dtype):
                raise ValueError(f"give one that {own} has")
            return
        if not may_become(own, told):
            raise ValueError(f"a {told} is none of {own}")
        copy_rounded(elements, found)
        wide = np.complex128 if is_complex(elements.dtype) else np.float64
        if is_whole(found.dtype) and not is_whole(elements.dtype) and bool((elements.astype(wide) != found).any()):
            raise ValueError(f"give one that {own} has")
    except ValueError as error:
        raise ValueError(f"{own} cannot have the value {value!r}: {error}") from error


def _at(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    """The same with another number at one place."""
    return (*numbers[:axis], number, *numbers[axis + 1 :])


def _shifted(box: Box, by: tuple[int, ...]) -> Box:
    start = tuple([bound + offset for bound, offset in zip(box.start, by, strict=True)])
    return Box(start, tuple([bound + offset for bound, offset in zip(box.stop, by, strict=True)]))
