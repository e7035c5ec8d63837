"""Requests of a load: the leaves that it loads, the differences that it allows, and the report that it fills."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final, Generic, Literal, SupportsComplex, SupportsFloat, TypeVar, get_args

from ckptcore.model.arrays import ArraySpec
from ckptcore.protocols import ReadStrategy, Transforms

if TYPE_CHECKING:
    from ckptcore.select import Selection

__all__ = [
    "AS_IT_IS",
    "EXACT",
    "Casting",
    "LeafChange",
    "LoadAs",
    "LoadReport",
    "LoadRequest",
    "Matching",
    "Missing",
    "Sequences",
    "ShapeChange",
    "Unexpected",
]

T = TypeVar("T")

Unexpected = Literal["error", "ignore"]
"""Treatment of stored leaves that are not asked for."""

Missing = Literal["error", "placeholder", "keep"]
"""Treatment of leaves that are asked for and not stored."""

Casting = Literal["error", "safe", "narrowing"]
"""Conversion of arrays that are asked for in another dtype than the stored one."""

ShapeChange = Literal["reshape", "truncate", "pad"]
"""Changes of arrays that are asked for in another shape than the stored one."""

Sequences = Literal["exact", "either"]
"""Exchange of lists and tuples: a stored tuple for a list that is asked for, and the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Differences between an abstract tree and the stored one that a load allows. None by default.

    Allowed differences are listed in a `ckptcore.results.LoadReport`, if the load is given one. Others are errors, all
    listed at once.

    Attributes:
        unexpected: stored leaves that are not asked for: ``"error"``, or ``"ignore"``: they are not read.
        missing: leaves that are asked for and not stored: ``"error"``; ``"placeholder"``: they become
            `ckptcore.PLACEHOLDER`; ``"keep"``: they become the very values of the abstract tree, or with ``load_into``
            stay as they are. An abstract leaf without elements (`ckptcore.AbstractArray`, ``jax.ShapeDtypeStruct``, a
            tensor on the meta device) has no value to keep, and is an error.
        cast: arrays of another dtype: ``"error"``; ``"safe"``: cast them if the dtype that is asked for has every value
            of the stored one, infinities, NaN and negative zero included; ``"narrowing"``: also round values to the
            nearest. An int outside the range of the dtype, and a number beyond its largest, are an error when they are
            read. Floats are never cast to ints, complex numbers never to real ones, and numbers never to bool.
        shapes: changes of arrays of another shape: ``"reshape"``: keep the elements in C order, if there are as many;
            ``"truncate"``: take the first elements along each axis; ``"pad"``: append others along an axis. If there
            are as many elements, an array is reshaped rather than truncated along one axis and padded along another.
        pad_value: the value to pad with; the dtype of the array must have it.
        sequences: ``"exact"``: a list is stored for a list that is asked for, and a tuple for a tuple; ``"either"``:
            either may be stored for the other, and what is asked for is built. Formats of other software that do not
            distinguish the two are exempt.
    """

    unexpected: Unexpected = "error"
    missing: Missing = "error"
    cast: Casting = "error"
    shapes: Collection[ShapeChange] = ()
    pad_value: bool | int | float | complex = 0
    sequences: Sequences = "exact"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError, TypeError: names the option and its values.
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
"""No difference is allowed."""


_SHOWN: Final = 10
"""Paths of each kind in the text of a report."""


@dataclass(frozen=True, slots=True)
class LeafChange:
    """A change of an array that is asked for in another form than the stored one.

    Attributes:
        stored: the stored array.
        made: the array that was made of it.
        cast: ``"safe"`` or ``"narrowing"``; ``"error"`` if it was not cast.
        shapes: the changes of its shape.
        pad_value: the value it was padded with; None if it was not.
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
    """A report of a load. The caller creates one and passes it to the load, which fills it when it succeeds.

    Paths are written as in errors, ``params/layers[0].w``. Each leaf that is asked for is in one of `restored`,
    `changed`, `defaulted` and `skipped`.

    Attributes:
        restored: paths of leaves that were loaded as they are stored; paths are those in the result.
        changed: by path, arrays that were cast, reshaped, truncated or padded.
        defaulted: paths of leaves that are not stored, and were set by ``Matching(missing=...)``.
        skipped: paths of placeholders in the abstract tree.
        ignored: paths of stored leaves that were not asked for, as they are in the checkpoint, or as transforms name
            them. Leaves that transforms drop are in none of these.
        bytes_read: bytes that this process requested from the storage after opening the checkpoint, with whole blocks,
            compressed chunks and their indexes.
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
        for what in ("defaulted", "skipped", "ignored"):
            paths: Sequence[str] = getattr(self, what)
            if paths:
                lines.append(f"{what}: {_some(paths)}")
        return "\n".join(lines)


def _some(lines: Sequence[str]) -> str:
    return ", ".join(lines[:_SHOWN]) + (f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Options of a load.

    Attributes:
        select: the stored leaves to load; None: all.
        transforms: changes of the stored tree, applied before it is matched.
        matching: differences between the abstract tree and the stored one that are allowed.
        report: filled when the load has succeeded; None: no report.
        strategy: how it reads; None: as the context says.
    """

    select: Selection | None = None
    transforms: Transforms = ()
    matching: Matching = EXACT
    report: LoadReport | None = None
    strategy: ReadStrategy | None = None

    def __post_init__(self) -> None:
        """Check the types; selections and transforms are checked where they are used.

        Raises:
            TypeError: names the option and its type.
        """
        if not isinstance(self.matching, Matching):
            raise TypeError(f'matching={self.matching!r}: expected a ckptcore.Matching, such as Matching(cast="safe")')
        if self.report is not None and not isinstance(self.report, LoadReport):
            raise TypeError(f"report={self.report!r}: expected a ckptcore.results.LoadReport, which the load fills")


AS_IT_IS: Final = LoadRequest()
"""Load all leaves, without differences."""


@dataclass(frozen=True, slots=True)
class LoadAs(Generic[T]):
    """Options for the load of one of several checkpointables: those that `ckptcore.load` takes, for one name.

    Attributes:
        like: its abstract tree, or the object to restore in place; None: as it was saved.
        select, transforms, matching, report: as for `ckptcore.load`, or for `ckptcore.load_into` if an object is
            restored in place. For trees only, not for the files of objects.
    """

    like: T
    _: KW_ONLY
    select: Selection | None = None
    transforms: Transforms = ()
    matching: Matching = EXACT
    report: LoadReport | None = None

    @property
    def request(self) -> LoadRequest:
        """The options, without `like`."""
        return LoadRequest(select=self.select, transforms=self.transforms, matching=self.matching, report=self.report)
