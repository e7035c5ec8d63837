"""Encoder of items, the records in torch.distributed.checkpoint files: ``torch.save`` of one tensor or value.

An item is an uncompressed zip file: ``archive/data.pkl`` is the pickle, ``archive/data/0`` has the
elements, ``archive/version`` and ``archive/byteorder`` are constants. The CRC-32 of the elements
follows them in a zip data descriptor, and again in the directory at the end. So all bytes after the
elements depend on the checksum and are written as one segment. The checksum is computed while the
elements are copied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from isal import isal_zlib

from ckptcore.model import PLAIN_ARRAY, ArraySpec
from ckptcore_dcp.pickles import Call, Global, Persistent, Value, write_pickle
from ckptcore_dcp.stored_tensors import STORAGES, torch_dtype
from ckptcore_dcp.zip_directories import DESCRIPTOR_FOLLOWS, DIRECTORY_ENTRY, END, END64, FULL32, LOCAL_HEADER, LOCATOR
from ckptcore_dcp.zips import DescriptorChecksum

_FOLDER: Final = b"archive/"
_ALIGNMENT: Final = 64
"""Alignment of elements within an item, in bytes. torch uses the same."""
_LARGE_ALIGNMENT: Final = 4096
"""Alignment of large arrays in the file: one page, so that direct I/O needs no copy."""
_LARGE: Final = 1 << 20

_VERSION: Final = 20
_VERSION64: Final = 45
_DATE: Final = 0x21
"""1 January 1980 in zip encoding, the earliest possible date."""
_PADDING_ID: Final = 0x4246
"""Id of the extra field with which torch aligns elements, ``FB``."""
_STORAGE_OF: Final = {dtype: storage for storage, dtype in STORAGES.items()}
_HEADER_CRC: Final = 14
"""Offset of the CRC-32 in `LOCAL_HEADER`, in bytes."""
_ENTRY_CRC: Final = 16
"""Offset of the CRC-32 in `DIRECTORY_ENTRY`, in bytes."""
_TEMPLATE_BYTES: Final = 1024
"""Item templates are cached for pickles up to this size."""
_CONSTANTS: Final = ((b"version", b"3\n"), (b"byteorder", b"little"))


@dataclass(frozen=True, slots=True)
class TensorItem:
    """The bytes of an item around the elements of a tensor.

    Attributes:
        head: bytes before the elements.
        tail: bytes after the elements.
    """

    head: bytes
    tail: DescriptorChecksum


def tensor_item(spec: ArraySpec, position: int, kind: str = PLAIN_ARRAY) -> TensorItem:
    """Return the bytes of an item around the elements of a tensor.

    Args:
        spec: shape and dtype; the dtype exists in torch.
        position: offset of the item in its file, in bytes; a multiple of 64.
        kind: kind of the leaf.
    """
    alignment = _LARGE_ALIGNMENT if spec.nbytes >= _LARGE else _ALIGNMENT
    return _tensor_item(spec, torch_dtype(spec.dtype, kind), alignment, position % alignment)


@lru_cache(maxsize=1024)
def _tensor_item(spec: ArraySpec, dtype: str, alignment: int, phase: int) -> TensorItem:
    """Build the item of a tensor that begins `phase` bytes after a multiple of `alignment`.

    Cached: layers repeat, so a model needs few distinct items, and small items do not depend on
    their position.
    """
    members, front = _first_members(write_pickle(_pickled_tensor(spec, dtype), protocol=2))
    nbytes = spec.nbytes
    name = _FOLDER + b"data/0"
    unpadded = len(front) + LOCAL_HEADER.size + len(name) + 4
    padding = -(phase + unpadded) % alignment
    start = len(front)
    large = nbytes >= FULL32
    header = LOCAL_HEADER.pack(
        b"PK\x03\x04",
        _VERSION64 if large else _VERSION,
        DESCRIPTOR_FOLLOWS,
        0,
        0,
        _DATE,
        0,
        0,
        0,
        len(name),
        4 + padding,
    )
    head = b"".join([front, header, name, struct.pack("<2H", _PADDING_ID, padding), b"Z" * padding])
    sizes = struct.pack("<2Q" if large else "<2I", nbytes, nbytes)
    directory = len(head) + nbytes + 8 + len(sizes)
    before, after = _directory_entry(name, nbytes, start, DESCRIPTOR_FOLLOWS)
    entries = b"".join([_whole_entry(member) for member in members])
    end = _end_records(len(members) + 1, len(entries) + len(before) + 4 + len(after), directory)
    return TensorItem(head, DescriptorChecksum((b"PK\x07\x08", sizes + entries + before, after + end)))


def value_item(value: Value) -> bytes:
    """Return the complete item of a value."""
    pickle = write_pickle(value, protocol=2)
    template = _split_item_cached(len(pickle)) if len(pickle) <= _TEMPLATE_BYTES else _split_item(len(pickle))
    crc = isal_zlib.crc32(pickle).to_bytes(4, "little")
    return b"".join([template[0], crc, template[1], pickle, template[2], crc, template[3]])


def _split_item(nbytes: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Split an item with a pickle of `nbytes` bytes around its checksum, pickle and second checksum."""
    members, front = _first_members(bytes(nbytes))
    entries = b"".join([_whole_entry(member) for member in members])
    whole = front + entries + _end_records(len(members), len(entries), len(front))
    start = LOCAL_HEADER.size + len(members[0].name)
    second = len(front) + _ENTRY_CRC
    return whole[:_HEADER_CRC], whole[_HEADER_CRC + 4 : start], whole[start + nbytes : second], whole[second + 4 :]


