"""torch_checkpointing: a storage that uses ckptcore's storages, with durable files and atomic commits.

`CkptcoreStorageConfig` is a `StorageConfig`: pass it as ``storage_config`` to a `CheckpointManager`. Paths are local
paths or URLs such as ``s3://bucket/run/step_100``. The files and formats of torch_checkpointing do not change.

torch_checkpointing writes into a directory with the prefix ``tmp_`` and then renames it. With this storage, a file is
durable once it is closed. On file systems, the rename never replaces another directory. Object stores cannot rename
directories, and an earlier job may still write to them. So on object stores:

- Every file is an object in ``objects.ckptcore/<id of the job>`` in the directory of the checkpoint. A job is the
  processes of one process group: a restarted job has another id.
- The rename creates the list of the objects of its job, ``files.ckptcore.json``, if no list exists. Without a list the
  checkpoint does not exist, and objects that are not in the list are ignored. Nothing is deleted before the commit.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch_checkpointing.checkpoint_writer import DEFAULT_TEMP_DIR_PREFIX
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig
from typing_extensions import Buffer

from ckptcore import Context
from ckptcore.commit.location import open_directory
from ckptcore.errors import ConditionFailedError, CorruptCheckpointError, InvalidLocationError, ObjectNotFoundError
from ckptcore.model.metadata import check_key
from ckptcore.protocols import IF_ABSENT, StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore_integrations.object_streams import InputStream, OutputStream

__all__ = ["CkptcoreStorage", "CkptcoreStorageConfig"]

_LIST: Final = "files.ckptcore.json"
"""The list of the objects of a committed checkpoint in an object store."""

_FORMAT: Final = "ckptcore-files"
_VERSION: Final = 1

_OBJECTS: Final = "objects.ckptcore"
"""Directory of the objects, within the directory of the checkpoint."""

_JOB: Final = re.compile(r"[0-9a-f]{32}")

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)", re.DOTALL)
"""A URL. `Path` removes one of its slashes."""

_MAX_LIST_BYTES: Final = 1 << 26
_DEPTH: Final = 4
"""Maximum number of directories above a file within its checkpoint."""

_COPY_BYTES: Final = 8 << 20
"""Bytes of a file that are copied at a time."""


@dataclass
class CkptcoreStorageConfig(StorageConfig):
    """Stores checkpoints on the storages of ckptcore.

    Can be pickled, so that it can be sent to the process that writes.

    Attributes:
        context: options, such as those of storages; None for the default.
        temp_dir_prefix: the option of the same name of the `CheckpointWriterConfig`.
    """

    context: Context | None = None
    temp_dir_prefix: str = DEFAULT_TEMP_DIR_PREFIX
    _job: str = field(default="", init=False, repr=False)

    def create_storage(self) -> CkptcoreStorage:
        """Return the storage. Makes no request.

        Raises:
            RuntimeError: the job has several processes, and its process group is not initialized.
        """
        return CkptcoreStorage(self.context or Context(), self.temp_dir_prefix, self._job_id())

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, and the id of the job for the process that writes."""
        self._job_id()
        return vars(self)

    def _job_id(self) -> str:
        """Return the id of the job. Its processes agree on it through the store of their process group."""
        if not self._job:
            self._job = uuid.uuid4().hex
            if dist.is_initialized() and dist.get_world_size() > 1:
                agreed = dist.distributed_c10d._get_default_store().compare_set("ckptcore/files/job", "", self._job)
                self._job = agreed.decode()
            elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
                self._job = ""
                raise RuntimeError(
                    "the job has several processes, which agree on the names of files by their process group: call "
                    "torch.distributed.init_process_group before the CheckpointManager is created"
                )
        return self._job


class _Place(NamedTuple):
    """A path on an object store.

    Attributes:
        directory: the URL of the directory of checkpoints.
        checkpoint: the name of a checkpoint in it; empty if none is known.
        file: the path within the checkpoint; empty for the checkpoint itself.
        pending: True if the path is in the temporary directory of the checkpoint.
    """

    directory: str
    checkpoint: str
    file: str
    pending: bool

    @property
    def key(self) -> str:
        return "/".join(filter(None, (self.checkpoint, self.file)))


