"""Reader of chunks that are torch.save items, written by torch or compatible software.

An item is a zip file. Its directory locates the pickle and the elements; the pickle states shape
and strides. Elements in C order are copied directly into the destination, and only those requested.
Other elements are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import ArrayRecord, ArraySpec, Box, ChunkRead, HostArray, TreeMetadata, format_path
from ckptcore.protocols import ReadStore
from ckptcore_dcp.dtypes import physical_spec
from ckptcore_dcp.item_templates import KnownTemplates
from ckptcore_dcp.pickles import read_pickle
from ckptcore_dcp.storages import Place, StoredBytes, gathered_box, inflated
from ckptcore_dcp.stored_tensors import check_bounds, stored_tensor
from ckptcore_dcp.transforms import undone
from ckptcore_dcp.whole_reads import is_read_whole
from ckptcore_dcp.zip_directories import Fetch
from ckptcore_dcp.zip_records import STORED
from ckptcore_dcp.zips import ZipMember, most_pickle_bytes, read_member, read_zip, torch_members

__all__ = ["ItemTargets", "StoredItem", "read_items"]

_Templates: TypeAlias = KnownTemplates[ArraySpec, Place]

_SMALL_BYTES: Final = 1 << 18
"""Items up to this size are read whole, together with their neighbours."""
_WINDOW_BYTES: Final = 4 << 20
_GAP_BYTES: Final = 1 << 14
_MOST_GROWTH: Final = 4
"""Maximum ratio of a decompressed item to its elements: the tensor may be a view of a larger storage."""
_MOST_AROUND: Final = 1 << 20
"""Additional bytes allowed for a decompressed item."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A torch.save item with the elements of a box of an array.

    Attributes:
        box: the box in the array.
        key: the object that contains the item.
        offset: offset of the item in the object, in bytes.
        nbytes: stored length of the item, in bytes.
        transforms: transforms applied to it, as torch names them (``stream.zstd/1``), in order.
    """

    box: Box
    key: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()


@dataclass(slots=True)
class ItemTargets:
    """An item, and the destinations of its elements.

    Attributes:
        leaf: the array of the item.
        chunk: the item.
        targets: number, box and buffer of each destination.
    """

    leaf: int
    chunk: StoredItem
    targets: list[tuple[int, Box, HostArray]] = field(default_factory=list)


def read_items(tree: TreeMetadata, wanted: Sequence[ItemTargets], store: ReadStore) -> Iterator[int]:
    """Fill the destinations. Yield the number of each once all of its chunks are read and verified.

    Items are verified as far as their format has checksums.

    Raises:
        CorruptCheckpointError: an item does not match its checkpoint, or its checksum is wrong.
        UnsupportedLeafError: it is a tensor that no array can represent.
    """
    left: dict[int, int] = {}
    for found in wanted:
        for number, _, _ in found.targets:
            left[number] = left.get(number, 0) + 1
    tiles: list[ChunkRead] = []
    for found in wanted:
        if not _is_small(found):
            with _about(found.chunk):
                tile = _read_large(tree, found, store)
            if tile is None:
                yield from _finished(found, left)
            else:
                tiles.append(tile)
    templates: _Templates = KnownTemplates()
    for window in _windows([found for found in wanted if _is_small(found)]):
        data = _window_bytes(window, store)
        for found in window:
            start = found.chunk.offset - window[0].chunk.offset
            with _about(found.chunk):
                _copy(tree, found, data[start : start + found.chunk.nbytes], templates)
            yield from _finished(found, left)
    in_tiles: dict[int, int] = {}
    for tile in tiles:
        for number, _, _ in tile.targets:
            in_tiles[number] = in_tiles.get(number, 0) + 1
    for number in store.read_chunks(tiles):
        left[number] -= in_tiles[number]
        if not left[number]:
            yield number


def _is_small(found: ItemTargets) -> bool:
    return found.chunk.nbytes <= _SMALL_BYTES or bool(found.chunk.transforms)


def _finished(found: ItemTargets, left: dict[int, int]) -> Iterator[int]:
    for number, _, _ in found.targets:
        left[number] -= 1
        if not left[number]:
            yield number


def _windows(small: Sequence[ItemTargets]) -> Iterator[Sequence[ItemTargets]]:
    """Group items that one request reads."""
    window: list[ItemTargets] = []
    stop = 0
    for found in sorted(small, key=lambda found: (found.chunk.key, found.chunk.offset)):
        chunk = found.chunk
        end = chunk.offset + chunk.nbytes
        if window:
            near = window[0].chunk.key == chunk.key and chunk.offset - stop <= _GAP_BYTES
            if not near or end - window[0].chunk.offset > _WINDOW_BYTES:
                yield window
                window, stop = [], 0
        stop = max(stop, end)
        window.append(found)
    if window:
        yield window


def _window_bytes(window: Sequence[ItemTargets], store: ReadStore) -> memoryview:
    key, start = window[0].chunk.key, window[0].chunk.offset
    stop = max(found.chunk.offset + found.chunk.nbytes for found in window)
    # Do not allocate memory for a stated length: only bytes that exist are requested.
    there = stop if stop - start <= _WINDOW_BYTES else min(stop, store.size(key))
    data = store.get(key, start, there) if start < there else b""
    if len(data) != stop - start:
        raise CorruptCheckpointError(
            f"{key!r} is truncated: it ends after {start + len(data)} bytes; expected items up to byte {stop}; restore "
            "it from a copy, or load another checkpoint",
            key=key,
            start=start,
            stop=stop,
        )
    return memoryview(data)


@contextmanager
def _about(chunk: StoredItem) -> Iterator[None]:
    """Attach the byte range of an item to errors, whose own range may be relative to the item."""
    try:
        yield
    except CorruptCheckpointError as error:
        stop = chunk.offset + chunk.nbytes
        raise type(error)(str(error), key=chunk.key, start=chunk.offset, stop=stop) from error


def _copy(tree: TreeMetadata, found: ItemTargets, stored: memoryview, templates: _Templates) -> None:
    """Fill the destinations from an item in memory."""
    chunk = found.chunk
    origin = chunk.offset
    if chunk.transforms:
        limit = _MOST_GROWTH * _chunk_spec(tree, found).nbytes + _MOST_AROUND
        path = format_path(tree.paths[found.leaf])
        stored = memoryview(undone(stored, chunk.transforms, what=path, key=chunk.key, limit=limit))
        origin = 0

    expected = _chunk_spec(tree, found)
    known = templates.match(expected, stored)
    if known is not None:
        _fill(found, known[1], bytes(known[0]))
        return

    def fetch(start: int, stop: int) -> bytes:
        return bytes(stored[max(start - origin, 0) : max(stop - origin, 0)])

    place, members = _place(tree, found, fetch, origin, origin + len(stored))
    _fill(found, place, inflated(place.storage, fetch))
    templates.learn(expected, stored, origin, members, f"data/{place.tensor.storage}", place)


def _read_large(tree: TreeMetadata, found: ItemTargets, store: ReadStore) -> ChunkRead | None:
    """Return the chunk to read, or None if the elements are not in C order and were copied already."""
    chunk = found.chunk

    def fetch(start: int, stop: int) -> bytes:
        return store.get(chunk.key, start, stop)

    place, _ = _place(tree, found, fetch, chunk.offset, chunk.offset + chunk.nbytes)
    storage, tensor = place.storage, place.tensor
    if place.is_tile and not storage.big_endian:
        itemsize = found.targets[0][2].itemsize
        alone = tensor.offset == 0 and tensor.spec.nbytes == storage.nbytes
        whole = alone and is_read_whole([box for _, box, _ in found.targets], chunk.box, itemsize)
        checksum = storage.checksum if whole else None
        return ChunkRead(chunk.key, place.extent[0], chunk.box, itemsize, tuple(found.targets), checksum)
    _fill(found, place, None if storage.compression == STORED else inflated(storage, fetch), store)
    return None


def _place(
    tree: TreeMetadata, found: ItemTargets, fetch: Fetch, start: int, stop: int
) -> tuple[Place, Mapping[str, ZipMember]]:
    """Locate the elements of an item and validate them against the checkpoint. Also return the members."""
    key, path = found.chunk.key, format_path(tree.paths[found.leaf])
    members = torch_members(read_zip(fetch, start, stop, key=key))
    expected = _chunk_spec(tree, found)
    pickle = members.get("data.pkl")
    value = None
    if pickle is not None:
        limit = max_pickle_bytes(found.chunk.nbytes)  # not the item's length: it may have been compressed as a whole
        value, _ = read_pickle(read_member(fetch, pickle, key=key, limit=limit), key=key)
    tensor = stored_tensor(value, key=key, path=path)
    if tensor is None or tensor.spec != expected:
        raise CorruptCheckpointError(
            f"{path}: expected {expected} at byte {found.chunk.offset} of {key!r}, found "
            f"{'no tensor' if tensor is None else tensor.spec}; restore the file from a copy, or load another "
            "checkpoint",
            key=key,
        )
    member = members.get(f"data/{tensor.storage}")
    if member is None:
        raise CorruptCheckpointError(
            f"{path}: the item at byte {found.chunk.offset} of {key!r} has no elements; restore the file from a "
            "copy, or load another checkpoint",
            key=key,
        )
    check_bounds(tensor, member.size, key=key, path=path)
    order = members.get("byteorder")
    big_endian = order is not None and read_member(fetch, order, key=key) == b"big"
    return Place(tensor, StoredBytes.of_member(key, member, big_endian=big_endian)), members


def _fill(found: ItemTargets, place: Place, whole: bytes | None, store: ReadStore | None = None) -> None:
    """Fill the destinations from all bytes of a storage, or from the store, one slab at a time."""
    chunk = found.chunk
    for _, box, target in found.targets:
        common = box.intersect(chunk.box)
        if common is None:
            continue
        origin = chunk.box.start
        start = tuple([low - zero for low, zero in zip(common.start, origin, strict=True)])
        stop = tuple([high - zero for high, zero in zip(common.stop, origin, strict=True)])
        extra = place.tensor.shape[len(start) :]  # bytes of an element whose dtype torch lacks
        part = gathered_box(place, Box((*start, *[0] * len(extra)), (*stop, *extra)), whole, store)
        if part.dtype != target.dtype:
            part = part.reshape(-1).view(target.dtype).reshape(common.shape)
        target[common.within(box)] = part


def _chunk_spec(tree: TreeMetadata, found: ItemTargets) -> ArraySpec:
    record = tree.leaves[found.leaf]
    assert isinstance(record, ArrayRecord)  # a plan contains arrays only
    return physical_spec(ArraySpec(found.chunk.box.shape, record.spec.dtype))
