"""Objects below a path of an fsspec file system."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]  # it has no types
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]  # it has no types
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # it has no annotations

from ckptcore.errors import (
    AtomicityError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    StorageCredentialsError,
    StorageError,
    StoragePermissionError,
)
from ckptcore.model import check_directory_key, check_key
from ckptcore.protocols import ObjectWriter, PutCondition, StorageBackend, StorageCapabilities
from ckptcore.redaction import redacted_location
from ckptcore_fsspec.failures import MISSING_OBJECT_ERRORS
from ckptcore_fsspec.file_systems import Connection, FileSystem
from ckptcore_fsspec.write_methods import InOrderWriter, write_method_of

_MAX_GAP_BYTES: Final = 64 << 10
"""Largest gap between two ranges that one request reads."""

_REQUEST_BYTES: Final = 16 << 20
"""Maximum size of a request, because fsspec allocates memory for the result."""


@dataclass(frozen=True, slots=True)
class _BufferRange:
    start: int
    buffer: memoryview

    @property
    def stop(self) -> int:
        return self.start + len(self.buffer)


def fill(
    key: str,
    url: str,
    ranges: Sequence[tuple[int, memoryview]],
    read: Callable[[int, int], bytes],
    size: Callable[[], int],
) -> None:
    """Fill each buffer from its offset. One request reads ranges with small gaps between them.

    Args:
        key, url: the object and its directory, for errors.
        ranges: offsets and buffers.
        read: reads a range; returns fewer bytes at the end of the object.
        size: returns the size of the object in bytes. Called only in two cases: if all buffers are
            empty, to check that the object exists, and if `read` returns no bytes.

    Raises:
        CorruptCheckpointError: if the object is too short.
    """
    pieces = [piece for offset, buffer in ranges for piece in _cut(offset, buffer)]
    if not pieces:
        size()
    for run in _requests(pieces):
        start = run[0].start
        data = memoryview(read(start, max(piece.stop for piece in run)))
        for piece in run:
            if piece.stop > start + len(data):
                filled = start + len(data) if len(data) else size()
                raise CorruptCheckpointError(
                    f"the object {key!r} in {url} is too short: expected bytes {piece.start} "
                    f"to {piece.stop}, found {filled} bytes in total. Load another checkpoint",
                    key=key,
                    start=min(piece.start, filled),
                    stop=piece.stop,
                )
            piece.buffer[:] = data[piece.start - start : piece.stop - start]


def _cut(offset: int, buffer: memoryview) -> Iterator[_BufferRange]:
    for start in range(0, len(buffer), _REQUEST_BYTES):
        yield _BufferRange(offset + start, buffer[start : start + _REQUEST_BYTES])


def _requests(pieces: Sequence[_BufferRange]) -> Iterator[Sequence[_BufferRange]]:
    """Group pieces into requests, sorted by offset."""
    run: list[_BufferRange] = []
    stop = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if run and (piece.start > stop + _MAX_GAP_BYTES or piece.stop > run[0].start + _REQUEST_BYTES):
            yield run
            run = []
        stop = max(stop, piece.stop) if run else piece.stop
        run.append(piece)
    if run:
        yield run


_UNSIZED_READ_BYTES: Final = 64 << 20
"""Largest range, in bytes, that is read without first requesting the size of the object."""


class FsspecStorage(StorageBackend):
    """Objects by key. Thread-safe.

    `put` refuses conditions, because fsspec has no conditional puts.
    """

    # There is no part size, because fsspec buffers written pieces itself.
    capabilities = StorageCapabilities(request_bytes=4 << 20, concurrency=8)

    def __init__(self, connection: Connection, url: str) -> None:
        self._connection = connection
        self._url = redacted_location(url)  # for errors and logs
        self._scheme = url.partition("://")[0]
        self._root = connection.path.rstrip("/")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    # --- reading

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read bytes `start` to `stop` of an object, or fewer at its end."""
        path = self._path(key)
        if stop is not None and start >= stop:
            self.size(key)
            return b""
        if stop is not None and stop - start > _UNSIZED_READ_BYTES:
            stop = max(start, min(stop, self.size(key)))  # local files allocate memory for the whole range
        # Read a whole object without a range, because it may be empty, and a range needs at least
        # one byte.
        first = start if start or stop is not None else None
        if isinstance(self._connection.get(), LocalFileSystem):
            self.size(key)  # a named pipe would block the reader, and a device may never end
        try:
            data = self._connection.request(
                f"cannot read {key!r} in {self._url}", lambda system: system.cat_file(path, start=first, end=stop)
            )
        except (ObjectNotFoundError, StorageCredentialsError):
            raise
        except StorageError:
            # Most services fail if a range starts after the end.
            if first is not None and self.size(key) <= start:
                return b""
            raise
        return bytes(data if stop is None else data[: stop - start])

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """Read an object. Return its data and its tag, a digest of the data."""
        data = self.get(key)
        return data, _tag(data)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset. One request reads ranges with small gaps between them."""
        fill(key, self._url, ranges, lambda start, stop: self.get(key, start, stop), lambda: self.size(key))

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        path = self._path(key)
        info = self._connection.request(f"cannot find {key!r} in {self._url}", lambda system: system.info(path))
        if info.get("type") in ("directory", "other"):
            what = "a directory" if info["type"] == "directory" else "not a regular file"
            raise ObjectNotFoundError(f"{key!r} in {self._url} is {what}")
        size = info.get("size")
        if type(size) is not int:
            raise StorageError(
                f"cannot load {key!r} in {self._url}: {self._scheme}:// does not provide its "
                "size; copy the checkpoint elsewhere"
            )
        return size

    # --- writing

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object completely or not at all, replacing an existing one. Return its new tag.

        Raises:
            AtomicityError: for any condition; nothing is changed.
        """
        path = self._path(key)
        if condition is not None:
            raise AtomicityError(
                f"cannot put {key!r} in {self._url} on a condition: fsspec has no conditional "
                "puts. Save to a storage with its own plugin (file, s3, gs), or allow it with "
                "Context(io=IOOptions(without_conditions='marker'))"
            )
        data = bytes(data)
        self._connection.request(
            f"cannot write {key!r} in {self._url}", lambda system: write_method_of(system, self._root).put(path, data)
        )
        return _tag(data)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Begin an object that is written in pieces. It exists after `finish`."""
        path = self._path(key)
        where = f"{key!r} in {self._url}"
        sink = self._connection.request(
            f"cannot create {where}", lambda system: write_method_of(system, self._root).begin(path)
        )
        return InOrderWriter(sink, where, size, self._connection.forgetting)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. A missing object is not an error."""
        paths = [self._path(key) for key in keys]
        self._connection.request(
            f"cannot delete from {self._url}", lambda system: write_method_of(system, self._root).delete(paths)
        )

    def sync(self, keys: Sequence[str]) -> None:
        """Check that the objects exist. Does not flush anything, because fsspec has no sync."""
        for key in keys:
            self.size(key)

    # --- listing

    def list(self, prefix: str = "") -> Iterator[str]:
        """List the keys of all objects in a directory, sorted."""
        below = self._directory(prefix)

        def paths(system: FileSystem) -> list[str]:
            system.invalidate_cache(below)
            return list(_listed_sizes(system, below) if _lists_recursively(system) else _walk(system, below))

        paths_found = self._connection.request(f"cannot list {self._url}", paths)
        return iter(sorted({path[len(self._root) + 1 :] for path in paths_found}))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """List the names in a directory, sorted. Names of directories end in ``/``."""
        below = self._directory(prefix)

        def names(system: FileSystem) -> set[str]:
            system.invalidate_cache(below)
            entries = _entries(system, below)
            return {path[len(below) + 1 :] + ("/" if is_directory else "") for path, is_directory in entries}

        return sorted(self._connection.request(f"cannot list {self._url}", names))

    def list_sizes(self, prefix: str = "") -> Mapping[str, int] | None:
        """List the sizes in bytes of all objects in a directory, by key. Return None if listings lack some sizes."""
        below = self._directory(prefix)
        if not _lists_recursively(self._connection.get()):
            return None

        def listed(system: FileSystem) -> Mapping[str, object]:
            system.invalidate_cache(below)
            return _listed_sizes(system, below)

        sizes_by_path = self._connection.request(f"cannot list {self._url}", listed)
        sizes = {path[len(self._root) + 1 :]: size for path, size in sizes_by_path.items() if type(size) is int}
        return sizes if len(sizes) == len(sizes_by_path) else None

    # --- paths

    def _path(self, key: str) -> str:
        """Return the path of an object."""
        return f"{self._root}/{check_key(key)}"

    def _directory(self, prefix: str) -> str:
        """Return the path of a directory, without ``/`` at the end."""
        directory = check_directory_key(prefix)
        return f"{self._root}/{directory}" if directory else self._root


