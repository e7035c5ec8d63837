"""Take values apart into a skeleton and leaves, and rebuild them.

A long container of plain values is stored as one leaf, called a column: see `ckptcore.model.columns`. `SavedColumns`
and `RequestedColumns` decide which containers are columns in a save and in a load.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from ckptcore.builtin.containers import BUILTIN_CONTAINERS
from ckptcore.builtin.host_leaves import HostValueHandler
from ckptcore.errors import CheckpointError, TreeMismatchError, UnsupportedKeyError, UnsupportedLeafError
from ckptcore.model.arrays import AbstractArray, Box, HostArray
from ckptcore.model.columns import COLUMN_KINDS, is_column, is_plain
from ckptcore.model.metadata import LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import (
    LEAF,
    MAX_DEPTH,
    MAX_KEY_DEPTH,
    MAX_KEY_PARTS,
    Attribute,
    Key,
    Node,
    PlainKey,
    Skeleton,
    StoredObject,
    TreePath,
    are_indices,
    format_path,
    leaf_count,
    leaf_paths,
)
from ckptcore.plugins import Plugins
from ckptcore.protocols import (
    CheckpointableHandler,
    ContainerHandler,
    Flattened,
    LeafHandler,
    Priority,
)
from ckptcore.tree.shapes import Container, ObjectNode, Shape, holds_refusing, rank_of_key


class _RequestedColumn(HostValueHandler):
    """Handler of a container that requests a stored column.

    The values of the container are not encoded, because the stored values replace all of them.
    """

    def describe(self, leaf: Any) -> LeafRecord:
        """Return a record with the kind, without values."""
        return ValueRecord(next(kind for of, kind in COLUMN_KINDS.items() if isinstance(leaf, of)), None)

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Return the stored values in a container of the requested type."""
        values: Any = super().build(None, stored, boxes)
        if type(abstract) is type(values):
            return values
        if isinstance(abstract, tuple):
            return tuple(values)
        if type(abstract) is list:
            return list(values)
        result = copy.copy(abstract)  # keeps the attributes of the instance
        _replace_values(result, values)
        return result


class _ColumnContainer(ContainerHandler):
    """Handler of a container that is a column. The whole column is its only child."""

    priority = Priority.EXACT

    def flatten(self, value: Any) -> Flattened:
        """Return the whole container as its only child."""
        return Flattened("object", (0,), (value,))

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        """Return the column itself."""
        return children[0]

    def replaceable(self, target: Any) -> Collection[int]:
        """Return the position of the column, if the container is mutable."""
        return () if isinstance(target, tuple) else (0,)

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        """Replace all values in place, because other objects may refer to the container."""
        _replace_values(target, children[0])


def _replace_values(target: Any, values: Any) -> None:
    if isinstance(target, dict):
        target.clear()
        target.update(values)
    else:
        target[:] = values


COLUMN_CONTAINER: Final = _ColumnContainer()
_REQUESTED_COLUMN: Final = _RequestedColumn()


class ColumnRule(Protocol):
    """A rule that decides which containers are one leaf."""

    def handler(self, value: object, path: Sequence[Key]) -> LeafHandler | None:
        """Return the leaf handler of a container that is one leaf; None for a container with children."""
        ...


class SavedColumns(NamedTuple):
    """The rule for a save: long lists, tuples and dicts of plain values are columns.

    Attributes:
        leaf: the handler of plain values. None if there are no columns, because a column would bypass another handler.
        mappings: True if dicts may be columns. False if several savers merge their dicts by key.
    """

    leaf: LeafHandler | None
    mappings: bool

    def handler(self, value: object, path: Sequence[Key]) -> LeafHandler | None:
        """See `ColumnRule.handler`."""
        return self.leaf if (self.mappings or type(value) is not dict) and is_column(value) else None


class RequestedColumns(NamedTuple):
    """The rule for a load: a container of a target or an abstract tree is a column if a column is stored at its path.

    The container has only plain values. Their number does not matter, because the load replaces all of them.

    Attributes:
        kinds: the kind of each stored column, by its path. Each key of the path is given as text.
    """

    kinds: Mapping[tuple[str, ...], str]

    def handler(self, value: object, path: Sequence[Key]) -> LeafHandler | None:
        """See `ColumnRule.handler`."""
        kind = self.kinds.get(tuple(map(str, path)))
        if kind is None or not isinstance(value, dict if kind == "dict" else list | tuple) or not is_plain(value):
            return None
        return _REQUESTED_COLUMN


