"""Transforms of the elements of single arrays: other dtypes, fewer or more of them, or any function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptcore.derivations import cast, cut, pad
from ckptcore.model.arrays import AbstractArray, ArraySpec, Box, name_of_dtype
from ckptcore.protocols import DerivedArray, Transform
from ckptcore_transforms.arguments import expect_callable, expect_dtype, expect_int, expect_number
from ckptcore_transforms.derived_arrays import computed, weighted_sum
from ckptcore_transforms.each_array import EachArray, axis_of
from ckptcore_transforms.patterns import Template
from ckptcore_transforms.transform import not_invertible

__all__ = ["Apply", "Cast", "Pad", "Scale", "Slice"]


@dataclass(frozen=True, slots=True)
class Cast(EachArray):
    """Arrays in another dtype, rounded as NumPy does: what the dtype has no place for wraps or becomes infinite.

    Attributes:
        pattern: of which arrays.
        dtype: the name of the dtype.
        stored: the dtype that they are to be stored in; others are refused. With it the cast can be taken back.
    """

    dtype: str
    stored: str | None = None

    def __post_init__(self) -> None:
        EachArray.__post_init__(self)
        object.__setattr__(self, "dtype", expect_dtype(self, "dtype"))
        if self.stored is not None:
            object.__setattr__(self, "stored", expect_dtype(self, "stored"))

    def changed(self, array: DerivedArray) -> DerivedArray:
        """See `EachArray`."""
        if self.stored is not None and array.spec.dtype != self.stored:
            raise ValueError(f"{self.stored} was expected to be stored, found {array.spec.dtype}")
        return cast(array, self.dtype)

    def describe(self) -> str:
        """See `Transform`."""
        return f"cast {Template(self.pattern)} to {self.dtype}"

    def inverse(self) -> Transform:
        """See `Transform`: of values that both dtypes have."""
        if self.stored is None:
            raise not_invertible(self, "for nothing tells the dtype that was stored; give it as Cast(..., stored=)")
        return Cast(self.pattern, self.stored, self.dtype)


@dataclass(frozen=True, slots=True)
class Scale(EachArray):
    """Arrays times a number, computed in float32, or float64 where they are.

    Attributes:
        pattern: of which arrays.
        factor: the number.
        undo: what takes that back; None: 1 / factor, where no element is rounded by either: a power of two, other than 0.
    """

    factor: float
    undo: float | None = None

    def __post_init__(self) -> None:
        EachArray.__post_init__(self)
        expect_number(self, "factor")
        if self.undo is not None:
            expect_number(self, "undo")

    def changed(self, array: DerivedArray) -> DerivedArray:
        """See `EachArray`."""
        return weighted_sum([array], [self.factor])

    def describe(self) -> str:
        """See `Transform`."""
        return f"multiply {Template(self.pattern)} by {self.factor}"

    def inverse(self) -> Transform:
        """See `Transform`: exact for a power of two, but for the smallest and largest numbers; else rounded."""
        undo = self.undo
        if undo is None:
            if abs(math.frexp(self.factor)[0]) != 0.5:
                raise not_invertible(self, "for elements are rounded; give Scale(..., undo=) where that does no harm")
            undo = 1 / self.factor
        return Scale(self.pattern, undo, self.factor)


@dataclass(frozen=True, slots=True)
class Slice(EachArray):
    """Arrays from one index to another along an axis; what is left out is not read.

    Attributes:
        pattern: of which arrays.
        start, stop: the first index, and the one behind the last; both are in the arrays.
        axis: along which; of those that count from the end, -1 is the last.
    """

    start: int
    stop: int
    axis: int = 0

    def __post_init__(self) -> None:
        EachArray.__post_init__(self)
        for name in ("start", "stop", "axis"):
            expect_int(self, name)

    def changed(self, array: DerivedArray) -> DerivedArray:
        """See `EachArray`."""
        shape = array.spec.shape
        axis = axis_of(array.spec, self.axis)
        if not 0 <= self.start <= self.stop <= shape[axis]:
            raise ValueError(f"{array.spec} has no {self.start}:{self.stop} along axis {axis}")
        return cut(array, Box.whole(shape).band(axis, self.start, self.stop))

    def describe(self) -> str:
        """See `Transform`."""
        return f"take {self.start}:{self.stop} along axis {self.axis} of {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        raise not_invertible(self, "for what is left out is not there")


@dataclass(frozen=True, slots=True)
class Pad(EachArray):
    """Arrays with a value behind their ends, as a vocabulary grows.

    Attributes:
        pattern: of which arrays.
        size: the extent that they get along the axis; no less than they have.
        axis: along which; of those that count from the end, -1 is the last.
        value: of the new elements.
        stored: the extent that they are to have before; with it this can be taken back.
    """

    size: int
    axis: int = 0
    value: float = 0
    stored: int | None = None

    def __post_init__(self) -> None:
        EachArray.__post_init__(self)
        for name in ("size", "axis") if self.stored is None else ("size", "axis", "stored"):
            expect_int(self, name)

    def changed(self, array: DerivedArray) -> DerivedArray:
        """See `EachArray`."""
        shape = array.spec.shape
        axis = axis_of(array.spec, self.axis)
        if self.size < shape[axis] or self.stored not in (None, shape[axis]):
            expected = f"at most {self.size}" if self.stored is None else f"{self.stored}"
            raise ValueError(f"{expected} was expected along axis {axis}, found {array.spec}")
        after = [0] * len(shape)
        after[axis] = self.size - shape[axis]
        return pad(array, [0] * len(shape), after, self.value)

    def describe(self) -> str:
        """See `Transform`."""
        return f"pad {Template(self.pattern)} with {self.value} to {self.size} along axis {self.axis}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        if self.stored is None:
            raise not_invertible(self, "for nothing tells the extent that was stored; give it as Pad(..., stored=)")
        return Slice(self.pattern, 0, self.stored, self.axis)


@dataclass(frozen=True, slots=True)
class Apply(EachArray):
    """Arrays that a function makes of others, one of one. Whoever needs a part of the result reads and computes all of it.

    Attributes:
        pattern: of which arrays.
        function: gets a NumPy array and gives one; also called from other threads, and more than once.
        result: gives the `AbstractArray` of the result for that of an array; None: shape and dtype stay.
        undo: the function the other way, if there is one.
    """

    function: Callable[[Any], Any]
    result: Callable[[AbstractArray], AbstractArray] | None = None
    undo: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        EachArray.__post_init__(self)
        expect_callable(self, "function")
        if self.result is not None:
            expect_callable(self, "result")
        if self.undo is not None:
            expect_callable(self, "undo")

    def changed(self, array: DerivedArray) -> DerivedArray:
        """See `EachArray`."""
        spec = array.spec
        if self.result is not None:
            told = self.result(AbstractArray(spec.shape, spec.dtype))
            spec = ArraySpec(told.shape, name_of_dtype(told.dtype))
        return computed([array], self.function, spec)

    def describe(self) -> str:
        """See `Transform`."""
        return f"apply {getattr(self.function, '__qualname__', self.function)} to {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        if self.undo is None or self.result is not None:
            raise not_invertible(
                self, "for no function that does so is given as Apply(..., undo=), or the shape or dtype changes"
            )
        return Apply(self.pattern, self.undo, None, self.function)
