"""Writer of the arrays of a process: chunks in data files of a database, or chunks as objects."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import TracebackType
from typing import Final, Self, TypeAlias

from ckptcore.model import JSON, ArrayRecord, ArraySegment, Box, BytesSegment, ChecksumSegment, Segment, TreeMetadata
from ckptcore.protocols import Snapshot, WriteStore
from ckptcore_orbax.crc32c import CRC32C
from ckptcore_orbax.ocdbt.paths import VALUES
from ckptcore_orbax.zarr.chunk_encoding import (
    ENCODED_FILE_BYTES,
    BoundedChunk,
    ChunkSource,
    EncodedChunk,
    bound_chunks,
    encode_buffer_bytes,
    encode_chunks,
)
from ckptcore_orbax.zarr.chunking import flatten_index
from ckptcore_orbax.zarr.save_threads import start
from ckptcore_orbax.zarr.shard_index import dense_index, encode_index
from ckptcore_orbax.zarr.state import array_prefix
from ckptcore_orbax.zarr.stored_arrays import SESSION_WRITERS, LayoutOptions, array_names, stored_format

Forecast: TypeAlias = tuple[JSON, frozenset[str], int]
"""The state of a receipt, the keys of objects that a save may write smaller, and the largest buffer in bytes."""

_THREADS: Final = 8
"""Threads that write encoded chunks as objects. They mostly wait for the storage."""


class _ObjectWriter:
    """Writes objects in threads. As a context manager, waits for all writes. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """Write at most `most` objects at a time."""
        self._most = most
        self._running: set[Future[None]] = set()

    def start(self, write: Callable[[], None]) -> None:
        """Start to write one object, once fewer than `most` are being written.

        Raises:
            StorageError: an earlier write failed. The caller should write no further objects, because
                a failing storage may take minutes per object.
        """
        self._wait_until(self._most - 1)
        self._running.add(start(write, "ckptcore-objects"))

    def wait(self) -> None:
        """Wait until all objects are written.

        Raises:
            StorageError: the error of a failed write.
        """
        self._wait_until(0)

    def _wait_until(self, most: int) -> None:
        while len(self._running) > most or any(map(Future.done, self._running)):
            # An interrupt of this wait leaves all writes in `_running`, and `__exit__` waits for them.
            done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
            while done:
                done.pop().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            wait(self._running)  # the memory that writes read is released after this


_SMALL_BYTES: Final = 64 << 10
_ALIGNMENT: Final = 8
"""Alignment of values in a data file, in bytes, so that elements of every dtype are aligned."""

_LARGE_ALIGNMENT: Final = 4096
"""Alignment of chunks of at least `_SMALL_BYTES` in a data file, in bytes: one page."""


def _data_directory(rank: int, options: LayoutOptions) -> str:
    """Return the directory of a process's data files, as in Orbax."""
    return f"ocdbt.process_{rank}/{VALUES if options.separate_nodes else 'd'}"


_StoredChunk: TypeAlias = EncodedChunk | BoundedChunk
_Encode: TypeAlias = Callable[[Sequence[ChunkSource]], Generator[_StoredChunk, None, None]]
"""Encoder of chunks that are not stored raw."""


@dataclass(slots=True)
class _ReceiptColumns:
    """The chunks of a process in its receipt, as columns.

    Attributes:
        leaf, chunk: array of each chunk, and number of the chunk in the grid. There is one row per chunk,
            even if tied arrays store it as several objects.
        file, offset, length: number of the data file that contains the chunk, and byte range in it.
            Empty if chunks are objects.
        digested_leaf, digested_chunk: array and number of each encoded chunk.
        digest: the digests of all encoded chunks, one after another.
    """

    leaf: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    digested_leaf: list[int] = field(default_factory=list)
    digested_chunk: list[int] = field(default_factory=list)
    digest: bytearray = field(default_factory=bytearray)

    def add_digests(self, chunk: _StoredChunk) -> None:
        """Add the digests of an encoded chunk's decoded elements."""
        self.digested_leaf.append(chunk.source.leaf)
        self.digested_chunk.append(flatten_index(chunk.index, chunk.source.format.grid))
        self.digest += chunk.digests

    def to_json(self) -> dict[str, JSON]:
        return {
            "leaf": self.leaf,
            "chunk": self.chunk,
            "file": self.file,
            "offset": self.offset,
            "length": self.length,
            "digested_leaf": self.digested_leaf,
            "digested_chunk": self.digested_chunk,
            "digest": base64.b64encode(self.digest).decode("ascii"),
        }


