"""The layout of files that objects wrote themselves: they lie in the checkpoint as they are, and hold no array of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import HostArray, ReadPlan, Receipt, TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.protocols import Inspection, ReadStore, Snapshot, WriteStore

__all__ = ["FilesLayout"]


class FilesLayout:
    """Stores no tree. The core chooses it for objects that write files of their own; nobody asks for it by name."""

    name = "files"

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse every leaf."""
        if tree.leaves:
            raise UnsupportedLeafError(
                "files of an object hold no arrays and no values of a tree; choose another layout"
            )

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Nothing is left to write."""
        return None

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Nothing is left to write."""
        return None

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """There are no boxes to read."""
        yield from ()

    def extents(self, tree: TreeMetadata, state: JSON) -> Iterator[tuple[int, str, int, int]]:
        """There are no arrays."""
        yield from ()

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Files without a root of ours can be anything."""
        return None
