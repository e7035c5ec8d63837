"""Directories of local storage: listing, creation, durable names, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Final

from ckptcore.builtin.local_calls import (
    ABSENT,
    close_descriptor,
    local_error,
    open_inside,
    open_without_links,
    sync_directory,
)
from ckptcore.errors import StorageError

__all__ = ["DirectoryLock", "LocalDirectories", "list_files", "list_names", "lock_object", "try_to_lock"]


def list_files(directory: str, prefix: str, is_hidden: Callable[[str], bool]) -> Iterator[str]:
    """Return the files below a directory, as `prefix` plus relative path, sorted. Does not enter links to directories.

    Raises:
        StorageError
    """
    # Sorted as whole paths: "a-b" is before "a/b", although "a" is before "a-b".
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
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise local_error(error, "list", directory) from error


def _follows(is_kind: Callable[[], bool], entry: os.DirEntry[str]) -> bool:
    """Return the result of a type test of an entry; False for a broken link or a cycle of links."""
    try:
        return is_kind()
    except OSError as error:
        if error.errno == errno.ELOOP or error.errno in ABSENT:
            return False
        raise local_error(error, "read the type of", entry.path) from error


_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Most directories that are remembered as durable. Beyond this, some are synced twice.
_MAX_REMEMBERED = 4096
_CREATE_ATTEMPTS = 1000
_LOCK_ATTEMPTS = 4
_LOCK_PAUSE_SECONDS = 0.001


class LocalDirectories:
    """The directories below one root. Thread-safe."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._created: set[str] = set()
        # Path, device and inode of directories with durable names. A new directory at the path has another inode.
        self._durable: set[tuple[str, int, int]] = set()
        self._lock = threading.Lock()

    def ensure(self, directory: str) -> None:
        """Create a directory of the storage and its missing parents.

        Raises:
            InvalidLocationError: a symbolic link leads out of the checkpoint.
            StorageError
        """
        # Another process may remove an empty parent meanwhile: start again. Some file systems, such as /proc, also
        # report a missing parent where they do not support new directories, so the attempts are limited.
        for _ in range(_CREATE_ATTEMPTS):
            if self.exists(directory):
                return
            if _is_below(directory, self.root):
                self.ensure(os.path.dirname(directory))
                self._make(directory)
                continue
            missing = [directory]
            while not os.path.isdir(above := os.path.dirname(missing[-1])) and above != missing[-1]:
                missing.append(above)
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
        return True

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
            # Another process created it, or it is not a directory. It may be removed again at any time, so its type is
            # read once.
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(directory).st_mode) and not os.path.isdir(directory):
                    raise self._not_a_directory(error, directory) from error
        except OSError as error:
            raise local_error(error, "create the directory", directory) from error
        self._created.add(directory)

    def _not_a_directory(self, error: OSError, directory: str) -> StorageError:
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            found = StorageError(
                f"cannot create the directory {directory}: it or a parent exists and is not a directory. "
                "Move that away, or use another location"
            )
            found.errno = error.errno
            return found
        return local_error(error, "open the directory", directory)

    def make_durable(self, directory: str) -> None:
        """Make the names in a directory durable, and the names of the directory and its parents.

        The name of the root in its parent is synced too, if permissions allow it. Above that, only the names of
        directories that this storage created are synced.

        Raises:
            StorageError
        """
        self.sync_names(directory)
        while _is_below(directory, self.root) or directory == self.root or directory in self._created:
            try:
                status = os.stat(directory)
            except OSError as error:
                raise local_error(error, "read the status of the directory", directory) from error
            identity = (directory, status.st_dev, status.st_ino)
            with self._lock:
                if identity in self._durable:
                    return
            above = os.path.dirname(directory)
            if above == directory:
                return
            self.sync_names(above, required=directory != self.root or directory in self._created)
            with self._lock:
                if len(self._durable) >= _MAX_REMEMBERED:
                    self._durable.clear()
                self._durable.add(identity)
            directory = above

    def sync_names(self, directory: str, *, required: bool = True) -> None:
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
            sync_directory(descriptor)
        except OSError as error:
            raise local_error(error, "make durable the names in", directory) from error
        finally:
            close_descriptor(descriptor, directory)

    def remove_empty(self, directory: str) -> None:
        """Remove a directory if it is empty and not locked, then its parents likewise. Never removes the root.

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
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    return
                raise local_error(error, "remove the empty directory", directory) from error
            finally:
                close_descriptor(descriptor, directory)
            directory = os.path.dirname(directory)


def _is_free(descriptor: int) -> bool:
    """Try to lock an open directory. Return True if it was not locked; the descriptor then holds the lock."""
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A save holds the lock, or another thread that tries it here holds it for a moment.
            if attempt + 1 < _LOCK_ATTEMPTS:
                time.sleep(_LOCK_PAUSE_SECONDS)
        else:
            return True
    return False


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory if directory.endswith("/") else directory + "/")


class DirectoryLock:
    """A lock of a directory; `close` or leaving the ``with`` block releases it."""

    __slots__ = ("__weakref__", "_descriptor", "_path")

    def __init__(self, path: str) -> None:
        """Open a directory. `acquire` locks it.

        Raises:
            OSError
        """
        self._descriptor = -1
        self._path = path
        _HELD.add(self)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def acquire(self) -> None:
        """Lock the directory.

        Raises:
            BlockingIOError: the directory is locked.
            FileNotFoundError: the directory was replaced.
            OSError
        """
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
            raise FileNotFoundError(errno.ENOENT, "the directory was replaced", self._path)

    def close(self) -> None:
        """Release the lock. Closing again is no error.

        Raises:
            StorageError
        """
        if self._descriptor >= 0:
            try:
                # Unlock explicitly: a child process that was forked meanwhile may still have the file open.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            except OSError as error:
                raise local_error(error, "unlock the directory", self._path) from error
            finally:
                self.forget()

    def forget(self) -> None:
        """Close the file without unlocking, as a forked child must do with a lock of its parent.

        Raises:
            StorageError
        """
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close_descriptor(descriptor, self._path)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


# A lock exists as long as any process has its file open, so forked children close inherited files. Otherwise workers of
# a data loader would keep the directory locked after their trainer was killed.
_HELD: Final[weakref.WeakSet[DirectoryLock]] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()
    _HELD.clear()


os.register_at_fork(after_in_child=_forget_all)


def try_to_lock(directory: str) -> DirectoryLock | None:
    """Lock an existing directory; None if it is locked, by this process or another.

    On a network file system the lock may only be visible to processes of the same machine.

    Raises:
        FileNotFoundError: it does not exist, or was replaced.
        OSError
    """
    lock = DirectoryLock(directory)
    try:
        lock.acquire()
    except BlockingIOError:
        lock.forget()
        return None
    except BaseException:
        lock.forget()
        raise
    return lock


@contextmanager
def lock_object(path: str) -> Iterator[int | None]:
    """Lock a file against concurrent replacement. Yields its descriptor, or None without a file.

    A symbolic link at the path counts as no file, because a put replaces the link.

    Waits for other holders of the lock. Then the path names the locked file, unless a process replaces it without the
    lock.

    Raises:
        OSError
    """
    while True:
        descriptor = _open_to_lock(path)
        if descriptor is None:
            yield None
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_current(descriptor, path):
                continue
            yield descriptor
            return
        finally:
            close_descriptor(descriptor, path)


def _open_to_lock(path: str) -> int | None:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            # Network file systems lock only files that are open for writing.
            return os.open(path, os.O_RDWR | flags)
        except PermissionError:
            return os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        # A symbolic link is not an object: a put replaces the link.
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


def _is_current(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
