"""Transforms of single arrays: dtype, elements, extents and axes; and any function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.derivations import cast, cut, pad, reshape
from ckptcore.errors import TransformError
from ckptcore.model.arrays import AbstractArray, ArraySpec, Box, name_of_dtype
from ckptcore.model.tree import format_path
from ckptcore.protocols import DerivedArray, Transform
from ckptcore_transforms.arguments import (
    expect_callable,
    expect_dtype,
    expect_int,
    expect_ints,
    expect_number,
    expect_pattern,
)
from ckptcore_transforms.derived_arrays import computed, permute, weighted_sum
from ckptcore_transforms.patterns import Pattern, Template
from ckptcore_transforms.transform import TreeTransform, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, TreeRewriter

__all__ = [
    "Apply",
    "Cast",
    "EachArray",
    "MergeAxes",
    "Pad",
    "Reshape",
    "Scale",
    "Slice",
    "SplitAxis",
    "Transpose",
    "axis_of",
]


@dataclass(frozen=True, slots=True)
class EachArray(TreeTransform):
    """A transform that puts what is made of an array in its place, for each that a pattern matches.

    Attributes:
        pattern: of which arrays.
    """

    pattern: Pattern

    def __post_init__(self) -> None:
        expect_pattern(self, "pattern")

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        made = {}
        for path, _, array in tree.arrays(Template(self.pattern)):
            try:
                now = self.changed(array)
            except ValueError as error:
                raise TransformError(f"{format_path(path)}: {error}") from error
            leaf = tree.leaves[path]
            made[path] = {path: leaf if now is array else ArrayLeaf.of(now)}
        tree.replace(made)

    def changed(self, array: DerivedArray) -> DerivedArray:
        """What is made of one array.

        Raises:
            ValueError: if the array does not fit.
        """
        raise NotImplementedError


def axis_of(spec: ArraySpec, axis: int) -> int:
    """An axis, counted from the first.

    Raises:
        ValueError: if there is none.
    """
    count = len(spec.shape)
    if not -count <= axis < count:
        raise ValueError(f"{spec} has no axis {axis}")
    return axis % count


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


@dataclass(frozen=True, slots=True)
class Transpose(EachArray):
    """Arrays with their axes in another order.

    Attributes:
        pattern: of which arrays.
        axes: by axis of the result, the one that it was; None: the last two change places.
    """

    axes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        EachArray.__post_init__(self)
        if self.axes is not None:
            expect_ints(self, "axes")

    def changed(self, array: DerivedArray) -> DerivedArray:
        """See `EachArray`."""
        count = len(array.spec.shape)
        if self.axes is None and count < 2:
            raise ValueError(f"{array.spec} has no two axes to change places")
        axes = [*range(count - 2), count - 1, count - 2] if self.axes is None else self.axes
        return permute(array, axes)

    def describe(self) -> str:
        """See `Transform`."""
        how = "the last two axes" if self.axes is None else f"axes to {list(self.axes)}"
        return f"transpose {how} of {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        if self.axes is None:
            return self
        return Transpose(self.pattern, tuple(sorted(range(len(self.axes)), key=list(self.axes).__getitem__)))


@dataclass(frozen=True, slots=True)
class Reshape(EachArray):
    """Arrays with other axes; their elements stay in C order.

    Attributes:
        pattern: of which arrays.
        shape: extents; one may be -1, for what is left.
        stored: the shape that they are to have before, likewise; with it this can be taken back.
    """

    shape: Sequence[int]
    stored: Sequence[int] | None = None

    def __post_init__(self) -> None:
        EachArray.__post_init__(self)
        expect_ints(self, "shape")
        if self.stored is not None:
            expect_ints(self, "stored")

    def changed(self, array: DerivedArray) -> DerivedArray:
        """See `EachArray`."""
        if self.stored is not None and reshape(array, self.stored).spec.shape != array.spec.shape:
            raise ValueError(f"{list(self.stored)} was expected as its shape, found {list(array.spec.shape)}")
        return reshape(array, self.shape)

    def describe(self) -> str:
        """See `Transform`."""
        return f"reshape {Template(self.pattern)} to {list(self.shape)}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        if self.stored is None:
            raise not_invertible(self, "for nothing tells the shape that was stored; give it as Reshape(..., stored=)")
        return Reshape(self.pattern, self.stored, self.shape)


@dataclass(frozen=True, slots=True)
class SplitAxis(EachArray):
    """Arrays with several axes in place of one, as heads are told apart; their elements stay in C order.

    Attributes:
        pattern: of which arrays.
        axis: which one; of those that count from the end, -1 is the last.
        sizes: of the new axes; one may be -1, for what is left.
    """

    axis: int
    sizes: Sequence[int]

    def __post_init__(self) -> None:
        EachArray.__post_init__(self)
        expect_int(self, "axis")
        expect_ints(self, "sizes", least=1)

    def changed(self, array: DerivedArray) -> DerivedArray:
        """See `EachArray`."""
        shape, axis = array.spec.shape, axis_of(array.spec, self.axis)
        return reshape(array, (*shape[:axis], *self.sizes, *shape[axis + 1 :]))

    def describe(self) -> str:
        """See `Transform`."""
        return f"split axis {self.axis} of {Template(self.pattern)} into {list(self.sizes)}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        first = self.axis if self.axis >= 0 else self.axis - len(self.sizes) + 1
        return MergeAxes(self.pattern, first, self.sizes)


@dataclass(frozen=True, slots=True)
class MergeAxes(EachArray):
    """Arrays with one axis in place of several that follow each other; their elements stay in C order.

    Attributes:
        pattern: of which arrays.
        axis: the first one; of those that count from the end, -1 is the last.
        sizes: what the axes are to have; one may be -1, for any number.
    """

    axis: int
    sizes: Sequence[int]

    def __post_init__(self) -> None:
        EachArray.__post_init__(self)
        expect_int(self, "axis")
        expect_ints(self, "sizes", least=1)

    def changed(self, array: DerivedArray) -> DerivedArray:
        """See `EachArray`."""
        shape, axis = array.spec.shape, axis_of(array.spec, self.axis)
        found = shape[axis : axis + len(self.sizes)]
        if len(found) < len(self.sizes) or any(
            size not in (-1, own) for size, own in zip(self.sizes, found, strict=True)
        ):
            raise ValueError(f"{list(self.sizes)} was expected from axis {axis} on, found {array.spec}")
        return reshape(array, (*shape[:axis], math.prod(found), *shape[axis + len(found) :]))

    def describe(self) -> str:
        """See `Transform`."""
        return f"merge axes {list(self.sizes)} of {Template(self.pattern)}, from {self.axis} on"

    def inverse(self) -> Transform:
        """See `Transform`."""
        last = self.axis if self.axis >= 0 else self.axis + len(self.sizes) - 1
        if list(self.sizes).count(-1) > 1:
            raise not_invertible(self, "for more than one of its sizes is not told")
        return SplitAxis(self.pattern, last, self.sizes)