_EXAMPLES: Final = (None, False, 0, 0.0, "")


def saved_columns(plugins: Plugins, *, mappings: bool) -> SavedColumns:
    """Return the rule for a save, without columns if the Context has handlers of plain values or their containers."""
    first, *others = [plugins.dispatch(example).leaf for example in _EXAMPLES]
    containers = [plugins.dispatch(kind()).container for kind in COLUMN_KINDS]
    is_builtin = all(isinstance(container, BUILTIN_CONTAINERS) for container in containers)
    return SavedColumns(first if is_builtin and others.count(first) == len(others) else None, mappings)


def requested_columns(tree: TreeMetadata) -> RequestedColumns | None:
    """Return the rule for a load of a stored tree; None if it has no column."""
    kinds = {*COLUMN_KINDS.values()}
    columns = {
        leaf: record.kind
        for leaf, record in enumerate(tree.leaves)
        if isinstance(record, ValueRecord) and record.kind in kinds
    }
    if not columns:
        return None
    paths = tree.paths  # slow: builds the paths of all leaves
    return RequestedColumns({tuple(map(str, paths[leaf])): kind for leaf, kind in columns.items()})


PLACEHOLDER: Final = ...
"""Placeholder in an abstract tree for a leaf or a subtree that is not to be loaded."""

PER_PROCESS: Final = "ckptcore.PerProcess"
"""The type name of a stored dict that has the value of every process by rank."""

STATE_OF: Final = "state of "
"""Prefix of the type name of a stored object state that is inside the state of another object. The type of the inner
object follows."""

T = TypeVar("T")

_KEY_TYPES: Final = frozenset({str, int, bool, Attribute})


@dataclass(frozen=True, slots=True)
class PerProcess(Generic[T]):
    """A value that differs between the processes of a job. A checkpoint stores the value of every process.

    The wrapper may be one of several checkpointables, or anywhere in a tree, which stores a dict of the values by rank.
    A load by the same number of processes gives each process its own value. Other loads can request the dict.
    Iterators, random generators and other known per-process objects need no wrapper if they are checkpointables.

    Attributes:
        value: the value of this process; in a load, its abstract value.
    """

    value: T


class Flat(NamedTuple):
    """A flattened value.

    Attributes:
        skeleton: its containers.
        leaves: its leaves, in the order of the skeleton.
        handlers: the handler of each leaf; None for `PLACEHOLDER`.
        shape: the containers and objects, for `unflatten` and `restore`.
    """

    skeleton: Skeleton
    leaves: Sequence[object]
    handlers: Sequence[LeafHandler | None]
    shape: Shape

    def paths(self) -> Iterator[TreePath]:
        """Return the path of each leaf."""
        return leaf_paths(self.skeleton)


def flatten(
    value: object,
    plugins: Plugins,
    *,
    rank: int = 0,
    placeholders: bool = False,
    stored_at: Callable[[TreePath], object] | None = None,
    refusals: list[CheckpointError] | None = None,
    columns: ColumnRule | None = None,
) -> Flat:
    """Take a value apart into a skeleton and leaves.

    Args:
        value: a tree of containers and leaves.
        plugins: the plugins with the handler of each type.
        rank: the rank of this process, which is the key of values in `PerProcess`.
        placeholders: True if `PLACEHOLDER` may replace a leaf or a subtree.
        stored_at: for a load, returns the stored abstract tree at a path; None if nothing is stored there; PLACEHOLDER
            if that path is not to be loaded.
        refusals: receives an error for each value that cannot be saved. The result has a placeholder for such a value.
            None: raise the error.
        columns: finds the containers that are one leaf; None: there are none.

    Raises:
        UnsupportedLeafError: no plugin handles some leaves (the error names at most 20), or the tree is too deep.
        UnsupportedKeyError: a key has another type than int, bool, str, a tuple of such keys, or `Attribute`. Members
            of int and str enums, scalars of NumPy and named tuples are accepted too. Other subclasses of int and str
            are not.
    """
    walk = _Flattening(plugins, rank, placeholders, stored_at, refusals, columns)
    skeleton, shape = walk.node(value)
    if walk.unsupported and refusals is not None:
        refusals.extend(map(UnsupportedLeafError, walk.unsupported))
    elif walk.unsupported:
        more = f"; and {len(walk.unsupported) - 20} more" if len(walk.unsupported) > 20 else ""
        raise UnsupportedLeafError("; ".join(walk.unsupported[:20]) + more)
    return Flat(skeleton, walk.leaves, walk.handlers, shape)


