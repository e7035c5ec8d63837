"""The layout `pickle`: files of ``pickle.dump``, ``joblib.dump`` and cloudpickle, read as data. No code in them runs.

Arrays of NumPy, JAX and PyTorch are read from their bytes in the file. An object of an unknown class becomes a tree of
its parts. Inspection of a file does not read long arrays.

In files of joblib the bytes of an array follow the object that describes it, between two opcodes of the pickle.
Source: ``NumpyArrayWrapper`` of ``joblib/numpy_pickle.py``, from joblib 0.10 on.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from ckptcore_dcp.reading import (
    Call,
    DenseFileError,
    EmbeddedStorages,
    Fetch,
    Global,
    OutOfLine,
    Places,
    ReadOnlyLayout,
    StorageIndex,
    Value,
    Window,
    is_legacy,
    numpy_dtype,
    pickled_storages,
    read_pickle,
    tree_of,
)

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, Box, ChunkRead, HostArray, TreeMetadata
from ckptcore.model.file_kinds import FILE_HEAD_BYTES, kind_in_place_of
from ckptcore.protocols import ChunkIndex, Inspection, ReadStore, StorageAddress
from ckptcore.temporary import TemporaryFile
from ckptcore_formats.compressed_files import Codec, codec_of, decompressed, decompressed_head
from ckptcore_formats.inspections import FileTree, inspection_of

_WRAPPER: Final = Global("joblib.numpy_pickle", "NumpyArrayWrapper")
_DTYPE: Final = Global("numpy", "dtype")
_FROM_BUFFER: Final = Global("numpy._core.numeric", "_frombuffer")
_OBJECT_CODES: Final = ("O", "O8", "O4")
_MAX_NESTED: Final = 20
_MAX_AXES: Final = 64
_MAX_ARRAY_BYTES: Final = 1 << 62


class JoblibArrays:
    """Finds the bytes of arrays in one file. Each array becomes a `Call` that creates it from its bytes."""

    def __init__(self, data: bytes | Window, key: str, places: Places, depth: int = 0) -> None:
        """Find arrays in a file.

        Args:
            data: the file.
            key: the object, for errors.
            places: receives the byte ranges of texts and bytes in nested pickles.
            depth: number of nested object arrays that contain this pickle.
        """
        self._data = data
        self._key = key
        self._places = places
        self._depth = depth

    def __call__(self, call: Call, position: int) -> tuple[Value, int] | None:
        """Return the array that an object describes, and the offset after it. None for other objects.

        Raises:
            CorruptCheckpointError: the description is invalid, or bytes are missing.
        """
        state = call.state
        if call.function != _WRAPPER or not isinstance(state, dict):
            return None
        shape, dtype, order = state.get("shape"), state.get("dtype"), state.get("order")
        if isinstance(dtype, Call) and dtype.function == _DTYPE and dtype.arguments[:1] and _is_object(dtype):
            if self._depth == _MAX_NESTED:
                raise self._invalid(position, "arrays of objects are nested too deeply")
            nested = JoblibArrays(self._data, self._key, self._places, self._depth + 1)
            return read_pickle(self._data, key=self._key, start=position, places=self._places, raw=nested)
        try:
            kind = numpy_dtype(dtype)
        except OverflowError as error:
            raise self._invalid(position, str(error)) from error
        if kind is None or not isinstance(shape, tuple) or len(shape) > _MAX_AXES or order not in ("C", "F"):
            raise self._invalid(position, "an array has no dtype, shape or order that is known")
        extents = [extent for extent in shape if type(extent) is int and 0 <= extent < _MAX_ARRAY_BYTES]
        if len(extents) != len(shape):
            raise self._invalid(position, "the shape of an array is invalid")
        if state.get("numpy_array_alignment_bytes") is not None:  # joblib 1.2 and later pad
            position += 1 + int(self._data[position])
        stop = position + math.prod(extents) * kind.itemsize
        if stop > len(self._data):
            raise self._invalid(position, f"an array ends at byte {stop} of {len(self._data)}")
        elements = OutOfLine(position, stop, False, self._fetch)
        return Call(_FROM_BUFFER, (elements, dtype, shape, order)), stop

    def _fetch(self, start: int, stop: int) -> bytes:
        raise self._invalid(start, "an array is used as bytes")

    def _invalid(self, position: int, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._key} contains a file of joblib that cannot be read, near byte {position}: {reason}; the file is "
            "cut short or damaged; restore it from a copy",
            key=self._key,
            start=position,
        )


def _is_object(dtype: Call) -> bool:
    return dtype.arguments[0] in _OBJECT_CODES


_SUFFIXES: Final = (".pkl", ".pickle", ".p", ".pck", ".joblib")
"""Suffixes of pickles of protocols 0 and 1, which do not begin with distinctive bytes."""
_WHOLE_BYTES: Final = 1 << 18
"""Pickles up to this length are read in one request."""
_SPARSE_BYTES: Final = 1 << 20
_SPARSE_PART: Final = 8
"""A long pickle is first read without its long literals.

