"""Derived arrays of transforms: permuted axes, stacks, sums, merged adapters, results of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ckptcore.derivations import (
    PieceIndex,
    WholeArray,
    concatenate,
    copy_parts,
    copy_rounded,
    is_complex,
    is_int_or_bool,
    pieces,
    reshape,
)
from ckptcore.model import ArraySpec, Box, HostArray
from ckptcore.protocols import DerivedArray, Part

_PRODUCT_ELEMENTS: Final = 1 << 21
"""Number of elements of a matrix product that are computed at a time.

With smaller products, BLAS threads wait longer than they compute.
"""


@dataclass(frozen=True, slots=True)
class Permuted:
    """An array with permuted axes.

    Attributes:
        of: the input.
        axes: `axes[i]` is the input axis that becomes axis i of the result.
    """

    of: DerivedArray
    axes: tuple[int, ...]

    @property
    def spec(self) -> ArraySpec:
        """Spec of the result."""
        shape = self.of.spec.shape
        return ArraySpec(tuple([shape[axis] for axis in self.axes]), self.of.spec.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The input."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the box with the axes of the input."""
        back = self._back
        return (Part(0, Box(tuple([box.start[axis] for axis in back]), tuple([box.stop[axis] for axis in back]))),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray]:
        """Return `out` with the axes of the input."""
        return (out.transpose(self._back),)

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the elements."""
        copy_parts(self.views(box, out), parts)

    @property
    def _back(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The weighted sum of arrays, rounded to the result's dtype.

    Computed in float32, or in float64 if float32 cannot represent the dtype of an input. A result
    out of the range of its dtype is an error, instead of overflow.

    Attributes:
        inputs: arrays of one shape.
        weights: one per input.
        dtype: name of the dtype of the result.
    """

    inputs: tuple[DerivedArray, ...]
    weights: tuple[float, ...]
    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """Spec of the result."""
        return ArraySpec(self.inputs[0].spec.shape, self.dtype)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the same box of every input."""
        return [Part(number, box) for number in range(len(self.inputs))]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return None, because elements are computed."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Sum piece by piece, to limit the memory for float32 or float64 intermediates."""
        dtype = _sum_dtype([part.dtype for part in parts])
        for piece in pieces(out.shape):
            own = [part[piece] for part in parts]
            total: HostArray = np.zeros(own[0].shape, dtype)
            with np.errstate(all="ignore"):
                for part, weight in zip(own, self.weights, strict=True):
                    total += part.astype(dtype) * dtype.type(weight)
            _round(out[piece], total, own)


@dataclass(frozen=True, slots=True)
class LowRankMerge:
    """A matrix plus the scaled product of two thin matrices, as in LoRA adapters: ``base + scale * up @ down``.

    Computed in float32, or in float64 if float32 cannot represent the dtype of an input. A result
    out of the range of its dtype is an error.

    Attributes:
        base: matrix of n rows and m columns.
        up: matrix of n rows and r columns; B in LoRA.
        down: matrix of r rows and m columns; A in LoRA.
        scale: alpha / r in LoRA.
    """

    base: DerivedArray
    up: DerivedArray
    down: DerivedArray
    scale: float

    @property
    def spec(self) -> ArraySpec:
        """Spec of the base."""
        return self.base.spec

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The three matrices."""
        return (self.base, self.up, self.down)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the box of the base, its rows of `up` and its columns of `down`."""
        rank = self.down.spec.shape[0]
        parts = [Part(0, box)]
        if rank:
            parts.append(Part(1, Box((box.start[0], 0), (box.stop[0], rank))))
            parts.append(Part(2, Box((0, box.start[1]), (rank, box.stop[1]))))
        return parts

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return None, because elements are computed."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Compute piece by piece, to limit memory: the product has the base's shape, in float32 or float64."""
        dtype = _sum_dtype([part.dtype for part in parts])
        base, *thin = parts
        thin = [part.astype(dtype) for part in thin]
        for piece in pieces(out.shape, _PRODUCT_ELEMENTS):
            _round(out[piece], self._merged(base[piece], thin, piece, dtype), [base[piece], *thin])

    def _merged(self, base: HostArray, thin: Sequence[HostArray], piece: PieceIndex, dtype: np.dtype[Any]) -> HostArray:
        """Return a piece of the base plus the product of its rows and columns of the thin matrices."""
        if not thin:
            return base.astype(dtype)
        rows, columns = piece[0], piece[1:]
        with np.errstate(all="ignore"):
            result: HostArray = thin[0][rows] @ thin[1][:, *columns]
            result *= dtype.type(self.scale)
            result += base
        return result


