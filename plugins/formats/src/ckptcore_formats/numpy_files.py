"""The layout `numpy`: arrays of ``numpy.save`` (``.npy``), and their archives (``.npz``).

A ``.npy`` file is a header and the elements. A ``.npz`` file is a zip of such files. Its tree is the mapping
that `numpy.load` returns. The keys are the member names without ``.npy``, and may contain slashes.

Source of headers of ``.npy`` files, versions 1 to 3: ``numpy/lib/_format_impl.py``. The text of a header is a Python
literal, and is parsed as one.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from ckptcore_dcp.reading import (
    DEFLATED,
    STORED,
    Fetch,
    Fields,
    Leaf,
    Places,
    ReadOnlyLayout,
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
from isal import isal_zlib

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import LEAF, Node, Skeleton, ValueRecord, unreadable_leaf
from ckptcore.protocols import Inspection, ReadStore
from ckptcore_formats.inspections import FileTree, first_member, inspection_of

MAGIC: Final = b"\x93NUMPY"
HEAD_BYTES: Final = 256
"""Size of the first read, in bytes. It contains the header of most files: NumPy aligns arrays to 64 bytes."""
_MAX_TEXT: Final = 10_000
"""Maximum length of the text of a header. NumPy has this limit too, because a long text can crash its parser."""
_MAX_AXES: Final = 64
_MAX_COUNT: Final = 1 << 62
_MAX_DEPTH: Final = 8
"""Maximum nesting of structures in a dtype."""
_LONG: Final = re.compile(r"(?<=\d)L\b")
"""The suffix of long integers of Python 2."""
_CODE: Final = re.compile(r"[<>|=]?([?bBhHiIlLqQefdFDgGpP]|[biufcmMSUVO]\d{0,9})(\[\d{0,9}[A-Za-z]{1,7}\])?")


class NpyHeader(NamedTuple):
    """The header of a file.

    Attributes:
        dtype: dtype of the elements, in their byte order.
        shape: extents.
        is_fortran: True if elements are in Fortran order.
        nbytes: length of the header, after which the elements follow.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    nbytes: int

    @property
    def array_bytes(self) -> int:
        """Length of the elements, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(data: bytes, name: str, key: str) -> NpyHeader | int:
    """Return the header at the beginning of a file, or the number of bytes that are needed to read it.

    Args:
        data: the first bytes of the file.
        name: the file or member, for errors.
        key: the object, for errors.

    Raises:
        CorruptCheckpointError: the header is invalid.
    """
    if len(data) < 12:
        return HEAD_BYTES
    major, minor = data[6], data[7]
    if data[:6] != MAGIC or major not in (1, 2, 3) or minor:
        raise _invalid(name, key, f"it begins with {data[:8]!r}; expected \\x93NUMPY and version 1, 2 or 3")
    start = 10 if major == 1 else 12
    length = int.from_bytes(data[8:start], "little")
    if length > _MAX_TEXT:
        raise _invalid(name, key, f"its header has {length} characters, and NumPy reads at most {_MAX_TEXT}")
    if len(data) < start + length:
        return start + length
    try:
        text = data[start : start + length].decode("utf-8" if major == 3 else "latin-1")
        header = _literal(text, may_be_python2=major < 3)
        if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
            raise ValueError("expected the keys descr, fortran_order and shape")
        shape, is_fortran = header["shape"], header["fortran_order"]
        if not isinstance(shape, tuple) or len(shape) > _MAX_AXES or type(is_fortran) is not bool:
            raise ValueError("the shape or the order is invalid")
        if not all(type(extent) is int and 0 <= extent < _MAX_COUNT for extent in shape):
            raise ValueError("an extent of the shape is invalid")
        if math.prod([max(extent, 1) for extent in shape]) >= _MAX_COUNT:
            raise ValueError("the shape has too many elements")
        return NpyHeader(_dtype(header["descr"], 0), shape, is_fortran, start + length)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        raise _invalid(name, key, f"its header cannot be read: {str(error)[:200]}") from error


def _literal(text: str, *, may_be_python2: bool) -> Any:
    try:
        return ast.literal_eval(text)
    except SyntaxError:
        if not may_be_python2:
            raise
        return ast.literal_eval(_LONG.sub("", text))


def _dtype(descr: Any, depth: int) -> np.dtype[Any]:
    """Return the dtype of a description, as `numpy.lib.format.descr_to_dtype` does."""
    if depth > _MAX_DEPTH:
        raise ValueError("the dtype is nested too deeply")
    if isinstance(descr, str):
        if not _CODE.fullmatch(descr):
            raise ValueError(f"{descr[:80]!r} is not a dtype")
        return np.dtype(descr)
    if isinstance(descr, tuple) and len(descr) == 2:
        return np.dtype((_dtype(descr[0], depth + 1), descr[1]))
    if not isinstance(descr, list):
        raise TypeError("the dtype is neither text nor a list of fields")
    names: list[str] = []
    formats: list[np.dtype[Any]] = []
    offsets: list[int] = []
    offset = 0
    for name, of_field, *shapes in descr:
        field = _dtype(of_field, depth + 1)
        if shapes:
            field = np.dtype((field, shapes[0]))
        name = name[1] if isinstance(name, tuple) else name  # a title and a name
        if name != "" or field.kind != "V" or field.names is not None:  # else padding
            names.append(name)
            formats.append(field)
            offsets.append(offset)
        offset += field.itemsize
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})


def _invalid(name: str, key: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name!r} is not an array of numpy.save that can be read: {reason}. Restore it from a copy, or load another "
        "checkpoint",
        key=key,
        start=0,
        stop=HEAD_BYTES,
    )


_NPY: Final = ".npy"
_NPZ: Final = ".npz"
_SPARSE: Final = frozenset(["data", "format", "shape"])
"""Members that every archive of `scipy.sparse.save_npz` has."""
_MAX_BYTES_LEAF: Final = 1 << 20
_MAX_PICKLE_BYTES: Final = 1 << 28
"""Maximum length of a pickled array of objects, which is read into memory as a whole."""
_INFLATED_HEAD_BYTES: Final = 1 << 14
"""Size of the first read of a deflated member, in compressed bytes. It contains the header."""


@dataclass(frozen=True, slots=True)
class NumpyLayout(ReadOnlyLayout):
    """Files of numpy.save and numpy.savez. Read-only."""

    name = "numpy"

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a file by its first bytes."""
        if entry is None:
            return None
        head = store.get(entry, 0, HEAD_BYTES)
        if head.startswith(MAGIC):
            return inspection_of(_read_npy(store, entry, head), "numpy.save")
        is_named = head.startswith((b"PK\x03\x04", b"PK\x05\x06")) and entry.endswith(_NPZ)
        if is_named or first_member(head).endswith(_NPY):
            arrays = _read_npz(store, entry)
            return None if arrays is None else inspection_of(arrays, "numpy.savez")
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
    by_name = dict(zip(arrays, heads, strict=True))
    for name, member in members.items():
        try:
            skeleton, inner, own = _member(member, by_name.get(name), fetch, key)
        except CorruptCheckpointError as error:  # the other members can still be loaded
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
    """Return the tree of a member, and its storages.

    `head` has the first stored bytes of an array; None for another file.
    """
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
        inflated: bytes = isal_zlib.decompressobj(-15).decompress(head, _INFLATED_HEAD_BYTES)
    except isal_zlib.error as error:  # type: ignore[misc]  # an exception, which its stubs do not say
        raise CorruptCheckpointError(
            f"{name} does not inflate: {error}; restore the file from a copy, or load another checkpoint", key=key
        ) from error
    return inflated


