"""Known roots: those that were parsed last, so that a checkpoint that is opened again is not parsed again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptcore.commit.root import Claimed, Composite, PartialSave, Root
from ckptcore.model.metadata import ArrayRecord, ValueRecord
from ckptcore.protocols import Layout

__all__ = ["KnownRoots"]

_MOST: Final = 4
"""Roots that are kept."""

_MOST_BYTES: Final = 1 << 20
"""Of the bytes of a root that is kept."""


@dataclass(frozen=True, slots=True)
class _Known:
    data: bytes
    root: Root
    layout: Layout


class KnownRoots:
    """Roots that were parsed last, each with the layout that read it. Any thread.

    A root is known by all of its bytes, which are read and compared each time. One that has parts is not kept, for these have to be read and
    verified again; nor is one with values that somebody who is given them could change.
    """

    def __init__(self) -> None:
        """None yet."""
        self._known: tuple[_Known, ...] = ()
        self._lock = threading.Lock()

    def root(
        self, data: bytes, parse: Callable[[], Root | Composite | Claimed | PartialSave]
    ) -> Root | Composite | Claimed | PartialSave:
        """What these bytes of a root say.

        Args:
            data: the bytes.
            parse: parses them; called where they are not known.
        """
        known = self._find(data)
        return parse() if known is None else known.root

    def layout(self, data: bytes, root: Root, make: Callable[[], Layout]) -> Layout:
        """The layout that reads the checkpoint of a root; from then on the root is known.

        Args:
            data: the bytes of the root.
            root: what they say.
            make: makes the layout; called where they are not known.
        """
        known = self._find(data)
        if known is not None and known.root is root:
            return known.layout
        layout = make()
        if not root.parts and len(data) <= _MOST_BYTES and not _has_containers(root):
            with self._lock:
                others = [other for other in self._known if other.data != data]
                self._known = (_Known(data, root, layout), *others[: _MOST - 1])
        return layout

    def _find(self, data: bytes) -> _Known | None:
        for known in self._known:
            if known.data == data:
                return known
        return None


def _has_containers(root: Root) -> bool:
    """Whether a value of the tree is a list or mapping, which its handler may give out as it is."""
    leaves = root.tree.leaves
    if {*map(type, leaves)} == {ArrayRecord}:  # as most are, and sooner told
        return False
    return any(isinstance(record, ValueRecord) and isinstance(record.value, list | dict) for record in leaves)
