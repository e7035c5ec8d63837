"""Directories of the local disk in which files stand on their way between an object and a checkpoint."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ckptcore.builtin.local_locks import DirectoryLock, try_to_lock
from ckptcore.errors import StorageError

__all__ = ["StagingDirectory"]

_PREFIX: Final = "ckptcore-staging-"


class StagingDirectory:
    """A new directory in the system's place for temporary files, empty and of this process alone.

    It is locked as long as it is used: the kernel drops the lock when the process dies, however it dies, and the next one that
    is made on the same machine removes what nobody holds. Other machines, which may have the same place and not see the lock,
    leave it alone; so does this one once it was started anew.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        """Make one.

        Raises:
            StorageError: if there is no place for it, or it cannot be locked; then it is removed again.
        """
        try:
            above = tempfile.gettempdir()
            _sweep(above)
            self.path, self._lock = _make(above)
        except OSError as error:
            raise StorageError(
                error.errno,
                f"cannot make a directory for files on their way between an object and a checkpoint: {error}; set TMPDIR to a "
                "directory of a local disk that can be written to and locked",
            ) from error

    def close(self) -> None:
        """Remove it and all that is in it; again is no error. What cannot be removed is left to the next sweep."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _make(above: str) -> tuple[Path, DirectoryLock]:
    while True:
        path = tempfile.mkdtemp(prefix=_prefix(), dir=above)
        try:
            lock = try_to_lock(path)
        except FileNotFoundError:
            continue  # swept before it was locked
        except BaseException:
            os.rmdir(path)
            raise
        if lock is not None:
            return Path(path), lock


@functools.cache
def _prefix() -> str:
    """How the names of all staging directories of this machine begin, from its start to its end."""
    try:
        # Not the name of the host: several containers and machines may have the same.
        machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        machine = platform.node().encode("utf-8", "surrogateescape")
    return f"{_PREFIX}{hashlib.sha256(machine).hexdigest()[:16]}-"


def _sweep(above: str) -> None:
    """Remove the staging directories of processes of this user, on this machine, that died."""
    try:
        with os.scandir(above) as entries:
            found = [entry.path for entry in entries if entry.name.startswith(_prefix())]
    except PermissionError:
        return  # others may write there and not look
    for path in found:
        try:
            if os.lstat(path).st_uid != os.geteuid():
                continue
            lock = try_to_lock(path)
        except OSError:
            continue  # gone meanwhile, or no directory of ours
        if lock is not None:
            with lock:
                shutil.rmtree(path, ignore_errors=True)
