"""Host copies: reads boxes from the copies that a host stores in addition to its own part of a per-host save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckptcore.commit.root import HOST_COPIES, Root
from ckptcore.commit.stored_root import read_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.events import logger_named
from ckptcore.io.elements import copy_elements
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ReadItem, ReadPlan
from ckptcore.opening.checkpoint import Checkpoint, reader_of, stored_format
from ckptcore.planning.partition import subtract
from ckptcore.records import NamedTuple, dataclass

logger = logger_named("ckptcore.loading")


class _BoxCopy(NamedTuple):
    """A copy of a box of an array.

    Attributes:
        box: the box of the array.
        source: the index in `_HostCopies.sources` of the process that wrote the copy.
        leaf: the number of the copy in the tree of that process.
    """

    box: Box
    source: int
    leaf: int


@dataclass(frozen=True, slots=True)
class _PieceRead:
    """The read of a part of a box.

    Attributes:
        number: the number of the box in the plan.
        item: the leaf and the box of the part, in the tree of the checkpoint.
        target: the destination of its elements.
        buffer: contiguous memory to read into: `target` if it is contiguous.
    """

    number: int
    item: ReadItem
    target: HostArray
    buffer: HostArray


@dataclass(frozen=True, slots=True)
class _HostCopies:
    """A checkpoint with local copies of some boxes on this host. Thread-safe.

    Attributes:
        opened: reads boxes without a copy.
        sources: the copies of each process: a display name and an open checkpoint.
        copies: by leaf number, the copies of its boxes.
    """

    opened: Checkpoint
    sources: Sequence[tuple[str, Checkpoint]]
    copies: Mapping[int, Sequence[_BoxCopy]]

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterator[int]:
        """See `Checkpoint.read`. Boxes of damaged copies are read from the checkpoint."""
        of_sources: dict[int, list[tuple[_PieceRead, ReadItem]]] = {}
        rest: list[_PieceRead] = []
        missing = [0] * len(plan.items)
        for number, (item, buffer) in enumerate(zip(plan.items, buffers, strict=True)):
            left = [item.box]  # the parts of the box that no copy has
            for copy in self.copies.get(item.leaf, ()) if item.box.size else ():
                common = [inside for box in left if (inside := box.intersect(copy.box)) is not None]
                left = [part for box in left for part in subtract(box, copy.box)]
                for box in common:
                    piece = _piece(number, item, box, buffer)
                    of_sources.setdefault(copy.source, []).append((piece, _item_of(copy, box)))
                missing[number] += len(common)
            rest.extend([_piece(number, item, box, buffer) for box in left])
            missing[number] += len(left)

        def finish(piece: _PieceRead) -> Iterator[int]:
            if piece.buffer is not piece.target:
                copy_elements(piece.target, piece.buffer)
            missing[piece.number] -= 1
            if not missing[piece.number]:
                yield piece.number

        for source, pieces in of_sources.items():
            name, copies = self.sources[source]
            remaining = {number: piece for number, (piece, _) in enumerate(pieces)}
            of_source = ReadPlan(copies.tree, tuple([item for _, item in pieces]))
            try:
                for done in copies.read(of_source, [piece.buffer for piece, _ in pieces]):
                    yield from finish(remaining.pop(done))
            except CheckpointError as error:
                logger.warning("%s cannot be read: %s", name, error)
                rest.extend(remaining.values())
        if rest:
            of_checkpoint = ReadPlan(plan.tree, tuple([piece.item for piece in rest]))
            for done in self.opened.read(of_checkpoint, [piece.buffer for piece in rest]):
                yield from finish(rest[done])


def _piece(number: int, item: ReadItem, box: Box, buffer: HostArray) -> _PieceRead:
    target: HostArray = buffer if box == item.box else buffer[box.within(item.box)]
    contiguous = target if target.flags.c_contiguous else np.empty(box.shape, buffer.dtype)
    return _PieceRead(number, ReadItem(item.leaf, box), target, contiguous)


def _item_of(copy: _BoxCopy, box: Box) -> ReadItem:
    """Return the item that reads a box from a copy. Its bounds are relative to the copy."""
    bounds = [(axis.start, axis.stop) for axis in box.within(copy.box)]
    return ReadItem(copy.leaf, Box(tuple([start for start, _ in bounds]), tuple([stop for _, stop in bounds])))


def with_copies(opened: Checkpoint, root: Root, context: Context) -> Checkpoint:
    """Return a checkpoint that reads boxes from the copies in its directory. Returns `opened` if there are no copies.

    Copies that cannot be read are ignored with a warning.

    Args:
        opened: the checkpoint, in a directory of one host.
        root: its root.
        context: options.
    """
    sources: list[tuple[str, Checkpoint]] = []
    copies: dict[int, list[_BoxCopy]] = {}
    store = subdirectory(opened.location.store, HOST_COPIES)
    for name in store.list_names():
        inside = subdirectory(store, name.removesuffix("/"))
        display = f"{opened.location.display}/{HOST_COPIES}/{name}"
        try:
            copied = read_root(inside)
            if not isinstance(copied, Root) or copied.save_id != root.save_id:
                continue  # left by an earlier or interrupted save
            reader, stored = reader_of(inside, copied.objects, context), stored_format(copied, context)
            source = replace(opened, root=copied, stored=stored, tree=copied.tree, store=reader)
            _ = source.index  # raises if it is damaged
            of_source = [
                _copy_of(record, root.tree, len(sources), number) for number, record in enumerate(copied.tree.leaves)
            ]
        except CheckpointError as error:
            logger.warning("%s cannot be read: %s", display, error)
            continue
        sources.append((display, source))
        for leaf, copy in of_source:
            copies.setdefault(leaf, []).append(copy)
    return replace(opened, read_instead=_HostCopies(opened, sources, copies).read) if copies else opened


def _copy_of(record: object, tree: TreeMetadata, source: int, number: int) -> tuple[int, _BoxCopy]:
    """Return the leaf number in `tree` of the array that a record copies, and the copy.

    Args:
        record: the record of the copy.
        tree: the tree of the checkpoint.
        source: the index in `_HostCopies.sources` of the process that wrote the copy.
        number: the number of the copy in the tree of that process.

    Raises:
        CorruptCheckpointError: the record is not a copy of a box of this tree.
    """
    stated: Any = record.notes.get("copy_of") if isinstance(record, ArrayRecord) else None
    try:
        leaf, start, stop = stated
        box = Box(tuple(map(int, start)), tuple(map(int, stop)))
        of = tree.leaves[leaf] if leaf >= 0 else None  # a negative number would count from the end
    except (TypeError, ValueError, IndexError):
        of = None
    if isinstance(of, ArrayRecord) and isinstance(record, ArrayRecord):
        is_box = len(box.start) == len(box.stop) == len(of.spec.shape) and Box.whole(of.spec.shape).contains(box)
        if is_box and record.spec == ArraySpec(box.shape, of.spec.dtype):
            return leaf, _BoxCopy(box, source, number)
    raise CorruptCheckpointError(
        f"its array {number} is recorded as a copy of {str(stated)[:80]}, which is not a box of this tree; the copy is "
        "ignored"
    )
