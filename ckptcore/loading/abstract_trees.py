"""Abstract trees that describe stored trees, and requests that are adapted to the stored structure of plain values.

Counters, best results and histories change their form while a program runs: None becomes 12, 0 becomes 0.73, a list
grows. A load uses the requested form if no stored data is lost, and otherwise the stored form.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from ckptcore.builtin.host_leaves import PLAIN_ARRAY_KINDS, PLAIN_KINDS, VALUE_KINDS, abstract_of_stored
from ckptcore.errors import CheckpointError, UnsupportedLeafError
from ckptcore.loading.reading import default_handlers
from ckptcore.matching.forms import plain_path
from ckptcore.model.arrays import AbstractArray
from ckptcore.model.metadata import UNREADABLE, ArrayRecord, LeafRecord, TreeMetadata, unreadable_error
from ckptcore.model.tree import (
    LEAF,
    Node,
    Skeleton,
    TreePath,
    empty_nodes,
    format_path,
    is_name,
    leaf_count,
)
from ckptcore.plugins import Plugins
from ckptcore.protocols import LeafHandler
from ckptcore.tree.flattening import PLACEHOLDER, Flat, flatten, rebuild
from ckptcore.tree.shapes import Container, NewContainer, Shape

_CONTAINERS: Final = (dict, OrderedDict, list, tuple)


def abstract_tree(tree: TreeMetadata, registry: Plugins) -> Any:
    """Return a stored tree in standard Python containers, with `AbstractArray` for arrays, and small values.

    A leaf that cannot be loaded becomes `PLACEHOLDER`.
    """
    return rebuild(tree.skeleton, abstract_leaves_of(tree, registry))


def abstract_leaves_of(tree: TreeMetadata, registry: Plugins) -> list[object]:
    """Return the leaves of `abstract_tree`. Tied leaves share one abstract leaf."""
    _, value_handler = default_handlers(registry)
    arrays: dict[int, AbstractArray] = {}  # by identity of the record, which many leaves of a layout may share

    def leaf_of(record: LeafRecord) -> object:
        if (same := arrays.get(id(record))) is not None:
            return same.__copy__()
        if isinstance(record, ArrayRecord):
            leaf = abstract_of_stored(record)
            if isinstance(leaf, AbstractArray):
                arrays[id(record)] = leaf
            return leaf
        return PLACEHOLDER if record.kind == UNREADABLE else value_handler.build(None, record, ())

    leaves = list(map(leaf_of, tree.leaves))
    for number, original in tree.aliases.items():
        if tree.leaves[number] == tree.leaves[original]:
            leaves[number] = leaves[original]
    return leaves


def stored_in(tree: TreeMetadata, chosen: Collection[int] | None, registry: Plugins) -> Callable[[TreePath], object]:
    """Return a function that looks up the stored abstract tree at a path. It returns None if the path is not stored.

    It returns `PLACEHOLDER` if nothing below the path is chosen. It raises UnsupportedLeafError, or
    CorruptCheckpointError, if a chosen leaf at or below the path cannot be loaded.

    Args:
        tree: the tree.
        chosen: the numbers of the chosen leaves, as `chosen_leaves` returns them; None: all leaves.
        registry: its plugins build values.
    """
    if chosen is None:
        return stored_at(tree, registry, lambda: _unreadable_leaves(tree, range(len(tree.leaves))))
    find = stored_at(tree, registry, lambda: _unreadable_leaves(tree, chosen))
    paths = [*tree.paths, *[path for path, _ in empty_nodes(tree.skeleton)]]
    chosen_paths = [plain_path(paths[number]) for number in chosen]
    parents = {path[:length] for path in chosen_paths for length in range(len(path) + 1)}

    def find_chosen(path: TreePath) -> object:
        part = find(path)
        return PLACEHOLDER if part is not None and plain_path(path) not in parents else part

    return find_chosen


def stored_at(
    tree: TreeMetadata, registry: Plugins, unreadable: Callable[[], Mapping[TreePath, CheckpointError]] = dict
) -> Callable[[TreePath], object]:
    """Return a function that looks up the abstract tree at a path of a tree; see `stored_in`.

    Args:
        tree: the tree.
        registry: its plugins build values.
        unreadable: returns the errors of leaves that cannot be loaded, by their plain paths.
    """
    whole = functools.cache(lambda: rebuild(tree.skeleton, abstract_leaves_of(tree, registry), names_objects=True))
    errors = functools.cache(unreadable)

    def find(path: TreePath) -> object:
        part, names = whole(), plain_path(path)
        for name in names:
            if isinstance(part, list | tuple):
                part = dict(enumerate(part))
            if not isinstance(part, dict):
                return None
            part = part.get(name)
        for leaf, error in errors().items():
            if leaf[: len(names)] == names:
                raise type(error)(
                    f"{format_path(leaf)} cannot be loaded, which is a part of the stored state at "
                    f"{format_path(path)}: {error}"
                ) from error
        return part

    return find


def _unreadable_leaves(tree: TreeMetadata, numbers: Collection[int]) -> dict[TreePath, CheckpointError]:
    """Return the errors of the given leaves that cannot be loaded, by their plain paths."""
    return {
        plain_path(tree.paths[number]): error
        for number, record in enumerate(tree.leaves)
        if number in numbers and (error := unreadable_error(record))
    }


def _is_plain_value(record: LeafRecord) -> bool:
    """Return True for None, a number, text or bytes, and for an array without axes."""
    if isinstance(record, ArrayRecord):
        return record.kind in ("str", "bytes") or (record.kind in PLAIN_ARRAY_KINDS and record.spec.shape == ())
    return record.kind in PLAIN_KINDS


def with_stored_values(flat: Flat, tree: TreeMetadata, plugins: Plugins, *, by_name: bool) -> Flat:
    """Request plain values in their stored structure where the requested structure differs.

    A requested value or container of plain values takes the stored structure. A requested dict with a text key that is
    not stored stays as requested, so that the key is not lost. The state of an object also stays as requested, because
    its handler defines the structure.

    Args:
        flat: the abstract tree.
        tree: the stored tree.
        plugins: find handlers of stored values.
        by_name: True if keys are compared as text, as for checkpoints of other software, which may store None for an
            empty container.
    """
    if flat.skeleton == tree.skeleton and not any(map(_is_array_for_value, flat.leaves, tree.leaves)):
        return flat
    walk = _Walk(flat, tree, plugins, by_name)
    skeleton, shape = walk.node(flat.skeleton, flat.shape, 0, tree.skeleton, 0)
    return Flat(skeleton, walk.leaves, walk.handlers, shape) if walk.has_changed else flat


class _Walk:
    """A pass over an abstract tree and the stored tree. Collects the leaves of the result."""

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
            stored_child, first = below.get(str(key), (None, 0))
            skeleton, made = self.node(child, child_shape, position, stored_child, first)
            skeletons.append(skeleton)
            shapes.append(made)
            position += leaf_count(child)
        leaves = sum(map(leaf_count, skeletons))
        return asked._replace(children=tuple(skeletons)), shape._replace(children=tuple(shapes), leaves=leaves)

    def _is_decided(self, asked: Skeleton, shape: Shape, position: int, stored: Skeleton, number: int) -> bool:
        """Return True if the node takes the stored structure: both nodes are plain, and no requested part is lost."""
        # Cheap checks first: most nodes are alike, and the last checks visit every leaf below.
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
        if not _is_plain(stored) or not all(map(_is_plain_value, of_tree)):
            return False
        end = position + leaf_count(asked)
        leaves, handlers = self._flat.leaves[position:end], self._flat.handlers[position:end]
        if not _holds_plain(asked, shape) or not all(map(_is_plain_leaf, leaves, handlers)):
            return False
        return _keeps_keys(asked, stored)

    def _keys_of_others(self, asked: Skeleton, stored: Skeleton, number: int) -> frozenset[str]:
        """Return the keys of a stored dict that only other ranks saved and this rank does not request."""
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
        """Request a node with the stored children. A stored child that is also requested keeps its requested form."""
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
            skeleton, made = (
                self.node(*requested[str(key)], child, number)
                if str(key) in requested
                else self._as_stored(LEAF, None, 0, child, number)
            )
            skeletons.append(skeleton)
            shapes.append(made)
            number += leaf_count(child)
        node = stored._replace(keys=keys, children=tuple(skeletons))
        leaves = leaf_count(node)
        like = rebuild(node._replace(children=(LEAF,) * len(keys)), [None] * len(keys))
        handler = self._plugins.dispatch(like).container
        assert handler is not None  # the built-in plugin handles containers of Python
        content = Container(like, handler, keys, tuple(shapes), leaves, None)
        return node, NewContainer(content, own if is_same_type and isinstance(own, dict | list) else None, leaves)

    def _stored_leaf(self, number: int) -> Skeleton:
        """Request a leaf in its stored form."""
        made = flatten(abstract_tree(TreeMetadata(LEAF, (self._tree.leaves[number],)), self._plugins), self._plugins)
        self.leaves.extend(made.leaves)
        self.handlers.extend(made.handlers)
        return LEAF


def _containers(shape: Shape) -> Iterator[int]:
    """Yield the id of each list and dict, once for each path at which it occurs."""
    if isinstance(shape, Container):
        if isinstance(shape.like, list | dict):
            yield id(shape.like)
        for child in shape.children:
            yield from _containers(child)


def _children(stored: Skeleton, number: int) -> dict[str, tuple[Skeleton, int]]:
    """Return the children of a stored node by the text of their keys, each with the number of its first leaf."""
    children: dict[str, tuple[Skeleton, int]] = {}
    if isinstance(stored, Node):
        for key, child in zip(stored.keys, stored.children, strict=True):
            children[str(key)] = child, number
            number += leaf_count(child)
    return children


def _is_plain(node: Skeleton) -> bool:
    return node is LEAF or (
        isinstance(node, Node) and node.kind != "object" and node.type is None and all(map(_is_plain, node.children))
    )


def _holds_plain(node: Skeleton, shape: Shape) -> bool:
    """Return True for a leaf, and for containers of Python's own types (no subclasses) at any depth."""
    if not isinstance(node, Node):
        return True
    if not isinstance(shape, Container) or type(shape.like) not in _CONTAINERS:
        return False
    return all(map(_holds_plain, node.children, shape.children))