class ReadOnlyStorage(FsspecStorage):
    """Objects below a path of a read-only file system. Thread-safe."""

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Raise an error without a request."""
        raise self._read_only_error(key)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Raise an error without a request."""
        raise self._read_only_error(key)

    def delete(self, keys: Sequence[str]) -> None:
        """Raise an error if `keys` is not empty."""
        for key in keys:
            raise self._read_only_error(key)

    def _read_only_error(self, key: str) -> StoragePermissionError:
        self._path(key)
        return StoragePermissionError(
            f"cannot change {key!r} in {self._url}: {self._scheme}:// is read-only; {_writable(self._url)}"
        )


_HUB_BUCKET: Final = re.compile(r"(?:fsspec\+)?hf://buckets/([\w.-]+)/([\w.-]+)", re.IGNORECASE)
_AZURE: Final = re.compile(r"(?:fsspec\+)?https://(\w+)\.blob\.(core\.[\w.]+)/([\w$-]+)", re.IGNORECASE)


def _writable(url: str) -> str:
    """Return advice on how to write to the location of a read-only URL."""
    if (match := _HUB_BUCKET.match(url)) is not None:
        namespace, bucket = match.groups()
        return (
            f"save through the S3 gateway of the Hub: s3://{bucket}/... with the options endpoint="
            f"'https://s3.hf.co/{namespace}', region='us-east-1', addressing_style='path' and the bucket's S3 keys"
        )
    if (match := _AZURE.match(url)) is not None:
        account, cloud, container = match.groups()
        return f"save to abfss://{container}@{account}.dfs.{cloud}/... (`pip install 'ckptcore[azure]'`)"
    return "save to another storage"


