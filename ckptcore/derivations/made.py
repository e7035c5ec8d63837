"""Arrays whose elements are computed: cast, constant, summed, merged with an adapter, or made by any function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ckptcore.derivations.derivation import Derivation, OfNothing, Part
from ckptcore.derivations.pieces import Piece, pieces
from ckptcore.derivations.rounding import copy_rounded
from ckptcore.dtype_values import may_become
from ckptcore.io.elements import copy_elements
from ckptcore.model.arrays import ArraySpec, Box, HostArray, dtype_from_name, name_of_dtype

__all__ = [
    "Cast",
    "Computed",
    "Constant",
    "LowRankMerge",
    "WeightedSum",
    "cast",
    "computed",
    "constant",
    "merge_low_rank",
    "weighted_sum",
]

_PRODUCT_ELEMENTS: Final = 1 << 21
"""Of a product that is computed at a time: of smaller ones the threads of a BLAS wait for each other longer than they compute."""


@dataclass(frozen=True, slots=True)
class _Elementwise:
    """An array of which each element is made of those at the same place of its inputs."""

    inputs: tuple[Derivation, ...]

    def needed(self, box: Box) -> Sequence[Part]:
        """The same box of every input."""
        return [Part(number, box) for number in range(len(self.inputs))]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: the elements are others."""
        return None


@dataclass(frozen=True, slots=True)
class Cast(_Elementwise):
    """An array as another dtype has its elements, rounded as NumPy does; what it has no place for wraps or becomes infinite.

    Attributes:
        inputs: the array.
        dtype: the name of the dtype.
    """

    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        return ArraySpec(self.inputs[0].spec.shape, self.dtype)

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Cast the elements."""
        with np.errstate(all="ignore"):
            np.copyto(out, parts[0], casting="unsafe")


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


@dataclass(frozen=True, slots=True)
class WeightedSum(_Elementwise):
    """The sum of arrays, each times a number, computed in float32, or float64 where an input is; the nearest value of its dtype.

    A sum that the dtype has nothing near to is an error when it is made: nothing wraps, or becomes infinite.

    Attributes:
        inputs: of one shape.
        weights: by input.
        dtype: the name of the dtype of the result.
    """

    weights: tuple[float, ...]
    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        return ArraySpec(self.inputs[0].spec.shape, self.dtype)

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

    base: Derivation
    up: Derivation
    down: Derivation
    scale: float

    @property
    def spec(self) -> ArraySpec:
        """As the base."""
        return self.base.spec

    @property
    def inputs(self) -> Sequence[Derivation]:
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
class Computed:
    """What a function makes of whole arrays. Whoever needs a part of it reads them whole, and computes all of it, once for all its parts.

    Attributes:
        inputs: what the function gets, as NumPy arrays.
        function: gives the array, of this spec; called from any thread.
        spec: the array that is made.
    """

    inputs: tuple[Derivation, ...]
    function: Callable[..., Any] = field(repr=False, hash=False)  # not every callable object has a hash
    spec: ArraySpec

    def needed(self, box: Box) -> Sequence[Part]:
        """Every input, whole."""
        wholes = [(number, Box.whole(one.spec.shape)) for number, one in enumerate(self.inputs)]
        return [Part(number, whole) for number, whole in wholes if whole.size]

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: the elements are others."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Copy a box of what the function gives; see `compute`."""
        copy_elements(out, self.compute(parts)[box.slices])

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


def cast(of: Derivation, dtype: str) -> Derivation:
    """An array as another dtype has its elements.

    Args:
        of: the array.
        dtype: a name that `ckptcore.model.dtype_from_name` knows.

    Raises:
        ValueError: if one of the dtypes has no numbers, or complex ones were to become real.
        UnsupportedLeafError: if the name is not known.
    """
    before, after = of.spec.numpy_dtype, dtype_from_name(dtype)
    if before == after:
        return of
    if "S" in (before.kind, after.kind) or {*before.kind, *after.kind} & set("UmM"):
        raise ValueError(f"{of.spec} is not cast to {dtype}: both are to be dtypes of numbers")
    if _is_complex(before) and not _is_complex(after):
        raise ValueError(f"{of.spec} is not cast to {dtype}: the imaginary parts would be lost")
    try:
        np.zeros(1, before).astype(after)
    except (TypeError, ValueError):
        between = "complex64" if _is_complex(before) else "float32"
        return Cast((Cast((of,), between),), dtype)  # of dtypes of ml_dtypes, each of which it has all values of
    return Cast((of,), dtype)


def constant(spec: ArraySpec, value: Any) -> Derivation:
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
            lost = _is_whole(found.dtype) and bool((elements != found).any())
            if lost or not _is_whole(found.dtype):
                raise ValueError(f"give one that {own} has")
            return
        if not may_become(own, told):
            raise ValueError(f"a {told} is none of {own}")
        copy_rounded(elements, found)
        wide = np.complex128 if _is_complex(elements.dtype) else np.float64
        if _is_whole(found.dtype) and not _is_whole(elements.dtype) and bool((elements.astype(wide) != found).any()):
            raise ValueError(f"give one that {own} has")
    except ValueError as error:
        raise ValueError(f"{own} cannot have the value {value!r}: {error}") from error


def weighted_sum(inputs: Sequence[Derivation], weights: Sequence[float], dtype: str | None = None) -> Derivation:
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


def merge_low_rank(base: Derivation, up: Derivation, down: Derivation, scale: float) -> Derivation:
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
    if _is_whole(base.spec.numpy_dtype):
        raise ValueError(f"{base.spec} is of whole numbers, to which nothing is added that has fractions")
    return LowRankMerge(base, up, down, float(scale))


def computed(inputs: Sequence[Derivation], function: Callable[..., Any], spec: ArraySpec) -> Derivation:
    """What a function makes of whole arrays: see `Computed`."""
    return Computed(tuple(inputs), function, spec)


def _is_complex(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "c" or dtype.name in ("complex32", "bcomplex32")


def _is_whole(dtype: np.dtype[Any]) -> bool:
    """Whether it has whole numbers or truth values only; NumPy's kinds do not tell of dtypes of ml_dtypes."""
    return dtype.name.startswith(("int", "uint", "bool"))


def _expect_real(spec: ArraySpec) -> None:
    if spec.numpy_dtype.kind in "bSUmM" or _is_complex(spec.numpy_dtype):
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
    copy_rounded(out, np.rint(values) if _is_whole(out.dtype) else values)
