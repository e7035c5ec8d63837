"""Transforms of single arrays: dtype, elements, extents, axes, and any function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.derivations import cast, cut, pad, reshape
from ckptcore.model.arrays import AbstractArray, ArraySpec, Box, name_of_dtype
from ckptcore.protocols import DerivedArray, Transform
from ckptcore_transforms.derived_arrays import computed, permute, weighted_sum
from ckptcore_transforms.patterns import Pattern, Template
from ckptcore_transforms.transform import DtypeName, Sizes, TreeTransform, naming, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, TreeRewriter


@dataclass(frozen=True, slots=True)
class EachArray(TreeTransform):
    """A transform that replaces each array that matches a pattern.

    Attributes:
        pattern: selects the arrays.
    """

    pattern: Pattern

    def rewrite(self, tree: TreeRewriter) -> None:
        """Replace the arrays."""
        replacements = {}
        for path, _, array in tree.arrays(Template(self.pattern)):
            with naming(path):
                now = self.changed(array)
            leaf = tree.leaves[path]
            replacements[path] = {path: leaf if now is array else ArrayLeaf.of(now)}
        tree.replace(replacements)

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Return the result for one array.

        Raises:
            ValueError: if the transform cannot be applied to the array.
        """
        raise NotImplementedError


def axis_of(spec: ArraySpec, axis: int) -> int:
    """Convert a negative axis to a positive one.

    Raises:
        ValueError: if the axis does not exist.
    """
    count = len(spec.shape)
    if not -count <= axis < count:
        raise ValueError(f"{spec} has no axis {axis}")
    return axis % count


@dataclass(frozen=True, slots=True)
class Cast(EachArray):
    """Cast arrays to another dtype, with the rounding and overflow of NumPy.

    Attributes:
        pattern: selects the arrays.
        dtype: name of the new dtype.
        stored: expected dtype in the checkpoint; another dtype is an error. None accepts any dtype.
            The inverse needs `stored`.
    """

    dtype: DtypeName
    stored: DtypeName | None = None

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Cast an array."""
        if self.stored is not None and array.spec.dtype != self.stored:
            raise ValueError(f"expected the stored dtype {self.stored}, found {array.spec.dtype}")
        return cast(array, self.dtype)

    def describe(self) -> str:
        """Describe the cast."""
        return f"cast {Template(self.pattern)} to {self.dtype}"

    def inverse(self) -> Transform:
        """Return the cast to `stored`. It is exact for values that both dtypes can represent."""
        if self.stored is None:
            raise not_invertible(self, "because the stored dtype is unknown; set Cast(..., stored=)")
        return Cast(self.pattern, self.stored, self.dtype)


@dataclass(frozen=True, slots=True)
class Scale(EachArray):
    """Multiply arrays by a number, in float32, or in float64 if float32 cannot represent the dtype.

    Attributes:
        pattern: selects the arrays.
        factor: the number.
        undo: factor of the inverse. None: 1 / factor. The factor must then be a power of two, so
            that neither direction rounds.
    """

    factor: float
    undo: float | None = None

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Multiply an array."""
        return weighted_sum([array], [self.factor])

    def describe(self) -> str:
        """Describe the factor."""
        return f"multiply {Template(self.pattern)} by {self.factor}"

    def inverse(self) -> Transform:
        """Return the inverse.

        Exact for a power of two, except for the smallest and largest numbers.
        """
        undo = self.undo
        if undo is None:
            if abs(math.frexp(self.factor)[0]) != 0.5:
                raise not_invertible(self, "because elements are rounded; set Scale(..., undo=) if that is acceptable")
            undo = 1 / self.factor
        return Scale(self.pattern, undo, self.factor)


