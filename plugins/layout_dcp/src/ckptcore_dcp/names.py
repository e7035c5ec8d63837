"""Conversion of trees to named entries, as torch.distributed.checkpoint flattens state dicts, and back.

torch joins the keys of a path by dots, each key as text (torch 2.13.0, ``_traverse.py`` and
``_nested_dict.py``). It flattens every mapping, and every list that contains a tensor or a mapping,
directly or in nested lists. Anything else is one entry, including tuples and lists of plain values.
An empty mapping has no entry.

This module does the same with two additions, because values cannot contain arrays: a tuple with an
array anywhere in it is flattened like a list, and so is a list with an array inside a tuple.
Objects with named fields count as mappings.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeAlias

from ckptcore.errors import CorruptCheckpointError, NameCollisionError
from ckptcore.model import (
    JSON,
    LEAF,
    ArrayRecord,
    Attribute,
    Node,
    Skeleton,
    TreeMetadata,
    TreePath,
    ValueRecord,
    are_indices,
    column_value,
    float_from_json,
    format_path,
)
from ckptcore.planning import leaf_names
from ckptcore_dcp.metadata import DcpPath
from ckptcore_dcp.pickles import Call, Global, Value

_ORDERED: Final = Global("collections", "OrderedDict")

_COLUMNS: Final = ("list", "tuple", "dict")
"""Kinds of records that contain all values of a container."""


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """An array of a tree, as an entry.

    Attributes:
        leaf: number of the leaf. A tied array has one entry for each of its leaves.
        name: torch's name of the entry: `path` joined by dots.
        path: the keys that lead to it.
    """

    leaf: int
    name: str
    path: DcpPath


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A value of a tree without arrays, as an entry. It may be a whole container.

    Attributes:
        leaves: numbers of its leaves; empty for an empty container. If a dict is a single leaf, each of its entries
            has the number of that leaf.
        name, path: see `ArrayEntry`.
        value: argument for `write_pickle`.
    """

    leaves: range
    name: str
    path: DcpPath
    value: Value


@dataclass(frozen=True, slots=True)
class TreeEntries:
    """The entries of a tree.

    Attributes:
        arrays, values: in the order of the tree.
        paths: path of every entry by name, in the order of the tree.
    """

    arrays: tuple[ArrayEntry, ...]
    values: tuple[ValueEntry, ...]
    paths: Mapping[str, DcpPath]


def tree_entries(tree: TreeMetadata) -> TreeEntries:
    """Return the entries that torch would create for a tree, with the additions of this module.

    Entries that would share a name are escaped (see `ckptcore.planning.leaf_names`). The escaped
    name is then the only key of the path: torch loads such an entry under the escaped name.

    Raises:
        NameCollisionError: two entries have the same name even after escaping, or two keys of a
            container within a value collide.
        CorruptCheckpointError: a value of the tree cannot be decoded.
    """
    walk = _Flattener(tree)
    walk.visit(tree.skeleton, ())
    root = "array" if isinstance(tree.skeleton, Node) or isinstance(tree.leaves[0], ArrayRecord) else "value"
    names = leaf_names({number: entry.keys for number, entry in enumerate(walk.entries)}, root=root)
    arrays: list[ArrayEntry] = []
    values: list[ValueEntry] = []
    paths: dict[str, DcpPath] = {}
    for number, entry in enumerate(walk.entries):
        name = names[number]
        path = entry.path if entry.path and name == ".".join(map(str, entry.path)) else (name,)
        paths[name] = path
        if entry.is_array:
            arrays.append(ArrayEntry(entry.leaves.start, name, path))
        else:
            values.append(ValueEntry(entry.leaves, name, path, entry.value))
    return TreeEntries(tuple(arrays), tuple(values), paths)


