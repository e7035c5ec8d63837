"""A storage on a `SimulatedDisk`, with the same steps as the storage of local directories."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, TypeAlias
from urllib.parse import unquote

from ckptcore.errors import ConditionFailedError, CorruptCheckpointError, ObjectNotFoundError, StorageError
from ckptcore.model.metadata import check_key
from ckptcore.protocols import (
    IF_ABSENT,
    Buffer,
    DirectoryFeatures,
    DirectoryLock,
    IfAbsent,
    ObjectWriter,
    PlaceLimits,
    PutCondition,
    StorageBackend,
    StorageCapabilities,
    StorageOptions,
)
from ckptcore_testing.simulated_disk import DiskDirectory, DiskFile, DiskNode, SimulatedDisk

_TEMPORARY_PREFIX: Final = ".temporary-"

_Path: TypeAlias = tuple[str, ...]


def open_simulated(disk: SimulatedDisk, url: str, options: StorageOptions) -> SimulatedStorage:
    """Open a directory of a disk by a URL of any scheme. The path follows ``://``.

    A plugin can use ``functools.partial(open_simulated, disk)`` as a storage opener.
    """
    _, separator, rest = url.partition("://")
    path = unquote(rest if separator else url)
    return SimulatedStorage(disk, tuple([part for part in path.split("/") if part]), durable=options.durable)


class SimulatedStorage(StorageBackend):
    """Files in a directory of a `SimulatedDisk`. Implements `AtomicDirectories`. Thread-safe."""

    # A small request size, so that tests cover reads of several requests.
    capabilities = StorageCapabilities(request_bytes=64 << 10)

    def __init__(self, disk: SimulatedDisk, directory: tuple[str, ...], *, durable: bool) -> None:
        self._disk = disk
        self._root = directory
        self._durable = durable
        self._temporary = itertools.count()
        self._deferred: list[tuple[_Path, list[_Path]]] = []  # with the directories in which names changed

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`."""
        with self._disk.lock:
            return bytes(self._file(key).data[start:stop])

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`."""
        data = self.get(key)
        return data, _tag(data)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`."""
        with self._disk.lock:
            data = self._file(key).data
            for offset, buffer in ranges:
                stop = offset + len(buffer)
                if stop > len(data):
                    raise CorruptCheckpointError(
                        f"{key} is too short: expected bytes {offset} to {stop}, found {len(data)} bytes in all",
                        key=key,
                        start=min(offset, len(data)),
                        stop=stop,
                    )
                buffer[:] = data[offset:stop]

    def size(self, key: str) -> int:
        """See `StorageBackend`."""
        with self._disk.lock:
            return len(self._file(key).data)

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        path = self._path(key)
        with self._disk.lock:
            current = self._find(path)
            if isinstance(current, DiskDirectory):
                raise StorageError(f"cannot write {key}: it is a directory")
            _check(key, current, condition)
            directory = self._make_directories(path[:-1])
            temporary = f"{_TEMPORARY_PREFIX}{next(self._temporary)}-{path[-1]}"
            file = DiskFile()
            self._disk.change(f"create {temporary}", (directory, temporary, file))
            self._disk.write(f"write {temporary}", file, 0, data)
            if self._durable:
                self._disk.sync_file(f"sync {temporary}", file)
            self._disk.change(f"rename {temporary} to {key}", (directory, temporary, None), (directory, path[-1], file))
            if self._durable:
                self._make_durable(path[:-1])
        return _tag(data)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        path = self._path(key)
        with self._disk.lock:
            directory = self._make_directories(path[:-1])
            current = directory.names.get(path[-1])
            if isinstance(current, DiskDirectory):
                raise StorageError(f"cannot write {key}: it is a directory")
            if current is not None:
                self._disk.change(f"remove {key}", (directory, path[-1], None))
            file = DiskFile()
            self._disk.change(f"create {key}", (directory, path[-1], file))
        return _SimulatedWriter(self, key, file, size)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        with self._disk.lock:
            if self._find(self._path(key)) is not None:
                raise ConditionFailedError(f"cannot create {key}: the object exists already")
            return self.open_writer(key, size)

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        paths = [self._path(key) for key in keys]
        with self._disk.lock:
            for path in paths:
                directory = self._find(path[:-1])
                if isinstance(directory, DiskDirectory) and isinstance(directory.names.get(path[-1]), DiskFile):
                    self._disk.change(f"remove {_path_text(path)}", (directory, path[-1], None))
            for path in paths:
                self._remove_empty(path[:-1])

    def _remove_empty(self, path: _Path) -> None:
        while len(path) > len(self._root):
            directory, above = self._find(path), self._find(path[:-1])
            if not isinstance(directory, DiskDirectory) or not isinstance(above, DiskDirectory):
                return
            if directory.names or directory in self._disk.locked:
                return
            self._disk.change(f"remove {_path_text(path)}", (above, path[-1], None))
            path = path[:-1]

    def sync(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        with self._disk.lock:
            for key in keys:
                file = self._file(key)
                if self._durable:
                    self._disk.sync_file(f"sync {key}", file)
                    self._make_durable(self._path(key)[:-1])

    def complete(self, key: str, file: DiskFile) -> None:
        """Make a complete file durable, if the storage was opened as durable."""
        if self._durable:
            self._disk.sync_file(f"sync {key}", file)
            self._make_durable(self._path(key)[:-1])

    def write(self, key: str, file: DiskFile, offset: int, data: Buffer) -> None:
        """Write a range of a file."""
        self._disk.write(f"write {key} at {offset}", file, offset, bytes(data))

    def remove_incomplete(self, key: str, file: DiskFile) -> None:
        """Remove an incomplete file."""
        path = self._path(key)
        with self._disk.lock:
            directory = self._find(path[:-1]) if not self._disk.crashed else None
            if isinstance(directory, DiskDirectory) and directory.names.get(path[-1]) is file:
                self._disk.change(f"remove {key}", (directory, path[-1], None))
                self._remove_empty(path[:-1])

    # --- listing ------------------------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`."""
        with self._disk.lock:
            path = self._directory_path(prefix)
            start = "".join([part + "/" for part in path[len(self._root) :]])
            node = self._find(path)
            return iter(sorted(_files(node, start)) if isinstance(node, DiskDirectory) else [])

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`."""
        with self._disk.lock:
            directory = self._find(self._directory_path(prefix))
            if not isinstance(directory, DiskDirectory):
                return []
            names = [name + "/" if isinstance(node, DiskDirectory) else name for name, node in directory.names.items()]
            return sorted([name for name in names if not name.startswith(_TEMPORARY_PREFIX)])

    # --- AtomicDirectories --------------------------------------------------------------------------------------------

    def lock_directory(self, key: str) -> DirectoryLock | None:
        """See `AtomicDirectories`."""
        with self._disk.lock:
            directory = self._make_directories(self._path(key))
            if directory in self._disk.locked:
                return None
            self._disk.locked.add(directory)
            return _HeldDirectory(self._disk, directory, lambda: self._find(self._path(key)) is directory)

    def has_locks(self) -> bool:
        """See `AtomicDirectories`."""
        return True

    def probe(self, key: str) -> DirectoryFeatures:
        """See `AtomicDirectories`. The disk exchanges directories, and distinguishes all names."""
        return DirectoryFeatures()

    def limits(self, key: str) -> PlaceLimits:
        """See `AtomicDirectories`. Nothing is limited."""
        return PlaceLimits()

    def can_move(self, key: str, onto: str) -> bool:
        """See `AtomicDirectories`. Every directory can be renamed."""
        return True

    def rename(self, source: str, destination: str) -> None:
        """See `AtomicDirectories`."""
        old, new = self._path(source), self._path(destination)
        with self._disk.lock:
            directory = self._directory(old)
            if new[: len(old)] == old:
                raise StorageError(f"cannot rename {source} to {destination}: it would be within itself")
            above = self._make_directories(new[:-1])
            there = above.names.get(new[-1])
            if isinstance(there, DiskFile) or (there is not None and there.names):
                raise ConditionFailedError(f"cannot rename {source} to {destination}: it already exists")
            self._disk.change(
                f"rename {source} to {destination}",
                (self._directory(old[:-1]), old[-1], None),
                (above, new[-1], directory),
            )
            if self._durable:
                self._make_durable(new[:-1])
                self._make_durable(old[:-1])

    def exchange(self, first: str, second: str) -> None:
        """See `AtomicDirectories`."""
        path, other_path = self._path(first), self._path(second)
        with self._disk.lock:
            directory, replacement = self._directory(path), self._directory(other_path)
            if path[: len(other_path)] == other_path or other_path[: len(path)] == path:
                raise StorageError(f"cannot exchange {first} and {second}: one is within the other")
            self._disk.change(
                f"exchange {first} and {second}",
                (self._directory(path[:-1]), path[-1], replacement),
                (self._directory(other_path[:-1]), other_path[-1], directory),
            )
            if self._durable:
                self._make_durable(path[:-1])
                self._make_durable(other_path[:-1])

    def place(self, source: str, destination: str, keys: Sequence[str]) -> None:
        """See `AtomicDirectories`."""
        old, new = self._path(source), self._path(destination)
        with self._disk.lock:
            self._directory(new)
            for key in keys:
                below = self._path(key)[len(self._root) :]
                file, above = self._file(f"{source}/{key}"), self._make_directories((*new, *below[:-1]))
                _check(key, above.names.get(below[-1]), IF_ABSENT)
                self._disk.change(
                    f"move {key} to {destination}",
                    (self._directory((*old, *below[:-1])), below[-1], None),
                    (above, below[-1], file),
                )
                if self._durable:
                    self._make_durable((*new, *below[:-1]))

    def replace(self, source: str, destination: str, stamp: str | None) -> None:
        """See `AtomicDirectories`."""
        old, new = self._path(source), self._path(destination)
        with self._disk.lock:
            file, above = self._file(source), self._directory(new[:-1])
            if self.stamps([destination]).get(destination) != stamp:
                raise ConditionFailedError(f"cannot replace {destination}: it is not the expected file")
            self._disk.change(
                f"rename {source} to {destination}",
                (self._directory(old[:-1]), old[-1], None),
                (above, new[-1], file),
            )
            if self._durable:
                self._make_durable(new[:-1])

    def stamps(self, keys: Sequence[str]) -> Mapping[str, str]:
        """See `AtomicDirectories`."""
        with self._disk.lock:
            nodes = {key: self._find(self._path(key)) for key in keys}
        return {
            key: f"{file.number}-{_tag(bytes(file.data))}" for key, file in nodes.items() if isinstance(file, DiskFile)
        }

    def delete_unchanged(self, stamps: Mapping[str, str]) -> None:
        """See `AtomicDirectories`."""
        with self._disk.lock:
            current = self.stamps(list(stamps))
            self.delete([key for key, stamp in stamps.items() if current.get(key) == stamp])

    def hide_from_others(self, old: str, new: str) -> None:
        """See `AtomicDirectories`. Does the same as `keep_attributes`."""
        self.keep_attributes(old, new)

    def keep_attributes(self, old: str, new: str) -> None:
        """See `AtomicDirectories`. Checks the keys only: the disk has no attributes."""
        self._path(old), self._path(new)

    @contextmanager
    def defer_names(self, key: str) -> Iterator[None]:
        """See `StorageBackend`."""
        deferred: tuple[_Path, list[_Path]] = self._directory_path(key), []
        with self._disk.lock:
            self._deferred.append(deferred)
        try:
            yield
        except BaseException:
            self._end_deferral(deferred)
            raise
        with self._disk.lock:
            if self._end_deferral(deferred):
                for path in deferred[1]:
                    if isinstance(self._find(path), DiskDirectory):  # otherwise removed meanwhile
                        self._make_durable(path)

    def _end_deferral(self, ended: tuple[_Path, Sequence[_Path]]) -> bool:
        with self._disk.lock:
            before = len(self._deferred)
            self._deferred = [deferred for deferred in self._deferred if deferred is not ended]
            return len(self._deferred) < before

    def sync_directory(self, key: str) -> None:
        """See `AtomicDirectories`."""
        with self._disk.lock:
            path = self._directory_path(key)
            directory = self._directory(path)
            if self._durable:
                self._sync_names_below(path, directory)
                if self._defers(path):
                    self._disk.sync_directory(f"sync the names in {_path_text(path)}", directory)
                else:
                    self._make_durable(path)
                self._deferred = [deferred for deferred in self._deferred if deferred[0] != path]

    def _sync_names_below(self, path: _Path, directory: DiskDirectory) -> None:
        for name, node in sorted(directory.names.items()):
            if isinstance(node, DiskDirectory):
                self._sync_names_below((*path, name), node)
                self._disk.sync_directory(f"sync the names in {_path_text((*path, name))}", node)

    def delete_directory(self, key: str) -> None:
        """See `AtomicDirectories`. Takes one step for each file and directory, like a real disk."""
        path = self._path(key)
        with self._disk.lock:
            above = self._find(path[:-1])
            if not isinstance(above, DiskDirectory) or path[-1] not in above.names:
                return
            self._remove_all(path, above, above.names[path[-1]])
            self._deferred = [deferred for deferred in self._deferred if deferred[0] != path]
            if self._durable:
                self._disk.sync_directory(f"sync the names in {_path_text(path[:-1])}", above)

    def _remove_all(self, path: _Path, above: DiskDirectory, node: DiskNode) -> None:
        if isinstance(node, DiskDirectory):
            for name, entry in sorted(node.names.items()):
                self._remove_all((*path, name), node, entry)
        self._disk.change(f"remove {_path_text(path)}", (above, path[-1], None))

    # --- paths --------------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> _Path:
        return self._root + tuple(check_key(key).split("/"))

    def _directory_path(self, key: str) -> _Path:
        return self._path(key.removesuffix("/")) if key else self._root

    def _find(self, path: _Path) -> DiskNode | None:
        self._disk.expect_power()
        node: DiskNode | None = self._disk.root
        for name in path:
            node = node.names.get(name) if isinstance(node, DiskDirectory) else None
        return node

    def _file(self, key: str) -> DiskFile:
        node = self._find(self._path(key))
        if not isinstance(node, DiskFile):
            raise ObjectNotFoundError(f"no file {key} in {_path_text(self._root)}")
        return node

    def _directory(self, path: _Path) -> DiskDirectory:
        node = self._find(path)
        if not isinstance(node, DiskDirectory):
            raise ObjectNotFoundError(f"no directory {_path_text(path)}")
        return node

    def _make_directories(self, path: _Path) -> DiskDirectory:
        self._disk.expect_power()
        directory = self._disk.root
        for depth, name in enumerate(path, 1):
            node = directory.names.get(name)
            if node is None:
                node = DiskDirectory()
                self._disk.change(f"make the directory {_path_text(path[:depth])}", (directory, name, node))
            if not isinstance(node, DiskDirectory):
                raise StorageError(f"cannot make the directory {_path_text(path[:depth])}: it is a file")
            directory = node
        return directory

    def _defers(self, path: _Path) -> bool:
        above = [noted for top, noted in self._deferred if path[: len(top)] == top]
        for noted in above:
            noted.append(path)
        return bool(above)

    def _make_durable(self, path: _Path) -> None:
        """Make the names in a directory and in its parent directories durable. Does nothing in deferred directories."""
        if self._defers(path):
            return
        for depth in range(len(path), -1, -1):
            directory = self._directory(path[:depth])
            if self._disk.has_changed(directory):
                self._disk.sync_directory(f"sync the names in {_path_text(path[:depth])}", directory)


class _HeldDirectory:
    def __init__(self, disk: SimulatedDisk, directory: DiskDirectory, is_in_place: Callable[[], bool]) -> None:
        self._disk = disk
        self._directory = directory
        self.is_in_place = is_in_place

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._disk.locked.discard(self._directory)


class _SimulatedWriter:
    def __init__(self, storage: SimulatedStorage, key: str, file: DiskFile, size: int | None) -> None:
        self._storage = storage
        self._key = key
        self._file = file
        self._size = size
        self._lock = threading.Lock()
        self._written = 0
        self._open = True

    def write_at(self, offset: int, data: Buffer) -> None:
        self._expect_open()
        if offset < 0 or (self._size is not None and offset + len(data) > self._size):
            raise ValueError(f"cannot write bytes {offset} to {offset + len(data)} of {self._key}: it has {self._size}")
        self._storage.write(self._key, self._file, offset, data)
        with self._lock:
            self._written += len(data)

    def finish(self) -> None:
        self._expect_open()
        if self._size is not None and self._written != self._size:
            raise StorageError(f"cannot complete {self._key}: expected {self._size} bytes, found {self._written}")
        self._storage.complete(self._key, self._file)
        self._open = False

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._storage.remove_incomplete(self._key, self._file)

    def _expect_open(self) -> None:
        if not self._open:
            raise ValueError(f"cannot write {self._key}: the writer is finished or aborted")


def _check(key: str, current: DiskNode | None, condition: PutCondition | None) -> None:
    if condition is None:
        return
    if isinstance(condition, IfAbsent):
        if current is not None:
            raise ConditionFailedError(f"cannot create {key}: it already exists")
        return
    tag = _tag(bytes(current.data)) if isinstance(current, DiskFile) else None
    if tag != condition.tag:
        raise ConditionFailedError(f"cannot replace {key}: expected tag {condition.tag}, found {tag}")


def _files(directory: DiskDirectory, start: str) -> Iterator[str]:
    for name, node in directory.names.items():
        if isinstance(node, DiskDirectory):
            yield from _files(node, f"{start}{name}/")
        elif not name.startswith(_TEMPORARY_PREFIX):
            yield start + name


def _tag(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _path_text(path: _Path) -> str:
    return "/" + "/".join(path)
