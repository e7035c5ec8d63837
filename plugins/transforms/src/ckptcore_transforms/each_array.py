"""EachArray: what the transforms of single arrays have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ckptcore.errors import TransformError
from ckptcore.model.arrays import ArraySpec
from ckptcore.model.tree import format_path
from ckptcore.protocols import DerivedArray
from ckptcore_transforms.arguments import expect_pattern
from ckptcore_transforms.patterns import Pattern, Template
from ckptcore_transforms.transform import TreeTransform
from ckptcore_transforms.tree_rewriter import ArrayLeaf, TreeRewriter

__all__ = ["EachArray", "axis_of"]


@dataclass(frozen=True, slots=True)
class EachArray(TreeTransform):
    """A transform that puts what is made of an array in its place, for each that a pattern matches.

    Attributes:
        pattern: of which arrays.
    """

    pattern: Pattern

    def __post_init__(self) -> None:
        expect_pattern(self, "pattern")

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        made = {}
        for path, _, array in tree.arrays(Template(self.pattern)):
            try:
                now = self.changed(array)
            except ValueError as error:
                raise TransformError(f"{format_path(path)}: {error}") from error
            leaf = tree.leaves[path]
            made[path] = {path: leaf if now is array else ArrayLeaf.of(now)}
        tree.replace(made)

    def changed(self, array: DerivedArray) -> DerivedArray:
        """What is made of one array.

        Raises:
            ValueError: if the array does not fit.
        """
        raise NotImplementedError


def axis_of(spec: ArraySpec, axis: int) -> int:
    """An axis, counted from the first.

    Raises:
        ValueError: if there is none.
    """
    count = len(spec.shape)
    if not -count <= axis < count:
        raise ValueError(f"{spec} has no axis {axis}")
    return axis % count