class EntryCache:
    """Caches the entries of the last tree, because a save needs them several times. Thread-safe."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._last: tuple[TreeMetadata, TreeEntries] | None = None

    def of(self, tree: TreeMetadata) -> TreeEntries:
        """See `tree_entries`."""
        last = self._last
        if last is None or last[0] is not tree:
            last = self._last = (tree, tree_entries(tree))
        return last[1]


@dataclass(frozen=True, slots=True)
class _UnnamedEntry:
    """An entry before names are assigned.

    Attributes:
        keys: keys of the tree that lead to it.
        path: the same keys as torch stores them.
        leaves: numbers of its leaves.
        is_array: whether it is an array, not a value.
        value: the object to pickle, for a value.
    """

    keys: TreePath
    path: DcpPath
    leaves: range
    is_array: bool
    value: Value = None


class _Flattener:
    """One pass over a tree.

    Attributes:
        entries: the entries, in order.
    """

    def __init__(self, tree: TreeMetadata) -> None:
        self._leaves = tree.leaves
        self._next = 0
        self._counts: dict[int, int] = {}
        self._arrays_before = [0, *accumulate(isinstance(record, ArrayRecord) for record in tree.leaves)]
        self.entries: list[_UnnamedEntry] = []

    def _count(self, node: Node) -> int:
        """Number of leaves of a container. Cached, because each enclosing container needs it."""
        known = self._counts.get(id(node))
        if known is None:
            known = sum(self._count(child) if isinstance(child, Node) else 1 for child in node.children)
            self._counts[id(node)] = known
        return known

    def visit(self, node: Skeleton, keys: TreePath, path: DcpPath = ()) -> None:
        """Add the entries of a subtree."""
        if isinstance(node, Node) and (not keys or self._is_flattened(node)):
            sequence = _is_sequence(node) and keys  # a torch state dict is never a list
            for key, child in zip(node.keys, node.children, strict=True):
                step = key if sequence and isinstance(key, int) else str(key)
                self.visit(child, (*keys, key), (*path, step))
            return
        first = self._next
        record = None if isinstance(node, Node) else self._leaves[first]
        if isinstance(record, ValueRecord) and (record.kind == "dict" or (not keys and record.kind in _COLUMNS)):
            # torch flattens every mapping, and a state dict is never a value.
            self._next += 1
            children = column_value(record)
            for key, value in children.items() if record.kind == "dict" else enumerate(children):
                entry = _UnnamedEntry((*keys, key), (*path, str(key)), range(first, first + 1), False, value)
                self.entries.append(entry)
            return
        is_array = not isinstance(node, Node) and isinstance(self._leaves[first], ArrayRecord)
        value = None if is_array else self._value(node, keys)
        if is_array:
            self._next += 1
        self.entries.append(_UnnamedEntry(keys, path, range(first, self._next), is_array, value))

    def _is_flattened(self, node: Node) -> bool:
        """Return whether a container is flattened. Its first leaf must be the next leaf of the pass."""
        arrays = self._arrays_before[self._next + self._count(node)] - self._arrays_before[self._next]
        return not _is_sequence(node) or arrays > 0 or self._has_mapping(node, self._next)

    def _has_mapping(self, node: Node, first: int) -> bool:
        """Return whether a list contains a mapping, directly or in nested lists. `first` is its first leaf."""
        if node.kind == "tuple":
            return False
        for child in node.children:
            if not isinstance(child, Node):
                record = self._leaves[first]
                if isinstance(record, ValueRecord) and record.kind == "dict":
                    return True
                first += 1
            elif not _is_sequence(child) or self._has_mapping(child, first):
                return True
            else:
                first += self._count(child)
        return False

    def _value(self, node: Skeleton, keys: TreePath) -> Value:
        """Return the object to pickle for a subtree without arrays."""
        if not isinstance(node, Node):
            record = self._leaves[self._next]
            assert isinstance(record, ValueRecord)  # containers with arrays are flattened
            self._next += 1
            return _decode_value(record, keys)
        children = [self._value(child, (*keys, key)) for key, child in zip(node.keys, node.children, strict=True)]
        if _is_sequence(node):
            return tuple(children) if node.kind == "tuple" else children
        names = [key.name if isinstance(key, Attribute) else key for key in node.keys]
        items: dict[Value, Value] = dict(zip(names, children, strict=True))
        if len(items) != len(names):
            raise NameCollisionError(
                f"{format_path(keys)} has a field and a key of one name, and is stored as one dict; rename one. "
                "Nothing was written"
            )
        return Call(_ORDERED, (), pairs=tuple(items.items())) if node.kind == "OrderedDict" else items


def _is_sequence(node: Node) -> bool:
    return node.kind in ("list", "tuple") or (node.kind == "object" and are_indices(node.keys) and bool(node.keys))


def _decode_value(record: ValueRecord, keys: TreePath) -> Value:
    """Decode a value of the core's encoding. JSON encoded by other plugins is pickled as JSON."""
    value = record.value
    try:
        match record.kind, value:
            case "none", None:
                return None
            case "bool", bool():
                return value
            case "int", int() if not isinstance(value, bool):
                return value
            case "int", str():
                return int(value, 16)
            case "float", _:
                return float_from_json(value)
            case "complex", [real, imaginary]:
                return complex(float_from_json(real), float_from_json(imaginary))
            case "str", str():
                return value
            case "str", {"utf8": str(text)}:
                return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
            case "bytes", str():
                return base64.b64decode(value, validate=True)
            case (("list" | "tuple" | "dict"), _):
                column: Value = column_value(record)
                return column
            case (("none" | "bool" | "int" | "complex" | "str" | "bytes"), _):
                pass
            case _:
                return _plain_json(value)
    except (ValueError, TypeError, OverflowError, binascii.Error) as error:
        raise _value_error(record, keys) from error
    raise _value_error(record, keys)


