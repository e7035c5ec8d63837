"""Stored trees: the part of an update's tree that the update stores itself, without arrays in bases. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from ckptcore.commit.root import References
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import LEAF, Node, Skeleton, TreePath

MAPPINGS: Final = ("dict", "OrderedDict")


def stored_leaves(tree: TreeMetadata, references: References) -> list[int]:
    """Return the numbers of the leaves that a checkpoint stores itself: all but arrays in bases and their aliases."""
    referred = frozenset(references.leaf)
    return [leaf for leaf in range(len(tree.leaves)) if tree.aliases.get(leaf, leaf) not in referred]


def stored_numbers(tree: TreeMetadata, references: References) -> Mapping[int, int]:
    """Return a mapping from leaf numbers in the whole tree to leaf numbers in the `stored_tree`."""
    return {leaf: number for number, leaf in enumerate(stored_leaves(tree, references))}


def stored_tree(tree: TreeMetadata, references: References) -> TreeMetadata:
    """Return the tree of the leaves that a checkpoint stores itself. Its layout stores this tree."""
    if not references.leaf:
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
    """Return a skeleton without some leaves, and without containers that become empty.

    A container that loses a child becomes a mapping.

    Args:
        skeleton: the skeleton; its leaves are numbered from 0.
        kept: the numbers of the leaves that stay.
    """
    rest, _ = _pruned(skeleton, kept, 0)
    return Node("dict", (), ()) if rest is None else rest


def _pruned(skeleton: Skeleton, kept: Collection[int], number: int) -> tuple[Skeleton | None, int]:
    if not isinstance(skeleton, Node):
        return (LEAF if number in kept else None), number + 1
    if not skeleton.keys:
        return skeleton, number
    children = []
    for key, child in zip(skeleton.keys, skeleton.children, strict=True):
        rest, number = _pruned(child, kept, number)
        if rest is not None:
            children.append((key, rest))
    if not children:
        return None, number
    keys, nodes = zip(*children, strict=True)
    if len(keys) == len(skeleton.keys):
        return skeleton._replace(keys=keys, children=nodes), number
    kind = skeleton.kind if skeleton.kind in MAPPINGS else "dict"
    return Node(kind, keys, nodes), number


def cut_containers(skeleton: Skeleton, kept: Collection[int]) -> Mapping[TreePath, Node]:
    """Return the containers that lose children in `pruned`, in their original form."""
    leaves = [path for path, node in containers_and_leaves((), skeleton) if not isinstance(node, Node)]
    lost = [path for number, path in enumerate(leaves) if number not in kept]
    losing = {path[:length] for path in lost for length in range(len(path))}
    return {
        path: node for path, node in containers_and_leaves((), skeleton) if path in losing and isinstance(node, Node)
    }


def containers_and_leaves(path: TreePath, skeleton: Skeleton) -> Iterator[tuple[TreePath, Skeleton]]:
    """Yield all containers and leaves of a subtree with their paths, each container before its children."""
    yield path, skeleton
    if isinstance(skeleton, Node):
        for key, child in zip(skeleton.keys, skeleton.children, strict=True):
            yield from containers_and_leaves((*path, key), child)
