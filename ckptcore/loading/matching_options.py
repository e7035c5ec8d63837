"""Differences that a load allows, and the report of those that it met."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Literal, SupportsComplex, SupportsFloat, get_args

from ckptcore.model.arrays import ArraySpec

__all__ = [
    "EXACT",
    "Casting",
    "LeafChange",
    "LoadReport",
    "Matching",
    "Missing",
    "Sequences",
    "ShapeChange",
    "Unexpected",
]

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


_TOLD: Final = 10
"""How many paths of each kind the text of a report has."""


@dataclass(frozen=True, slots=True)
class LeafChange:
    """What a load did with an array that was asked for otherwise than it is stored.

    Attributes:
        stored: what is stored.
        made: what was made of it.
        cast: ``"safe"`` or ``"narrowing"``; ``"error"`` where it was not cast.
        shapes: what was done with its shape.
        pad_value: what it was padded with; None where it was not.
    """

    stored: ArraySpec
    made: ArraySpec
    cast: Casting = "error"
    shapes: frozenset[ShapeChange] = frozenset()
    pad_value: bool | int | float | complex | None = None

    def __str__(self) -> str:
        done: list[str] = [*([f"{self.cast} cast"] if self.cast != "error" else []), *sorted(self.shapes)]
        if self.pad_value is not None:
            done[done.index("pad")] = f"pad with {self.pad_value!r}"
        return f"{self.stored} -> {self.made} ({', '.join(done)})"


@dataclass(slots=True, kw_only=True)
class LoadReport:
    """What a load did. The caller makes one and gives it to the load, which fills it when it is done; one that fails leaves it alone.

    Paths are as errors write them, ``params/layers[0].w``. Each leaf that is asked for is in one of `restored`, `changed`,
    `defaulted` and `skipped`.

    Attributes:
        restored: the paths of leaves that were loaded as they are stored; the paths are those in the result.
        changed: those of arrays that were cast, reshaped, truncated or padded, with what was done.
        defaulted: those of leaves that are not stored, and have the value that ``Matching(missing=...)`` says.
        skipped: those of placeholders in the abstract tree.
        ignored: the paths of stored leaves that were not asked for, as they are in the checkpoint, or as transforms name them. What transforms
            drop is in none of these.
        bytes_read: bytes that this process asked of the storage once it knew what the checkpoint holds: whole blocks, compressed
            chunks and what tells where they are included.
    """

    restored: Sequence[str] = ()
    changed: Mapping[str, LeafChange] = field(default_factory=dict)
    defaulted: Sequence[str] = ()
    skipped: Sequence[str] = ()
    ignored: Sequence[str] = ()
    bytes_read: int = 0

    def take(self, other: LoadReport) -> None:
        """Say what another report says."""
        for own in fields(self):
            setattr(self, own.name, getattr(other, own.name))

    def __str__(self) -> str:
        """A line for each kind of thing that was done, with the first few paths."""
        lines = [f"{len(self.restored)} leaves restored, {self.bytes_read} bytes read"]
        changed = [f"{path}: {change}" for path, change in self.changed.items()]
        if changed:
            lines.append(f"changed: {_some(changed)}")
        for what in ("defaulted", "skipped", "ignored"):
            paths: Sequence[str] = getattr(self, what)
            if paths:
                lines.append(f"{what}: {_some(paths)}")
        return "\n".join(lines)


def _some(told: Sequence[str]) -> str:
    return ", ".join(told[:_TOLD]) + (f" and {len(told) - _TOLD} more" if len(told) > _TOLD else "")
