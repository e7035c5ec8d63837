"""Objects of an HDF5 file as a tree: groups as mappings, datasets as arrays. Uses h5py, on the bytes of any storage.

The HDF5 library reads through `StoredFile`, so it cannot open other files. Links to other files, external storage and
virtual datasets are not followed; they become leaves that cannot be loaded.

Global heaps contain the texts and lists of attributes. This module checks the heaps before the HDF5 library reads them,
because the library trusts the sizes in them. A size of zero would make the library loop forever.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import h5py  # type: ignore[import-untyped]
import numpy as np
from ckptcore_dcp.reading import Fields, Leaf, StoredTensor, Unreadable, arrays_of, c_strides

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, LEAF, Node, Skeleton

_MAGIC: Final = b"GCOL\x01"
_SUPERBLOCK: Final = b"\x89HDF\r\n\x1a\n"
_LEAST_BYTES: Final = 4096
_HEAP_WINDOW_BYTES: Final = 1 << 14


class HeapChecks:
    """Checks the global heaps in the bytes that the HDF5 library reads. Not thread-safe."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        """Read the width of lengths from the superblock. `fetch` returns bytes `start` to `stop` of the file."""
        self._fetch = fetch
        self._size = size
        self._checked: set[int] = set()
        self._left = _MAX_OBJECTS
        origin = 0
        head = b""
        while origin < size and (head := fetch(origin, min(origin + 16, size)))[:8] != _SUPERBLOCK:
            origin = max(2 * origin, 512)
        at = 14 if head[8:9] in (b"\0", b"\1") else 10
        self._length = head[at] if len(head) == 16 else 8

    def check(self, data: bytes, start: int) -> None:
        """Check the heaps that begin in `data`, which are the bytes of the file from offset `start` on.

        Raises:
            ValueError: a heap is damaged.
        """
        position = -1
        while (position := data.find(_MAGIC, position + 1)) >= 0:
            if start + position not in self._checked:
                self._check_heap(start + position)
                self._checked.add(start + position)

    def _check_heap(self, start: int) -> None:
        aligned = -(-(8 + self._length) // 8) * 8
        size = self._number(start + 8)
        stop = start + size
        position = start + aligned
        if not _LEAST_BYTES <= size <= self._size - start:
            self._damaged(start, f"has a size of {size} bytes")
        window, origin = b"", 0
        while position + aligned <= stop:
            self._left -= 1
            if self._left < 0:
                self._damaged(start, f"and those before it have more than {_MAX_OBJECTS} objects")
            if not origin <= position <= origin + len(window) - aligned:
                window, origin = self._fetch(position, min(position + _HEAP_WINDOW_BYTES, stop)), position
            header = window[position - origin : position - origin + aligned]
            number = int.from_bytes(header[:2], "little")
            nbytes = int.from_bytes(header[8 : 8 + self._length], "little")
            step = aligned + -(-nbytes // 8) * 8 if number else nbytes  # number 0: free space, header included
            if not aligned <= step <= stop - position:
                self._damaged(start, f"has an object of {nbytes} bytes at byte {position} (number {number})")
            position += step

    def _number(self, start: int) -> int:
        return int.from_bytes(self._fetch(start, min(start + self._length, self._size)), "little")

    def _damaged(self, start: int, reason: str) -> None:
        raise ValueError(f"the global heap at byte {start} {reason}, which cannot be")


_WINDOW_BYTES: Final = 1 << 16
_WINDOWS: Final = 8
"""Number of cached ranges. The HDF5 library alternates between the headers of groups, trees and datasets."""
_DIRECT_BYTES: Final = 1 << 15
_BEFORE: Final = 8
"""Number of bytes before each read that are checked too, because the magic of a heap may begin in the previous read."""
_MAX_DEPTH: Final = 100
_MAX_OBJECTS: Final = 1 << 20
_OBJECT_BYTES: Final = 64
"""Lower bound for the size of an object and its link, in bytes. An object with several links counts once per link."""
_ALWAYS_ALLOWED_OBJECTS: Final = 1000
_MAX_TEXT_BYTES: Final = 1 << 20
_MAX_ATTRIBUTE_BYTES: Final = 1 << 18
_MAX_GROWTH: Final = 1100
"""Maximum ratio of the size of the elements to their stored size. Deflate reaches at most 1032."""
_ALWAYS_ALLOWED_BYTES: Final = 1 << 26


class StoredFile(io.RawIOBase):
    """A range of an object as a read-only file. Not thread-safe."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, *, check_heaps: bool) -> None:
        """Open the file. Reads at most the superblock.

        Args:
            fetch: returns bytes `start` to `stop` of the file.
            size: its length, in bytes.
            check_heaps: check global heaps. True to read attributes and texts; False to read elements, which may
                look like a heap.
        """
        super().__init__()
        self._fetch = fetch
        self._size = size
        self._position = 0
        self._windows: deque[tuple[int, bytes]] = deque(maxlen=_WINDOWS)
        self._heaps: HeapChecks | None = HeapChecks(fetch, size) if check_heaps else None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer from the position on, as far as the file has bytes."""
        view = memoryview(buffer).cast("B")
        start = self._position
        stop = min(start + len(view), self._size)
        if start >= stop:
            return 0
        before = 0 if self._heaps is None else min(start, _BEFORE)
        first = start - before
        if stop - start >= _DIRECT_BYTES:
            data = self._fetch(first, stop)
        else:
            span = next((span for span in self._windows if span[0] <= first and stop <= span[0] + len(span[1])), None)
            if span is None:
                span = first, self._fetch(first, min(first + _WINDOW_BYTES, self._size))
                self._windows.append(span)
            origin, window = span
            data = window[first - origin : stop - origin]
        if self._heaps is not None:
            self._heaps.check(data, first)
            data = data[before:]
        view[: len(data)] = data
        self._position = start + len(data)
        return len(data)


def open_file(file: StoredFile) -> Any:
    """Open an HDF5 file.

    Raises:
        OSError: it is damaged.
    """
    return h5py.File(file, "r")


class Dataset(NamedTuple):
    """A dataset that the HDF5 library reads, because it has chunks or is not stored as NumPy stores its dtype.

    Attributes:
        path: its path in the file.
        rows: extent of its chunks along the first axis. Without chunks, extent of the dataset.
    """

    path: str
    rows: int


class Place(NamedTuple):
    """The byte range of a dataset.

    Attributes:
        start: its offset in the file.
        nbytes: its length.
        big_endian: True if the elements that are read from it are big endian.
    """

    start: int
    nbytes: int
    big_endian: bool


class FileObjects(NamedTuple):
    """The objects of a file.

    Attributes:
        skeleton, leaves: the tree.
        places: byte range of each array with one range, by the storage of the leaf.
        datasets: the other arrays, by the storage of the leaf.
        attributes: attributes by path. Contains only values that JSON can represent.
    """

    skeleton: Skeleton
    leaves: Sequence[Leaf]
    places: Mapping[str, Place]
    datasets: Mapping[str, Dataset]
    attributes: Mapping[str, Mapping[str, JSON]]

    @classmethod
    def of(cls, file: Any, key: str, size: int) -> FileObjects:
        """Read the objects of an open file of `size` bytes, without elements.

        Raises:
            CorruptCheckpointError: it has too many objects.
            UnsupportedLeafError: a name is not UTF-8.
        """
        walk = _Walk(key, size)
        skeleton = walk.group(file, "", ())
        return cls(skeleton, walk.leaves, walk.places, walk.datasets, walk.attributes)


class _Walk:
    """One pass over the objects of a file."""

    def __init__(self, key: str, size: int) -> None:
        self._key = key
        self._most = self._left = min(_MAX_OBJECTS, _ALWAYS_ALLOWED_OBJECTS + size // _OBJECT_BYTES)
        self._attribute_bytes = _MAX_ATTRIBUTE_BYTES
        self.leaves: list[Leaf] = []
        self.places: dict[str, Place] = {}
        self.datasets: dict[str, Dataset] = {}
        self.attributes: dict[str, Mapping[str, JSON]] = {}

    def group(self, group: Any, path: str, above: tuple[object, ...]) -> Skeleton:
        """Return the skeleton of a group at a path. `above` has the addresses of the groups around it."""
        address = h5py.h5o.get_info(group.id).addr
        if address in above or len(above) > _MAX_DEPTH:
            return self._leaf(Unreadable("a group that contains itself, or is nested too deeply"))
        self._attributes(group, path)
        names = _ordered([self._name(name, path) for name in group.id], group.attrs)
        children: list[Skeleton] = []
        for name in names:
            self._left -= 1
            if self._left < 0:
                raise CorruptCheckpointError(
                    f"{self._key!r} has more than {self._most} objects, or refers to some again and again: it is no "
                    "checkpoint",
                    key=self._key,
                )
            children.append(self._child(group, name, f"{path}/{name}", (*above, address)))
        return Node("dict", tuple(names), tuple(children))

    def _name(self, name: bytes, path: str) -> str:
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnsupportedLeafError(
                f"{self._key!r} has the name {name[:80]!r} in {path or '/'!r}, which is not UTF-8: rename it with h5py"
            ) from error

    def _child(self, group: Any, name: str, path: str, above: tuple[object, ...]) -> Skeleton:
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            return self._leaf(Unreadable(f"a link to {link.path!r} in the file {link.filename!r}: load that file"))
        if not isinstance(link, h5py.HardLink):
            return self._leaf(Unreadable("a link to another name of the file: load that name"))
        item = group.get(name)
        if isinstance(item, h5py.Group):
            return self.group(item, path, above)
        if not isinstance(item, h5py.Dataset):
            return self._leaf(Unreadable("a named type, which has no elements"))
        self._attributes(item, path)
        return self._dataset(item, path)

    def _leaf(self, leaf: Leaf) -> Skeleton:
        self.leaves.append(leaf)
        return LEAF

    def _dataset(self, dataset: Any, path: str) -> Skeleton:
        if dataset.external:
            return self._leaf(Unreadable(f"a dataset with its elements in the file {dataset.external[0][0]!r}"))
        if dataset.is_virtual:
            return self._leaf(Unreadable("a virtual dataset, whose elements are in other datasets: load these"))
        shape, dtype = dataset.shape, dataset.dtype
        if shape is None:
            return self._leaf(None)
        if dtype.hasobject:
            return self._leaf(_text(dataset, dtype))
        stored = dataset.id.get_storage_size()
        nbytes = math.prod(map(int, shape)) * dtype.itemsize
        if nbytes > max(_ALWAYS_ALLOWED_BYTES, _MAX_GROWTH * stored):
            return self._leaf(Unreadable(f"a dataset of {nbytes} bytes that was not filled: the file has {stored}"))
        storage = str(len(self.leaves))  # not a name: it could end in ">", by which `arrays_of` marks big endian
        array = arrays_of(dtype, shape, c_strides(shape), storage)
        offset = dataset.id.get_offset()
        if offset is not None and dataset.chunks is None and _is_stored_as(dataset.id.get_type(), dtype):
            self.places[storage] = Place(offset, stored, big_endian=False)
            self.places[f"{storage}>"] = Place(offset, stored, big_endian=True)
            return self._fields(array)
        if not isinstance(array, StoredTensor) or array.shape != shape:
            return self._leaf(
                Unreadable(
                    array
                    if isinstance(array, str)
                    else "a dataset of structures in chunks, or of unusual types: write it without"
                )
            )
        self.datasets[array.storage] = Dataset(path, dataset.chunks[0] if dataset.chunks else max([1, *shape[:1]]))
        return self._leaf(array)

    def _fields(self, dataset: Fields) -> Skeleton:
        if isinstance(dataset, StoredTensor | str):
            return self._leaf(Unreadable(dataset) if isinstance(dataset, str) else dataset)
        return Node("dict", tuple(dataset), tuple([self._fields(part) for part in dataset.values()]), "numpy.void")

    def _attributes(self, attributes: Any, path: str) -> None:
        values: dict[str, JSON] = {}
        for name in attributes.attrs:
            info = attributes.attrs.get_id(name)
            # Count at least one byte for each element, because elements without bytes take time too.
            self._attribute_bytes -= math.prod(map(int, info.shape)) * max(info.dtype.itemsize, 1) + len(name)
            if self._attribute_bytes < 0:
                return
            value = _json(attributes.attrs[name])
            if value is not None:
                values[_plain(name)] = value  # h5py returns a name that is not UTF-8 as bytes
        if values:
            self.attributes[path or "/"] = values


def _is_stored_as(stored: Any, dtype: np.dtype[Any]) -> bool:
    """Return True if elements are stored as NumPy stores the dtype, without padding bits or another exponent bias."""
    if dtype.subdtype is not None:
        return isinstance(stored, h5py.h5t.TypeArrayID) and _is_stored_as(stored.get_super(), dtype.subdtype[0])
    if dtype.names is not None:
        fields: Mapping[str, Any] = dtype.fields or {}
        offsets = [stored.get_member_offset(number) for number in range(stored.get_nmembers())]
        return offsets == [fields[name][1] for name in dtype.names] and all(
            _is_stored_as(stored.get_member_type(number), fields[name][0]) for number, name in enumerate(dtype.names)
        )
    if isinstance(stored, h5py.h5t.TypeEnumID) and dtype.kind != "b":
        stored = stored.get_super()
    if dtype.kind in "SV":  # texts and raw bytes
        return bool(stored.get_size() == dtype.itemsize)
    return bool(stored == h5py.h5t.py_create(np.dtype(dtype.str), logical=True))


def _text(dataset: Any, dtype: np.dtype[Any]) -> Leaf:
    """Return a text. Arrays of texts and references to objects cannot be loaded."""
    if h5py.check_string_dtype(dtype) is None or dataset.shape != ():
        return Unreadable("a dataset of texts or of references: save it as a list")
    if dataset.id.get_storage_size() > _MAX_TEXT_BYTES:
        return Unreadable("a text that is too long")
    value = dataset[()]
    if isinstance(value, bytes) and len(value) <= _MAX_TEXT_BYTES:
        return value.decode("utf-8", "surrogateescape")
    return Unreadable("a text that is too long")


def _ordered(names: list[str], attributes: Any) -> list[str]:
    """Return names in the order in which Keras 2 lists layers or weights. Names that are not listed follow.

    Return `names` unchanged if there is no list, or if it contains other names.
    """
    for attribute in ("layer_names", "weight_names"):
        if attribute in attributes:
            listed = [_plain(text) for text in np.asarray(attributes[attribute]).reshape(-1).tolist()]
            firsts = list(dict.fromkeys([text if text in names else text.partition("/")[0] for text in listed]))
            if set(firsts) <= set(names):
                return [*firsts, *[name for name in names if name not in firsts]]
    return names


def _plain(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _json(value: Any) -> JSON:
    """Return an attribute as JSON, or None if JSON cannot represent it."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, str):  # h5py escapes bytes that are not UTF-8
        value = value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list):
        parts = [_json(part) for part in value]
        return None if None in parts else parts
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float) else None
