"""Overlays: the tree of an update over the tree of its base. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.commit.references import MAPPINGS, containers_and_leaves
from ckptcore.errors import TreeMismatchError
from ckptcore.model.metadata import LeafRecord, TreeMetadata
from ckptcore.model.tree import LEAF, Node, Skeleton, TreePath, format_path

__all__ = ["Overlaid", "overlay"]

_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Overlaid:
    """A tree over another one.

    Attributes:
        tree: the whole tree.
        from_below: by leaf of the whole tree that is from the lower tree, its number there.
    """

    tree: TreeMetadata
    from_below: Mapping[int, int]


def overlay(
    below: TreeMetadata, above: TreeMetadata, left: Sequence[TreePath] = (), cut: Mapping[TreePath, Node] | None = None
) -> Overlaid:
    """Put a tree over another one: leaves of the upper tree come from there, all others from the lower tree.

    Mappings have the keys of both, those of the lower tree first, and so have containers of which only some children
    were given. Any other container of the upper tree replaces the container below it; with the same keys, it replaces
    the children. An empty upper tree changes nothing.

    Args:
        below, above: the trees.
        left: paths of placeholders, whose values come from the lower tree.
        cut: containers that have placeholders, as they were given.

    Raises:
        TreeMismatchError: the trees do not fit, or the lower tree has nothing at the path of a placeholder.
    """
    walk = _Overlay(below, above)
    is_nothing = isinstance(above.skeleton, Node) and above.skeleton.kind in MAPPINGS and not above.skeleton.keys
    skeleton = walk.node((), below.skeleton, None if is_nothing else above.skeleton)
    known = dict(containers_and_leaves((), below.skeleton)) if left else {}
    for path in left:
        if path not in known:
            walk.differences.append(f"{format_path(path)}: a placeholder stands there, and the base has nothing")
    for path, given in (cut or {}).items():
        found = known.get(path)
        if (
            given.kind in MAPPINGS
            or not isinstance(found, Node)
            or (found.kind, found.keys) == (given.kind, given.keys)
        ):
            continue
        walk.differences.append(
            f"{format_path(path)}: a {given.kind} of {len(given.keys)} with placeholders is given, and the base has "
            f"a {found.kind} of {len(found.keys)}"
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
        """By leaf of the whole tree: True if it is from the lower tree, and its number in its tree."""
        self.records: list[LeafRecord] = []
        self.differences: list[str] = []

    def node(self, path: TreePath, below: Skeleton | None, above: Skeleton | None) -> Skeleton:
        """Return the node at a path; at least one of the trees has one."""
        if above is None or below is None:
            return self._take(path, above is None, below if above is None else above)
        if not isinstance(above, Node) or not isinstance(below, Node):
            return self._take(path, False, above)
        lower = dict(zip(below.keys, below.children, strict=True))
        upper = dict(zip(above.keys, above.children, strict=True))
        if above.kind in MAPPINGS and below.kind not in MAPPINGS and not upper.keys() <= lower.keys():
            self.differences.append(
                f"{format_path(path)}: some children of a container are given, and the base has a {below.kind} without "
                f"{sorted(map(str, upper.keys() - lower.keys()))[:5]}"
            )
            return LEAF
        if above.kind not in MAPPINGS and (above.kind, above.keys) != (below.kind, below.keys):
            return self._take(path, False, above)
        keys = tuple(dict.fromkeys([*lower, *upper]))
        children = [self.node((*path, key), lower.get(key), upper.get(key)) for key in keys]
        return below._replace(keys=keys, children=tuple(children))

    def _take(self, path: TreePath, is_below: bool, skeleton: Skeleton | None) -> Skeleton:
        """Take everything at a path from one tree."""
        assert skeleton is not None  # one of them has something
        if isinstance(skeleton, Node):
            for key, child in zip(skeleton.keys, skeleton.children, strict=True):
                self._take((*path, key), is_below, child)
        else:
            leaf = self._numbers[is_below][path]
            self.sources.append((is_below, leaf))
            self.records.append(self._trees[is_below].leaves[leaf])
        return skeleton
