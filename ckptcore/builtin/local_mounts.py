"""The file system that is mounted at a path: its identity, its locks and limits, and tests of what it supports."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final

from ckptcore.builtin.local_calls import (
    ABSENT,
    AT_FDCWD,
    c_function,
    call_if_supported,
    exchange,
    ignoring,
)
from ckptcore.errors import AtomicityError
from ckptcore.protocols import DirectoryFeatures, NameForm, PlaceLimits

_AT_SYMLINK_NOFOLLOW: Final = 0x100  # linux/fcntl.h
_STATX_BYTES: Final = 256  # the size of struct statx; linux/stat.h also defines the constants and the offset below
_STATX_MNT_ID: Final = 0x1000  # since Linux 5.8; a later mount may get the same number
_STATX_MNT_ID_UNIQUE: Final = 0x4000  # since Linux 6.8
_STATX_MOUNT: Final = slice(0x90, 0x98)
_STATFS_BYTES: Final = 256  # at least the size of struct statfs, 120 bytes
_OVERLAYFS: Final = 0x794C7630  # linux/magic.h
_LOCAL_FILE_SYSTEMS: Final = frozenset({
    0xEF53,  # ext2, ext3, ext4; the numbers are from linux/magic.h
    0x58465342,  # xfs
    0x9123683E,  # btrfs
    0xF2F52010,  # f2fs
    0x2FC12FC1,  # zfs
    0x01021994,  # tmpfs
    0x794C7630,  # overlayfs
    0x858458F6,  # ramfs
    0xCA451A4E,  # bcachefs
    0x3153464A,  # jfs
    0x4D44,  # vfat
    0x2011BAB0,  # exfat
    0x7366746E,  # ntfs3
})  # fmt: skip
_LOCK_OPTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "ceph": ("", ""),
    "fuseblk": ("", ""),
    "gfs2": ("", "localflocks"),
    "gpfs": ("", ""),
    "lustre": ("flock", "localflock"),
    "ocfs2": ("", "localflocks"),
}
"""Types of file systems whose locks all hosts can see. The first value is the mount option that is required for this,
the second is the mount option that prevents it. An empty string means none."""

_FORMS: Final[tuple[tuple[NameForm, str, str], ...]] = (
    ("case", "probe-A", "probe-a"),
    ("accents", "probe-\N{LATIN SMALL LETTER E WITH ACUTE}", "probe-e\N{COMBINING ACUTE ACCENT}"),
    ("trailing dots", "probe-b", "probe-b."),
)
"""Pairs of names that some file systems do not distinguish."""

_MAX_KNOWN_MOUNTS: Final = 4096
"""Maximum number of directories whose mount points are remembered."""


def mount_of(path: str, *, follow_links: bool = True) -> bytes | None:
    """Return bytes that identify the mount at a path. Since Linux 6.8, a later mount at the same path has other bytes.

    On systems other than Linux they identify only the device.

    Returns:
        The bytes; None if the path does not exist.

    Raises:
        OSError
    """
    function = c_function("statx", (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p))
    if function is not None:
        buffer, flags = ctypes.create_string_buffer(_STATX_BYTES), 0 if follow_links else _AT_SYMLINK_NOFOLLOW
        wanted = _STATX_MNT_ID | _STATX_MNT_ID_UNIQUE
        if function(AT_FDCWD, os.fsencode(path), flags, wanted, buffer) == 0:
            if ctypes.c_uint32.from_buffer(buffer).value & wanted:
                return buffer.raw[_STATX_MOUNT]
        elif ctypes.get_errno() in ABSENT:
            return None
    return _mount_of_opened(path, follow_links)


def _mount_of_opened(path: str, follow_links: bool) -> bytes | None:
    """Return the number of a mount on Linux before 5.8, and the device on other systems."""
    try:
        if sys.platform != "linux":
            return os.stat(path, follow_symlinks=follow_links).st_dev.to_bytes(8, "big")
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    try:
        with suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}", "rb") as lines:
            if number := next((line for line in lines if line.startswith(b"mnt_id:")), b""):
                return number
        return os.fstat(descriptor).st_dev.to_bytes(8, "big")  # without /proc, or in a sandbox such as gVisor
    finally:
        os.close(descriptor)


@functools.cache
def _mount_points() -> dict[str, str]:
    """Return the mount points of the directories that this process has used, by directory.

    They are remembered because a later save must not create a directory below a mount point whose file system is no
    longer mounted.
    """
    return {}


def find_mount_point(directory: str) -> str | None:
    """Return the mount point of a directory. For a missing directory, return a known mount point above it, or None."""
    known = _mount_points()
    if directory in known:
        return known[directory]
    with suppress(OSError):  # the directory cannot be opened
        if (mount := mount_of(directory)) is not None:
            point = directory
            while (above := os.path.dirname(point)) != point and mount_of(above) == mount:
                point = above
            if len(known) >= _MAX_KNOWN_MOUNTS:
                known.clear()
            known[directory] = point
            return point
    points = [point for point in set(known.values()) if directory.startswith(point.rstrip("/") + "/")]
    return max(points, key=len, default=None)


def is_mounted(point: str) -> bool:
    """Return True if a file system is mounted at a directory now. The root directory always has one.

    Raises:
        OSError
    """
    return point == "/" or mount_of(point) not in (None, mount_of(os.path.dirname(point)))


def limits_of(path: str) -> PlaceLimits:
    """Return the limits for a checkpoint at a path. The path need not exist.

    Raises:
        OSError
    """
    above = os.path.dirname(path)
    while (mount := mount_of(above)) is None and above != "/":
        above = os.path.dirname(above)
    name_bytes = os.pathconf(above, "PC_NAME_MAX")
    is_mount_point = False
    with ignoring((errno.ENAMETOOLONG,)):  # no mount point can have this name
        is_mount_point = mount_of(path, follow_links=False) not in (None, mount)
    return PlaceLimits(name_bytes if name_bytes > 0 else None, is_mount_point, mount or b"")


def is_local_file_system(descriptor: int) -> bool:
    """Return True if an open file is on a file system of this machine, so that no server can remove its pages.

    Returns:
        False if the type of the file system is unknown.
    """
    return _file_system_type(descriptor) in _LOCAL_FILE_SYSTEMS


def _file_system_type(file: int | str) -> int | None:
    """Return the number of the type of a file system, as in ``linux/magic.h``; None if it is unknown.

    Raises:
        OSError
    """
    name, kind = ("fstatfs", ctypes.c_int) if isinstance(file, int) else ("statfs", ctypes.c_char_p)
    if ctypes.sizeof(ctypes.c_long) != 8:
        return None
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    argument = file if isinstance(file, int) else os.fsencode(file)
    is_known = call_if_supported(name, (kind, ctypes.c_void_p), argument, status)
    return ctypes.c_long.from_buffer(status).value if is_known else None


def has_locks_of_all_hosts(descriptor: int) -> bool:
    """Return True if a lock (`flock`) of an open file excludes processes on all hosts that can see the file.

    The system does not report this, so only file systems whose locks are known are trusted. Some file systems lock only
    within one host: FUSE unless its program does more, NFS with ``local_lock``, and BeeGFS by default. NFS without
    ``local_lock`` cannot lock directories.

    Raises:
        OSError
    """
    if sys.platform != "linux" or _file_system_type(descriptor) in _LOCAL_FILE_SYSTEMS:
        return True  # systems other than Linux do not report the type
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    with suppress(FileNotFoundError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            # See proc(5): the type and the options are the first and the third field after the separator.
            before, _, after = line.partition(" - ")
            if before.split()[2] == device:
                kind, _, options = after.split(" ", 2)
                return locks_reach_all_hosts(kind, {*options.strip().split(","), *before.split()[5].split(",")})
    return False


def locks_reach_all_hosts(kind: str, options: Collection[str]) -> bool:
    """Return True if the locks of a network file system are known to exclude processes on other hosts.

    Args:
        kind: the type of the file system, as in ``/proc/self/mountinfo``.
        options: its mount options.
    """
    needed, refused = _LOCK_OPTIONS.get(kind, (None, ""))
    return needed is not None and {needed} - {""} <= set(options) and refused not in options


def probe_directory(directory: str) -> DirectoryFeatures:
    """Test the features of the file system of a directory, with temporary entries in it. Syncs nothing.

    Raises:
        OSError
    """
    inside = f"{directory}/.probe-{os.getpid()}-{threading.get_ident()}"
    os.mkdir(inside)
    try:
        return DirectoryFeatures(
            exchanges=_exchanges(inside),
            merges=frozenset([form for form, first, second in _FORMS if _is_one(inside, first, second)]),
        )
    finally:
        os.rmdir(inside)


def _exchanges(directory: str) -> bool:
    first, second = f"{directory}/probe-1", f"{directory}/probe-2"
    try:
        for path in (first, second):
            os.mkdir(path)
        exchange(first, second)
    except AtomicityError:
        return False
    finally:
        for path in (first, second):
            with suppress(FileNotFoundError):
                os.rmdir(path)
    return True


def _is_one(directory: str, first: str, second: str) -> bool:
    # Encode as UTF-8, because the encoding of the locale may lack the letters.
    paths = [os.fsencode(directory) + b"/" + name.encode() for name in (first, second)]
    try:
        os.mkdir(paths[0])
    except OSError:
        if first.isascii():
            raise
        return False  # such names cannot be stored at all
    try:
        return os.path.lexists(paths[1])
    finally:
        os.rmdir(paths[0])


def can_move(directory: str, onto: str) -> bool:
    """Return True if a directory can be renamed. Directories in a lower layer of overlayfs cannot be renamed.

    The test is a rename onto a directory that is not empty, which always fails and changes nothing. For a directory in
    a lower layer, overlayfs reports another error, because it checks the destination later.

    Args:
        directory: the directory.
        onto: a directory of this process in the same parent, which is not empty.

    Raises:
        OSError
    """
    if _file_system_type(directory) != _OVERLAYFS:
        return True
    try:
        os.rename(directory, onto)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    return True
