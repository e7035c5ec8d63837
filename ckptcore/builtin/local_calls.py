"""System calls of local storage: opening files below a root, renames, syncs, and their errors.

Symbolic links are followed inside a checkpoint. `open_inside` lists the few links that may lead out of it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import io
import os
import posixpath
import re
import stat
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO, Final, Protocol, TypeAlias, TypeVar

from ckptcore.errors import AtomicityError, InvalidLocationError, ObjectNotFoundError, StorageError, StorageFullError
from ckptcore.records import NamedTuple

T = TypeVar("T")

OPEN_TO_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags for a file that may be hostile. Without O_NONBLOCK, a named pipe would block the reader forever."""

LEAST_ALLOCATED_BYTES: Final = 1 << 20
"""Files of at least this size are allocated before they are written.

This makes the writes faster, and reports a full disk early.
"""

_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h
_OPENAT2: Final = 437  # asm-generic/unistd.h; a recent system call, so it has the same number on all machines
_OPENAT2_MACHINES: Final = frozenset({"x86_64", "aarch64", "riscv64", "ppc64le", "s390x", "loongarch64"})
AT_FDCWD: Final = -100  # linux/fcntl.h
_RESOLVE_NO_SYMLINKS: Final = 0x04  # linux/openat2.h
_OPEN_HOW: Final = struct.Struct("=QQQ")  # linux/openat2.h, struct open_how: flags, mode and resolve, 64 bits each
_MISSING_CALL: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EPERM})
"""Error numbers of calls that a kernel, file system or sandbox does not have. Sandboxes answer EPERM."""

_UNSUPPORTED: Final = _MISSING_CALL | {errno.ENODEV, errno.EACCES, errno.ENOTTY, errno.ESPIPE, errno.EINTR}
"""Error numbers to ignore for calls that only make writes faster. A write reports errors of the data again."""

NO_LINKS: Final = _MISSING_CALL | {errno.EMLINK, errno.EACCES, errno.EXDEV, errno.EROFS}
"""Error numbers of `link` on file systems without hard links. fusepy returns EROFS by default."""

NO_LOCKS: Final = _MISSING_CALL | {errno.ENOLCK, errno.EBADF}
"""Error numbers of `flock` on file systems without locks. NFS returns ENOLCK if it has no lock service, and EBADF for
directories."""


def allocate(descriptor: int, nbytes: int) -> None:
    """Set the size of an open file and allocate its blocks before it is written, if its file system supports it.

    This does not use `os.posix_fallocate`, which writes into every page if the file system cannot allocate blocks.

    Raises:
        OSError: there is no space.
    """
    types = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call_if_supported("fallocate", types, descriptor, 0, 0, nbytes)


def open_without_links(path: str, flags: int) -> int | None:
    """Open a file if no component of its path is a symbolic link.

    Args:
        path: the path of the file.
        flags: flags for `os.open` that do not create a file.

    Returns:
        A descriptor. None if the system has no `openat2`, if the path has a link, or if the file cannot be opened. In
        the last case, `os.open` raises an error with the reason.
    """
    opener = _opener(flags)
    return None if opener is None else opener(path)


def open_regular_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a local file for reading. Links are followed; anything but a regular file is refused.

    The files of a checkpoint may be hostile: opening a named pipe would wait forever, and devices such as /dev/zero
    have no end.

    Raises:
        OSError: the file cannot be opened, or is a directory, named pipe, socket or device.
    """
    file = open(os.open(path, OPEN_TO_READ), "rb", buffering=0)  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "expected a regular file, found a named pipe, socket or device", str(path))
    return io.BufferedReader(file)


def expect_encodable(path: str) -> str:
    """Return a path unchanged. Refuse characters that the file name encoding of this process does not have.

    Raises:
        InvalidLocationError
    """
    if not path.isascii():
        try:
            os.fsencode(path)
        except UnicodeEncodeError as error:
            raise InvalidLocationError(
                f"{path!a} cannot be the name of a file in this process, which encodes names as "
                f"{sys.getfilesystemencoding()}: choose another name, or start Python with PYTHONUTF8=1"
            ) from error
    return path


def real_path(path: str) -> str:
    """Return `os.path.realpath` of a path. A path without links takes one system call instead of one per component.

    Raises:
        InvalidLocationError: the encoding of names in this process lacks a character.
    """
    expect_encodable(path)
    absolute = path if path.startswith("/") else f"{working_directory()}/{path}"
    # `link/..` is the parent of the link's target, and two leading slashes have a special meaning on some systems.
    if sys.platform == "linux" and ".." not in absolute.split("/") and not absolute.startswith("//"):
        descriptor = open_without_links(absolute, os.O_PATH | os.O_CLOEXEC)
        if descriptor is not None:
            close_descriptor(descriptor, absolute)
            return os.path.normpath(absolute)
    return os.path.realpath(path)


@functools.cache
def _opener(flags: int) -> Callable[[str], int | None] | None:
    """Return the function behind `open_without_links` for the given flags; None if the system does not support it."""
    if sys.platform != "linux" or os.uname().machine not in _OPENAT2_MACHINES:
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "syscall", None)
    if call is None:
        return None
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    call.restype = ctypes.c_long
    how = ctypes.create_string_buffer(_OPEN_HOW.pack(flags, 0, _RESOLVE_NO_SYMLINKS), _OPEN_HOW.size)

    def open_file(path: str) -> int | None:
        encoded = os.fsencode(path)
        if b"\0" in encoded:
            return None  # the C library would end the path at this byte
        sys.audit("open", path, None, flags)
        descriptor: int = call(_OPENAT2, AT_FDCWD, encoded, how, _OPEN_HOW.size)
        return descriptor if descriptor >= 0 else None

    root = open_file("/")  # a test: an old kernel does not have the call, and a sandbox may forbid it
    if root is None:
        return None
    os.close(root)
    return open_file


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Start to write a range of an open file from the page cache to the disk, if supported. Does not wait.

    Raises:
        OSError: an earlier write failed.
    """
    types = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call_if_supported("sync_file_range", types, descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def call_if_supported(name: str, argument_types: tuple[type, ...], *arguments: object) -> bool:
    """Call a function of the C library. Return False if the system or the file system does not have it.

    Raises:
        OSError
    """
    function = c_function(name, argument_types)
    if function is None:
        return False
    if function(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))


