"""Memory storage: objects in the memory of this process, with flat keys and conditional puts like an object store."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import unquote

import numpy as np

from ckptcore.errors import (
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
)
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import check_directory_key, check_key
from ckptcore.protocols import IF_ABSENT, Buffer, IfAbsent, ObjectWriter, PutCondition, StorageBackend, StorageOptions
from ckptcore.records import NamedTuple

_SCHEME: Final = "memory://"


class MemoryStorages:
    """Named stores of objects in memory. They exist as long as this object. Thread-safe."""

    def __init__(self) -> None:
        self._stores: dict[str, _Store] = {}
        self._lock = threading.Lock()

    def open(self, url: str, options: StorageOptions) -> MemoryStorage:
        """Open ``memory://NAME`` or ``memory://NAME/DIRECTORY``. Objects are always lost with the process.

        Raises:
            InvalidLocationError
        """
        if url[: len(_SCHEME)].lower() != _SCHEME:
            raise InvalidLocationError(f"expected a URL such as memory://name/directory, found {url!r}")
        name, _, directory = url[len(_SCHEME) :].partition("/")
        if not name:
            raise InvalidLocationError(f"the URL {url!r} has no store name; expected memory://name/directory")
        directory = check_directory_key(unquote(directory, errors="surrogateescape"))
        with self._lock:
            store = self._stores.setdefault(unquote(name, errors="surrogateescape"), _Store())
        return MemoryStorage(store, directory + "/" if directory else "", url)


class MemoryStorage(StorageBackend):
    """The objects below a prefix of one store. Thread-safe."""

    def __init__(self, store: _Store, prefix: str, url: str) -> None:
        self._store = store
        self._prefix = prefix
        self._url = url

    def __repr__(self) -> str:
        return f"MemoryStorage({self._url!r})"

    def _below(self, prefix: str) -> str:
        """Return the common prefix of the keys of all objects below a directory."""
        directory = check_directory_key(prefix)
        return self._prefix + (directory + "/" if directory else "")

    def _find(self, key: str) -> _Object:
        stored = self._store.objects.get(self._prefix + check_key(key))
        if stored is None:
            raise ObjectNotFoundError(
                f"{self._url} has no object {key!r}. Memory storage is lost with the process that wrote it"
            )
        return stored

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of an object; fewer if it ends earlier."""
        return bytes(self._find(key).data[start:stop])

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """Return an object and its tag, which changes with each put."""
        stored = self._find(key)
        return bytes(stored.data), stored.tag

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset."""
        self.open_reader(key).get_into(ranges)

    def open_reader(self, key: str) -> _MemoryReader:
        """Open an object. Later reads use this object, even if another object replaces it."""
        return _MemoryReader(key, self._url, self._find(key).data)

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        return len(self._find(key).data)

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object atomically, and return its new tag. Replaces an existing object."""
        return self._store.replace(self._prefix + check_key(key), memoryview(bytes(data)), condition)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Start an object that is written in pieces. It exists after `finish`."""
        return _MemoryWriter(self._store, self._prefix + check_key(key), size, None)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """Start a new object that is written in pieces. `finish` fails if the key exists by then."""
        return _MemoryWriter(self._store, self._prefix + check_key(key), size, IF_ABSENT)

    def abort_uploads(self, prefix: str = "") -> int:
        """Abort every unfinished object below a directory that still has a writer; return their number."""
        return self._store.abort_uploads(self._below(prefix))

    def list(self, prefix: str = "") -> Iterator[str]:
        """Return the keys of all objects below a directory, sorted."""
        below = self._below(prefix)
        keys = list(self._store.objects)
        return iter(sorted([key[len(self._prefix) :] for key in keys if key.startswith(below)]))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Return the names one level below a directory, sorted. Names of directories end in ``/``."""
        start = len(self._below(prefix)) - len(self._prefix)
        names = set()
        for key in self.list(prefix):
            name, slash, _ = key[start:].partition("/")
            names.add(name + slash)
        return sorted(names)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Ignores missing objects."""
        whole_keys = [self._prefix + check_key(key) for key in keys]
        with self._store.lock:
            for key in whole_keys:
                self._store.objects.pop(key, None)

    def sync(self, keys: Sequence[str]) -> None:
        """Check that the objects exist. Memory is never durable."""
        for key in keys:
            self._find(key)


class _Object(NamedTuple):
    data: memoryview
    tag: str


class _Store:
    """Objects by key. Reading an object is atomic; the lock protects changes."""

    def __init__(self) -> None:
        self.objects: dict[str, _Object] = {}
        self.lock = threading.RLock()  # reentrant, because `finish` calls `replace` while it holds the lock
        # Weak references, so that the memory of an abandoned writer is freed.
        self._writers: weakref.WeakSet[_MemoryWriter] = weakref.WeakSet()
        self._generations = itertools.count(1)

    def begin(self, writer: _MemoryWriter) -> None:
        with self.lock:
            self._writers.add(writer)

    def finish(self, writer: _MemoryWriter, data: memoryview, condition: PutCondition | None) -> None:
        with self.lock:
            if writer not in self._writers:
                raise StorageError(
                    f"cannot complete {writer.key!r}: it was removed as an unfinished object of a failed save. "
                    "Save again"
                )
            self.replace(writer.key, data, condition)
            self._writers.discard(writer)

    def forget(self, writer: _MemoryWriter) -> None:
        with self.lock:
            self._writers.discard(writer)

    def abort_uploads(self, below: str) -> int:
        with self.lock:
            aborted = [writer for writer in self._writers if writer.key.startswith(below)]
            for writer in aborted:
                self._writers.discard(writer)
            return len(aborted)

    def replace(self, key: str, data: memoryview, condition: PutCondition | None) -> str:
        with self.lock:
            current = self.objects.get(key)
            if isinstance(condition, IfAbsent):
                if current is not None:
                    raise ConditionFailedError(f"cannot create the object {key!r}: it exists already")
            elif condition is not None and (current is None or current.tag != condition.tag):
                present = "no object" if current is None else f"tag {current.tag}"
                raise ConditionFailedError(
                    f"cannot replace the object {key!r}: expected tag {condition.tag}, found {present}; it was changed"
                )
            tag = str(next(self._generations))
            self.objects[key] = _Object(data.toreadonly(), tag)
            return tag


class _MemoryReader:
    """An object in memory that is open for reading. Thread-safe."""

    def __init__(self, key: str, url: str, data: memoryview) -> None:
        self._key = key
        self._url = url
        self._data = data

    def get_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset."""
        data = self._data
        for offset, buffer in ranges:
            stop = offset + len(buffer)
            if stop > len(data):
                raise CorruptCheckpointError(
                    f"the object {self._key!r} in {self._url} is too short: expected bytes {offset} to {stop}, "
                    f"found {len(data)} bytes in all. Load another checkpoint",
                    key=self._key,
                    start=min(offset, len(data)),
                    stop=stop,
                )
            # NumPy releases the interpreter lock while it copies.
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(data[offset:stop], np.uint8))

    def stamp(self) -> str:
        """Return a constant, because an object never changes. A put stores another object under the key."""
        return self._key

    def size(self) -> int:
        """Return the size of the object in bytes."""
        return len(self._data)

    def memory(self) -> memoryview:
        """Return the object as memory."""
        return self._data.toreadonly()