class _Flattening:
    def __init__(
        self,
        plugins: Plugins,
        rank: int,
        placeholders: bool,
        stored_at: Callable[[TreePath], object] | None,
        refusals: list[CheckpointError] | None,
        columns: ColumnRule | None,
    ) -> None:
        self.columns = columns
        self.rank = rank
        self.plugins = plugins
        self.dispatch = plugins.dispatch
        self.placeholders = placeholders
        self.stored_at = stored_at
        self.refusals = refusals
        self.leaves: list[object] = []
        self.handlers: list[LeafHandler | None] = []
        self.unsupported: list[str] = []
        self.path: list[Key] = []
        self.containers: list[ContainerHandler] = []  # handlers of the containers around the current value
        self.depth = self.objects = 0

    def node(self, value: object) -> tuple[Skeleton, Shape]:
        dispatched = self.dispatch(value)
        container = dispatched.container
        if dispatched.leaf is not None or (value is PLACEHOLDER and self.placeholders):
            return self._leaf(value, dispatched.leaf)
        if container is None and dispatched.checkpointable is None:
            reason = self.plugins.unsupported_reason(value)
            if remedy := next((outer.remedy for outer in reversed(self.containers) if outer.remedy), None):
                reason = f"{reason}, or {remedy}"
            self.unsupported.append(
                f"{format_path(tuple(self.path))} is a {type(value).__module__}.{type(value).__qualname__}, {reason}"
            )
            return self._leaf(PLACEHOLDER, None)
        column = None if self.columns is None or container is None else self.columns.handler(value, self.path)
        if column is not None:
            self._leaf(value, column)
            return LEAF, Container(value, COLUMN_CONTAINER, (0,), (None,), 1, None)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnsupportedLeafError(
                f"the tree is deeper than {MAX_DEPTH} containers at {format_path(tuple(self.path[:6]))}...; "
                "a container may contain itself. Nothing was written"
            )
        leaves, handlers, columns, containers = self.leaves, self.handlers, self.columns, len(self.containers)
        count, length, depth = len(leaves), len(self.path), self.depth
        try:
            result = (
                self._checkpointable(value, dispatched.checkpointable)
                if container is None
                else self._container(value, container)
            )
        except Exception as error:
            if self.refusals is None:
                raise
            name = format_path(tuple(self.path[:length]))
            if isinstance(error, UnsupportedKeyError):  # its message already begins with the path
                self.refusals.append(error)
            elif isinstance(error, CheckpointError):
                self.refusals.append(type(error)(f"{name}: {error}"))
            else:  # the methods of an object can raise any error
                kind = type(value).__qualname__
                self.refusals.append(UnsupportedLeafError(f"{name}: a {kind} raised {type(error).__name__}: {error}"))
            # Undo what the value added before it failed.
            self.leaves, self.handlers, self.columns = leaves, handlers, columns
            del leaves[count:], handlers[count:], self.path[length:]
            self.depth = depth
            result = self._leaf(PLACEHOLDER, None)
        del self.containers[containers:]
        self.depth -= 1
        return result

    def _leaf(self, value: object, handler: LeafHandler | None) -> tuple[Skeleton, Shape]:
        """Add a leaf and return its node. `PLACEHOLDER` also replaces a value that cannot be saved."""
        self.leaves.append(value)
        self.handlers.append(handler)
        return LEAF, None

    def _checkpointable(self, value: object, handler: CheckpointableHandler | None) -> tuple[Skeleton, Shape]:
        assert handler is not None  # `node` found a handler
        stored = None
        # Build the stored tree only for handlers that use it.
        if self.stored_at is not None and type(handler).flatten_to_load is not CheckpointableHandler.flatten_to_load:
            stored = self.stored_at(tuple(self.path))
            if stored is PLACEHOLDER and self.placeholders:
                return self._leaf(PLACEHOLDER, None)
        try:
            state = handler.flatten(value) if stored is None else handler.flatten_to_load(value, stored)
        except UnsupportedLeafError as error:
            if handler.is_object:
                raise
            self.unsupported.append(f"{format_path(tuple(self.path))}: {error}")
            return self._leaf(PLACEHOLDER, None)
        except TreeMismatchError as error:
            if handler.is_object:
                raise
            path = format_path(tuple(self.path))
            raise TreeMismatchError(f"{path}: {error}", [f"{path}: {line}" for line in error.differences]) from error
        before = len(self.leaves)
        self.objects += 1
        skeleton, shape = self.node(state)
        self.objects -= 1
        if self.objects and handler.is_object and isinstance(skeleton, Node) and skeleton.type is None:
            skeleton = skeleton._replace(type=f"{STATE_OF}{type(value).__module__}.{type(value).__qualname__}")
        if stored is not None:
            self._choose_frameworks(before)
        may_refuse = self.stored_at is not None and handler.is_object
        may_refuse = may_refuse and (holds_refusing(shape) or handler.may_refuse(value, state))
        return skeleton, ObjectNode(value, handler, shape, len(self.leaves) - before, may_refuse)

    def _choose_frameworks(self, start: int) -> None:
        """Request an array in the framework that saved it, if the object does not have this array yet.

        Args:
            start: the position of the first leaf of the object.
        """
        for position in range(start, len(self.leaves)):
            leaf = self.leaves[position]
            if type(leaf) is AbstractArray and leaf.framework is not None:
                abstract = self.plugins.abstract_of(leaf)
                if abstract is not None:
                    self.leaves[position], self.handlers[position] = abstract, self.dispatch(abstract).leaf

    def _container(self, value: object, handler: ContainerHandler) -> tuple[Skeleton, Shape]:
        flattened = handler.flatten(value)
        self.containers.append(handler)
        columns = self.columns
        if isinstance(value, PerProcess):
            flattened = Flattened("dict", (self.rank,), flattened.children, PER_PROCESS)
            if isinstance(columns, SavedColumns):
                self.columns = columns._replace(mappings=True)  # a dict below belongs to one rank and is not merged
        keys, children = tuple(flattened.keys), flattened.children
        if not _KEY_TYPES.issuperset(map(type, keys)):
            keys = tuple([self._key(key) for key in keys])
        dispatch = self.dispatch
        leaf_handlers = [dispatch(child).leaf for child in children]
        inner = [position for position, leaf in enumerate(leaf_handlers) if leaf is None]
        order = _visiting_order(keys, inner)
        before = len(self.leaves)
        skeletons: list[Skeleton] = [LEAF] * len(leaf_handlers)
        shapes: list[Shape] = [None] * len(leaf_handlers)
        if order is None:
            # Fast path: add adjacent leaves together, without a call for each of them.
            start = 0
            for position in inner:
                self.leaves.extend(children[start:position])
                self.handlers.extend(leaf_handlers[start:position])
                skeletons[position], shapes[position] = self._child(keys[position], children[position])
                start = position + 1
            self.leaves.extend(children[start:])
            self.handlers.extend(leaf_handlers[start:])
        else:
            # Visit the children in sorted order, but keep the leaves in the order of the keys.
            leaves, handlers = self.leaves, self.handlers
            parts: dict[int, tuple[list[object], list[LeafHandler | None]]] = {}
            for position in order:
                parts[position] = self.leaves, self.handlers = [], []
                skeletons[position], shapes[position] = self._child(keys[position], children[position])
            self.leaves, self.handlers = leaves, handlers
            for position, (child, leaf) in enumerate(zip(children, leaf_handlers, strict=True)):
                below, of_them = parts.get(position, ([child], [leaf]))
                leaves.extend(below)
                handlers.extend(of_them)
            order = tuple([position for position in order if shapes[position] is not None])
        self.columns = columns
        node = Node(flattened.kind, keys, tuple(skeletons), flattened.type, flattened.attributes)
        return node, Container(value, handler, keys, tuple(shapes), len(self.leaves) - before, order)

    def _key(self, key: Any) -> Key:
        """Return a key as a type that can be stored. See `_plain_key`."""
        made: Key | None = key if type(key) is Attribute else _plain_key(key, 0)
        if made is not None:
            return made
        raise UnsupportedKeyError(
            f"{format_path(tuple(self.path))} has the key {key!r} of type {type(key).__qualname__}; keys are int, "
            "bool, str or tuples of them: convert it, or save list(value.items()). Nothing was written"
        )

    def _child(self, key: Key, child: object) -> tuple[Skeleton, Shape]:
        self.path.append(key)
        result = self.node(child)
        self.path.pop()
        return result