@functools.cache
def c_function(name: str, argument_types: tuple[type, ...]) -> Callable[..., int] | None:
    """Return a function of the C library of Linux; None on other systems, or if the library lacks it."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = argument_types
    return function


ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)
"""Error numbers of missing files: the name does not exist (ENOENT), or a parent is not a directory (ENOTDIR)."""

_STALE_RETRIES: Final = 3
"""Maximum number of retries of a call that fails with ESTALE. The next call usually finds the new file at the path."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)

_HIDDEN: Final = re.compile(r"/\.([^/]*\.)?ckptcore(?=/|$)")
"""The hidden directory of a save or a run in a path. Users know only the directory that contains it."""


def local_error(error: OSError, doing: str, path: str, nbytes: int | None = None) -> StorageError:
    """Return the error to raise for an error of the system.

    Args:
        error: the error of the system.
        doing: the failed operation, as in "cannot <doing> <path>".
        path: the file or directory.
        nbytes: the bytes that were to be written, if known.
    """
    amount = "" if nbytes is None else f" ({nbytes} bytes)"
    reason = error.strerror or repr(error)
    kind, message = StorageError, f"cannot {doing} {path}{amount}: {reason}"
    if error.errno in _FULL:
        what = "quota of this user" if error.errno == errno.EDQUOT else "file system"
        kind = StorageFullError
        message = (
            f"cannot {doing} {path}{amount}: the {what} is full ({reason}). "
            "Free some space, delete old checkpoints or save elsewhere. Committed checkpoints are intact"
        )
    elif error.errno == errno.EROFS:
        message = (
            f"cannot write to {_HIDDEN.split(path)[0]}: the file system is mounted read-only ({reason}). Load with "
            "ckptcore.CheckpointReader or ckptcore.load, which write nothing, or mount the file system writable"
        )
    elif error.errno == errno.ESTALE:
        message += (
            ". The file server has forgotten what this machine found there, which says nothing about the file: try "
            "again, or mount the file system again"
        )
    elif error.errno in ABSENT:
        kind, message = ObjectNotFoundError, f"cannot {doing} {path}: it does not exist ({reason})"
    converted = kind(message)
    converted.errno = error.errno
    return converted


class SystemCall(NamedTuple):
    """A ``with`` block that converts errors of system calls with `local_error`. Errors of ckptcore pass unchanged.

    Reads and writes of bytes are too frequent for such a block, and catch their errors themselves. See `local_error`
    for the attributes.
    """

    doing: str
    path: str
    nbytes: int | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise local_error(error, *self) from error


