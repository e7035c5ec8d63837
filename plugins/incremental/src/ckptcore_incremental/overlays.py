"""Overlays: the tree of an update over the tree of its base. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ckptcore.commit.references import MAPPINGS, containers_and_leaves
from ckptcore.errors import TreeMismatchError
from ckptcore.model.metadata import LeafRecord, TreeMetadata
from ckptcore.model.tree import LEAF, Node, Skeleton, TreePath, format_path

__all__ = ["Overlaid", "overlay"]

_SHOWN: Final = 20


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