def _storage(member: ZipMember, header: NpyHeader, head: bytes, key: str) -> StoredBytes:
    """Return the elements of a member as a storage."""
    if member.compression == DEFLATED:
        skip = min(header.nbytes, member.size)
        return StoredBytes(key, member.start, member.nbytes, member.size, member.crc, compression=DEFLATED, skip=skip)
    nbytes = max(member.size - header.nbytes, 0)
    # CRC-32 is linear: removing the contribution of the header leaves the checksum of the elements.
    crc = member.crc and member.crc ^ isal_zlib.crc32_combine(isal_zlib.crc32(head[: header.nbytes]), 0, nbytes)
    return StoredBytes(key, member.start + header.nbytes, nbytes, crc=crc)


def _both_orders(name: str, storage: StoredBytes) -> Mapping[str, StoredBytes]:
    """Return the storage for arrays in both byte orders, because the fields of a structure may have different ones."""
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


def _flattened(fields: Fields) -> tuple[Skeleton, list[Leaf]]:
    if isinstance(fields, StoredTensor | str):
        return LEAF, [Unreadable(fields) if isinstance(fields, str) else fields]
    parts = [_flattened(part) for part in fields.values()]
    leaves = [leaf for _, inner in parts for leaf in inner]
    return Node("dict", tuple(fields), tuple([skeleton for skeleton, _ in parts]), "numpy.void"), leaves


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
