"""Containers of plain values that are one leaf: see `ckptcore.model.columns`."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ckptcore.builtin.host_leaves import HostValueHandler
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.columns import COLUMN_KINDS
from ckptcore.model.metadata import LeafRecord, ValueRecord
from ckptcore.protocols import ContainerHandler, Flattened, Priority


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
REQUESTED_COLUMN: Final = _RequestedColumn()
