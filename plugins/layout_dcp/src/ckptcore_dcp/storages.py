"""Storages in torch.save files and similar files: their byte ranges, and the locations of arrays in them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from isal import isal_zlib

from ckptcore.errors import CheckpointError, ChecksumError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import (
    JSON,
    ArrayRecord,
    Box,
    HostArray,
    LeafRecord,
    TreeMetadata,
    dtype_from_name,
    format_path,
    unreadable_leaf,
)
from ckptcore.protocols import ReadStore
from ckptcore_dcp.pickled_trees import Leaf, Unreadable, leaf_record
from ckptcore_dcp.pickles.literals import unquoted
from ckptcore_dcp.stored_tensors import ByteForm, StoredTensor, c_strides, check_bounds
from ckptcore_dcp.zip_directories import DEFLATED, MAX_INFLATE_RATIO, STORED, Fetch
from ckptcore_dcp.zips import DescriptorChecksum, ZipMember, read_member

_FORMS: Final[Mapping[ByteForm, int]] = {
    "bytes": STORED, "text": 1 << 16, "escaped text": 1 << 17, "escaped bytes": 1 << 18,
}  # fmt: skip
"""Values of `StoredBytes.compression` for bytes in a pickle, by `PickledBytes.form`. Texts have values above the
16-bit compression methods of a zip."""
_LATIN_1: Final = _FORMS["text"]
_ESCAPED_BYTES: Final = _FORMS["escaped bytes"]
_SLAB_BYTES: Final = 1 << 26
"""Uncompressed elements that are not in C order are gathered in reads of at most this size."""
_PIECE_BYTES: Final = 1 << 24
_MAX_COUNT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes of a torch storage.

    Attributes:
        key: the object that contains them.
        start: their offset in the object, in bytes.
        nbytes: stored length.
        size: length after decompression; `nbytes` if uncompressed.
        crc: CRC-32 of the decompressed bytes; for text in a pickle, of the text as stored; zero if unknown.
        descriptor: length of the data descriptor that follows, in bytes, as in `ZipMember`.
        compression: as in `ZipMember`, or one of `_FORMS`.
        big_endian: True if the elements are big endian, False for little endian.
        skip: decompressed bytes before the storage, such as the header of a ``.npy`` file; part of `size`.
    """

    key: str
    start: int
    nbytes: int
    size: int = -1
    crc: int = 0
    descriptor: int = 0
    compression: int = STORED
    big_endian: bool = False
    skip: int = 0

    def __post_init__(self) -> None:
        if self.size < 0:
            object.__setattr__(self, "size", self.nbytes)

    @classmethod
    def of_member(cls, key: str, member: ZipMember, *, big_endian: bool) -> StoredBytes:
        """Return the storage in a zip member."""
        return cls(
            key, member.start, member.nbytes, member.size, member.crc, member.descriptor, member.compression, big_endian
        )

    @property
    def stop(self) -> int:
        """End of the storage in the object, in bytes."""
        return self.start + self.nbytes

    @property
    def usable(self) -> int:
        """Length of the storage itself after decompression, in bytes."""
        return self.size - self.skip

    @property
    def checksum(self) -> DescriptorChecksum | None:
        """The checksum that directly follows the storage, or None."""
        if not self.crc or self.compression != STORED or self.descriptor not in (16, 24):
            return None
        sizes = struct.pack("<2I" if self.descriptor == 16 else "<2Q", self.nbytes, self.size)
        return DescriptorChecksum((b"PK\x07\x08", sizes))