@dataclass(frozen=True, slots=True)
class Computed(WholeArray):
    """The result of a function of whole arrays.

    A load of any part reads and computes the whole array, once for all parts.

    Attributes:
        inputs: arguments of the function, as NumPy arrays.
        function: returns the array; called from any thread.
        spec: spec of the result.
    """

    inputs: tuple[DerivedArray, ...]
    function: Callable[..., Any] = field(repr=False, hash=False)  # some callable objects have no hash
    spec: ArraySpec

    def compute(self, parts: Sequence[HostArray]) -> HostArray:
        """Call the function.

        Args:
            parts: the nonempty inputs, in order.

        Raises:
            ValueError: if the result has another spec.
            Exception: an error of the function.
        """
        given = iter(parts)
        arrays = [
            next(given) if item.spec.size else np.empty(item.spec.shape, item.spec.numpy_dtype) for item in self.inputs
        ]
        result: HostArray = np.asarray(self.function(*arrays))
        if result.shape != self.spec.shape or result.dtype != self.spec.numpy_dtype:
            raise ValueError(f"the function returned {result.dtype}{list(result.shape)}; expected {self.spec}")
        return result


def permute(of: DerivedArray, axes: Sequence[int]) -> DerivedArray:
    """Return an array with permuted axes.

    Args:
        of: the input.
        axes: `axes[i]` is the input axis that becomes axis i of the result.

    Raises:
        ValueError: if `axes` is not a permutation.
    """
    if sorted(axes) != list(range(len(of.spec.shape))):
        raise ValueError(f"{list(axes)} is not a permutation of the axes of {of.spec}")
    if isinstance(of, Permuted):
        return permute(of.of, [of.axes[axis] for axis in axes])
    return of if list(axes) == sorted(axes) else Permuted(of, tuple(axes))


def stack(inputs: Sequence[DerivedArray], axis: int) -> DerivedArray:
    """Stack arrays of one shape and dtype along a new axis.

    Raises:
        ValueError: if shapes or dtypes differ, if there are no arrays, or if the axis is invalid.
    """
    if not inputs:
        raise ValueError("there is no array to stack")
    first = inputs[0].spec
    for array in inputs:
        if array.spec != first:
            raise ValueError(f"cannot stack {first} and {array.spec}: they must be equal")
    if not 0 <= axis <= len(first.shape):
        raise ValueError(f"cannot stack arrays of {first} along axis {axis}: they have {len(first.shape)} axes")
    shape = (*first.shape[:axis], 1, *first.shape[axis:])
    return concatenate([reshape(array, shape) for array in inputs], axis)


def weighted_sum(inputs: Sequence[DerivedArray], weights: Sequence[float], dtype: str | None = None) -> DerivedArray:
    """Return the weighted sum of arrays.

    Args:
        inputs: arrays of one shape.
        weights: one per input.
        dtype: dtype of the result; None for the dtype of the first input.

    Raises:
        ValueError: if shapes differ, if there are no arrays or another number of weights, or if an
            array does not contain real numbers.
    """
    if not inputs or len(inputs) != len(weights):
        raise ValueError(f"there are {len(inputs)} arrays and {len(weights)} weights")
    for array in inputs:
        if array.spec.shape != inputs[0].spec.shape:
            raise ValueError(f"cannot sum {inputs[0].spec} and {array.spec}: their shapes must be equal")
        _expect_real(array.spec)
    return WeightedSum(tuple(inputs), tuple(map(float, weights)), dtype or inputs[0].spec.dtype)


def merge_low_rank(base: DerivedArray, up: DerivedArray, down: DerivedArray, scale: float) -> DerivedArray:
    """Return ``base + scale * up @ down`` in the dtype of `base`. See `LowRankMerge`.

    Raises:
        ValueError: if the matrices do not fit or are not real, or if the base has integers.
    """
    shapes = base.spec.shape, up.spec.shape, down.spec.shape
    fit = all(len(shape) == 2 for shape in shapes) and (shapes[1][0], shapes[2][1], shapes[1][1]) == (
        *shapes[0],
        shapes[2][0],
    )
    if not fit:
        raise ValueError(f"{base.spec} + {up.spec} @ {down.spec} does not fit: expected (n, m), (n, r) and (r, m)")
    for matrix in (base, up, down):
        _expect_real(matrix.spec)
    if is_int_or_bool(base.spec.numpy_dtype):
        raise ValueError(f"cannot add fractions to the integers of {base.spec}")
    return LowRankMerge(base, up, down, float(scale))


def computed(inputs: Sequence[DerivedArray], function: Callable[..., Any], spec: ArraySpec) -> DerivedArray:
    """Return the result of a function of whole arrays. See `Computed`."""
    return Computed(tuple(inputs), function, spec)


def _expect_real(spec: ArraySpec) -> None:
    if spec.numpy_dtype.kind in "bSUmM" or is_complex(spec.numpy_dtype):
        raise ValueError(f"{spec} is not an array of real numbers")


def _sum_dtype(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the dtype in which sums are computed."""
    exact = any(dtype.kind in "iuf" and dtype.itemsize >= 4 and dtype != np.float32 for dtype in dtypes)
    return np.dtype(np.float64 if exact else np.float32)


def _round(out: HostArray, values: HostArray, parts: Sequence[HostArray]) -> None:
    """Round computed values to the dtype of an array.

    Raises:
        ValueError: if a value is out of range.
    """
    if not np.isfinite(values).all() and all(bool(np.isfinite(part).all()) for part in parts):
        first = values[~np.isfinite(values)].flat[0]
        raise ValueError(f"the result {first} is out of the range of {values.dtype}, in which it is computed")
    copy_rounded(out, np.rint(values) if is_int_or_bool(out.dtype) else values)