def _tag(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _lists_recursively(system: FileSystem) -> bool:
    """Return True if a file system has its own recursive listing.

    For other file systems `_walk` is used, because fsspec's own walk skips directories that it
    cannot list. Such a directory must cause an error. Otherwise callers would not delete the
    objects in it.
    """
    own: Any = type(system)
    if system.async_impl:
        return bool(own._find is not AsyncFileSystem._find)
    return bool(own.find is not AbstractFileSystem.find)


def _listed_sizes(system: FileSystem, below: str) -> Mapping[str, object]:
    """Return the paths of all objects below a directory, with the sizes that the file system reports."""
    try:
        entries = system.find(below, detail=True)
    except MISSING_OBJECT_ERRORS:
        return {}
    return {
        path: entry.get("size")
        for path, entry in entries.items()
        # Some stores use objects as directory markers.
        if path.startswith(f"{below}/") and not path.endswith("/") and entry.get("type") != "directory"
    }


def _walk(system: FileSystem, below: str) -> Iterator[str]:
    for path, is_directory in _entries(system, below):
        if is_directory:
            yield from _walk(system, path)
        else:
            yield path


def _entries(system: FileSystem, below: str) -> Iterator[tuple[str, bool]]:
    """List a directory: paths, and True for directories."""
    try:
        listed = system.ls(below, detail=True)
    except MISSING_OBJECT_ERRORS:
        return
    for entry in listed:
        path = str(entry["name"]).rstrip("/")
        if path.startswith(f"{below}/") and "/" not in path[len(below) + 1 :]:
            yield path, entry.get("type") == "directory"
