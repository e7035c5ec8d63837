"""Adjustments of arrays to the requested shape and dtype, and checks of quantised arrays.

A load refuses to cast a quantised array without its scales, because the numbers would be wrong. It knows the names of
scales in Hugging Face checkpoints even if the distribution of transforms is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Final, get_args

import numpy as np

from ckptcore.context import Context
from ckptcore.derivations import Stored, cast, cut, narrow, pad, reshape, truncate
from ckptcore.derivations.dtypes import has_all_values_of, is_narrowing, is_truncating
from ckptcore.matching.differences import Difference, Remedy
from ckptcore.matching.options import Casting, LeafChange, Matching, ShapeChange
from ckptcore.model.arrays import ArraySpec, Box
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.derived import derive
from ckptcore.protocols import DerivedArray

_CASTS: Final = get_args(Casting)
"""The choices for casts. Each choice also allows the casts of the choices before it."""

_PROPOSED_SHAPES: Final[tuple[frozenset[ShapeChange], ...]] = (frozenset(("reshape",)), frozenset(("truncate", "pad")))
"""Changes that may turn one shape into another, in the order in which they are proposed."""

WEIGHT: Final = ".weight"

SCALES: Final = ("_scale_inv", "_scale")
"""Suffixes that follow the name of the array. DeepSeek-V3, Qwen 3 and transformers use the first suffix; AutoFP8,
FBGEMM and compressed-tensors use the second suffix."""

_SCALES_OF_MODULES: Final = (".scale", ".qscale_weight")
"""Suffixes that replace ``.weight``. DeepSeek-V4 uses the first suffix, Mistral Large 4 the second suffix. See
``quantizer_finegrained_fp8.py`` of transformers."""

BLOCKS: Final = "_blocks"
SCALES_OF_BLOCKS: Final = "_scales"
"""Suffixes of the names of arrays and of their scales in gpt-oss with MXFP4."""


_SHOWN: Final = 100
"""Maximum length of a name in messages, in characters: names may be hostile."""


def adjust(path: str, requested: ArraySpec, stored: ArraySpec, matching: Matching) -> LeafChange | list[Difference]:
    """Find the change from a stored array to the requested array. Returns all differences if it is not allowed.

    Args:
        path: the path of the array, for messages.
        requested, stored: different specs of plain arrays.
        matching: the allowed differences.
    """
    both = f"{requested} is requested, {stored} is stored"
    refused: list[Difference] = []
    shapes = _shape_changes(requested.shape, stored.shape, matching.shapes)
    if shapes is None:
        refused.append(Difference("shape", f"{path}: shape: {both}", _remedy(requested.shape, stored.shape)))
    casting = _casting(requested.dtype, stored.dtype)
    if casting is None:
        refused.append(Difference("dtype", f"{path}: dtype: {both}; no cast from {stored.dtype} to {requested.dtype}"))
    elif _CASTS.index(casting) > _CASTS.index(matching.cast):
        why = "casts are not allowed by default"
        if casting == "truncating" and matching.cast != "error":
            why = f"{requested.dtype} has no fractions"
        elif matching.cast == "safe":
            why = f"{requested.dtype} cannot represent every value of {stored.dtype}"
        refused.append(Difference("dtype", f"{path}: dtype: {both}; {why}", Remedy("cast", [casting])))
    if refused or shapes is None or casting is None:
        return refused
    change = LeafChange(stored, requested, casting, shapes, matching.pad_value if "pad" in shapes else None)
    try:
        made = _make(Stored(stored, 0), change)
    except ValueError as error:  # the dtype cannot represent the pad value
        return [Difference("shape", f"{path}: shape: {both}; pad_value: {error}")]
    return replace(change, loaded=made.spec)


def _remedy(requested: tuple[int, ...], stored: tuple[int, ...]) -> Remedy | None:
    """Return the option of `Matching` that would allow the change of a shape; None if no option would."""
    if (0 in requested) != (0 in stored):
        return None
    for allowed in _PROPOSED_SHAPES:
        if (changes := _shape_changes(requested, stored, allowed)) is not None:
            return Remedy("shapes", sorted(changes))
    return None


def _shape_changes(
    requested: tuple[int, ...], stored: tuple[int, ...], allowed: Collection[ShapeChange]
) -> frozenset[ShapeChange] | None:
    """Return the changes from a stored to a requested shape; None if they are not allowed."""
    if requested == stored:
        return frozenset()
    if "reshape" in allowed and math.prod(requested) == math.prod(stored):
        return frozenset(("reshape",))
    if len(requested) != len(stored):
        return None
    pairs = zip(requested, stored, strict=True)
    needed = frozenset[ShapeChange](["truncate" if new < old else "pad" for new, old in pairs if new != old])
    return needed if needed.issubset(allowed) else None


def _casting(requested: str, stored: str) -> Casting | None:
    """Return the cast from a stored to a requested dtype; None if no choice allows it."""
    if requested == stored:
        return "error"
    if has_all_values_of(requested, stored):
        return "safe"
    if is_truncating(requested, stored):
        return "truncating"
    return "narrowing" if is_narrowing(requested, stored) else None


def _make(stored: DerivedArray, change: LeafChange) -> DerivedArray:
    """Derive the requested array.

    Raises:
        ValueError: its dtype cannot represent the pad value.
    """
    made, requested = stored, change.loaded
    if "reshape" in change.shapes:
        made = reshape(made, requested.shape)
    if "truncate" in change.shapes:
        made = cut(made, Box.whole(tuple(map(min, requested.shape, made.spec.shape))))
    if change.cast != "error":
        made = {"safe": cast, "narrowing": narrow, "truncating": truncate}[change.cast](made, requested.dtype)
    if change.pad_value is not None:
        before = (0,) * len(requested.shape)
        after = [new - old for new, old in zip(requested.shape, made.spec.shape, strict=True)]
        # `pad` refuses everything else that the dtype cannot represent.
        if requested.dtype == "bool" and np.asarray(change.pad_value).dtype != np.bool_:
            raise ValueError(f"bool cannot represent {change.pad_value!r}")
        made = pad(made, before, after, change.pad_value)
    return made


def adjusted(opened: Checkpoint, changes: Mapping[int, LeafChange], context: Context) -> Checkpoint:
    """Return a derived checkpoint with adjusted arrays.

    Tied leaves stay tied if they have the same change.

    Args:
        opened: the checkpoint.
        changes: by leaf number, the change of its array.
        context: limits memory.
    """
    tree = opened.tree
    # Arrays of transforms are adjusted in the same step, so that transform and adjustment read the same pieces.
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
            leaves[number] = record._replace(spec=change.loaded, cuts=None)
        if (same := first.setdefault((original, change), number)) != number:
            aliases[number] = same
            continue
        described[number] = original, "" if change is None else str(change)
        before = Stored(record.spec, original) if below is None else below.derivations[original]
        derivations[number] = before if change is None else _make(before, change)
    source, *additional = (opened,) if below is None else below.sources
    kept = {number: number for number, record in enumerate(leaves) if not isinstance(record, ArrayRecord)}
    return derive(
        source,
        replace(tree, leaves=tuple(leaves), aliases=aliases),
        derivations,
        values=kept if below is None else below.values,
        additional=additional,
        most_bytes=context.memory.load_bytes,
        description="" if below is None else below.description,
        changes=described,
    )


def is_quantized(spec: ArraySpec) -> bool:
    """Return True for dtypes of quantised weights, which are stored with scales."""
    return spec.dtype in ("int8", "int4") or (
        spec.dtype.startswith(("float8_", "float6_", "float4_")) and spec.dtype != "float8_e8m0fnu"
    )


def names_of_scales(name: str) -> list[str]:
    """Return the possible names of the scales of an array."""
    names = [name + end for end in SCALES]
    if name.endswith(WEIGHT):
        names += [name.removesuffix(WEIGHT) + end for end in _SCALES_OF_MODULES]
    return names


def find_scales(tree: TreeMetadata) -> Iterator[tuple[int, int]]:
    """Yield the leaf number of each quantised array of a tree with the leaf number of its scales.

    Skips arrays whose scales are not found.
    """
    names = {"/".join(map(str, path)): number for number, path in enumerate(tree.paths)}
    for name, number in names.items():
        record = tree.leaves[number]
        if not isinstance(record, ArrayRecord):
            continue
        expected = names_of_scales(name) if is_quantized(record.spec) else []
        if name.endswith(BLOCKS) and record.spec.dtype == "uint8":
            expected = [name.removesuffix(BLOCKS) + SCALES_OF_BLOCKS]
        scales = next((names[expected_name] for expected_name in expected if expected_name in names), None)
        if scales is not None:
            yield number, scales


def find_quantized(tree: TreeMetadata) -> str | None:
    """Return a description of one quantised array of a tree and its scales; None if there is none."""
    for number, scales in find_scales(tree):
        name, scales_name = ("/".join(map(str, tree.paths[leaf]))[:_SHOWN] for leaf in (number, scales))
        record = tree.leaves[number]
        assert isinstance(record, ArrayRecord)  # `find_scales` finds only arrays
        return f"{name!r} is {record.spec}, and its scales are {scales_name!r}"
    return None


def lost_scales(
    tree: TreeMetadata, changes: Mapping[int, LeafChange], loaded: Collection[int | None]
) -> Iterator[Difference]:
    """Yield the differences for quantised arrays that would be cast to wrong numbers, because no scales are requested.

    Args:
        tree: the stored tree.
        changes: by number of the stored leaf, the changes of arrays.
        loaded: the numbers of the stored leaves that are requested.
    """
    for number, scales in find_scales(tree):
        change = changes.get(number)
        if change is not None and change.cast != "error" and scales not in loaded:
            path, additional = (format_path(tree.paths[leaf]) for leaf in (number, scales))
            reason = f"{change.stored} is quantised: a cast would ignore its scales, {additional}"
            yield Difference("dtype", f"{path}: dtype: {reason}")
