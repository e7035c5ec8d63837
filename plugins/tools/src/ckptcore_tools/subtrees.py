"""Subtrees of a saved tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptcore.errors import TreeMismatchError
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import Key, Node, Skeleton, format_path, leaf_count
from ckptcore.tree.suggestions import NameSuggestions

SubtreePath: TypeAlias = str | Sequence[Key]
"""The path of a subtree: its keys, or one text with ``/`` between them. A text also matches the name of an attribute or
the digits of an index, if no str key is equal to it. Empty: the whole tree."""


@dataclass(frozen=True, slots=True)
class Subtree:
    """A part of a tree.

    Attributes:
        tree: the subtree, with relative paths.
        sources: for each leaf of the subtree, the number of the leaf of the whole tree that stores its elements or
            value. Never an alias.
    """

    tree: TreeMetadata
    sources: tuple[int, ...]


def path_keys(path: SubtreePath) -> tuple[Key, ...]:
    """Return the keys of a path. Empty keys of a text are skipped."""
    return tuple([key for key in path.split("/") if key]) if isinstance(path, str) else tuple(path)


def find_subtree(tree: TreeMetadata, path: SubtreePath) -> Subtree:
    """Return the part of a tree below a path.

    Arrays that are tied within the subtree stay tied. An array that is tied to an array outside becomes an array of the
    subtree.

    Args:
        tree: the whole tree.
        path: path of a container or a leaf.

    Raises:
        TreeMismatchError: if the path does not exist.
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


def unknown_checkpointable(subtree: SubtreePath, names: Sequence[str]) -> TreeMismatchError:
    """Return the error for a subtree of several checkpointables that does not start with the name of one."""
    wanted = f"subtree={subtree!r}"
    return TreeMismatchError(
        f"{wanted} does not start with the name of a checkpointable. Expected one of {', '.join(map(repr, names))}",
        [wanted],
    )


def _descend(skeleton: Skeleton, keys: Sequence[Key]) -> tuple[Skeleton, int]:
    """Return the skeleton at a path, and the number of its first leaf."""
    part, first = skeleton, 0
    for depth, key in enumerate(keys):
        number = _child_number(part, key)
        if number is None:
            raise _missing(part, keys, depth)
        assert isinstance(part, Node)  # only containers have children
        first += sum(leaf_count(child) for child in part.children[:number])
        part = part.children[number]
    return part, first


def _child_number(part: Skeleton, wanted: Key) -> int | None:
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


def _missing(part: Skeleton, keys: Sequence[Key], depth: int) -> TreeMismatchError:
    parent = format_path(tuple(keys[:depth]))
    if isinstance(part, Node):
        names = ", ".join(repr(str(key)) for key in part.keys[:20]) + (", ..." if len(part.keys) > 20 else "")
        content = f"{parent} contains {names}" if names else f"{parent} is empty"
        near = NameSuggestions([str(key) for key in part.keys]).nearest(str(keys[depth]))
        content += f"; did you mean {near!r}?" if near else ""
    else:
        content = f"{parent} is a leaf"
    line = f"{format_path(tuple(keys))} does not exist in the tree: {content}"
    end = "" if line.endswith("?") else "."
    return TreeMismatchError(f"{line}{end} Give an existing subtree, or () for the whole tree", [line])
