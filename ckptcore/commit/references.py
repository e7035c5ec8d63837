"""References to bases, which store arrays of other checkpoints, and the tree that a checkpoint stores itself. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import LEAF, Node, Skeleton, TreePath

__all__ = [
    "MAPPINGS",
    "Base",
    "References",
    "containers_and_leaves",
    "cut_containers",
    "pruned",
    "stored_leaves",
    "stored_numbers",
    "stored_tree",
]

MAPPINGS: Final = ("dict", "OrderedDict")


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint that another one refers to.

    Attributes:
        path: its path, relative to the directory around the referring one; ``/`` between names, ``..`` in front only.
        save_id: its save id.
    """

    path: str
    save_id: str

    def __post_init__(self) -> None:
        """Refuse an invalid path, which may be hostile.

        Raises:
            CorruptCheckpointError
        """
        names = self.path.lstrip("/").split("/")
        while names and names[0] == "..":
            names.pop(0)
        plain = all(name not in ("", ".", "..") and "\0" not in name for name in names)
        if not names or not plain or posixpath.isabs(self.path) or names[-1].startswith("."):
            raise CorruptCheckpointError(
                f"a checkpoint refers to a base at {self.path[:200]!r}: expected a relative path to a checkpoint; load "
                "another one"
            )

    @property
    def is_beside(self) -> bool:
        """True if it is in the same directory as the referring one."""
        return "/" not in self.path


@dataclass(frozen=True, slots=True)
class References:
    """The arrays of a tree that are stored in bases, as columns.

    Attributes:
        bases: the checkpoints that store them.
        leaf: the numbers of the arrays, ascending; the first of tied arrays.
        base: the number of the base of each.
        stored: the number of each in the tree of its base, which stores it itself: references are one deep.
    """

    bases: tuple[Base, ...] = ()
    leaf: tuple[int, ...] = ()
    base: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """True if an array is stored in a base."""
        return bool(self.leaf)

    def check(self, tree: TreeMetadata) -> None:
        """Refuse references that do not fit a tree; both may be hostile.

        Raises:
            CorruptCheckpointError
        """
        ascending = all(first < second for first, second in zip(self.leaf, self.leaf[1:], strict=False))
        fitting = len(self.leaf) == len(self.base) == len(self.stored) and all(
            leaf < len(tree.leaves) and isinstance(tree.leaves[leaf], ArrayRecord) and leaf not in tree.aliases
            for leaf in self.leaf
        )
        if not ascending or not fitting or set(self.base) != set(range(len(self.bases))):
            raise CorruptCheckpointError("the references of a checkpoint do not fit its tree; load another one")


def stored_leaves(tree: TreeMetadata, references: References) -> list[int]:
    """Return the numbers of the leaves that a checkpoint stores itself: all but arrays in bases and their aliases."""
    referred = frozenset(references.leaf)
    return [leaf for leaf in range(len(tree.leaves)) if tree.aliases.get(leaf, leaf) not in referred]


def stored_numbers(tree: TreeMetadata, references: References) -> Mapping[int, int]:
    """Return, by number of a leaf that a checkpoint stores itself, its number in the `stored_tree`."""
    return {leaf: number for number, leaf in enumerate(stored_leaves(tree, references))}


def stored_tree(tree: TreeMetadata, references: References) -> TreeMetadata:
    """Return the tree of the leaves that a checkpoint stores itself; its layout has no other."""
    if not references:
        return tree
    kept = stored_leaves(tree, references)
    numbers = {leaf: number for number, leaf in enumerate(kept)}
    return TreeMetadata(
        pruned(tree.skeleton, set(kept)),
        tuple([tree.leaves[leaf] for leaf in kept]),
        {numbers[alias]: numbers[target] for alias, target in tree.aliases.items() if alias in numbers},
        {numbers[leaf]: ranks for leaf, ranks in tree.held_by.items() if leaf in numbers},
    )


def pruned(skeleton: Skeleton, kept: Collection[int]) -> Skeleton:
    """Return a skeleton without some leaves and the containers that become empty.

    A container that loses a child becomes a mapping.

    Args:
        skeleton: the skeleton; its leaves are numbered from 0.
        kept: the numbers of the leaves that stay.
    """
    made, _ = _pruned(skeleton, kept, 0)
    return Node("dict", (), ()) if made is None else made


def _pruned(skeleton: Skeleton, kept: Collection[int], number: int) -> tuple[Skeleton | None, int]:
    if not isinstance(skeleton, Node):
        return (LEAF if number in kept else None), number + 1
    if not skeleton.keys:
        return skeleton, number
    children = []
    for key, child in zip(skeleton.keys, skeleton.children, strict=True):
        made, number = _pruned(child, kept, number)
        if made is not None:
            children.append((key, made))
    if not children:
        return None, number
    keys, nodes = zip(*children, strict=True)
    if len(keys) == len(skeleton.keys):
        return Node(skeleton.kind, keys, nodes, skeleton.type), number
    kind = skeleton.kind if skeleton.kind in MAPPINGS else "dict"
    return Node(kind, keys, nodes), number


def cut_containers(skeleton: Skeleton, kept: Collection[int]) -> Mapping[TreePath, Node]:
    """Return the containers that lose children by `pruned`, as they are before."""
    leaves = [path for path, node in containers_and_leaves((), skeleton) if not isinstance(node, Node)]
    lost = [path for number, path in enumerate(leaves) if number not in kept]
    losing = {path[:length] for path in lost for length in range(len(path))}
    return {
        path: node for path, node in containers_and_leaves((), skeleton) if path in losing and isinstance(node, Node)
    }


def containers_and_leaves(path: TreePath, skeleton: Skeleton) -> Iterator[tuple[TreePath, Skeleton]]:
    """Yield all containers and leaves below a path, each container before its children."""
    yield path, skeleton
    if isinstance(skeleton, Node):
        for key, child in zip(skeleton.keys, skeleton.children, strict=True):
            yield from containers_and_leaves((*path, key), child)
