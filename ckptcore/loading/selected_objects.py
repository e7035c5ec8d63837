"""Objects of a target of which a selection leaves out a part: they keep that part of their own state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ckptcore.errors import TreeMismatchError
from ckptcore.matching.leaf_matching import Matched
from ckptcore.model.tree import Attribute, Key, TreePath, format_path
from ckptcore.plugins import Plugins
from ckptcore.tree.flattening import Flat
from ckptcore.tree.shapes import LiveObject, objects_in


def keeping_objects(display: str, flat: Flat, matched: Matched, registry: Plugins) -> Matched:
    """Add to a match the own values that objects keep, and the objects of which nothing is loaded.

    Args:
        display: the location, for errors.
        flat: the target.
        matched: its match, of which a selection leaves out some leaves.
        registry: takes the states of objects apart.

    Raises:
        TreeMismatchError: an object lacks a value that the selection leaves out.
    """
    paths = list(flat.paths())
    kept: dict[int, object] = {}
    untouched: list[TreePath] = []
    for found in objects_in(flat.shape):
        left_out = [
            position
            for position in found.leaves
            if matched.handlers[position] is None and flat.handlers[position] is not None
        ]
        if all(matched.numbers[position] is None for position in found.leaves):
            untouched.append(found.path)
        elif left_out:
            kept.update(_own_values(display, paths, found, left_out, registry))
    return replace(matched, kept=kept, untouched=frozenset(untouched))


def _own_values(
    display: str, paths: Sequence[TreePath], found: LiveObject, positions: Sequence[int], registry: Plugins
) -> Mapping[int, object]:
    state = _OwnState(found.node.handler.flatten(found.node.like), registry)
    values: dict[int, object] = {}
    for position in positions:
        try:
            values[position] = state.at(paths[position][len(found.path) :])
        except KeyError as error:
            name = format_path(paths[position])
            whole = format_path(found.path) if found.path else "the object"
            difference = f"{name} is not selected, and {found.name}, has no value there to keep"
            raise TreeMismatchError(
                f"{display}: {difference}. Select all of {whole} or nothing of it. Nothing was changed", [difference]
            ) from error
    return values


class _OwnState:
    """The present state of an object, by path."""

    def __init__(self, state: object, registry: Plugins) -> None:
        self._values: dict[TreePath, object] = {(): state}
        self._children: dict[TreePath, Mapping[Hashable, object]] = {}
        self._registry = registry

    def at(self, path: TreePath) -> object:
        """Return the leaf or container at a path.

        Raises:
            KeyError: there is none.
        """
        if path not in self._values:
            above = path[:-1]
            if above not in self._children:
                self._children[above] = self._children_of(self.at(above))
            self._values[path] = self._children[above][_plain(path[-1])]
        return self._values[path]

    def _children_of(self, value: object) -> Mapping[Hashable, object]:
        found = self._registry.dispatch(value)
        if found.checkpointable is not None:
            return self._children_of(found.checkpointable.flatten(value))
        if found.container is None:
            return {}
        flattened = found.container.flatten(value)
        return {_plain(key): child for key, child in zip(flattened.keys, flattened.children, strict=True)}


def _plain(key: Key) -> Hashable:
    return key.name if isinstance(key, Attribute) else key
