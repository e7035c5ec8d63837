"""A file system that imitates others: ``python -m tests.storage.odd_file_system SOURCE AT OPTIONS``.

The program serves a directory through FUSE, in the foreground. OPTIONS are joined by commas:

- ``case`` and ``accents`` treat names as equal, like exFAT and APFS.
- ``names=143`` limits the bytes of a name, like eCryptfs. With ``silent``, `statfs` does not report the limit.

While a file ``SOURCE.stale`` exists, paths that contain its text are stale, as on NFS after a failover. While a file
``SOURCE.quota`` exists, the quota is exceeded: new files and bytes are refused.
"""

from __future__ import annotations

import errno
import os
import sys
import unicodedata
from typing import Any

from fuse import FUSE, FuseOSError, Operations


class OddFileSystem(Operations):  # type: ignore[misc]  # fusepy has no types
    """A directory that compares names as another file system does."""

    use_ns = True

    def __init__(self, source: str, options: list[str]) -> None:
        self._source = source
        self._case = "case" in options
        self._accents = "accents" in options
        self._limit = max([int(option.removeprefix("names=")) for option in options if "=" in option], default=255)
        self._told = 255 if "silent" in options else self._limit

    def _fold(self, name: str) -> str:
        name = unicodedata.normalize("NFD", name) if self._accents else name
        return name.casefold() if self._case else name

    def _path(self, path: str) -> str:
        """Return the path below the source, with the spelling of existing names."""
        if os.path.exists(stale := f"{self._source}.stale"):
            with open(stale, encoding="utf-8") as file:
                if file.read() in path:
                    raise FuseOSError(errno.ESTALE)
        existing = self._source
        for name in path.strip("/").split("/"):
            if len(name.encode("utf-8", "surrogateescape")) > self._limit:
                raise FuseOSError(errno.ENAMETOOLONG)
            if name and (self._case or self._accents) and not os.path.lexists(f"{existing}/{name}"):
                fold = self._fold(name)
                try:
                    name = next((entry for entry in os.listdir(existing) if self._fold(entry) == fold), name)
                except OSError as error:
                    raise FuseOSError(error.errno) from error
            existing = f"{existing}/{name}" if name else existing
        return existing

    def _take_room(self) -> None:
        if os.path.exists(f"{self._source}.quota"):
            raise FuseOSError(errno.EDQUOT)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._path(path))
        keys = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks")
        times = {key: getattr(status, f"{key}_ns") for key in ("st_atime", "st_mtime", "st_ctime")}
        return {key: getattr(status, key) for key in keys} | times

    def access(self, path: str, amode: int) -> int:
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._source)
        keys = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize")
        return {key: getattr(status, key) for key in keys} | {"f_namemax": self._told}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._path(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._path(path))

    def mkdir(self, path: str, mode: int) -> int:
        self._take_room()
        os.mkdir(self._path(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._path(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._path(path))
        return 0

    def rename(self, old: str, new: str, *flags: int) -> int:
        if any(flags):
            raise FuseOSError(errno.EINVAL)
        os.rename(self._path(old), self._path(new))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._path(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._path(path), uid, gid)
        return 0

    def utimens(self, path: str, times: tuple[int, int]) -> int:
        os.utime(self._path(path), ns=times)
        return 0

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._take_room()
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._take_room()
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._path(path), length)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


def main() -> None:
    """Serve the file system until it is unmounted."""
    source, at, options = sys.argv[1:]
    FUSE(OddFileSystem(source, options.split(",")), at, foreground=True, nothreads=True, use_ino=True, attr_timeout=0)


if __name__ == "__main__":
    main()
