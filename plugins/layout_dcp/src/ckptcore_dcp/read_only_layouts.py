"""Layouts that only read: files of other software."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import JSON, Receipt, TreeMetadata
from ckptcore.protocols import ChunkIndex, Layout, Snapshot, WriteStore
from ckptcore_dcp.chunk_index import StorageIndex


@dataclass(frozen=True, slots=True)
class ReadOnlyLayout(Layout):
    """A layout of files that other software writes."""

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Reject saving.

        Raises:
            UnsupportedLeafError: always.
        """
        raise self._read_only()

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Reject saving. See `check`."""
        raise self._read_only()

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Reject saving. See `check`."""
        raise self._read_only()

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of arrays at byte ranges of files."""
        return StorageIndex(tree, state)

    def _read_only(self) -> UnsupportedLeafError:
        return UnsupportedLeafError(
            f"the layout {self.name!r} only reads files of other software; save with layout='dcp', 'safetensors' or "
            "another one"
        )
