"""Reader of chunks that are torch.save items, written by torch or compatible software.

An item is a zip file. Its directory locates the pickle and the elements; the pickle states shape
and strides. Small and compressed items are read whole. Of other items only the requested elements
are read: directly into the destination if they are in C order, otherwise by gathering.

Items from one writer share most bytes, so a template parses similar items quickly. The first item of a kind is read
by the general zip reader and becomes a template. A later item matches if it has the same length and the same bytes
everywhere except in the variable parts: the content of one member, whose CRC-32 is verified; the content of
`_UNREAD`, which no reader uses; and the checksums of both. All other bytes, including headers and the directory, must
equal the template, whose bytes the general reader accepted. An item that does not match is read by the general reader,
which also reports errors.

`undo_transforms` reverses the transforms that torch.distributed.checkpoint applies to items. torch 2.13.0 has one,
which compresses (``_extension.py``: ``stream.zstd/1``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias, TypeVar

import zstandard
from isal import isal_zlib

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError, converts_errors
from ckptcore.model import ArrayRecord, ArraySpec, Box, ChunkRead, HostArray, TreeMetadata, format_path
from ckptcore.protocols import ReadStore
from ckptcore_dcp.pickles import read_pickle
from ckptcore_dcp.storages import ArrayLocation, StoredBytes, read_box, read_storage, should_read_whole
from ckptcore_dcp.stored_tensors import check_bounds, physical_spec, stored_tensor
from ckptcore_dcp.zip_directories import DIRECTORY_ENTRY, STORED, Fetch, ZipBytes, find_directory
from ckptcore_dcp.zips import ZipMember, max_pickle_bytes, read_member, read_zip, torch_members

_KNOWN: Final = "stream.zstd/1"


def undo_transforms(item: bytes | memoryview, transforms: Sequence[str], *, what: str, key: str, limit: int) -> bytes:
    """Return an item as torch.save wrote it.

    Args:
        item: the stored bytes.
        transforms: in the order in which a reader reverses them.
        what: description of the item, for errors.
        key: the object that contains it, for errors.
        limit: maximum length of the result, in bytes.

    Raises:
        UnsupportedLeafError: a transform is unknown.
        CorruptCheckpointError: the item cannot be decompressed, or is too long.
    """
    for transform in transforms:
        if transform != _KNOWN:
            raise UnsupportedLeafError(
                f"{what} was stored with the transform {transform[:80]!r}, known only to the software that wrote it; "
                f"expected no transform, or {_KNOWN!r}; load it with that software and save it without the transform"
            )
        pieces: list[bytes] = []
        left = limit
        try:
            with zstandard.ZstdDecompressor().stream_reader(item, read_across_frames=True) as reader:
                while left >= 0 and (piece := reader.read(1 << 20)):
                    pieces.append(piece)
                    left -= len(piece)
        except zstandard.ZstdError as error:
            raise CorruptCheckpointError(
                f"{what} in {key!r} cannot be decompressed: {error}; restore the file from a copy, or load another "
                "checkpoint",
                key=key,
            ) from error
        if left < 0:
            raise CorruptCheckpointError(
                f"{what} in {key!r} has more than {limit} bytes once decompressed; restore the file from a copy, or "
                "load another checkpoint",
                key=key,
            )
        item = b"".join(pieces)
    return bytes(item)


Kind = TypeVar("Kind")
Read = TypeVar("Read")

_UNREAD: Final = ".data/serialization_id"
"""A member that differs in every item: a hash of the saved data (``torch/serialization.py``)."""
_ENTRY_CRC: Final = 16
"""Offset of the CRC-32 in a directory entry, in bytes."""
_MAX_BYTES: Final = 1 << 16
"""Maximum size of a template."""
_MAX_TEMPLATES: Final = 256
"""Maximum number of templates per load."""
_MAX_PER_LENGTH: Final = 8
"""Maximum number of templates per kind and length. Padding gives items with different pickles equal lengths."""


@dataclass(frozen=True, slots=True)
class ItemTemplate:
    """An item that was read, for comparison with items that differ in one member.

    Attributes:
        nbytes: length of the item.
        same: bytes that must not differ, as (start, stop, bytes).
        start, stop: byte range of the content of the variable member, in the item.
        crc: offset in the item of the CRC-32 that the member's directory entry states.
    """

    nbytes: int
    same: Sequence[tuple[int, int, bytes]]
    start: int
    stop: int
    crc: int

    def content(self, item: memoryview) -> memoryview | None:
        """Return the verified content of the variable member, or None if the item does not match."""
        if len(item) != self.nbytes:
            return None
        for start, stop, data in self.same:
            if item[start:stop] != data:
                return None
        content = item[self.start : self.stop]
        if isal_zlib.crc32(content) != int.from_bytes(item[self.crc : self.crc + 4], "little"):
            return None
        return content


class TemplateCache(Generic[Kind, Read]):
    """Templates of one load, by kind and length of the item. Not thread-safe.

    Stores the parsed result of the first item with each template.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
        self._known: dict[tuple[Kind, int], list[tuple[ItemTemplate, Read]]] = {}
        self._remaining = _MAX_TEMPLATES

    def match(self, kind: Kind, item: memoryview) -> tuple[memoryview, Read] | None:
        """Return the content of an item that matches a template, and the template's result; None without a match."""
        for template, read in self._known.get((kind, len(item)), ()):
            content = template.content(item)
            if content is not None:
                return content, read
        return None

    def add(
        self, kind: Kind, item: memoryview, start: int, members: Mapping[str, ZipMember], differs: str, read: Read
    ) -> None:
        """Add an item that was read by the general reader as a template.

        Args:
            kind: further properties that matching items share.
            item: all bytes of the item.
            start: its offset; offsets in `members` count from the same origin.
            members: its members by torch's names.
            differs: name of the variable member.
            read: the parsed result.
        """
        if len(item) > _MAX_BYTES or not self._remaining:
            return
        known = self._known.setdefault((kind, len(item)), [])
        if len(known) >= _MAX_PER_LENGTH:
            return
        template = _build_template(bytes(item), start, members, differs)
        if template is not None:
            known.append((template, read))
            self._remaining -= 1


