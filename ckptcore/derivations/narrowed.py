"""Arrays cast to dtypes that do not have all values of theirs: rounded, and refused where a number would become another sort of thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptcore.derivations.derivation import Derivation, Part
from ckptcore.derivations.made import Cast, cast
from ckptcore.derivations.rounding import copy_rounded
from ckptcore.model.arrays import ArraySpec, Box, HostArray

__all__ = ["Narrowed", "narrow"]


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
        copy_rounded(out, parts[0], self.between)


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