@contextmanager
def ignoring(numbers: Collection[int]) -> Iterator[None]:
    """Ignore system errors with the given numbers in a ``with`` block. Such an error still ends the block.

    Raises:
        OSError: an error with another number.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def retry_stale(call: Callable[[], T]) -> T:
    """Return the result of a call that finds files by their paths. Repeat it if the file server reports a stale handle.

    Raises:
        OSError
    """
    for _ in range(_STALE_RETRIES):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return call()


def close_descriptor(descriptor: int, path: str) -> None:
    """Close a file or directory. A network file system may report lost writes here.

    Raises:
        StorageError
    """
    try:
        os.close(descriptor)
    except OSError as error:
        raise local_error(error, "close", path) from error


class _Closable(Protocol):
    """An object with open files."""

    def forget(self) -> None:
        """Close the files of the parent in a forked child. Must not take locks: a thread may have held them."""
        ...


def close_in_children(closable: _Closable) -> None:
    """Call `forget` of an object in every forked child, for as long as the object exists.

    Otherwise workers of a data loader would keep locks and the disk space of deleted files until they end.
    """
    _CLOSABLE.add(closable)


_CLOSABLE: Final[weakref.WeakSet[_Closable]] = weakref.WeakSet()


def _forget_all() -> None:
    for closable in list(_CLOSABLE):
        with suppress(OSError):  # the descriptor is closed despite the error; continue with the other objects
            closable.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


_OPEN_FILES: Final = (32, 64)
"""Smallest and largest limit for the files that all storages of a process keep open for further reads. Each file has up
to three descriptors."""


@functools.cache
def _most_open_files() -> int:
    """Return the limit for this process: an eighth of its descriptors. Some systems allow only 256 descriptors."""
    import resource  # only a process that reads files needs it

    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least, most = _OPEN_FILES
    return most if descriptors == resource.RLIM_INFINITY else min(max(descriptors // 8, least), most)


class _OpenFiles(Protocol):
    """An object that keeps files open."""

    def close_file(self, path: str) -> None:
        """Close a file. Thread-safe."""
        ...


class _RecentFiles:
    """The cached files of all storages in this process, the oldest first. Thread-safe."""

    def __init__(self) -> None:
        self.forget()
        close_in_children(self)

    def forget(self) -> None:
        """Start without files. A forked child must do this too."""
        self._lock = threading.Lock()
        self._owners: dict[tuple[int, str], weakref.ref[_OpenFiles]] = {}

    def add(self, owner: _OpenFiles, path: str) -> None:
        """Remember that a cache has opened a file. Close the oldest files beyond the limit."""
        oldest = []
        with self._lock:
            self._owners.pop((id(owner), path), None)
            self._owners[id(owner), path] = weakref.ref(owner)
            while len(self._owners) > _most_open_files():
                key = next(iter(self._owners))
                oldest.append((self._owners.pop(key), key[1]))
        for reference, unneeded in oldest:
            if (cache := reference()) is not None:
                cache.close_file(unneeded)


RECENT_FILES: Final = _RecentFiles()


def working_directory() -> str:
    """Return the working directory of this process.

    Raises:
        InvalidLocationError: it was removed.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise InvalidLocationError(
            "cannot resolve a relative path: the working directory of this process cannot be determined "
            f"({error.strerror}). "
            "Pass an absolute path, or change to another directory"
        ) from error


def sync_file(descriptor: int) -> None:
    """Make the bytes and the size of an open file durable.

    Raises:
        OSError
    """
    if sys.platform == "darwin":
        with ignoring((errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)):
            # On macOS, fsync leaves the bytes in the cache of the drive.
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        os.fsync(descriptor)
    else:
        os.fdatasync(descriptor)


def sync_directory(descriptor: int) -> None:
    """Make the names in an open directory durable, if its file system supports that.

    Raises:
        OSError
    """
    # Some network and FUSE file systems refuse to sync directories. Their names need no sync.
    with ignoring((errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)):
        os.fsync(descriptor)


# O_PATH needs no permission to list the directory. Systems without O_PATH need that permission.
_OPEN_ROOT: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_DIRECTORY: Final = _OPEN_ROOT | os.O_NOFOLLOW
_MAX_LINKS: Final = 40  # the limit of Linux for one path

_IS_LINK: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
"""Errors of an open with O_NOFOLLOW at a link. ENOTDIR also means a file in place of a directory."""

_HUB_SNAPSHOT: Final = r"(?s)(.*/[a-z]+s--[^/]+)/snapshots/[^/]+(?:/.*)?"
"""A snapshot in a Hugging Face cache, such as ``models--owner--name/snapshots/<revision>``, with its repository."""


def open_inside(root: str, path: str, flags: int) -> int:
    """Open a file or directory below a root, component by component.

    A link is followed if its target is in the same checkpoint: below the first component of the path, which must not be
    a link. A file directly below the root may link to any file below the root. A snapshot in a Hugging Face cache may
    link to the ``blobs`` of its repository.

    Args:
        root: the directory of the storage. The user named it, so it may be a link or be below links.
        path: the path of the file, below the root, without ``.`` and ``..``.
        flags: flags for `os.open` that do not create a file.

    Returns:
        A descriptor.

    Raises:
        InvalidLocationError: a link leads out of the checkpoint.
        OSError
    """
    below = path.removeprefix(root).lstrip("/")
    walk = _PathWalk(root)
    try:
        if "/" in below:
            checkpoint, _, below = below.partition("/")
            walk.enter_checkpoint(checkpoint)
        return walk.open(below, flags)
    finally:
        walk.close()


