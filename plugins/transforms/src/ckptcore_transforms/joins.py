"""Transforms from several arrays to one, or from one to several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.derivations import concatenate, cut, reshape
from ckptcore.errors import TransformError
from ckptcore.model.arrays import Box
from ckptcore.model.tree import TreePath, format_path
from ckptcore.protocols import DerivedArray, Transform
from ckptcore_transforms.array_transforms import axis_of
from ckptcore_transforms.derived_arrays import stack
from ckptcore_transforms.patterns import FieldMatch, Fields, Pattern, Template
from ckptcore_transforms.transform import TreeTransform, naming, not_invertible
from ckptcore_transforms.tree_rewriter import ArrayLeaf, Leaf, TreeRewriter

_MAX_DIGITS: Final = 10
"""A position in a stack has fewer digits than this."""

_MAX_PARTS: Final = 1 << 16
"""Maximum number of parts, because a hostile file can declare any extent, and each part is a Python object."""


@dataclass(frozen=True, slots=True)
class Stack(TreeTransform):
    """Stack arrays of one shape along a new axis: ``Stack("layers.{i}.{rest...}", "layers/{rest}")``.

    Attributes:
        pattern: template of the arrays. It has exactly one field that `to` lacks: the number of
            the array. Numbers begin at 0 and have no gaps.
        to: template of the path of each stack.
        axis: the new axis of the result; -1 is the last.

    The inverse writes numbers without leading zeros.
    """

    pattern: str
    to: str
    axis: int = 0

    def rewrite(self, tree: TreeRewriter) -> None:
        """Stack the arrays."""
        template, to = Template(self.pattern), Template(self.to)
        counter = _counter(template, to)
        stacks: dict[TreePath, dict[int, TreePath]] = {}
        for path, fields, _ in tree.arrays(template):
            number = fields[counter].text
            if not (number.isascii() and number.isdecimal() and len(number) < _MAX_DIGITS):
                raise TransformError(f"{format_path(path)}: {counter} is {number!r}; expected a number")
            members = stacks.setdefault(to.path(fields), {})
            if members.setdefault(int(number), path) != path:
                raise TransformError(
                    f"{format_path(path)} and {format_path(members[int(number)])} have the same position in a stack"
                )
        replacements: dict[TreePath, Mapping[TreePath, Leaf]] = {}
        for new, members in stacks.items():
            missing = [number for number in range(len(members)) if number not in members]
            if missing:
                raise TransformError(
                    f"{format_path(new)}: array {missing[0]} of a stack of {len(members)}, "
                    f"numbered up to {max(members)}, is missing"
                )
            paths = [members[number] for number in range(len(members))]
            with naming(new):
                arrays = [tree.array(path) for path in paths]
                axes = len(arrays[0].spec.shape) + 1
                array = stack(arrays, self.axis + axes if -axes <= self.axis < 0 else self.axis)
            replacements.update({path: {} for path in members.values()})
            replacements[next(iter(members.values()))] = {new: ArrayLeaf.of(array)}
        tree.replace(replacements)

    def describe(self) -> str:
        """Describe the stack."""
        return f"stack {Template(self.pattern)} along axis {self.axis} as {self.to!r}"

    def inverse(self) -> Transform:
        """Return the `Unstack`."""
        return Unstack(Template(self.to).spanning_as(Template(self.pattern)), self.pattern, self.axis)


@dataclass(frozen=True, slots=True)
class Unstack(TreeTransform):
    """Split arrays into one array for each index along an axis: ``Unstack("layers/{rest...}", "layers.{i}.{rest}")``.

    Attributes:
        pattern: template of the arrays.
        to: template of the paths of the parts. It has exactly one field that `pattern` lacks: the
            number of the part, from 0.
        axis: the axis to remove; -1 is the last.
    """

    pattern: str
    to: str
    axis: int = 0

    def rewrite(self, tree: TreeRewriter) -> None:
        """Split the arrays."""
        template, to = Template(self.pattern), Template(self.to)
        counter = _counter(to, template)
        replacements: dict[TreePath, Mapping[TreePath, Leaf]] = {}
        for path, fields, array in tree.arrays(template):
            shape = array.spec.shape
            with naming(path):
                axis = axis_of(array.spec, self.axis)
            if not 0 < shape[axis] <= _MAX_PARTS:
                raise TransformError(
                    f"cannot unstack {format_path(path)}: {array.spec} has {shape[axis]} "
                    f"parts; expected 1 to {_MAX_PARTS}"
                )
            rest = (*shape[:axis], *shape[axis + 1 :])
            parts: dict[TreePath, Leaf] = {}
            for number in range(shape[axis]):
                part = reshape(cut(array, Box.whole(shape).band(axis, number, number + 1)), rest)
                numbered = {**fields, counter: FieldMatch(str(number))}
                parts[to.path(numbered)] = ArrayLeaf.of(part)
            replacements[path] = parts
        tree.replace(replacements)

    def describe(self) -> str:
        """Describe the parts."""
        return f"unstack {Template(self.pattern)} along axis {self.axis} as {self.to!r}"

    def inverse(self) -> Transform:
        """Return the `Stack`."""
        return Stack(Template(self.to).spanning_as(Template(self.pattern)), self.pattern, self.axis)


@dataclass(frozen=True, slots=True)
class Split(TreeTransform):
    """Split arrays into parts along an axis: ``Split("{block...}.qkv", ["{block}.q", "{block}.k", "{block}.v"])``.

    Attributes:
        pattern: selects the arrays.
        to: templates of the paths of the parts, in order.
        axis: axis to split; -1 is the last.
        sizes: sizes of the parts; None for equal sizes.
    """

    pattern: Pattern
    to: Sequence[str]
    axis: int = 0
    sizes: Sequence[int] | None = None

    def rewrite(self, tree: TreeRewriter) -> None:
        """Split the arrays."""
        templates = [Template(text) for text in self.to]
        replacements: dict[TreePath, Mapping[TreePath, Leaf]] = {}
        for path, fields, array in tree.arrays(Template(self.pattern)):
            with naming(path):
                parts = self._parts(array)
            paths = [to.path(fields) for to in templates]
            if len(set(paths)) < len(paths):
                raise TransformError(f"{format_path(path)}: two of its parts have the same path, from {list(self.to)}")
            replacements[path] = {new: ArrayLeaf.of(part) for new, part in zip(paths, parts, strict=True)}
        tree.replace(replacements)

    def _parts(self, array: DerivedArray) -> Sequence[DerivedArray]:
        axis, count = axis_of(array.spec, self.axis), len(self.to)
        extent = array.spec.shape[axis]
        sizes = self.sizes if self.sizes is not None else [extent // max(count, 1)] * count
        if sum(sizes) != extent or len(sizes) != count or min(sizes, default=0) < 0:
            sizes_text = "equal" if self.sizes is None else str(list(self.sizes))
            raise ValueError(f"cannot split {array.spec} into {count} parts along axis {axis}, {sizes_text}")
        parts, start = [], 0
        for size in sizes:
            parts.append(cut(array, Box.whole(array.spec.shape).band(axis, start, start + size)))
            start += size
        return parts

    def describe(self) -> str:
        """Describe the parts."""
        sizes = "" if self.sizes is None else f" of {list(self.sizes)}"
        return f"split {Template(self.pattern)} along axis {self.axis} into {', '.join(map(repr, self.to))}{sizes}"

    def inverse(self) -> Transform:
        """Return the `Fuse`."""
        template = Template(self.pattern)
        if not template.is_exact:
            raise not_invertible(self, "because the new names do not determine the old ones")
        assert isinstance(self.pattern, str)  # only templates are exact
        return Fuse([Template(to).spanning_as(template) for to in self.to], self.pattern, self.axis, self.sizes)


@dataclass(frozen=True, slots=True)
class Fuse(TreeTransform):
    """Concatenate arrays along an axis: ``Fuse(["{block...}.gate", "{block...}.up"], "{block}.gate_up")``.

    Attributes:
        patterns: templates of the parts, in order, all with the same fields.
        to: template of the path of the result.
        axis: axis of the concatenation; -1 is the last.
        sizes: sizes of the parts; None for equal sizes.
    """

    patterns: Sequence[str]
    to: str
    axis: int = 0
    sizes: Sequence[int] | None = None

    def rewrite(self, tree: TreeRewriter) -> None:
        """Concatenate the arrays."""
        to = Template(self.to)
        matched = tree.find_each([Template(text) for text in self.patterns])
        by_pattern = [_by_fields(text, of_pattern) for text, of_pattern in zip(self.patterns, matched, strict=True)]
        replacements: dict[TreePath, Mapping[TreePath, Leaf]] = {}
        for key in dict.fromkeys([key for of_pattern in by_pattern for key in of_pattern]):
            absent = [text for text, of_pattern in zip(self.patterns, by_pattern, strict=True) if key not in of_pattern]
            if absent:
                path = next(of_pattern[key][0] for of_pattern in by_pattern if key in of_pattern)
                raise TransformError(f"the part {absent[0]!r} that belongs to {format_path(path)} is missing")
            members = [of_pattern[key] for of_pattern in by_pattern]
            new = to.path(members[0][1])
            with naming(new):
                array = self._fused([tree.array(path) for path, _ in members])
            replacements.update({path: {} for path, _ in members})
            replacements[members[0][0]] = {new: ArrayLeaf.of(array)}
        tree.replace(replacements)

    def _fused(self, arrays: Sequence[DerivedArray]) -> DerivedArray:
        axis = axis_of(arrays[0].spec, self.axis)
        fused = concatenate(arrays, axis)
        sizes = [array.spec.shape[axis] for array in arrays]
        if sizes != (list(self.sizes) if self.sizes is not None else sizes[:1] * len(sizes)):
            sizes_text = "of equal sizes" if self.sizes is None else f"of {list(self.sizes)}"
            raise ValueError(f"expected parts {sizes_text} along axis {axis}, found {sizes}; set Fuse(..., sizes=)")
        return fused

    def describe(self) -> str:
        """Describe the parts."""
        return f"fuse {', '.join(map(repr, self.patterns))} along axis {self.axis} as {self.to!r}"

    def inverse(self) -> Transform:
        """Return the `Split`."""
        pattern = Template(self.to)
        for text in self.patterns:
            pattern = Template(pattern.spanning_as(Template(text)))
        assert isinstance(pattern.pattern, str)  # a template is a str
        return Split(pattern.pattern, self.patterns, self.axis, self.sizes)


_Texts: TypeAlias = tuple[tuple[str, str], ...]
"""Texts of fields, by name."""


def _by_fields(pattern: Pattern, matched: Mapping[TreePath, Fields]) -> dict[_Texts, tuple[TreePath, Fields]]:
    """Return the leaves that match a pattern, by their fields.

    Raises:
        TransformError: if two leaves have the same fields.
    """
    by_fields: dict[_Texts, tuple[TreePath, Fields]] = {}
    for path, fields in matched.items():
        key = tuple(sorted((name, field.text) for name, field in fields.items()))
        if key in by_fields:
            raise TransformError(
                f"{format_path(by_fields[key][0])} and {format_path(path)} both match {pattern!r} "
                "and would be the same part: use fields such as {name} instead of *"
            )
        by_fields[key] = path, fields
    return by_fields


def _counter(more: Template, fewer: Template) -> str:
    """Return the only field of `more` that `fewer` lacks."""
    names = more.fields - fewer.fields
    if len(names) != 1 or fewer.fields - more.fields or not more.is_exact:
        raise TransformError(f"{more} must have no '*', and exactly one field that {fewer} lacks, for the number")
    return next(iter(names))
