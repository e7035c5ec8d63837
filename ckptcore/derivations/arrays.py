"""Stored arrays, and arrays that are cut out of others, concatenated, padded or constant."""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from ckptcore.derivations.dtypes import accepts_kind_of, copy_rounded, is_complex, is_int_or_bool
from ckptcore.io.elements import copy_elements
from ckptcore.model.arrays import ArraySpec, Box, HostArray, name_of_dtype
from ckptcore.protocols import DerivedArray, Part
from ckptcore.records import dataclass


class WithoutInputs:
    """A derived array without inputs."""

    __slots__ = ()

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """No inputs."""
        return ()

    def needed(self, box: Box) -> Sequence[Part]:
        """Return no boxes."""
        return ()

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return None: no input is copied."""
        return None


@dataclass(frozen=True, slots=True)
class Stored(WithoutInputs):
    """An array of a checkpoint, in its stored form. It is read, not computed.

    Attributes:
        spec: stored shape and dtype.
        leaf: its leaf number in the checkpoint.
        checkpoint: 0 for the checkpoint that is loaded; 1 and up for additional checkpoints.
    """

    spec: ArraySpec
    leaf: int
    checkpoint: int = 0

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Raise: a stored array is read, not computed."""
        raise NotImplementedError("a stored array is read, not computed")


class WholeArray(ABC):
    """A derived array that is computed as a whole from whole inputs.

    It is computed once for all boxes that are read together.

    Attributes:
        inputs: the arrays that it is computed from.
        spec: shape and dtype of the array.
    """

    __slots__ = ()

    inputs: tuple[DerivedArray, ...]
    spec: ArraySpec

    @abstractmethod
    def compute(self, parts: Sequence[HostArray]) -> HostArray:
        """Return the whole array.

        Args:
            parts: the whole inputs, without empty inputs.
        """

    def needed(self, box: Box) -> Sequence[Part]:
        """Return all elements of every input."""
        wholes = [(number, Box.whole(array.spec.shape)) for number, array in enumerate(self.inputs)]
        return [Part(number, whole) for number, whole in wholes if whole.size]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return None: the elements are computed."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Compute the array and copy a box of it."""
        copy_elements(out, self.compute(parts)[box.slices])


class ChangedArray(ABC):
    """An array that has the elements of another array, changed in place by further arrays, one after the other.

    The first part of `needed` is a box of the first input that contains the requested box. It is read into memory of
    its own, and then changed as a whole. The other parts are whole inputs. They are read in order, and only a few MiB
    of them are in memory at a time.

    Attributes:
        inputs: the array that is changed, and the arrays that change it, which must be `Stored`.
        spec: shape and dtype of the array, and of its first input.
    """

    __slots__ = ()

    inputs: tuple[DerivedArray, ...]
    spec: ArraySpec

    @abstractmethod
    def needed(self, box: Box) -> Sequence[Part]:
        """Return the box to change, and the arrays that change it, in order."""

    @abstractmethod
    def change(self, number: int, part: HostArray, elements: HostArray) -> None:
        """Change elements.

        Args:
            number: the number of the part in `needed`, from 1.
            part: its elements.
            elements: the elements of part 0 after the changes of the parts before; C-contiguous.

        Raises:
            CorruptCheckpointError: the part does not fit the elements.
        """

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return None: the elements are changed."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Raise: parts are applied one by one."""
        raise NotImplementedError("parts of this array are applied one by one")