@dataclass(frozen=True, slots=True)
class Slice(EachArray):
    """Take a range of indices along an axis. The rest is not read.

    Attributes:
        pattern: selects the arrays.
        start, stop: half-open range within the arrays.
        axis: axis of the range; -1 is the last.
    """

    start: int
    stop: int
    axis: int = 0

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Slice an array."""
        shape = array.spec.shape
        axis = axis_of(array.spec, self.axis)
        if not 0 <= self.start <= self.stop <= shape[axis]:
            raise ValueError(f"{array.spec} has no range {self.start}:{self.stop} along axis {axis}")
        return cut(array, Box.whole(shape).band(axis, self.start, self.stop))

    def describe(self) -> str:
        """Describe the range."""
        return f"take {self.start}:{self.stop} along axis {self.axis} of {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """Raise an error, because the removed elements are unknown."""
        raise not_invertible(self, "because it removes elements")


@dataclass(frozen=True, slots=True)
class Pad(EachArray):
    """Append elements of one value along an axis, for example to extend a vocabulary.

    Attributes:
        pattern: selects the arrays.
        size: new extent, at least the old one.
        axis: axis to extend; -1 is the last.
        value: value of the new elements. Infinity and NaN are allowed, and bools in arrays of bools.
        stored: expected extent in the checkpoint; another extent is an error. None accepts any
            extent. The inverse needs `stored`.
    """

    size: int
    axis: int = 0
    value: bool | float = 0
    stored: int | None = None

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Pad an array."""
        shape = array.spec.shape
        axis = axis_of(array.spec, self.axis)
        if self.size < shape[axis] or self.stored not in (None, shape[axis]):
            expected = f"at most {self.size}" if self.stored is None else f"{self.stored}"
            raise ValueError(f"expected an extent of {expected} along axis {axis}, found {array.spec}")
        after = [0] * len(shape)
        after[axis] = self.size - shape[axis]
        return pad(array, [0] * len(shape), after, self.value)

    def describe(self) -> str:
        """Describe the padding."""
        return f"pad {Template(self.pattern)} with {self.value} to {self.size} along axis {self.axis}"

    def inverse(self) -> Transform:
        """Return the slice that removes the padding."""
        if self.stored is None:
            raise not_invertible(self, "because the stored extent is unknown; set Pad(..., stored=)")
        return Slice(self.pattern, 0, self.stored, self.axis)


@dataclass(frozen=True, slots=True)
class Apply(EachArray):
    """Apply a function to each array. A load of any part reads and computes the whole array.

    Attributes:
        pattern: selects the arrays.
        function: takes and returns a NumPy array. May be called repeatedly and from other threads.
        result: maps the `AbstractArray` of an array to the `AbstractArray` of the result; None if
            shape and dtype do not change.
        undo: the inverse function, or None.
    """

    function: Callable[[Any], Any]
    result: Callable[[AbstractArray], AbstractArray] | None = None
    undo: Callable[[Any], Any] | None = None

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Apply the function lazily."""
        spec = array.spec
        if self.result is not None:
            abstract = self.result(AbstractArray(spec.shape, spec.dtype))
            spec = ArraySpec(abstract.shape, name_of_dtype(abstract.dtype))
        return computed([array], self.function, spec)

    def describe(self) -> str:
        """Describe the function."""
        return f"apply {getattr(self.function, '__qualname__', self.function)} to {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """Return the transform with `undo`."""
        if self.undo is None or self.result is not None:
            raise not_invertible(
                self,
                "because there is no inverse function, or the shape or dtype changes; set "
                "Apply(..., undo=) without result=",
            )
        return Apply(self.pattern, self.undo, None, self.function)


@dataclass(frozen=True, slots=True)
class Transpose(EachArray):
    """Permute the axes of arrays.

    Attributes:
        pattern: selects the arrays.
        axes: `axes[i]` is the input axis that becomes axis i of the result. None swaps the last two.
    """

    axes: Sequence[int] | None = None

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Transpose an array."""
        count = len(array.spec.shape)
        if self.axes is None and count < 2:
            raise ValueError(f"{array.spec} has fewer than two axes to swap")
        axes = [*range(count - 2), count - 1, count - 2] if self.axes is None else self.axes
        return permute(array, axes)

    def describe(self) -> str:
        """Describe the permutation."""
        how = "the last two axes" if self.axes is None else f"axes to {list(self.axes)}"
        return f"transpose {how} of {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """Return the inverse permutation."""
        if self.axes is None:
            return self
        return Transpose(self.pattern, tuple(sorted(range(len(self.axes)), key=list(self.axes).__getitem__)))


@dataclass(frozen=True, slots=True)
class Reshape(EachArray):
    """Reshape arrays, with elements in C order.

    Attributes:
        pattern: selects the arrays.
        shape: new extents. One can be -1, which means the remaining size.
        stored: expected shape in the checkpoint, which can contain one -1, too; another shape is an
            error. None accepts any shape. The inverse needs `stored`.
    """

    shape: Sequence[int]
    stored: Sequence[int] | None = None

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Reshape an array."""
        if self.stored is not None and reshape(array, self.stored).spec.shape != array.spec.shape:
            raise ValueError(f"expected the shape {list(self.stored)}, found {list(array.spec.shape)}")
        return reshape(array, self.shape)

    def describe(self) -> str:
        """Describe the shape."""
        return f"reshape {Template(self.pattern)} to {list(self.shape)}"

    def inverse(self) -> Transform:
        """Return the reshape to `stored`."""
        if self.stored is None:
            raise not_invertible(self, "because the stored shape is unknown; set Reshape(..., stored=)")
        return Reshape(self.pattern, self.stored, self.shape)