def _value_error(record: ValueRecord, keys: TreePath) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{format_path(keys)}: a {record.kind} cannot be read from {str(record.value)[:80]!r}"
    )


def _plain_json(value: JSON) -> Value:
    """Convert JSON to types that a pickle supports."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {name: _plain_json(inner) for name, inner in value.items()}
    return [_plain_json(inner) for inner in value]


def tree_of_names(
    entries: Mapping[str, Skeleton], paths: Mapping[str, DcpPath] | None
) -> tuple[Skeleton, Sequence[str]]:
    """Build the tree of entries. Return it with the entry names in the order of their leaves.

    Returns one flat dict if there are no paths or they contradict each other (torch itself writes
    such paths for ``{1: [x], "1": {"y": z}}``). A list with missing indices becomes a dict.

    Args:
        entries: the subtree of each entry by name: a leaf, or the container of a value.
        paths: the keys that lead to each entry. An entry without a path uses its name as the only key.
    """
    if paths is not None:
        order: list[str] = []
        with suppress(_ContradictoryPathsError):
            return _skeleton(_branches(entries, paths), entries, order, {}), order
    return Node("dict", tuple(entries), tuple(entries.values())), list(entries)


_Branch: TypeAlias = dict[str | int, "_Branch | str"]
"""A container under construction: children by key, each a container or the name of an entry."""


class _ContradictoryPathsError(Exception):
    """A key is taken, or a container mixes types of keys."""


def _branches(names: Iterable[str], paths: Mapping[str, DcpPath]) -> _Branch:
    """Return the outermost container of entries."""
    root: Any = {}
    try:
        for name in names:
            path = paths.get(name) or (name,)
            branch = root
            for step in path[:-1]:
                branch = branch.setdefault(step, {})
            if branch.setdefault(path[-1], name) is not name:
                raise _ContradictoryPathsError
    except AttributeError as error:  # a step is the name of an entry, not a container
        raise _ContradictoryPathsError from error
    branches: _Branch = root
    return branches


def _skeleton(
    branch: _Branch, entries: Mapping[str, Skeleton], order: list[str], same: dict[tuple[Any, ...], Node]
) -> Node:
    """Return the finished container, and append the names of its entries to `order`.

    Args:
        branch: the container.
        entries: the subtree of each entry.
        order: the names so far.
        same: dicts of leaves by their keys. Layers have the same keys, so they share one object.
    """
    keys: tuple[Any, ...] = tuple(branch)
    below: Iterable[Any] = branch.values()
    if keys in same:
        for child in below:
            if child.__class__ is dict or entries[child] is not LEAF:
                break
        else:
            order += below
            return same[keys]
    if len(keys) > 1 and len({*map(type, keys)}) > 1:
        raise _ContradictoryPathsError
    if keys and isinstance(keys[0], int):
        keys = tuple(sorted(keys))
        below = [branch[key] for key in keys]
    children: list[Skeleton] = []
    for child in below:
        if child.__class__ is dict:
            children.append(_skeleton(child, entries, order, same))
        else:
            order.append(child)
            children.append(entries[child])
    kind: Final = "list" if keys and keys[0] == 0 and are_indices(keys) else "dict"
    node = Node(kind, keys, tuple(children))
    if keys and isinstance(keys[0], str) and children.count(LEAF) == len(children):
        same[keys] = node  # a file can choose the hash of a tuple of ints
    return node
