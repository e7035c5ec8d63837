"""Chosen trees: what is left of a stored tree of which some leaves are selected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptcore.errors import TreeMismatchError
from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.model.tree import LEAF, Key, Node, Skeleton
from ckptcore.select import LeafTable, Selection

__all__ = ["chosen_leaves", "prune"]


def chosen_leaves(
    opened: Checkpoint, selection: Selection, describe: Callable[[Checkpoint], Sequence[object]]
) -> frozenset[int]:
    """The numbers of the leaves of a checkpoint that are selected. Reads nothing.

    Names are those of what is stored. A leaf that is made of others is selected if all of them are.

    Args:
        opened: the checkpoint, which may be derived from the one that is stored.
        selection: by names of the stored one.
        describe: what ``metadata(location).abstract`` has in the place of each leaf.

    Raises:
        TypeError: if it is no selection.
        TreeMismatchError: if it selects nothing, or names what is not there.
    """
    if not isinstance(selection, Selection):
        raise TypeError(
            f"select={selection!r}: expected a selection of ckptcore.select, such as select.names('params') or "
            "~select.glob('opt_state')"
        )
    chosen = _chosen(opened, selection, describe)
    if not chosen and opened.tree.leaves:
        raise TreeMismatchError(
            f"of {opened.location.display} nothing is selected, by {selection!r}; nothing was read. Correct the selection "
            "(metadata(location).abstract has what is stored), or do not load",
            ["nothing is selected"],
        )
    return chosen


def _chosen(
    opened: Checkpoint, selection: Selection, describe: Callable[[Checkpoint], Sequence[object]]
) -> frozenset[int]:
    if opened.derived is None or opened.derived.opened_so:
        return selection.leaves(LeafTable(opened.tree.paths, lambda: describe(opened)))
    below = opened.derived.below[0]  # names are those of what is loaded, not of checkpoints beside it
    kept = _chosen(below, selection, describe)
    stored = opened.derived.stored
    return frozenset([leaf for leaf in range(len(opened.tree.leaves)) if kept.issuperset(stored((leaf,)).get(0, ()))])


def prune(skeleton: Skeleton, chosen: frozenset[int]) -> tuple[Skeleton, list[int | None]]:
    """A tree without the leaves that are not chosen: mappings lose them, sequences have a placeholder in their place.

    Containers in which nothing is chosen are left out as leaves are.

    Returns:
        The tree, and for each of its leaves the number of the stored one, or None for a placeholder.
    """
    walk = _Pruning(chosen)
    pruned = walk.node(skeleton)
    return (LEAF, [None]) if pruned is None else (pruned, walk.numbers)


class _Pruning:
    def __init__(self, chosen: frozenset[int]) -> None:
        self._chosen = chosen
        self._next = 0
        self.numbers: list[int | None] = []

    def node(self, skeleton: Skeleton) -> Skeleton | None:
        """What is left of a node; None if nothing is."""
        if not isinstance(skeleton, Node):
            number = self._next
            self._next += 1
            if number not in self._chosen:
                return None
            self.numbers.append(number)
            return LEAF
        before = len(self.numbers)
        keys: list[Key] = []
        children: list[Skeleton] = []
        keeps_places = _is_sequence(skeleton)
        found = False
        for key, child in zip(skeleton.keys, skeleton.children, strict=True):
            left = self.node(child)
            found = found or left is not None
            if left is None and keeps_places:
                self.numbers.append(None)
                left = LEAF
            if left is not None:
                keys.append(key)
                children.append(left)
        if not found:
            del self.numbers[before:]
            return None
        return Node(skeleton.kind, tuple(keys), tuple(children), skeleton.type)


def _is_sequence(node: Node) -> bool:
    """Whether it comes back with its children by their places, as `ckptcore.tree.flattening.rebuild` makes it."""
    return node.kind in ("list", "tuple") or (node.kind == "object" and node.keys == tuple(range(len(node.keys))))
