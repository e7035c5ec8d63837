"""Adjustments: stored arrays cast, reshaped, truncated or padded to what is asked for, as far as a load allows it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ckptcore.context import Context
from ckptcore.derivations import Stored, cast, cut, narrow, pad, reshape
from ckptcore.derivations.dtypes import float_values, has_all_values_of, is_narrowing, may_become
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.derived import Derived, derive
from ckptcore.loading.differences import Remedy
from ckptcore.loading.load_requests import Casting, LeafChange, Matching, ShapeChange
from ckptcore.model.arrays import ArraySpec, Box, name_of_dtype
from ckptcore.model.metadata import ArrayRecord, LeafRecord
from ckptcore.protocols import DerivedArray

__all__ = ["Adjustment", "Refused", "adjust", "adjusted"]


_WAYS: Final[tuple[frozenset[ShapeChange], ...]] = (frozenset(("reshape",)), frozenset(("truncate", "pad")))
"""What may make one shape of another, in the order in which it is proposed."""


@dataclass(frozen=True, slots=True)
class Adjustment:
    """How a stored array becomes what is asked for.

    Attributes:
        change: what is done.
        make: makes it of the stored array.
    """

    change: LeafChange
    make: Callable[[DerivedArray], DerivedArray]


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a stored array does not become what is asked for.

    Attributes:
        sort: of the difference.
        reason: in words.
        allowed_by: what would allow it; None if nothing would.
    """

    sort: str
    reason: str
    allowed_by: Remedy | None


def adjust(asked: ArraySpec, stored: ArraySpec, matching: Matching) -> Adjustment | Sequence[Refused]:
    """Find what makes an array as it is asked for of the stored one; or every reason why nothing does.

    Args:
        asked, stored: which differ; both of plain arrays.
        matching: what is allowed.
    """
    told = f"{asked} is asked for, {stored} is stored"
    refused: list[Refused] = []
    shapes = _shape_changes(asked.shape, stored.shape, matching)
    if shapes is None:
        refused.append(Refused("shape", f"shape: {told}", _remedy(asked.shape, stored.shape, matching)))
    casting = _casting(asked.dtype, stored.dtype)
    if casting is None:
        refused.append(Refused("dtype", f"dtype: {told}; the one is not cast to the other", None))
    elif casting != "error" and matching.cast not in ("narrowing", casting):
        why = "nothing is cast unless asked"
        if matching.cast == "safe":
            why = f"not every value of {stored.dtype} is one of {asked.dtype}"
        refused.append(Refused("dtype", f"dtype: {told}; {why}", Remedy("cast", casting)))
    if refused or shapes is None or casting is None:
        return refused
    make = functools.partial(_made, asked=asked, shapes=shapes, casting=casting, matching=matching)
    try:
        made = make(Stored(stored, 0))
    except ValueError as error:  # of the value to pad with
        return (Refused("shape", f"shape: {told}; {error}", None),)
    pad_value = matching.pad_value if "pad" in shapes else None
    return Adjustment(LeafChange(stored, made.spec, casting, shapes, pad_value), make)


def _remedy(asked: tuple[int, ...], stored: tuple[int, ...], matching: Matching) -> Remedy | None:
    """What would allow a shape."""
    for shapes in _WAYS:
        changes = _shape_changes(asked, stored, replace(matching, shapes=shapes))
        if changes is not None:
            return Remedy("shapes", frozenset(changes))
    return None


def _shape_changes(
    asked: tuple[int, ...], stored: tuple[int, ...], matching: Matching
) -> frozenset[ShapeChange] | None:
    """What is to be done with a shape; None if it is not allowed."""
    needed: set[ShapeChange] = set()
    if asked == stored:
        return frozenset()
    if "reshape" in matching.shapes and ArraySpec(asked, "bool").size == ArraySpec(stored, "bool").size:
        return frozenset(("reshape",))
    if len(asked) != len(stored):
        return None
    for wanted, there in zip(asked, stored, strict=True):
        if wanted != there:
            needed.add("truncate" if wanted < there else "pad")
    return frozenset(needed) if needed <= set(matching.shapes) else None


def _casting(asked: str, stored: str) -> Casting | None:
    """How a dtype becomes another; None if it does not."""
    if asked == stored:
        return "error"
    if has_all_values_of(asked, stored):
        return "safe"
    return "narrowing" if is_narrowing(asked, stored) else None


def _made(
    stored: DerivedArray, *, asked: ArraySpec, shapes: frozenset[ShapeChange], casting: Casting, matching: Matching
) -> DerivedArray:
    made = stored
    if "reshape" in shapes:
        made = reshape(made, asked.shape)
    if "truncate" in shapes:
        kept = tuple(map(min, asked.shape, made.spec.shape))
        made = cut(made, Box.whole(kept))
    if casting != "error":
        made = cast(made, asked.dtype) if casting == "safe" else narrow(made, asked.dtype)
    if "pad" in shapes:
        before = (0,) * len(asked.shape)
        after = [wanted - there for wanted, there in zip(asked.shape, made.spec.shape, strict=True)]
        made = pad(made, before, after, _value_of(asked.dtype, matching.pad_value))
    return made


def _value_of(dtype: str, value: bool | complex) -> bool | int | float | complex:
    """The value, if a dtype has it or, being of floats, one near to it.

    Raises:
        ValueError
    """
    given = np.asarray(value)
    name = name_of_dtype(given.dtype)
    if not may_become(dtype, name) and not dtype == name == "bool":
        raise ValueError(f"it cannot have the value {value!r}; give one that the dtype has")
    if float_values(dtype) is not None and dtype != name:
        one = narrow(Stored(ArraySpec((), name), 0), dtype)
        one.make(Box((), ()), [given], np.empty((), ArraySpec((), dtype).numpy_dtype))
    return value


def adjusted(opened: Checkpoint, adjustments: Mapping[int, Adjustment], context: Context) -> Checkpoint:
    """The same checkpoint with arrays adjusted, which are made as they are read.

    Leaves that share their bytes share what is made of them where both are adjusted alike.

    Args:
        opened: the checkpoint.
        adjustments: by number of the leaf.
        context: its bound on memory is kept.
    """
    if not adjustments:
        return opened
    tree = opened.tree
    # What transforms make is adjusted in one go with them, so that it is made in pieces by what these read.
    made = opened.derived
    below = made if isinstance(made, Derived) and not made.is_builtin else None
    leaves: list[LeafRecord] = list(tree.leaves)
    derivations: dict[int, DerivedArray] = {}
    aliases: dict[int, int] = {}
    first: dict[tuple[int, LeafChange | None], int] = {}
    changes: dict[int, tuple[int, str]] = {}
    for number, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord):
            continue
        original = tree.aliases.get(number, number)
        found = adjustments.get(number)
        change = None if found is None else found.change
        if found is not None:
            leaves[number] = replace(record, spec=found.change.made, cuts=None)
        if (same := first.setdefault((original, change), number)) != number:
            aliases[number] = same
            continue
        changes[number] = original, "" if change is None else str(change)
        before = Stored(record.spec, original) if below is None else below.derivations[original]
        derivations[number] = before if found is None else found.make(before)
    values = {number: number for number, record in enumerate(leaves) if not isinstance(record, ArrayRecord)}
    first_below, *beside = (opened,) if below is None else below.sources
    return derive(
        first_below,
        replace(tree, leaves=tuple(leaves), aliases=aliases),
        derivations,
        values=values if below is None else below.values,
        beside=beside,
        most_bytes=context.memory.load_bytes,
        description="" if below is None else below.description,
        changes=changes,
    )
