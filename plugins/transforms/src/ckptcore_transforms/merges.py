"""Transforms that combine arrays of several checkpoints: merged adapters, averaged weights."""

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
from ckptcore_transforms.derived_arrays import merge_low_rank, weighted_sum
from ckptcore_transforms.patterns import Fields, Template
from ckptcore_transforms.transform import TreeTransform, expect_sequence, naming, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, Leaf, TreeRewriter

_NOT_AVERAGED: Final = ("bool", "int", "uint", "datetime", "timedelta", "S", "U")
"""Prefixes of the names of dtypes that are not averaged."""


@dataclass(frozen=True, slots=True)
class MergeLora(TreeTransform):
    """Merge an adapter into its base matrices: ``base + scale * up @ down``, in the dtype of the base.

    Attributes:
        base: template of the matrices, n by m. Matrices without an adapter do not change.
        up: template of the adapter's n by r matrices, called B, with the fields of `base`.
        down: template of its r by m matrices, called A.
        scale: alpha / r.
        adapter: checkpoint with `up` and `down`. None: they are in the same tree, and are removed
            from it.
    """

    base: str
    up: str
    down: str
    scale: float
    adapter: LocationLike | None = None

    def rewrite(self, tree: TreeRewriter) -> None:
        """Merge the matrices."""
        inside = tree if self.adapter is None else tree.with_leaves(tree.open_other(self.adapter))
        ups, downs, base = Template(self.up), Template(self.down), Template(self.base)
        up_matches, down_matches = inside.find_each([ups, downs])
        up_paths, down_paths = _by_base(base, up_matches), _by_base(base, down_matches)
        replacements: dict[TreePath, Mapping[TreePath, Leaf]] = {}
        by_text = {tuple(map(str, path)): path for path in tree.leaves}
        for text in up_paths.keys() | down_paths.keys():
            path = by_text.get(tuple(map(str, text)))
            if path is None or text not in up_paths or text not in down_paths:
                have = " and ".join(
                    [
                        name
                        for name, has in (
                            ("a base", path),
                            ("an up", up_paths.get(text)),
                            ("a down", down_paths.get(text)),
                        )
                        if has
                    ]
                )
                raise TransformError(
                    f"{format_path(text)} of the adapter has only {have}: expected a base, an up and a down"
                )
            with naming(path):
                merged = merge_low_rank(
                    tree.array(path), inside.array(up_paths[text]), inside.array(down_paths[text]), self.scale
                )
            replacements[path] = {path: ArrayLeaf.of(merged)}
        if inside is tree:
            replacements.update({path: {} for path in (*up_paths.values(), *down_paths.values())})
        tree.replace(replacements)

    def describe(self) -> str:
        """Describe the merge."""
        where = "" if self.adapter is None else f" of {self.adapter}"
        return f"merge {self.scale} * {self.up!r} @ {self.down!r}{where} into {self.base!r}"

    def inverse(self) -> Transform:
        """Raise an error, because the sum is rounded."""
        raise not_invertible(self, "because the sum is rounded")


@dataclass(frozen=True, slots=True)
class Average(TreeTransform):
    """Average the arrays of several checkpoints with the same tree, in float32, or in float64 for float64 arrays.

    The first checkpoint is the loaded one. Leaves that are not averaged are taken from it: arrays
    of integers, booleans, text and dates, NumPy scalars, random number generator keys and values.
    Use this before transforms that change the tree. Complex arrays are refused.

    Attributes:
        others: locations of the other checkpoints.
        weights: weights of all checkpoints, starting with the loaded one; None for equal
            weights. They are divided by their sum.
    """

    others: Sequence[LocationLike]
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not expect_sequence(self, "others", "locations in a list"):
            raise TypeError("Average(others=[]): expected at least one other checkpoint")
        if self.weights is not None:
            expect_sequence(self, "weights", "numbers in a list")

    def rewrite(self, tree: TreeRewriter) -> None:
        """Average the arrays."""
        weights = [1.0] * (len(self.others) + 1) if self.weights is None else list(self.weights)
        if len(weights) != len(self.others) + 1 or not math.isfinite(sum(weights)) or not sum(weights):
            raise TransformError(f"expected {len(self.others) + 1} weights with a nonzero sum, found {weights}")
        weights = [weight / sum(weights) for weight in weights]
        others = [tree.open_other(other) for other in self.others]
        for location, leaves in zip(self.others, others, strict=True):
            _expect_same_paths(tree.leaves, leaves, location)
        replacements: dict[TreePath, Mapping[TreePath, Leaf]] = {}
        for path, leaf in tree.leaves.items():
            if (
                not isinstance(leaf, ArrayLeaf)
                or leaf.record.kind != PLAIN_ARRAY
                or leaf.record.spec.dtype.startswith(_NOT_AVERAGED)
            ):
                continue
            arrays = [leaf.array]
            for location, leaves in zip(self.others, others, strict=True):
                other = leaves.get(path)
                if not isinstance(other, ArrayLeaf) or other.record.spec != leaf.record.spec:
                    description = other.record.spec if isinstance(other, ArrayLeaf) else "no array"
                    raise TransformError(
                        f"{location} has {description} at {format_path(path)}; expected {leaf.record.spec}"
                    )
                arrays.append(other.array)
            with naming(path):
                replacements[path] = {path: ArrayLeaf.of(weighted_sum(arrays, weights))}
        tree.replace(replacements)

    def describe(self) -> str:
        """Describe the checkpoints and weights."""
        weights = "" if self.weights is None else f", weighted {list(self.weights)}"
        return f"average with {', '.join(map(str, self.others))}{weights}"

    def inverse(self) -> Transform:
        """Raise an error, because a sum does not determine its terms."""
        raise not_invertible(self, "because a sum does not determine its terms")


def _expect_same_paths(first: Mapping[TreePath, Leaf], other: Mapping[TreePath, Leaf], location: LocationLike) -> None:
    """Check that two checkpoints have the same paths.

    Raises:
        TransformError: names the first leaf that one of them lacks.
    """
    for has, lacks, verb in ((other, first, "has"), (first, other, "lacks")):
        absent = next((path for path in has if path not in lacks), None)
        if absent is not None:
            raise TransformError(
                f"{location} {verb} {format_path(absent)}, unlike the first checkpoint: expected the same tree in all"
            )


def _by_base(base: Template, matched: Mapping[TreePath, Fields]) -> dict[TreePath, TreePath]:
    """Return the matrices of an adapter by the path of their base.

    Raises:
        TransformError: if two matrices have the same base.
    """
    by_base: dict[TreePath, TreePath] = {}
    for path, fields in matched.items():
        if (first := by_base.setdefault(base.path(fields), path)) != path:
            raise TransformError(
                f"{format_path(first)} and {format_path(path)} of the adapter both belong to "
                f"{format_path(base.path(fields))}: expected one"
            )
    return by_base
