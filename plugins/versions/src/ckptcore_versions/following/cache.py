"""The cache of a follower: a local directory with one directory for each version that it keeps.

A version is prepared in a hidden directory, and one rename makes it complete. Its state, ``ckptcore-version.json``, has
the checksums of its files, so that a follower that starts again can use it. No other name in the directory is touched.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ckptcore.builtin.local_calls import NO_LOCKS, SystemCall, close_descriptor, sync_file
from ckptcore.builtin.local_directories import FileLock, sync_names, try_to_lock
from ckptcore.commit.location import LocationLike
from ckptcore.errors import CorruptCheckpointError, DirectoryInUseError, StorageError
from ckptcore.events import logger_named
from ckptcore.io.threads import IOThreads
from ckptcore.model.metadata import CHECKSUM_BYTES
from ckptcore_versions.following.local_files import CACHED_BLOCK_BYTES, checksums_of_file
from ckptcore_versions.held_version import BaseVersion
from ckptcore_versions.local_directory import local_directory

logger = logger_named("ckptcore.versions")

_STATE_NAME: Final = "ckptcore-version.json"
_FORMAT: Final = 2
_COMPLETE: Final = re.compile(r"v([0-9]{6,19})")
_HIDDEN: Final = re.compile(r"\.ckptcore-version-[0-9a-f]{16}")
_MAX_STATE_BYTES: Final = 1 << 28


class CachedFile(NamedTuple):
    """A file of a cached version.

    Attributes:
        nbytes: its size.
        checksums: the checksums of its blocks of `CACHED_BLOCK_BYTES`, in the form of `ObjectRecord.checksums`.
    """

    nbytes: int
    checksums: bytes


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """A complete version in a cache.

    Attributes:
        directory: its path.
        version: its identity.
        files: its files with elements, by name.
    """

    directory: str
    version: BaseVersion
    files: Mapping[str, CachedFile]

    def is_intact(self, threads: IOThreads) -> bool:
        """Read all files, and return True if they have the recorded checksums."""

        for name, file in self.files.items():
            path = os.path.join(self.directory, name)
            try:
                if os.path.getsize(path) != file.nbytes:
                    return False
                if checksums_of_file(path, file.nbytes, threads) != file.checksums:
                    return False
            except (OSError, CorruptCheckpointError) as error:
                logger.warning("%s cannot be read: %s", path, error)
                return False
        return True

    def verify(self, name: str, blocks: Collection[int], threads: IOThreads) -> None:
        """Verify blocks of a file.

        Raises:
            CorruptCheckpointError: a block is damaged, or the file ends too early.
            StorageError
        """
        path, (nbytes, checksums) = os.path.join(self.directory, name), self.files[name]
        if checksums_of_file(path, nbytes, threads, blocks, checksums) != checksums:
            raise CorruptCheckpointError(f"{path}, in the cache, is damaged")


class Cache:
    """A directory of versions, which one follower uses at a time.

    Attributes:
        directory: its absolute path.
    """

    def __init__(self, directory: LocationLike, *, durable: bool) -> None:
        """Create the directory if it does not exist, lock it, and remove what an interrupted follower left.

        Args:
            directory: a path on a local disk.
            durable: True if versions must survive a power failure.

        Raises:
            InvalidLocationError: it is not a local path.
            DirectoryInUseError: another follower uses it.
            StorageError: it cannot be created or locked.
        """
        if sys.byteorder != "little":
            raise StorageError("a cache of versions is mapped, which needs a machine with little-endian memory")
        self.directory = local_directory("cache", directory)
        self._durable = durable
        with SystemCall("create the cache", self.directory):
            os.makedirs(self.directory, exist_ok=True)
        self._lock = self._locked()
        try:
            for name in _names_in(self.directory):
                if _HIDDEN.fullmatch(name):
                    self._remove(name)
        except BaseException:
            self.close()
            raise

    def _locked(self) -> FileLock:
        try:
            with SystemCall("lock the cache", self.directory):
                lock = try_to_lock(self.directory)
        except StorageError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise StorageError(
                error.errno, f"{self.directory}: its file system has no locks; use a cache on a local disk"
            ) from error
        if lock is None:
            raise DirectoryInUseError(
                f"{self.directory} is the cache of another follower, in this or another process: give each follower a "
                "cache of its own"
            )
        return lock

    def versions(self) -> list[CachedVersion]:
        """Return the complete versions, the newest first."""
        return complete_versions(self.directory)

    def begin(self, number: int) -> str:
        """Create a hidden directory to prepare a version in, and return its path.

        Raises:
            StorageError: it cannot be created, or something that no follower wrote has the name of the version.
        """
        target = self._path(number)
        if os.path.lexists(target) and not os.path.lexists(os.path.join(target, _STATE_NAME)):
            raise StorageError(
                f"{target} has the name of a version, and no follower wrote it: pass as cache= a directory "
                "that nothing else uses; it must not be that of the versions"
            )
        if not os.path.isdir(self.directory):
            raise StorageError(f"{self.directory}, the cache, was removed: close this follower, and follow again")
        path = os.path.join(self.directory, f".ckptcore-version-{os.urandom(8).hex()}")
        with SystemCall("create", path):
            os.mkdir(path)
        return path

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, f"v{number:06d}")

    def discard(self, path: str) -> None:
        """Remove a hidden directory."""
        shutil.rmtree(path, ignore_errors=True)

    def complete(self, path: str, version: BaseVersion, files: Mapping[str, CachedFile]) -> CachedVersion:
        """Make a prepared version durable, and give it its name by one rename.

        A version with the same number is replaced.

        Args:
            path: its hidden directory, with all files.
            version: its identity.
            files: its files with elements, by name.

        Raises:
            StorageError
        """
        state = {
            "format": _FORMAT,
            "version": version._asdict(),
            "files": {
                name: {"bytes": file.nbytes, "checksums": base64.b64encode(file.checksums).decode()}
                for name, file in files.items()
            },
        }
        state_path = os.path.join(path, _STATE_NAME)
        with SystemCall("write", state_path), open(state_path, "x", encoding="utf-8") as file:
            json.dump(state, file)
        if self._durable:
            with SystemCall("make durable", path):
                for name in os.listdir(path):
                    _sync(os.path.join(path, name))
            sync_names(path)
        target = self._path(version.number)
        if os.path.lexists(target):
            self._remove(os.path.basename(target))
        with SystemCall("rename", path):
            os.rename(path, target)
        if self._durable:
            sync_names(self.directory)
        return CachedVersion(target, version, files)

    def keep_only(self, kept: set[str]) -> None:
        """Remove all complete versions except the given directories. One that cannot be removed is logged."""
        for cached in self.versions():
            if cached.directory not in kept:
                try:
                    self._remove(os.path.basename(cached.directory))
                except StorageError as error:
                    logger.warning("an old version stays in the cache: %s", error)

    def _remove(self, name: str) -> None:
        """Remove a version. Hides it first, so that a version that is removed in part is never complete."""
        path = os.path.join(self.directory, name)
        if not _HIDDEN.fullmatch(name):
            hidden = os.path.join(self.directory, f".ckptcore-version-{os.urandom(8).hex()}")
            with SystemCall("rename", path):
                os.rename(path, hidden)
            path = hidden
        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock. Complete versions stay."""
        self._lock.close()


