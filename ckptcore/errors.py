"""Every error that ckptcore raises.

::

    CheckpointError
    ├── CheckpointNotFoundError        (FileNotFoundError)  the location has no checkpoint that can be loaded
    │   ├── UncommittedCheckpointError                      a save began there and did not commit
    │   └── UnknownCheckpointableError                      the checkpoint has no checkpointable of this name
    ├── CheckpointExistsError          (FileExistsError)    files at the location must not be replaced or deleted
    ├── DirectoryInUseError            (BlockingIOError)    another job writes steps to the directory
    ├── CorruptCheckpointError         (ValueError)         bytes differ from those written; names the file and range
    │   └── ChecksumError                                   a checksum does not match
    ├── UnsupportedVersionError        (ValueError)         a newer version of ckptcore wrote the checkpoint
    ├── CompositeCheckpointError       (ValueError)         it has several checkpointables, and one tree is required
    ├── TreeMismatchError              (ValueError)         the abstract and the stored tree differ; lists differences
    │   └── PartialLoadError                                some objects were not loaded; all others were
    ├── TransformError                 (ValueError)         a transform failed, or does not fit the stored tree
    ├── UnknownPathError               (KeyError)           an open checkpoint has no such path
    ├── InsufficientMemoryError        (MemoryError)        there is not enough memory for an array; says how much
    ├── NotMappableError               (ValueError)         a stored array cannot be mapped into memory; says why
    ├── UnsupportedLeafError           (TypeError)          no handler or layout can store this leaf
    ├── UnsupportedKeyError            (TypeError)          a container key has a type that cannot be stored
    ├── NameCollisionError             (ValueError)         two leaves would get the same name in the layout
    ├── InvalidLocationError           (ValueError)         not a valid path or URL
    ├── PluginError                    (RuntimeError)       a plugin violated its protocol
    │   ├── PluginConflictError                             two plugins claim the same type, name or scheme
    │   └── UnknownPluginError         (LookupError)        no installed plugin has this layout or URL scheme
    ├── MissingDistributionError       (ImportError)        a distribution that is needed is not installed
    ├── StorageError                   (OSError)            the storage failed
    │   ├── StorageFullError                                it is full or over quota
    │   ├── ObjectNotFoundError        (FileNotFoundError)  the object does not exist
    │   ├── BucketNotFoundError        (FileNotFoundError)  the bucket does not exist
    │   ├── ConditionFailedError                            the condition of a put is not met
    │   ├── StorageCredentialsError                         the credentials are missing, unknown or expired
    │   ├── StoragePermissionError     (PermissionError)    the credentials do not permit the request
    │   ├── ObjectUnavailableError                          the object is in an archive, or its key is disabled
    │   ├── StorageThrottledError                           the storage throttled requests until the deadline
    │   ├── StorageTimeoutError        (TimeoutError)       the storage did not answer in time
    │   ├── WrongRegionError                                the bucket is in another region
    │   └── ClockSkewError                                  the clock of this machine is wrong
    ├── NotSharedError                 (RuntimeError)       the processes of a job do not share the directory
    ├── SaveLostError                  (RuntimeError)       another save took over or removed the claim of this save
    ├── AtomicityError                 (RuntimeError)       the storage has no atomic operation for the request
    ├── BackgroundSaveError            (RuntimeError)       an earlier asynchronous save failed
    ├── UploadError                    (RuntimeError)       committed steps of the near tier are not in the far tier
    ├── OnlyStepError                  (ValueError)         a deletion would remove the last valid step
    ├── CheckpointReferredError        (RuntimeError)       updates refer to the checkpoint to delete
    ├── StepPinnedError                (RuntimeError)       a reader has pinned the step to delete
    ├── TargetUndefinedError           (RuntimeError)       ``load_into`` failed after it changed its target
    ├── CommitUnknownError             (RuntimeError)       it is unknown whether the save committed
    ├── RankFailedError                (RuntimeError)       another process of the job failed
    └── CoordinationTimeoutError       (TimeoutError)       some ranks missed the deadline of an exchange

Messages name the path or array, and say what failed, why, and what to do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

from ckptcore.redaction import redacted

__all__ = [
    "AtomicityError",
    "BackgroundSaveError",
    "BucketNotFoundError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReferredError",
    "ChecksumError",
    "ClockSkewError",
    "CommitUnknownError",
    "CompositeCheckpointError",
    "ConditionFailedError",
    "CoordinationTimeoutError",
    "CorruptCheckpointError",
    "DirectoryInUseError",
    "InsufficientMemoryError",
    "InvalidLocationError",
    "MissingDistributionError",
    "NameCollisionError",
    "NotMappableError",
    "NotSharedError",
    "ObjectNotFoundError",
    "ObjectUnavailableError",
    "OnlyStepError",
    "PartialLoadError",
    "PluginConflictError",
    "PluginError",
    "RankFailedError",
    "SaveLostError",
    "StepPinnedError",
    "StorageCredentialsError",
    "StorageError",
    "StorageFullError",
    "StoragePermissionError",
    "StorageThrottledError",
    "StorageTimeoutError",
    "TargetUndefinedError",
    "TransformError",
    "TreeMismatchError",
    "UncommittedCheckpointError",
    "UnknownCheckpointableError",
    "UnknownPathError",
    "UnknownPluginError",
    "UnsupportedKeyError",
    "UnsupportedLeafError",
    "UnsupportedVersionError",
    "UploadError",
    "WrongRegionError",
    "converts_errors",
]

P = ParamSpec("P")
T = TypeVar("T")


def converts_errors(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Decorate a generator like `contextlib.contextmanager`. For generators that replace the error of the body.

    From Python 3.12 on, the traceback of the body's error includes a frame of `contextmanager`, and this frame refers
    to the error. Such a cycle would keep the arrays of all frames in memory until the next garbage collection.
    """
    manager = contextmanager(function)

    @functools.wraps(function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Conversion(manager(*args, **kwargs))

    return begin


class _Conversion(AbstractContextManager[T]):
    """Removes the frames of a generator from the traceback of its body's error."""

    __slots__ = ("_manager",)

    def __init__(self, manager: AbstractContextManager[T]) -> None:
        self._manager = manager

    def __enter__(self) -> T:
        return self._manager.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return self._manager.__exit__(kind, error, traceback)
        finally:
            if error is not None:
                error.__traceback__ = traceback


class CheckpointError(Exception):
    """Base class of all errors of ckptcore.

    Secrets in URLs (passwords and query values) are printed as ``***``.
    """

    def __str__(self) -> str:
        return redacted(super().__str__())

    def __repr__(self) -> str:
        return redacted(super().__repr__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all attributes. Also supports classes whose constructor takes more than the message."""
        state = dict(self.__dict__)
        if isinstance(self, OSError):  # it stores its attributes outside of __dict__
            own = {name: getattr(self, name) for name in ("errno", "strerror", "filename", "filename2")}
            state |= {name: value for name, value in own.items() if value is not None}
        return _restored, (type(self), self.args), state

    @classmethod
    @contextmanager
    def offering(cls, *options: str) -> Iterator[None]:
        """Name only the given options in errors that leave this block. The result can also decorate a function.

        Errors propose options of ckptcore. If a function chooses an option itself, its caller cannot pass the option,
        so the error must propose something else.

        Args:
            options: the options that the caller of the block can pass, as named in `_REMEDIES`, such as
                ``"overwrite"``. Some names there are values of ``overwrite``, such as ``"non-atomic"``.
        """
        try:
            yield
        except cls as error:
            if error.args and isinstance(text := error.args[0], str):
                for option, pattern, remedy in _REMEDIES:
                    if option not in options:
                        text = re.sub(pattern, remedy, text)
                error.args = (text, *error.args[1:])
            raise

    def add_note(self, note: str, /) -> None:
        """Add a line that is printed below the error. Secrets in URLs are printed as ``***``."""
        super().add_note(redacted(note))


_REMEDIES: Final = (
    (
        "matching",
        r"To allow intended differences, pass matching=(Matching\([^)]*\))",
        r"Only a program that calls ckptcore.load_into itself can allow intended differences, with ckptcore.\1",
    ),
    ("matching", r" and matching=(Matching\([^)]*\))", r" and \1"),
    (
        "transforms",
        r"\bwith transforms=(\[.*?\]) of ckptcore",
        r"by a call of ckptcore.load_into with the transforms \1 of ckptcore",
    ),
    (
        "transforms",
        r"\bpass transforms=(\[.*?\]) of ckptcore",
        r"call ckptcore.load_into with the transforms \1 of ckptcore",
    ),
    ("overwrite", r"pass overwrite=True to replace it\.", "delete it with ckptcore.delete to save it again."),
    ("overwrite", r"pass overwrite=True", "delete it with ckptcore.delete"),
    ("keep-other-files", r"pass overwrite='keep-other-files' to keep them \([^)]*\), or ", ""),
    ("with-other-files", r"pass overwrite='with-other-files' to delete them too, or ", ""),
    ("non-atomic", r"pass overwrite='non-atomic'", "delete it with ckptcore.delete first"),
    (
        "if_in_use",
        r"pass if_in_use='take over', which",
        "open the directory with ckptcore.Checkpointer(directory, if_in_use='take over') and close it, which",
    ),
    ("step_names", r"pass step_names=", "open the directory with ckptcore.Checkpointer and the step names "),
)
"""The proposals in error messages. Each has the option, a pattern of the text that proposes it, and the replacement
text for a caller that cannot pass the option."""


def _restored(error_type: type[CheckpointError], arguments: tuple[object, ...]) -> CheckpointError:
    error = error_type.__new__(error_type, *arguments)
    error.args = arguments
    return error


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The location has no checkpoint that can be loaded."""


class UncommittedCheckpointError(CheckpointNotFoundError):
    """A save began at the location and did not commit. Loads ignore its files."""


class UnknownCheckpointableError(CheckpointNotFoundError):
    """The checkpoint has no checkpointable of this name."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Files at the location must not be replaced or deleted, for example because a save has no ``overwrite``."""


class DirectoryInUseError(CheckpointError, BlockingIOError):
    """Another job, or another `Checkpointer` of this job, writes steps to the directory."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """Bytes of a checkpoint differ from those written.

    Attributes:
        key: the object (file) in the checkpoint; None if unknown.
        start, stop: the half-open range of wrong bytes in that object; None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        start: int | None = None,
        stop: int | None = None,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.start = start
        self.stop = stop


class ChecksumError(CorruptCheckpointError):
    """A checksum differs from the checksum recorded when the bytes were written.

    Checksums of blocks are in ``checkpoint.json``. Some formats also record checksums of chunks, chunk indexes or
    database nodes in their own files.
    """


class UnsupportedVersionError(CheckpointError, ValueError):
    """The format of the checkpoint is newer than the formats that this version of ckptcore reads."""


class CompositeCheckpointError(CheckpointError, ValueError):
    """A checkpoint has several checkpointables, but the call requires one tree; or the other way round.

    Attributes:
        names: the names of the checkpointables; empty for one tree.
    """

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class TreeMismatchError(CheckpointError, ValueError):
    """The abstract tree and the stored tree differ.

    Attributes:
        differences: one line for each difference.
    """

    def __init__(self, message: str, differences: Sequence[str]) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class PartialLoadError(TreeMismatchError):
    """Some objects were not loaded, because this job has another number of processes. All others were loaded.

    Attributes:
        names: the objects that were not loaded.
    """

    def __init__(self, message: str, differences: Sequence[str], names: Sequence[str]) -> None:
        super().__init__(message, differences)
        self.names = tuple(names)


class TransformError(CheckpointError, ValueError):
    """A transform failed, or does not fit the stored tree. Nothing was changed."""


class UnknownPathError(CheckpointError, KeyError):
    """An open checkpoint has no such path."""

    def __str__(self) -> str:
        """Return the message without the quotes that `KeyError` adds."""
        return Exception.__str__(self)


class InsufficientMemoryError(CheckpointError, MemoryError):
    """There is not enough memory for the elements of an array.

    The array may be too large for this machine. In a checkpoint of other software, the stored shape may also be
    damaged: a small file can state a huge shape.
    """

    def __new__(cls, *arguments: object) -> Self:
        """Create the error. Python refuses MemoryError.__new__, because the first base is another exception."""
        return Exception.__new__(cls, *arguments)


class NotMappableError(CheckpointError, ValueError):
    """A stored array cannot be mapped: it is remote, encoded, or in several parts. Read it by indexing."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """No handler or layout can store this leaf. Nothing was written."""


class UnsupportedKeyError(CheckpointError, TypeError):
    """A container key is not an int, a bool, a str, or a tuple of such keys. Nothing was written."""


class NameCollisionError(CheckpointError, ValueError):
    """Two leaves would get the same name in the layout. Nothing was written."""


class InvalidLocationError(CheckpointError, ValueError):
    """A location, or a key in it, is invalid."""


class PluginError(CheckpointError, RuntimeError):
    """A plugin violated its protocol."""


class PluginConflictError(PluginError):
    """Two plugins claim the same type, layout name or URL scheme."""


class UnknownPluginError(PluginError, LookupError):
    """No installed plugin has this layout or URL scheme."""


class MissingDistributionError(CheckpointError, ImportError):
    """A distribution of this project, or another distribution that an option needs, is not installed.

    The message has the ``pip install`` command.
    """


class StorageError(CheckpointError, OSError):
    """The storage failed. The cause, if any, is the error that the storage raised."""


class StorageFullError(StorageError):
    """The storage is full or over quota."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """An object does not exist in the storage."""


class ConditionFailedError(StorageError):
    """A conditional put failed because its condition is not met."""


class BucketNotFoundError(StorageError, FileNotFoundError):
    """The bucket of a location does not exist."""


class StorageCredentialsError(StorageError):
    """The credentials for the storage are missing, unknown or expired."""


class StoragePermissionError(StorageError, PermissionError):
    """The credentials do not permit the request."""


class ObjectUnavailableError(StorageError):
    """An object exists but cannot be read now: it is in an archive, or its encryption key is disabled."""


class StorageThrottledError(StorageError):
    """The storage throttled the requests until the deadline."""


class StorageTimeoutError(StorageError, TimeoutError):
    """The storage did not answer in time. It may have carried out the request."""


class WrongRegionError(StorageError):
    """The bucket is in another region than the requested region."""


class ClockSkewError(StorageError):
    """The storage rejects requests because the clock of this machine differs too much from its own."""


class NotSharedError(CheckpointError, RuntimeError):
    """This process cannot see the files that the leader of its job created. Nothing was saved."""


class SaveLostError(CheckpointError, RuntimeError):
    """Another save took over or removed the claim of this save, or another process took over a lock of this process."""


class AtomicityError(CheckpointError, RuntimeError):
    """The storage has no atomic operation for the request. Nothing was changed."""


class BackgroundSaveError(CheckpointError, RuntimeError):
    """An earlier asynchronous save failed, and no caller retrieved its error. The cause is the error of that save."""


class UploadError(CheckpointError, RuntimeError):
    """Committed steps of the near tier are not in the far tier.

    Attributes:
        steps: the numbers of the missing steps.
    """

    def __init__(self, message: str, steps: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.steps = tuple(steps)


class OnlyStepError(CheckpointError, ValueError):
    """A deletion would remove the last valid step of a directory. Nothing was deleted."""


class CheckpointReferredError(CheckpointError, RuntimeError):
    """Updates, saved with `ckptcore.Update`, refer to the checkpoint to delete. Nothing was deleted."""


class StepPinnedError(CheckpointError, RuntimeError):
    """A reader has pinned the step to delete, or the step is still being saved. Nothing was deleted."""


class TargetUndefinedError(CheckpointError, RuntimeError):
    """``load_into`` failed after it changed its target, which now has both old and new values. The cause says why."""


class CommitUnknownError(CheckpointError, RuntimeError):
    """It is unknown whether the save committed. Inspect the location before saving again."""


class RankFailedError(CheckpointError, RuntimeError):
    """Another process of the job failed, so the save or load failed on all processes."""


class CoordinationTimeoutError(CheckpointError, TimeoutError):
    """Some ranks missed the deadline of an exchange.

    Attributes:
        missing: the ranks that missed the deadline.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
