"""Abstract values: trees of the specifications of live leaves."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model.tree import format_path
from ckptcore.plugins import Plugins
from ckptcore.protocols import LeafHandler
from ckptcore.tree.flattening import flatten, unflatten_states

__all__ = [
    "abstract_value",
]


def abstract_value(value: object, registry: Plugins) -> Any:
    """See `ckptcore.abstract`."""
    flat = flatten(value, registry, placeholders=True)
    ties = _Ties()
    leaves: list[object] = []
    refused: list[str] = []
    for path, leaf, handler in zip(flat.paths(), flat.leaves, flat.handlers, strict=True):
        if handler is None:
            leaves.append(leaf)  # a placeholder
            continue
        try:
            leaves.append(ties.abstract(leaf, handler))
        except UnsupportedLeafError as error:
            refused.append(f"{format_path(path)}: {error}")
    if refused:
        more = f"; and {len(refused) - 20} more" if len(refused) > 20 else ""
        raise UnsupportedLeafError("; ".join(refused[:20]) + more)
    return unflatten_states(flat.shape, leaves)


class _Ties:
    """Makes abstract leaves, one for all leaves that are the same elements: what is loaded for it is tied as they are.

    Most abstract leaves compare by what they ask for. A tensor on the meta device is one with itself alone.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, type, Hashable], object] = {}

    def abstract(self, leaf: object, handler: LeafHandler) -> object:
        made = handler.abstract(leaf)
        identity = handler.identity(leaf)
        if identity is None:
            return made
        known = self._made.setdefault((id(handler), type(leaf), identity), made)
        # The same elements may be asked for in two ways: on a device on purpose, and on whichever is the default.
        return known if known is made or handler.describe(known) == handler.describe(made) else made
