"""Derived arrays of transforms: permuted axes, stacks, sums, merged adapters, results of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ckptcore.derivations import (
    Piece,
    WholeArray,
    concatenate,
    copy_rounded,
    is_complex,
    is_whole,
    pieces,
    place,
    reshape,
)
from ckptcore.model import ArraySpec, Box, HostArray
from ckptcore.protocols import DerivedArray, Part

__all__ = [
    "Computed",
    "LowRankMerge",
    "Permuted",
    "WeightedSum",
    "computed",
    "merge_low_rank",
    "permute",
    "stack",
    "weighted_sum",
]

_PRODUCT_ELEMENTS: Final = 1 << 21
"""Of a product that is computed at a time: of smaller ones the threads of a BLAS wait for each other longer than they compute."""


@dataclass(frozen=True, slots=True)
class Permuted:
    """An array with its axes in another order.

    Attributes:
        of: the array.
        axes: by axis of the result, the one of the array that it is.
    """

    of: DerivedArray
    axes: tuple[int, ...]

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        shape = self.of.spec.shape
        return ArraySpec(tuple([shape[axis] for axis in self.axes]), self.of.spec.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The array."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """The same elements."""
        back = self._back
        return (Part(0, Box(tuple([box.start[axis] for axis in back]), tuple([box.stop[axis] for axis in back]))),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray]:
        """All of it, with the axes of the array."""
        return (out.transpose(self._back),)

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy the elements."""
        place(self.views(box, out), parts)

    @property
    def _back(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of arrays, each times a number, computed in float32, or float64 where an input is; the nearest value of its dtype.

    A sum that the dtype has nothing near to is an error when it is made: nothing wraps, or becomes infinite.

    Attributes:
        inputs: of one shape.
        weights: by input.
        dtype: the name of the dtype of the result.
    """

    inputs: tuple[DerivedArray, ...]
    weights: tuple[float, ...]
    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        return ArraySpec(self.inputs[0].spec.shape, self.dtype)

    def needed(self, box: Box) -> Sequence[Part]:
        """The same box of every input."""
        return [Part(number, box) for number in range(len(self.inputs))]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: the elements are computed."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Sum the elements, a piece at a time: what is computed is wider than what is given."""
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
    """A matrix plus a number times the product of two thin ones, as an adapter (LoRA) is merged: ``base + scale * up @ down``.

    Computed in float32, or float64 where an input is. A number that the dtype has nothing near to is an error when it is made.

    Attributes:
        base: of n rows and m columns.
        up: of n rows and r columns; in LoRA it is B.
        down: of r rows and m columns; in LoRA it is A.
        scale: the number; in LoRA it is alpha / r.
    """

    base: DerivedArray
    up: DerivedArray
    down: DerivedArray
    scale: float

    @property
    def spec(self) -> ArraySpec:
        """As the base."""
        return self.base.spec

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The three matrices."""
        return (self.base, self.up, self.down)

    def needed(self, box: Box) -> Sequence[Part]:
        """The box of the base, its rows of one thin matrix and its columns of the other."""
        rank = self.down.spec.shape[0]
        parts = [Part(0, box)]
        if rank:
            parts.append(Part(1, Box((box.start[0], 0), (box.stop[0], rank))))
            parts.append(Part(2, Box((0, box.start[1]), (rank, box.stop[1]))))
        return parts

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: the elements are others."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Multiply and add, a piece at a time: the product is as large as the base, and wider."""
        dtype = _sum_dtype([part.dtype for part in parts])
        base, *thin = parts
        thin = [part.astype(dtype) for part in thin]
        for piece in pieces(out.shape, _PRODUCT_ELEMENTS):
            _round(out[piece], self._merged(base[piece], thin, piece, dtype), [base[piece], *thin])

    def _merged(self, base: HostArray, thin: Sequence[HostArray], piece: Piece, dtype: np.dtype[Any]) -> HostArray:
        """A piece of the base with the product of its rows and columns of the thin matrices, if they have any."""
        if not thin:
            return base.astype(dtype)
        rows, columns = piece[0], piece[1:]
        with np.errstate(all="ignore"):
            made: HostArray = thin[0][rows] @ thin[1][:, *columns]
            made *= dtype.type(self.scale)
            made += base
        return made


@dataclass(frozen=True, slots=True)
class Computed(WholeArray):
    """What a function makes of whole arrays. Whoever needs a part of it reads them whole, and computes all of it, once for all its parts.

    Attributes:
        inputs: what the function gets, as NumPy arrays.
        function: gives the array, of this spec; called from any thread.
        spec: the array that is made.
    """

    inputs: tuple[DerivedArray, ...]
    function: Callable[..., Any] = field(repr=False, hash=False)  # not every callable object has a hash
    spec: ArraySpec

    def compute(self, parts: Sequence[HostArray]) -> HostArray:
        """Call the function.

        Args:
            parts: the inputs that have elements.

        Raises:
            ValueError: if it gives another array than was said.
            What the function raises.
        """
        given = iter(parts)
        arrays = [
            next(given) if one.spec.size else np.empty(one.spec.shape, one.spec.numpy_dtype) for one in self.inputs
        ]
        made: HostArray = np.asarray(self.function(*arrays))
        if made.shape != self.spec.shape or made.dtype != self.spec.numpy_dtype:
            raise ValueError(f"the function gave {made.dtype}{list(made.shape)}, and {self.spec} was expected of it")
        return made


def permute(of: DerivedArray, axes: Sequence[int]) -> DerivedArray:
    """An array with its axes in another order.

    Args:
        of: the array.
        axes: by axis of the result, the one of the array that it is.

    Raises:
        ValueError: if these are not all its axes.
    """
    if sorted(axes) != list(range(len(of.spec.shape))):
        raise ValueError(f"{list(axes)} is no order of the axes of {of.spec}")
    if isinstance(of, Permuted):
        return permute(of.of, [of.axes[axis] for axis in axes])
    return of if list(axes) == sorted(axes) else Permuted(of, tuple(axes))


def stack(inputs: Sequence[DerivedArray], axis: int) -> DerivedArray:
    """Arrays of one shape and dtype along a new axis.

    Raises:
        ValueError: if they differ, or there are none, or there would be no such axis.
    """
    if not inputs:
        raise ValueError("there is no array to stack")
    first = inputs[0].spec
    for one in inputs:
        if one.spec != first:
            raise ValueError(f"{first} and {one.spec} cannot be stacked: they are to be equal")
    if not 0 <= axis <= len(first.shape):
        raise ValueError(f"arrays of {first} cannot be stacked along axis {axis}: they have {len(first.shape)} axes")
    shape = (*first.shape[:axis], 1, *first.shape[axis:])
    return concatenate([reshape(one, shape) for one in inputs], axis)


def weighted_sum(inputs: Sequence[DerivedArray], weights: Sequence[float], dtype: str | None = None) -> DerivedArray:
    """The sum of arrays, each times a number.

    Args:
        inputs: of one shape.
        weights: by input.
        dtype: of the result; None: that of the first input.

    Raises:
        ValueError: if their shapes differ, there are none, or they are not of real numbers.
    """
    if not inputs or len(inputs) != len(weights):
        raise ValueError(f"there are {len(inputs)} arrays and {len(weights)} weights")
    for one in inputs:
        if one.spec.shape != inputs[0].spec.shape:
            raise ValueError(f"{inputs[0].spec} and {one.spec} cannot be summed: their shapes are to be equal")
        _expect_real(one.spec)
    return WeightedSum(tuple(inputs), tuple(map(float, weights)), dtype or inputs[0].spec.dtype)


def merge_low_rank(base: DerivedArray, up: DerivedArray, down: DerivedArray, scale: float) -> DerivedArray:
    """``base + scale * up @ down``, in the dtype of `base`: see `LowRankMerge`.

    Raises:
        ValueError: if these are not matrices of real numbers that fit, or the base is of whole numbers.
    """
    shapes = base.spec.shape, up.spec.shape, down.spec.shape
    fit = all(len(shape) == 2 for shape in shapes) and (shapes[1][0], shapes[2][1], shapes[1][1]) == (
        *shapes[0],
        shapes[2][0],
    )
    if not fit:
        raise ValueError(f"{base.spec} + {up.spec} @ {down.spec} does not fit: expected (n, m), (n, r) and (r, m)")
    for one in (base, up, down):
        _expect_real(one.spec)
    if is_whole(base.spec.numpy_dtype):
        raise ValueError(f"{base.spec} is of whole numbers, to which nothing is added that has fractions")
    return LowRankMerge(base, up, down, float(scale))


def computed(inputs: Sequence[DerivedArray], function: Callable[..., Any], spec: ArraySpec) -> DerivedArray:
    """What a function makes of whole arrays: see `Computed`."""
    return Computed(tuple(inputs), function, spec)


def _expect_real(spec: ArraySpec) -> None:
    if spec.numpy_dtype.kind in "bSUmM" or is_complex(spec.numpy_dtype):
        raise ValueError(f"{spec} is no array of real numbers")


def _sum_dtype(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """What sums are computed in."""
    exact = any(dtype.kind in "iuf" and dtype.itemsize >= 4 and dtype != np.float32 for dtype in dtypes)
    return np.dtype(np.float64 if exact else np.float32)


def _round(out: HostArray, values: HostArray, parts: Sequence[HostArray]) -> None:
    """Copy what was computed of parts into an array, as the nearest values of its dtype.

    Raises:
        ValueError: if there is a number that the dtype has nothing near to.
    """
    if not np.isfinite(values).all() and all(bool(np.isfinite(part).all()) for part in parts):
        first = values[~np.isfinite(values)].flat[0]
        raise ValueError(f"{values.dtype}, in which this is computed, has no place for it: it would be {first}")
    copy_rounded(out, np.rint(values) if is_whole(out.dtype) else values)
