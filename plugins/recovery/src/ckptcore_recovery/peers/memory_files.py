"""The files of a host's memory: mapped blobs, and how files in a memory file system are written."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import xxhash

from ckptcore.errors import CorruptCheckpointError, StorageError, StorageFullError
from ckptcore_recovery.peers.messages import BLOCK_BYTES

_BLOB_NAME: Final = re.compile(r"[0-9a-f]{32}")


def check_blob_name(name: object) -> str:
    """Return the name of a blob if it is valid.

    Raises:
        StorageError: it is not 32 hexadecimal digits, so it may be a path.
    """
    if not isinstance(name, str) or _BLOB_NAME.fullmatch(name) is None:
        raise StorageError(f"invalid name of a blob: {str(name)[:80]!r}")
    return name


class Blob:
    """A blob in the memory of this host, mapped. Thread-safe.

    Attributes:
        memory: its bytes, not verified.
        key: the key of the object that it belongs to.
    """

    def __init__(self, memory: memoryview, key: str, checksums: Sequence[int]) -> None:
        """Take mapped memory, and the checksum of each block of `BLOCK_BYTES`."""
        self.memory = memory
        self.key = key
        self._checksums = checksums
        self._verified = bytearray(len(checksums))

    @classmethod
    def open(cls, directory: Path, name: str) -> Self | None:
        """Map a complete blob. Return None if this host does not have it.

        Raises:
            OSError: the files cannot be read.
        """
        path = directory / "blobs" / check_blob_name(name)
        try:
            stated = json.loads(path.with_suffix(".json").read_bytes())
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != stated["size"]:
                    return None  # a damaged file is as good as none
                memory = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)) if size else memoryview(b"")
            key, checksums = stated["key"], stated["checksums"]
            if not isinstance(key, str) or list(map(type, checksums)) != [int] * -(-size // BLOCK_BYTES):
                return None
        except (FileNotFoundError, IsADirectoryError, ValueError, TypeError, KeyError):
            return None
        return cls(memory, key, checksums)

    def checksums(self, offset: int, nbytes: int) -> list[int] | None:
        """Return the checksums that whole blocks had when they were written; None for other ranges."""
        stop = offset + nbytes
        if offset < 0 or nbytes <= 0 or offset % BLOCK_BYTES or stop > len(self.memory):
            return None
        if stop % BLOCK_BYTES and stop != len(self.memory):
            return None
        return list(self._checksums[offset // BLOCK_BYTES : -(-stop // BLOCK_BYTES)])

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the blob, verified; fewer if it ends earlier. Each block is verified once.

        Raises:
            CorruptCheckpointError: a block does not have the checksum that it had when it was written.
            StorageError: a number is negative.
        """
        if offset < 0 or nbytes < 0:
            raise StorageError(f"invalid range of {nbytes} bytes at {offset}")
        stop = min(offset + nbytes, len(self.memory))
        for number in range(offset // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if not self._verified[number]:
                self.verify(number, self.memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
                self._verified[number] = 1
        return self.memory[offset : max(offset, stop)]

    def verify(self, number: int, block: memoryview) -> None:
        """Compare a block, or a copy of it, with its checksum.

        Raises:
            CorruptCheckpointError: see `read`.
        """
        if xxhash.xxh3_64_intdigest(block) != self._checksums[number]:
            start = number * BLOCK_BYTES
            raise CorruptCheckpointError(
                f"bytes {start} to {start + len(block)} changed in memory", start=start, stop=start + len(block)
            )


class OpenFile:
    """A file that is open for reading and writing as long as this object is used.

    It is not closed earlier, because a thread that is about to write would write to another file with its number.

    Attributes:
        descriptor: its number.
    """

    def __init__(self, path: str | Path, flags: int = os.O_RDWR) -> None:
        self.descriptor = os.open(path, flags, 0o600)
        weakref.finalize(self, os.close, self.descriptor).atexit = False


def open_private(path: str, flags: int) -> int:
    """Open a file that only its user reads; for `open`."""
    return os.open(path, flags, mode=0o600)


def write_at(descriptor: int, offset: int, data: memoryview) -> None:
    """Write to a file in a memory file system. A mapping takes twice the time: its pages are cleared before.

    Raises:
        StorageFullError: the file system is full.
    """
    while len(data):
        try:
            written = os.pwrite(descriptor, data, offset)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise StorageFullError(f"the memory file system of this host is full: {error.strerror}") from error
            raise
        offset, data = offset + written, data[written:]


def unlink(*paths: Path) -> None:
    """Remove files. Missing ones are no error."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def read_number(path: Path) -> int:
    """Return the number that `write_number` stored; 0 without a file."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0


def write_number(path: Path, number: int) -> None:
    """Store a number in place, so that a full memory file system still has room for it.

    Raises:
        StorageFullError: the file is new, and the memory file system is full.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.pwrite(descriptor, f"{number:020}".encode(), 0)
    except OSError as error:
        raise full_error(path, error) from error
    finally:
        os.close(descriptor)


def full_error(path: Path, error: OSError) -> Exception:
    """Return the error of the memory of a host for an error of its file system."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return StorageFullError(f"{path.parent} is full: {error.strerror}")
    return error


def write_file(path: Path, data: bytes) -> None:
    """Replace a file, which only this user may read, by one rename.

    Raises:
        StorageFullError: the memory file system is full.
    """
    temporary = path.with_suffix(f".{os.urandom(4).hex()}.new")
    try:
        with open(temporary, "wb", opener=open_private) as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        unlink(temporary)
        raise full_error(path, error) from error
