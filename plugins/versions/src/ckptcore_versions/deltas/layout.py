"""The layout `deltas`: stores what changed in each array since a base, a checkpoint in the same directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.derivations import Stored
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.io.elements import copy_elements, is_little, little_dtype, plain
from ckptcore.io.threads import IOThreads, map_ordered
from ckptcore.model import (
    JSON,
    ArrayRecord,
    ArraySpec,
    Box,
    BytesSegment,
    HostArray,
    Receipt,
    Segment,
    TreeMetadata,
    TreePath,
    WritePlan,
    format_path,
)
from ckptcore.planning import ChunkTable
from ckptcore.protocols import (
    BaseReference,
    ChainedArrays,
    ChainLink,
    ChunkIndex,
    DerivedArray,
    Layout,
    LayoutCapabilities,
    Snapshot,
    WriteStore,
)
from ckptcore_versions.deltas.checksums import CRC32
from ckptcore_versions.deltas.chunks import (
    ArrayChunks,
    ChunkSizes,
    DeltaTable,
    chunk_shape,
    chunks_of,
    grid_of,
    main_axis,
    part_of,
    stripes_of,
)
from ckptcore_versions.deltas.encoding import encode, word_bytes, words_of
from ckptcore_versions.deltas.patched_arrays import PatchedArray
from ckptcore_versions.held_version import HeldVersion, VersionLayout

_PIECE_BYTES: Final = 32 << 20
"""Bytes of elements that are encoded together, by several threads."""

_GROUP_BYTES: Final = 512 << 10
"""Bytes of adjacent elements that a thread compares at once, so that small chunks cost little more than large ones."""

_OBJECT_BYTES: Final = 64 << 20
"""An object is complete when it has this number of bytes. The encoded bytes of two objects are in memory at most."""

_GROWTH: Final = 1 << 16
"""Maximum ratio of the elements of an array to its encoded bytes, if no base has them."""

_FULL: Final = SafetensorsLayout()
"""Stores full versions, so that other software and mapped caches can use their files."""


@dataclass(frozen=True, slots=True)
class DeltaLayout(VersionLayout):
    """Stores the chunks of arrays that differ from a held version, each in the encoding with the fewest bytes.

    Each process encodes the boxes that it writes, on several threads. Arrays, and parts of arrays, that the held
    version lacks are stored whole. Without a held version the layout stores everything, in safetensors files.

    A checkpoint of this layout needs its base, which is in the same directory: saves elsewhere are refused.
    `ckptcore.delete` refuses to delete the base, and `ckptcore.copy` makes a checkpoint without a base.

    Attributes:
        held: the version that is the base.
    """

    held: HeldVersion | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The name "deltas"."""
        return "deltas"

    @property
    def capabilities(self) -> LayoutCapabilities:
        """Processes that hold equal boxes share the encoding of differences."""
        if self.held is None:
            return LayoutCapabilities()
        return LayoutCapabilities(any_replica_writes=True, differences=self.held.version.reference)

    def against(self, held: HeldVersion | None) -> Layout:
        """Return a layout that writes differences from a held version; None: safetensors, which writes everything."""
        return _FULL if held is None else DeltaLayout(held)

    def check(self, tree: TreeMetadata, size: int) -> None:
        """See `Layout`."""
        if self.held is None:
            _FULL.check(tree, size)

    def arrays_by_object(self, tree: TreeMetadata) -> Sequence[Sequence[int]] | None:
        """See `Layout`."""
        return _FULL.arrays_by_object(tree) if self.held is None else None

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Encode and write the boxes of this process."""
        if self.held is None:
            return _FULL.write(snapshot, store)
        columns = ChunkSizes()
        store.write_many(_objects(snapshot, self.held, columns))
        return {"base": _base_state(self.held), **columns.to_json()}

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Merge the columns of all processes.

        Raises:
            CheckpointError: processes held different versions.
        """
        if self.held is None:
            return _FULL.finish(tree, receipts, store)
        base, columns = _base_state(self.held), ChunkSizes()
        for receipt in receipts:
            state: Any = receipt.state
            if not isinstance(state, Mapping) or state.get("base") != base:
                other = state["base"]["name"] if isinstance(state, Mapping) and "base" in state else "none"
                raise CheckpointError(
                    f"process {receipt.rank} wrote differences from the version {other!r}, and process 0 from "
                    f"{base['name']!r}: every process must hold the same version. The save is not committed"
                )
            columns.extend(state)
        return {"base": base, **columns.to_json()}

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the positions of the encoded bytes, as arrays of bytes. See `DeltaTable.encoded_tree`."""
        if not _has_base(state):
            return _FULL.index(tree, state)
        return ChunkTable(tree, DeltaTable(state).columns(), CRC32)

    def base(self, tree: TreeMetadata, state: JSON) -> BaseReference | None:
        """Return the base that the state names; None for a full version."""
        if not _has_base(state):
            return None
        fields: Any = state
        base = fields["base"]
        names = ("name", "save_id", "digest")
        if not isinstance(base, dict) or not all(isinstance(base.get(name), str) for name in names) or not base["name"]:
            raise CorruptCheckpointError(
                f"the base of the checkpoint is damaged: expected {', '.join(names)}, found {str(base)[:200]}. Restore "
                "the checkpoint from a copy, or load another one"
            )
        return BaseReference(*[base[name] for name in names])

    def derive(self, links: Sequence[ChainLink], base: TreeMetadata) -> ChainedArrays:
        """Return arrays that read the elements of the base, and change them by the chunks of each link."""
        deltas = [_Delta.of(link) for link in links]
        trees = [*[link.tree for link in links[1:]], base]
        leaves = [{path: leaf for leaf, path in enumerate(tree.paths)} for tree in trees]
        arrays = {leaf: _array_of(leaf, deltas, trees, leaves) for leaf in deltas[0].chunks}
        return ChainedArrays(links[0].tree, [delta.encoded_tree for delta in deltas], arrays)


class _Delta(NamedTuple):
    """A link of a chain.

    Attributes:
        link: the link.
        chunks: the chunks of each array, by leaf.
        encoded: by leaf, the number of the array of encoded bytes of each array that changed.
        encoded_tree: the tree of these arrays.
    """

    link: ChainLink
    chunks: Mapping[int, ArrayChunks]
    encoded: Mapping[int, int]
    encoded_tree: TreeMetadata

    @classmethod
    def of(cls, link: ChainLink) -> _Delta:
        """Parse the state of a link, which may be hostile.

        Raises:
            CorruptCheckpointError
        """
        table = DeltaTable(link.state)
        numbers = {leaf: number for number, leaf in enumerate(table.encoded)}
        return cls(link, table.arrays(link.tree), numbers, table.encoded_tree(link.tree))


def _array_of(
    leaf: int, deltas: Sequence[_Delta], trees: Sequence[TreeMetadata], leaves: Sequence[Mapping[TreePath, int]]
) -> DerivedArray:
    """Return how to compute an array of the newest delta.

    Args:
        leaf: its leaf there.
        deltas: the links of the chain, from the newest.
        trees: the tree of the base of each delta.
        leaves: the leaves of these trees, by path.

    Raises:
        CorruptCheckpointError: a base does not have the array, and the delta does not store all of it.
    """
    path, spec = deltas[0].link.tree.paths[leaf], deltas[0].chunks[leaf].spec
    changes: list[tuple[Stored, ArrayChunks]] = []
    for number, delta in enumerate(deltas):
        chunks = delta.chunks[leaf]
        if chunks.nbytes:
            changes.insert(0, (Stored(ArraySpec((chunks.nbytes,), "uint8"), delta.encoded[leaf], number), chunks))
        below = _same_array(trees[number], leaves[number].get(path), spec)
        if below is None:
            if not chunks.is_complete or spec.nbytes > _GROWTH * max(chunks.nbytes, 1):
                raise CorruptCheckpointError(
                    f"{format_path(path)} ({spec}) is stored as differences from {_base_name(delta.link.state)!r}, "
                    "which does not have it. Load another checkpoint"
                )
            return PatchedArray(spec, None, tuple(changes))
        # Further below, the array is that of the path under which the base stores it, which may be tied to others.
        leaf, path = below, trees[number].paths[below]
    stored = Stored(spec, leaf, len(deltas))
    return PatchedArray(spec, stored, tuple(changes)) if changes else stored


def _same_array(tree: TreeMetadata, leaf: int | None, spec: ArraySpec) -> int | None:
    """Return the stored array of a leaf; None if the leaf does not exist, or is another array."""
    if leaf is None:
        return None
    stored = tree.aliases.get(leaf, leaf)
    record = tree.leaves[stored]
    return stored if isinstance(record, ArrayRecord) and record.spec == spec else None


def _has_base(state: JSON) -> bool:
    return isinstance(state, Mapping) and "base" in state


def _base_name(state: JSON) -> str:
    fields: Any = state  # `DeltaLayout.base` has checked it
    return str(fields["base"]["name"])


def _base_state(held: HeldVersion) -> dict[str, JSON]:
    version = held.version
    return {"name": version.name, "save_id": version.save_id, "digest": version.digest}


class _Piece(NamedTuple):
    """A part of a box that is encoded at once: whole chunks.

    Attributes:
        leaf, spec: the array.
        axis: its main axis.
        box: the part.
        cell: the shape of its chunks.
        new: its new elements, of any strides.
        old: its old elements; None if the held version lacks them.
        continues: True if the piece before is of the same box, and ends where this one begins.
        releases: the item to release afterwards; None if it has further pieces.
    """

    leaf: int
    spec: ArraySpec
    axis: int
    box: Box
    cell: tuple[int, ...]
    new: HostArray
    old: HostArray | None
    continues: bool
    releases: int | None


@dataclass(slots=True)
class _EncodedBox:
    """Adjacent pieces of one box in one object, with their encoded chunks in C order."""

    leaf: int
    box: Box
    cell: tuple[int, ...]
    axis: int
    chunks: list[bytes]


def _objects(snapshot: Snapshot, held: HeldVersion, columns: ChunkSizes) -> Iterator[tuple[str, Sequence[Segment]]]:
    """Encode all boxes of a snapshot. Yields objects, and adds their boxes to the columns."""
    plan, threads = snapshot.plan, IOThreads()
    boxes: list[_EncodedBox] = []
    number = nbytes = 0
    for batch in _batches(_pieces(snapshot, held)):
        work = [(piece, group) for piece in batch for group in _groups(piece)]
        encoded = itertools.chain.from_iterable(map_ordered(threads, work, _encode))
        for piece in batch:
            chunks = [next(encoded) for _ in range(prod(grid_of(piece.box, piece.cell)))]
            if piece.continues and boxes:
                boxes[-1].box = Box(boxes[-1].box.start, piece.box.stop)
                boxes[-1].chunks += chunks
            else:
                boxes.append(_EncodedBox(piece.leaf, piece.box, piece.cell, piece.axis, chunks))
            nbytes += sum(map(len, chunks))
            if piece.releases is not None:
                snapshot.release(piece.releases)
            if nbytes >= _OBJECT_BYTES:
                yield from _object(f"{_prefix(plan)}-{number:05d}", boxes, columns)
                number, nbytes, boxes = number + 1, 0, []
    yield from _object(f"{_prefix(plan)}-{number:05d}", boxes, columns)


def _prefix(plan: WritePlan) -> str:
    return f"deltas.{plan.save_id}.{plan.rank:05d}"


def _object(key: str, boxes: Sequence[_EncodedBox], columns: ChunkSizes) -> Iterator[tuple[str, Sequence[Segment]]]:
    """Yield an object with the chunks of boxes, stripe by stripe, unless all are equal to the base."""
    stripes: dict[int, list[bytes]] = {}
    for encoded in boxes:
        box, cell, axis = encoded.box, encoded.cell, encoded.axis
        columns.add(encoded.leaf, key, box, cell, axis, [len(chunk) for chunk in encoded.chunks])
        for stripe, chunk in zip(stripes_of(box, cell, axis).tolist(), encoded.chunks, strict=True):
            if chunk:
                stripes.setdefault(stripe, []).extend((chunk, CRC32.encode(CRC32.of(memoryview(chunk)))))
    if stripes:
        yield key, [BytesSegment(b"".join(stripes[stripe])) for stripe in sorted(stripes)]


def _pieces(snapshot: Snapshot, held: HeldVersion) -> Iterator[_Piece]:
    """Divide the boxes of a snapshot into pieces of whole chunks."""
    plan = snapshot.plan
    for number, item in enumerate(plan.items):
        path, spec = plan.tree.paths[item.leaf], item.spec
        boxes = [(box, array) for box, array in zip(item.boxes, snapshot.take(number), strict=True) if box.size]
        if not boxes:
            snapshot.release(number)
        for of_box, (box, array) in enumerate(boxes, start=1):
            axis = main_axis(spec, box)
            cell = chunk_shape(spec, axis)
            bands = _bands(box, spec, cell)
            for of_band, band in enumerate(bands, start=1):
                old = held.elements(path, spec, band)
                is_last = of_box == len(boxes) and of_band == len(bands)
                new = part_of(array, band, box)
                yield _Piece(item.leaf, spec, axis, band, cell, new, old, of_band > 1, number if is_last else None)


def _bands(box: Box, spec: ArraySpec, cell: Sequence[int]) -> Sequence[Box]:
    """Divide a box along its first axis, at the grid of chunks, into parts of about `_PIECE_BYTES`."""
    if not spec.shape:
        return [box]
    row_bytes = box.size // box.shape[0] * spec.numpy_dtype.itemsize
    rows = max(1, _PIECE_BYTES // (row_bytes * cell[0])) * cell[0]
    start, stop = box.start[0], box.stop[0]
    bounds = [start, *range((start // rows + 1) * rows, stop, rows), stop]
    return [box.band(0, low, high) for low, high in itertools.pairwise(bounds)]


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Group pieces, so that small arrays are encoded together."""
    batch: list[_Piece] = []
    nbytes = 0
    for piece in pieces:
        batch.append(piece)
        nbytes += piece.new.nbytes
        if nbytes >= _PIECE_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _groups(piece: _Piece) -> Iterator[Sequence[Box]]:
    """Divide the chunks of a piece into groups that one thread encodes: adjacent elements, or a single chunk."""
    chunks = chunks_of(piece.box, piece.cell)
    most = max(1, _GROUP_BYTES * len(chunks) // max(1, piece.new.nbytes))
    # Chunks are adjacent in C order if they are whole along all axes but the first.
    count = most if chunks[0].shape[1:] == piece.box.shape[1:] else 1
    return (chunks[start : start + count] for start in range(0, len(chunks), count))


def _encode(work: tuple[_Piece, Sequence[Box]]) -> list[bytes]:
    """Encode the chunks of a group."""
    piece, chunks = work
    box, size = Box(chunks[0].start, chunks[-1].stop), word_bytes(piece.spec)
    old = None if piece.old is None else _words(part_of(piece.old, box, piece.box), size)
    per_element = piece.spec.numpy_dtype.itemsize // size
    stops = list(itertools.accumulate([chunk.size * per_element for chunk in chunks]))
    return encode(old, _words(part_of(piece.new, box, piece.box), size), stops)


def _words(elements: HostArray, size: int) -> HostArray:
    """Return elements as contiguous little-endian words. Copies them only if they are not."""
    if not elements.flags.c_contiguous or not is_little(elements.dtype):
        copied: HostArray = np.empty(elements.shape, little_dtype(elements.dtype))
        copy_elements(copied, elements)
        elements = copied
    return words_of(plain(elements), size)
