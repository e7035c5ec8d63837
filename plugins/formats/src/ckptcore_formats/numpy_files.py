"""The layout `numpy`: arrays of ``numpy.save`` (``.npy``), and their archives (``.npz``).

A ``.npy`` file is a header and the elements. A ``.npz`` file is a zip of such files. Its tree is the mapping
that `numpy.load` returns: the names of the members without ``.npy``, also those with a slash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ckptcore_dcp.pickle_reading import (
    DEFLATED,
    STORED,
    Fetch,
    Fields,
    Leaf,
    Places,
    StoredBytes,
    StoredTensor,
    Unreadable,
    ZipMember,
    arrays_of,
    c_strides,
    pickled_storages,
    read_member,
    read_pickle,
    read_zip,
    tree_of,
)
from ckptcore_dcp.reading import ReadOnlyLayout
from isal import isal_zlib

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import LEAF, Node, Skeleton, ValueRecord, unreadable_leaf
from ckptcore.protocols import Inspection, ReadStore
from ckptcore_formats.inspections import FileTree, first_member, inspection_of
from ckptcore_formats.npy_headers import HEAD_BYTES, MAGIC, NpyHeader, read_header

_NPY: Final = ".npy"
_NPZ: Final = ".npz"
_SPARSE: Final = frozenset(["data", "format", "shape"])
"""Members that every archive of `scipy.sparse.save_npz` has."""
_MAX_BYTES_LEAF: Final = 1 << 20
_MAX_PICKLE_BYTES: Final = 1 << 28
"""Longest pickle of an array of objects, which is in memory as a whole."""
_INFLATED_HEAD_BYTES: Final = 1 << 14
"""Compressed bytes in which the header of a deflated member is."""


@dataclass(frozen=True, slots=True)
class NumpyLayout(ReadOnlyLayout):
    """Files of numpy.save and numpy.savez. Read-only."""

    @property
    def name(self) -> str:
        """The name "numpy"."""
        return "numpy"

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a file by its first bytes."""
        if entry is None:
            return None
        head = store.get(entry, 0, HEAD_BYTES)
        if head.startswith(MAGIC):
            return inspection_of(_read_npy(store, entry, head), "numpy.save")
        is_named = head.startswith((b"PK\x03\x04", b"PK\x05\x06")) and entry.endswith(_NPZ)
        if is_named or first_member(head).endswith(_NPY):
            found = _read_npz(store, entry)
            return None if found is None else inspection_of(found, "numpy.savez")
        return None


def _read_npy(store: ReadStore, key: str, head: bytes) -> FileTree:
    size = store.size(key)

    def fetch(start: int, stop: int) -> bytes:
        return store.get(key, start, stop)

    header = read_header(head, key, key)
    if isinstance(header, int):
        header = read_header(fetch(0, header), key, key)
    if isinstance(header, int):
        raise _cut_off(key, key, size)
    if header.dtype.hasobject:
        if size > _MAX_PICKLE_BYTES:
            raise _too_long(key, key)
        skeleton, leaves, storages = _objects(fetch(0, size), header.nbytes, key, 0)
        return FileTree(key, skeleton, leaves, storages)
    storage = StoredBytes(key, header.nbytes, max(size - header.nbytes, 0))
    skeleton, leaves = _flattened(_array(header, key, storage.usable, key))
    return FileTree(key, skeleton, leaves, _both_orders(key, storage))


def _read_npz(store: ReadStore, key: str) -> FileTree | None:
    """Return the tree of an archive, or None if the zip is of another kind."""

    def fetch(start: int, stop: int) -> bytes:
        return store.get(key, start, stop)

    members = {
        name: member for name, member in read_zip(fetch, 0, store.size(key), key=key).items() if name[-1:] != "/"
    }
    arrays = [name for name in members if name.endswith(_NPY)]
    if not key.endswith(_NPZ) and (not arrays or len(arrays) != len(members)):
        return None
    stop = {name: members[name].start + min(members[name].nbytes, _head_bytes(members[name])) for name in arrays}
    heads = store.get_many([(key, members[name].start, stop[name]) for name in arrays])
    names: list[str] = []
    children: list[Skeleton] = []
    leaves: list[Leaf | ValueRecord] = []
    storages: dict[str, StoredBytes] = {}
    found = dict(zip(arrays, heads, strict=True))
    for name, member in members.items():
        try:
            skeleton, inner, own = _member(member, found.get(name), fetch, key)
        except CorruptCheckpointError as error:  # the others can be loaded
            skeleton, inner, own = LEAF, [unreadable_leaf(error)], {}
        names.append(name.removesuffix(_NPY))
        children.append(skeleton)
        leaves += inner
        storages |= own
    if len(set(names)) != len(names):
        raise CorruptCheckpointError(
            f"{key!r} has two members that numpy.load calls by one name: unpack it, and load the .npy files", key=key
        )
    kind = "scipy.sparse matrix" if set(names) >= _SPARSE else None
    return FileTree(key, Node("dict", tuple(names), tuple(children), kind), leaves, storages)


def _head_bytes(member: ZipMember) -> int:
    return HEAD_BYTES if member.compression == STORED else _INFLATED_HEAD_BYTES


