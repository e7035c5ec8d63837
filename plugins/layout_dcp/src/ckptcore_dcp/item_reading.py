"""Reader of chunks that are torch.save items, written by torch or compatible software.

An item is a zip file. Its directory locates the pickle and the elements; the pickle states shape
and strides. Small and compressed items are read whole. Of other items only the requested elements
are read: directly into the destination if they are in C order, otherwise by gathering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ckptcore.errors import CorruptCheckpointError, converts_errors
from ckptcore.model import ArrayRecord, ArraySpec, Box, ChunkRead, HostArray, TreeMetadata, format_path
from ckptcore.protocols import ReadStore
from ckptcore_dcp.dtypes import physical_spec
from ckptcore_dcp.item_templates import TemplateCache
from ckptcore_dcp.pickles import read_pickle
from ckptcore_dcp.storages import ArrayLocation, StoredBytes, read_box, read_storage, should_read_whole
from ckptcore_dcp.stored_tensors import check_bounds, stored_tensor
from ckptcore_dcp.transforms import undo_transforms
from ckptcore_dcp.zip_directories import STORED, Fetch
from ckptcore_dcp.zips import ZipMember, max_pickle_bytes, read_member, read_zip, torch_members

_Templates: TypeAlias = TemplateCache[ArraySpec, ArrayLocation]

_SMALL_BYTES: Final = 1 << 18
"""Items up to this size, and compressed items of any size, are read whole, together with their neighbours."""
_WINDOW_BYTES: Final = 4 << 20
_GAP_BYTES: Final = 1 << 14
_MAX_GROWTH: Final = 4
"""Maximum ratio of a decompressed item to its elements: the tensor may be a view of a larger storage."""
_EXTRA_BYTES: Final = 1 << 20
"""Additional bytes allowed for a decompressed item."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A torch.save item with the elements of a box of an array.

    Attributes:
        box: the box in the array.
        key: the object that contains the item.
        offset: offset of the item in the object, in bytes.
        nbytes: stored length of the item, in bytes.
        transforms: names of its transforms in torch (``stream.zstd/1``), in the order in which a
            reader reverses them.
    """

    box: Box
    key: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()


@dataclass(slots=True)
class ItemRead:
    """An item, and the destinations of its elements.

    Attributes:
        leaf: the array of the item.
        chunk: the item.
        targets: number, box and buffer of each destination.
    """

    leaf: int
    chunk: StoredItem
    targets: list[tuple[int, Box, HostArray]] = field(default_factory=list)


def read_items(
    tree: TreeMetadata, wanted: Sequence[ItemRead], store: ReadStore, unverified: set[tuple[int, StoredBytes]]
) -> Iterator[int]:
    """Fill the destinations. Yield the number of each once all of its chunks are read and verified.

    Verifies the CRC-32 of the elements of an item, unless only a part of them is read. Adds the leaf and the storage of
    items that are not verified to `unverified`.

    Raises:
        CorruptCheckpointError: an item does not match its checkpoint, or its checksum is wrong.
        UnsupportedLeafError: an item has a tensor that no array can represent, or an unknown transform.
    """
    remaining: dict[int, int] = {}
    for found in wanted:
        for number, _, _ in found.targets:
            remaining[number] = remaining.get(number, 0) + 1
    chunks: list[ChunkRead] = []
    for found in wanted:
        if not _is_small(found):
            with _error_range(found.chunk):
                chunk = _read_large(tree, found, store, unverified)
            if chunk is None:
                yield from _completed(found, remaining)
            else:
                chunks.append(chunk)
    templates: _Templates = TemplateCache()
    for group in _read_groups([found for found in wanted if _is_small(found)]):
        data = _group_bytes(group, store)
        for found in group:
            start = found.chunk.offset - group[0].chunk.offset
            with _error_range(found.chunk):
                _copy_from_memory(tree, found, data[start : start + found.chunk.nbytes], templates, unverified)
            yield from _completed(found, remaining)
    counts: dict[int, int] = {}
    for chunk in chunks:
        for number, _, _ in chunk.targets:
            counts[number] = counts.get(number, 0) + 1
    for number in store.read_chunks(chunks):
        remaining[number] -= counts[number]
        if not remaining[number]:
            yield number


def _is_small(found: ItemRead) -> bool:
    return found.chunk.nbytes <= _SMALL_BYTES or bool(found.chunk.transforms)


def _completed(found: ItemRead, remaining: dict[int, int]) -> Iterator[int]:
    for number, _, _ in found.targets:
        remaining[number] -= 1
        if not remaining[number]:
            yield number


def _read_groups(small: Sequence[ItemRead]) -> Iterator[Sequence[ItemRead]]:
    """Group nearby items, so that one request reads each group."""
    group: list[ItemRead] = []
    stop = 0
    for found in sorted(small, key=lambda found: (found.chunk.key, found.chunk.offset)):
        chunk = found.chunk
        end = chunk.offset + chunk.nbytes
        if group:
            near = group[0].chunk.key == chunk.key and chunk.offset - stop <= _GAP_BYTES
            if not near or end - group[0].chunk.offset > _WINDOW_BYTES:
                yield group
                group, stop = [], 0
        stop = max(stop, end)
        group.append(found)
    if group:
        yield group


def _group_bytes(group: Sequence[ItemRead], store: ReadStore) -> memoryview:
    key, start = group[0].chunk.key, group[0].chunk.offset
    stop = max(found.chunk.offset + found.chunk.nbytes for found in group)
    # The lengths in an item are untrusted: request more than a window only if the bytes exist.
    end_of_read = stop if stop - start <= _WINDOW_BYTES else min(stop, store.size(key))
    data = store.get(key, start, end_of_read) if start < end_of_read else b""
    if len(data) != stop - start:
        raise CorruptCheckpointError(
            f"{key!r} is truncated: it ends after {start + len(data)} bytes; expected items up to byte {stop}; restore "
            "it from a copy, or load another checkpoint",
            key=key,
            start=start,
            stop=stop,
        )
    return memoryview(data)


@converts_errors
def _error_range(chunk: StoredItem) -> Iterator[None]:
    """Attach the byte range of an item to errors, whose own range may be relative to the item."""
    try:
        yield
    except CorruptCheckpointError as error:
        stop = chunk.offset + chunk.nbytes
        raise type(error)(str(error), key=chunk.key, start=chunk.offset, stop=stop) from error


def _copy_from_memory(
    tree: TreeMetadata,
    found: ItemRead,
    stored: memoryview,
    templates: _Templates,
    unverified: set[tuple[int, StoredBytes]],
) -> None:
    """Fill the destinations from an item in memory."""
    chunk = found.chunk
    origin = chunk.offset
    if chunk.transforms:
        limit = _MAX_GROWTH * _chunk_spec(tree, found).nbytes + _EXTRA_BYTES
        path = format_path(tree.paths[found.leaf])
        stored = memoryview(undo_transforms(stored, chunk.transforms, what=path, key=chunk.key, limit=limit))
        origin = 0

    expected = _chunk_spec(tree, found)
    known = templates.match(expected, stored)
    if known is not None:
        _fill_targets(found, known[1], bytes(known[0]))
        return

    def fetch(start: int, stop: int) -> bytes:
        return bytes(stored[max(start - origin, 0) : max(stop - origin, 0)])

    location, members = _locate(tree, found, fetch, origin, origin + len(stored))
    _fill_targets(found, location, read_storage(location.storage, fetch))
    if not location.storage.crc:
        unverified.add((found.leaf, StoredBytes(chunk.key, chunk.offset, chunk.nbytes)))
    templates.add(expected, stored, origin, members, f"data/{location.tensor.storage}", location)


def _read_large(
    tree: TreeMetadata, found: ItemRead, store: ReadStore, unverified: set[tuple[int, StoredBytes]]
) -> ChunkRead | None:
    """Return the chunk to read. If its elements cannot be copied directly, fill the destinations and return None."""
    chunk = found.chunk

    def fetch(start: int, stop: int) -> bytes:
        return store.get(chunk.key, start, stop)

    location, _ = _locate(tree, found, fetch, chunk.offset, chunk.offset + chunk.nbytes)
    storage, tensor = location.storage, location.tensor
    if location.is_contiguous and not storage.big_endian:
        itemsize = found.targets[0][2].itemsize
        alone = tensor.offset == 0 and tensor.spec.nbytes == storage.nbytes
        whole = alone and should_read_whole([box for _, box, _ in found.targets], chunk.box, itemsize)
        checksum = storage.checksum if whole else None
        if checksum is None:
            unverified.add((found.leaf, storage))
        return ChunkRead(chunk.key, location.extent[0], chunk.box, itemsize, tuple(found.targets), checksum)
    if storage.compression == STORED or not storage.crc:
        unverified.add((found.leaf, storage))
    _fill_targets(found, location, None if storage.compression == STORED else read_storage(storage, fetch), store)
    return None


def _locate(
    tree: TreeMetadata, found: ItemRead, fetch: Fetch, start: int, stop: int
) -> tuple[ArrayLocation, Mapping[str, ZipMember]]:
    """Locate the elements of an item and validate them against the checkpoint. Also return the members."""
    key, path = found.chunk.key, format_path(tree.paths[found.leaf])
    members = torch_members(read_zip(fetch, start, stop, key=key))
    expected = _chunk_spec(tree, found)
    pickle = members.get("data.pkl")
    value = None
    if pickle is not None:
        limit = max_pickle_bytes(found.chunk.nbytes)  # by stored length; `stop - start` may be decompressed length
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
    return ArrayLocation(tensor, StoredBytes.of_member(key, member, big_endian=big_endian)), members


def _fill_targets(
    found: ItemRead, location: ArrayLocation, whole: bytes | None, store: ReadStore | None = None
) -> None:
    """Fill the destinations from all bytes of a storage, or from the store, one slab at a time."""
    chunk = found.chunk
    for _, box, target in found.targets:
        common = box.intersect(chunk.box)
        if common is None:
            continue
        origin = chunk.box.start
        start = tuple([low - zero for low, zero in zip(common.start, origin, strict=True)])
        stop = tuple([high - zero for high, zero in zip(common.stop, origin, strict=True)])
        extra = location.tensor.shape[len(start) :]  # bytes of an element whose dtype torch lacks
        part = read_box(location, Box((*start, *[0] * len(extra)), (*stop, *extra)), whole, store)
        if part.dtype != target.dtype:
            part = part.reshape(-1).view(target.dtype).reshape(common.shape)
        target[common.within(box)] = part


def _chunk_spec(tree: TreeMetadata, found: ItemRead) -> ArraySpec:
    record = tree.leaves[found.leaf]
    assert isinstance(record, ArrayRecord)  # a plan contains arrays only
    return physical_spec(ArraySpec(found.chunk.box.shape, record.spec.dtype))