def _plain_key(key: Any, depth: int) -> PlainKey | None:
    """Convert a NumPy scalar, an enum member or a named tuple to an equal built-in key; None for other types."""
    if type(key) in (int, str, bool):
        return cast(PlainKey, key)
    if isinstance(key, np.bool_):
        return bool(key)
    if isinstance(key, np.integer) or (isinstance(key, int) and isinstance(key, enum.Enum)):
        return int(key)
    if isinstance(key, np.str_) or (isinstance(key, str) and isinstance(key, enum.Enum)):
        return str.__str__(key)
    if not isinstance(key, tuple) or depth == MAX_KEY_DEPTH or len(key) > MAX_KEY_PARTS:
        return None
    parts = [_plain_key(part, depth + 1) for part in key]
    return None if None in parts else cast(PlainKey, tuple(parts))


def _visiting_order(keys: Sequence[Key], inner: Sequence[int]) -> tuple[int, ...] | None:
    """Return the order in which to visit the children that are not leaves; None if it is the order of the keys.

    Every process of a job must use the same order, because methods of objects may be collective: `state_dict` of a
    module under FSDP gathers its shards. The dicts of the processes may be ordered differently, so the keys are sorted:
    ints first, then names, then tuples.
    """
    if len(inner) < 2:
        return None
    order = tuple(sorted(inner, key=lambda position: rank_of_key(keys[position])))
    return None if order == tuple(inner) else order


