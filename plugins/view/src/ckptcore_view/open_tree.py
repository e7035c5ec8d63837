"""Open tree: a checkpoint of one tree, whose arrays have numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property

from ckptcore_tools.comparison import Side
from ckptcore_tools.outline import Outline, outline_of

from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError
from ckptcore.loading.load import LoadRequest
from ckptcore.model import ArrayRecord, HostArray, TreeMetadata, TreePath, format_path
from ckptcore.on_demand.arrays import StoredArray
from ckptcore.on_demand.boxes import iter_boxes
from ckptcore.on_demand.open_state import OpenState
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.select import LeafTable, Selection


class _Leaf(Selection):
    """One leaf by its number. Faster than a selection by name, which compares the names of all leaves."""

    def __init__(self, number: int) -> None:
        self._number = number

    def leaves(self, table: LeafTable) -> frozenset[int]:
        """Return the number."""
        return frozenset({self._number})


class OpenTree:
    """An open checkpoint of one tree, or of files. Thread-safe.

    Attributes:
        location: its location.
        state: reads the arrays, and detects a replacement of the checkpoint.
    """

    def __init__(self, location: str, context: Context) -> None:
        """Open a checkpoint. Reads no array.

        Raises:
            CompositeCheckpointError: it has several checkpointables.
            CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError: there is no committed
                checkpoint, or it is damaged.
        """
        self.location = location
        self.state = OpenState(location, context)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint."""
        return self.state.checkpoint

    @property
    def tree(self) -> TreeMetadata:
        """Its tree."""
        return self.state.checkpoint.tree

    @cached_property
    def version(self) -> str:
        """A text that changes when the checkpoint is replaced. Numbers of arrays are only valid for one version."""
        version = self.checkpoint.version
        data = version.root if isinstance(version.root, bytes) else repr(version).encode()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    @cached_property
    def outline(self) -> Outline:
        """The rows of its tree."""
        return outline_of(self.tree)

    @cached_property
    def side(self) -> Side:
        """One side of a comparison with another checkpoint."""
        return Side(self.state)

    def path(self, leaf: int) -> TreePath:
        """Return the path of an array.

        Raises:
            CheckpointNotFoundError: there is no such array.
        """
        self.record(leaf)
        return self.tree.paths[leaf]

    def leaf_at(self, path: TreePath) -> int:
        """Return the number of the array at a path.

        Raises:
            CheckpointNotFoundError: there is no such array.
        """
        leaf = self.side.leaves.get(path)
        if leaf is None or not isinstance(self.tree.leaves[leaf], ArrayRecord):
            raise CheckpointNotFoundError(f"{self.location} has no array {format_path(path)}")
        return leaf

    def stored(self, leaf: int) -> int:
        """Return the number of the leaf that stores the elements of an array: for a tied array, another leaf."""
        return self.tree.aliases.get(leaf, leaf)

    def array(self, leaf: int) -> StoredArray:
        """Return an array that is read when it is indexed."""
        return StoredArray(self.state, leaf, self.path(leaf), self.record(leaf).spec)

    def record(self, leaf: int) -> ArrayRecord:
        """Return the record of an array.

        Raises:
            CheckpointNotFoundError: there is no such array.
        """
        leaves = self.tree.leaves
        record = leaves[leaf] if 0 <= leaf < len(leaves) else None
        if not isinstance(record, ArrayRecord):
            raise CheckpointNotFoundError(f"{self.location} has no array with the number {leaf}")
        return record

    def boxes(self, leaf: int) -> Iterator[HostArray]:
        """Read an array in boxes, with bounded memory."""
        self.record(leaf)
        chosen = LoadRequest(select=_Leaf(leaf))
        return (box.elements for box in iter_boxes(self.state, chosen, ()))

    def is_current(self) -> bool:
        """Return True if the checkpoint was not replaced since it was opened."""
        checkpoint = self.checkpoint
        return checkpoint.version.has_current_root(checkpoint.location)
