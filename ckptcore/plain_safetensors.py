"""Plain safetensors files: one file without a ``checkpoint.json``, equal to a file of the safetensors library.

`ckptcore.save` writes directories, and `ckptcore.open` and `ckptcore.load` also read plain files. This module is for
software that writes a plain file from bytes, or needs the positions of tensors. It knows no arrays.
`open_regular_file` also opens other files of a checkpoint.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from ckptcore.builtin.local_attributes import read_attributes
from ckptcore.builtin.local_calls import (
    allocate,
    close_descriptor,
    local_error,
    open_regular_file,
    start_writeback,
    sync_directory,
    sync_file,
)
from ckptcore.builtin.safetensors_files import FileHeader, TensorEntry, read_header, refuse_lost_root
from ckptcore.builtin.safetensors_writing import DTYPE_BITS, DTYPES, encode_header
from ckptcore.context import Context, default_context
from ckptcore.errors import StorageError
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

_LEAST_ALLOCATED_BYTES: Final = 1 << 20
_WRITE_BYTES: Final = 4 << 20
_MAX_BUFFERS: Final = 1024  # IOV_MAX of Linux


def replace_file(path: str | os.PathLike[str], pieces: Sequence[Buffer], *, context: Context | None = None) -> None:
    """Write a file atomically, and replace an existing one.

    Writes into a hidden file of the same directory, makes it durable, and renames it. If the write fails or the process
    is killed, the old file stays. A killed process may leave the hidden file, ``.ckptcore-put-*``.

    Args:
        path: the file. Its directory exists. A symbolic link is replaced, not followed. The new file keeps owner,
            group, mode, ACL and extended attributes of the existing one.
        pieces: the content, one after the other. It must not change during the call.
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
        replaced = read_attributes(target)
        is_file = replaced is not None and stat.S_ISREG(replaced.status.st_mode)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600 if is_file else 0o666)
        try:
            if replaced is not None and is_file:
                replaced.give(temporary)
            if nbytes >= _LEAST_ALLOCATED_BYTES:
                allocate(descriptor, nbytes)
            _write(descriptor, pieces, durable=durable)
            if durable:
                sync_file(descriptor)
        finally:
            close_descriptor(descriptor, temporary)
        os.rename(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise local_error(error, "write", target, nbytes) from error
        raise
    if durable:
        _sync_names(directory)


def _write(descriptor: int, pieces: Sequence[Buffer], *, durable: bool) -> None:
    """Write pieces, and start writeback early: the disk writes while more is copied."""
    offset = 0
    for group in _groups(pieces):
        size = sum(map(len, group))
        written = os.writev(descriptor, group)
        if written < size:
            rest = memoryview(b"".join(group))[written:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        if durable and size >= _LEAST_ALLOCATED_BYTES:
            start_writeback(descriptor, offset, size)
        offset += size


def _groups(pieces: Sequence[Buffer]) -> Iterator[Sequence[Buffer]]:
    """Group pieces for system calls: small ones together, large ones cut."""
    group: list[Buffer] = []
    size = 0
    for piece in pieces:
        if len(piece) > _WRITE_BYTES:
            if group:
                yield group
                group, size = [], 0
            view = memoryview(piece)
            yield from ([view[start : start + _WRITE_BYTES]] for start in range(0, len(view), _WRITE_BYTES))
            continue
        if len(group) == _MAX_BUFFERS or size + len(piece) > _WRITE_BYTES:
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece)
    if group:
        yield group


def _sync_names(directory: str) -> None:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_directory(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise local_error(error, "make durable", directory) from error
