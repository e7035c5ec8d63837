"""What is in a directory of a local storage."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial

from ckptcore.builtin.local_errors import ABSENT, local_error

__all__ = ["list_files", "list_names"]


def list_files(directory: str, prefix: str, is_hidden: Callable[[str], bool]) -> Iterator[str]:
    """The files below a directory, as `prefix` and their path below it, sorted; links to directories are not entered.

    Raises:
        StorageError
    """
    # Sorted as whole paths: "a-b" comes before "a/b", though "a" comes before "a-b".
    files: list[str] = []
    pending = [(directory, prefix)]
    while pending:
        path, start = pending.pop()
        for entry in _entries(path):
            if _follows(partial(entry.is_dir, follow_symlinks=False), entry):
                pending.append((entry.path, f"{start}{entry.name}/"))
            elif not is_hidden(entry.name) and _follows(entry.is_file, entry):
                files.append(start + entry.name)
    return iter(sorted(files))


def list_names(directory: str, is_hidden: Callable[[str], bool]) -> list[str]:
    """The names in a directory, sorted; those of directories, and of links to them, end in ``/``.

    Raises:
        StorageError
    """
    names = []
    for entry in _entries(directory):
        if _follows(entry.is_dir, entry):
            names.append(entry.name + "/")
        elif not is_hidden(entry.name) and _follows(entry.is_file, entry):
            names.append(entry.name)
    return sorted(names)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise local_error(error, "list", directory) from error


def _follows(is_kind: Callable[[], bool], entry: os.DirEntry[str]) -> bool:
    """Return the type of an entry; False for a broken link or a cycle of links."""
    try:
        return is_kind()
    except OSError as error:
        if error.errno == errno.ELOOP or error.errno in ABSENT:
            return False
        raise local_error(error, "look at", entry.path) from error