def _member(
    member: ZipMember, head: bytes | None, fetch: Fetch, key: str
) -> tuple[Skeleton, Sequence[Leaf | ValueRecord], Mapping[str, StoredBytes]]:
    """Return the tree of a member, and its storages. `head` has its first stored bytes; None: it is not an array."""
    name = f"{member.name} in {key}"
    if head is None:
        if member.size > _MAX_BYTES_LEAF:
            return LEAF, [Unreadable(f"a file of {member.size} bytes that is not an array: unpack it")], {}
        return LEAF, [read_member(fetch, member, key=key)], {}
    first = _plain_head(head, member, name, key)
    header = read_header(first, name, key)
    if isinstance(header, int):
        if member.compression == STORED:
            first = fetch(member.start, member.start + min(header, member.nbytes))
        header = read_header(first, name, key)
    if isinstance(header, int):
        raise _cut_off(name, key, member.size)
    if header.dtype.hasobject:
        if member.size > _MAX_PICKLE_BYTES:
            raise _too_long(name, key)
        content = read_member(fetch, member, key=key, limit=_MAX_PICKLE_BYTES)
        start = member.start if member.compression == STORED else None
        return _objects(content, header.nbytes, key, start)
    storage = _storage(member, header, first, key)
    skeleton, leaves = _flattened(_array(header, member.name, storage.usable, key))
    return skeleton, leaves, _both_orders(member.name, storage)


def _plain_head(head: bytes, member: ZipMember, name: str, key: str) -> bytes:
    if member.compression == STORED:
        return head
    assert member.compression == DEFLATED  # `read_zip` refuses others
    try:
        found: bytes = isal_zlib.decompressobj(-15).decompress(head, _INFLATED_HEAD_BYTES)
    except isal_zlib.error as error:  # type: ignore[misc]  # an exception, which its stubs do not say
        raise CorruptCheckpointError(
            f"{name} does not inflate: {error}; restore the file from a copy, or load another checkpoint", key=key
        ) from error
    return found


def _storage(member: ZipMember, header: NpyHeader, head: bytes, key: str) -> StoredBytes:
    """Return the elements of a member as a storage."""
    if member.compression == DEFLATED:
        skip = min(header.nbytes, member.size)
        return StoredBytes(key, member.start, member.nbytes, member.size, member.crc, compression=DEFLATED, skip=skip)
    nbytes = max(member.size - header.nbytes, 0)
    # The checksum of the elements alone: that of the header is removed from that of the member.
    crc = member.crc and member.crc ^ isal_zlib.crc32_combine(isal_zlib.crc32(head[: header.nbytes]), 0, nbytes)
    return StoredBytes(key, member.start + header.nbytes, nbytes, crc=crc)


def _both_orders(name: str, storage: StoredBytes) -> Mapping[str, StoredBytes]:
    """Return the storage for arrays in both byte orders: structures may have fields of both."""
    return {name: storage, f"{name}>": replace(storage, big_endian=True)}


def _array(header: NpyHeader, storage: str, nbytes: int, key: str) -> Fields:
    """Return the array of a header, in a storage of `nbytes`.

    Raises:
        CorruptCheckpointError: bytes are missing.
    """
    if nbytes < header.array_bytes:
        raise CorruptCheckpointError(
            f"{storage!r} is cut off: its header states {header.array_bytes} bytes of elements, and {nbytes} follow; "
            "restore the file from a copy, or load another checkpoint",
            key=key,
        )
    shape = header.shape
    strides = c_strides(shape[::-1])[::-1] if header.is_fortran else c_strides(shape)
    return arrays_of(header.dtype, shape, strides, storage)


def _flattened(found: Fields) -> tuple[Skeleton, list[Leaf]]:
    if isinstance(found, StoredTensor | str):
        return LEAF, [Unreadable(found) if isinstance(found, str) else found]
    parts = [_flattened(part) for part in found.values()]
    leaves = [leaf for _, inner in parts for leaf in inner]
    return Node("dict", tuple(found), tuple([skeleton for skeleton, _ in parts]), "numpy.void"), leaves


def _objects(
    content: bytes, start: int, key: str, origin: int | None
) -> tuple[Skeleton, Sequence[Leaf], Mapping[str, StoredBytes]]:
    """Return the tree of a pickled array of objects.

    Args:
        content: the file.
        start: offset of the pickle in it, in bytes.
        key: the object.
        origin: offset of the file in the object, in bytes; None if it is compressed.
    """
    places = None if origin is None else Places()
    value, _ = read_pickle(content, key=key, start=start, places=places)
    skeleton, leaves = tree_of(value, key=key, limit=len(content) + (1 << 16), places=places)
    storages = {} if origin is None else pickled_storages(leaves, key=key, start=origin)
    return skeleton, leaves, storages


def _cut_off(name: str, key: str, size: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name!r} is cut off: its header is longer than its {size} bytes; restore it from a copy", key=key
    )


def _too_long(name: str, key: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name!r} is a pickle of objects with more than {_MAX_PICKLE_BYTES} bytes, which is not read: save its arrays "
        "with numpy.savez",
        key=key,
    )