class CkptcoreStorage(Storage):
    """The storage of a `CkptcoreStorageConfig`. Thread-safe."""

    def __init__(self, context: Context, prefix: str, job: str) -> None:
        self._context = context
        self._prefix = prefix
        self._job = job
        self._local = LocalFileSystemStorage(LocalFileSystemStorageConfig())

    # --- read

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Open a file. The stream reads ranges, unless `ReadArgs.pre_read_full_file` requires the whole file.

        Raises:
            FileNotFoundError: there is no such file, or it is not committed.
            OSError: it does not have the size that the caller expects.
        """
        url = _url(path)
        if url is None:
            return self._local.stream_read(path, read_args)
        storage, key, size = self._find(path, url)
        expected = read_args.known_size_bytes if read_args is not None else None
        if expected is not None and expected != size:
            raise OSError(f"{url} has {size} bytes, and its caller expects {expected}: it was replaced; load again")
        if read_args is not None and not read_args.pre_read_full_file:
            return InputStream(storage.open_reader(key), size)
        return io.BytesIO(storage.get(key))  # type: ignore[return-value]  # as torch_checkpointing's own storage

    def getsize(self, path: Path) -> int:
        """Return the size of a file in bytes.

        Raises:
            FileNotFoundError: there is no such file, or it is not committed.
        """
        url = _url(path)
        return self._local.getsize(path) if url is None else self._find(path, url)[2]

    def exists(self, path: Path) -> bool:
        """Return True for a file or directory. A checkpoint in an object store exists once it is committed."""
        url = _url(path)
        return self._local.exists(path) if url is None else self._is_file(path, url) or self.isdir(path)

    def isdir(self, path: Path) -> bool:
        """Return True for a directory. A checkpoint in an object store exists once it is committed."""
        url = _url(path)
        return self._local.isdir(path) if url is None else bool(self._names(url))

    def ls(self, path: Path) -> list[str]:
        """Return the names in a directory.

        Raises:
            FileNotFoundError: there is no such directory.
        """
        url = _url(path)
        if url is None:
            return self._local.ls(path)
        names = self._names(url)
        if not names:
            raise FileNotFoundError(errno.ENOENT, "there is no such directory", url)
        return names

    def remap_path(self, path: Path) -> str:
        """Return the local path or the URL."""
        return _url(path) or str(path)

    # --- write

    def stream_write(self, path: Path) -> io.IOBase:
        """Return a stream. Its file exists and is durable once the stream is closed without an error.

        Raises:
            FileExistsError: the path is in the temporary directory of a checkpoint that is committed.
        """
        url = _url(path)
        if url is None:
            storage, key = self._open(str(path.parent), to_write=True), path.name
            return OutputStream(storage.open_writer(key))
        place = self._place(url, is_file=True)
        storage = self._open(place.directory, to_write=True)
        if place.pending:
            self._refuse_committed(storage, place)
        elif self._committed(url) is not None:
            raise _occupied(url)
        if place.file.count("/") >= _DEPTH:
            raise OSError(errno.ENAMETOOLONG, f"it is more than {_DEPTH} directories below its checkpoint", url)
        return OutputStream(storage.open_writer(self._key(place)))

    def write(self, path: Path, data: Buffer) -> None:
        """Write a file. See `stream_write`."""
        with self.stream_write(path) as stream:
            stream.write(data)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Create a directory. In object stores directories appear with their first file.

        Raises:
            FileExistsError: the path is the temporary directory of a checkpoint that is committed.
        """
        url = _url(path)
        if url is None:
            self._local.mkdir(path, recursive)
        elif (place := self._place(url)).pending:
            self._refuse_committed(self._open(place.directory), place)

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Commit a directory, or move a file. See `Storage.rename` for other errors.

        Raises:
            FileExistsError: the destination exists, or another job committed it during the call.
            OSError: an object store cannot rename the directory, because its name is not the temporary name of
                `dst_path`; or two jobs write the same checkpoint.
        """
        source, destination = _url(src_path), _url(dst_path)
        if (source is None) != (destination is None):
            raise OSError(errno.EXDEV, f"cannot rename {src_path} to {dst_path}: they are on different storages")
        if source is None or destination is None:
            self._rename_locally(src_path, dst_path)
        elif self._place(source).pending and not self._place(source).file:
            self._commit(self._place(source), destination)
        elif self._is_file(src_path, source):
            self._move(src_path, dst_path, destination)
        else:
            raise OSError(
                errno.ENOTSUP,
                f"cannot rename {source} to {destination}: object stores have no directories. Only the temporary "
                f"directory of a checkpoint, {self._prefix}<name>, is renamed to <name>",
            )

    def delete(self, path: Path) -> None:
        """Delete a file.

        Raises:
            FileNotFoundError: there is no such file.
            PermissionError: it is a file of a committed checkpoint in an object store, which `rmdir` deletes.
        """
        url = _url(path)
        if url is None:
            self._local.delete(path)
            return
        storage, key, _ = self._find(path, url)
        if self._committed(url) is not None:
            raise PermissionError(errno.EPERM, "it is in a committed checkpoint; delete that with rmdir", url)
        storage.delete([key])

    def rmdir(self, path: Path) -> None:
        """Delete a directory with its contents. The list of a committed checkpoint is deleted before its files."""
        url = _url(path)
        if url is None:
            self._local.rmdir(path)
            return
        place = self._place(url)
        storage = self._open(place.directory, to_write=True)
        if not place.pending:
            storage.delete([f"{place.key}/{_LIST}"])
            storage.delete(list(storage.list(place.key)))
            return
        # First list the objects, then read the commit list: if it does not exist, no listed object is committed.
        keys = list(storage.list(place.checkpoint))
        listed = _read_list(storage, place.checkpoint)
        if place.file or listed is not None:
            raise FileNotFoundError(errno.ENOENT, "there is no such directory", url)
        storage.delete(keys)

    # --- file systems

    def _rename_locally(self, source: Path, destination: Path) -> None:
        """Rename with ckptcore's storage, which makes files and names durable and replaces no directory."""
        if not source.is_dir() or source.parent != destination.parent or destination.is_file():
            self._local.rename(source, destination)
            return
        storage: Any = self._open(str(source.parent), to_write=True)
        storage.sync_directory(source.name)
        try:
            storage.rename(source.name, destination.name)
        except ConditionFailedError as error:
            raise _occupied(str(destination)) from error

    # --- object stores

    def _open(self, directory: str, *, to_write: bool = False) -> StorageBackend:
        return open_directory(directory, runtime_of(self._context).storages, to_write=to_write)

    def _place(self, url: str, *, is_file: bool = False) -> _Place:
        scheme, _, rest = url.partition("://")
        names = [name for name in rest.split("/") if name]
        for index in range(len(names) - 1 - is_file, 0, -1) if self._prefix else ():
            if names[index].startswith(self._prefix) and names[index] != self._prefix:
                checkpoint = names[index].removeprefix(self._prefix)
                above = "/".join(names[:index])
                return _Place(f"{scheme}://{above}", checkpoint, "/".join(names[index + 1 :]), True)
        return _Place(f"{scheme}://{'/'.join(names[:-1])}", "", names[-1] if names else "", False)

    def _refuse_committed(self, storage: StorageBackend, place: _Place) -> None:
        if _read_list(storage, place.checkpoint) is not None:
            raise _occupied(f"{place.directory}/{place.checkpoint}")

    def _key(self, place: _Place) -> str:
        """Return the key of a file that is not in a committed checkpoint."""
        return f"{place.checkpoint}/{_OBJECTS}/{self._job}/{place.file}" if place.pending else place.key

    def _committed(self, url: str) -> tuple[StorageBackend, str, str, _Listed] | None:
        """Return the committed checkpoint of a path: its storage and name, the path within it, and its files."""
        directory, file = url, ""
        for _ in range(_DEPTH + 1):
            directory, _, name = directory.rpartition("/")
            if not name or directory.endswith(":/"):
                return None
            storage = self._open(directory)
            files = _read_list(storage, name)
            if files is not None:
                return storage, name, file, files
            file = f"{name}/{file}" if file else name
        return None

    def _find(self, path: Path, url: str) -> tuple[StorageBackend, str, int]:
        """Return the storage, key and size of a file."""
        place = self._place(url, is_file=True)
        if (committed := self._committed(url)) is not None:
            storage, name, file, listed = committed
            if file not in listed.sizes:
                raise FileNotFoundError(errno.ENOENT, "the checkpoint has no such file", url)
            return storage, f"{name}/{listed.key(file)}", listed.sizes[file]
        storage, key = self._open(place.directory), self._key(place)
        return storage, key, storage.size(key)

    def _is_file(self, path: Path, url: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._find(path, url)
            return True
        return False

    def _names(self, url: str) -> list[str]:
        """Return the names in a directory, as a file system would after the same renames."""
        if (committed := self._committed(url)) is not None:
            _, _, file, listed = committed
            return _first_names(listed.sizes, file)
        place = self._place(url)
        if place.pending:
            storage = self._open(place.directory)
            if (other := _read_list(storage, place.checkpoint)) is not None:
                if other.job != self._job:
                    # torch_checkpointing commits nothing, and reports no error, if its directory does not exist.
                    raise _occupied(f"{place.directory}/{place.checkpoint}")
                return []
            start = f"{place.checkpoint}/{_OBJECTS}/"
            files = [key.removeprefix(start).partition("/")[2] for key in storage.list(start.removesuffix("/"))]
            return _first_names(files, place.file)
        storage = self._open(url)
        entries = storage.list_names()
        if f"{_OBJECTS}/" in entries:
            return []  # a checkpoint that is not committed
        names = [name for name in entries if not name.endswith("/")]
        for name in [name[:-1] for name in entries if name.endswith("/")]:
            within = storage.list_names(name)
            pending = f"{_OBJECTS}/" in within and _LIST not in within
            names.append(f"{self._prefix}{name}" if pending else name)
        return sorted(names)

    def _commit(self, source: _Place, destination: str) -> None:
        """Create the list of objects of a checkpoint.

        Raises:
            FileExistsError, OSError: see `rename`.
        """
        directory, _, name = destination.rpartition("/")
        if (directory, name) != (source.directory, source.checkpoint):
            raise OSError(
                errno.ENOTSUP,
                f"cannot rename {source.directory}/{self._prefix}{source.checkpoint} to {destination}: an object store "
                f"renames it to {source.checkpoint} only",
            )
        storage = self._open(directory, to_write=True)
        if strays := list(storage.list(f"{self._prefix}{name}")):
            raise OSError(
                errno.ENOTSUP,
                f"{destination}: {strays[0]} is in a directory within the checkpoint whose name begins with "
                f"{self._prefix!r}, like that of a temporary one: give it another name",
            )
        objects = _sizes(storage, name)
        if any(not key.startswith(f"{_OBJECTS}/") for key in objects):
            raise _occupied(destination)
        start = f"{_OBJECTS}/{self._job}/"
        files = {key.removeprefix(start): size for key, size in objects.items() if key.startswith(start)}
        if not files:
            raise FileNotFoundError(errno.ENOENT, "this job wrote nothing to the temporary directory", destination)
        listed = {"format": _FORMAT, "version": _VERSION, "job": self._job, "files": files}
        data = json.dumps(listed, separators=(",", ":"), sort_keys=True).encode()
        try:
            storage.put(f"{name}/{_LIST}", data, condition=IF_ABSENT)
        except ConditionFailedError as error:
            if storage.get(f"{name}/{_LIST}") != data:  # equal: the response to our first request was lost
                raise _occupied(destination) from error
        storage.delete([f"{name}/{key}" for key in objects if not key.startswith(start)])  # objects of killed jobs

    def _move(self, src_path: Path, dst_path: Path, destination: str) -> None:
        """Copy a file in parts, and delete the source."""
        if self.isdir(dst_path):
            raise _occupied(destination)
        with self.stream_read(src_path, ReadArgs(pre_read_full_file=False)) as read, self.stream_write(dst_path) as out:
            while data := read.read(_COPY_BYTES):
                out.write(data)
        self.delete(src_path)


def _url(path: Path) -> str | None:
    """Return the URL of a path; None for a local path."""
    match = _URL.fullmatch(str(path))
    return None if match is None else f"{match[1]}://{match[2].rstrip('/')}"


def _first_names(files: Iterable[str], directory: str) -> list[str]:
    """Return the names directly below a directory that contains `files`."""
    start = f"{directory}/" if directory else ""
    return sorted({file[len(start) :].partition("/")[0] for file in files if file.startswith(start)})


def _sizes(storage: StorageBackend, directory: str) -> Mapping[str, int]:
    """Return the sizes of the objects of a directory, by key within it."""
    sizes = storage.list_sizes(directory)
    if sizes is None:
        sizes = {key: storage.size(key) for key in storage.list(directory)}
    return {key.removeprefix(f"{directory}/"): size for key, size in sizes.items()}


def _occupied(url: str) -> FileExistsError:
    return FileExistsError(
        errno.ENOTEMPTY, "it exists already, and a save replaces nothing: delete it first, or save to another path", url
    )


class _Listed(NamedTuple):
    """The files of a committed checkpoint.

    Attributes:
        job: the id of the job that wrote them.
        sizes: the size of each file, in bytes.
    """

    job: str
    sizes: Mapping[str, int]

    def key(self, file: str) -> str:
        """Return the key of the object of a file, within the checkpoint."""
        return f"{_OBJECTS}/{self.job}/{file}"


def _read_list(storage: StorageBackend, name: str) -> _Listed | None:
    """Return the files of a committed checkpoint; None if it is not committed.

    Raises:
        CorruptCheckpointError: the list is damaged.
    """
    key = f"{name}/{_LIST}"
    try:
        data = storage.get(key, 0, _MAX_LIST_BYTES)
    except ObjectNotFoundError:
        return None
    try:
        listed = json.loads(data)
        if listed["format"] != _FORMAT or listed["version"] != _VERSION:
            raise ValueError(f"it has the format {listed['format']!r}, version {listed['version']!r}")
        if not _JOB.fullmatch(listed["job"]):
            raise ValueError("the id of the job is invalid")
        for file, size in listed["files"].items():
            check_key(file)
            if type(size) is not int or size < 0:
                raise ValueError(f"the file {file[:80]!r} has {size!r} bytes")
        return _Listed(listed["job"], listed["files"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidLocationError) as error:
        raise CorruptCheckpointError(
            f"{key} is no list of files of a checkpoint ({error!r}): restore it from a copy, or load another one",
            key=key,
        ) from error
