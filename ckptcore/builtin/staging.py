"""Directories of the local disk in which files stand on their way between an object and a checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ckptcore.builtin.local_locks import DirectoryLock, try_to_lock

__all__ = ["StagingDirectory"]

_PREFIX: Final = "ckptcore-staging-"


class StagingDirectory:
    """A new directory in the system's place for temporary files, empty and of this process alone.

    It is locked as long as it is used: the kernel drops the lock when the process dies, however it dies, and the next one that
    is made removes what nobody holds.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        """Make one.

        Raises:
            OSError: if the local disk fails.
        """
        _sweep(tempfile.gettempdir())
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            try:
                lock = try_to_lock(str(self.path))
            except FileNotFoundError:
                continue  # swept before it was locked
            if lock is not None:
                self._lock: DirectoryLock = lock
                return

    def close(self) -> None:
        """Remove it and all that is in it; again is no error. What cannot be removed is left to the next sweep."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(above: str) -> None:
    """Remove the staging directories of processes of this user that died."""
    with os.scandir(above) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
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
