"""Transforms that put arrays of several checkpoints together: adapters merged, weights averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.commit.location import LocationLike
from ckptcore.errors import TransformError
from ckptcore.model.metadata import PLAIN_ARRAY
from ckptcore.model.tree import TreePath, format_path
from ckptcore.protocols import Transform
from ckptcore_transforms.arguments import expect_number, expect_sequence, expect_text
from ckptcore_transforms.derived_arrays import merge_low_rank, weighted_sum
from ckptcore_transforms.patterns import Fields, Template
from ckptcore_transforms.transform import TreeTransform, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, Leaf, TreeRewriter

__all__ = ["Average", "MergeLora"]

_KEPT: Final = ("bool", "int", "uint", "datetime", "timedelta", "S", "U")
"""The dtypes of arrays of which there is no mean."""


@dataclass(frozen=True, slots=True)
class MergeLora(TreeTransform):
    """An adapter merged into the matrices that it is for: ``base + scale * up @ down``, in the dtype of the base.

    Attributes:
        base: a template of the matrices, n by m. Those that the adapter has nothing for stay as they are.
        up: a template of the adapter's matrices n by r, called B; with the fields of `base`.
        down: a template of those r by m, called A.
        scale: alpha / r.
        adapter: the checkpoint that has `up` and `down`; None: they are beside the base, and taken away.
    """

    base: str
    up: str
    down: str
    scale: float
    adapter: LocationLike | None = None

    def __post_init__(self) -> None:
        for name in ("base", "up", "down"):
            expect_text(self, name)
        expect_number(self, "scale")

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        inside = tree if self.adapter is None else tree.with_leaves(tree.open_beside(self.adapter))
        ups, downs, base = Template(self.up), Template(self.down), Template(self.base)
        of_ups, of_downs = inside.find_each([ups, downs])
        thin, lows = _by_base(base, of_ups), _by_base(base, of_downs)
        made: dict[TreePath, Mapping[TreePath, Leaf]] = {}
        by_text = {tuple(map(str, path)): path for path in tree.leaves}
        for text in thin.keys() | lows.keys():
            path = by_text.get(tuple(map(str, text)))
            if path is None or text not in thin or text not in lows:
                have = " and ".join(
                    [
                        name
                        for name, has in (("a base", path), ("an up", thin.get(text)), ("a down", lows.get(text)))
                        if has
                    ]
                )
                raise TransformError(
                    f"{format_path(text)} of the adapter has {have} only: expected a base, an up and a down"
                )
            try:
                merged = merge_low_rank(
                    tree.array(path), inside.array(thin[text]), inside.array(lows[text]), self.scale
                )
            except ValueError as error:
                raise TransformError(f"{format_path(path)}: {error}") from error
            made[path] = {path: ArrayLeaf.of(merged)}
        if inside is tree:
            made.update({path: {} for path in (*thin.values(), *lows.values())})
        tree.replace(made)

    def describe(self) -> str:
        """See `Transform`."""
        where = "" if self.adapter is None else f" of {self.adapter}"
        return f"merge {self.scale} * {self.up!r} @ {self.down!r}{where} into {self.base!r}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        raise not_invertible(self, "for the product is rounded as it is added")


@dataclass(frozen=True, slots=True)
class Average(TreeTransform):
    """The mean of the arrays of several checkpoints, which have the same tree; computed in float32, or float64 where they are.

    Arrays of whole numbers or of truth values, keys of random generators, and values are those of the first: the one that is loaded. So
    this comes before what changes the tree. Arrays of complex numbers are refused.

    Attributes:
        others: where the further checkpoints are.
        weights: of all of them, the first one's before; None: all equal. They are divided by their sum.
    """

    others: Sequence[LocationLike]
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not expect_sequence(self, "others", "locations in a list"):
            raise TypeError("Average(others=[]): expected at least one further checkpoint")
        if self.weights is not None:
            expect_sequence(self, "weights", "numbers in a list")

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        weights = [1.0] * (len(self.others) + 1) if self.weights is None else list(self.weights)
        if len(weights) != len(self.others) + 1 or not math.isfinite(sum(weights)) or not sum(weights):
            raise TransformError(
                f"expected {len(self.others) + 1} weights, the sum of which is a number other than 0, found {weights}"
            )
        weights = [weight / sum(weights) for weight in weights]
        others = [tree.open_beside(other) for other in self.others]
        for location, leaves in zip(self.others, others, strict=True):
            _expect_same_paths(tree.leaves, leaves, location)
        made: dict[TreePath, Mapping[TreePath, Leaf]] = {}
        for path, leaf in tree.leaves.items():
            if (
                not isinstance(leaf, ArrayLeaf)
                or leaf.record.kind != PLAIN_ARRAY
                or leaf.record.spec.dtype.startswith(_KEPT)
            ):
                continue
            arrays = [leaf.array]
            for location, leaves in zip(self.others, others, strict=True):
                other = leaves.get(path)
                if not isinstance(other, ArrayLeaf) or other.record.spec != leaf.record.spec:
                    found = other.record.spec if isinstance(other, ArrayLeaf) else "no array"
                    raise TransformError(
                        f"{location} has {found} at {format_path(path)}, where {leaf.record.spec} was expected"
                    )
                arrays.append(other.array)
            try:
                made[path] = {path: ArrayLeaf.of(weighted_sum(arrays, weights))}
            except ValueError as error:
                raise TransformError(f"{format_path(path)}: {error}") from error
        tree.replace(made)

    def describe(self) -> str:
        """See `Transform`."""
        weights = "" if self.weights is None else f", weighted {list(self.weights)}"
        return f"average with {', '.join(map(str, self.others))}{weights}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        raise not_invertible(self, "for the sum does not tell what was added")


def _expect_same_paths(first: Mapping[TreePath, Leaf], other: Mapping[TreePath, Leaf], location: LocationLike) -> None:
    """Make sure that two checkpoints have one tree.

    Raises:
        TransformError: names the first leaf that one of them lacks.
    """
    for has, lacks, told in ((other, first, "has"), (first, other, "lacks")):
        absent = next((path for path in has if path not in lacks), None)
        if absent is not None:
            raise TransformError(
                f"{location} {told} {format_path(absent)}, other than the first checkpoint: expected the same tree in each"
            )


def _by_base(base: Template, matched: Mapping[TreePath, Fields]) -> dict[TreePath, TreePath]:
    """By path of the matrix that it is for, each matrix of an adapter.

    Raises:
        TransformError: if two are for one.
    """
    found: dict[TreePath, TreePath] = {}
    for path, fields in matched.items():
        if (first := found.setdefault(base.path(fields), path)) != path:
            raise TransformError(
                f"{format_path(first)} and {format_path(path)} of the adapter are both for {format_path(base.path(fields))}: expected one"
            )
    return found
