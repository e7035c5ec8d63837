"""Transforms of the axes of single arrays: in another order, or others over the same elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckptcore.derivations import reshape
from ckptcore.protocols import DerivedArray, Transform
from ckptcore_transforms.arguments import expect_int, expect_ints
from ckptcore_transforms.derived_arrays import permute
from ckptcore_transforms.each_array import EachArray, axis_of
from ckptcore_transforms.patterns import Template
from ckptcore_transforms.transform import not_invertible

__all__ = ["MergeAxes", "Reshape", "SplitAxis", "Transpose"]


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
