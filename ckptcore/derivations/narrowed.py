"""Arrays cast to dtypes that do not have all values of theirs: rounded, and refused where a number would become another sort of thing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Final

import numpy as np

from ckptcore.derivations.derivation import Derivation, Part
from ckptcore.derivations.made import Cast, cast
from ckptcore.dtype_values import FloatValues, float_values, int_range
from ckptcore.model.arrays import ArraySpec, Box, HostArray, name_of_dtype

__all__ = ["Narrowed", "narrow"]

_PIECE_ELEMENTS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Narrowed:
    """An array as another dtype has its elements, each rounded to the nearest value.

    An int that the dtype has no place for is not wrapped, and a number beyond its largest does not become infinite or NaN: it is an
    error.

    Attributes:
        of: the array.
        dtype: the name of the dtype.
        between: that of a dtype which has all values of the array, where NumPy knows no cast from one to the other.
    """

    of: Derivation
    dtype: str
    between: str | None = None

    @property
    def spec(self) -> ArraySpec:
        """The array that is made."""
        return ArraySpec(self.of.spec.shape, self.dtype)

    @property
    def inputs(self) -> Sequence[Derivation]:
        """The array."""
        return (self.of,)

    def needed(self, box: Box) -> Sequence[Part]:
        """The same box."""
        return (Part(0, box),)

    def views(self, box: Box, out: HostArray) -> Sequence[HostArray] | None:
        """None: the elements are others."""
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        """Cast the elements.

        Raises:
            ValueError: if there is one that the dtype has nothing near to.
        """
        for piece in _pieces(box.shape):
            self._cast(parts[0][piece], out[piece])

    def _cast(self, source: HostArray, out: HostArray) -> None:
        if self.between is not None:
            source = source.astype(ArraySpec((), self.between).numpy_dtype)
        values = float_values(self.dtype)
        if values is None:
            self._expect_within(source)
        with np.errstate(all="ignore"):
            np.copyto(out, source, casting="unsafe")
            if values is not None:
                self._expect_near(source, out, values)

    def _expect_within(self, source: HostArray) -> None:
        low, high = int_range(self.dtype)
        # As Python's own ints: a limit of one dtype may be none of the other.
        for found in (int(source.min()), int(source.max())):
            if not low <= found <= high:
                raise ValueError(f"{found} is none of {self.dtype}, which has {low} to {high}")

    def _expect_near(self, source: HostArray, out: HostArray, values: FloatValues) -> None:
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
            raise ValueError(f"{self.dtype} has nothing near {first}: its largest value is {values.most}")


def _pieces(shape: tuple[int, ...]) -> Iterator[slice | EllipsisType]:
    """What to index an array with to get it piece by piece: what is compared of one takes memory, too."""
    if not shape:
        yield ...  # gives an array, where () gives its element
        return
    rows = max(1, _PIECE_ELEMENTS // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield slice(start, start + rows)


def _rounds_up_to(values: FloatValues) -> float:
    """The largest number that is nearer to the largest value than to what would come after it."""
    exponent = int(np.frexp(values.most)[1])
    return values.most + 2.0 ** (exponent - values.bits) / 2


def narrow(of: Derivation, dtype: str) -> Derivation:
    """An array as another dtype has its elements, rounded; what it has nothing near to is an error when it is made.

    Args:
        of: the array.
        dtype: a name that `ckptcore.model.dtype_from_name` knows.

    Raises:
        ValueError: if one of the dtypes has no numbers, or complex ones were to become real.
    """
    made = cast(of, dtype)
    if made is of:
        return of
    (given,) = made.inputs
    between = given.dtype if given is not of and isinstance(given, Cast) else None
    return Narrowed(of, dtype, between)