def zip_storages(members: Mapping[str, ZipMember], fetch: Fetch, *, key: str) -> Mapping[str, StoredBytes]:
    """Return the storages in a torch.save zip, by key. Keys of TorchScript constants are ``constants/<key>``.

    Args:
        members: its members by torch's names.
        fetch: reads bytes of the object.
        key: the object.

    Raises:
        CorruptCheckpointError: the byte order is invalid.
    """
    order = read_member(fetch, members["byteorder"], key=key, limit=64) if "byteorder" in members else b"little"
    if order not in (b"little", b"big"):
        raise CorruptCheckpointError(f"the byte order of {key!r} is {order!r}; expected little or big", key=key)
    return {
        name.removeprefix("data/"): StoredBytes.of_member(key, member, big_endian=order == b"big")
        for name, member in members.items()
        if name.startswith(("data/", "constants/"))
    }


def pickled_storages(leaves: Sequence[Leaf], *, key: str, start: int, pickle: bytes = b"") -> Mapping[str, StoredBytes]:
    """Return the storages of NumPy arrays in a pickle, by key.

    Args:
        leaves: the leaves of the pickle.
        key: the object that contains the pickle.
        start: offset of the pickle in the object, in bytes.
        pickle: the bytes of the pickle if they were verified, to compute checksums; else empty.
    """
    verified = memoryview(pickle)
    return {
        leaf.storage: StoredBytes(
            key,
            start + leaf.pickled.start,
            leaf.pickled.nbytes,
            leaf.pickled.size,
            crc=isal_zlib.crc32(verified[leaf.pickled.start :][: leaf.pickled.nbytes]),
            compression=_FORMS[leaf.pickled.form],
            big_endian=leaf.pickled.big_endian,
        )
        for leaf in leaves
        if isinstance(leaf, StoredTensor) and leaf.pickled is not None
    }


@dataclass(frozen=True, slots=True)
class ArrayLocation:
    """Location of the elements of an array.

    Attributes:
        tensor: strides and offset in the storage. See `StoredTensor.physical`.
        storage: the bytes of the storage.
        elements: dtype of the elements, if `tensor` is an array of their bytes with one more axis; else None.
    """

    tensor: StoredTensor
    storage: StoredBytes
    elements: str | None = None

    @property
    def key(self) -> str:
        """The object that contains the elements."""
        return self.storage.key

    @property
    def is_contiguous(self) -> bool:
        """True if the object contains the elements uncompressed and in C order."""
        return self.storage.compression == STORED and self.tensor.is_contiguous

    @property
    def is_verified(self) -> bool:
        """True if reading the whole array compares the checksum of its storage. See `_chunk_read`."""
        storage = self.storage
        if storage.compression == DEFLATED:
            return bool(storage.crc)
        is_whole = self.tensor.offset == 0 and self.tensor.spec.nbytes == storage.nbytes
        return self.is_contiguous and is_whole and storage.checksum is not None

    @property
    def extent(self) -> tuple[int, int]:
        """Byte range in the object from the first to the last element; the whole storage if compressed."""
        if self.storage.compression != STORED:
            return self.storage.start, self.storage.stop
        start = self.storage.start + self.tensor.offset * self.tensor.itemsize
        return start, start + self.tensor.span * self.tensor.itemsize