def write_arrays(snapshot: Snapshot, options: LayoutOptions, store: WriteStore) -> JSON:
    """Write every chunk of this process. Return the state of the receipt, which lists the chunks.

    Raises:
        AtomicityError: this process has only a part of a chunk.
    """
    return _write(snapshot, options, store, encode_chunks)[0]


def forecast_arrays(snapshot: Snapshot, options: LayoutOptions, store: WriteStore) -> Forecast:
    """Store the objects that `write_arrays` would store, but with encoded chunks of maximum size.

    Because of this size, a forecast can have more data files than the save.

    Raises:
        AtomicityError: see `write_arrays`.
    """
    return _write(snapshot, options, store, bound_chunks)


def _write(snapshot: Snapshot, options: LayoutOptions, store: WriteStore, encode: _Encode) -> Forecast:
    plan = snapshot.plan
    names = array_names(plan.tree, options)
    directory = "" if plan.name else options.item
    writers = plan.size if plan.session is None else SESSION_WRITERS
    direct: list[ChunkSource] = []
    encoded: list[ChunkSource] = []
    for number, item in enumerate(plan.items):
        record = plan.tree.leaves[item.leaf]
        assert isinstance(record, ArrayRecord)  # a plan contains arrays only
        array = stored_format(record, names[item.leaf], options, writers)
        source = ChunkSource(snapshot, number, names[item.leaf], array)
        (direct if array.direct else encoded).append(source)
    columns = _ReceiptColumns()
    files: list[str] = []
    prefix = f"{directory}/" if directory else ""
    if options.storage == "ocdbt":
        writer = _DataFiles(store, prefix, plan.rank, plan.save_id, options, files, columns)
        writer.write_direct(direct)
        exact = len(files)
        with closing(encode(encoded)) as chunks:
            writer.write_encoded(chunks)
        bounded: Sequence[str] = [f"{prefix}{file}" for file in files[exact:]]
    else:
        aliases = _alias_names(plan.tree, names)
        with closing(encode(encoded)) as chunks:
            bounded = _write_objects(store, prefix, direct, chunks, aliases, columns)
    state: JSON = {
        "directory": directory,
        "save_id": plan.save_id,
        "name": plan.name,
        "options": options.description,
        "session": plan.session,
        "files": files,
        **columns.to_json(),
    }
    return state, frozenset(bounded), encode_buffer_bytes(encoded)


