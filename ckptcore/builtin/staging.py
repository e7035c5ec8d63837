"""Staging directories. Objects write their own files into them, and a save then stores the files."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import xxhash

from ckptcore.builtin.local_calls import NO_LOCKS
from ckptcore.builtin.local_directories import FileLock, try_to_lock
from ckptcore.errors import NameCollisionError, StorageError, UnsupportedLeafError
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.transfer import ArraySegment, BytesSegment, Segment

_PREFIX: Final = "ckptcore-staging-"


class StagingDirectory:
    """A new empty directory of this process, in the temporary directory of the system.

    It is locked while it is in use. The kernel releases the lock when the process ends. When this user creates another
    staging directory on the same machine, all unlocked staging directories are removed. Other machines may share the
    temporary directory without seeing the lock. They do not remove the directory, because its name depends on the boot
    of this machine. For the same reason, this machine does not remove it after a restart. On a file system without
    locks, no other process removes it.

    Attributes:
        path: the path.
    """

    def __init__(self) -> None:
        """Create and lock the directory.

        Raises:
            StorageError: the directory cannot be created or locked.
        """
        try:
            above = tempfile.gettempdir()
            _sweep(above)
            self.path, self._lock = _make(above)
        except OSError as error:
            raise StorageError(
                error.errno,
                f"cannot create a temporary directory for the files of an object: {error}; set TMPDIR to a directory "
                "of a local disk that can be written to and locked",
            ) from error

    def contents(self) -> tuple[Mapping[str, Segment], Sequence[str]]:
        """Return the bytes of every file by key, and the keys of empty directories, both sorted.

        Raises:
            UnsupportedLeafError: an entry is neither a file nor a directory.
            NameCollisionError: a name begins with ``checkpoint.``, which is reserved for ckptcore's own files.
            OSError: a directory cannot be read.
        """
        above = str(self.path)
        files: dict[str, Segment] = {}
        empty = []
        for parent, directories, names in os.walk(above, onerror=_raise):
            if not directories and not names and parent != above:
                empty.append(_own_key(parent, above))
            for name in [*names, *(name for name in directories if os.path.islink(os.path.join(parent, name)))]:
                path = os.path.join(parent, name)
                key = _own_key(path, above)
                if os.path.islink(path) or not os.path.isfile(path):
                    raise UnsupportedLeafError(
                        f"the object wrote {key!r}, which is not a regular file; only files can be stored"
                    )
                files[key] = _segment_of(path)
        return dict(sorted(files.items())), sorted(empty)

    def close(self) -> None:
        """Remove the directory. Closing again does nothing. The next sweep removes files that could not be removed."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _make(above: str) -> tuple[Path, FileLock]:
    while True:
        path = tempfile.mkdtemp(prefix=_prefix(), dir=above)
        try:
            lock = try_to_lock(path)
        except FileNotFoundError:
            continue  # another process swept it before it was locked
        except OSError as error:
            if error.errno in NO_LOCKS:
                return Path(path), FileLock(path)  # safe without a lock: a sweep removes only directories it can lock
            os.rmdir(path)
            raise
        except BaseException:
            os.rmdir(path)
            raise
        if lock is not None:
            return Path(path), lock


@functools.cache
def _prefix() -> str:
    """Return the prefix of the names of all staging directories of this machine since its last start.

    Systems other than Linux have no boot id. There the prefix is the same after a restart.
    """
    try:
        # Not the host name: containers and machines may share it.
        machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        machine = platform.node().encode("utf-8", "surrogateescape")
    return f"{_PREFIX}{xxhash.xxh3_64_hexdigest(machine)}-"


def _sweep(above: str) -> None:
    """Remove staging directories of ended processes of this user on this machine."""
    try:
        with os.scandir(above) as entries:
            paths = [entry.path for entry in entries if entry.name.startswith(_prefix())]
    except PermissionError:
        return  # the directory may be writable but not readable
    for path in paths:
        try:
            if os.lstat(path).st_uid != os.geteuid():
                continue
            lock = try_to_lock(path)
        except OSError:
            continue  # another process removed it, or it is not a staging directory
        if lock is not None:
            with lock:
                shutil.rmtree(path, ignore_errors=True)


def _own_key(path: str, directory: str) -> str:
    key = os.path.relpath(path, directory).replace(os.sep, "/")
    if key.startswith("checkpoint."):
        raise NameCollisionError(
            f"the object wrote {key!r}; names that begin with 'checkpoint.' are reserved for ckptcore's own files"
        )
    return key


def _raise(error: OSError) -> NoReturn:
    raise error


def _segment_of(path: str) -> Segment:
    """Return the bytes of a file as a segment. The file is mapped when the segment is written."""
    size = os.path.getsize(path)
    if not size:
        return BytesSegment(b"")
    box = Box((0,), (size,))

    def map_bytes() -> Sequence[tuple[Box, HostArray]]:
        return ((box, np.memmap(path, np.uint8, "r", shape=(size,))),)

    return ArraySegment(box, 1, map_bytes, lambda: None)
