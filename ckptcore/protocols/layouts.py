"""Layouts: how the arrays of a tree lie in objects, and the stores that layouts write and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.transfer import ReadPlan, Receipt, Segment, TileRead, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.protocols.storage import StorageAddress

__all__ = [
    "Inspection",
    "Layout",
    "LayoutFactory",
    "ReadStore",
    "Snapshot",
    "WriteStore",
]


class Snapshot(Protocol):
    """The arrays of one save, in host memory or on their way there. Any thread."""

    @property
    def plan(self) -> WritePlan:
        """What this process writes."""
        ...

    def take(self, item: int) -> Sequence[HostArray]:
        """The elements of each box of ``plan.items[item]``; waits until they are there. Any strides and byte order."""
        ...

    def release(self, item: int) -> None:
        """Say that the arrays of an item are written and their memory can be given back."""
        ...


class WriteStore(Protocol):
    """The objects of a checkpoint while it is written: a storage that counts and checksums what goes in. Any thread."""

    @property
    def address(self) -> StorageAddress | None:
        """For native I/O, or None."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write a small object whole."""
        ...

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """Write an object made of these segments, in this order, over the core's I/O threads.

        Segments are opened one after the other as writing proceeds, and closed as their bytes are written.
        """
        ...


class ReadStore(Protocol):
    """The objects of a checkpoint while it is read: a storage that verifies checksums. Any thread."""

    @property
    def address(self) -> StorageAddress | None:
        """For native I/O, or None."""
        ...

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of an object; fewer where it ends before.

        Raises:
            ObjectNotFoundError, ChecksumError
        """
        ...

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            ObjectNotFoundError
        """
        ...

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``."""
        ...

    def read_tiles(self, reads: Sequence[TileRead]) -> Iterator[int]:
        """Fill targets over the core's I/O threads; yields the number of a target once all its tiles here are read.

        Raises:
            ObjectNotFoundError, ChecksumError, CorruptCheckpointError: where an object ends too early
        """
        ...


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint that other software wrote.

    Attributes:
        tree: what is in it.
        state: JSON for `Layout.read`: where things are.
        writer: who wrote it, as far as can be told.
        custom: metadata of the user's that it carries.
    """

    tree: TreeMetadata
    state: JSON
    writer: str
    custom: Mapping[str, JSON] = field(default_factory=dict)


class Layout(Protocol):
    """How the arrays of a tree lie in objects. Knows no framework; keeps no state between calls; thread-safe."""

    @property
    def name(self) -> str:
        """The name under which the hook offers it."""
        ...

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse what cannot be written, before anything is.

        Raises:
            UnsupportedLeafError, NameCollisionError, UnsupportedKeyError
        """
        ...

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write this process's boxes; waits for no other process. The result becomes `Receipt.state`."""
        ...

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """On the leader: make the parts one whole, also for foreign readers. The result is kept in the root."""
        ...

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """Fill ``buffers[i]`` with the box of ``plan.items[i]``; yields `i` once it is there and verified.

        Buffers are C-contiguous and writable, of the box's shape and the stored dtype. Everything in ``plan.state``
        may be hostile.

        Raises:
            CorruptCheckpointError: where bytes are missing or wrong.
        """
        ...

    def extents(self, tree: TreeMetadata, state: JSON) -> Iterator[tuple[int, str, int, int]]:
        """Where leaves lie, so that an error can name the array: (leaf, key, start, stop), in bytes.

        Nothing where elements lie in no plain range of bytes; `state` may be hostile.
        """
        ...

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Look whether other software wrote a checkpoint of this layout here; None if not.

        Args:
            store: where to look; everything in it may be hostile.
            entry: the one file that the user named as the location, or None for a directory.
        """
        ...


LayoutFactory: TypeAlias = Callable[[], Layout]
"""Makes a layout with its default options."""
