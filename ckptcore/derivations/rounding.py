"""Rounding: numbers as the nearest values of another dtype; refused where a number would become another sort of thing."""

from __future__ import annotations

import numpy as np

from ckptcore.derivations.pieces import pieces
from ckptcore.dtype_values import FloatValues, float_values, int_range
from ckptcore.model.arrays import HostArray, name_of_dtype

__all__ = ["copy_rounded"]


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
