"""Attributes of local files and directories that their replacements keep: owner, group, mode, ACL and others."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from ckptcore.builtin.local_calls import ABSENT

__all__ = ["Attributes", "hide_from_others", "keep_attributes_below", "read_attributes"]

_REFUSED: Final = frozenset({
    errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENODATA, errno.EROFS,
    errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.ERANGE,
})  # fmt: skip
"""Errors of a file system that does not have an attribute, or of a process that may not set it."""

_ACCESS_CONTROL: Final = ("system.posix_acl_access", "system.posix_acl_default")

_SHARED: Final = stat.S_IRWXG | stat.S_IRWXO


class Attributes(NamedTuple):
    """The attributes of a file or directory.

    Attributes:
        status: owner, group and mode.
        extended: the extended attributes, ACL included; None if the file system has none.
    """

    status: os.stat_result
    extended: dict[str, bytes] | None

    @property
    def mode(self) -> int:
        """The permissions, with setuid, setgid and the sticky bit."""
        return stat.S_IMODE(self.status.st_mode)

    def give(self, path: str) -> bool:
        """Give these attributes to another file or directory of the same kind, as far as possible; never to a link.

        Nothing that this process cannot set, such as a group that it is not a member of, gives anyone more access.

        Returns:
            True if an attribute was changed.

        Raises:
            OSError
        """
        found = read_attributes(path)
        if found is None or stat.S_ISLNK(found.status.st_mode) or _kind(found.status) != _kind(self.status):
            return False
        changed = self._give_owner(path, found.status)
        now = os.lstat(path)
        mode = self.mode
        if now.st_gid != self.status.st_gid:  # another group gets what all users get
            mode = (mode & ~(stat.S_IRWXG | stat.S_ISGID)) | (mode & ((mode & stat.S_IRWXO) << 3))
        if now.st_uid != self.status.st_uid:
            mode &= ~stat.S_ISUID
        changed |= self._give_extended(path, found.extended or {})
        if stat.S_IMODE(os.lstat(path).st_mode) != mode:
            with _unless_refused():
                os.chmod(path, mode)
                changed = True
        return changed

    def _give_owner(self, path: str, found: os.stat_result) -> bool:
        group = self.status.st_gid
        for owner in (self.status.st_uid, -1):  # only root may give files away
            if owner in (found.st_uid, -1) and found.st_gid == group:
                return False
            with _unless_refused():
                os.chown(path, owner, group, follow_symlinks=False)
                return True
        return False

    def _give_extended(self, path: str, found: dict[str, bytes]) -> bool:
        if self.extended is None:
            return False
        changed = False
        for name, value in self.extended.items():
            if found.get(name) != value:
                with _unless_refused():
                    os.setxattr(path, name, value, follow_symlinks=False)
                    changed = True
        for name in _ACCESS_CONTROL:  # inherited from the parent directory
            if name in found and name not in self.extended:
                with _unless_refused():
                    os.removexattr(path, name, follow_symlinks=False)
                    changed = True
        return changed


@contextmanager
def _unless_refused() -> Iterator[None]:
    """Ignore the errors of attributes that cannot be read or set."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise


def read_attributes(path: str) -> Attributes | None:
    """Return the attributes of a file or directory; None if it does not exist. Does not follow links.

    Raises:
        OSError
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    extended: dict[str, bytes] | None = None
    if hasattr(os, "listxattr"):  # Linux
        with _unless_refused():
            # Labels of other security modules than SELinux sign or describe the content.
            names = os.listxattr(path, follow_symlinks=False)
            kept = [name for name in names if not name.startswith("security.") or name == "security.selinux"]
            extended = {name: os.getxattr(path, name, follow_symlinks=False) for name in kept}
    return Attributes(status, extended)


def keep_attributes_below(old: str, new: str) -> Iterator[str]:
    """Give a directory, and everything in it, the attributes of what has the same name in an old directory.

    Yields:
        The paths that were changed.

    Raises:
        OSError
    """
    for directory, names, files in os.walk(new, topdown=False):  # the permissions of a directory last
        counterpart = old + directory[len(new) :]
        if not os.path.isdir(counterpart):
            continue
        for name in (*files, *names):
            attributes = read_attributes(f"{counterpart}/{name}")
            if attributes is not None and attributes.give(f"{directory}/{name}"):
                yield f"{directory}/{name}"
    attributes = read_attributes(old)
    if attributes is not None and attributes.give(new):
        yield new


def hide_from_others(old: str, new: str) -> None:
    """Give a directory the attributes of an old one, but no access to users who cannot read everything in the old one.

    Raises:
        OSError
    """
    attributes = read_attributes(old)
    if attributes is None:
        return
    attributes.give(new)
    denied = _denied(old)
    mode = stat.S_IMODE(os.lstat(new).st_mode)
    if mode & denied:
        os.chmod(new, mode & ~denied)


def _denied(directory: str) -> int:
    """Return the permissions of the group and of all users, if these cannot read everything in a directory."""
    denied = 0
    for path, names, files in os.walk(directory):
        for name in (*names, *files):
            with suppress(FileNotFoundError):
                mode = os.lstat(f"{path}/{name}").st_mode
                if not stat.S_ISLNK(mode):
                    denied |= 0 if mode & stat.S_IRGRP else stat.S_IRWXG
                    denied |= 0 if mode & stat.S_IROTH else stat.S_IRWXO
        if denied == _SHARED:
            break
    return denied


def _kind(status: os.stat_result) -> int:
    return stat.S_IFMT(status.st_mode)
