"""Host copies: reading what a host has copies of, of arrays that another host wrote for the job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ckptcore.commit.location import Location
from ckptcore.commit.occupants import read_root
from ckptcore.commit.root import HOST_COPIES, Root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.io.elements import copy_elements
from ckptcore.io.reader import ObjectReader
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ReadItem, ReadPlan
from ckptcore.planning.partition import without
from ckptcore.protocols import ChunkIndex
from ckptcore.runtime import runtime_of

__all__ = ["HostCopies", "find_copies"]

logger = logging.getLogger("ckptcore.training")

ReadWhole: TypeAlias = Callable[[ReadPlan, Sequence[HostArray]], Iterable[int]]
"""Fills buffers from the checkpoint itself; yields the number of each."""


@dataclass(frozen=True, slots=True)
class _Source:
    """What one process copied.

    Attributes:
        index, store: what reads it.
        name: for a person.
    """

    index: ChunkIndex
    store: ObjectReader
    name: str


@dataclass(frozen=True, slots=True)
class _Copy:
    """A box that there is a copy of.

    Attributes:
        box: of the array.
        source: the number of its source.
        leaf: its number in the tree of that.
    """

    box: Box
    source: int
    leaf: int


@dataclass(slots=True)
class _Piece:
    """A part of a box that is read.

    Attributes:
        number: of the box in the plan.
        leaf: of the checkpoint.
        box: the part.
        target: where its elements go.
        buffer: contiguous memory to read them into: the target itself, if that is.
    """

    number: int
    leaf: int
    box: Box
    target: HostArray
    buffer: HostArray


class HostCopies:
    """What a host has copies of, of one tree. Any thread."""

    def __init__(self, sources: Sequence[_Source], copies: Mapping[int, Sequence[_Copy]]) -> None:
        """Read nothing yet.

        Args:
            sources: what processes copied.
            copies: by leaf of the tree.
        """
        self._sources = sources
        self._copies = copies

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray], read_whole: ReadWhole) -> Iterator[int]:
        """Fill buffers with the boxes of a plan: from copies where there are any, and else from the checkpoint.

        A copy that is damaged is passed over.

        Args:
            plan: what to read of the checkpoint.
            buffers: by item; C-contiguous.
            read_whole: reads from the checkpoint.

        Yields:
            The number of each item as it is there.
        """
        of_sources: dict[int, list[tuple[_Piece, _Copy]]] = {}
        rest: list[_Piece] = []
        missing = [0] * len(plan.items)
        for number, (item, buffer) in enumerate(zip(plan.items, buffers, strict=True)):
            left = [item.box]
            for copy in self._copies.get(item.leaf, ()) if item.box.size else ():
                common = [found for box in left if (found := box.intersect(copy.box)) is not None]
                left = [part for box in left for part in without(box, copy.box)]
                of_sources.setdefault(copy.source, []).extend(
                    [(_piece(number, item, box, buffer), copy) for box in common]
                )
                missing[number] += len(common)
            rest.extend([_piece(number, item, box, buffer) for box in left])
            missing[number] += len(left)

        def land(piece: _Piece) -> Iterator[int]:
            if piece.buffer is not piece.target:
                copy_elements(piece.target, piece.buffer)
            missing[piece.number] -= 1
            if not missing[piece.number]:
                yield piece.number

        for source, pieces in of_sources.items():
            unread = dict(enumerate(pieces))
            try:
                for there in self._read_source(self._sources[source], pieces):
                    piece, _ = unread.pop(there)
                    yield from land(piece)
            except CheckpointError as error:
                logger.warning("%s cannot be read: %s", self._sources[source].name, error)
                rest.extend([piece for piece, _ in unread.values()])
        if rest:
            items = tuple([ReadItem(piece.leaf, piece.box) for piece in rest])
            whole = ReadPlan(plan.tree, items)
            for there in read_whole(whole, [piece.buffer for piece in rest]):
                yield from land(rest[there])

    def _read_source(self, source: _Source, pieces: Sequence[tuple[_Piece, _Copy]]) -> Iterable[int]:
        items = []
        for piece, copy in pieces:
            slices = piece.box.within(copy.box)
            items.append(
                ReadItem(copy.leaf, Box(tuple([one.start for one in slices]), tuple([one.stop for one in slices])))
            )
        return source.store.read_boxes(source.index, items, [piece.buffer for piece, _ in pieces])


def _piece(number: int, item: ReadItem, box: Box, buffer: HostArray) -> _Piece:
    target: HostArray = buffer if box == item.box else buffer[box.within(item.box)]
    if target.flags.c_contiguous:
        return _Piece(number, item.leaf, box, target, target)
    return _Piece(number, item.leaf, box, target, np.empty(box.shape, buffer.dtype))


def find_copies(location: Location, root: Root, context: Context) -> HostCopies | None:
    """What there are copies of, of a tree that was opened on a host; None if of nothing.

    Args:
        location: of the tree.
        root: of the tree.
        context: options.
    """
    sources: list[_Source] = []
    copies: dict[int, list[_Copy]] = {}
    store = subdirectory(location.store, HOST_COPIES)
    for name in store.list_names():
        inside = subdirectory(store, name.removesuffix("/"))
        display = f"{location.display}/{HOST_COPIES}/{name}"
        try:
            found = read_root(inside)
            if not isinstance(found, Root) or found.save_id != root.save_id:
                continue  # a process that died has left it
            layout = runtime_of(context).registry.layout(found.layout)
            index = layout.index(found.tree, found.state)
            reader = ObjectReader(
                inside, found.objects, runtime_of(context).io_threads, verify=context.io.verify, strict=True
            )
            of_source = [
                _copy_of(record, root.tree, len(sources), number) for number, record in enumerate(found.tree.leaves)
            ]
        except CheckpointError as error:
            logger.warning("%s cannot be read: %s", display, error)
            continue
        sources.append(_Source(index, reader, display))
        for leaf, copy in of_source:
            copies.setdefault(leaf, []).append(copy)
    return HostCopies(sources, copies) if copies else None


def _copy_of(record: object, tree: TreeMetadata, source: int, number: int) -> tuple[int, _Copy]:
    """What an array of a process's copies is a copy of.

    Raises:
        CorruptCheckpointError: if it is none of this tree.
    """
    told: Any = record.notes.get("copy_of") if isinstance(record, ArrayRecord) else None
    try:
        leaf, start, stop = told
        box = Box(tuple(map(int, start)), tuple(map(int, stop)))
        of = tree.leaves[leaf] if leaf >= 0 else None
    except (TypeError, ValueError, IndexError):
        of = None
    if isinstance(of, ArrayRecord) and isinstance(record, ArrayRecord):
        lies_within = len(box.start) == len(box.stop) == len(of.spec.shape) and Box.whole(of.spec.shape).contains(box)
        if lies_within and record.spec == ArraySpec(box.shape, of.spec.dtype):
            return leaf, _Copy(box, source, number)
    raise CorruptCheckpointError(
        f"its array {number} is said to be a copy of {str(told)[:80]}, which is no box of this tree; the copy is not read"
    )