class LocationColumns:
    """Collects the locations of arrays as columns.

    Attributes:
        aliases: leaves that share all elements with an earlier leaf, as in `TreeMetadata`.
    """

    def __init__(self) -> None:
        """Create an empty collection."""
        self.aliases: dict[int, int] = {}
        self._first: dict[ArrayLocation, int] = {}
        self._files: dict[str, int] = {}
        self._storages: dict[StoredBytes, int] = {}
        self._rows: list[JSON] = []

    def add(self, number: int, leaf: Leaf, storages: Mapping[str, StoredBytes], *, key: str, path: str) -> LeafRecord:
        """Return the record of a leaf, and add its location if it is an array.

        Args:
            number: number of the leaf in the tree.
            leaf: the leaf, from a pickle.
            storages: the storages of the same file.
            key: the object, for errors.
            path: path in the tree, for errors.

        Raises:
            CorruptCheckpointError: the storage of an array is too short.
        """
        if isinstance(leaf, StoredTensor):
            storage = storages.get(leaf.storage) or (StoredBytes(key, 0, 0) if 0 in leaf.shape else None)
            if storage is None:
                error = CorruptCheckpointError(
                    f"{path} in {key!r} has no elements: the storage {leaf.storage[:80]!r} is missing; restore the "
                    "file from a copy, or load another checkpoint",
                    key=key,
                )
                return unreadable_leaf(error)
            try:
                check_bounds(leaf.physical, storage.usable, key=key, path=path)
                self._add_array(number, leaf, storage)
            except UnsupportedLeafError as error:  # it expands a few bytes to too many elements
                leaf = Unreadable.of(error, path)
        return leaf_record(leaf)

    def _add_array(self, leaf: int, tensor: StoredTensor, storage: StoredBytes) -> None:
        # Tensors that share all of their elements are tied, even if their requires_grad differs.
        plain = replace(tensor, requires_grad=False, storage_bytes=0)
        original = self._first.setdefault(ArrayLocation(plain, storage), leaf)
        if original != leaf and 0 not in tensor.shape:
            self.aliases[leaf] = original
            return
        self._files.setdefault(storage.key, len(self._files))
        number = self._storages.setdefault(storage, len(self._storages))
        steps = None if tensor.is_contiguous and not tensor.in_bytes else list(tensor.physical.strides)
        self._rows.append([leaf, number, tensor.offset, steps])

    def to_json(self) -> JSON:
        """Return the state that `decode_locations` reads."""
        return {
            "files": list(self._files),
            "storages": [
                [
                    self._files[item.key],
                    item.start,
                    item.nbytes,
                    item.size,
                    item.crc,
                    item.descriptor,
                    item.compression,
                    int(item.big_endian),
                    *([item.skip] if item.skip else []),
                ]
                for item in self._storages
            ],
            "arrays": self._rows,
        }


def decode_locations(tree: TreeMetadata, state: JSON) -> Mapping[int, ArrayLocation]:
    """Return the location of each array, by leaf. The state may be hostile.

    Raises:
        CorruptCheckpointError: the state does not fit the tree.
        UnsupportedLeafError: a view expands a few bytes to too many elements.
    """
    try:
        columns: Any = state  # the errors of a hostile state are caught below
        files = columns["files"]
        storages: list[StoredBytes] = []
        for file, start, nbytes, size, crc, descriptor, compression, big, *skips in columns["storages"]:
            key = files[_natural(file)]
            if not isinstance(key, str):
                raise TypeError("a file name is expected")
            start, nbytes, size, crc, descriptor, compression = [
                _natural(number) for number in (start, nbytes, size, crc, descriptor, compression)
            ]
            (skip,) = [_natural(number) for number in skips] or [0]
            storages.append(StoredBytes(key, start, nbytes, size, crc, descriptor, compression, big == 1, skip))
            if compression != DEFLATED and compression not in _FORMS.values():
                raise ValueError("the compression of a storage is unknown")
            if size > nbytes * MAX_INFLATE_RATIO or (compression == STORED and size != nbytes):
                raise ValueError("the compressed and decompressed sizes of a storage are inconsistent")
            if skip > size or (skip and compression != DEFLATED):
                raise ValueError("a storage begins after its end")
        locations: dict[int, ArrayLocation] = {}
        for leaf, number, offset, strides in columns["arrays"]:
            record = tree.leaves[_natural(leaf)]
            if not isinstance(record, ArrayRecord):
                raise TypeError("an array is expected")
            steps = c_strides(record.spec.shape) if strides is None else tuple([_natural(step) for step in strides])
            tensor = StoredTensor("", record.spec.dtype, record.spec.shape, steps, _natural(offset), record.kind)
            elements = None
            if len(steps) == len(record.spec.shape) + 1 and steps[-1] == 1:
                elements = record.spec.dtype
                tensor = replace(tensor, strides=steps[:-1], in_bytes=True).physical
            elif len(steps) != len(record.spec.shape):
                raise ValueError("strides do not match the axes")
            storage = storages[_natural(number)]
            check_bounds(tensor, storage.usable, key=storage.key, path=format_path(tree.paths[leaf]))
            locations[leaf] = ArrayLocation(tensor, storage, elements)
        return locations
    except CheckpointError:
        raise
    except (TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"the root is corrupt: its state does not locate arrays: {error!r}") from error


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise TypeError("a non-negative integer is expected")
    return value


