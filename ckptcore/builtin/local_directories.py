"""Directories of local storage: listing, creation, durable names, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from ckptcore.builtin.local_calls import (
    ABSENT,
    NO_LOCKS,
    SystemCall,
    close_descriptor,
    close_in_children,
    ignoring,
    local_error,
    open_inside,
    open_without_links,
    retry_stale,
    sync_directory,
)
from ckptcore.builtin.local_mounts import find_mount_point, has_locks_of_all_hosts, is_mounted
from ckptcore.errors import ObjectNotFoundError, StorageError


def list_files(directory: str, prefix: str, is_hidden: Callable[[str], bool]) -> Iterator[str]:
    """Return the files below a directory, as `prefix` plus relative path, sorted. Does not enter links to directories.

    Raises:
        StorageError
    """
    # Sort whole paths: "a-b" is before "a/b", although "a" is before "a-b".
    files: list[str] = []
    pending = [(directory, prefix)]
    while pending:
        path, start = pending.pop()
        for entry in _entries(path):
            if _follows(partial(entry.is_dir, follow_symlinks=False), entry):
                pending.append((entry.path, f"{start}{entry.name}/"))
            elif not is_hidden(entry.name) and _follows(entry.is_file, entry):
                files.append(start + entry.name)
    return iter(sorted(files))


def list_names(directory: str, is_hidden: Callable[[str], bool]) -> list[str]:
    """Return the names in a directory, sorted. Names of directories, and of links to them, end in ``/``.

    Raises:
        StorageError
    """
    names = []
    for entry in _entries(directory):
        if _follows(entry.is_dir, entry):
            names.append(entry.name + "/")
        elif not is_hidden(entry.name) and _follows(entry.is_file, entry):
            names.append(entry.name)
    return sorted(names)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    # A directory whose name is too long cannot exist.
    with SystemCall("list", directory), ignoring((*ABSENT, errno.ENAMETOOLONG)):
        return retry_stale(partial(_scan, directory))
    return []


def _scan(directory: str) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return list(entries)


def _follows(is_kind: Callable[[], bool], entry: os.DirEntry[str]) -> bool:
    """Return the result of a type test of an entry; False for a broken link, a cycle, or an unreachable target."""
    try:
        return retry_stale(is_kind)
    except OSError as error:
        if error.errno == errno.ELOOP or error.errno in ABSENT or os.path.islink(entry.path):
            return False
        raise local_error(error, "read the type of", entry.path) from error


_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Maximum number of directories that are remembered as durable. Beyond this, some are synced again.
_MAX_REMEMBERED = 4096
_CREATE_ATTEMPTS = 1000
_LEAVES_EMPTY = (
    errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY,
)  # fmt: skip
"""Errors of `rmdir` that are ignored, so that the directory stays: it is not empty, or may not be removed."""
_LOCK_ATTEMPTS = 4
_LOCK_PAUSE_SECONDS = 0.001


class LocalDirectories:
    """The directories below one root. Thread-safe."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._created: set[str] = set()
        self._deferred: list[DeferredNames] = []
        # Path, device and inode of directories with durable names. A new directory at the path has another inode.
        self._durable: set[tuple[str, int, int]] = set()
        self._lock = threading.Lock()
        self._mount_point = find_mount_point(root)
        close_in_children(self)

    def forget(self) -> None:
        """Replace the lock in a forked child, because a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def ensure(self, directory: str) -> None:
        """Create a directory of the storage and its missing parents.

        Raises:
            InvalidLocationError: a symbolic link leads out of the checkpoint.
            StorageError: also if the file system of the root is no longer mounted. Nothing is created below its mount
                point.
        """
        # Another process may remove an empty parent meanwhile: start again. Some file systems, such as /proc, also
        # report a missing parent where they do not support new directories, so the attempts are limited.
        for _ in range(_CREATE_ATTEMPTS):
            if self.exists(directory):
                # While a file system is not mounted, its mount point is still a directory.
                if directory == self.root and self._mount_point not in (None, "/"):
                    self._expect_mounted()
                return
            if _is_below(directory, self.root):
                self.ensure(os.path.dirname(directory))
                self._make(directory)
                continue
            missing = [directory]
            while not os.path.isdir(above := os.path.dirname(missing[-1])) and above != missing[-1]:
                missing.append(above)
            self._expect_mounted()
            for path in reversed(missing):
                self._make(path)
        if not self.exists(directory):
            raise StorageError(
                f"cannot create the directory {directory}: the file system reports that its parent is missing, after "
                f"{_CREATE_ATTEMPTS} attempts. Save to a file system that supports new directories, or end the program "
                "that removes this directory"
            )

    def exists(self, directory: str) -> bool:
        """Return True if a directory of the storage exists.

        Raises:
            InvalidLocationError: a symbolic link leads out of the checkpoint.
            StorageError: it is not a directory, or cannot be opened.
        """
        try:
            descriptor = self._open(directory)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._not_a_directory(error, directory) from error
        close_descriptor(descriptor, directory)
        if self._mount_point is None:  # the root did not exist when the storage was opened
            self._mount_point = find_mount_point(self.root)
        return True

    def _expect_mounted(self) -> None:
        """Refuse to create anything in the root while its file system is not mounted.

        Raises:
            StorageError
        """
        point = self._mount_point
        with SystemCall("read the mount of", str(point)):
            is_there = point is None or is_mounted(point)
        if not is_there:
            raise StorageError(
                f"{self.root} is not there: the file system of {point} is not mounted now. Nothing was "
                "created below its mount point. Mount it again, and save again; or save to another directory. A "
                "program that is started again takes the directory as it is then"
            )

    def check_parent(self, path: str) -> None:
        """Refuse a path if a link on it leads out of the checkpoint. The caller handles a missing directory.

        Raises:
            InvalidLocationError
        """
        directory = os.path.dirname(path)
        if directory != self.root:
            try:
                descriptor = self._open(directory)
            except OSError:
                return
            close_descriptor(descriptor, directory)

    def _open(self, directory: str) -> int:
        """Open the root or a directory below it. See `open_inside`."""
        descriptor = open_without_links(directory, _OPEN_DIRECTORY)
        if descriptor is not None:
            return descriptor
        if not _is_below(directory, self.root):
            return os.open(directory, _OPEN_DIRECTORY)
        # With "/." appended, the first component is checked as a checkpoint, not as a file.
        return open_inside(self.root, f"{directory}/.", _OPEN_DIRECTORY)

    def _make(self, directory: str) -> None:
        try:
            os.mkdir(directory)
        except FileNotFoundError:
            return
        except FileExistsError as error:
            # Another process created the directory, or the path is not a directory. The directory may be removed again
            # at any time, so it is no error if the path does not exist.
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(directory).st_mode) and not os.path.isdir(directory):
                    raise self._not_a_directory(error, directory) from error
        except OSError as error:
            raise local_error(error, "create the directory", directory) from error
        self._created.add(directory)

    def _not_a_directory(self, error: OSError, directory: str) -> StorageError:
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            converted = StorageError(
                f"cannot create the directory {directory}: it or a parent exists and is not a directory. "
                "Move that away, or use another location"
            )
            converted.errno = error.errno
            return converted
        return local_error(error, "open the directory", directory)

    def defers(self, directory: str) -> bool:
        """Return True if the names in a directory are synced later. Then note that the directory has new names."""
        with self._lock:
            above = [names for names in self._deferred if directory == names.top or _is_below(directory, names.top)]
            for names in above:
                noted = directory
                while noted not in names.noted:
                    names.noted.add(noted)
                    if noted == names.top:
                        break
                    noted = os.path.dirname(noted)
            return bool(above)

    def end_deferral(self, top: str, only: DeferredNames | None = None) -> bool:
        """End the deferrals of the names in a directory, or one of them. Return False if they had ended before."""
        with self._lock:
            before = len(self._deferred)
            self._deferred = [names for names in self._deferred if names.top != top or only not in (None, names)]
            return len(self._deferred) < before

    def make_durable(self, directory: str) -> None:
        """Make the names in a directory durable, and the names of the directory and its parents.

        The name of the root in its parent is synced too, if permissions allow it. Above that, only the names of
        directories that this storage created are synced. Does nothing if the names are deferred: see `DeferredNames`.

        Raises:
            StorageError
        """
        if self.defers(directory):
            return
        sync_names(directory)
        while _is_below(directory, self.root) or directory == self.root or directory in self._created:
            with SystemCall("read the status of the directory", directory):
                status = os.stat(directory)
            identity = (directory, status.st_dev, status.st_ino)
            with self._lock:
                if identity in self._durable:
                    return
            above = os.path.dirname(directory)
            if above == directory:
                return
            sync_names(above, required=directory != self.root or directory in self._created)
            with self._lock:
                if len(self._durable) >= _MAX_REMEMBERED:
                    self._durable.clear()
                self._durable.add(identity)
            directory = above

    def remove_empty(self, directory: str) -> None:
        """Remove a directory if it is empty and not locked. Then do the same with its parent. Never removes the root.

        Raises:
            StorageError
        """
        while _is_below(directory, self.root):
            try:
                descriptor = os.open(directory, _OPEN_DIRECTORY | os.O_NOFOLLOW)
            except OSError as error:
                if error.errno in ABSENT or error.errno == errno.ELOOP:
                    return
                raise local_error(error, "open the directory", directory) from error
            try:
                if not _is_free(descriptor):
                    return
                os.rmdir(directory)
            except OSError as error:
                if error.errno in _LEAVES_EMPTY:
                    return
                raise local_error(error, "remove the empty directory", directory) from error
            finally:
                close_descriptor(descriptor, directory)
            directory = os.path.dirname(directory)


@dataclass(eq=False, slots=True)
class DeferredNames:
    """A ``with`` block in which the names in a directory and below it are not synced.

    Its end syncs each directory once in which the storage changed names meanwhile, unless an error ends it, or the
    names are durable already (`LocalStorage.sync_directory`) or deleted.
    """

    directories: LocalDirectories
    top: str
    noted: set[str] = field(default_factory=set)
    """Directories in which names changed, with their parents up to `top`."""

    def __enter__(self) -> None:
        with self.directories._lock:
            self.directories._deferred.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.directories.end_deferral(self.top, self) or kind is not None or not self.noted:
            return
        for directory in sorted(self.noted - {self.top}, reverse=True):
            with suppress(ObjectNotFoundError):  # removed meanwhile, such as an empty directory of an aborted writer
                sync_names(directory)
        self.directories.make_durable(self.top)


def sync_names(directory: str, *, required: bool = True) -> None:
    """Make the names in one directory durable.

    Args:
        directory: the path.
        required: False to ignore missing permissions, for parents of the root that others created.

    Raises:
        StorageError
    """
    try:
        descriptor = os.open(directory, _OPEN_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM) and not required:
            return
        raise local_error(error, "open the directory", directory) from error
    try:
        with SystemCall("make durable the names in", directory):
            sync_directory(descriptor)
    finally:
        close_descriptor(descriptor, directory)


def _is_free(descriptor: int) -> bool:
    """Try to lock an open directory. Return True if it was not locked; the descriptor then holds the lock."""
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A save holds the lock, or another thread in this function holds it for a moment.
            if attempt + 1 < _LOCK_ATTEMPTS:
                time.sleep(_LOCK_PAUSE_SECONDS)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return True  # saves on this file system use leases instead of locks
        else:
            return True
    return False


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory if directory.endswith("/") else directory + "/")


class FileLock:
    """A lock of a file or directory against other processes; `close` or leaving the ``with`` block releases it.

    The kernel releases it when the process ends. A lock exists as long as any process has the file open. So a forked
    child closes its copy of the file. Otherwise workers of a data loader would keep the lock after their trainer was
    killed.
    """

    __slots__ = ("__weakref__", "_descriptors", "_follows_links", "_locked", "_path")

    def __init__(self, path: str) -> None:
        """Create the object without a lock. `path` is the path of the file or directory."""
        self._descriptors: list[int] = []
        self._follows_links = True
        self._locked: os.stat_result | None = None
        self._path = path
        close_in_children(self)

    def open(self, flags: int) -> int:
        """Open the file. Return its descriptor, which this object closes.

        Raises:
            OSError
        """
        self._follows_links = not flags & os.O_NOFOLLOW
        self._descriptors.append(os.open(self._path, flags | os.O_CLOEXEC))
        return self._descriptors[0]

    def acquire(self, *, wait: bool = False) -> None:
        """Lock the open file.

        Raises:
            BlockingIOError: it is locked, and `wait` is False.
            FileNotFoundError: the path no longer leads to the open file.
            OSError: its number is in `NO_LOCKS` if the file system has no locks.
        """
        # NFS refuses exclusive locks of directories, because a directory cannot be opened for writing: see `NO_LOCKS`.
        fcntl.flock(self._descriptors[0], fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        self._locked = os.fstat(self._descriptors[0])
        # Another process may have renamed or removed the file between the open and the lock.
        if not self.is_in_place():
            raise FileNotFoundError(errno.ENOENT, "it was replaced", self._path)

    def is_in_place(self) -> bool:
        """See `DirectoryLock`. While the file is open, no other file can get its device and inode numbers.

        Raises:
            StorageError
        """
        assert self._locked is not None, "acquire was called"
        with SystemCall("read the status of", self._path), ignoring(ABSENT):
            current = retry_stale(partial(os.stat, self._path, follow_symlinks=self._follows_links))
            return os.path.samestat(self._locked, current)
        return False

    def close(self) -> None:
        """Release the lock. Closing again does nothing.

        Raises:
            StorageError
        """
        for descriptor in self._taken():
            try:
                # A child process that was forked meanwhile may still have the file open, so that closing would not
                # unlock it.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                close_descriptor(descriptor, self._path)

    def forget(self) -> None:
        """Close the file without unlocking, as a forked child must do with a lock of its parent.

        Raises:
            StorageError
        """
        for descriptor in self._taken():
            close_descriptor(descriptor, self._path)

    def _taken(self) -> list[int]:
        """Remove and return the descriptor. Only one of several threads gets it, because `list.pop` is atomic."""
        try:
            return [self._descriptors.pop()]
        except IndexError:
            return []

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def try_to_lock(directory: str) -> FileLock | None:
    """Lock an existing directory. Return None if this process or another process has locked it already.

    Raises:
        FileNotFoundError: the directory does not exist, or was replaced.
        OSError: its number is in `NO_LOCKS` if the file system has no locks of directories that all hosts see.
    """
    lock = FileLock(directory)
    try:
        if not has_locks_of_all_hosts(lock.open(os.O_RDONLY | os.O_DIRECTORY)):
            raise OSError(errno.ENOLCK, "other hosts may not see its locks", directory)
        lock.acquire()
    except BlockingIOError:
        lock.forget()
        return None
    except BaseException:
        lock.forget()
        raise
    return lock


def can_lock(directory: str) -> bool:
    """Return True if the file system of a directory has locks of directories, and all hosts see them.

    Locks the nearest existing directory for a moment, and changes nothing.

    Raises:
        OSError: the directory cannot be opened, or locking it fails for another reason.
    """
    while True:
        try:
            lock = try_to_lock(directory)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            if error.errno not in ABSENT or directory == "/":
                raise
            directory = os.path.dirname(directory)
        else:
            if lock is not None:
                lock.close()
            return True


@contextmanager
def lock_object(path: str) -> Iterator[int | None]:
    """Lock a file against concurrent replacement. Yields its descriptor, or None if the file does not exist.

    A symbolic link at the path counts as a missing file, because a put replaces the link.

    Waits until the lock is free. While it is held, the path leads to the locked file, unless a process replaces the
    file without the lock. If the file system has no locks of files, the file is not locked.

    Raises:
        OSError
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        lock, descriptor = FileLock(path), None
        try:
            with ignoring((errno.ENOENT, errno.ELOOP)):
                try:
                    # Network file systems lock only files that are open for writing.
                    descriptor = lock.open(os.O_RDWR | flags)
                except PermissionError:
                    descriptor = lock.open(os.O_RDONLY | flags)
            if descriptor is not None:
                try:
                    with ignoring(NO_LOCKS):
                        lock.acquire(wait=True)
                except FileNotFoundError:
                    continue
            yield descriptor
            return
        finally:
            lock.close()
