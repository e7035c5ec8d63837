"""Selections of stored leaves: find the selected leaves, and remove or keep the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ckptcore.context import Context
from ckptcore.errors import TreeMismatchError
from ckptcore.loading.abstract_trees import abstract_leaves_of
from ckptcore.matching.forms import plain_path
from ckptcore.matching.options import Matched
from ckptcore.model.tree import LEAF, Key, Node, Skeleton, TreePath, are_indices, empty_nodes, format_path, leaf_count
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.plugins import Plugins
from ckptcore.runtime import runtime_of
from ckptcore.select import LeafTable, Selection
from ckptcore.tree.flattening import Flat, rebuild
from ckptcore.tree.shapes import LiveObject, objects_in


def chosen_leaves(checkpoint: Checkpoint, selection: Selection, context: Context) -> frozenset[int]:
    """Return the numbers of the selected leaves of a checkpoint. Reads nothing.

    A selection uses the names of the stored tree. A leaf that is derived from several stored leaves is selected if all
    of them are selected. A leaf that needs no leaf of the stored tree, such as a constant or an array of an additional
    checkpoint, is always selected.

    Args:
        checkpoint: the checkpoint, which may be derived from the stored checkpoint.
        selection: the selection.
        context: its plugins describe the leaves.

    Returns:
        The numbers of the selected leaves and containers without children. The numbers of such containers follow those
        of all leaves. See `prune`.

    Raises:
        TypeError: `selection` is not a selection.
        TreeMismatchError: `selection` selects nothing, or names leaves that are not stored.
    """
    if not isinstance(selection, Selection):
        raise TypeError(
            f"select={selection!r}: expected a selection of ckptcore.select, such as select.names('params') or "
            "~select.glob('opt_state')"
        )
    chosen = _chosen(checkpoint, selection, context)
    if not chosen and checkpoint.tree.leaves:
        raise TreeMismatchError(
            f"{checkpoint.location.display}: nothing is selected by {selection!r}. Correct the selection: "
            "metadata(location).abstract is the stored tree. Nothing was read",
            ["nothing is selected"],
        )
    return chosen


def _chosen(checkpoint: Checkpoint, selection: Selection, context: Context) -> frozenset[int]:
    tree, derived = checkpoint.tree, checkpoint.derived
    empty = list(empty_nodes(tree.skeleton))
    if derived is None or derived.is_builtin:
        registry = runtime_of(context).registry

        def describe() -> list[object]:
            return [*abstract_leaves_of(tree, registry), *[rebuild(node, ()) for _, node in empty]]

        return selection.leaves(LeafTable([*tree.paths, *[path for path, _ in empty]], describe))
    below = derived.sources[0]  # names refer to the loaded checkpoint, not to additional sources
    kept = _chosen(below, selection, context)
    count = len(tree.leaves)
    chosen = {leaf for leaf in range(count) if kept.issuperset(derived.stored((leaf,)).get(0, ()))}
    if empty:
        first = len(below.tree.leaves)
        stored = {path: first + number for number, (path, _) in enumerate(empty_nodes(below.tree.skeleton))}
        near = functools.cache(lambda: _Neighbours(tree.paths, chosen))  # only moved containers need it
        chosen |= {
            count + number
            for number, (path, _) in enumerate(empty)
            if (stored[path] in kept if path in stored else near().has_chosen(path))
        }
    return frozenset(chosen)


class _Neighbours:
    """Finds leaves near containers without children. A transform moves such a container together with these leaves."""

    def __init__(self, leaves: Sequence[TreePath], chosen: Collection[int]) -> None:
        self._all = {leaf[:depth] for leaf in leaves for depth in range(len(leaf))}
        self._chosen = {leaves[number][:depth] for number in chosen for depth in range(len(leaves[number]))}

    def has_chosen(self, path: TreePath) -> bool:
        """Find the nearest container above a path that contains leaves. Return True if one of them is chosen.

        Also returns True if there is no such container.
        """
        above = [path[:depth] for depth in reversed(range(len(path))) if path[:depth] in self._all]
        return not above or above[0] in self._chosen


def prune(skeleton: Skeleton, chosen: frozenset[int]) -> tuple[Skeleton, list[int | None]]:
    """Remove unselected leaves from a tree. In a list or tuple, a placeholder replaces each removed child.

    Containers without any selected part are removed in the same way.

    Args:
        skeleton: the tree.
        chosen: the result of `chosen_leaves`.

    Returns:
        The tree, and for each of its leaves the number of the stored leaf, or None for a placeholder.
    """
    walk = _Pruning(chosen, leaf_count(skeleton))
    pruned = walk.node(skeleton)
    return (LEAF, [None]) if pruned is None else (pruned, walk.numbers)


class _Pruning:
    """A walk through a tree that counts leaves, and containers without children, as `chosen_leaves` numbers them."""

    def __init__(self, chosen: frozenset[int], leaves: int) -> None:
        self._chosen = chosen
        self._next = 0
        self._next_empty = leaves
        self.numbers: list[int | None] = []

    def node(self, skeleton: Skeleton) -> Skeleton | None:
        """Return the remaining part of a node; None if nothing remains."""
        if not isinstance(skeleton, Node):
            number = self._next
            self._next += 1
            if number not in self._chosen:
                return None
            self.numbers.append(number)
            return LEAF
        if not skeleton.children:
            self._next_empty += 1
            return skeleton if self._next_empty - 1 in self._chosen else None
        before = len(self.numbers)
        keys: list[Key] = []
        children: list[Skeleton] = []
        keeps_positions, is_chosen = _is_sequence(skeleton), False
        for key, child in zip(skeleton.keys, skeleton.children, strict=True):
            remaining = self.node(child)
            is_chosen = is_chosen or remaining is not None
            if remaining is None and keeps_positions:
                self.numbers.append(None)
                remaining = LEAF
            if remaining is not None:
                keys.append(key)
                children.append(remaining)
        if not is_chosen:
            del self.numbers[before:]
            return None
        return skeleton._replace(keys=tuple(keys), children=tuple(children))


def _is_sequence(node: Node) -> bool:
    """Return True if `ckptcore.tree.flattening.rebuild` builds a list or tuple of its children."""
    return node.kind in ("list", "tuple") or (node.kind == "object" and are_indices(node.keys))


def keeping_objects(display: str, flat: Flat, matched: Matched, registry: Plugins) -> Matched:
    """Return the match with two additions: the values that objects keep, and the objects without any selected leaf.

    Args:
        display: the location, for errors.
        flat: the target.
        matched: its match; a selection leaves out some of the leaves.
        registry: its plugins flatten the states of objects.

    Raises:
        TreeMismatchError: an object lacks a value that the selection leaves out.
    """
    paths = list(flat.paths())
    kept: dict[int, object] = {}
    untouched: list[TreePath] = []
    for live in objects_in(flat.shape):
        left_out = [
            position
            for position in live.leaves
            if matched.handlers[position] is None and flat.handlers[position] is not None
        ]
        if all(matched.numbers[position] is None for position in live.leaves):
            untouched.append(live.path)
        elif left_out:
            kept.update(_own_values(display, paths, live, left_out, registry))
    return replace(matched, kept=kept, untouched=frozenset(untouched))


def _own_values(
    display: str, paths: Sequence[TreePath], live: LiveObject, positions: Sequence[int], registry: Plugins
) -> Mapping[int, object]:
    own_value = _present_state(live.node.handler.flatten(live.node.like), registry)
    values: dict[int, object] = {}
    for position in positions:
        try:
            values[position] = own_value(plain_path(paths[position][len(live.path) :]))
        except KeyError as error:
            name = format_path(paths[position])
            whole = format_path(live.path) if live.path else "the object"
            difference = f"{name} is not selected, and {live.name}, has no value there to keep"
            raise TreeMismatchError(
                f"{display}: {difference}. Select all of {whole} or nothing of it. Nothing was changed", [difference]
            ) from error
    return values


def _present_state(state: object, registry: Plugins) -> Callable[[TreePath], object]:
    """Return a function that finds the leaf or container at a plain path of a state. It may raise KeyError."""

    @functools.cache
    def at(path: TreePath) -> object:
        return children(path[:-1])[path[-1]] if path else state

    @functools.cache
    def children(path: TreePath) -> Mapping[Key, object]:
        value = at(path)
        handlers = registry.dispatch(value)
        while handlers.checkpointable is not None:
            value = handlers.checkpointable.flatten(value)
            handlers = registry.dispatch(value)
        if handlers.container is None:
            return {}
        container = handlers.container.flatten(value)
        return dict(zip(plain_path(tuple(container.keys)), container.children, strict=True))

    return at
