"""Transforms that give leaves other paths, take them away, add or refuse them: no array is computed."""

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
from ckptcore_transforms.arguments import expect_pattern, expect_text
from ckptcore_transforms.patterns import Pattern, Template, exactly, text_path
from ckptcore_transforms.transform import TreeTransform, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, Leaf, TreeRewriter, ValueLeaf

__all__ = ["Default", "Drop", "Refuse", "Rename", "RenameTable"]

_SHOWN: Final = 200
"""How many characters of a path an error shows: it may be hostile."""


@dataclass(frozen=True, slots=True)
class Rename(TreeTransform):
    """Leaves under other paths: ``Rename("encoder.{rest...}", "encoder/{rest}")``.

    Keys of which a field has all stay as they are; every other one is text, or one of the same text that is in its container.

    Attributes:
        pattern: of which leaves; at least one.
        to: a template of where they go, with fields of the pattern.
    """

    pattern: Pattern
    to: str

    def __post_init__(self) -> None:
        expect_pattern(self, "pattern")
        expect_text(self, "to")

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        to = Template(self.to)
        tree.move(Template(self.pattern), lambda path, fields: to.path(fields))

    def describe(self) -> str:
        """See `Transform`."""
        return f"rename {Template(self.pattern)} to {self.to!r}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        template, to = Template(self.pattern), Template(self.to)
        if not template.is_exact or template.fields != to.fields:
            raise not_invertible(self, "for the new names do not tell the old ones")
        assert isinstance(self.pattern, str)  # no expression is exact
        return Rename(to.spanning_as(template), self.pattern)


@dataclass(frozen=True, slots=True)
class RenameTable(TreeTransform):
    """Single leaves under other paths, all of them at once, so that two may change places.

    Attributes:
        table: by path the new one, both as text; all of them are there.
    """

    table: Mapping[str, str]

    def __post_init__(self) -> None:
        if not isinstance(self.table, Mapping) or not all(
            isinstance(text, str) for text in (*self.table, *self.table.values())
        ):
            raise TypeError(f"RenameTable({self.table!r}): expected a mapping of paths to paths, all of them text")

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        made: dict[TreePath, dict[TreePath, Leaf]] = {}
        found = tree.find_each([exactly(path) for path in self.table])
        for of_path, to in zip(found, self.table.values(), strict=True):
            for path in of_path:
                made[path] = {text_path(to): tree.leaves[path]}
        tree.replace(made)

    def describe(self) -> str:
        """See `Transform`."""
        return "rename " + ", ".join([f"{path!r} to {to!r}" for path, to in self.table.items()])

    def inverse(self) -> Transform:
        """See `Transform`."""
        back = {to: path for path, to in self.table.items()}
        if len(back) < len(self.table):
            raise not_invertible(self, "for two leaves get one path")
        return RenameTable(back)


@dataclass(frozen=True, slots=True)
class Drop(TreeTransform):
    """Leaves that are left out, and not read.

    Attributes:
        pattern: of which leaves; at least one.
    """

    pattern: Pattern

    def __post_init__(self) -> None:
        expect_pattern(self, "pattern")

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        tree.remove(Template(self.pattern))

    def describe(self) -> str:
        """See `Transform`."""
        return f"drop {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        raise not_invertible(self, "for what was dropped is not there")


@dataclass(frozen=True, slots=True)
class Refuse(TreeTransform):
    """An error where leaves are that the transforms around this one do not know; else nothing: so that none is left out silently.

    Attributes:
        pattern: of which leaves; there are to be none.
    """

    pattern: Pattern

    def __post_init__(self) -> None:
        expect_pattern(self, "pattern")

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        found = list(tree.present(Template(self.pattern)))
        if found:
            others = "" if len(found) == 1 else f" and {len(found) - 1:,} other{'s' if len(found) > 2 else ''}"
            raise TransformError(
                f"{format_path(found[0])[:_SHOWN]}{others} would be left, which none of the transforms knows: drop or rename what is not needed before"
            )

    def describe(self) -> str:
        """See `Transform`."""
        return f"expect nothing at {Template(self.pattern)}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        return self


@dataclass(frozen=True, slots=True)
class Default(TreeTransform):
    """A leaf that is taken from here where none is stored.

    Attributes:
        path: where, as text.
        value: a number, text, None, or an array.
    """

    path: str
    value: Any

    def __post_init__(self) -> None:
        expect_text(self, "path")

    def rewrite(self, tree: TreeRewriter) -> None:
        """See `Transform`."""
        handler = tree.source.leaf_handler(self.value)
        if handler is None:
            raise TransformError(
                f"{self.path}: a {type(self.value).__qualname__} is no leaf that an installed plugin handles"
            )
        record = handler.describe(self.value)
        path = text_path(self.path)
        if isinstance(record, ValueRecord):
            tree.add(path, ValueLeaf(record))
            return
        (array,) = handler.view_on_host(self.value, [Box.whole(record.spec.shape)])
        tree.add(path, ArrayLeaf(constant(record.spec, array.result()), record))

    def describe(self) -> str:
        """See `Transform`."""
        shape = getattr(self.value, "shape", None)
        told = repr(self.value) if not shape else f"an array of {self.value.dtype}{list(shape)}"
        return f"where {self.path!r} is not stored, take {told}"

    def inverse(self) -> Transform:
        """See `Transform`."""
        raise not_invertible(self, "for nothing tells whether it was stored")
