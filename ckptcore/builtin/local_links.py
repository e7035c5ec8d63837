"""Symbolic links in a local storage: they are followed inside a checkpoint, and never out of it."""

from __future__ import annotations

import errno
import os
import posixpath
import re
from contextlib import ExitStack
from typing import Final

from ckptcore.errors import InvalidLocationError

__all__ = ["open_inside"]

# O_PATH needs no permission to list the directory; systems without it need that.
_OPEN_ROOT: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_DIRECTORY: Final = _OPEN_ROOT | os.O_NOFOLLOW
_MOST_LINKS: Final = 40  # as Linux follows in one path

_IS_LINK: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
"""Errors of an open with O_NOFOLLOW at a link. ENOTDIR also means a file in place of a directory."""

_HUB_SNAPSHOT: Final = re.compile(r"(.*/[a-z]+s--[^/]+)/snapshots/[^/]+(?:/.*)?", re.DOTALL)
"""A snapshot in a Hugging Face cache, such as ``models--owner--name/snapshots/<revision>``, with its repository."""


def open_inside(root: str, path: str, flags: int) -> int:
    """Open a file or directory below a root, component by component.

    A link is followed if its target is in the same checkpoint: below the first component of the path, which must not
    be a link itself. A file right below the root may link to any file below the root. A snapshot in a cache of the
    Hugging Face hub may link to the ``blobs`` of its own repository.

    Args:
        root: the directory of the storage. It may be a link, and be below links: the user named it.
        path: of the file, below the root, without ``.`` and ``..``.
        flags: as for `os.open`; not to create it.

    Returns:
        A descriptor.

    Raises:
        InvalidLocationError: a link leads out.
        OSError
    """
    below = path.removeprefix(root).lstrip("/")
    walk = _Walk(root)
    try:
        if "/" in below:
            checkpoint, _, below = below.partition("/")
            walk.enter_checkpoint(checkpoint)
        return walk.open(below, flags)
    finally:
        walk.close()


class _Walk:
    """A way down from a directory that links do not leave."""

    def __init__(self, root: str) -> None:
        self._boundary = root
        self._names: list[str] = []
        self._directories = [os.open(root, _OPEN_ROOT)]

    def close(self) -> None:
        """Close the directories on the way, each once, also if closing one is interrupted."""
        with ExitStack() as closing:
            while self._directories:
                closing.callback(os.close, self._directories.pop())

    def enter_checkpoint(self, name: str) -> None:
        """Enter a directory right below the root, which becomes the boundary."""
        path = posixpath.join(self._boundary, name)
        try:
            descriptor = os.open(name, _OPEN_DIRECTORY, dir_fd=self._directories[0])
        except OSError as error:
            target = self._target(name, error.errno)
            if target is None:
                raise
            raise _leads_out(path, target) from None
        above, self._directories = self._directories[0], [descriptor]
        self._boundary = path
        os.close(above)

    def open(self, below: str, flags: int) -> int:
        """Open a path below the boundary."""
        pending = below.split("/")[::-1]
        link = target = ""
        links = 0
        while True:
            name = pending.pop()
            if name == "..":
                if not self._names:
                    raise _leads_out(link, target)
                os.close(self._directories.pop())
                self._names.pop()
                name = "."
            if name in ("", "."):
                if pending:
                    continue
                return os.open(".", flags, dir_fd=self._directories[-1])
            try:
                descriptor = os.open(
                    name, _OPEN_DIRECTORY if pending else flags | os.O_NOFOLLOW, dir_fd=self._directories[-1]
                )
            except OSError as error:
                found = self._target(name, error.errno)
                if found is None:
                    raise
                target = found
            else:
                if not pending:
                    return descriptor
                self._directories.append(descriptor)
                self._names.append(name)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), below)
            link = posixpath.join(self._boundary, *self._names, name)
            if not pending and (blob := self._hub_blob(target)) is not None:
                return _open_blob(*blob, flags)
            pending += self._from_here(link, target)[::-1]

    def _target(self, name: str, number: int | None) -> str | None:
        """Return the target of a link in the last directory, or None if it is no link.

        Args:
            name: in the last directory.
            number: of the error that opening it gave.
        """
        if number not in _IS_LINK:
            return None
        try:
            return os.readlink(name, dir_fd=self._directories[-1])
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise

    def _from_here(self, link: str, target: str) -> list[str]:
        """The components of a link's target, from the last directory on. An absolute one begins at the boundary."""
        if not target.startswith("/"):
            return target.split("/")
        for boundary in (self._boundary, os.path.realpath(self._boundary)):
            above = boundary.rstrip("/") + "/"
            if target.startswith(above):
                return [".."] * len(self._names) + target.removeprefix(above).split("/")
        raise _leads_out(link, target)

    def _hub_blob(self, target: str) -> tuple[str, str] | None:
        """The ``blobs`` and the name in it that a link of a snapshot leads to; None if it leads anywhere else."""
        if "/blobs/" not in target:
            return None
        boundary = os.path.realpath(self._boundary)
        snapshot = _HUB_SNAPSHOT.fullmatch(boundary)
        blobs, name = posixpath.split(posixpath.normpath(posixpath.join(boundary, *self._names, target)))
        return (blobs, name) if snapshot is not None and blobs == f"{snapshot[1]}/blobs" else None


def _open_blob(blobs: str, name: str, flags: int) -> int:
    directory = os.open(blobs, _OPEN_DIRECTORY)
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=directory)
    finally:
        os.close(directory)


def _leads_out(link: str, target: str) -> InvalidLocationError:
    return InvalidLocationError(
        f"{link} leads out of the checkpoint, to {target}: symbolic links are followed only inside a checkpoint. Copy "
        "the file into the checkpoint, or give the target of the link as the location"
    )