class _PathWalk:
    """A walk down from a directory. Links cannot lead out of the directory, except to blobs of a Hugging Face cache."""

    def __init__(self, root: str) -> None:
        self._boundary = root
        self._names: list[str] = []
        self._directories = [os.open(root, _OPEN_ROOT)]

    def close(self) -> None:
        """Close all open directories, each once, even if closing one is interrupted."""
        with ExitStack() as closing:
            while self._directories:
                closing.callback(os.close, self._directories.pop())

    def enter_checkpoint(self, name: str) -> None:
        """Enter a directory directly below the root, which becomes the boundary."""
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
                # Go back to the open parent: `..` of the system would lead out of a directory that was moved meanwhile.
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
                if (link_target := self._target(name, error.errno)) is None:
                    raise
                target = link_target
            else:
                if not pending:
                    return descriptor
                self._directories.append(descriptor)
                self._names.append(name)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), below)
            link = posixpath.join(self._boundary, *self._names, name)
            if not pending and (blob := self._hub_blob(target)) is not None:
                return _open_blob(*blob, flags)
            pending += self._from_here(link, target)[::-1]

    def _target(self, name: str, number: int | None) -> str | None:
        """Return the target of a link in the last directory, or None if the name is not a link.

        Args:
            name: the name in the last directory.
            number: the error number of the failed open.
        """
        if number not in _IS_LINK:
            return None
        with ignoring((errno.EINVAL,)):
            return os.readlink(name, dir_fd=self._directories[-1])
        return None

    def _from_here(self, link: str, target: str) -> list[str]:
        """Return the components of a link target, relative to the last directory.

        Refuses an absolute target that is not below the boundary.
        """
        if not target.startswith("/"):
            return target.split("/")
        for boundary in (self._boundary, os.path.realpath(self._boundary)):
            above = boundary.rstrip("/") + "/"
            if target.startswith(above):
                return [".."] * len(self._names) + target.removeprefix(above).split("/")
        raise _leads_out(link, target)

    def _hub_blob(self, target: str) -> tuple[str, str] | None:
        """Return the ``blobs`` directory and the name of the blob that a link of a snapshot refers to, or None."""
        if "/blobs/" not in target:
            return None
        boundary = os.path.realpath(self._boundary)
        snapshot = re.fullmatch(_HUB_SNAPSHOT, boundary)
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
        "the file into the checkpoint, or pass the target of the link as the location"
    )


# linux/fs.h, and sys/stdio.h of macOS
_LINUX_NO_REPLACE: Final = 1
_LINUX_EXCHANGE: Final = 2
_MACOS_EXCHANGE: Final = 2
_MACOS_NO_REPLACE: Final = 4

_RenameCall: TypeAlias = Callable[[bytes, bytes], int]


def rename_without_replacing(source: str, destination: str) -> None:
    """Rename a file or directory, atomically.

    Raises:
        FileExistsError: the destination exists; nothing was changed.
        AtomicityError: the file system does not support this; nothing was changed.
        OSError
    """
    _rename(_rename_call(_LINUX_NO_REPLACE, _MACOS_NO_REPLACE), source, destination, "rename without replacing")


def exchange(first: str, second: str) -> None:
    """Exchange two names of one file system, atomically.

    Raises:
        AtomicityError: the file system does not support this; nothing was changed.
        OSError
    """
    _rename(_rename_call(_LINUX_EXCHANGE, _MACOS_EXCHANGE), first, second, "exchange two names")


def _rename(function: _RenameCall | None, first: str, second: str, what: str) -> None:
    number = errno.ENOSYS
    if function is not None:
        if function(os.fsencode(first), os.fsencode(second)) == 0:
            return
        number = ctypes.get_errno()
    # EINVAL can also mean that a directory would be moved into itself, and EPERM that a directory forbids changes.
    # EXDEV means a directory in a lower layer of overlayfs.
    if number in _MISSING_CALL or number == errno.EXDEV:
        raise AtomicityError(
            f"cannot {what} atomically: the file system or operating system of {first} and {second} does not support "
            f"it ({os.strerror(number)}); nothing was changed. Use a local file system, or save to a new location"
        )
    raise OSError(number, os.strerror(number), first, None, second)


def _rename_call(linux_flag: int, macos_flag: int) -> _RenameCall | None:
    if sys.platform == "darwin":
        if (renamex := getattr(ctypes.CDLL(None, use_errno=True), "renamex_np", None)) is None:
            return None
        renamex.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint)
        return lambda first, second: int(renamex(first, second, macos_flag))
    types = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if (renameat2 := c_function("renameat2", types)) is None:
        return None
    return lambda first, second: int(renameat2(AT_FDCWD, first, AT_FDCWD, second, linux_flag))
