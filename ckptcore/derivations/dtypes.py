"""Dtypes: the values that each can represent, casts and rounding of arrays to other dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from ckptcore.model.arrays import ArraySpec, Box, HostArray, dtype_from_name, name_of_dtype, sort_of_numbers
from ckptcore.planning.partition import cut_box
from ckptcore.protocols import DerivedArray, Part
from ckptcore.records import dataclass

PieceIndex: TypeAlias = tuple[slice | EllipsisType, ...]
"""An index of an array whose result is always an array, also for an array without axes."""

_ELEMENTS: Final = 1 << 18
"""Elements of a piece: in float32, several pieces fit in a processor's cache."""

_PARTS: Final = {"complex32": "float16", "bcomplex32": "bfloat16", "complex64": "float32", "complex128": "float64"}
"""The dtype of the real and the imaginary parts of complex dtypes."""

_NUMBER_KINDS: Final = ("bool", "int", "float", "complex")
"""Kinds of numbers. Each kind includes the earlier kinds, apart from precision."""


@dataclass(frozen=True, slots=True)
class FloatValues:
    """The values of a floating point dtype: multiples of the smallest value, with limited precision and range.

    Attributes:
        bits: bits of precision, including the implicit bit.
        least, most: the smallest and the largest finite positive value.
        is_signed: True if the dtype has negative numbers and zero. Dtypes without negative numbers also lack zero.
        has_infinity, has_nan, has_minus_zero: True if the dtype has these values.
    """

    bits: int
    least: float
    most: float
    is_signed: bool
    has_infinity: bool
    has_nan: bool
    has_minus_zero: bool

    def has_all_values(self, other: FloatValues) -> bool:
        """Return True if the dtype has all values of another dtype. All NaN count as one value, and -0.0 as a value."""
        return (
            other.bits <= self.bits
            and other.least >= self.least
            and other.most <= self.most
            and self.is_signed >= other.is_signed
            and self.has_infinity >= other.has_infinity
            and self.has_nan >= other.has_nan
            and self.has_minus_zero >= other.has_minus_zero
        )

    def has_all_ints(self, low: int, high: int) -> bool:
        """Return True if the dtype has every int from `low` (at most 0) to `high`, both included."""
        # The precision of b bits represents every int up to 2**b.
        largest = max(-low, high)
        return self.is_signed and self.least <= 1 and largest <= self.most and largest <= 1 << self.bits


def has_all_values_of(dtype: str, other: str) -> bool:
    """Return True if `dtype` has every value of the dtype `other`, so that a cast loses nothing.

    True and False are 1 and 0. A dtype that is not numeric has only its own values.

    Args:
        dtype, other: names that `ckptcore.model.dtype_from_name` knows.
    """
    if dtype == other:
        return True
    if not accepts_kind_of(dtype, other):
        return False
    if (values := float_values(dtype)) is None:
        low, high = int_range(dtype)
        least, most = int_range(other)
        return low <= least and most <= high
    if (others := float_values(other)) is not None:
        return values.has_all_values(others)
    return values.has_all_ints(*int_range(other))


def is_narrowing(dtype: str, other: str) -> bool:
    """Return True if a cast of the dtype `other` to `dtype` loses precision or range, and nothing else.

    False for a cast without loss, and for casts of floats to ints and of complex to real numbers, which lose more.
    """
    return dtype != other and accepts_kind_of(dtype, other) and not has_all_values_of(dtype, other)


def is_truncating(dtype: str, other: str) -> bool:
    """Return True if a cast of the dtype `other` to `dtype` converts floats to ints, and so drops fractions."""
    return sort_of_numbers(dtype) == "int" and sort_of_numbers(other) == "float"


def accepts_kind_of(dtype: str, other: str) -> bool:
    """Return True if the kind of `dtype` includes the kind of `other`. False if `dtype` is bool."""
    sort, of_other = sort_of_numbers(dtype), sort_of_numbers(other)
    if sort is None or of_other is None:
        return False
    return _NUMBER_KINDS.index(sort) >= _NUMBER_KINDS.index(of_other) and sort != "bool"


def int_range(dtype: str) -> tuple[int, int]:
    """Return the lowest and the highest value of a dtype of ints, or of bool."""
    if dtype == "bool":
        return 0, 1
    limits = ml_dtypes.iinfo(dtype_from_name(dtype))  # type: ignore[no-untyped-call]  # ml_dtypes leaves it untyped
    return int(limits.min), int(limits.max)