def _build_template(item: bytes, start: int, members: Mapping[str, ZipMember], differs: str) -> ItemTemplate | None:
    """Build a template of an item. Return None if the item is unsuitable, such as a compressed member."""
    varying = members[differs]
    if not varying.crc or varying.compression != STORED:
        return None  # without a CRC-32 the content of later items could not be verified
    entries = _entry_offsets(item)
    gaps: list[tuple[int, int]] = []
    for member in (varying, members.get(_UNREAD)):
        if member is None:
            continue
        first = member.start - start
        if member.name not in entries:
            return None  # torch does not write such names
        crc = entries[member.name] + _ENTRY_CRC
        gaps += [(first, first + member.nbytes), (crc, crc + 4)]
        if member.descriptor:  # signature, then the checksum again, which no reader needs
            gaps.append((first + member.nbytes + 4, first + member.nbytes + 8))
    gaps.sort()
    same: list[tuple[int, int, bytes]] = []
    done = 0
    for first, stop in [*gaps, (len(item), len(item))]:
        if first < done:
            return None
        same.append((done, first, item[done:first]))
        done = stop
    same.sort(key=lambda part: part[1] - part[0])
    first = varying.start - start
    return ItemTemplate(len(item), same, first, first + varying.nbytes, entries[varying.name] + _ENTRY_CRC)


def _entry_offsets(item: bytes) -> Mapping[str, int]:
    """Return the offset of the directory entry of each member. The directory was validated before."""
    position, stop, _ = find_directory(ZipBytes(lambda start, stop: item[start:stop], 0, len(item), "item"))
    offsets: dict[str, int] = {}
    while position < stop:
        fields = DIRECTORY_ENTRY.unpack_from(item, position)
        name = position + DIRECTORY_ENTRY.size
        offsets[item[name : name + fields[10]].decode("utf-8", "replace")] = position
        position = name + sum(fields[10:13])
    return offsets


_Templates: TypeAlias = TemplateCache[ArraySpec, ArrayLocation]

