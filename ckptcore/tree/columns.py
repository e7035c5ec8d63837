"""Rules for columns: the containers of a value that are one leaf, in a save and in a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from ckptcore.builtin.containers import is_builtin_container
from ckptcore.builtin.number_columns import REQUESTED_COLUMN
from ckptcore.model.columns import COLUMN_KINDS, is_column, is_plain
from ckptcore.model.metadata import TreeMetadata, ValueRecord
from ckptcore.model.tree import Key
from ckptcore.plugins import Plugins
from ckptcore.protocols import LeafHandler


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
        return REQUESTED_COLUMN


_EXAMPLES: Final = (None, False, 0, 0.0, "")


def saved_columns(plugins: Plugins, *, mappings: bool) -> SavedColumns:
    """Return the rule for a save. Handlers of a Context for plain values, or for containers, get them as before."""
    first, *others = [plugins.dispatch(example).leaf for example in _EXAMPLES]
    containers = [plugins.dispatch(kind()).container for kind in COLUMN_KINDS]
    is_builtin = all(leaf is first for leaf in others) and all(map(is_builtin_container, containers))
    return SavedColumns(first if is_builtin else None, mappings)


def requested_columns(tree: TreeMetadata) -> RequestedColumns | None:
    """Return the rule for a load of a stored tree; None if it has no column."""
    kinds = {*COLUMN_KINDS.values()}
    if not any(isinstance(record, ValueRecord) and record.kind in kinds for record in tree.leaves):
        return None
    return RequestedColumns(
        {
            tuple(map(str, path)): record.kind
            for path, record in zip(tree.paths, tree.leaves, strict=True)
            if isinstance(record, ValueRecord) and record.kind in kinds
        }
    )
