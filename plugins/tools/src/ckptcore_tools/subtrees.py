"""A part of a saved tree as a tree of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptcore.errors import TreeMismatchError
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import Key, Node, Skeleton, format_path, leaf_count

__all__ = ["Subtree", "SubtreePath", "find_subtree", "path_keys"]

SubtreePath: TypeAlias = str | Sequence[Key]
"""Where a part of a tree is: its keys, or one text with ``/`` between them. Where no str key is equal to a text, the name of an
attribute and the digits of an index stand for those. Empty: the whole tree."""


@dataclass(frozen=True, slots=True)
class Subtree:
    """A part of a tree.

    Attributes:
        tree: the part, with paths that begin in it.
        sources: by leaf of the part, the leaf of the whole tree that has its elements or value; never an alias.
    """

    tree: TreeMetadata
    sources: tuple[int, ...]


def path_keys(path: SubtreePath) -> tuple[Key, ...]:
    """The keys of a path."""
    return tuple([key for key in path.split("/") if key]) if isinstance(path, str) else tuple(path)


def find_subtree(tree: TreeMetadata, path: SubtreePath) -> Subtree:
    """The part of a tree below a path.

    Arrays that share their bytes within the part are shared in it; one that shares those of an array outside has them
    for itself.

    Args:
        tree: the whole tree.
        path: where the part is; it may be a leaf.

    Raises:
        TreeMismatchError: if nothing is there.
    """
    part, first = _descend(tree.skeleton, path_keys(path))
    sources = tuple([tree.aliases.get(leaf, leaf) for leaf in range(first, first + leaf_count(part))])
    seen: dict[int, int] = {}
    aliases = {}
    for leaf, source in enumerate(sources):
        original = seen.setdefault(source, leaf)
        if original != leaf:
            aliases[leaf] = original
    held_by = {leaf: tree.held_by[first + leaf] for leaf in range(len(sources)) if first + leaf in tree.held_by}
    return Subtree(TreeMetadata(part, tree.leaves[first : first + len(sources)], aliases, held_by), sources)


def _descend(skeleton: Skeleton, keys: Sequence[Key]) -> tuple[Skeleton, int]:
    """What is at a path, and the number of its first leaf."""
    part, first = skeleton, 0
    for depth, wanted in enumerate(keys):
        found = _child(part, wanted)
        if found is None:
            raise _nothing_there(part, keys, depth)
        assert isinstance(part, Node)  # only containers have children
        first += sum(leaf_count(child) for child in part.children[:found])
        part = part.children[found]
    return part, first


def _child(part: Skeleton, wanted: Key) -> int | None:
    """The number of the child with this key."""
    if not isinstance(part, Node):
        return None
    for number, key in enumerate(part.keys):
        if type(key) is type(wanted) and key == wanted:
            return number
    if isinstance(wanted, str):
        for number, key in enumerate(part.keys):
            if str(key) == wanted:
                return number
    return None


def _nothing_there(part: Skeleton, keys: Sequence[Key], depth: int) -> TreeMismatchError:
    above = format_path(tuple(keys[:depth]))
    if isinstance(part, Node):
        there = ", ".join(repr(str(key)) for key in part.keys[:20]) + (", ..." if len(part.keys) > 20 else "")
        found = f"{above} has {there or 'nothing in it'}"
    else:
        found = f"{above} is a leaf"
    line = f"{format_path(tuple(keys))} is not in the tree: {found}"
    return TreeMismatchError(f"{line}. Name a part that is there, or leave the path out for the whole tree", [line])
