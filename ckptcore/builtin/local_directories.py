"""Directories of local storage: listing, renaming, exchanging."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from ckptcore.builtin.local_calls import ABSENT, close_descriptor, local_error, open_without_links, sync_directory
from ckptcore.builtin.local_links import open_inside
from ckptcore.errors import AtomicityError, StorageError

__all__ = [
    "LocalDirectories",
    "exchange",
    "list_files",
    "list_names",
    "rename_without_replacing",
]


def list_files(directory: str, prefix: str, is_hidden: Callable[[str], bool]) -> Iterator[str]:
    """The files below a directory, as `prefix` and their path below it, sorted; links to directories are not entered.

    Raises:
        StorageError
    """
    # Sorted as whole paths: "a-b" comes before "a/b", though "a" comes before "a-b".
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
    """The names in a directory, sorted; those of directories, and of links to them, end in ``/``.

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
    """Return the type of an entry; False for a broken link or a cycle of links."""
    try:
        return is_kind()
    except OSError as error:
        if error.errno == errno.ELOOP or error.errno in ABSENT:
            return False
        raise local_error(error, "look at", entry.path) from error


# linux/fs.h and macOS's sys/stdio.h
_LINUX_NO_REPLACE: Final = 1
_LINUX_EXCHANGE: Final = 2
_MACOS_EXCHANGE: Final = 2
_MACOS_NO_REPLACE: Final = 4
_AT_FDCWD: Final = -100
# What systems and file systems answer that know no such rename. EINVAL also stands for a directory moved into itself.
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})

_Rename = Callable[[bytes, bytes], int]


def rename_without_replacing(source: str, destination: str) -> None:
    """Rename a file or directory, atomically.

    Raises:
        FileExistsError: something stands at the destination; nothing was changed.
        AtomicityError: the file system cannot; nothing was changed.
        OSError
    """
    _call(_no_replace(), source, destination, "rename without replacing")


def exchange(first: str, second: str) -> None:
    """Let two names of one file system change places, atomically.

    Raises:
        AtomicityError: the file system cannot; nothing was changed.
        OSError
    """
    _call(_exchange(), first, second, "exchange two names")


def _call(function: _Rename | None, first: str, second: str, what: str) -> None:
    number = errno.ENOSYS
    if function is not None:
        if function(os.fsencode(first), os.fsencode(second)) == 0:
            return
        number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        raise AtomicityError(
            f"cannot {what} atomically: {first} and {second} are on a file system or operating system without it "
            f"({os.strerror(number)}); nothing was changed. Use a local file system, or save to a new location"
        )
    raise OSError(number, os.strerror(number), first, None, second)


@functools.cache
def _no_replace() -> _Rename | None:
    return _with_flag(_LINUX_NO_REPLACE, _MACOS_NO_REPLACE)


@functools.cache
def _exchange() -> _Rename | None:
    return _with_flag(_LINUX_EXCHANGE, _MACOS_EXCHANGE)


def _with_flag(linux_flag: int, macos_flag: int) -> _Rename | None:
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        if (renamex := getattr(library, "renamex_np", None)) is None:
            return None
        renamex.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint)
        return lambda first, second: int(renamex(first, second, macos_flag))
    if (renameat2 := getattr(library, "renameat2", None)) is None:
        return None
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return lambda first, second: int(renameat2(_AT_FDCWD, first, _AT_FDCWD, second, linux_flag))


_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Where synced directories are forgotten again; a storage that sees more of them only syncs some twice.
_KNOWN_DIRECTORIES = 4096
_LOOKS = 4
_LOOK_SECONDS = 0.001


class LocalDirectories:
    """The directories below one root. Any thread."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._created: set[str] = set()
        # Path, device and inode of directories whose own names are durable: a directory made anew is another one.
        self._durable: set[tuple[str, int, int]] = set()
        self._lock = threading.Lock()

    def ensure(self, directory: str) -> None:
        """Create a directory of the storage, and those above it, where they are missing.

        Raises:
            InvalidLocationError: a symbolic link leads out of the checkpoint.
            StorageError
        """
        # Others may remove directories that are empty while this creates one in them: then all of it begins anew.
        while not self.is_there(directory):
            if _is_below(directory, self.root):
                self.ensure(os.path.dirname(directory))
                self._make(directory)
                continue
            missing = [directory]
            while not os.path.isdir(above := os.path.dirname(missing[-1])) and above != missing[-1]:
                missing.append(above)
            for path in reversed(missing):
                self._make(path)

    def is_there(self, directory: str) -> bool:
        """Whether a directory of the storage exists.

        Raises:
            InvalidLocationError: a symbolic link leads out of the checkpoint.
            StorageError: something else stands there.
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
        """Refuse a path whose directory is behind a link that leads out; a missing directory is left to the caller.

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
        # With "/." after it, the first component is checked as a checkpoint, not as a file.
        return open_inside(self.root, f"{directory}/.", _OPEN_DIRECTORY)

    def _make(self, directory: str) -> None:
        try:
            os.mkdir(directory)
        except FileNotFoundError:
            return
        except FileExistsError as error:
            # Another thread or process was faster, or it is no directory. It may be gone again by now: one look, not two.
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(directory).st_mode) and not os.path.isdir(directory):
                    raise self._not_a_directory(error, directory) from error
        except OSError as error:
            raise local_error(error, "create the directory", directory) from error
        self._created.add(directory)

    def _not_a_directory(self, error: OSError, directory: str) -> StorageError:
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            found = StorageError(
                f"cannot create the directory {directory}: something that is no directory stands there or above it. "
                "Move it away, or use another location"
            )
            found.errno = error.errno
            return found
        return local_error(error, "open the directory", directory)

    def make_durable(self, directory: str) -> None:
        """Make the names in a directory durable, its own name too, and those of the directories above it.

        Up to the root, and further up as far as this storage created them.

        Raises:
            StorageError
        """
        self.sync_names(directory)
        while _is_below(directory, self.root) or directory == self.root or directory in self._created:
            try:
                status = os.stat(directory)
            except OSError as error:
                raise local_error(error, "look at the directory", directory) from error
            identity = (directory, status.st_dev, status.st_ino)
            with self._lock:
                if identity in self._durable:
                    return
            above = os.path.dirname(directory)
            if above == directory:
                return
            self.sync_names(above, required=directory != self.root or directory in self._created)
            with self._lock:
                if len(self._durable) >= _KNOWN_DIRECTORIES:
                    self._durable.clear()
                self._durable.add(identity)
            directory = above

    def sync_names(self, directory: str, *, required: bool = True) -> None:
        """Make the names in one directory durable.

        Args:
            directory: its path.
            required: whether it is an error if it cannot be opened: not for one above a root that others made, where
                permission may be missing.

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
        """Remove a directory if it is empty and nobody holds it, then those above it likewise; never the root.

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
    for attempt in range(_LOOKS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Held by a save, or for an instant by another thread that looks whether it can be removed.
            if attempt + 1 < _LOOKS:
                time.sleep(_LOOK_SECONDS)
        else:
            return True
    return False


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory if directory.endswith("/") else directory + "/")