def damaged_storage(storage: StoredBytes, checksum: int) -> ChecksumError:
    """Return the error for a storage whose checksum differs."""
    return ChecksumError(
        f"bytes {storage.start} to {storage.stop} of {storage.key!r} are damaged: expected the CRC-32 "
        f"{storage.crc:08x} of the zip directory, found {checksum:08x}; restore the file from a copy, or load another "
        "checkpoint",
        key=storage.key,
        start=storage.start,
        stop=storage.stop,
    )


def read_storage(storage: StoredBytes, fetch: Fetch) -> bytes:
    """Return all bytes of a storage, decompressed and verified.

    Raises:
        CorruptCheckpointError: the bytes do not match the zip.
    """
    if storage.compression not in (STORED, DEFLATED):
        return _decode_text(storage, fetch(storage.start, storage.stop))
    member = ZipMember("storage", storage.start, storage.nbytes, storage.size, storage.crc, storage.compression)
    return read_member(fetch, member, key=storage.key, limit=storage.size)[storage.skip :]


def verify_storage(storage: StoredBytes, store: ReadStore) -> None:
    """Read all bytes of an uncompressed storage, and compare them with their CRC-32.

    Raises:
        ChecksumError: they differ.
    """
    checksum = 0
    for start in range(storage.start, storage.stop, _PIECE_BYTES):
        checksum = isal_zlib.crc32(store.get(storage.key, start, min(start + _PIECE_BYTES, storage.stop)), checksum)
    if checksum != storage.crc:
        raise ChecksumError(
            f"{storage.key!r} is damaged in bytes {storage.start} to {storage.stop}: expected the CRC-32 "
            f"{storage.crc:08x}, found {checksum:08x}; restore it from a copy, or load another checkpoint",
            key=storage.key,
            start=storage.start,
            stop=storage.stop,
        )


def _decode_text(storage: StoredBytes, text: bytes) -> bytes:
    try:
        if storage.compression == _ESCAPED_BYTES:
            data = unquoted(text, storage.start, storage.key)
        else:
            encoding = "utf-8" if storage.compression == _LATIN_1 else "raw-unicode-escape"
            data = text.decode(encoding).encode("latin-1")
    except UnicodeError:
        data = b""
    if len(data) != storage.size:
        raise CorruptCheckpointError(
            f"{storage.key!r} is damaged: bytes {storage.start} to {storage.stop} are not the {storage.size} bytes of "
            "an array as text; restore it from a copy, or load another checkpoint",
            key=storage.key,
            start=storage.start,
            stop=storage.stop,
        )
    return data


def read_box(location: ArrayLocation, box: Box, whole: bytes | None, store: ReadStore | None) -> HostArray:
    """Read a box of an array with any strides.

    Args:
        location: location of the array.
        box: box of its tensor.
        whole: all bytes of its storage, or None to read them from `store`.
        store: the store to read from, or None if `whole` is given.

    Raises:
        CorruptCheckpointError: bytes are missing.
    """
    buffer: HostArray = np.empty(box.shape, location.tensor.spec.numpy_dtype)
    gather(location, box, buffer, store, whole)
    finish_buffer(location, buffer)
    return buffer