@functools.lru_cache(maxsize=64)
def float_values(dtype: str) -> FloatValues | None:
    """Return the values of a dtype of floats, or of the parts of a complex dtype; None for other dtypes."""
    if sort_of_numbers(dtype) not in ("float", "complex"):
        return None
    numpy_dtype = dtype_from_name(_PARTS.get(dtype, dtype))
    limits = ml_dtypes.finfo(numpy_dtype)  # type: ignore[no-untyped-call]  # ml_dtypes leaves it untyped
    with np.errstate(all="ignore"):
        infinity, nan, minus_zero = [np.array(value).astype(numpy_dtype) for value in (np.inf, np.nan, -0.0)]
        below = np.array(-1.0).astype(numpy_dtype)
    return FloatValues(
        bits=limits.nmant + 1,
        least=float(limits.smallest_subnormal),
        most=float(limits.max),
        is_signed=float(below) == -1,
        has_infinity=bool(np.isinf(infinity)),
        has_nan=bool(np.isnan(nan)),
        has_minus_zero=float(minus_zero) == 0 and bool(np.signbit(minus_zero)),
    )


@dataclass(frozen=True, slots=True)
class _Converted:
    """An array converted to another dtype.

    Attributes:
        of: the array.
        dtype: the name of the dtype.
        copy: copies elements to memory of this dtype: `copy_cast`, `copy_rounded` or `copy_truncated`.
    """

    of: DerivedArray
    dtype: str
    copy: Callable[[HostArray, HostArray], None]

    @property
    def spec(self) -> ArraySpec:
        """The shape of the array, and the new dtype."""
        return ArraySpec(self.of.spec.shape, self.dtype)

    @property
    def inputs(self) -> Sequence[DerivedArray]:
        """The array."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """Return the same box."""
        return (Part(0, box),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """Return None: the elements are computed."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Convert the elements.

        Raises:
            ValueError: an element is outside of the range of the dtype, and `copy` is not `copy_cast`.
        """
        self.copy(out, parts[0])


def cast(of: DerivedArray, dtype: str) -> DerivedArray:
    """Cast an array to another dtype, as `copy_cast` does.

    Args:
        of: the array.
        dtype: a name that `ckptcore.model.dtype_from_name` knows.

    Raises:
        ValueError: if one of the dtypes is not numeric, or complex numbers would become real.
        UnsupportedLeafError: if the name is not known.
    """
    return _converted(of, dtype, copy_cast)


def narrow(of: DerivedArray, dtype: str) -> DerivedArray:
    """Round the elements of an array to another dtype. Reading fails for numbers outside of its range.

    See `cast` for the arguments and errors.
    """
    return _converted(of, dtype, copy_rounded)


def truncate(of: DerivedArray, dtype: str) -> DerivedArray:
    """Cast an array of floats to a dtype of ints. Reading fails for numbers outside of its range.

    Args:
        of: the array.
        dtype: a name that `ckptcore.model.dtype_from_name` knows.

    Raises:
        ValueError: if the array has no floats, or the dtype no ints.
    """
    if not is_truncating(dtype, of.spec.dtype):
        raise ValueError(f"{of.spec} cannot be truncated to {dtype}: expected floats, and a dtype of ints")
    return _Converted(of, dtype, copy_truncated)


def _converted(of: DerivedArray, dtype: str, copy: Callable[[HostArray, HostArray], None]) -> DerivedArray:
    before, after = of.spec.numpy_dtype, dtype_from_name(dtype)
    if before == after:
        return of
    if "S" in (before.kind, after.kind) or {*before.kind, *after.kind} & set("UmM"):
        raise ValueError(f"{of.spec} cannot be cast to {dtype}: both dtypes must be numeric")
    if is_complex(before) and not is_complex(after):
        raise ValueError(f"{of.spec} cannot be cast to {dtype}: the imaginary parts would be lost")
    return _Converted(of, dtype, copy)


@functools.lru_cache(maxsize=64)
def _between(before: np.dtype[Any], after: np.dtype[Any]) -> str | None:
    """Return a dtype with all values of `before` for a cast in two steps; None if NumPy casts directly.

    NumPy has no casts between some dtypes of ml_dtypes.
    """
    try:
        np.zeros(1, before).astype(after)
    except (TypeError, ValueError):
        return "complex64" if is_complex(before) else "float32"
    return None


def copy_cast(out: HostArray, source: HostArray) -> None:
    """Copy numbers into an array of another dtype as NumPy does, without errors for numbers outside of its range.

    Outside of the range, ints wrap around. Floats become infinite or NaN, or the largest value of a dtype that has
    neither. The result of a cast of such a float to an int depends on the platform.
    """
    between = _between(source.dtype, out.dtype)
    for piece in pieces(source.shape):  # limits the memory of a cast in two steps
        part = source[piece] if between is None else source[piece].astype(between)
        with np.errstate(all="ignore"):
            np.copyto(out[piece], part, casting="unsafe")


def copy_truncated(out: HostArray, source: HostArray) -> None:
    """Copy floats into an array of ints, each rounded towards zero.

    Numbers outside of the range of the dtype, infinities and NaN are errors.

    Raises:
        ValueError: if an element is outside of the range of the dtype.
    """
    dtype = name_of_dtype(out.dtype)
    wide = np.uint64 if dtype == "uint64" else np.int64
    for piece in pieces(source.shape):
        whole: HostArray = np.trunc(source[piece].astype(np.float64))
        if whole.size:
            _expect_within(whole, dtype)
        out[piece] = whole.astype(wide).astype(out.dtype)


def copy_rounded(out: HostArray, source: HostArray) -> None:
    """Copy numbers into an array of another dtype, each rounded to the nearest value.

    A number outside of the range of the dtype is an error: it does not wrap, and does not become infinite or NaN.

    Args:
        out: an array of the shape of `source`; of any strides.
        source: an array of real numbers; complex only if `out` is complex; ints or bools if `out` has ints.

    Raises:
        ValueError: if a number is outside of the range of the dtype.
    """
    dtype, between = name_of_dtype(out.dtype), _between(source.dtype, out.dtype)
    values = float_values(dtype)
    for piece in pieces(source.shape):  # limits the memory of the comparisons
        part = source[piece] if between is None else source[piece].astype(between)
        if not part.size:
            continue
        if values is None:
            _expect_within(part, dtype)
        with np.errstate(all="ignore"):
            np.copyto(out[piece], part, casting="unsafe")
            if values is not None:
                _expect_near(part, out[piece], dtype, values)


def _expect_within(source: HostArray, dtype: str) -> None:
    low, high = int_range(dtype)
    if float_values(name_of_dtype(source.dtype)) is not None and not (finite := np.isfinite(source)).all():
        raise ValueError(f"{source[~finite].flat[0]} is out of range for {dtype} ({low} to {high})")
    # Compare as Python ints: one dtype may not have the limits of the other.
    for number in (int(source.min()), int(source.max())):
        if not low <= number <= high:
            raise ValueError(f"{number} is out of range for {dtype} ({low} to {high})")


def _expect_near(source: HostArray, out: HostArray, dtype: str, values: FloatValues) -> None:
    """Check that infinite elements and NaN are unchanged, and that all others are in the range of the dtype.

    Raises:
        ValueError: an element is outside of the range, or the dtype lacks its infinity or NaN.
    """
    finite = np.isfinite(out)
    if values.has_infinity and values.has_nan and finite.all():
        return
    is_int_or_bool = float_values(name_of_dtype(source.dtype)) is None
    before: HostArray = np.ones(source.shape, np.bool_) if is_int_or_bool else np.isfinite(source)
    lost = before & ~finite
    if not is_int_or_bool and not (values.has_infinity and values.has_nan):
        lost |= ~before & ~((np.isnan(source) & np.isnan(out)) | (np.isinf(source) & np.isinf(out)))
    if not values.is_signed:
        lost |= before & ~(source > np.zeros((), source.dtype))
    elif not values.has_nan:  # and no infinity: NumPy replaced larger numbers by the largest value
        lost |= before & (np.abs(source.astype(np.float64)) > _rounds_up_to(values))
    if lost.any():
        first = source[lost].flat[0]
        raise ValueError(f"{first} is out of range for {dtype}, whose largest value is {values.most}")


def _rounds_up_to(values: FloatValues) -> float:
    """Return the largest number that rounds to the largest value of the dtype."""
    exponent = int(np.frexp(values.most)[1])
    return values.most + 2.0 ** (exponent - values.bits) / 2


def pieces(shape: tuple[int, ...], most: int = _ELEMENTS) -> Iterator[PieceIndex]:
    """Cut an array into pieces, in C order.

    Args:
        shape: shape of the array, in elements.
        most: limit of the elements of a piece.
    """
    for box in cut_box(Box.whole(shape), 1, most):
        yield (*box.slices, ...)


def is_complex(dtype: np.dtype[Any]) -> bool:
    """Return True for complex dtypes, including dtypes that NumPy lacks."""
    return dtype.kind == "c" or dtype.name in ("complex32", "bcomplex32")


def is_int_or_bool(dtype: np.dtype[Any]) -> bool:
    """Return True for dtypes of ints and bools. NumPy's `kind` does not identify dtypes of ml_dtypes."""
    return dtype.name.startswith(("int", "uint", "bool"))
