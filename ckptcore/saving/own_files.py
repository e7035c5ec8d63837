"""The files that an object wrote of its own: which there are, and their bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from ckptcore.errors import NameCollisionError, UnsupportedLeafError
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.transfer import ArraySegment, BytesSegment, Segment

__all__ = ["files_below", "segment_of"]


def segment_of(path: str) -> Segment:
    """The bytes of a file, mapped when they are wanted."""
    size = os.path.getsize(path)
    if not size:
        return BytesSegment(b"")
    box = Box((0,), (size,))

    def map_bytes() -> Sequence[tuple[Box, HostArray]]:
        return ((box, np.memmap(path, np.uint8, "r", shape=(size,))),)

    return ArraySegment(box, 1, map_bytes, lambda: None)


def files_below(directory: str) -> tuple[Sequence[tuple[str, str]], Sequence[str]]:
    """The path and the key of every file, and the keys of empty directories.

    Raises:
        UnsupportedLeafError: if there is something that is neither a file nor a directory.
        NameCollisionError: if something has the name of one of ckptcore's own files.
        OSError: if a directory cannot be read.
    """
    found = []
    empty = []
    for parent, directories, names in os.walk(directory, onerror=_raise):
        if not directories and not names and parent != directory:
            empty.append(_own_key(parent, directory))
        for name in [*names, *(name for name in directories if os.path.islink(os.path.join(parent, name)))]:
            path = os.path.join(parent, name)
            key = _own_key(path, directory)
            if os.path.islink(path) or not os.path.isfile(path):
                raise UnsupportedLeafError(
                    f"the object wrote {key!r}, which is no plain file; only files can be stored"
                )
            found.append((path, key))
    return sorted(found), sorted(empty)


def _own_key(path: str, directory: str) -> str:
    key = os.path.relpath(path, directory).replace(os.sep, "/")
    if key.startswith("checkpoint."):
        raise NameCollisionError(
            f"the object wrote {key!r}; names that begin with 'checkpoint.' are those of ckptcore's own files"
        )
    return key


def _raise(error: OSError) -> NoReturn:
    raise error