_SMALL_BYTES: Final = 1 << 18
"""Items up to this size, and compressed items of any size, are read whole, together with their neighbours."""
_WINDOW_BYTES: Final = 4 << 20
"""Maximum size of one read of several small items."""
_GAP_BYTES: Final = 1 << 14
"""Maximum gap between two small items of one read."""
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

    Verifies the CRC-32 of an item if the item is read as a whole. Adds the leaf and the storage of every other item to
    `unverified`: items read in part, large uncompressed items that are gathered, and items without a CRC-32.

    Raises:
        CorruptCheckpointError: an item does not match its checkpoint, or its checksum is wrong.
        UnsupportedLeafError: an item has a tensor that no array can represent, or an unknown transform.
    """
    remaining: dict[int, int] = {}
    for item_read in wanted:
        for number, _, _ in item_read.targets:
            remaining[number] = remaining.get(number, 0) + 1
    chunks: list[ChunkRead] = []
    for item_read in wanted:
        if not _is_small(item_read):
            with _error_range(item_read.chunk):
                chunk = _read_large(tree, item_read, store, unverified)
            if chunk is None:
                yield from _completed(item_read, remaining)
            else:
                chunks.append(chunk)
    templates: _Templates = TemplateCache()
    for group in _read_groups([item_read for item_read in wanted if _is_small(item_read)]):
        data = _group_bytes(group, store)
        for item_read in group:
            start = item_read.chunk.offset - group[0].chunk.offset
            with _error_range(item_read.chunk):
                _copy_from_memory(tree, item_read, data[start : start + item_read.chunk.nbytes], templates, unverified)
            yield from _completed(item_read, remaining)
    counts: dict[int, int] = {}
    for chunk in chunks:
        for number, _, _ in chunk.targets:
            counts[number] = counts.get(number, 0) + 1
    for number in store.read_chunks(chunks):
        remaining[number] -= counts[number]
        if not remaining[number]:
            yield number


def _is_small(item_read: ItemRead) -> bool:
    return item_read.chunk.nbytes <= _SMALL_BYTES or bool(item_read.chunk.transforms)


def _completed(item_read: ItemRead, remaining: dict[int, int]) -> Iterator[int]:
    for number, _, _ in item_read.targets:
        remaining[number] -= 1
        if not remaining[number]:
            yield number


def _read_groups(small: Sequence[ItemRead]) -> Iterator[Sequence[ItemRead]]:
    """Group nearby items, so that one request reads each group."""
    group: list[ItemRead] = []
    stop = 0
    for item_read in sorted(small, key=lambda item_read: (item_read.chunk.key, item_read.chunk.offset)):
        chunk = item_read.chunk
        end = chunk.offset + chunk.nbytes
        if group:
            near = group[0].chunk.key == chunk.key and chunk.offset - stop <= _GAP_BYTES
            if not near or end - group[0].chunk.offset > _WINDOW_BYTES:
                yield group
                group, stop = [], 0
        stop = max(stop, end)
        group.append(item_read)
    if group:
        yield group


def _group_bytes(group: Sequence[ItemRead], store: ReadStore) -> memoryview:
    key, start = group[0].chunk.key, group[0].chunk.offset
    stop = max(item_read.chunk.offset + item_read.chunk.nbytes for item_read in group)
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
    item_read: ItemRead,
    stored: memoryview,
    templates: _Templates,
    unverified: set[tuple[int, StoredBytes]],
) -> None:
    """Fill the destinations from an item in memory."""
    chunk = item_read.chunk
    origin = chunk.offset
    if chunk.transforms:
        limit = _MAX_GROWTH * _chunk_spec(tree, item_read).nbytes + _EXTRA_BYTES
        path = format_path(tree.paths[item_read.leaf])
        stored = memoryview(undo_transforms(stored, chunk.transforms, what=path, key=chunk.key, limit=limit))
        origin = 0

    expected = _chunk_spec(tree, item_read)
    known = templates.match(expected, stored)
    if known is not None:
        _fill_targets(item_read, known[1], bytes(known[0]))
        return

    def fetch(start: int, stop: int) -> bytes:
        return bytes(stored[max(start - origin, 0) : max(stop - origin, 0)])

    location, members = _locate(tree, item_read, fetch, origin, origin + len(stored))
    _fill_targets(item_read, location, read_storage(location.storage, fetch))
    if not location.storage.crc:
        unverified.add((item_read.leaf, StoredBytes(chunk.key, chunk.offset, chunk.nbytes)))
    templates.add(expected, stored, origin, members, f"data/{location.tensor.storage}", location)


def _read_large(
    tree: TreeMetadata, item_read: ItemRead, store: ReadStore, unverified: set[tuple[int, StoredBytes]]
) -> ChunkRead | None:
    """Return the chunk to read. If its elements cannot be copied directly, fill the destinations and return None."""
    chunk = item_read.chunk

    def fetch(start: int, stop: int) -> bytes:
        return store.get(chunk.key, start, stop)

    location, _ = _locate(tree, item_read, fetch, chunk.offset, chunk.offset + chunk.nbytes)
    storage, tensor = location.storage, location.tensor
    if location.is_contiguous and not storage.big_endian:
        itemsize = item_read.targets[0][2].itemsize
        alone = tensor.offset == 0 and tensor.spec.nbytes == storage.nbytes
        whole = alone and should_read_whole([box for _, box, _ in item_read.targets], chunk.box, itemsize)
        checksum = storage.checksum if whole else None
        if checksum is None:
            unverified.add((item_read.leaf, storage))
        return ChunkRead(chunk.key, location.extent[0], chunk.box, itemsize, tuple(item_read.targets), checksum)
    if storage.compression == STORED or not storage.crc:
        unverified.add((item_read.leaf, storage))
    _fill_targets(item_read, location, None if storage.compression == STORED else read_storage(storage, fetch), store)
    return None


def _locate(
    tree: TreeMetadata, item_read: ItemRead, fetch: Fetch, start: int, stop: int
) -> tuple[ArrayLocation, Mapping[str, ZipMember]]:
    """Locate the elements of an item and validate them against the checkpoint. Also return the members."""
    key, path = item_read.chunk.key, format_path(tree.paths[item_read.leaf])
    members = torch_members(read_zip(fetch, start, stop, key=key))
    expected = _chunk_spec(tree, item_read)
    pickle = members.get("data.pkl")
    value = None
    if pickle is not None:
        limit = max_pickle_bytes(item_read.chunk.nbytes)  # by stored length; `stop - start` may be decompressed length
        value, _ = read_pickle(read_member(fetch, pickle, key=key, limit=limit), key=key)
    tensor = stored_tensor(value, key=key, path=path)
    if tensor is None or tensor.spec != expected:
        raise CorruptCheckpointError(
            f"{path}: expected {expected} at byte {item_read.chunk.offset} of {key!r}, found "
            f"{'no tensor' if tensor is None else tensor.spec}; restore the file from a copy, or load another "
            "checkpoint",
            key=key,
        )
    member = members.get(f"data/{tensor.storage}")
    if member is None:
        raise CorruptCheckpointError(
            f"{path}: the item at byte {item_read.chunk.offset} of {key!r} has no elements; restore the file from a "
            "copy, or load another checkpoint",
            key=key,
        )
    check_bounds(tensor, member.size, key=key, path=path)
    order = members.get("byteorder")
    big_endian = order is not None and read_member(fetch, order, key=key) == b"big"
    return ArrayLocation(tensor, StoredBytes.of_member(key, member, big_endian=big_endian)), members


def _fill_targets(
    item_read: ItemRead, location: ArrayLocation, whole: bytes | None, store: ReadStore | None = None
) -> None:
    """Fill the destinations from all bytes of a storage, or from the store, one slab at a time."""
    chunk = item_read.chunk
    for _, box, target in item_read.targets:
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


def _chunk_spec(tree: TreeMetadata, item_read: ItemRead) -> ArraySpec:
    record = tree.leaves[item_read.leaf]
    assert isinstance(record, ArrayRecord)  # a plan contains arrays only
    return physical_spec(ArraySpec(item_read.chunk.box.shape, record.spec.dtype))
