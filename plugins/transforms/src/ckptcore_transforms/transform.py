"""Base class of this package's transforms, `IfPresent`, and inverses of lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckptcore.errors import TransformError
from ckptcore.protocols import Transform, TransformedTree, Transforms
from ckptcore_transforms.transformed import expect_transforms, is_transform
from ckptcore_transforms.tree_rewriter import NothingMatches, TreeRewriter


class TreeTransform(Transform, Protocol):
    """A transform of a `TreeRewriter`, which consecutive transforms of this package share."""

    __slots__ = ()

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """Change the tree."""
        rewriter = TreeRewriter.of(tree)
        self.rewrite(rewriter)
        return rewriter

    def rewrite(self, tree: TreeRewriter) -> None:
        """Change the leaves of a tree.

        Raises:
            TransformError, ValueError: if a leaf is missing or does not fit.
        """
        ...

    def inverse(self) -> Transform:
        """Return the reverse transform.

        Raises:
            TransformError: if the transform is not invertible.
        """
        ...


@dataclass(frozen=True, slots=True)
class IfPresent(Transform):
    """Makes a transform optional: matching nothing is not an error.

    Attributes:
        transform: the transform.
    """

    transform: Transform

    def __post_init__(self) -> None:
        if not is_transform(self.transform):
            raise TypeError(f"IfPresent({self.transform!r}): expected a transform")

    def apply(self, tree: TransformedTree) -> TransformedTree:
        """Apply the transform if it matches."""
        rewriter = TreeRewriter.of(tree)
        before = dict(rewriter.leaves)
        try:
            return self.transform.apply(rewriter)
        except NothingMatches:
            rewriter.leaves = before
            return rewriter

    def describe(self) -> str:
        """Describe the transform."""
        return f"{self.transform.describe()}, if present"

    def inverse(self) -> Transform:
        """Return the optional inverse. It changes all matching leaves, also if `transform` created none of them."""
        return IfPresent(_inverse(self.transform))


def inverse(transforms: Transforms) -> list[Transform]:
    """Return transforms that reverse a list of transforms.

    Raises:
        TransformError: names a transform that is not invertible.
    """
    expect_transforms(transforms)
    return [_inverse(transform) for transform in reversed(transforms)]


def _inverse(transform: Transform) -> Transform:
    if not hasattr(transform, "inverse"):
        raise not_invertible(transform, f"because {type(transform).__name__} has no method inverse")
    inverted: Transform = transform.inverse()
    return inverted


def not_invertible(transform: Transform, reason: str) -> TransformError:
    """Return the error for a transform that is not invertible."""
    return TransformError(f"{transform.describe()}: this transform has no inverse, {reason}")
