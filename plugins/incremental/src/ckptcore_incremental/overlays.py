"""Overlay the tree of an update on the tree of its base. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.commit.root import MAPPINGS, containers_and_leaves
from ckptcore.errors import TreeMismatchError
from ckptcore.model.metadata import LeafRecord, TreeMetadata
from ckptcore.model.tree import LEAF, Node, Skeleton, TreePath, format_path

_SHOWN: Final = 20
"""Maximum number of differences in an error message."""


@dataclass(frozen=True, slots=True)
class OverlaidTree:
    """The tree of an update with the unchanged leaves of its base.

    Attributes:
        tree: the whole tree.
        from_base: for each leaf of `tree` that comes from the base, its leaf number in the base.
    """

    tree: TreeMetadata
    from_base: Mapping[int, int]


def overlay(
    base: TreeMetadata,
    update: TreeMetadata,
    placeholders: Sequence[TreePath] = (),
    containers: Mapping[TreePath, Node] | None = None,
) -> OverlaidTree:
    """Overlay the tree of an update on the tree of its base. Leaves that the update lacks come from the base.

    A mapping gets the keys of both trees, the keys of the base first. A container with placeholders
    keeps all keys of the base. Any other container is overlaid child by child if the base has a
    container of the same type and keys. Otherwise it replaces the container of the base. An empty
    update changes nothing.

    Args:
        base, update: the trees.
        placeholders: paths of placeholders in the update, which take the values of the base.
        containers: containers of the update that have placeholders, with all their keys.

    Raises:
        TreeMismatchError: if a container with placeholders has another type or other keys in the
            base, or the base has nothing at the path of a placeholder.
    """
    walk = _TreeWalk(base, update)
    is_empty = isinstance(update.skeleton, Node) and update.skeleton.kind in MAPPINGS and not update.skeleton.keys
    skeleton = walk.node((), base.skeleton, None if is_empty else update.skeleton)
    known = dict(containers_and_leaves((), base.skeleton)) if placeholders else {}
    for path in placeholders:
        if path not in known:
            walk.differences.append(
                f"{format_path(path)}: the update has a placeholder, but the base has nothing at this path"
            )
    for path, given in (containers or {}).items():
        record = known.get(path)
        if (
            given.kind in MAPPINGS
            or not isinstance(record, Node)
            or (record.kind, record.keys) == (given.kind, given.keys)
        ):
            continue
        walk.differences.append(
            f"{format_path(path)}: the update has a {given.kind} of {len(given.keys)} with placeholders, and the base "
            f"has a {record.kind} of {len(record.keys)}"
        )
    if walk.differences:
        shown = "".join(f"\n  {line}" for line in walk.differences[:_SHOWN])
        more = f"\n  and {len(walk.differences) - _SHOWN} more" if len(walk.differences) > _SHOWN else ""
        raise TreeMismatchError(
            f"the state does not fit its base:{shown}{more}\nPass containers that are not mappings completely, or "
            "with placeholders for unchanged children. Nothing was written",
            walk.differences,
        )
    aliases: dict[int, int] = {}
    first: dict[tuple[bool, int], int] = {}
    held_by = {}
    for number, (is_base, leaf) in enumerate(walk.sources):
        tree = base if is_base else update
        original = first.setdefault((is_base, tree.aliases.get(leaf, leaf)), number)
        if original != number:
            aliases[number] = original
        if leaf in tree.held_by:
            held_by[number] = tree.held_by[leaf]
    whole = TreeMetadata(skeleton, tuple(walk.records), aliases, held_by)
    return OverlaidTree(whole, {number: leaf for number, (is_base, leaf) in enumerate(walk.sources) if is_base})


class _TreeWalk:
    def __init__(self, base: TreeMetadata, update: TreeMetadata) -> None:
        self._trees = {True: base, False: update}
        self._numbers = {of: {path: leaf for leaf, path in enumerate(tree.paths)} for of, tree in self._trees.items()}
        self.sources: list[tuple[bool, int]] = []
        """For each leaf of the whole tree: True if it comes from the base, and its leaf number in its source tree."""
        self.records: list[LeafRecord] = []
        self.differences: list[str] = []

    def node(self, path: TreePath, base: Skeleton | None, update: Skeleton | None) -> Skeleton:
        """Return the node at a path. At least one of the trees has a node there."""
        if update is None or base is None:
            return self._take(path, update is None, base if update is None else update)
        if not isinstance(update, Node) or not isinstance(base, Node):
            return self._take(path, False, update)
        of_base = dict(zip(base.keys, base.children, strict=True))
        of_update = dict(zip(update.keys, update.children, strict=True))
        if update.kind in MAPPINGS and base.kind not in MAPPINGS and not of_update.keys() <= of_base.keys():
            self.differences.append(
                f"{format_path(path)}: the update has some children of a container, and the base has a {base.kind} "
                f"without {sorted(map(str, of_update.keys() - of_base.keys()))[:5]}"
            )
            return LEAF
        if update.kind not in MAPPINGS and (update.kind, update.keys) != (base.kind, base.keys):
            return self._take(path, False, update)
        keys = tuple(dict.fromkeys([*of_base, *of_update]))
        children = [self.node((*path, key), of_base.get(key), of_update.get(key)) for key in keys]
        return base._replace(keys=keys, children=tuple(children))

    def _take(self, path: TreePath, is_base: bool, skeleton: Skeleton | None) -> Skeleton:
        """Take the node at a path, with all nodes below it, from one tree."""
        assert skeleton is not None  # one of the trees has a node at the path
        if isinstance(skeleton, Node):
            for key, child in zip(skeleton.keys, skeleton.children, strict=True):
                self._take((*path, key), is_base, child)
        else:
            leaf = self._numbers[is_base][path]
            self.sources.append((is_base, leaf))
            self.records.append(self._trees[is_base].leaves[leaf])
        return skeleton