def complete_versions(cache: str) -> list[CachedVersion]:
    """Return the complete versions in a cache, the newest first. Directories without a readable state are left out.

    Raises:
        StorageError: the cache cannot be listed.
    """
    versions = []
    for name in _names_in(cache):
        matched = _COMPLETE.fullmatch(name)
        if matched is None:
            continue
        directory = os.path.join(cache, name)
        try:
            versions.append(_read_state(directory, int(matched[1])))
        except FileNotFoundError:
            continue  # a directory of the user
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("%s is not used, because its state cannot be read: %s", directory, error)
    return sorted(versions, key=lambda cached: cached.version.number, reverse=True)


def _names_in(cache: str) -> list[str]:
    with SystemCall("list the cache", cache):
        return sorted(os.listdir(cache))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_file(descriptor)
    finally:
        close_descriptor(descriptor, path)


def _read_state(directory: str, number: int) -> CachedVersion:
    """Read the state of a complete version.

    Raises:
        FileNotFoundError: it has none.
        OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError: it is damaged.
    """
    path = os.path.join(directory, _STATE_NAME)
    with open(path, "rb") as file:
        state: Any = json.loads(file.read(_MAX_STATE_BYTES))
    if state["format"] != _FORMAT:
        raise ValueError(f"expected the format {_FORMAT}, found {state['format']!r}")
    version = BaseVersion(**state["version"])
    if version.number != number:
        raise ValueError(f"expected the version {number}, found {version.number!r}")
    files: dict[str, CachedFile] = {}
    for name, described in state["files"].items():
        if os.path.basename(name) != name:
            raise ValueError(f"{name!r} is not a name of a file")
        try:
            checksums = base64.b64decode(described["checksums"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"the checksums of {name} are not base64: {error}") from error
        nbytes = described["bytes"]
        if len(checksums) != CHECKSUM_BYTES * -(-nbytes // CACHED_BLOCK_BYTES):
            raise ValueError(f"{name} has {nbytes} bytes, but {len(checksums) // CHECKSUM_BYTES} checksums")
        files[name] = CachedFile(nbytes, checksums)
    return CachedVersion(directory, version, files)