def per_process_objects(shape: Shape, path: TreePath = ()) -> Iterator[tuple[TreePath, object]]:
    """Yield the per-process objects in a value at a path, with their paths."""
    if isinstance(shape, ObjectNode):
        # If the state has `PerProcess` wrappers, only the wrapped values differ. The rest is shared.
        if shape.handler.per_process and next(per_process_values(shape.state, path), None) is None:
            yield path, shape.like
        else:
            yield from per_process_objects(shape.state, path)
    elif isinstance(shape, Container) and not isinstance(shape.like, PerProcess):
        for key, child in zip(shape.keys, shape.children, strict=True):
            if child is not None:
                yield from per_process_objects(child, (*path, key))


def per_process_values(shape: Shape, path: TreePath = ()) -> Iterator[TreePath]:
    """Yield the paths of the outermost `PerProcess` wrappers in a value at a path."""
    if isinstance(shape, ObjectNode):
        yield from per_process_values(shape.state, path)
    elif isinstance(shape, Container) and isinstance(shape.like, PerProcess):
        yield path
    elif isinstance(shape, Container):
        for key, child in zip(shape.keys, shape.children, strict=True):
            if child is not None:
                yield from per_process_values(child, (*path, key))


def per_process_leaves(flat: Flat) -> frozenset[int]:
    """Return the numbers of all leaves below per-process objects and `PerProcess` wrappers."""
    objects = [path for path, _ in per_process_objects(flat.shape)]
    return _leaves_below(flat, [*objects, *per_process_values(flat.shape)])


def leaves_of_values(flat: Flat) -> frozenset[int]:
    """Return the numbers of all leaves below `PerProcess` wrappers."""
    return _leaves_below(flat, list(per_process_values(flat.shape)))


def _leaves_below(flat: Flat, above: Collection[TreePath]) -> frozenset[int]:
    if not above:
        return frozenset()
    tops, lengths = set(above), sorted(set(map(len, above)))
    return frozenset(
        [number for number, path in enumerate(flat.paths()) if any(path[:length] in tops for length in lengths)]
    )