class _MemoryWriter:
    """Collects the pieces of an object."""

    def __init__(self, store: _Store, key: str, size: int | None, condition: PutCondition | None) -> None:
        self.key: Final = key
        self._store = store
        self._size = size
        self._condition = condition
        self._lock = threading.Lock()
        self._data: HostArray | None = np.empty(size or 0, np.uint8)
        self._pieces: dict[int, bytes] = {}
        self._written = 0
        store.begin(self)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset.

        Raises:
            ValueError: outside the object's size, or after `finish` or `abort`.
        """
        stop = offset + len(data)
        if offset < 0 or (self._size is not None and stop > self._size):
            raise ValueError(f"cannot write bytes {offset} to {stop} of {self.key!r}: its size is {self._size} bytes")
        if (whole := self._data) is None:
            raise ValueError(f"{self.key!r} is complete or was aborted; nothing more can be written")
        if self._size is not None:
            np.copyto(whole[offset:stop], np.frombuffer(data, np.uint8))
        elif data:
            self._pieces[offset] = bytes(data)
        with self._lock:
            self._written += len(data)

    def finish(self) -> None:
        """Make the object visible.

        Raises:
            StorageError: bytes are missing, or the object was aborted by `MemoryStorage.abort_uploads`.
            ConditionFailedError: the key exists and must not be replaced.
            ValueError: after `finish` or `abort`.
        """
        if (whole := self._data) is None:
            raise ValueError(f"{self.key!r} is complete or was aborted already")
        size = self._size
        if size is None:
            whole = np.frombuffer(b"".join([piece for _, piece in sorted(self._pieces.items())]), np.uint8)
            size = max((offset + len(piece) for offset, piece in self._pieces.items()), default=0)
        # If the size was unknown, a gap or an overlap makes the sum of the pieces differ from the end of the last
        # piece.
        if self._written != size:
            raise StorageError(f"cannot complete {self.key!r}: expected {size} bytes, found {self._written} written")
        self._store.finish(self, whole.data, self._condition)
        self._data = None
        self._pieces = {}

    def abort(self) -> None:
        """Discard the pieces."""
        self._store.forget(self)
        self._data = None
        self._pieces = {}
