"""Features of the file system of a local directory, found by trying, because no system call tells them."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import suppress
from typing import Final

from ckptcore.builtin.local_calls import ABSENT, exchange, file_system_type
from ckptcore.errors import AtomicityError
from ckptcore.protocols import DirectoryFeatures, NameForm, PlaceLimits

__all__ = ["can_move", "limits_of", "probe_directory"]

_OVERLAYFS: Final = 0x794C7630  # linux/magic.h
_MOUNTS: Final = "/proc/self/mountinfo"
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")

_FORMS: Final[tuple[tuple[NameForm, str, str], ...]] = (
    ("case", "probe-A", "probe-a"),
    ("accents", "probe-\N{LATIN SMALL LETTER E WITH ACUTE}", "probe-e\N{COMBINING ACUTE ACCENT}"),
    ("trailing dots", "probe-b", "probe-b."),
)
"""Pairs of names that some file systems take for one."""


def probe_directory(directory: str) -> DirectoryFeatures:
    """Try what the file system of a directory can do, with names in it that are removed again. Syncs nothing.

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
    # As UTF-8: the locale may lack the letters.
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


def limits_of(path: str) -> PlaceLimits:
    """Return what limits a checkpoint at a path, which need not exist.

    Raises:
        OSError
    """
    above = os.path.dirname(path)
    while above != "/" and not os.path.isdir(above):
        above = os.path.dirname(above)
    name_bytes = os.pathconf(above, "PC_NAME_MAX")
    return PlaceLimits(name_bytes if name_bytes > 0 else None, _is_mount_point(path))


def _is_mount_point(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise
    mounts = _mount_points()
    # A bind mount may have the device of the directory around it, and a subvolume of Btrfs, which can be renamed, not.
    return path in mounts if mounts else status.st_dev != os.stat(os.path.dirname(path)).st_dev


def _mount_points() -> set[str]:
    """Return the mount points of this process; empty if they are unknown."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            fields = [line.split(" ", 5)[4] for line in file]
    except OSError:
        return set()  # no Linux, or no /proc
    return {_ESCAPE.sub(lambda found: chr(int(found[1], 8)), one) for one in fields}


def can_move(directory: str, onto: str) -> bool:
    """Return True if a directory can be renamed. Directories of a lower layer of overlayfs cannot.

    Overlayfs refuses such a rename before it looks at the destination. Any other rename onto a directory that is not
    empty fails, too, and changes nothing.

    Args:
        directory: the directory.
        onto: a directory of this process in the same parent, which is not empty.

    Raises:
        OSError
    """
    if file_system_type(directory) != _OVERLAYFS:
        return True
    try:
        os.rename(directory, onto)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    return True
