"""Options of loads: the differences that `Matching` allows, and the `LoadReport` that a load fills."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Final, Literal, SupportsComplex, SupportsFloat, get_args

from ckptcore.model.arrays import ArraySpec, HostArray
from ckptcore.model.tree import LEAF, Skeleton, TreePath
from ckptcore.protocols import LeafHandler
from ckptcore.records import dataclass

Unexpected = Literal["error", "ignore"]
"""Treatment of stored leaves that the abstract tree does not request."""

Missing = Literal["error", "placeholder", "keep"]
"""Treatment of requested leaves that are not stored."""

Casting = Literal["error", "safe", "narrowing", "truncating"]
"""Treatment of arrays whose requested dtype differs from the stored dtype: refuse them, or cast them."""

ShapeChange = Literal["reshape", "truncate", "pad"]
"""Changes of arrays whose requested shape differs from the stored shape."""

Keys = Literal["exact", "text"]
"""Comparison of keys and containers: exactly, or by the text of keys alone."""

Sequences = Literal["exact", "either"]
"""Exchange of lists and tuples: a stored tuple may match a requested list, and vice versa."""


Values = Literal["stored", "error"]
"""Treatment of plain values of another kind or structure than requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Allowed differences between an abstract tree and the stored tree. By default, only plain values may differ.

    A `ckptcore.results.LoadReport` lists the allowed differences. One error lists all other differences. Regardless of
    these options, a load raises an error in three cases: no requested leaf is stored; no leaf of a module is stored,
    but other leaves below its path are; or all leaves of a part are stored only under another path. It logs a warning
    if less than half of the leaves of a module are stored.

    Attributes:
        unexpected: stored leaves that the abstract tree does not request: ``"error"``, or ``"ignore"`` to skip them.
        missing: requested leaves that are not stored: ``"error"``; ``"placeholder"``: load `ckptcore.PLACEHOLDER`
            instead; ``"keep"``: keep the values of the abstract tree, or of the target of ``load_into``. An abstract
            leaf without elements (`ckptcore.AbstractArray`, ``jax.ShapeDtypeStruct``, a tensor on the meta device) has
            no value to keep, and is an error.
        cast: arrays of another dtype: ``"error"``; ``"safe"``: cast if the requested dtype can represent every value of
            the stored dtype, including infinities, NaN and negative zero; ``"narrowing"``: also round to the nearest
            value; ``"truncating"``: also cast floats to ints, and drop their fractions. A number outside of the range
            of the dtype raises an error when it is read. Complex numbers are never cast to real numbers, and numbers
            never to bool.
        shapes: changes of arrays of another shape: ``"reshape"``: keep the elements in C order, if the number of
            elements is equal; ``"truncate"``: keep the first elements along an axis; ``"pad"``: append elements along
            an axis. If ``"reshape"`` is allowed and the number of elements is equal, the array is reshaped instead of
            truncated or padded.
        pad_value: the value to pad with. The dtype of the array must be able to represent it; dtypes of floats may
            round it.
        sequences: ``"exact"``: lists match stored lists, and tuples match stored tuples; ``"either"``: lists and tuples
            also match each other, and the load builds the requested type. Has no effect on formats of other software
            that store both alike.
        keys: ``"exact"``: keys and containers must be equal; ``"text"``: keys match if their texts are equal, in
            containers of any type: the dict ``{"1": ...}`` matches ``{1: ...}``, a list and a tuple. A container
            without leaves matches None. A number matches an array without axes if no precision is lost. Formats of
            other software are always matched in this way.
        values: plain values (None, numbers, text, bytes, arrays without axes, and lists and dicts of only such values)
            of another kind or structure than requested: ``"stored"``: a number or an array without axes is
            converted to the requested form if no precision is lost. Otherwise, if a Python value is requested, the
            stored value is loaded unchanged, so that counters, best results and histories of a program can change. A
            text key of a requested dict must be stored; otherwise it is a missing leaf. ``"error"``: every such
            difference is an error.
    """

    unexpected: Unexpected = "error"
    missing: Missing = "error"
    cast: Casting = "error"
    shapes: Collection[ShapeChange] = ()
    pad_value: bool | int | float | complex = 0
    sequences: Sequences = "exact"
    keys: Keys = "exact"
    values: Values = "stored"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError, TypeError: names the option and its allowed values.
        """
        for name, allowed in _CHOICES.items():
            given = getattr(self, name)
            if given not in allowed:
                raise ValueError(f"Matching({name}={given!r}): expected one of {', '.join(map(repr, allowed))}")
        known = get_args(ShapeChange)
        is_collection = isinstance(self.shapes, Collection) and not isinstance(self.shapes, str)
        if not is_collection or not all(change in known for change in self.shapes):
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
    "keys": get_args(Keys),
    "values": get_args(Values),
}

