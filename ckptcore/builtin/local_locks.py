"""Holding a directory against other processes until it is let go or this process dies."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from ckptcore.builtin.local_calls import close_descriptor, local_error

__all__ = ["DirectoryLock", "lock_object", "try_to_lock"]


class DirectoryLock:
    """A lock of a directory; `close` or leaving the ``with`` block releases it."""

    __slots__ = ("__weakref__", "_descriptor", "_path")

    def __init__(self, path: str) -> None:
        """Open a directory; `acquire` locks it.

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
            BlockingIOError: another holds it.
            FileNotFoundError: the directory was replaced.
            OSError
        """
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
            raise FileNotFoundError(errno.ENOENT, "another directory came in its place", self._path)

    def close(self) -> None:
        """Release the lock. Closing again is no error.

        Raises:
            StorageError
        """
        if self._descriptor >= 0:
            try:
                # Unlocked explicitly: a child process that was forked meanwhile may still have the file open.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            except OSError as error:
                raise local_error(error, "unlock the directory", self._path) from error
            finally:
                self.forget()

    def forget(self) -> None:
        """Close the file without unlocking, as a forked child must with the lock of its parent.

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


# A lock lives as long as any process has its file open, so children must close what they inherit by forking: else the
# workers of a data loader would go on holding the directory of a trainer that was killed.
_HELD: Final[weakref.WeakSet[DirectoryLock]] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()
    _HELD.clear()


os.register_at_fork(after_in_child=_forget_all)


def try_to_lock(directory: str) -> DirectoryLock | None:
    """Hold a directory that is there; None if another holds it, in this process or another.

    On a network file system this may only hold against processes of the same machine.

    Raises:
        FileNotFoundError: it is not there, or is no longer.
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
    """Hold a file against others that replace it in the same way; gives its descriptor, or None where there is none.

    Waits for the others. After this the path names the file that is held, unless someone replaces it without asking.

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
            if not _is_still(descriptor, path):
                continue
            yield descriptor
            return
        finally:
            close_descriptor(descriptor, path)


def _open_to_lock(path: str) -> int | None:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            # Network file systems lock only what is open for writing.
            return os.open(path, os.O_RDWR | flags)
        except PermissionError:
            return os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        # A symbolic link is no object of its own: a put replaces the link.
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


def _is_still(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
