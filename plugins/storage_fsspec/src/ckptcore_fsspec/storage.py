"""The objects below a path of a file system of fsspec."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]  # it has no types
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]  # it has no types

from ckptcore.errors import AtomicityError, ObjectNotFoundError, StorageError
from ckptcore.model import check_directory_key, check_key
from ckptcore.protocols import ObjectWriter, PutCondition, StorageAddress
from ckptcore.redaction import chainable, redacted
from ckptcore_fsspec.failures import NOT_THERE, failure, telling
from ckptcore_fsspec.file_systems import Connection, FileSystem
from ckptcore_fsspec.places import Places, places_of
from ckptcore_fsspec.ranges import fill
from ckptcore_fsspec.writing import InOrderWriter

__all__ = ["FsspecStorage"]


_UNASKED_BYTES: Final = 64 << 20
"""The longest range that is read without a look at how much there is."""


class FsspecStorage:
    """Objects by key. No file system of fsspec offers conditional puts by a tag: `put` refuses conditions. Any thread."""

    request_bytes: ClassVar[int] = 4 << 20
    concurrency: ClassVar[int] = 8
    part_bytes: ClassVar[int] = 1  # fsspec collects what it sends itself

    def __init__(self, connection: Connection, url: str) -> None:
        self._connection = connection
        self._url = redacted(url)  # for errors, logs and people
        self._scheme = url.partition("://")[0]
        self._root = connection.path.rstrip("/")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    @property
    def address(self) -> StorageAddress | None:
        """None: what native I/O would find there, with which credentials, fsspec does not tell."""
        return None

    # --- reading

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of an object; fewer where it ends before."""
        path = self._path(key)
        if stop is not None and start >= stop:
            self.size(key)
            return b""
        if stop is not None and stop - start > _UNASKED_BYTES:
            stop = max(start, min(stop, self.size(key)))  # local files would be given memory for all of it
        # Without a range where there need be none: an empty object has no byte for one.
        first = start if start or stop is not None else None
        system = self._connection.get()
        try:
            data = system.cat_file(path, start=first, end=stop)
        except NOT_THERE as error:
            raise failure(error, f"cannot read {key!r} in {self._url}") from chainable(error)
        except Exception as error:  # noqa: BLE001  # it is raised again, as one of ours
            # Most services call it an error where a range begins behind the end.
            if first is not None and self.size(key) <= start:
                return b""
            raise failure(error, f"cannot read {key!r} in {self._url}") from chainable(error)
        return bytes(data if stop is None else data[: stop - start])

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """An object whole, and its tag: a digest of its bytes."""
        data = self.get(key)
        return data, _tag(data)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset on; ranges near each other are read together."""
        fill(key, self._url, ranges, lambda start, stop: self.get(key, start, stop), lambda: self.size(key))

    def size(self, key: str) -> int:
        """Bytes of an object."""
        path = self._path(key)
        with telling(f"cannot look for {key!r} in {self._url}"):
            system = self._connection.get()
            found = system.info(path)
        if found.get("type") == "directory":
            raise ObjectNotFoundError(f"{key!r} in {self._url} is a directory, no object")
        size = found.get("size")
        if type(size) is not int:
            raise StorageError(
                f"{self._scheme}:// does not tell how large {key!r} in {self._url} is; copy it elsewhere"
            )
        return size

    # --- writing

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object whole or not at all, replacing what is there; returns its new tag.

        Raises:
            AtomicityError: with any condition; nothing was changed.
        """
        path = self._path(key)
        if condition is not None:
            raise AtomicityError(
                f"cannot put {key!r} in {self._url} on a condition: fsspec has no puts that depend on what is there. "
                "Save to a storage with a plugin of its own (file, s3, gs), or allow it: Context(io=IOOptions(without_conditions='marker'))"
            )
        data = bytes(data)
        with telling(f"cannot write {key!r} in {self._url}"):
            self._places().put(path, data)
        return _tag(data)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Begin an object that is written in pieces; it is there from `finish` on."""
        path = self._path(key)
        where = f"{key!r} in {self._url}"
        with telling(f"cannot begin {where}"):
            return InOrderWriter(self._places().begin(path), where, size)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error."""
        paths = [self._path(key) for key in keys]
        with telling(f"cannot delete from {self._url}"):
            self._places().delete(paths)

    def sync(self, keys: Sequence[str]) -> None:
        """Nothing but a look whether the objects are there: fsspec has no more to offer."""
        for key in keys:
            self.size(key)

    # --- looking around

    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys of all objects below a directory, sorted."""
        below = self._directory(prefix)
        system = self._connection.get()
        with telling(f"cannot list {self._url}"):
            system.invalidate_cache(below)
            found = _found(system, below) if _lists_at_once(system) else _walked(system, below)
            keys = {path[len(self._root) + 1 :] for path in found}  # which asks the file system
        return iter(sorted(keys))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Names one level below a directory, sorted; those of directories end in ``/``."""
        below = self._directory(prefix)
        system = self._connection.get()
        with telling(f"cannot list {self._url}"):
            system.invalidate_cache(below)
            entries = _entries(system, below)
            names = {path[len(below) + 1 :] + ("/" if is_directory else "") for path, is_directory in entries}
        return sorted(names)

    # --- paths

    def _path(self, key: str) -> str:
        """The path of an object."""
        return f"{self._root}/{check_key(key)}"

    def _directory(self, prefix: str) -> str:
        """The path of a directory, without ``/`` at its end."""
        directory = check_directory_key(prefix)
        return f"{self._root}/{directory}" if directory else self._root

    def _places(self) -> Places:
        return places_of(self._connection.get(), self._root)


def _tag(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _lists_at_once(system: FileSystem) -> bool:
    """Whether a file system lists all below a path by itself, not directory by directory.

    fsspec's own walk leaves out what it cannot list, and who lists must know: what is not seen would not be deleted.
    """
    own: Any = type(system)
    if system.async_impl:
        return bool(own._find is not AsyncFileSystem._find)
    return bool(own.find is not AbstractFileSystem.find)


def _found(system: FileSystem, below: str) -> Iterator[str]:
    try:
        found = system.find(below, detail=True)
    except NOT_THERE:
        return
    for path, entry in found.items():
        # Some stores have objects that stand for directories.
        if path.startswith(f"{below}/") and not path.endswith("/") and entry.get("type") != "directory":
            yield path


def _walked(system: FileSystem, below: str) -> Iterator[str]:
    for path, is_directory in _entries(system, below):
        if is_directory:
            yield from _walked(system, path)
        else:
            yield path


def _entries(system: FileSystem, below: str) -> Iterator[tuple[str, bool]]:
    """What is one level below a directory: paths, and whether each is a directory."""
    try:
        listed = system.ls(below, detail=True)
    except NOT_THERE:
        return
    for entry in listed:
        path = str(entry["name"]).rstrip("/")
        if path.startswith(f"{below}/") and "/" not in path[len(below) + 1 :]:
            yield path, entry.get("type") == "directory"