EXACT: Final = Matching()
"""The default options: only plain values may differ."""


_SHOWN: Final = 10
"""Maximum number of paths of each kind in the text of a report."""


@dataclass(frozen=True, slots=True)
class LeafChange:
    """A change of an array from its stored to its requested form.

    Attributes:
        stored: the stored shape and dtype.
        loaded: the shape and dtype after the change.
        cast: ``"safe"``, ``"narrowing"`` or ``"truncating"``; ``"error"`` if it was not cast.
        shapes: the changes of its shape.
        pad_value: the value that it was padded with; None if it was not padded.
    """

    stored: ArraySpec
    loaded: ArraySpec
    cast: Casting = "error"
    shapes: frozenset[ShapeChange] = frozenset()
    pad_value: bool | int | float | complex | None = None

    def __str__(self) -> str:
        done: list[str] = [*([f"{self.cast} cast"] if self.cast != "error" else []), *sorted(self.shapes)]
        if self.pad_value is not None:
            done[done.index("pad")] = f"pad with {self.pad_value!r}"
        return f"{self.stored} -> {self.loaded} ({', '.join(done)})"


@dataclass(slots=True, kw_only=True)
class LoadReport:
    """A report of a load. The caller creates one and passes it to the load, which fills it when it succeeds.

    Paths are formatted as in errors, ``params/layers[0].w``. Each requested leaf is in one of `restored`, `changed`,
    `defaulted` and `skipped`.

    Attributes:
        restored: paths, in the result, of leaves that were loaded without a change.
        changed: by path, arrays that were cast, reshaped, truncated or padded.
        defaulted: paths of leaves that are not stored, and were set by ``Matching(missing=...)``.
        skipped: paths of placeholders in the abstract tree, and of leaves of the result that ``select`` left out.
        ignored: paths of stored leaves that were not requested, after transforms. Leaves that transforms drop are not
            listed.
        bytes_read: bytes that this process requested from the storage after opening the checkpoint. Includes whole
            blocks, compressed chunks and their indexes.
    """

    restored: Sequence[str] = ()
    changed: Mapping[str, LeafChange] = field(default_factory=dict)
    defaulted: Sequence[str] = ()
    skipped: Sequence[str] = ()
    ignored: Sequence[str] = ()
    bytes_read: int = 0

    def __str__(self) -> str:
        """Return a line for each kind, with the first few paths."""
        lines = [f"{len(self.restored)} leaves restored, {self.bytes_read} bytes read"]
        changed = [f"{path}: {change}" for path, change in self.changed.items()]
        if changed:
            lines.append(f"changed: {_some(changed)}")
        for kind in ("defaulted", "skipped", "ignored"):
            paths: Sequence[str] = getattr(self, kind)
            if paths:
                lines.append(f"{kind}: {_some(paths)}")
        return "\n".join(lines)


def _some(lines: Sequence[str]) -> str:
    return ", ".join(lines[:_SHOWN]) + (f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


@dataclass(frozen=True, slots=True)
class Matched:
    """The stored leaf for each leaf of an abstract tree.

    Attributes:
        numbers: by leaf, the number of the stored leaf; None for a placeholder, for a value that is kept, and for a
            requested None that is not stored.
        handlers: by leaf, the handler that builds it; None for a placeholder, and for a leaf that a selection leaves
            out.
        defaulted: positions, in the abstract tree, of leaves that are not stored, and are allowed to be missing.
        ignored: numbers of stored leaves that are not requested, as a `Matching` or a selection allows.
        changes: by number of a stored array, its change to the requested shape and dtype.
        arrays: by position of a leaf, the array that was built from a stored Python number.
        skeleton, leaves: the containers and the leaves of the abstract tree.
        filled: for a target that is filled in place, True for each leaf that needs no replacement; None if the load
            builds a new value.
        first: positions of the leaves of objects that are restored before anything else is changed; None if there are
            no such objects.
        sparse: a message for each object with less than half of its leaves stored.
        kept: by position of a leaf that a selection leaves out of an object, the value that the object keeps.
        untouched: paths of the objects that a selection leaves out completely.
    """

    numbers: Sequence[int | None]
    handlers: Sequence[LeafHandler | None]
    defaulted: Sequence[int] = ()
    ignored: Sequence[int] = ()
    changes: Mapping[int, LeafChange] = field(default_factory=dict)
    arrays: Mapping[int, HostArray] = field(default_factory=dict)
    skeleton: Skeleton = LEAF
    leaves: Sequence[object] = ()
    filled: list[bool] | None = None
    first: frozenset[int] | None = None
    sparse: Sequence[str] = ()
    kept: Mapping[int, object] = field(default_factory=dict)
    untouched: frozenset[TreePath] = frozenset()
