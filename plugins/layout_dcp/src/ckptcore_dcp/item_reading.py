"""Reading chunks that are items of torch.save: of checkpoints that torch wrote, or other software like it.

An item is a zip file. Its directory says where the pickle and the elements are, the pickle how these lie. Elements that lie
in C order are moved straight into place, and only those that are wanted; others are gathered.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import zstandard
from isal import isal_zlib

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, ArraySpec, Checksum, HostArray, TileRead, TreeMetadata, format_path
from ckptcore.protocols import ReadStore
from ckptcore_dcp.chunk_targets import ChunkTargets
from ckptcore_dcp.dtypes import physical_spec
from ckptcore_dcp.pickles import read_pickle
from ckptcore_dcp.tensors import StoredTensor, stored_tensor
from ckptcore_dcp.zips import ZipMember, read_member, read_zip, torch_members

__all__ = ["DescriptorSum", "read_items"]

Fetch = Callable[[int, int], bytes]

_SMALL_BYTES: Final = 1 << 18
"""Items up to this size are read whole, and neighbours with them."""
_WINDOW_BYTES: Final = 4 << 20
_GAP_BYTES: Final = 1 << 14
_MOST_AROUND: Final = 1 << 20
"""What an item may have beside its elements, in bytes."""


@dataclass(frozen=True, slots=True)
class DescriptorSum:
    """The CRC-32 in a data descriptor, which stands behind the bytes of a member. Any thread.

    Attributes:
        sizes: what stands behind the checksum: the size of the member, compressed and not.
    """

    sizes: bytes

    @property
    def name(self) -> str:
        """CRC-32"""
        return "CRC-32"

    @property
    def nbytes(self) -> int:
        """Of the whole descriptor."""
        return 8 + len(self.sizes)

    def of(self, data: memoryview) -> int:
        """The CRC-32 of zip and zlib."""
        return isal_zlib.crc32(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """The CRC-32 of two runs of bytes, one after the other."""
        return isal_zlib.crc32_combine(first, second, second_bytes)

    def encode(self, value: int) -> bytes:
        """The whole descriptor."""
        return b"PK\x07\x08" + value.to_bytes(4, "little") + self.sizes


class _Elements(NamedTuple):
    """Where the elements of an item are.

    Attributes:
        member: the bytes of the storage.
        tensor: how the elements lie in it.
    """

    member: ZipMember
    tensor: StoredTensor
    big_endian: bool


def read_items(tree: TreeMetadata, wanted: Sequence[ChunkTargets], store: ReadStore) -> Iterator[int]:
    """Fill targets; yields the number of each once all of its chunks are there and verified as far as their format can.

    Raises:
        CorruptCheckpointError: an item is not what its checkpoint says of it, or its checksum is wrong.
        UnsupportedLeafError: it is a tensor that no array can hold.
    """
    left: dict[int, int] = {}
    for found in wanted:
        for number, _, _ in found.targets:
            left[number] = left.get(number, 0) + 1
    small, large = _split(wanted)
    tiles: list[TileRead] = []
    for found in large:
        tile = _read_large(tree, found, store)
        if tile is not None:
            tiles.append(tile)
        else:
            yield from _finished(found, left)
    for window in _windows(small):
        yield from _read_window(tree, window, store, left)
    in_tiles = {number: 0 for tile in tiles for number, _, _ in tile.targets}
    for tile in tiles:
        for number, _, _ in tile.targets:
            in_tiles[number] += 1
    for number in store.read_tiles(tiles):
        left[number] -= in_tiles[number]
        if not left[number]:
            yield number


def _finished(found: ChunkTargets, left: dict[int, int]) -> Iterator[int]:
    for number, _, _ in found.targets:
        left[number] -= 1
        if not left[number]:
            yield number


def _split(wanted: Sequence[ChunkTargets]) -> tuple[list[ChunkTargets], list[ChunkTargets]]:
    small: list[ChunkTargets] = []
    large: list[ChunkTargets] = []
    for found in wanted:
        (small if found.chunk.nbytes <= _SMALL_BYTES or found.chunk.transforms else large).append(found)
    small.sort(key=lambda found: (found.chunk.key, found.chunk.offset))
    return small, large


def _windows(small: Sequence[ChunkTargets]) -> Iterator[Sequence[ChunkTargets]]:
    """Items that are read by one request."""
    window: list[ChunkTargets] = []
    stop = 0
    for found in small:
        chunk = found.chunk
        end = chunk.offset + chunk.nbytes
        near = window and window[0].chunk.key == chunk.key and chunk.offset - stop <= _GAP_BYTES
        if window and not (near and end - window[0].chunk.offset <= _WINDOW_BYTES):
            yield window
            window = []
        stop = max(stop, end) if window else end
        window.append(found)
    if window:
        yield window


def _read_window(
    tree: TreeMetadata, window: Sequence[ChunkTargets], store: ReadStore, left: dict[int, int]
) -> Iterator[int]:
    key, start = window[0].chunk.key, window[0].chunk.offset
    stop = max(found.chunk.offset + found.chunk.nbytes for found in window)
    data = memoryview(store.get(key, start, stop))
    if len(data) != stop - start:
        raise CorruptCheckpointError(
            f"{key} ends after {start + len(data)} bytes, where the metadata of the checkpoint has items up to byte {stop}; "
            "restore the file from a copy, or load another checkpoint",
            key=key,
            start=start,
            stop=stop,
        )
    for found in window:
        chunk = found.chunk
        item = data[chunk.offset - start : chunk.offset - start + chunk.nbytes]
        for transform in reversed(chunk.transforms):
            item = _undone(transform, item, tree, found)
        _copy(tree, found, item)
        yield from _finished(found, left)


def _undone(transform: str, item: memoryview, tree: TreeMetadata, found: ChunkTargets) -> memoryview:
    if transform != "stream.zstd/1":
        raise UnsupportedLeafError(
            f"{_path(tree, found)} was stored through {transform!r}, which only the software knows that wrote it; expected no "
            "transform, or 'stream.zstd/1'; load it with that software and save it again without"
        )
    # As much as the elements can take, a few times over for tensors that share a larger storage.
    limit = 4 * _chunk_spec(tree, found).nbytes + _MOST_AROUND
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    pieces: list[bytes] = []
    held = 0
    try:
        for position in range(0, len(item), 1 << 16):
            piece = decompressor.decompress(item[position : position + (1 << 16)])
            held += len(piece)
            if held > limit:
                raise CorruptCheckpointError(
                    f"{_path(tree, found)}: {found.chunk.key} has more than {limit} bytes where {_chunk_spec(tree, found)} is "
                    "compressed; restore the file from a copy, or load another checkpoint",
                    key=found.chunk.key,
                )
            pieces.append(piece)
    except zstandard.ZstdError as error:
        raise CorruptCheckpointError(
            f"{_path(tree, found)}: {found.chunk.key} cannot be decompressed: {error}; restore the file from a copy, or load "
            "another checkpoint",
            key=found.chunk.key,
        ) from error
    return memoryview(b"".join(pieces))


def _copy(tree: TreeMetadata, found: ChunkTargets, item: memoryview) -> None:
    """Fill targets from an item that is in memory."""

    def fetch(start: int, stop: int) -> bytes:
        return bytes(item[start:stop])

    elements = _elements(tree, found, fetch, 0, len(item))
    member = elements.member
    data = read_member(fetch, member, key=found.chunk.key)
    _gather(tree, found, elements, data, 0)


def _read_large(tree: TreeMetadata, found: ChunkTargets, store: ReadStore) -> TileRead | None:
    """The tile to read; None if elements do not lie in C order, and are in their places now."""
    chunk = found.chunk

    def fetch(start: int, stop: int) -> bytes:
        return store.get(chunk.key, start, stop)

    elements = _elements(tree, found, fetch, chunk.offset, chunk.offset + chunk.nbytes)
    member, tensor = elements.member, elements.tensor
    itemsize = found.targets[0][2].itemsize
    spec = _chunk_spec(tree, found)
    if _in_order(tensor) and not elements.big_endian and member.compression == 0:
        whole = tensor.offset == 0 and spec.nbytes == member.nbytes
        checksum = _descriptor(fetch, member) if whole and _most_is_wanted(found) else None
        offset = member.start + tensor.offset * itemsize
        return TileRead(chunk.key, offset, chunk.box, itemsize, tuple(found.targets), checksum)
    if member.compression:
        _gather(tree, found, elements, read_member(fetch, member, key=chunk.key), 0)
        return None
    first, last = _span(tensor)
    start, stop = first * itemsize, last * itemsize
    _gather(tree, found, elements, fetch(member.start + start, member.start + stop), start)
    return None


def _elements(tree: TreeMetadata, found: ChunkTargets, fetch: Fetch, start: int, stop: int) -> _Elements:
    """Where the elements of an item between two offsets are; what it is compared with what its checkpoint says."""
    key = found.chunk.key
    path = _path(tree, found)
    members = torch_members(read_zip(fetch, start, stop, key=key))
    pickle = members.get("data.pkl")
    if pickle is None:
        raise CorruptCheckpointError(f"{path}: {key} has no tensor at byte {found.chunk.offset}", key=key)
    value, _ = read_pickle(read_member(fetch, pickle, key=key), key=key)
    tensor = stored_tensor(value, key=key, path=path)
    expected = _chunk_spec(tree, found)
    if tensor is None or ArraySpec(tensor.shape, tensor.dtype) != expected:
        what = "something else" if tensor is None else ArraySpec(tensor.shape, tensor.dtype)
        raise CorruptCheckpointError(
            f"{path}: expected {expected} at byte {found.chunk.offset} of {key}, found {what}; restore the file from a copy, "
            "or load another checkpoint",
            key=key,
        )
    member = members.get(f"data/{tensor.storage}")
    first, last = _span(tensor)
    if member is None or first < 0 or last * expected.numpy_dtype.itemsize > member.size:
        raise CorruptCheckpointError(
            f"{path}: the item at byte {found.chunk.offset} of {key} has fewer elements than {expected} has; restore the file "
            "from a copy, or load another checkpoint",
            key=key,
        )
    order = members.get("byteorder")
    big_endian = order is not None and read_member(fetch, order, key=key) == b"big"
    return _Elements(member, tensor, big_endian)


def _gather(tree: TreeMetadata, found: ChunkTargets, elements: _Elements, data: bytes, start: int) -> None:
    """Fill targets from bytes of a storage, that begin at byte `start` of it."""
    spec = _chunk_spec(tree, found)
    dtype = spec.numpy_dtype
    tensor = elements.tensor
    stored: HostArray = np.ndarray(
        tensor.shape,
        dtype.newbyteorder(">") if elements.big_endian else dtype,
        data,
        tensor.offset * dtype.itemsize - start,
        tuple([step * dtype.itemsize for step in tensor.strides]),
    )
    logical = found.targets[0][2].dtype
    if logical != dtype:
        stored = np.ascontiguousarray(stored).view(logical)
        stored = stored.reshape(found.chunk.box.shape)
    for _, box, target in found.targets:
        common = box.intersect(found.chunk.box)
        if common is not None:
            target[common.within(box)] = stored[common.within(found.chunk.box)]


def _descriptor(fetch: Fetch, member: ZipMember) -> Checksum | None:
    """The checksum behind a member, if there is one and it is that of the directory."""
    sizes = struct.pack("<2Q" if member.size >= 0xFFFFFFFF else "<2I", member.nbytes, member.size)
    descriptor = DescriptorSum(sizes)
    stop = member.start + member.nbytes
    return descriptor if fetch(stop, stop + descriptor.nbytes) == descriptor.encode(member.crc) else None


def _most_is_wanted(found: ChunkTargets) -> bool:
    """Whether so much of a chunk is asked for that reading all of it, to compare its checksum, is worth it."""
    parts = [box.intersect(found.chunk.box) for _, box, _ in found.targets]
    return 2 * sum(part.size for part in parts if part is not None) >= found.chunk.box.size


def _in_order(tensor: StoredTensor) -> bool:
    """Whether elements lie in C order without gaps."""
    step = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def _span(tensor: StoredTensor) -> tuple[int, int]:
    """The half-open range of elements of the storage that a tensor touches; strides are not negative."""
    if 0 in tensor.shape:
        return tensor.offset, tensor.offset
    reach = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.strides, strict=True))
    return tensor.offset, tensor.offset + reach + 1


def _chunk_spec(tree: TreeMetadata, found: ChunkTargets) -> ArraySpec:
    record = tree.leaves[found.leaf]
    assert isinstance(record, ArrayRecord)  # a plan has no other items
    return physical_spec(ArraySpec(found.chunk.box.shape, record.spec.dtype))


def _path(tree: TreeMetadata, found: ChunkTargets) -> str:
    return format_path(tree.paths[found.leaf])
