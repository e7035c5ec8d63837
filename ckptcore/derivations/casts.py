"""Arrays cast to other dtypes, as NumPy casts or rounded to the nearest value; and the rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Final, TypeAlias

import numpy as np

from ckptcore.derivations.dtype_values import FloatValues, float_values, int_range
from ckptcore.model.arrays import ArraySpec, Box, HostArray, dtype_from_name, name_of_dtype
from ckptcore.protocols import DerivedArray, Part

__all__ = ["CastArray", "Narrowed", "Piece", "cast", "copy_rounded", "is_complex", "is_whole", "narrow", "pieces"]

Piece: TypeAlias = tuple[slice | EllipsisType, ...]
"""What to index an array with; it gives an array also of one without axes."""

_ELEMENTS: Final = 1 << 18
"""Of a piece: in float32 some of them stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class _OtherDtype:
    """An array with the elements of another one in another dtype.

    Attributes:
        of: the array.
        dtype: the name of the dtype.
    """

    of: DerivedArray
    dtype: str

    @property
    def spec(self) -> ArraySpec:
        """The shape of the array, and the dtype."""
        return ArraySpec(self.of.spec.shape, self.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The array."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """The same box."""
        return (Part(0, box),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: the elements are computed."""
        return None


@dataclass(frozen=True, slots=True)
class CastArray(_OtherDtype):
    """An array cast as NumPy does: a number that the dtype cannot hold wraps or becomes infinite."""

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Cast the elements."""
        with np.errstate(all="ignore"):
            np.copyto(out, parts[0], casting="unsafe")


@dataclass(frozen=True, slots=True)
class Narrowed(_OtherDtype):
    """An array with each element rounded to the nearest value of another dtype.

    An int that does not fit is not wrapped, and a number above the largest one does not become infinite or NaN: both are errors.

    Attributes:
        between: a dtype that has all values of the array, if NumPy cannot cast directly; None otherwise.
    """

    between: str | None = None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Cast the elements.

        Raises:
            ValueError: if the dtype has no value near one of them.
        """
        copy_rounded(out, parts[0], self.between)


def cast(of: DerivedArray, dtype: str) -> DerivedArray:
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
    if is_complex(before) and not is_complex(after):
        raise ValueError(f"{of.spec} is not cast to {dtype}: the imaginary parts would be lost")
    try:
        np.zeros(1, before).astype(after)
    except (TypeError, ValueError):
        between = "complex64" if is_complex(before) else "float32"
        return CastArray(CastArray(of, between), dtype)  # of dtypes of ml_dtypes, each of which it has all values of
    return CastArray(of, dtype)


def narrow(of: DerivedArray, dtype: str) -> DerivedArray:
    """An array as another dtype has its elements, rounded; what it has nothing near to is an error when it is made.

    Args:
        of: the array.
        dtype: a name that `ckptcore.model.dtype_from_name` knows.

    Raises:
        ValueError: if one of the dtypes has no numbers, or complex ones were to become real.
    """
    made = cast(of, dtype)
    if not isinstance(made, CastArray) or made is of:
        return of
    between = made.of.dtype if made.of is not of and isinstance(made.of, CastArray) else None
    return Narrowed(of, dtype, between)


def copy_rounded(out: HostArray, source: HostArray, between: str | None = None) -> None:
    """Copy numbers into an array of another dtype, each as the nearest value that it has.

    A number that the dtype has no place for is not wrapped, and one beyond its largest does not become infinite or NaN: it is an
    error.

    Args:
        out: of the shape of `source`; of any strides.
        source: of real numbers, or complex ones where those of `out` are; of whole ones where those of `out` are.
        between: the name of a dtype that has all values of `source`, where NumPy knows no cast from one to the other.

    Raises:
        ValueError: if there is a number that the dtype has nothing near to.
    """
    for piece in pieces(source.shape):  # what is compared of one takes memory, too
        _copy(out[piece], source[piece], between)


def _copy(out: HostArray, source: HostArray, between: str | None) -> None:
    if not source.size:
        return
    if between is not None:
        source = source.astype(between)
    dtype = name_of_dtype(out.dtype)
    values = float_values(dtype)
    if values is None:
        _expect_within(source, dtype)
    with np.errstate(all="ignore"):
        np.copyto(out, source, casting="unsafe")
        if values is not None:
            _expect_near(source, out, dtype, values)


def _expect_within(source: HostArray, dtype: str) -> None:
    low, high = int_range(dtype)
    if float_values(name_of_dtype(source.dtype)) is not None and not (finite := np.isfinite(source)).all():
        raise ValueError(f"{source[~finite].flat[0]} is none of {dtype}, which has {low} to {high}")
    # As Python's own ints: a limit of one dtype may be none of the other.
    for found in (int(source.min()), int(source.max())):
        if not low <= found <= high:
            raise ValueError(f"{found} is none of {dtype}, which has {low} to {high}")


def _expect_near(source: HostArray, out: HostArray, dtype: str, values: FloatValues) -> None:
    """Make sure that infinity and NaN are where they were, and nothing else became one of them."""
    finite = np.isfinite(out)
    if values.has_infinity and values.has_nan and finite.all():
        return
    is_whole = float_values(name_of_dtype(source.dtype)) is None
    before: HostArray = np.ones(source.shape, np.bool_) if is_whole else np.isfinite(source)
    lost = before & ~finite
    if not is_whole and not (values.has_infinity and values.has_nan):
        lost |= ~before & ~((np.isnan(source) & np.isnan(out)) | (np.isinf(source) & np.isinf(out)))
    if not values.is_signed:
        lost |= before & ~(source > np.zeros((), source.dtype))
    elif not values.has_nan:  # nor infinity: what is too large has become the largest
        lost |= before & (np.abs(source.astype(np.float64)) > _rounds_up_to(values))
    if lost.any():
        first = source[lost].flat[0]
        raise ValueError(f"{dtype} has nothing near {first}: its largest value is {values.most}")


def _rounds_up_to(values: FloatValues) -> float:
    """The largest number that is nearer to the largest value than to what would come after it."""
    exponent = int(np.frexp(values.most)[1])
    return values.most + 2.0 ** (exponent - values.bits) / 2


def pieces(shape: tuple[int, ...], most: int = _ELEMENTS) -> Iterator[Piece]:
    """Cut an array into pieces, in C order.

    Args:
        shape: of the array, in elements.
        most: elements of a piece.
    """
    if not shape:
        yield (...,)
        return
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    step = max(1, most // max(1, math.prod(shape[axis + 1 :])))
    for before in np.ndindex(*shape[:axis]):
        ones = [slice(index, index + 1) for index in before]
        for start in range(0, shape[axis], step):
            yield (*ones, slice(start, start + step), ...)


def is_complex(dtype: np.dtype[Any]) -> bool:
    """Return True for complex dtypes, also those that NumPy lacks."""
    return dtype.kind == "c" or dtype.name in ("complex32", "bcomplex32")


def is_whole(dtype: np.dtype[Any]) -> bool:
    """Return True for dtypes of whole numbers or truth values; NumPy's kinds do not tell for those of ml_dtypes."""
    return dtype.name.startswith(("int", "uint", "bool"))