class _DataFiles:
    """The data files of a process."""

    def __init__(
        self,
        store: WriteStore,
        prefix: str,
        rank: int,
        save_id: str,
        options: LayoutOptions,
        files: list[str],
        columns: _ReceiptColumns,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._save_id = save_id
        self._options = options
        self._files = files
        self._columns = columns

    def write_direct(self, sources: Sequence[ChunkSource]) -> None:
        """Write raw chunks. Starts a new file before a chunk that would exceed the target size of the current one."""
        self._store.write_many(self._direct_files(sources))

    def _direct_files(self, sources: Sequence[ChunkSource]) -> Iterator[tuple[str, Sequence[Segment]]]:
        segments: list[Segment] = []
        position = 0
        for source in sources:
            array = source.format
            source.expect_segments(len(source.chunks) * prod(array.inner_grid))
            nbytes = array.chunk_bytes
            alignment = _ALIGNMENT if nbytes < _SMALL_BYTES else _LARGE_ALIGNMENT
            for index, outer in source.chunks:
                if position and position + nbytes > self._options.data_file_bytes:
                    yield self._next_file(), segments
                    segments, position = [], 0
                if gap := -position % alignment:
                    segments.append(BytesSegment(bytes(gap)))
                    position += gap
                self._record_chunk(source, index, len(self._files), position, nbytes)
                segments.extend(_chunk_segments(source, outer))
                position += nbytes
        if segments:
            yield self._next_file(), segments

    def write_encoded(self, chunks: Iterable[_StoredChunk]) -> None:
        """Write encoded chunks as they arrive. One file is written while the chunks of the next are encoded."""
        segments: list[Segment] = []
        position = 0
        with _ObjectWriter(1) as files:
            for chunk in chunks:
                self._record_chunk(chunk.source, chunk.index, len(self._files), position, chunk.nbytes)
                self._columns.add_digests(chunk)
                segments.extend(chunk.segments)
                position += chunk.nbytes
                if position >= min(self._options.data_file_bytes, ENCODED_FILE_BYTES):
                    files.start(partial(self._store.write, self._next_file(), segments))
                    segments, position = [], 0
        if segments:
            self._store.write(self._next_file(), segments)

    def _next_file(self) -> str:
        text = f"{self._save_id}/{self._rank}/{len(self._files)}"
        name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._files.append(f"{_data_directory(self._rank, self._options)}/{name}")
        return f"{self._prefix}{self._files[-1]}"

    def _record_chunk(self, source: ChunkSource, index: tuple[int, ...], file: int, offset: int, length: int) -> None:
        columns = self._columns
        columns.leaf.append(source.leaf)
        columns.chunk.append(flatten_index(index, source.format.grid))
        columns.file.append(file)
        columns.offset.append(offset)
        columns.length.append(length)


def _write_objects(
    store: WriteStore,
    prefix: str,
    direct: Sequence[ChunkSource],
    encoded: Iterable[_StoredChunk],
    aliases: Mapping[int, Sequence[str]],
    columns: _ReceiptColumns,
) -> Sequence[str]:
    """Write every chunk as an object under each name of its array. Encoded chunks are written in parallel.

    Returns:
        The keys of encoded chunks.
    """
    keys: list[str] = []

    def keys_of(source: ChunkSource, index: tuple[int, ...]) -> list[str]:
        columns.leaf.append(source.leaf)
        columns.chunk.append(flatten_index(index, source.format.grid))
        key = source.format.chunk_key(index)
        return [f"{prefix}{array_prefix(name)}{key}" for name in (source.name, *aliases.get(source.leaf, ()))]

    def direct_objects() -> Iterator[tuple[str, Sequence[Segment]]]:
        for source in direct:
            names = 1 + len(aliases.get(source.leaf, ()))
            source.expect_segments(len(source.chunks) * prod(source.format.inner_grid) * names)
            for index, outer in source.chunks:
                for key in keys_of(source, index):
                    yield key, list(_chunk_segments(source, outer))

    store.write_many(direct_objects())
    with _ObjectWriter(_THREADS) as small:
        waiting = 0
        for chunk in encoded:
            columns.add_digests(chunk)
            for key in keys_of(chunk.source, chunk.index):
                keys.append(key)
                small.start(partial(store.write, key, chunk.segments))
            waiting += chunk.nbytes
            if waiting >= ENCODED_FILE_BYTES:
                small.wait()
                waiting = 0
    return keys


def _alias_names(tree: TreeMetadata, names: Mapping[int, str]) -> Mapping[int, Sequence[str]]:
    """Return the additional names of tied arrays. Each name needs its own objects, which cannot share bytes."""
    aliases: dict[int, list[str]] = {}
    for alias, target in tree.aliases.items():
        aliases.setdefault(target, []).append(names[alias])
    return aliases


def _chunk_segments(source: ChunkSource, outer: Box) -> Iterator[Segment]:
    """Yield the segments of a chunk: its read chunks with checksums, and the shard index."""
    array = source.format
    itemsize = array.spec.numpy_dtype.itemsize
    for box in source.inner_boxes(outer):
        yield ArraySegment(box, itemsize, source.opener(box), source.close)
        if array.checksum:
            yield ChecksumSegment(CRC32C)
    if array.sharded:
        yield BytesSegment(encode_index(array, dense_index(array)))
