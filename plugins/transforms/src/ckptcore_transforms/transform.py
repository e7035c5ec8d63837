"""The base class of this package's transforms, `IfPresent`, and lists of transforms described and inverted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckptcore.errors import TransformError
from ckptcore.loading.transformed import expect_transforms, is_transform
from ckptcore.protocols import Transform, TransformedTree, Transforms
from ckptcore_transforms.tree_rewriter import NothingMatches, TreeRewriter

__all__ = ["IfPresent", "TreeTransform", "inverse", "not_invertible"]


class TreeTransform(Transform, Protocol):
    """A transform that changes a `TreeRewriter`, which all transforms of this package in a row share."""

    __slots__ = ()

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """See `Transform`."""
        rewriter = TreeRewriter.of(tree)
        self.rewrite(rewriter)
        return rewriter

    def rewrite(self, tree: TreeRewriter) -> None:
        """Change the leaves of a tree, and how its arrays are made.

        Raises:
            TransformError, ValueError: if the tree lacks what is changed, or it does not fit.
        """
        ...

    def inverse(self) -> Transform:
        """Return the transform that takes a tree that this one made back to what it was.

        Raises:
            TransformError: if there is none.
        """
        ...


@dataclass(frozen=True, slots=True)
class IfPresent(Transform):
    """A transform, where there is something for it: elsewhere that it matches nothing is an error.

    Attributes:
        transform: what is done.
    """

    transform: Transform

    def __post_init__(self) -> None:
        if not is_transform(self.transform):
            raise TypeError(f"IfPresent({self.transform!r}): expected a transform")

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """See `Transform`."""
        rewriter = TreeRewriter.of(tree)
        before = dict(rewriter.leaves)
        try:
            return self.transform.apply(rewriter)
        except NothingMatches:
            rewriter.leaves = before
            return rewriter

    def describe(self) -> str:
        """See `Transform`."""
        return f"{self.transform.describe()}, if there is any"

    def inverse(self) -> Transform:
        """See `TreeTransform`: what is there is taken back, also if something else has made it."""
        return IfPresent(_inverse(self.transform))


def inverse(transforms: Transforms) -> list[Transform]:
    """The transforms that take a tree back which transforms made.

    Raises:
        TransformError: names one that nothing takes back.
    """
    expect_transforms(transforms)
    return [_inverse(transform) for transform in reversed(transforms)]


def _inverse(transform: Transform) -> Transform:
    if not hasattr(transform, "inverse"):
        raise not_invertible(transform, f"for {type(transform).__name__} has no method inverse")
    made: Transform = transform.inverse()
    return made


def not_invertible(transform: Transform, reason: str) -> TransformError:
    """What to raise where nothing takes a tree back."""
    return TransformError(f"{transform.describe()}: this cannot be undone, {reason}")
