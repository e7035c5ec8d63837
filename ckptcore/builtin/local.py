"""Local storage: checkpoints in directories of a local or mounted file system."""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final

import xxhash

from ckptcore.builtin.local_attributes import (
    Attributes,
    create_file,
    hide_from_others,
    keep_attributes_below,
    let_owner_delete,
    read_attributes,
)
from ckptcore.builtin.local_calls import (
    ABSENT,
    LEAST_ALLOCATED_BYTES,
    NO_LINKS,
    NO_LOCKS,
    OPEN_TO_READ,
    SystemCall,
    allocate,
    close_descriptor,
    close_in_children,
    exchange,
    expect_encodable,
    ignoring,
    local_error,
    rename_without_replacing,
    start_writeback,
    sync_file,
    working_directory,
)
from ckptcore.builtin.local_directories import (
    DeferredNames,
    FileLock,
    LocalDirectories,
    can_lock,
    list_files,
    list_names,
    lock_object,
    sync_names,
    try_to_lock,
)
from ckptcore.builtin.local_files import LocalFile, LocalFiles, StampedFile
from ckptcore.builtin.local_mounts import can_move, limits_of, probe_directory
from ckptcore.errors import (
    AtomicityError,
    ConditionFailedError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
)
from ckptcore.model.metadata import check_directory_key, check_key
from ckptcore.protocols import (
    Buffer,
    DirectoryFeatures,
    IfAbsent,
    IfTag,
    ObjectWriter,
    PlaceLimits,
    PutCondition,
    StorageAddress,
    StorageBackend,
    StorageOptions,
)
from ckptcore.protocols.storage import quoted_path

_TEMPORARY_PREFIX: Final = ".ckptcore-put-"
"""Name prefix of the temporary files of `put`. No object may have such a name."""


