"""The layout `hdf5`: HDF5 files, and weights and models of Keras (``.weights.h5``, ``.keras``, ``.weights.json``).

A ``.keras`` file is a zip with ``model.weights.h5``. Datasets in one byte range are read directly. The HDF5 library
reads other datasets, such as compressed chunks, through the storage.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ckptcore_dcp.reading import (
    STORED,
    Leaf,
    LocationColumns,
    ReadOnlyLayout,
    StorageIndex,
    StoredBytes,
    StoredTensor,
    leaf_record,
    read_zip,
)

from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MissingDistributionError,
    ObjectNotFoundError,
    UnsupportedLeafError,
)
from ckptcore.model import (
    JSON,
    LEAF,
    ArrayRecord,
    Box,
    HostArray,
    LeafRecord,
    Node,
    ReadItem,
    Skeleton,
    TreeMetadata,
    format_path,
    unreadable_leaf,
)
from ckptcore.protocols import ChunkIndex, Inspection, ReadStore
from ckptcore_formats.inspections import first_member

if TYPE_CHECKING:
    from ckptcore_formats.hdf5_objects import FileObjects

_MAGIC: Final = b"\x89HDF\r\n\x1a\n"
_NAMES: Final = (".h5", ".hdf5")
_WEIGHTS: Final = "model.weights.h5"
_MAX_JSON_BYTES: Final = 1 << 24
_FIRST_MEMBERS: Final = ("metadata.json", "config.json", _WEIGHTS)
_INDEX_SUFFIX: Final = ".weights.json"


@dataclass(frozen=True, slots=True)
class Hdf5Layout(ReadOnlyLayout):
    """HDF5 files, including those of Keras. Read-only. Needs h5py."""

    name = "hdf5"

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of datasets."""
        return _Hdf5Index(tree, state)

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a file by its first bytes, a model of Keras by its members, and an index by its name."""
        if entry is None:
            return None
        head = store.get(entry, 0, 64)
        if head.startswith(_MAGIC) or (entry.endswith(_NAMES) and _follows_user_block(store, entry)):
            return _inspection(store, [entry], entry, "Keras" if entry.endswith(".weights.h5") else "HDF5")
        if first_member(head) in _FIRST_MEMBERS and _has_weights(store, entry):
            return _inspection(store, [entry], entry, "Keras")
        if entry.endswith(_INDEX_SUFFIX) and (shards := _shards(store, entry)) is not None:
            return _inspection(store, shards, entry, "Keras")
        return None


def _follows_user_block(store: ReadStore, key: str) -> bool:
    """Return True if an HDF5 file begins after a user block, whose length is 512 bytes times a power of two."""
    start, size = 512, store.size(key)
    while start < size:
        if store.get(key, start, min(start + len(_MAGIC), size)) == _MAGIC:
            return True
        start *= 2
    return False


def _has_weights(store: ReadStore, key: str) -> bool:
    """Return True if a zip is a model of Keras."""
    return _WEIGHTS in read_zip(lambda start, stop: store.get(key, start, stop), 0, store.size(key), key=key)


def _shards(store: ReadStore, key: str) -> Sequence[str] | None:
    """Return the files that an index of Keras lists, or None if the file is not such an index.

    Raises:
        CorruptCheckpointError: it lists a file of another directory, or a missing file.
    """
    try:
        index: Any = json.loads(store.get(key)) if store.size(key) <= _MAX_JSON_BYTES else None
        listed: list[Any] = []
        for names in index["weight_map"].values():
            listed += [names] if isinstance(names, str) else names
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    directory = key.rpartition("/")[0]
    files: list[str] = []
    for name in dict.fromkeys(listed):
        if not isinstance(name, str) or not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
            raise CorruptCheckpointError(f"{key} lists the invalid file name {str(name)[:80]!r}: correct it", key=key)
        file = f"{directory}/{name}" if directory else name
        try:
            store.size(file)
        except ObjectNotFoundError:
            raise CorruptCheckpointError(
                f"{key} lists {name}, which does not exist: restore {name} from a copy, or correct {key}", key=file
            ) from None
        files.append(file)
    return files


class _Found(NamedTuple):
    """A leaf of a file.

    Attributes:
        leaf: the leaf.
        file: the file.
    """

    leaf: Leaf
    file: _File


@dataclass(frozen=True, slots=True)
class _File:
    """An HDF5 file: an object, or a member of a zip.

    Attributes:
        key: the object.
        origin: offset of the file in it, in bytes.
        size: length of the file, in bytes.
        objects: its objects.
    """

    key: str
    origin: int
    size: int
    objects: FileObjects


def _inspection(store: ReadStore, keys: Sequence[str], entry: str, writer: str) -> Inspection:
    """Return the tree of one or more files. `entry` is the file that the user named."""
    files = [_read_file(store, key) for key in keys]
    leaves: list[_Found] = []
    skeleton = _flattened(_merged([_nested(file) for file in files], entry), leaves)
    records: list[LeafRecord] = [leaf_record(leaf) for leaf, _ in leaves]
    paths = TreeMetadata(skeleton, tuple(records)).paths
    columns = LocationColumns()
    datasets: list[JSON] = []
    for number, (leaf, file) in enumerate(leaves):
        if not isinstance(leaf, StoredTensor):
            continue
        if (dataset := file.objects.datasets.get(leaf.storage)) is not None:
            datasets.append([number, file.key, file.origin, file.size, dataset.path, dataset.rows])
            continue
        start, nbytes, big_endian = file.objects.places[leaf.storage]
        path = format_path(paths[number])
        try:
            if start + nbytes > file.size:
                raise CorruptCheckpointError(
                    f"{path} ends at byte {start + nbytes} of {file.size}: {file.key!r} is cut off; restore it from a "
                    "copy",
                    key=file.key,
                )
            storage = StoredBytes(file.key, file.origin + start, nbytes, big_endian=big_endian)
            records[number] = columns.add(number, leaf, {leaf.storage: storage}, key=file.key, path=path)
        except CorruptCheckpointError as error:
            records[number] = unreadable_leaf(error)
    attributes = {path: values for file in files for path, values in file.objects.attributes.items()}
    state: JSON = {"arrays": columns.to_json(), "datasets": datasets}
    tree = TreeMetadata(skeleton, tuple(records), columns.aliases)
    return Inspection(tree, state, writer, {"attributes": attributes} if attributes else {})


def _read_file(store: ReadStore, key: str) -> _File:
    """Read the objects of a file, or of the weights in a model of Keras.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnsupportedLeafError: the weights are compressed.
        MissingDistributionError: h5py is not installed.
    """

    def fetch(start: int, stop: int) -> bytes:
        return store.get(key, start, stop)

    origin, size = 0, store.size(key)
    if fetch(0, 4) == b"PK\x03\x04":
        member = read_zip(fetch, 0, size, key=key)[_WEIGHTS]
        if member.compression != STORED:
            raise UnsupportedLeafError(
                f"{key!r} has compressed weights, and Keras does not compress: load {key}!/{_WEIGHTS}, which is "
                "decompressed first"
            )
        origin, size = member.start, member.nbytes
    with _damage(key), _open(store, key, origin, size, check_heaps=True) as file:
        from ckptcore_formats.hdf5_objects import FileObjects  # after `_open`, which reports a missing h5py

        return _File(key, origin, size, FileObjects.of(file, key, size))


def _open(store: ReadStore, key: str, origin: int, size: int, *, check_heaps: bool) -> Any:
    """Open a file with h5py. See `StoredFile` for `check_heaps`.

    Raises:
        MissingDistributionError: h5py is not installed.
    """
    try:
        from ckptcore_formats.hdf5_objects import StoredFile, open_file  # needs h5py, which comes with an extra
    except ModuleNotFoundError as error:
        raise MissingDistributionError(
            f"{key!r} is an HDF5 file, which needs h5py: run pip install 'ckptcore[hdf5]'"
        ) from error

    def fetch(start: int, stop: int) -> bytes:
        return store.get(key, origin + start, origin + stop)

    return open_file(StoredFile(fetch, size, check_heaps=check_heaps))


@contextlib.contextmanager
def _damage(key: str) -> Iterator[None]:
    """Convert errors by which h5py reports damage to `CorruptCheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, IndexError) as error:
        raise CorruptCheckpointError(
            f"{key!r} cannot be read as an HDF5 file: {str(error)[:300]}; restore it from a copy, or load another "
            "checkpoint",
            key=key,
        ) from error


_Nested: TypeAlias = "_Found | Mapping[str, _Nested]"


def _nested(file: _File) -> _Nested:
    """Return the tree of a file as mappings."""
    leaves = iter(file.objects.leaves)

    def build(skeleton: Skeleton) -> _Nested:
        if not isinstance(skeleton, Node):
            return _Found(next(leaves), file)
        return {str(key): build(child) for key, child in zip(skeleton.keys, skeleton.children, strict=True)}

    return build(file.objects.skeleton)


def _merged(trees: Sequence[_Nested], entry: str) -> _Nested:
    """Return the union of trees of files.

    Raises:
        CorruptCheckpointError: two files have a dataset with the same name.
    """
    if len(trees) == 1:
        return trees[0]
    by_name: dict[str, list[_Nested]] = {}
    for tree in trees:
        if isinstance(tree, _Found):
            raise CorruptCheckpointError(f"two of the files that {entry!r} lists have a dataset of one name", key=entry)
        for name, child in tree.items():
            by_name.setdefault(name, []).append(child)
    return {name: _merged(children, entry) for name, children in by_name.items()}


def _flattened(tree: _Nested, leaves: list[_Found]) -> Skeleton:
    if isinstance(tree, _Found):
        leaves.append(tree)
        return LEAF
    return Node("dict", tuple(tree), tuple([_flattened(child, leaves) for child in tree.values()]))


class _Hdf5Index(StorageIndex):
    """Index of datasets. Datasets without a single byte range are read by h5py, one at a time."""

    def __init__(self, tree: TreeMetadata, state: JSON) -> None:
        """Read the state of `_inspection`, which may be hostile.

        Raises:
            CorruptCheckpointError: it does not fit the tree.
        """
        content: Any = state  # the errors of a hostile state are caught below
        try:
            super().__init__(tree, content["arrays"])
            self._datasets: dict[int, tuple[str, int, int, str, int]] = {}
            for leaf, key, origin, size, path, rows in content["datasets"]:
                numbers = [number for number in (leaf, origin, size, rows) if type(number) is int and number >= 0]
                if len(numbers) != 4 or not isinstance(key, str) or not isinstance(path, str):
                    raise TypeError("a dataset is malformed")
                if not isinstance(tree.leaves[leaf], ArrayRecord):
                    raise TypeError("an array is expected")
                self._datasets[leaf] = key, origin, size, path, rows
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise CorruptCheckpointError(f"the state does not locate arrays: {error!r}; open the file again") from error
        self._lock = threading.Lock()  # the HDF5 library must be used by one thread at a time
        self._open: dict[tuple[str, int, int], tuple[ReadStore, Any]] = {}

    def chunk_rows(self, leaf: int) -> int | None:
        """See `ChunkIndex.chunk_rows`."""
        dataset = self._datasets.get(leaf)
        return super().chunk_rows(leaf) if dataset is None else max(dataset[4], 1)

    def extents(self, leaf: int) -> Iterator[tuple[str, int, int]]:
        """See `ChunkIndex.extents`. The chunks of a dataset may be anywhere in its file."""
        dataset = self._datasets.get(leaf)
        if dataset is None:
            yield from super().extents(leaf)
        else:
            yield dataset[0], dataset[1], dataset[1]

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """See `NativeReader.read`."""
        ranged = [number for number, item in enumerate(items) if item.leaf not in self._datasets]
        for position in super().read([items[part] for part in ranged], [buffers[part] for part in ranged], store):
            yield ranged[position]
        by_file: dict[tuple[str, int, int], list[int]] = {}
        for number, item in enumerate(items):
            if item.leaf in self._datasets:
                by_file.setdefault(self._datasets[item.leaf][:3], []).append(number)
        for (key, origin, size), numbers in by_file.items():
            with self._lock, _damage(key):
                file = self._file(store, key, origin, size)
                for number in numbers:
                    _read_box(file[self._datasets[items[number].leaf][3]], items[number].box, buffers[number])
            yield from numbers

    def _file(self, store: ReadStore, key: str, origin: int, size: int) -> Any:
        """Return an open file. It stays open, so that its metadata is read only once."""
        known = self._open.get((key, origin, size))
        if known is None or known[0] is not store:
            file = _open(store, key, origin, size, check_heaps=False)
            weakref.finalize(self, file.close)
            known = self._open[key, origin, size] = store, file
        return known[1]


def _read_box(dataset: Any, box: Box, buffer: HostArray) -> None:
    """Read a box of a dataset into a buffer.

    Raises:
        ValueError: the shape or dtype of the dataset changed after the file was inspected.
    """
    dtype = dataset.dtype.newbyteorder("=")
    if len(dataset.shape) != len(box.stop) or any(map(int.__gt__, box.stop, dataset.shape)):
        raise ValueError("a dataset has another shape than before")
    if dtype.itemsize != buffer.dtype.itemsize:
        raise ValueError("a dataset has another dtype than before")
    target = buffer.view(dtype) if dtype != buffer.dtype else buffer
    if buffer.size:
        dataset.read_direct(target, box.slices, ...)