def own_values(
    skeleton: Skeleton, numbers: Sequence[int | None], rank: int, size: int
) -> tuple[Skeleton, Sequence[int | None]]:
    """Replace each stored dict of per-process values with the value of this process.

    For loads without an abstract tree. A dict that was saved by another number of processes stays a dict by rank.

    Args:
        skeleton: the stored structure.
        numbers: the number of the stored leaf, for each leaf of the structure.
        rank, size: the rank of this process, and the number of processes of the job.
    """
    if not _has_own_values(skeleton):
        return skeleton, numbers
    kept: list[int | None] = []
    return _own_values(skeleton, iter(numbers), rank, tuple(range(size)), kept), kept


def _has_own_values(skeleton: Skeleton) -> bool:
    if not isinstance(skeleton, Node):
        return False
    return skeleton.type == PER_PROCESS or any(
        _has_own_values(child) for child in skeleton.children if isinstance(child, Node)
    )


def _own_values(
    skeleton: Skeleton, numbers: Iterator[int | None], rank: int, ranks: tuple[int, ...], kept: list[int | None]
) -> Skeleton:
    if not isinstance(skeleton, Node):
        kept.append(next(numbers))
        return skeleton
    if skeleton.type == PER_PROCESS and skeleton.keys == ranks:
        place = ranks.index(rank)
        first = sum([leaf_count(child) for child in skeleton.children[:place]])
        below, own = list(itertools.islice(numbers, leaf_count(skeleton))), skeleton.children[place]
        return _own_values(own, iter(below[first:]), rank, (rank,), kept)  # a nested wrapper has only this rank
    children = tuple([_own_values(child, numbers, rank, ranks, kept) for child in skeleton.children])
    return skeleton._replace(children=children)


def rebuild(skeleton: Skeleton, leaves: Sequence[object], *, names_objects: bool = False) -> object:
    """Build a value with the saved structure from built-in containers, for loads without an abstract tree.

    An object of any other type becomes a dict of its attributes and keys, or a list if all its keys are indices or if
    it is empty.

    Args:
        skeleton, leaves: the saved structure, and its leaves.
        names_objects: True to build a `StoredObject`, with the name of its type, instead of a dict of attributes.
    """
    return _rebuild(skeleton, iter(leaves), names_objects, {})


def _rebuild(
    skeleton: Skeleton, leaves: Iterator[object], names_objects: bool, dicts: dict[int, Sequence[Key]]
) -> object:
    """Build a value. `dicts` has the keys of dicts of leaves, by identity: a skeleton may have one object for many."""
    if (names := dicts.get(id(skeleton))) is not None:
        return dict(zip(names, leaves, strict=False))
    if not isinstance(skeleton, Node):
        return next(leaves)
    if skeleton.children.count(LEAF) == len(skeleton.children):
        children = list(itertools.islice(leaves, len(skeleton.children)))
    else:
        children = [
            _rebuild(child, leaves, names_objects, dicts) if isinstance(child, Node) else next(leaves)
            for child in skeleton.children
        ]
    if skeleton.kind == "list":
        return children
    if skeleton.kind == "tuple":
        return tuple(children)
    if skeleton.kind == "object" and are_indices(skeleton.keys):
        return children
    keys: Sequence[Any] = skeleton.keys
    if Attribute in map(type, keys):
        names = [key.name if isinstance(key, Attribute) else key for key in keys]
        # If an attribute and a key of the object have the same name, keep `Attribute` to distinguish them.
        keys = names if len(set(names)) == len(names) else keys
    if skeleton.kind == "OrderedDict":
        result = OrderedDict(zip(keys, children, strict=True))
        if skeleton.attributes:
            vars(result).update(copy.deepcopy(dict(skeleton.attributes)))
        return result
    if names_objects and skeleton.kind == "object":
        return StoredObject(zip(keys, children, strict=True), skeleton.type)
    if LEAF in skeleton.children and Node not in map(type, skeleton.children):
        dicts[id(skeleton)] = keys
    return dict(zip(keys, children, strict=True))