@dataclass(frozen=True, slots=True)
class SplitAxis(EachArray):
    """Split an axis into several, for example into heads. Elements stay in C order.

    Attributes:
        pattern: selects the arrays.
        axis: axis to split; -1 is the last.
        sizes: extents of the new axes. One can be -1, which means the remaining size.
    """

    axis: int
    sizes: Sizes

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Split the axis."""
        shape, axis = array.spec.shape, axis_of(array.spec, self.axis)
        return reshape(array, (*shape[:axis], *self.sizes, *shape[axis + 1 :]))

    def describe(self) -> str:
        """Describe the axes."""
        return f"split axis {self.axis} of {Template(self.pattern)} into {list(self.sizes)}"

    def inverse(self) -> Transform:
        """Return the merge of the axes."""
        first = self.axis if self.axis >= 0 else self.axis - len(self.sizes) + 1
        return MergeAxes(self.pattern, first, self.sizes)


@dataclass(frozen=True, slots=True)
class MergeAxes(EachArray):
    """Merge consecutive axes into one. Elements stay in C order.

    Attributes:
        pattern: selects the arrays.
        axis: first axis to merge; -1 is the last.
        sizes: expected extents of the axes; -1 means any extent. The inverse needs at most one -1.
    """

    axis: int
    sizes: Sizes

    def changed(self, array: DerivedArray) -> DerivedArray:
        """Merge the axes."""
        shape, axis = array.spec.shape, axis_of(array.spec, self.axis)
        extents = shape[axis : axis + len(self.sizes)]
        if len(extents) < len(self.sizes) or any(
            size not in (-1, own) for size, own in zip(self.sizes, extents, strict=True)
        ):
            raise ValueError(f"expected {list(self.sizes)} from axis {axis} on, found {array.spec}")
        return reshape(array, (*shape[:axis], math.prod(extents), *shape[axis + len(extents) :]))

    def describe(self) -> str:
        """Describe the axes."""
        return f"merge axes {list(self.sizes)} of {Template(self.pattern)}, from {self.axis} on"

    def inverse(self) -> Transform:
        """Return the split of the axis."""
        last = self.axis if self.axis >= 0 else self.axis + len(self.sizes) - 1
        if list(self.sizes).count(-1) > 1:
            raise not_invertible(self, "because more than one of its sizes is unknown")
        return SplitAxis(self.pattern, last, self.sizes)
