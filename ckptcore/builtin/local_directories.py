"""The directory that a local storage keeps to: what is within it, what it creates, which names survive power loss."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import threading
import time
from contextlib import suppress

from ckptcore.builtin.local_errors import ABSENT, local_error
from ckptcore.builtin.local_syncs import sync_directory
from ckptcore.errors import InvalidLocationError, StorageError

__all__ = ["LocalDirectories"]

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Where synced directories are forgotten again; a storage that sees more of them only syncs some twice.
_KNOWN_DIRECTORIES = 4096
_LOOKS = 4
_LOOK_SECONDS = 0.001


class LocalDirectories:
    """The directories below one root. Any thread."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._real_root: str | None = None
        self._created: set[str] = set()
        # Path, device and inode of directories whose own names are durable: a directory made anew is another one.
        self._durable: set[tuple[str, int, int]] = set()
        self._lock = threading.Lock()

    def check_within(self, descriptor: int, path: str) -> None:
        """Refuse a file or directory that was opened by a path within the root but is not in it: a symbolic link led out.

        Links within the root are followed, and so is the link that the root itself may be. The cache of the Hugging
        Face hub is as it was made: links in ``models--*/snapshots/`` lead to ``models--*/blobs/``.

        Raises:
            InvalidLocationError
        """
        real = _path_of(descriptor, path)
        if _is_below(real, self.root) or (self._real_root is not None and _is_below(real, self._real_root)):
            return
        # The root may have been created, or become another directory, since it was last looked at.
        self._real_root = os.path.realpath(self.root)
        if _is_below(real, self._real_root) or _is_hub_blob(real, os.path.realpath(os.path.dirname(path))):
            return
        raise InvalidLocationError(
            f"{path} leads out of {self.root}, to {real}; links out of a checkpoint are not followed. "
            "Copy the file into the checkpoint, or name the place it is in as the location"
        )

    def ensure(self, directory: str) -> None:
        """Create a directory of the storage, and those above it, where they are missing.

        Raises:
            InvalidLocationError: a symbolic link leads out of the root.
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
            InvalidLocationError: a symbolic link leads out of the root.
            StorageError: something else stands there.
        """
        try:
            descriptor = os.open(directory, _OPEN_DIRECTORY)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._not_a_directory(error, directory) from error
        try:
            if directory != self.root:
                self.check_within(descriptor, directory)
        finally:
            os.close(descriptor)
        return True

    def check_parent(self, path: str) -> None:
        """Refuse what links lead to outside the root; what is not there is left to who looks for it.

        Raises:
            InvalidLocationError
        """
        directory = os.path.dirname(path)
        if directory == self.root:
            return
        try:
            descriptor = os.open(directory, _OPEN_DIRECTORY)
        except OSError:
            return
        try:
            self.check_within(descriptor, directory)
        finally:
            os.close(descriptor)

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
            os.close(descriptor)

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
                os.close(descriptor)
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


def _is_hub_blob(real: str, link_directory: str) -> bool:
    repository, found, _ = link_directory.partition("/snapshots/")
    return bool(found) and "--" in os.path.basename(repository) and real.startswith(repository + "/blobs/")


def _path_of(descriptor: int, path: str) -> str:
    """The path of an open file without symbolic links."""
    if sys.platform == "linux":
        with suppress(OSError):  # where /proc is not mounted, the path is resolved instead
            return os.readlink(f"/proc/self/fd/{descriptor}")
    return os.path.realpath(path)