If that reads more than `_SPARSE_BYTES` and more than one eighth of the file, the file has few long literals, and is
read as a whole instead.
"""
_MAX_BYTES: Final = 1 << 30
"""Maximum length of a pickle that is read as a whole."""
_BLOCK_BYTES: Final = 1 << 20


class _Contents(WeakKeyDictionary[ReadStore, "_Decompressed"]):
    """Cache of the last inspected compressed file of each store, so that a load does not decompress it again.

    An entry is deleted with its store, when the object that `ckptcore.open` returned is closed. A pickled cache is
    empty.
    """

    def __reduce__(self) -> tuple[type[_Contents], tuple[()]]:
        return type(self), ()


@dataclass(frozen=True, slots=True)
class PickleLayout(ReadOnlyLayout):
    """Pickles, which may be compressed. Read-only."""

    _contents: _Contents = field(default_factory=_Contents, init=False, repr=False, compare=False)

    name = "pickle"

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of arrays in pickles."""
        content: Any = state
        if not isinstance(content, dict) or content.keys() != {"arrays", "file"}:
            raise CorruptCheckpointError("the state of the layout 'pickle' is invalid: open the checkpoint again")
        file = content["file"]
        if file is None:
            return StorageIndex(tree, content["arrays"])
        return _CompressedIndex(tree, content["arrays"], file, self._contents)

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a file by its first bytes, or by its name if it has protocol 0 or 1."""
        if entry is None:
            return None

        def fetch(start: int, stop: int) -> bytes:
            return store.get(entry, start, stop)

        head = fetch(0, FILE_HEAD_BYTES)
        codec = codec_of(head)
        if codec is None:
            if not _is_pickle(head, entry):
                return None
            tree = _read(fetch, store.size(entry), entry)
        else:
            # bzip2 decompresses only whole blocks, so the first read may be too short.
            inner = decompressed_head(codec, head, FILE_HEAD_BYTES) or decompressed_head(
                codec, fetch(0, _BLOCK_BYTES), FILE_HEAD_BYTES
            )
            if not _is_pickle(inner, entry.removesuffix(".gz").removesuffix(".bz2").removesuffix(".xz")):
                return None
            content = self._contents[store] = _Decompressed(store, entry, codec)
            tree = _read(lambda start, stop: content.get(entry, start, stop), content.size(entry), entry)
        inspection = inspection_of(tree, "pickle")
        return inspection._replace(state={"arrays": inspection.state, "file": None if codec is None else entry})


def _is_pickle(head: bytes, name: str) -> bool:
    if head[4:9] == b"\0\0\0\0{":
        return False  # a file of safetensors: it begins with the length of its header
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return not is_legacy(head)  # a file of torch.save
    # Pickles of protocols 0 and 1 have no magic number. They begin with one of these opcodes: MARK, EMPTY_DICT,
    # EMPTY_LIST, GLOBAL.
    return name.endswith(_SUFFIXES) and head[:1] in (b"(", b"}", b"]", b"c") and kind_in_place_of(head) is None


def _read(fetch: Fetch, size: int, key: str) -> FileTree:
    if size > _WHOLE_BYTES and fetch(0, 1) == b"\x80":
        most_bytes = max(_SPARSE_BYTES, size // _SPARSE_PART) if size <= _MAX_BYTES else None
        with contextlib.suppress(DenseFileError):
            return _tree(Window(fetch, size, most_bytes=most_bytes), key)
    if size > _MAX_BYTES:
        raise UnsupportedLeafError(
            f"{key!r} is a pickle of protocol 0 or 1 with {size} bytes, where at most {_MAX_BYTES} are read: load it "
            "with the software that wrote it, and save its arrays with ckptcore.save"
        )
    return _tree(fetch(0, size), key)


def _tree(data: bytes | Window, key: str) -> FileTree:
    places = Places()
    value: Value
    value, _ = read_pickle(data, key=key, places=places, raw=JoblibArrays(data, key, places))
    embedded = EmbeddedStorages(key, places)
    # Count only the bytes that were read, because a long literal is a single leaf.
    limit = (data.fetched if isinstance(data, Window) else len(data)) + (1 << 16)
    skeleton, leaves = tree_of(value, key=key, limit=limit, places=places, embedded=embedded.find)
    return FileTree(key, skeleton, leaves, pickled_storages(leaves, key=key, start=0))


class _CompressedIndex(StorageIndex):
    """Index of arrays in a compressed file. The first read decompresses it, unless the inspection did so before."""

    def __init__(self, tree: TreeMetadata, state: JSON, file: str, contents: _Contents) -> None:
        super().__init__(tree, state)
        self._file = file
        self._contents = contents
        self._lock = threading.Lock()
        self._content: _Decompressed | None = None

    def read(self, items: Any, buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """See `NativeReader.read`."""
        with self._lock:
            content = self._content or self._contents.get(store)
            if content is None or content.key != self._file:
                content = _decompress(store, self._file)
            self._content = content
        return super().read(items, buffers, content)


def _decompress(store: ReadStore, key: str) -> _Decompressed:
    codec = codec_of(store.get(key, 0, FILE_HEAD_BYTES))
    if codec is None:
        raise CorruptCheckpointError(f"{key!r} was replaced while it was read: open it again", key=key)
    return _Decompressed(store, key, codec)


class _Decompressed(ReadStore):
    """A store of one decompressed object. Thread-safe.

    Has no reference to the store with the compressed file, because such a reference would keep the store's entry in
    `_Contents` alive forever.
    """

    def __init__(self, store: ReadStore, key: str, codec: Codec) -> None:
        self._file: TemporaryFile
        self._file, self._size = decompressed(
            codec, lambda start, stop: store.get(key, start, stop), store.size(key), key
        )
        weakref.finalize(self, self._file.close)
        self.key = key

    @property
    def address(self) -> StorageAddress | None:
        """None, because the object is in a temporary file."""
        return None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `ReadStore`."""
        return self._file.read_at(start, (self._size if stop is None else stop) - start)

    def get_many(self, ranges: Sequence[tuple[str, int, int | None]]) -> Sequence[bytes | None]:
        """See `ReadStore`."""
        return [self.get(*bounds) for bounds in ranges]

    def size(self, key: str) -> int:
        """See `ReadStore`."""
        return self._size

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `ReadStore`."""
        return [self.key]

    def read_chunks(self, reads: Sequence[ChunkRead]) -> Iterator[int]:
        """See `ReadStore`. Chunks are arrays in C order."""
        left: dict[int, HostArray] = {}
        for read in reads:
            rows = max(1, (8 << 20) // max(read.itemsize * (read.box.size // max(read.box.shape[:1] or (1,))), 1))
            for band in read.box.bands(0, rows) if read.box.shape else [read.box]:
                self._fill(read, band)
            left.update({number: buffer for number, _, buffer in read.targets})
        yield from left

    def _fill(self, read: ChunkRead, band: Box) -> None:
        """Copy rows of a chunk to its targets."""
        common = [(box.intersect(band), box, buffer) for _, box, buffer in read.targets]
        if not any(own is not None for own, _, _ in common):
            return
        before = 0
        if band.start:
            row = read.box.size // read.box.shape[0]
            before = (band.start[0] - read.box.start[0]) * row * read.itemsize
        start = read.offset + before
        data = self.get(self.key, start, start + band.size * read.itemsize)
        if len(data) != band.size * read.itemsize:
            raise CorruptCheckpointError(f"{self.key!r} is cut off: restore it from a copy", key=self.key)
        for own, box, buffer in common:
            if own is not None:
                elements = np.frombuffer(data, buffer.dtype).reshape(band.shape)
                # The ellipsis keeps arrays without axes from becoming scalars.
                to: tuple[Any, ...] = (*own.within(box), ...)
                of: tuple[Any, ...] = (*own.within(band), ...)
                buffer[to] = elements[of]

    def start(self, work: Callable[[], None]) -> None:
        """See `ReadStore`."""
        work()

    def read_boxes(self, index: ChunkIndex, items: Any, buffers: Sequence[HostArray]) -> Iterator[int]:
        """Not used: the index reads arrays itself."""
        raise NotImplementedError