def _keeps_keys(asked: Skeleton, stored: Skeleton) -> bool:
    """Return True if no name in a requested dict is missing in the stored dict, at any depth."""
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
    """Return True for a requested plain value, including an array without axes."""
    if handler is None or type(leaf) in VALUE_KINDS:
        return handler is not None
    try:
        record = handler.describe(leaf)
        return isinstance(record, ArrayRecord) and _is_plain_value(record)
    except UnsupportedLeafError:
        return False  # the comparison of leaves reports it with its path


def _is_array_for_value(leaf: object, record: LeafRecord) -> bool:
    """Return True if None, text or bytes is requested, and the stored array has no axes, or is text or bytes."""
    return isinstance(leaf, str | bytes | None) and isinstance(record, ArrayRecord) and _is_plain_value(record)


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
    """Return True if two containers have the same keys, as text, and at least one key. Ignores keys of other ranks."""
    if not isinstance(asked, Node) or not isinstance(stored, Node) or not asked.keys:
        return False
    return {str(key) for key in asked.keys} == {str(key) for key in stored.keys}.difference(others)


def _is_same_kind(asked: Skeleton, stored: Skeleton) -> bool:
    """Return True for two mappings, and for two sequences. `Matching.sequences` decides if lists match tuples."""
    return isinstance(asked, Node) and isinstance(stored, Node) and _is_mapping(asked) == _is_mapping(stored)


def _is_mapping(node: Node) -> bool:
    return node.kind in ("dict", "OrderedDict")
