"""Transforms that rename, drop, add or refuse leaves, without computing arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.derivations import constant
from ckptcore.errors import TransformError
from ckptcore.model.arrays import Box
from ckptcore.model.metadata import ValueRecord
from ckptcore.model.tree import TreePath, format_path
from ckptcore.protocols import Transform
from ckptcore_transforms.patterns import Pattern, Template, exactly, text_path
from ckptcore_transforms.transform import TreeTransform, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, Leaf, TreeRewriter, ValueLeaf

_MAX_SHOWN: Final = 200
"""Maximum length of a path in an error, because paths can be hostile."""


@dataclass(frozen=True, slots=True)
class Rename(TreeTransform):
    """Rename leaves: ``Rename("encoder.{rest...}", "encoder/{rest}")``.

    A key that a field without ``:d`` matches completely keeps its type. A key that is only a ``:d``
    field becomes an integer. Other keys become text; if the container already has a key with that
    text, such as 0 for "0", that key is used.

    Attributes:
        pattern: selects at least one leaf.
        to: template of the new paths, with fields of the pattern.
    """

    pattern: Pattern
    to: str

    def rewrite(self, tree: TreeRewriter) -> None:
        """Rename the leaves."""
        to = Template(self.to)
        tree.move(Template(self.pattern), lambda path, fields: to.path(fields))

    def describe(self) -> str:
        """Describe the names."""
        return f"rename {Template(self.pattern)} to {self.to!r}"

    def inverse(self) -> Transform:
        """Return the reverse renaming."""
        template, to = Template(self.pattern), Template(self.to)
        if not template.is_exact or template.fields != to.fields:
            raise not_invertible(self, "because the new names do not determine the old ones")
        assert isinstance(self.pattern, str)  # only templates are exact
        return Rename(to.spanning_as(template), self.pattern)


@dataclass(frozen=True, slots=True)
class RenameTable(TreeTransform):
    """Rename individual leaves at the same time, so that two leaves can exchange their paths.

    Attributes:
        table: new path by old path, both as text. All old paths must exist.
    """

    table: Mapping[str, str]

    def __post_init__(self) -> None:
        if not isinstance(self.table, Mapping) or not all(
            isinstance(text, str) for text in (*self.table, *self.table.values())
        ):
            raise TypeError(f"RenameTable({self.table!r}): expected a mapping of str to str")

    def rewrite(self, tree: TreeRewriter) -> None:
        """Rename the leaves."""
        replacements: dict[TreePath, dict[TreePath, Leaf]] = {}
        matches = tree.find_each([exactly(path) for path in self.table])
        for of_path, to in zip(matches, self.table.values(), strict=True):
            for path in of_path:
                replacements[path] = {text_path(to): tree.leaves[path]}
        tree.replace(replacements)

    def describe(self) -> str:
        """Describe the names."""
        return "rename " + ", ".join([f"{path!r} to {to!r}" for path, to in self.table.items()])

    def inverse(self) -> Transform:
        """Return the reverse renaming."""
        back = {to: path for path, to in self.table.items()}
        if len(back) < len(self.table):
            raise not_invertible(self, "because two leaves get the same path")
        return RenameTable(back)


@dataclass(frozen=True, slots=True)
class Drop(TreeTransform):
    """Drop leaves by path. Dropped leaves are not read.

    Attributes:
        pattern: selects at least one leaf.
    """

    pattern: Pattern

    def rewrite(self, tree: TreeRewriter) -> None:
        """Drop the leaves."""
        tree.remove(Template(self.pattern))

    def describe(self) -> str:
        """Describe the pattern."""
        return f"drop {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """Raise an error, because the dropped leaves are unknown."""
        raise not_invertible(self, "because it removes leaves")


@dataclass(frozen=True, slots=True)
class Refuse(TreeTransform):
    """Raise an error if leaves match, so that a list of transforms does not silently ignore unknown leaves.

    Attributes:
        pattern: must match no leaf.
    """

    pattern: Pattern

    def rewrite(self, tree: TreeRewriter) -> None:
        """Check the leaves."""
        left = list(tree.present(Template(self.pattern)))
        if left:
            others = "" if len(left) == 1 else f" and {len(left) - 1:,} other{'s' if len(left) > 2 else ''}"
            raise TransformError(
                f"no transform handles {format_path(left[0])[:_MAX_SHOWN]}{others}: put Rename, or Drop if it is not "
                "needed, first in the transforms of ckptcore.load or ckptcore.copy"
            )

    def describe(self) -> str:
        """Describe the pattern."""
        return f"expect nothing at {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """Return the transform itself."""
        return self


@dataclass(frozen=True, slots=True)
class Default(TreeTransform):
    """Add a leaf if the checkpoint lacks it.

    Attributes:
        path: path of the leaf, as text.
        value: a number, text, None, or an array.
    """

    path: str
    value: Any

    def rewrite(self, tree: TreeRewriter) -> None:
        """Add the leaf."""
        handler = tree.source.leaf_handler(self.value)
        if handler is None:
            raise TransformError(f"{self.path}: no installed plugin handles a {type(self.value).__qualname__}")
        record = handler.describe(self.value)
        path = text_path(self.path)
        if isinstance(record, ValueRecord):
            tree.add(path, ValueLeaf(record))
            return
        (array,) = handler.view_on_host(self.value, [Box.whole(record.spec.shape)])
        tree.add(path, ArrayLeaf(constant(record.spec, array.result()), record))

    def describe(self) -> str:
        """Describe the value."""
        shape = getattr(self.value, "shape", None)
        value = repr(self.value) if not shape else f"an array of {self.value.dtype}{list(shape)}"
        return f"if {self.path!r} is not stored, use {value}"

    def inverse(self) -> Transform:
        """Raise an error, because a stored leaf cannot be distinguished from an added one."""
        raise not_invertible(self, "because added leaves cannot be distinguished from stored ones")
