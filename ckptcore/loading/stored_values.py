"""Plain values whose form the checkpoint decides: numbers, text and None, and containers of nothing else.

The state of a program has counters, bests and histories that change their kind while it runs: None becomes 12, 0
becomes 0.73, a list grows. The caller decides the form where nothing is lost by it, otherwise the checkpoint does.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

from ckptcore.builtin.host_leaves import PLAIN_ARRAY_KINDS, PLAIN_KINDS, VALUE_KINDS
from ckptcore.errors import UnsupportedLeafError
from ckptcore.loading.stored_trees import abstract_tree
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.tree import LEAF, Node, Skeleton, is_name, leaf_count
from ckptcore.plugins import Plugins
from ckptcore.protocols import LeafHandler
from ckptcore.tree.flattening import Flat, flatten, rebuild
from ckptcore.tree.shapes import Container, NewContainer, Shape

_CONTAINERS: Final = (dict, OrderedDict, list, tuple)


def is_plain_value(record: LeafRecord) -> bool:
    """Return True for None, a number, text or bytes, and for an array without axes."""
    if isinstance(record, ArrayRecord):
        return record.kind in ("str", "bytes") or (record.kind in PLAIN_ARRAY_KINDS and record.spec.shape == ())
    return record.kind in PLAIN_KINDS


def with_stored_values(flat: Flat, tree: TreeMetadata, plugins: Plugins, *, by_name: bool) -> Flat:
    """Request plain values in their stored structure where the requested structure differs.

    A requested value or container of plain values takes the stored structure. A dict keeps its keys: one with a text
    key that is not stored is left as it is, and so are the states of objects, whose handlers decide.

    Args:
        flat: the abstract tree.
        tree: the stored tree.
        plugins: find handlers of stored values.
        by_name: True if other software wrote the checkpoint, which may store None for an empty container.
    """
    if flat.skeleton == tree.skeleton and not any(map(_is_array_for_value, flat.leaves, tree.leaves)):
        return flat
    walk = _Walk(flat, tree, plugins, by_name)
    skeleton, shape = walk.node(flat.skeleton, flat.shape, 0, tree.skeleton, 0)
    return Flat(skeleton, walk.leaves, walk.handlers, shape) if walk.has_changed else flat


class _Walk:
    """A pass over an abstract tree and the stored one. Collects the leaves of the result."""

    def __init__(self, flat: Flat, tree: TreeMetadata, plugins: Plugins, by_name: bool) -> None:
        self._by_name = by_name
        self._flat = flat
        self._tree = tree
        self._plugins = plugins
        self.leaves: list[object] = []
        self.handlers: list[LeafHandler | None] = []
        self.has_changed = False
        self._times = Counter(_containers(flat.shape))

    def node(
        self, asked: Skeleton, shape: Shape, position: int, stored: Skeleton | None, number: int
    ) -> tuple[Skeleton, Shape]:
        """Return the node of the result for a requested node.

        Args:
            asked, shape, position: the requested node, and the position of its first leaf.
            stored, number: the stored node, if any, and the number of its first leaf.
        """
        count = leaf_count(asked)
        if stored is not None and self._is_decided(asked, shape, position, stored, number):
            return self._as_stored(asked, shape, position, stored, number)
        if stored is None or not isinstance(asked, Node) or not isinstance(shape, Container):
            self.leaves.extend(self._flat.leaves[position : position + count])
            self.handlers.extend(self._flat.handlers[position : position + count])
            return asked, shape
        below = _children(stored, number)
        skeletons: list[Skeleton] = []
        shapes: list[Shape] = []
        for key, child, child_shape in zip(asked.keys, asked.children, shape.children, strict=True):
            found, first = below.get(str(key), (None, 0))
            skeleton, made = self.node(child, child_shape, position, found, first)
            skeletons.append(skeleton)
            shapes.append(made)
            position += leaf_count(child)
        leaves = sum(map(leaf_count, skeletons))
        return asked._replace(children=tuple(skeletons)), shape._replace(children=tuple(shapes), leaves=leaves)

    def _is_decided(self, asked: Skeleton, shape: Shape, position: int, stored: Skeleton, number: int) -> bool:
        """Return True if the checkpoint decides the structure: both are plain, and nothing of the caller is lost."""
        if asked is LEAF and stored is LEAF:
            return _is_array_for_value(self._flat.leaves[position], self._tree.leaves[number])
        if _are_alike(asked, stored) and (self._by_name or leaf_count(stored) or _is_same_kind(asked, stored)):
            return False
        if self._by_name and not leaf_count(stored):
            return False
        if isinstance(shape, Container) and self._times[id(shape.like)] > 1:
            return False  # one object at two paths cannot get two contents
        if _has_same_keys(asked, stored, self._keys_of_others(asked, stored, number)):
            return False
        of_tree = self._tree.leaves[number : number + leaf_count(stored)]
        if not _is_plain(stored) or not all(map(is_plain_value, of_tree)):
            return False
        end = position + leaf_count(asked)
        leaves, handlers = self._flat.leaves[position:end], self._flat.handlers[position:end]
        if not _holds_plain(asked, shape) or not all(map(_is_plain_leaf, leaves, handlers)):
            return False
        return _keeps_keys(asked, stored)

    def _keys_of_others(self, asked: Skeleton, stored: Skeleton, number: int) -> frozenset[str]:
        """Return the keys of a stored dict that only other ranks saved, and this one does not request."""
        if not self._tree.held_by or not isinstance(asked, Node) or not isinstance(stored, Node):
            return frozenset()
        requested = {str(key) for key in asked.keys}
        return frozenset(
            [
                key
                for key, (child, first) in _children(stored, number).items()
                if key not in requested
                and all(leaf in self._tree.held_by for leaf in range(first, first + leaf_count(child)))
            ]
        )

    def _as_stored(
        self, asked: Skeleton, shape: Shape, position: int, stored: Skeleton, number: int
    ) -> tuple[Skeleton, Shape]:
        """Request a node with the children that are stored: a requested one in its own form, if it is there."""
        self.has_changed = True
        if not isinstance(stored, Node):
            return self._stored_leaf(number), None
        own = shape.like if isinstance(asked, Node) and isinstance(shape, Container) else None
        is_same_type = isinstance(asked, Node) and asked.kind == stored.kind
        requested: dict[str, tuple[Skeleton, Shape, int]] = {}
        if is_same_type and isinstance(asked, Node) and isinstance(shape, Container):
            for key, child, child_shape in zip(asked.keys, asked.children, shape.children, strict=True):
                requested[str(key)] = child, child_shape, position
                position += leaf_count(child)
        others = self._keys_of_others(asked, stored, number)
        keys = tuple([key for key in stored.keys if str(key) not in others])
        skeletons: list[Skeleton] = []
        shapes: list[Shape] = []
        for key, child in zip(stored.keys, stored.children, strict=True):
            if str(key) in others:
                number += leaf_count(child)
                continue
            one, one_shape, first = requested.get(str(key), (LEAF, None, None))
            skeleton, made = (
                self._as_stored(LEAF, None, 0, child, number)
                if first is None
                else self.node(one, one_shape, first, child, number)
            )
            skeletons.append(skeleton)
            shapes.append(made)
            number += leaf_count(child)
        node = stored._replace(keys=keys, children=tuple(skeletons))
        leaves = leaf_count(node)
        like = rebuild(node._replace(children=(LEAF,) * len(keys)), [None] * len(keys))
        handler = self._plugins.dispatch(like).container
        assert handler is not None  # a container of Python
        content = Container(like, handler, keys, tuple(shapes), leaves, None)
        return node, NewContainer(content, own if is_same_type and isinstance(own, dict | list) else None, leaves)

    def _stored_leaf(self, number: int) -> Skeleton:
        """Request a leaf in its stored form."""
        made = flatten(abstract_tree(TreeMetadata(LEAF, (self._tree.leaves[number],)), self._plugins), self._plugins)
        self.leaves.extend(made.leaves)
        self.handlers.extend(made.handlers)
        return LEAF


def _containers(shape: Shape) -> Iterator[int]:
    """Yield the identity of each list and dict, once for each path that it has."""
    if isinstance(shape, Container):
        if isinstance(shape.like, list | dict):
            yield id(shape.like)
        for child in shape.children:
            yield from _containers(child)


def _children(stored: Skeleton, number: int) -> dict[str, tuple[Skeleton, int]]:
    """Return the children of a stored node by the text of their keys, each with the number of its first leaf."""
    found: dict[str, tuple[Skeleton, int]] = {}
    if isinstance(stored, Node):
        for key, child in zip(stored.keys, stored.children, strict=True):
            found[str(key)] = child, number
            number += leaf_count(child)
    return found


def _is_plain(node: Skeleton) -> bool:
    return node is LEAF or (
        isinstance(node, Node) and node.kind != "object" and node.type is None and all(map(_is_plain, node.children))
    )


def _holds_plain(node: Skeleton, shape: Shape) -> bool:
    """Return True for a leaf, and for containers of exactly the types of Python."""
    if not isinstance(node, Node):
        return True
    if not isinstance(shape, Container) or type(shape.like) not in _CONTAINERS:
        return False
    return all(map(_holds_plain, node.children, shape.children))


def _keeps_keys(asked: Skeleton, stored: Skeleton) -> bool:
    """Return True if no name in a requested dict is missing in the stored one, at any depth."""
    if not isinstance(asked, Node) or not isinstance(stored, Node):
        return True
    if _is_mapping(asked) and _is_mapping(stored):
        kept = {str(key) for key in stored.keys}
        if any(is_name(key) and str(key) not in kept for key in asked.keys):
            return False
    below = _children(stored, 0)
    return all(
        str(key) not in below or _keeps_keys(child, below[str(key)][0])
        for key, child in zip(asked.keys, asked.children, strict=True)
    )


def _is_plain_leaf(leaf: object, handler: LeafHandler | None) -> bool:
    """Return True for a requested plain value, also an array without axes."""
    if handler is None or type(leaf) in VALUE_KINDS:
        return handler is not None
    try:
        record = handler.describe(leaf)
        return isinstance(record, ArrayRecord) and is_plain_value(record)
    except UnsupportedLeafError:
        return False  # the comparison of leaves reports it with its path


def _is_array_for_value(leaf: object, record: LeafRecord) -> bool:
    """Return True if an array is stored for None, text or bytes: a requested number decides the form of an array."""
    return isinstance(leaf, str | bytes | None) and isinstance(record, ArrayRecord) and is_plain_value(record)


def _are_alike(asked: Skeleton, stored: Skeleton) -> bool:
    """Return True if two trees have the same keys, as text, so that each leaf has a counterpart."""
    if not isinstance(asked, Node) or not isinstance(stored, Node):
        return asked is stored
    below = {str(key): child for key, child in zip(stored.keys, stored.children, strict=True)}
    return len(below) == len(asked.keys) and all(
        str(key) in below and _are_alike(child, below[str(key)])
        for key, child in zip(asked.keys, asked.children, strict=True)
    )


def _has_same_keys(asked: Skeleton, stored: Skeleton, others: Collection[str]) -> bool:
    """Return True if two containers differ only below their children, apart from keys of other ranks."""
    if not isinstance(asked, Node) or not isinstance(stored, Node) or not asked.keys:
        return False
    return {str(key) for key in asked.keys} == {str(key) for key in stored.keys}.difference(others)


def _is_same_kind(asked: Skeleton, stored: Skeleton) -> bool:
    """Return True for two mappings, and for two sequences: an option of the caller exchanges lists and tuples."""
    return isinstance(asked, Node) and isinstance(stored, Node) and _is_mapping(asked) == _is_mapping(stored)


def _is_mapping(node: Node) -> bool:
    return node.kind in ("dict", "OrderedDict")
