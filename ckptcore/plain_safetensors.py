"""Plain safetensors files: one file without a ``checkpoint.json``, equal to a file of the safetensors library.

`ckptcore.save` writes directories, and `ckptcore.open` and `ckptcore.load` also read plain files. This module is for
software that writes a plain file from bytes, or needs the positions of tensors. It handles bytes, not arrays.
`open_regular_file` also opens other files of a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from ckptcore.builtin.local_attributes import create_file, read_attributes
from ckptcore.builtin.local_calls import (
    LEAST_ALLOCATED_BYTES,
    SystemCall,
    allocate,
    close_descriptor,
    open_regular_file,
    start_writeback,
    sync_file,
)
from ckptcore.builtin.local_directories import sync_names
from ckptcore.builtin.safetensors_files import (
    DTYPE_BITS,
    DTYPES,
    FileHeader,
    TensorEntry,
    encode_header,
    read_header,
    refuse_lost_root,
)
from ckptcore.context import Context, default_context
from ckptcore.protocols import Buffer

__all__ = [
    "DTYPES",
    "DTYPE_BITS",
    "FileHeader",
    "TensorEntry",
    "encode_header",
    "open_regular_file",
    "read_header",
    "refuse_lost_root",
    "replace_file",
]

_WRITE_BYTES: Final = 4 << 20
_MAX_BUFFERS: Final = 1024  # IOV_MAX of Linux


def replace_file(path: str | os.PathLike[str], pieces: Sequence[Buffer], *, context: Context | None = None) -> None:
    """Write a file atomically. Replaces an existing file.

    Writes into a hidden file of the same directory, makes it durable, and renames it. If the write fails or the process
    is killed, the old file stays. A killed process may leave the hidden file, ``.ckptcore-put-*``.

    Args:
        path: the file. Its directory exists. A symbolic link is replaced, not followed. The new file keeps owner,
            group, mode, ACL and extended attributes of the existing file.
        pieces: the parts of the content, in order. They must not change during the call.
        context: with ``durability="full"``, the default, the file survives a loss of power.

    Raises:
        StorageFullError, StorageError
    """
    durable = (context or default_context()).durability == "full"
    target = os.fspath(path)
    directory = os.path.dirname(target) or "."
    temporary = os.path.join(directory, f".ckptcore-put-{os.urandom(8).hex()}")
    nbytes = sum(map(len, pieces))
    try:
        with SystemCall("write", target, nbytes):
            descriptor = create_file(temporary, read_attributes(target))
            try:
                if nbytes >= LEAST_ALLOCATED_BYTES:
                    allocate(descriptor, nbytes)
                _write(descriptor, pieces, durable=durable)
                if durable:
                    sync_file(descriptor)
            finally:
                close_descriptor(descriptor, temporary)
            os.rename(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_names(directory)


def _write(descriptor: int, pieces: Sequence[Buffer], *, durable: bool) -> None:
    """Write pieces. Start writeback early, so that the disk is busy while the next pieces are copied."""
    offset = 0
    for group in _groups(pieces):
        size = sum(map(len, group))
        written = os.writev(descriptor, group)
        if written < size:
            rest = memoryview(b"".join(group))[written:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        if durable and size >= LEAST_ALLOCATED_BYTES:
            start_writeback(descriptor, offset, size)
        offset += size


def _groups(pieces: Sequence[Buffer]) -> Iterator[Sequence[Buffer]]:
    """Group pieces for `os.writev`: put small pieces into one group, and cut large pieces."""
    group: list[Buffer] = []
    room = _WRITE_BYTES
    for piece in pieces:
        view = memoryview(piece)
        while view:
            group.append(view[:room])
            view = view[room:]
            room -= len(group[-1])
            if room == 0 or len(group) == _MAX_BUFFERS:
                yield group
                group, room = [], _WRITE_BYTES
    if group:
        yield group