def gather(location: ArrayLocation, box: Box, buffer: HostArray, store: ReadStore | None, whole: bytes | None) -> None:
    """Fill a buffer with a box of a strided array, in the stored byte order."""
    tensor, storage = location.tensor, location.storage
    itemsize, strides = tensor.itemsize, tensor.strides
    step_bytes = tuple([stride * itemsize for stride in strides])
    for slab in _slabs(box, strides, itemsize) if whole is None else (box,):
        first = tensor.offset + sum(start * stride for start, stride in zip(slab.start, strides, strict=True))
        if whole is None:
            assert store is not None  # the caller gives `store` or `whole`
            start = storage.start + first * itemsize
            stop = start + _span(slab, strides) * itemsize
            data, offset = store.get(storage.key, start, stop), 0
            if len(data) != stop - start:
                raise CorruptCheckpointError(
                    f"{storage.key!r} is cut off: it has {len(data)} of the {stop - start} bytes from byte {start} on; "
                    "restore it from a copy, or load another checkpoint",
                    key=storage.key,
                    start=start,
                    stop=stop,
                )
        else:
            data, offset = whole, first * itemsize
        stored: HostArray = np.ndarray(slab.shape, buffer.dtype, data, offset, step_bytes)
        buffer[slab.within(box)] = stored


def _span(box: Box, strides: tuple[int, ...]) -> int:
    return 1 + sum(stride * (extent - 1) for stride, extent in zip(strides, box.shape, strict=True))


def _slabs(box: Box, strides: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Split a box into parts with nearby elements. Yields the box itself if its elements overlap."""
    reach = 1
    for stride, extent in sorted(zip(strides, box.shape, strict=True)):
        if extent > 1 and stride < reach:
            yield box
            return
        reach += stride * (extent - 1)
    left = [box]
    max_elements = _SLAB_BYTES // itemsize
    while left:
        part = left.pop()
        span = _span(part, strides)
        cut = max(
            (axis for axis, extent in enumerate(part.shape) if extent > 1), key=lambda axis: strides[axis], default=None
        )
        if span <= max_elements or cut is None:
            yield part
            continue
        others = span - strides[cut] * (part.shape[cut] - 1)
        step = max(1, (max_elements - others) // strides[cut] + 1)
        left.extend(part.bands(cut, step))


def finish_buffer(location: ArrayLocation, buffer: HostArray) -> None:
    """Convert a C-contiguous buffer of stored bytes to the byte order of this machine."""
    if not location.storage.big_endian:
        return
    dtype = buffer.dtype if location.elements is None else dtype_from_name(location.elements)
    if dtype.kind == "U":
        width = 4  # a character
    else:
        width = dtype.itemsize // (2 if dtype.kind == "c" else 1)  # a component of a complex number
    # View as integers: NumPy cannot byte-swap ml_dtypes elements.
    buffer.reshape(-1).view(f"u{width}").byteswap(inplace=True)


_GAP_BYTES: Final = 1 << 16
"""Gaps up to this size between requested elements are read too, because separate reads take longer."""


def should_read_whole(wanted: Iterable[Box], whole: Box, itemsize: int) -> bool:
    """Return whether to read all elements and verify their checksum, instead of reading only the requested boxes.

    True if this adds at most a tenth to the bytes read. After resharding, a process often needs only half of the
    elements that another process saved.

    Args:
        wanted: requested boxes; may reach beyond the tensor.
        whole: box of the tensor, whose elements are in C order.
        itemsize: bytes per element.
    """
    read = sum([_bytes_read(common, whole, itemsize) for box in wanted if (common := box.intersect(whole)) is not None])
    return 11 * read >= 10 * whole.size * itemsize


def _bytes_read(box: Box, whole: Box, itemsize: int) -> int:
    """Return the bytes read for a box of a tensor, small gaps included."""
    # Per step along an axis: bytes read, bytes from first to last, and distance to the next step.
    read = span = stride = itemsize
    for extent, outer in zip(reversed(box.shape), reversed(whole.shape), strict=True):
        gap = stride - span
        read = extent * read + ((extent - 1) * gap if gap <= _GAP_BYTES else 0)
        span += (extent - 1) * stride
        stride *= outer
    return read
