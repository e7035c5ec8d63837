"""Files that are added to the directory of a checkpoint in the same commit, and objects that write files."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar, Final

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.plain_safetensors import open_regular_file
from ckptcore.protocols import SaveCommit, StorageBackend

MISSING_FILE: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors by which `open` reports that a file does not exist. After any other error, the file may exist."""

_ROOT = "checkpoint.json"


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Return True if the directory has the root of a checkpoint of ckptcore."""
    return os.path.lexists(os.path.join(directory, _ROOT))


def read_files(directory: str | os.PathLike[str]) -> Mapping[str, bytes]:
    """Return the contents of all files below a directory, by name."""
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): _read(path) for path in files}


def _read(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def open_file(path: Path) -> BinaryIO:
    """Open a file of a checkpoint.

    Raises:
        CorruptCheckpointError: it is a named pipe, socket or device.
        OSError: it cannot be opened; see `MISSING_FILE`.
    """
    try:
        return open_regular_file(path)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO):
            raise CorruptCheckpointError(f"{path} is not a regular file") from error
        raise


def digests_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the digests of files, for the metadata of the checkpoint."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def check_files(directory: str | os.PathLike[str]) -> Sequence[str]:
    """Compare the files that were added to a checkpoint with their digests, and return their names.

    Raises:
        CorruptCheckpointError: a file is missing or damaged.
        CheckpointError: a file cannot be read, for another reason.
    """
    digests = ckptcore.metadata(directory).custom.get("files")
    if not isinstance(digests, dict):
        raise CheckpointError(f"{os.fspath(directory)} has no list of files: another program saved it")
    for name, digest in digests.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise CorruptCheckpointError(f"{os.fspath(directory)} names a file outside: {name!r}")
        try:
            data = _read(Path(directory) / path)
        except (OSError, ValueError) as error:
            is_damaged = isinstance(error, MISSING_FILE) or not isinstance(error, OSError)
            kind = CorruptCheckpointError if is_damaged else CheckpointError
            raise kind(f"{os.fspath(directory)}: cannot read {name!r}: {error}") from error
        if digests_of({name: data})[name] != digest:
            raise CorruptCheckpointError(f"{os.fspath(directory)}: {name!r} is damaged; load another checkpoint")
    return list(digests)


@dataclass(frozen=True, slots=True)
class ObjectWithFiles:
    """An object with functions that write and read files in a directory. Each process has its own object."""

    save_to: Callable[[str], None]
    load_from: Callable[[str], None]

    def save(self, directory: Path) -> None:
        """Write the files."""
        self.save_to(os.fspath(directory))

    def load(self, directory: Path) -> None:
        """Read the files."""
        self.load_from(os.fspath(directory))


@dataclass(frozen=True, slots=True)
class SaveWithFiles(ckptcore.PlainSave):
    """A save that adds files to the directory of the checkpoint, in the same commit.

    Attributes:
        files: the contents, by name. Each process adds its own, under different names.
    """

    adds_files: ClassVar[bool] = True

    files: Mapping[str, bytes] = field(default_factory=dict)

    def begin(self, save: Any) -> SaveCommit:
        """Return the commit of a save."""
        return _CommitWithFiles(ckptcore.PlainSave.begin(self, save), self.files)


class _CommitWithFiles:
    """Commit that writes the added files before the checkpoint, in the writing stage of the job."""

    def __init__(self, inner: SaveCommit, files: Mapping[str, bytes]) -> None:
        self._inner = inner
        self._files = dict(files)

    @property
    def meaning(self) -> str:
        return self._inner.meaning

    @property
    def commit_meaning(self) -> str:
        return self._inner.commit_meaning

    @property
    def store(self) -> StorageBackend:
        store = self._inner.store
        while self._files:
            store.put(*self._files.popitem())
        return store

    def claim(self) -> None:
        self._inner.claim()

    def commit(self, payloads: Sequence[object]) -> None:
        self._inner.commit(payloads)

    def settle(self, error: Exception | None) -> None:
        self._inner.settle(error)

    def abort(self) -> None:
        self._inner.abort()