def open_local(url: str, options: StorageOptions) -> LocalStorage:
    """Open a directory, which may not exist yet: a plain path, or a ``file://`` URL with ``%`` escapes.

    Raises:
        InvalidLocationError
    """
    path = url
    if url[:7].lower() == "file://":
        host, slash, rest = url[7:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise InvalidLocationError(
                f"the URL {url!r} names the host {host!r}; expected a local path such as file:///directory/checkpoint"
            )
        from urllib.parse import unquote  # slow, and most locations are paths

        path = "/" + unquote(rest, errors="surrogateescape")
    if not path or "\0" in path:
        raise InvalidLocationError(f"{url!r} is not a path of a directory: it is empty or has a NUL character")
    # Do not use abspath: if `link` is a symbolic link, `link/..` is the parent of its target.
    path = path if path.startswith("/") else os.path.join(working_directory(), path)
    return LocalStorage(path if ".." not in path.split("/") else os.path.realpath(path), options)


class LocalStorage(StorageBackend):
    """The files below a directory. Thread-safe. Also implements `AtomicDirectories`.

    A process that is killed during `put` may leave a temporary file. It is not listed, and
    `delete_directory` deletes it with its directory.
    """

    def __init__(self, directory: str, options: StorageOptions) -> None:
        """Use a directory, given by its absolute path. The directory may not exist yet.

        ``options.config`` may have ``direct_io``. By default, data that is not in the page cache is read with direct
        I/O. False reads everything through the page cache, so that processes of one machine that load the same
        checkpoint share the cached data.

        Raises:
            ValueError: an option is unknown, or its value is not a bool.
        """
        config = dict(options.config)
        direct = config.pop("direct_io", True)
        if not isinstance(direct, bool) or config:
            raise ValueError(
                "local storage has the option direct_io, True or False; found the options "
                f"{sorted(map(str, options.config))}. Correct the storage options of the Context"
            )
        self._root = os.path.normpath(directory)
        self._prefix = self._root if self._root.endswith("/") else self._root + "/"
        self._durable = options.durable
        self._directories = LocalDirectories(self._root)
        self._direct = direct

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    @property
    def address(self) -> StorageAddress:
        """The directory as a ``file://`` URL."""
        return StorageAddress("file://" + quoted_path(os.fsencode(self._root)).rstrip("/") + "/")

    @functools.cached_property
    def _files(self) -> LocalFiles:
        return LocalFiles(self._root, direct=self._direct)  # an opened checkpoint whose slices are read needs none

    def close(self) -> None:
        """Close cached files. The storage can still be used."""
        self._files.close()

    def _path(self, key: str) -> str:
        return self._prefix + expect_encodable(check_key(key))

    def _new_path(self, key: str) -> str:
        if key.rpartition("/")[2].startswith(_TEMPORARY_PREFIX):
            raise InvalidLocationError(f"the key {key!r} cannot be written: {_TEMPORARY_PREFIX}* are temporary files")
        return self._path(key)

    def _checked_path(self, key: str) -> str:
        """Return the path of an object to change or delete. Refuses links that lead out of the checkpoint."""
        path = self._path(key)
        self._directories.check_parent(path)
        return path

    def _directory_path(self, key: str) -> str:
        key = expect_encodable(check_directory_key(key))
        return self._prefix + key if key else self._root

    # --- read

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of an object; fewer if it ends earlier."""
        return LocalFile(key, self._path(key), self._root).read(start, stop)

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """Return a small object and its tag. Objects with equal bytes have equal tags."""
        data = self.get(key)
        return data, _tag(data)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset. Adjacent ranges are read together."""
        self.open_reader(key).get_into(ranges)

    def open_reader(self, key: str) -> LocalFile:
        """Open a file. Later reads use this file, even if another file replaces it."""
        return self._files.open(key, self._path(key))

    def open_stamped(self, key: str) -> StampedFile:
        """Open a file for many small reads through the page cache. See `open_reader`."""
        return StampedFile(LocalFile(key, self._path(key), self._root))

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        return LocalFile(key, self._path(key), self._root).status.st_size

    # --- write

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Write an object atomically, and return its new tag. Replaces an existing object, and keeps its attributes."""
        path = self._new_path(key)
        directory = os.path.dirname(path)
        temporary = f"{directory}/{_TEMPORARY_PREFIX}{os.urandom(8).hex()}"
        if isinstance(condition, IfTag):
            with SystemCall("read the status of", path):
                if _stamp_of(path) is None:
                    _check_tag(None, condition.tag, path)  # raises an error before directories are created
        try:
            with SystemCall("write", path, len(data)):
                descriptor = self._create(temporary, read_attributes(path))
                try:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[os.write(descriptor, rest) :]
                    if self._durable:
                        sync_file(descriptor)
                finally:
                    close_descriptor(descriptor, temporary)
                if isinstance(condition, IfAbsent):
                    _place_new(temporary, path, key)
                else:
                    with lock_object(path) as current:
                        if condition is not None:
                            _check_tag(current, condition.tag, path)
                        os.rename(temporary, path)
        except BaseException:
            self._remove(temporary)
            raise
        if self._durable:
            self._directories.make_durable(directory)
        return _tag(data)

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Start a file that is written in pieces. Unlinks an existing file first, so that its readers keep its content.

        The new file keeps the attributes of the existing file.
        """
        path = self._new_path(key)
        self._directories.check_parent(path)
        with SystemCall("create", path, size):
            replaced = read_attributes(path)
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
        return self._open_writer(path, size, replaced)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """Start a new file that is written in pieces.

        Raises:
            ConditionFailedError: the file exists, perhaps because the file system does not distinguish its name from
                another name.
        """
        path = self._new_path(key)
        self._directories.check_parent(path)
        try:
            return self._open_writer(path, size, None)
        except StorageError as error:
            if error.errno != errno.EEXIST or not os.path.lexists(path):
                raise
            raise ConditionFailedError(f"cannot create {path}: the object {key!r} exists already") from error

    def _open_writer(self, path: str, size: int | None, replaced: Attributes | None) -> ObjectWriter:
        with SystemCall("create", path, size):
            descriptor = self._create(path, replaced)
            try:
                if size is not None and size >= LEAST_ALLOCATED_BYTES:
                    allocate(descriptor, size)
                return LocalWriter(path, descriptor, size, self._directories, durable=self._durable)
            except BaseException:
                os.close(descriptor)
                self._remove(path)
                raise

    def _create(self, path: str, replaced: Attributes | None) -> int:
        """Create a file and its directory. See `create_file`."""
        while True:
            self._directories.ensure(os.path.dirname(path))
            # Another thread or process may remove the directory because it is empty.
            with suppress(FileNotFoundError):
                return create_file(path, replaced)

    def _remove(self, path: str) -> None:
        """Remove an incomplete file. Ignores errors, because the error being raised is more important."""
        with suppress(OSError):
            os.unlink(path)
        with suppress(OSError):
            self._directories.remove_empty(os.path.dirname(path))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, and directories that become empty, except locked directories and the root of the storage."""
        self._delete(dict.fromkeys(keys))

    def _delete(self, stamps: Mapping[str, str | None]) -> None:
        """Delete each file that still has the given stamp. None: delete the file whatever its stamp is."""
        directories: set[str] = set()
        for path, stamp in [(self._checked_path(key), stamp) for key, stamp in stamps.items()]:
            try:
                with lock_object(path):
                    if stamp is not None and _stamp_of(path) != stamp:
                        continue
                    os.unlink(path)
            except OSError as error:
                if error.errno in ABSENT or os.path.isdir(path):
                    continue
                raise local_error(error, "delete", path) from error
            directories.add(os.path.dirname(path))
        for directory in sorted(directories, key=len, reverse=True):
            self._directories.remove_empty(directory)

    def sync(self, keys: Sequence[str]) -> None:
        """Make existing files and their directories durable, after other code wrote the files."""
        paths = [self._checked_path(key) for key in keys]
        directories: set[str] = set()
        for path in paths if self._durable else ():
            with SystemCall("make durable", path):
                _sync(path, OPEN_TO_READ)
            directories.add(os.path.dirname(path))
        for directory in sorted(directories):
            self._directories.make_durable(directory)

    # --- list

    def list(self, prefix: str = "") -> Iterator[str]:
        """Return the keys of all objects below a directory, sorted. Does not enter links to directories."""
        start = check_directory_key(prefix)
        path = self._directory_path(prefix)
        self._directories.check_parent(path + "/")
        return list_files(path, start + "/" if start else "", _is_temporary)

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Return the names one level below a directory, sorted. Names of directories end in ``/``."""
        path = self._directory_path(prefix)
        self._directories.check_parent(path + "/")
        return list_names(path, _is_temporary)

    # --- AtomicDirectories

    def lock_directory(self, key: str) -> FileLock | None:
        """Create a directory if needed, and lock it. Return None if it is already locked.

        The lock lasts until it is closed or the process ends.
        """
        path = self._path(key)
        while True:
            self._directories.ensure(path)
            try:
                return try_to_lock(path)
            except FileNotFoundError:
                # The directory was removed or renamed meanwhile.
                continue
            except OSError as error:
                if error.errno in NO_LOCKS:
                    raise AtomicityError(
                        f"cannot lock the directory {path}: its file system has no locks that all hosts see "
                        f"({error.strerror})"
                    ) from error
                raise local_error(error, "lock the directory", path) from error

    def has_locks(self) -> bool:
        """See `AtomicDirectories`."""
        with SystemCall("lock the directory", self._root):
            return can_lock(self._root)

    def probe(self, key: str) -> DirectoryFeatures:
        """See `AtomicDirectories`."""
        path = self._checked_path(key)
        with SystemCall("create a directory in", path):
            return probe_directory(path)

    def limits(self, key: str) -> PlaceLimits:
        """See `AtomicDirectories`."""
        path = self._path(key)
        with SystemCall("read the status of", path):
            return limits_of(path)

    def can_move(self, key: str, onto: str) -> bool:
        """See `AtomicDirectories`."""
        path, full = self._checked_path(key), self._checked_path(onto)
        with SystemCall("find out if this process can rename", path):
            return can_move(path, full)

    def rename(self, source: str, destination: str) -> None:
        """Rename a directory atomically; durable if the storage was opened durable.

        Replaces only an empty directory.
        """
        old, new = self._checked_path(source), self._path(destination)
        _expect_directory(old)
        self._directories.ensure(os.path.dirname(new))
        try:
            # A plain rename of a directory replaces only an empty directory.
            os.rename(old, new)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise ConditionFailedError(
                    f"cannot rename {old} to {new}: the destination exists; nothing was changed"
                ) from error
            raise local_error(error, f"rename to {new} the directory", old) from error
        if self._durable:
            self._sync_both(new, old)

    def exchange(self, first: str, second: str) -> None:
        """Exchange two directories atomically; durable if the storage was opened durable."""
        paths = self._checked_path(first), self._checked_path(second)
        for path in paths:
            _expect_directory(path)
        with SystemCall(f"exchange with {paths[1]} the directory", paths[0]):
            exchange(*paths)
        if self._durable:
            self._sync_both(*paths)

    def place(self, source: str, destination: str, keys: Sequence[str]) -> None:
        """Move files of a directory into another directory. Replaces no file. See `AtomicDirectories`."""
        above = self._checked_path(destination)
        _expect_directory(above)
        directories = {above: None}
        try:
            for key in keys:
                old, new = self._checked_path(f"{source}/{key}"), self._checked_path(f"{destination}/{key}")
                self._directories.ensure(os.path.dirname(new))
                with SystemCall(f"move to {new} the file", old):
                    _place_new(old, new, key)
                directories[os.path.dirname(new)] = None
        finally:
            if self._durable:
                for directory in directories:
                    self._directories.make_durable(directory)

    def replace(self, source: str, destination: str, stamp: str | None) -> None:
        """Rename a file. Replaces the destination only if it still has the stamp. See `AtomicDirectories`."""
        old, new = self._checked_path(source), self._checked_path(destination)
        with SystemCall(f"rename to {new} the file", old):
            os.lstat(old)  # raises an error if the source is missing
            replaced = read_attributes(new)
            if replaced is not None and replaced.give(old) and self._durable:
                _sync_attributes(old)
            if stamp is None:
                _place_new(old, new, destination)
            else:
                with lock_object(new):
                    if _stamp_of(new) != stamp:
                        raise ConditionFailedError(f"cannot replace {new}: another process replaced or removed it")
                    os.rename(old, new)
        if self._durable:
            self._sync_both(new, old)

    def stamps(self, keys: Sequence[str]) -> Mapping[str, str]:
        """Return the inode, size and modification time of each file. See `AtomicDirectories`."""
        stamps = {}
        for key in keys:
            path = self._checked_path(key)
            with SystemCall("read the status of", path):
                if (stamp := _stamp_of(path)) is not None:
                    stamps[key] = stamp
        return stamps

    def delete_unchanged(self, stamps: Mapping[str, str]) -> None:
        """Delete the files whose stamps have not changed. See `AtomicDirectories`."""
        self._delete(stamps)

    def hide_from_others(self, old: str, new: str) -> None:
        """Give a new directory the attributes of an old directory during a save. See `AtomicDirectories`."""
        paths = self._checked_path(old), self._checked_path(new)
        with SystemCall(f"keep the attributes of {paths[0]} in the directory", paths[1]):
            hide_from_others(*paths)

    def keep_attributes(self, old: str, new: str) -> None:
        """Give a new directory and its content the attributes of an old directory. See `AtomicDirectories`."""
        paths = self._checked_path(old), self._checked_path(new)
        with SystemCall(f"keep the attributes of {paths[0]} in the directory", paths[1]):
            for changed in keep_attributes_below(*paths):
                if self._durable:
                    _sync_attributes(changed)

    def _sync_both(self, first: str, second: str) -> None:
        directories = {os.path.dirname(first): None, os.path.dirname(second): None}
        for directory in directories:
            self._directories.make_durable(directory)

    def defer_names(self, key: str) -> AbstractContextManager[object]:
        """Sync the names in a directory and below it later. See `StorageBackend`."""
        return DeferredNames(self._directories, self._directory_path(key)) if self._durable else nullcontext()

    def sync_directory(self, key: str) -> None:
        """Make the names in a directory and in its subdirectories durable. See `AtomicDirectories`.

        Does not sync the contents of files.
        """
        path = self._directory_path(key)
        self._directories.check_parent(path)
        _expect_directory(path)
        if not self._durable:
            return
        for directory, _, _ in os.walk(path, topdown=False, onerror=_refuse_unlisted):
            if directory != path or self._directories.defers(path):
                sync_names(directory)
        self._directories.make_durable(path)
        self._directories.end_deferral(path)

    def delete_directory(self, key: str) -> None:
        """Delete a directory and its contents. Ignores a missing directory. Does not follow links."""
        path = self._checked_path(key)
        self._directories.end_deferral(path)
        try:
            if os.path.islink(path):
                os.unlink(path)
            else:
                import shutil  # slow: imports bz2 and lzma

                shutil.rmtree(path)
        except OSError as error:
            with SystemCall("delete the directory", path):
                if error.errno not in ABSENT and not (error.errno == errno.EACCES and let_owner_delete(path)):
                    raise
            # Try again: another process deleted an entry at the same time, or the missing permissions are now set.
            if os.path.lexists(path):
                self.delete_directory(key)
            return
        if self._durable and not self._directories.defers(os.path.dirname(path)):
            sync_names(os.path.dirname(path))


def _refuse_unlisted(error: OSError) -> None:
    raise local_error(error, "list", error.filename) from error


def _sync_attributes(path: str) -> None:
    with suppress(PermissionError):  # a file that this process may not read cannot be opened to sync it
        _sync(path, OPEN_TO_READ | os.O_NOFOLLOW)


def _sync(path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        close_descriptor(descriptor, path)


def _is_temporary(name: str) -> bool:
    return name.startswith(_TEMPORARY_PREFIX)


def _stamp_of(path: str) -> str | None:
    """Return the inode, size and modification time of a file, or of a link itself; None if the path does not exist."""
    with ignoring(ABSENT):
        status = os.lstat(path)
        return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
    return None


def _tag(data: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def _place_new(temporary: str, path: str, key: str) -> None:
    try:
        try:
            rename_without_replacing(temporary, path)
        except AtomicityError:
            try:
                _link(temporary, path)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                # Without hard links, an empty file reserves the name. Readers see this empty object for a moment.
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
                os.rename(temporary, path)
            else:
                os.unlink(temporary)
    except FileExistsError as error:
        raise ConditionFailedError(f"cannot create {path}: the object {key!r} exists already") from error


def _link(source: str, path: str) -> None:
    try:
        os.link(source, path)
    except FileExistsError:
        # NFS: if the reply is lost, the client repeats the request, which then finds the link that it made itself.
        if not os.path.samestat(os.lstat(source), os.lstat(path)):
            raise


def _check_tag(current: int | None, expected: str, path: str) -> None:
    if current is None:
        raise ConditionFailedError(f"cannot replace {path}: expected an object with tag {expected}, found none")
    pieces = []
    while piece := os.read(current, 1 << 20):
        pieces.append(piece)
    if (tag := _tag(b"".join(pieces))) != expected:
        raise ConditionFailedError(f"cannot replace {path}: expected tag {expected}, found {tag}; it was changed")


def _expect_directory(path: str) -> None:
    with SystemCall("find the directory", path):
        mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        raise ObjectNotFoundError(f"cannot find the directory {path}: expected a directory, found something else")


_WRITEBACK_BYTES: Final = 4 << 20


class LocalWriter:
    """Writes a new file. Thread-safe."""

    def __init__(
        self, path: str, descriptor: int, size: int | None, directories: LocalDirectories, *, durable: bool
    ) -> None:
        """Write to an empty file that is open for writing.

        Args:
            path: the path of the file.
            descriptor: the descriptor of the file, which the writer closes.
            size: the final size in bytes, if known.
            directories: the directories of its storage.
            durable: True if the complete file must survive a loss of power.
        """
        self._path = path
        self._descriptor = descriptor
        self._size = size
        self._directories = directories
        self._durable = durable
        self._written = 0
        self._dirty_bytes = 0
        self._dirty_start = sys.maxsize
        self._dirty_stop = 0
        self._complete = False
        self._status = os.fstat(descriptor)
        self._begin()
        close_in_children(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        # Identifiers of threads that are writing. A thread that is interrupted may leave its
        # identifier here. It removes the identifier when it calls `finish` or `abort`.
        self._writing: set[int] = set()

    def forget(self) -> None:
        """Close the file in a forked child, which must neither write nor remove the file of its parent."""
        self._begin()
        self._complete = True
        with suppress(OSError):
            self._close()

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset.

        Raises:
            ValueError: outside of the file's size, or after `finish` or `abort`.
            StorageFullError, StorageError
        """
        nbytes = len(data)
        if offset < 0 or (self._size is not None and offset + nbytes > self._size):
            raise ValueError(
                f"cannot write bytes {offset} to {offset + nbytes} of {self._path}: its size is {self._size} bytes"
            )
        thread = threading.get_ident()
        try:
            with self._lock:
                self._expect_open()
                self._writing.add(thread)
            rest, position = memoryview(data), offset
            while rest:
                count = os.pwrite(self._descriptor, rest, position)
                position += count
                rest = rest[count:]
            self._count(offset, nbytes)
        except OSError as error:
            raise local_error(error, "write", self._path, nbytes) from error
        finally:
            with self._lock:
                self._writing.discard(thread)
                self._state.notify_all()

    def _count(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes
            if not self._durable:
                return
            # Start writeback early: the disk writes while more is copied, so that the final sync takes less time.
            self._dirty_bytes += nbytes
            self._dirty_start = min(self._dirty_start, offset)
            self._dirty_stop = max(self._dirty_stop, offset + nbytes)
            if self._dirty_bytes < _WRITEBACK_BYTES:
                return
            start, stop = self._dirty_start, self._dirty_stop
            self._dirty_bytes, self._dirty_start, self._dirty_stop = 0, sys.maxsize, 0
        start_writeback(self._descriptor, start, stop - start)

    def finish(self) -> None:
        """Complete the file.

        Raises:
            StorageError: bytes are missing, or the file could not be made durable.
            ValueError: after `finish` or `abort`.
        """
        with self._lock:
            self._expect_open()
            self._wait_for_writes()
            self._expect_open()  # another thread may have closed the file during the wait
            if self._size is not None and self._written != self._size:
                raise StorageError(
                    f"cannot complete {self._path}: expected {self._size} bytes to be written, found {self._written}"
                )
            with SystemCall("make durable", self._path, self._written):
                if self._durable:
                    sync_file(self._descriptor)
                self._close()
        if self._durable:
            self._directories.make_durable(os.path.dirname(self._path))
        self._complete = True

    def abort(self) -> None:
        """Remove the file once no thread writes to it. Does nothing after a successful `finish`."""
        with self._lock:
            self._wait_for_writes()
            # Ignore errors: an abort follows a more important error, and a later cleanup of the directory finds the
            # file.
            with suppress(OSError):
                self._close()
            if not self._complete:
                with suppress(OSError):
                    # Another save may have replaced the file, or taken over its directory, meanwhile.
                    if os.path.samestat(os.lstat(self._path), self._status):
                        os.unlink(self._path)
                        self._directories.remove_empty(os.path.dirname(self._path))

    def _wait_for_writes(self) -> None:
        self._writing.discard(threading.get_ident())
        self._state.wait_for(lambda: not self._writing)

    def _expect_open(self) -> None:
        if self._descriptor < 0:
            raise ValueError(f"{self._path} is complete or was aborted; nothing more can be written")

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
