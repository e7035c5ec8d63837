"""Columns: containers of plain values that are one leaf. See `ckptcore.model.columns`.

Rules decide which containers of a value are columns, in a save and in a load.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from ckptcore.builtin.containers import BUILTIN_CONTAINERS
from ckptcore.builtin.host_leaves import HostValueHandler
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.columns import COLUMN_KINDS, is_column, is_plain
from ckptcore.model.metadata import LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import Key
from ckptcore.plugins import Plugins
from ckptcore.protocols import ContainerHandler, Flattened, LeafHandler, Priority


class _RequestedColumn(HostValueHandler):
    """A container that requests a stored column. Its own values are not encoded: the stored ones replace them all."""

    def describe(self, leaf: Any) -> LeafRecord:
        """Return the kind alone."""
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
        result = copy.copy(abstract)  # with the attributes of its instance
        _replace_values(result, values)
        return result


class _ColumnContainer(ContainerHandler):
    """Puts a loaded column into its container, like the children of another container."""

    priority = Priority.EXACT

    def flatten(self, value: Any) -> Flattened:
        """Return the whole container as its only child."""
        return Flattened("object", (0,), (value,))

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        """Return the column itself."""
        return children[0]

    def replaceable(self, target: Any) -> Collection[int]:
        """Return the column, if the container is mutable."""
        return () if isinstance(target, tuple) else (0,)

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        """Replace all values in the container, which other objects may refer to."""
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
    """Decides which containers are one leaf."""

    def handler(self, value: object, path: Sequence[Key]) -> LeafHandler | None:
        """Return the leaf handler of a container that is one leaf; None for a container with children."""
        ...


class SavedColumns(NamedTuple):
    """The columns of a value that is saved: its long lists, tuples and dicts of plain values.

    Attributes:
        leaf: the handler of plain values; None if several handlers have them, so that columns would bypass one.
        mappings: True if dicts may be columns. False if several savers merge their dicts by key.
    """

    leaf: LeafHandler | None
    mappings: bool

    def handler(self, value: object, path: Sequence[Key]) -> LeafHandler | None:
        """See `ColumnRule.handler`."""
        return self.leaf if (self.mappings or type(value) is not dict) and is_column(value) else None


class RequestedColumns(NamedTuple):
    """The containers of a target, or of an abstract tree, for which a column is stored.

    They have plain values only, of any number, because all of them are replaced.

    Attributes:
        kinds: the kind of each stored column, by the text of the keys of its path.
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
    """Return the rule for a save. There are no columns if a handler of the Context takes plain values or containers."""
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
    paths = tree.paths  # of all leaves, which takes time
    return RequestedColumns({tuple(map(str, paths[leaf])): kind for leaf, kind in columns.items()})