@dataclass(frozen=True, slots=True)
class Cut:
    """A box of an array, as an array of its own.

    Attributes:
        of: the array.
        box: the elements that are cut out.
    """

    of: DerivedArray
    box: Box

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of the result."""
        return ArraySpec(self.box.shape, self.of.spec.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The array that contains the box."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the box of the input that has the same elements."""
        return (Part(0, _shifted(box, self.box.start)),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray]:
        """Return the whole output memory as the view of the only part."""
        return (out,)

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the elements."""
        copy_parts((out,), parts)


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Arrays concatenated along an axis.

    Attributes:
        inputs: at least one array. All have the same dtype, and the same shape except along the axis.
        axis: the axis.
    """

    inputs: tuple[DerivedArray, ...]
    axis: int
    starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Start of each input along the axis, and the end of the last input, in elements."""

    def __post_init__(self) -> None:
        extents = [array.spec.shape[self.axis] for array in self.inputs]
        object.__setattr__(self, "starts", (0, *itertools.accumulate(extents)))

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of the result."""
        first, axis = self.inputs[0].spec, self.axis
        return ArraySpec((*first.shape[:axis], self.starts[-1], *first.shape[axis + 1 :]), first.dtype)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the part of the box that is in each input, in coordinates of the input."""
        return [
            Part(number, Box(_at(box.start, self.axis, low - begin), _at(box.stop, self.axis, high - begin)))
            for number, begin, low, high in self._pieces(box)
        ]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray]:
        """Return a view of the output memory for each part."""
        origin, before = box.start[self.axis], (slice(None),) * self.axis
        return [out[(*before, slice(low - origin, high - origin))] for _, _, low, high in self._pieces(box)]

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the elements."""
        copy_parts(self.views(box, out), parts)

    def _pieces(self, box: Box) -> list[tuple[int, int, int, int]]:
        """Return the number and start of each input that intersects a box, and the bounds of the intersection."""
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
class Constant(WithoutInputs):
    """An array of given elements, which are not stored.

    Attributes:
        spec: shape and dtype of the array.
        value: an array of the same dtype that NumPy broadcasts to the shape.
    """

    spec: ArraySpec
    value: HostArray

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the elements."""
        copy_elements(out, np.broadcast_to(self.value, self.spec.shape)[box.slices])


def cut(of: DerivedArray, box: Box) -> DerivedArray:
    """Return a box of an array, as an array of its own.

    Raises:
        ValueError: if the array has no such box.
    """
    shape = of.spec.shape
    if len(box.start) != len(shape) or not Box.whole(shape).contains(box):
        raise ValueError(f"{list(zip(box.start, box.stop, strict=True))} is not a box of {of.spec}")
    if box == Box.whole(shape):
        return of
    if isinstance(of, Cut):
        return Cut(of.of, _shifted(box, of.box.start))
    if isinstance(of, Concatenation) and box.size:  # such as one layer of stacked layers
        return concatenate([cut(of.inputs[part.number], part.box) for part in of.needed(box)], of.axis)
    return Cut(of, box)


def concatenate(inputs: Sequence[DerivedArray], axis: int) -> DerivedArray:
    """Concatenate arrays along an axis.

    Raises:
        ValueError: if there are no inputs, the axis does not exist, or the dtypes or other extents differ.
    """
    if not inputs:
        raise ValueError("concatenate at least one array")
    first = inputs[0].spec
    if not 0 <= axis < len(first.shape):
        raise ValueError(f"{first} has no axis {axis} to concatenate along")
    for array in inputs:
        spec = array.spec
        fits = len(spec.shape) == len(first.shape) and _at(spec.shape, axis, 0) == _at(first.shape, axis, 0)
        if spec.dtype != first.dtype or not fits:
            raise ValueError(
                f"{first} and {spec} cannot be concatenated along axis {axis}: dtype and other extents must be equal"
            )
    return inputs[0] if len(inputs) == 1 else Concatenation(tuple(inputs), axis)


def pad(of: DerivedArray, before: Sequence[int], after: Sequence[int], value: Any) -> DerivedArray:
    """Pad an array with a value.

    Args:
        of: the array.
        before, after: by axis, the number of elements to add before the first element and after the last element.
        value: a number that the dtype of the array can represent. As in `constant`, floats are rounded.

    Raises:
        ValueError: if `before` or `after` does not have one number for each axis, a number is negative, or the dtype
            cannot represent the value.
    """
    if not len(before) == len(after) == len(of.spec.shape) or min((*before, *after), default=0) < 0:
        raise ValueError(
            f"{of.spec} cannot be padded by {list(before)} before and {list(after)} after: give a number for each axis"
        )
    for axis, sizes in enumerate(zip(before, after, strict=True)):
        padding = [
            constant(ArraySpec(_at(of.spec.shape, axis, size), of.spec.dtype), value) if size else None
            for size in sizes
        ]
        parts = [part for part in (padding[0], of, padding[1]) if part is not None]
        of = concatenate(parts, axis)
    return of


def constant(spec: ArraySpec, value: Any) -> DerivedArray:
    """Return an array of given elements.

    Args:
        spec: shape and dtype of the array.
        value: a number, or an array that NumPy broadcasts to the shape. The dtype must be able to represent ints and
            bools exactly. Floats and complex numbers within its range are rounded to it.

    Raises:
        ValueError: if the dtype or the shape does not fit.
    """
    dtype = spec.numpy_dtype
    given = np.asarray(value)
    elements: HostArray = np.empty(given.shape, dtype)
    if given.dtype == dtype:
        copy_elements(elements, given)
    else:
        _convert(elements, given, value)
    try:
        np.broadcast_to(elements, spec.shape)
    except ValueError as error:
        raise ValueError(f"a value of shape {list(given.shape)} cannot be broadcast to {spec}") from error
    return Constant(spec, elements)


def _convert(elements: HostArray, given: HostArray, value: Any) -> None:
    """Fill an array with values of another dtype. Floats and complex numbers are rounded, ints and bools are not.

    Args:
        elements: the array to fill.
        given: the values as an array of the same shape.
        value: the values as the caller passed them, for errors.

    Raises:
        ValueError: if the dtype of `elements` cannot represent one of the values.
    """
    kind, own = name_of_dtype(given.dtype), name_of_dtype(elements.dtype)
    is_exact = is_int_or_bool(given.dtype)
    try:
        if own == "bool" and is_exact:
            elements[...] = given
        elif accepts_kind_of(own, kind):
            copy_rounded(elements, given)
        else:
            raise ValueError(f"{kind} values are not cast to {own}")
        wide = np.complex128 if is_complex(elements.dtype) else np.float64
        if is_exact and bool((elements.astype(wide) != given).any()):
            raise ValueError(f"give a value of {own}")
    except ValueError as error:
        raise ValueError(f"{own} cannot represent {value!r}: {error}") from error


def _at(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    """Return a copy of `numbers` with the entry of an axis replaced."""
    return (*numbers[:axis], number, *numbers[axis + 1 :])


def _shifted(box: Box, by: tuple[int, ...]) -> Box:
    start = tuple([bound + offset for bound, offset in zip(box.start, by, strict=True)])
    return Box(start, tuple([bound + offset for bound, offset in zip(box.stop, by, strict=True)]))


def walk(array: DerivedArray) -> Iterator[DerivedArray]:
    """Yield a derived array and, recursively, its inputs. An input that occurs several times is yielded each time."""
    stack = [array]
    while stack:
        part = stack.pop()
        yield part
        stack.extend(part.inputs)


def copy_parts(views: Sequence[HostArray], parts: Sequence[HostArray]) -> None:
    """Copy parts to views."""
    for view, part in zip(views, parts, strict=True):
        copy_elements(view, part)
