"""Attributes of local files and directories that a replacement keeps: owner, group, mode, ACL and others."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from ckptcore.builtin.local_calls import ABSENT, ignoring

_REFUSED: Final = frozenset({
    errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENODATA, errno.EROFS,
    errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.ERANGE,
})  # fmt: skip
"""Error numbers if a file system does not support an attribute, or if this process may not set the attribute."""

_ACL: Final = "system.posix_acl_access"
_ACCESS_CONTROL: Final = (_ACL, "system.posix_acl_default")

_SHARED: Final = stat.S_IRWXG | stat.S_IRWXO
_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class Attributes(NamedTuple):
    """The attributes of a file or directory.

    Attributes:
        status: owner, group and mode.
        extended: the extended attributes, including ACLs, by name. None for an attribute that cannot be read.
    """

    status: os.stat_result
    extended: dict[str, bytes | None]

    def give(self, path: str, *, denied: int = 0, granted: int = 0) -> bool:
        """Give the attributes, as far as possible, to another file or directory of the same kind. Ignores links.

        If this process cannot set an attribute, such as a group that it is not a member of, the other permissions are
        reduced, so that no user gets more access.

        Args:
            path: the file or directory.
            denied: permissions that are left out.
            granted: permissions that are added.

        Returns:
            True if an attribute was changed.

        Raises:
            OSError
        """
        with _opened(path) as (target, current):
            if current is None or _kind(current) != _kind(self.status):
                return False
            changed = self._give_owner(target, current)
            now = os.stat(target)
            same_group = now.st_gid == self.status.st_gid
            changed |= self._give_extended(target, with_acl=same_group)
            mode = stat.S_IMODE(self.status.st_mode) & ~denied
            if not same_group:
                mode &= ~stat.S_ISGID
            if not same_group or not self._has_its_acl(target):
                mode = _group_like_others(mode)  # with an ACL, the group bits are the mask of the ACL
            if now.st_uid != self.status.st_uid:
                mode &= ~stat.S_ISUID
            return _set_mode(target, mode | granted) or changed

    def _give_owner(self, target: int | str, current: os.stat_result) -> bool:
        group = self.status.st_gid
        for owner in (self.status.st_uid, -1):  # -1 sets only the group, because only root can change the owner
            if owner in (current.st_uid, -1) and current.st_gid == group:
                return False
            with ignoring(_REFUSED):
                os.chown(target, owner, group)
                return True
        return False

    def _give_extended(self, target: int | str, *, with_acl: bool) -> bool:
        wanted = {name: value for name, value in self.extended.items() if with_acl or name not in _ACCESS_CONTROL}
        current = _read_extended(target)
        changed = False
        for name, value in wanted.items():
            if value is not None and current.get(name) != value:
                with ignoring(_REFUSED):
                    os.setxattr(target, name, value)
                    changed = True
        for name in _ACCESS_CONTROL:  # remove ACLs that the new file inherited from its parent directory
            if name in current and name not in wanted:
                with ignoring(_REFUSED):
                    os.removexattr(target, name)
                    changed = True
        return changed

    def _has_its_acl(self, target: int | str) -> bool:
        """Return True if a file has the same ACL as these attributes, or if they have no ACL."""
        if _ACL not in self.extended:
            return True
        acl = _read_extended(target).get(_ACL)
        return acl is not None and acl == self.extended[_ACL]


@contextmanager
def _opened(path: str) -> Iterator[tuple[int | str, os.stat_result | None]]:
    """Open a file or directory to change its attributes.

    The path itself is not safe to use, because another process may replace it with a link at any time.

    Yields:
        The argument for calls of `os` in place of the path, and the status; None for a link or a missing file.
    """
    by_name = _has_descriptor_paths()
    # Without O_PATH, a file that this process may not read cannot be opened.
    flags = os.O_PATH if by_name else os.O_RDONLY | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (*ABSENT, errno.ELOOP):
            raise
        yield path, None
        return
    try:
        status = os.fstat(descriptor)
        yield f"/proc/self/fd/{descriptor}" if by_name else descriptor, None if _is_link(status) else status
    finally:
        os.close(descriptor)


@functools.cache
def _has_descriptor_paths() -> bool:
    return hasattr(os, "O_PATH") and os.path.isdir("/proc/self/fd")


def _set_mode(target: int | str, mode: int) -> bool:
    """Set the permissions of an open file, if the file system can change them. Return True if they were changed."""
    if stat.S_IMODE(os.stat(target).st_mode) != mode:
        with ignoring(_REFUSED):
            os.chmod(target, mode)
            return True
    return False


def _group_like_others(mode: int) -> int:
    """Return permissions that give the group no more than all users."""
    return mode & (~stat.S_IRWXG | ((mode & stat.S_IRWXO) << 3))


def read_attributes(path: str) -> Attributes | None:
    """Return the attributes of a file or directory; None if it does not exist. Does not follow links.

    Raises:
        OSError
    """
    with ignoring(ABSENT):
        return Attributes(os.lstat(path), _read_extended(path, follow_symlinks=False))
    return None


def create_file(path: str, replaced: Attributes | None) -> int:
    """Create a file with the attributes of the file that it replaces, and return its descriptor.

    If `replaced` has the attributes of anything but a regular file, such as a link, they are not kept.

    Raises:
        OSError
    """
    if replaced is not None and not stat.S_ISREG(replaced.status.st_mode):
        replaced = None
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    # The file is private until it has the attributes: a user who may not read the old file must not open the new file.
    descriptor = os.open(path, flags, 0o666 if replaced is None else 0o600)
    try:
        if replaced is not None:
            replaced.give(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read_extended(target: int | str, *, follow_symlinks: bool = True) -> dict[str, bytes | None]:
    extended: dict[str, bytes | None] = {}
    if hasattr(os, "listxattr"):  # Linux
        with ignoring(_REFUSED):
            extended = dict.fromkeys(os.listxattr(target, follow_symlinks=follow_symlinks))
    for name in list(extended):
        if name.startswith("security.") and name != "security.selinux":
            del extended[name]  # labels of other security modules sign or describe the content
            continue
        with ignoring(_REFUSED):
            extended[name] = os.getxattr(target, name, follow_symlinks=follow_symlinks)
    return extended


def keep_attributes_below(old: str, new: str) -> Iterator[str]:
    """Copy the attributes of an old directory and its content to a new directory and its content, by name.

    A file or directory without a counterpart gives no more access than the most private entry of the old directory.

    Yields:
        The paths that were changed.

    Raises:
        OSError
    """
    attributes = read_attributes(old)
    if attributes is None:
        return
    denied = functools.cache(functools.partial(_denied, old))
    # Bottom-up, because the new attributes of a directory may end the access to its content.
    for directory, names, files in os.walk(new, topdown=False):
        counterpart = old + directory[len(new) :]
        for name in (*files, *names):
            path = f"{directory}/{name}"
            replaced = read_attributes(f"{counterpart}/{name}")
            if _deny(path, denied) if replaced is None else replaced.give(path):
                yield path
    if attributes.give(new):
        yield new


def _deny(path: str, denied: Callable[[int], int]) -> bool:
    with _opened(path) as (target, status):
        if status is None:
            return False
        mode = stat.S_IMODE(status.st_mode)
        return bool(mode & _SHARED) and _set_mode(target, mode & ~denied(status.st_gid))


def hide_from_others(old: str, new: str) -> None:
    """Give a new directory the attributes of an old directory, with exceptions that last until the commit.

    Other users may not write in the new directory. They have no access at all if they cannot read everything in the old
    directory. The owner may always write in the new directory.

    Raises:
        OSError
    """
    attributes = read_attributes(old)
    if attributes is not None:
        denied = _denied(old, attributes.status.st_gid)
        attributes.give(new, denied=denied | _WRITE, granted=stat.S_IRWXU)


def _denied(directory: str, group: int) -> int:
    """Return the permissions that a group and other users must not get, because they cannot read all of a directory.

    They get none if a part of it cannot be listed.
    """
    denied = 0

    def deny_all(error: OSError) -> None:
        nonlocal denied
        if error.errno not in ABSENT:
            denied = _SHARED

    for path, names, files in os.walk(directory, onerror=deny_all):
        for name in (*names, *files):
            with ignoring(ABSENT):
                status = os.lstat(f"{path}/{name}")
                if not _is_link(status):
                    mode = status.st_mode if status.st_gid == group else _group_like_others(status.st_mode)
                    denied |= 0 if mode & stat.S_IRGRP else stat.S_IRWXG
                    denied |= 0 if mode & stat.S_IROTH else stat.S_IRWXO
        if denied == _SHARED:
            break
    return denied


def let_owner_delete(directory: str) -> bool:
    """Permit the owner of a directory to delete everything in it. Return True if any permissions were changed.

    Raises:
        OSError
    """
    changed = _let_owner_write(directory)
    for path, names, _ in os.walk(directory):  # changes each directory before it lists it
        for name in names:
            changed |= _let_owner_write(f"{path}/{name}")
    return changed


def _let_owner_write(directory: str) -> bool:
    with _opened(directory) as (target, status):
        return status is not None and _set_mode(target, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)


def _is_link(status: os.stat_result) -> bool:
    return stat.S_ISLNK(status.st_mode)


def _kind(status: os.stat_result) -> int:
    return stat.S_IFMT(status.st_mode)
