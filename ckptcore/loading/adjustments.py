"""Adjustments: stored arrays cast, reshaped, truncated or padded to what is asked for, as far as a load allows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from ckptcore.context import Context
from ckptcore.derivations import Stored, cast, cut, may_become, narrow, pad, reshape
from ckptcore.derivations.dtypes import float_values, has_all_values_of, is_narrowing
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.derived import derive
from ckptcore.loading.differences import Difference, Remedy
from ckptcore.loading.load_requests import Casting, LeafChange, Matching, ShapeChange
from ckptcore.model.arrays import ArraySpec, Box, name_of_dtype
from ckptcore.model.metadata import ArrayRecord, LeafRecord
from ckptcore.protocols import DerivedArray

__all__ = ["adjust", "adjusted"]

_WAYS: Final[tuple[frozenset[ShapeChange], ...]] = (frozenset(("reshape",)), frozenset(("truncate", "pad")))
"""Changes that may turn one shape into another, in the order in which they are proposed."""


def adjust(path: str, asked: ArraySpec, stored: ArraySpec, matching: Matching) -> LeafChange | list[Difference]:
    """Find the change that turns a stored array into the one that is asked for; or every reason why there is none.

    Args:
        path: the path of the array, for the reasons.
        asked, stored: different specs of plain arrays.
        matching: the allowed differences.
    """
    both = f"{asked} is asked for, {stored} is stored"
    refused: list[Difference] = []
    shapes = _shape_changes(asked.shape, stored.shape, matching)
    if shapes is None:
        remedy = _remedy(asked.shape, stored.shape, matching)
        refused.append(Difference("shape", f"{path}: shape: {both}", remedy))
    casting = _casting(asked.dtype, stored.dtype)
    if casting is None:
        refused.append(Difference("dtype", f"{path}: dtype: {both}; the one is not cast to the other"))
    elif casting != "error" and matching.cast not in ("narrowing", casting):
        why = "nothing is cast unless asked"
        if matching.cast == "safe":
            why = f"not every value of {stored.dtype} is one of {asked.dtype}"
        refused.append(Difference("dtype", f"{path}: dtype: {both}; {why}", Remedy("cast", casting)))
    if refused or shapes is None or casting is None:
        return refused
    change = LeafChange(stored, asked, casting, shapes, matching.pad_value if "pad" in shapes else None)
    try:
        made = _make(Stored(stored, 0), change)
    except ValueError as error:  # about the value to pad with
        return [Difference("shape", f"{path}: shape: {both}; {error}")]
    return replace(change, made=made.spec)


def _remedy(asked: tuple[int, ...], stored: tuple[int, ...], matching: Matching) -> Remedy | None:
    """Return the option that would allow a shape."""
    for shapes in _WAYS:
        changes = _shape_changes(asked, stored, replace(matching, shapes=shapes))
        if changes is not None:
            return Remedy("shapes", frozenset(changes))
    return None


def _shape_changes(
    asked: tuple[int, ...], stored: tuple[int, ...], matching: Matching
) -> frozenset[ShapeChange] | None:
    """Return the changes of a shape; None if they are not allowed."""
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
    """Return the cast of a dtype to another; None if there is none."""
    if asked == stored:
        return "error"
    if has_all_values_of(asked, stored):
        return "safe"
    return "narrowing" if is_narrowing(asked, stored) else None


def _make(stored: DerivedArray, change: LeafChange) -> DerivedArray:
    """Derive the array that is asked for.

    Raises:
        ValueError: if its dtype does not have the value to pad with.
    """
    made, asked = stored, change.made
    if "reshape" in change.shapes:
        made = reshape(made, asked.shape)
    if "truncate" in change.shapes:
        made = cut(made, Box.whole(tuple(map(min, asked.shape, made.spec.shape))))
    if change.cast != "error":
        made = cast(made, asked.dtype) if change.cast == "safe" else narrow(made, asked.dtype)
    if change.pad_value is not None:
        before = (0,) * len(asked.shape)
        after = [wanted - there for wanted, there in zip(asked.shape, made.spec.shape, strict=True)]
        _check_pad_value(asked.dtype, change.pad_value)
        made = pad(made, before, after, change.pad_value)
    return made


def _check_pad_value(dtype: str, value: bool | complex) -> None:
    """Check that a dtype has a value or, if it is a dtype of floats, one near to it.

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


def adjusted(opened: Checkpoint, changes: Mapping[int, LeafChange], context: Context) -> Checkpoint:
    """Return the same checkpoint with arrays adjusted as they are read.

    Leaves that share their bytes share the adjusted array if both are adjusted alike.

    Args:
        opened: the checkpoint.
        changes: by number of the leaf.
        context: its limit on memory is kept.
    """
    tree = opened.tree
    # Arrays that transforms derive are adjusted in the same step, so that they are computed in the same pieces.
    below = opened.derived if opened.derived is not None and not opened.derived.is_builtin else None
    leaves: list[LeafRecord] = list(tree.leaves)
    derivations: dict[int, DerivedArray] = {}
    aliases: dict[int, int] = {}
    first: dict[tuple[int, LeafChange | None], int] = {}
    described: dict[int, tuple[int, str]] = {}
    for number, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord):
            continue
        original = tree.aliases.get(number, number)
        change = changes.get(number)
        if change is not None:
            leaves[number] = record._replace(spec=change.made, cuts=None)
        if (same := first.setdefault((original, change), number)) != number:
            aliases[number] = same
            continue
        described[number] = original, "" if change is None else str(change)
        before = Stored(record.spec, original) if below is None else below.derivations[original]
        derivations[number] = before if change is None else _make(before, change)
    source, *beside = (opened,) if below is None else below.sources
    kept = {number: number for number, record in enumerate(leaves) if not isinstance(record, ArrayRecord)}
    return derive(
        source,
        replace(tree, leaves=tuple(leaves), aliases=aliases),
        derivations,
        values=kept if below is None else below.values,
        beside=beside,
        most_bytes=context.memory.load_bytes,
        description="" if below is None else below.description,
        changes=described,
    )
