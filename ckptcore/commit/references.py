"""What references make of trees: of one the part that a checkpoint has itself, and of two the one over the other. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ckptcore.commit.root import References
from ckptcore.errors import TreeMismatchError
from ckptcore.model.metadata import LeafRecord, TreeMetadata
from ckptcore.model.tree import LEAF, Node, Skeleton, TreePath, format_path

__all__ = [
    "Overlaid",
    "cut_containers",
    "overlay",
    "pruned",
    "stored_leaves",
    "stored_numbers",
    "stored_tree",
]

_MAPPINGS: Final = ("dict", "OrderedDict")
_SHOWN: Final = 20


def stored_leaves(tree: TreeMetadata, references: References) -> list[int]:
    """The numbers of the leaves that a checkpoint has itself: all but arrays that it refers to, and those tied to these."""
    referred = frozenset(references.leaf)
    return [leaf for leaf in range(len(tree.leaves)) if tree.aliases.get(leaf, leaf) not in referred]


def stored_numbers(tree: TreeMetadata, references: References) -> Mapping[int, int]:
    """By number of a leaf that a checkpoint has itself, the number in its `stored_tree`."""
    return {leaf: number for number, leaf in enumerate(stored_leaves(tree, references))}


def stored_tree(tree: TreeMetadata, references: References) -> TreeMetadata:
    """The tree of what a checkpoint has itself, which is what its layout knows."""
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
    """A skeleton without some leaves, and without the containers that had no others. A container that loses a child is a mapping by its keys.

    Args:
        skeleton: whose leaves are numbered from 0.
        kept: the numbers of those that stay.
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
    kind = skeleton.kind if skeleton.kind in _MAPPINGS else "dict"
    return Node(kind, keys, nodes), number


def cut_containers(skeleton: Skeleton, kept: Collection[int]) -> Mapping[TreePath, Node]:
    """The containers that lose something by `pruned`, as they are before that."""
    leaves = [path for path, node in _places((), skeleton) if not isinstance(node, Node)]
    lost = [path for number, path in enumerate(leaves) if number not in kept]
    losing = {path[:length] for path in lost for length in range(len(path))}
    return {path: node for path, node in _places((), skeleton) if path in losing and isinstance(node, Node)}


def _places(path: TreePath, skeleton: Skeleton) -> Iterator[tuple[TreePath, Skeleton]]:
    """All containers and leaves, each container before its children."""
    yield path, skeleton
    if isinstance(skeleton, Node):
        for key, child in zip(skeleton.keys, skeleton.children, strict=True):
            yield from _places((*path, key), child)


@dataclass(frozen=True, slots=True)
class Overlaid:
    """A tree that was put over another one.

    Attributes:
        tree: the whole.
        from_below: by leaf of the whole that is of the lower tree, its number there.
    """

    tree: TreeMetadata
    from_below: Mapping[int, int]


def overlay(
    below: TreeMetadata, above: TreeMetadata, left: Sequence[TreePath] = (), cut: Mapping[TreePath, Node] | None = None
) -> Overlaid:
    """A tree over another one: what the upper one has comes from there, and all else from the lower one.

    Mappings have the keys of both, those of the lower one first; so has a container of which only some children were given. Any other
    container of the upper tree takes the place of what is below, or of its children where it has the same. An upper tree without anything
    leaves all as it is.

    Args:
        below, above: the trees.
        left: paths that were left to the lower tree by name.
        cut: containers that lost children by that, as they were given.

    Raises:
        TreeMismatchError: if something cannot be put over what is below, or nothing is below a path that was left.
    """
    walk = _Overlay(below, above)
    is_nothing = isinstance(above.skeleton, Node) and above.skeleton.kind in _MAPPINGS and not above.skeleton.keys
    skeleton = walk.node((), below.skeleton, None if is_nothing else above.skeleton)
    known = dict(_places((), below.skeleton)) if left else {}
    for path in left:
        if path not in known:
            walk.differences.append(f"{format_path(path)}: a placeholder stands there, and the base has nothing")
    for path, given in (cut or {}).items():
        found = known.get(path)
        if (
            given.kind in _MAPPINGS
            or not isinstance(found, Node)
            or (found.kind, found.keys) == (given.kind, given.keys)
        ):
            continue
        walk.differences.append(
            f"{format_path(path)}: a {given.kind} of {len(given.keys)} with placeholders is given, and the base has a {found.kind} of "
            f"{len(found.keys)}"
        )
    if walk.differences:
        shown = "".join(f"\n  {line}" for line in walk.differences[:_SHOWN])
        more = f"\n  and {len(walk.differences) - _SHOWN} more" if len(walk.differences) > _SHOWN else ""
        raise TreeMismatchError(
            f"the state does not go over its base:{shown}{more}\nGive containers that are no mappings whole, or with placeholders in the "
            "places of what is unchanged. Nothing was written",
            walk.differences,
        )
    aliases: dict[int, int] = {}
    first: dict[tuple[bool, int], int] = {}
    held_by = {}
    for number, (is_below, leaf) in enumerate(walk.sources):
        tree = below if is_below else above
        original = first.setdefault((is_below, tree.aliases.get(leaf, leaf)), number)
        if original != number:
            aliases[number] = original
        if leaf in tree.held_by:
            held_by[number] = tree.held_by[leaf]
    whole = TreeMetadata(skeleton, tuple(walk.records), aliases, held_by)
    return Overlaid(whole, {number: leaf for number, (is_below, leaf) in enumerate(walk.sources) if is_below})


class _Overlay:
    def __init__(self, below: TreeMetadata, above: TreeMetadata) -> None:
        self._trees = {True: below, False: above}
        self._numbers = {of: {path: leaf for leaf, path in enumerate(tree.paths)} for of, tree in self._trees.items()}
        self.sources: list[tuple[bool, int]] = []
        """By leaf of the whole, whether it is of the lower tree, and its number there."""
        self.records: list[LeafRecord] = []
        self.differences: list[str] = []

    def node(self, path: TreePath, below: Skeleton | None, above: Skeleton | None) -> Skeleton:
        """What comes to a path, where at least one of the trees has something."""
        if above is None or below is None:
            return self._take(path, above is None, below if above is None else above)
        if not isinstance(above, Node) or not isinstance(below, Node):
            return self._take(path, False, above)
        lower = dict(zip(below.keys, below.children, strict=True))
        upper = dict(zip(above.keys, above.children, strict=True))
        if above.kind in _MAPPINGS and below.kind not in _MAPPINGS and not upper.keys() <= lower.keys():
            self.differences.append(
                f"{format_path(path)}: some children of a container are given, and the base has a {below.kind} without "
                f"{sorted(map(str, upper.keys() - lower.keys()))[:5]}"
            )
            return LEAF
        if above.kind not in _MAPPINGS and (above.kind, above.keys) != (below.kind, below.keys):
            return self._take(path, False, above)
        keys = tuple(dict.fromkeys([*lower, *upper]))
        children = [self.node((*path, key), lower.get(key), upper.get(key)) for key in keys]
        return replace(below, keys=keys, children=tuple(children))

    def _take(self, path: TreePath, is_below: bool, skeleton: Skeleton | None) -> Skeleton:
        """All of one tree at a path."""
        assert skeleton is not None  # one of them has something
        if isinstance(skeleton, Node):
            for key, child in zip(skeleton.keys, skeleton.children, strict=True):
                self._take((*path, key), is_below, child)
        else:
            leaf = self._numbers[is_below][path]
            self.sources.append((is_below, leaf))
            self.records.append(self._trees[is_below].leaves[leaf])
        return skeleton