_split_item_cached: Final = lru_cache(maxsize=1024)(_split_item)


@dataclass(frozen=True, slots=True)
class _ItemMember:
    """A zip member with known content.

    Attributes:
        name: with its folder.
        start: offset of the local header in the item, in bytes.
        nbytes, crc: length and CRC-32 of the content.
    """

    name: bytes
    start: int
    nbytes: int
    crc: int


def _first_members(pickle: bytes) -> tuple[Sequence[_ItemMember], bytes]:
    """Return the first members of an item, and its bytes up to their end."""
    first_members: list[_ItemMember] = []
    front = bytearray()
    for short, data in ((b"data.pkl", pickle), *_CONSTANTS):
        name = _FOLDER + short
        member = _ItemMember(name, len(front), len(data), isal_zlib.crc32(data))
        first_members.append(member)
        front += LOCAL_HEADER.pack(
            b"PK\x03\x04", _VERSION, 0, 0, 0, _DATE, member.crc, len(data), len(data), len(name), 0
        )
        front += name
        front += data
    return first_members, bytes(front)


def _pickled_tensor(spec: ArraySpec, dtype: str) -> Value:
    """Return the pickled form of a tensor in C order whose elements are in ``data/0``."""
    storage = _STORAGE_OF.get(dtype)
    strides: list[int] = []
    step = 1
    for extent in reversed(spec.shape):
        strides.append(step)
        step *= max(extent, 1)
    strides.reverse()
    hooks = Call(Global("collections", "OrderedDict"), ())
    shape, steps = tuple(spec.shape), tuple(strides)
    if storage is not None:
        elements = Persistent(("storage", Global("torch", storage), "0", "cpu", spec.size))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (elements, 0, shape, steps, False, hooks))
    elements = Persistent(("storage", Global("torch.storage", "UntypedStorage"), "0", "cpu", spec.nbytes))
    arguments = (elements, 0, shape, steps, False, hooks, Global("torch", dtype))
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), arguments)


def _whole_entry(member: _ItemMember) -> bytes:
    before, after = _directory_entry(member.name, member.nbytes, member.start, 0)
    return before + member.crc.to_bytes(4, "little") + after


def _directory_entry(name: bytes, nbytes: int, start: int, flags: int) -> tuple[bytes, bytes]:
    """Return the parts of a directory entry before and after its checksum. Headers begin below 4 GiB."""
    large = nbytes >= FULL32
    extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if large else b""
    version = _VERSION64 if large else _VERSION
    size = FULL32 if large else nbytes
    entry = DIRECTORY_ENTRY.pack(
        b"PK\x01\x02", version, version, flags, 0, 0, _DATE, 0, size, size, len(name), len(extra), 0, 0, 0, 0, start
    )
    return entry[:_ENTRY_CRC], entry[_ENTRY_CRC + 4 :] + name + extra


def _end_records(count: int, nbytes: int, start: int) -> bytes:
    """Return the end of a directory with `count` entries and `nbytes` bytes that begins at `start`."""
    if start + nbytes < FULL32:
        return END.pack(b"PK\x05\x06", 0, 0, count, count, nbytes, start, 0)
    record = END64.pack(b"PK\x06\x06", END64.size - 12, _VERSION64, _VERSION64, 0, 0, count, count, nbytes, start)
    locator = LOCATOR.pack(b"PK\x06\x07", 0, start + nbytes, 1)
    return record + locator + END.pack(b"PK\x05\x06", 0, 0, count, count, nbytes, FULL32, 0)
