"""Matching: which differences between what a load asks for and what is stored are allowed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, SupportsComplex, SupportsFloat, get_args

__all__ = ["EXACT", "Casting", "Matching", "Missing", "Sequences", "ShapeChange", "Unexpected"]

Unexpected = Literal["error", "ignore"]
"""What becomes of stored leaves that are not asked for."""

Missing = Literal["error", "placeholder", "keep"]
"""What becomes of leaves that are asked for and not stored."""

Casting = Literal["error", "safe", "narrowing"]
"""What becomes of arrays that are asked for in another dtype than the stored one."""

ShapeChange = Literal["reshape", "truncate", "pad"]
"""What may be done with arrays that are asked for in another shape than the stored one."""

Sequences = Literal["exact", "either"]
"""Whether a list may be asked for where a tuple is stored, and the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Which differences between an abstract tree and the stored one a load allows. By itself it allows none.

    Whatever is allowed is told in a `ckptcore.LoadReport`, if the load is given one. Differences that are not allowed are errors, all
    of them listed at once.

    Attributes:
        unexpected: stored leaves that are not asked for: ``"error"``, or ``"ignore"``: they are not read.
        missing: leaves that are asked for and not stored: ``"error"``; ``"placeholder"``: `ckptcore.PLACEHOLDER` comes in their places;
            ``"keep"``: the abstract tree's own values do, or with ``load_into`` stay: the very same objects. An abstract leaf without
            elements (`ckptcore.AbstractArray`, ``jax.ShapeDtypeStruct``, a tensor on the meta device) has none to keep, and is an error.
        cast: arrays of another dtype: ``"error"``; ``"safe"``: they are cast where every value of the stored dtype is one of that which
            is asked for, the infinities, NaN and the zero below zero included; ``"narrowing"``: also where values are rounded to the
            nearest. An int that the dtype has no place for, and a number beyond its largest, are an error when they are read. Floats
            are never cast to ints, complex numbers never to real ones, and numbers never to bool.
        shapes: what is done with arrays of another shape: ``"reshape"``: the elements in C order, where there are as many;
            ``"truncate"``: along each axis the first elements that are asked for; ``"pad"``: behind the last element along an axis come
            others. Where there are as many elements, an array is reshaped rather than truncated along one axis and padded along another.
        pad_value: what arrays are padded with; their dtype must have it.
        sequences: ``"exact"``: a list is stored where one is asked for, and a tuple where a tuple is; ``"either"``: either may be in the
            place of the other, and what is asked for is built. Formats of other software that do not tell one from the other are not
            held to it.
    """

    unexpected: Unexpected = "error"
    missing: Missing = "error"
    cast: Casting = "error"
    shapes: Collection[ShapeChange] = ()
    pad_value: bool | int | float | complex = 0
    sequences: Sequences = "exact"

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            ValueError, TypeError: names the option and what it may be.
        """
        for name, allowed in _CHOICES.items():
            given = getattr(self, name)
            if given not in allowed:
                raise ValueError(f"Matching({name}={given!r}): expected one of {', '.join(map(repr, allowed))}")
        known = get_args(ShapeChange)
        several = isinstance(self.shapes, Collection) and not isinstance(self.shapes, str)
        if not several or not all(change in known for change in self.shapes):
            raise ValueError(f"Matching(shapes={self.shapes!r}): expected a set of {', '.join(map(repr, known))}")
        object.__setattr__(self, "shapes", frozenset(self.shapes))
        axes: tuple[int, ...] = getattr(self.pad_value, "shape", ())
        if not isinstance(self.pad_value, SupportsComplex | SupportsFloat) or axes:
            raise TypeError(f"Matching(pad_value={self.pad_value!r}): expected a number, True or False")


_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "unexpected": get_args(Unexpected),
    "missing": get_args(Missing),
    "cast": get_args(Casting),
    "sequences": get_args(Sequences),
}

EXACT: Final = Matching()
"""What is asked for is what is stored."""
