"""Every error that ckptcore raises.

::

    CheckpointError
    ├── CheckpointNotFoundError        (FileNotFoundError)  nothing that can be loaded is at the location
    │   ├── UncommittedCheckpointError                      a save began there and never committed
    │   └── UnknownCheckpointableError                      the checkpoint was saved without this name
    ├── CheckpointExistsError          (FileExistsError)    a save would replace something and was not asked to
    ├── DirectoryInUseError            (BlockingIOError)    another job writes steps into the directory
    ├── CorruptCheckpointError         (ValueError)         bytes are not what was written; names the file and range
    │   └── ChecksumError                                   ... because a checksum does not match
    ├── UnsupportedVersionError        (ValueError)         written by a newer ckptcore than this one
    ├── CompositeCheckpointError       (ValueError)         it holds several checkpointables, and one tree was asked for
    ├── TreeMismatchError              (ValueError)         the abstract tree and the stored one differ; lists it all
    ├── TransformError                 (ValueError)         a transform of a load does not fit what is stored, or failed
    ├── UnknownPathError               (KeyError)           nothing is at this path in an open checkpoint
    ├── NotMappableError               (ValueError)         a stored array cannot be mapped into memory; says why
    ├── UnsupportedLeafError           (TypeError)          no handler or no layout can store this leaf
    ├── UnsupportedKeyError            (TypeError)          a container key that is neither int nor str
    ├── NameCollisionError             (ValueError)         two leaves would get one name in the layout
    ├── InvalidLocationError           (ValueError)         not a path or URL that can be used
    ├── PluginError                    (RuntimeError)       a plugin broke its contract
    │   ├── PluginConflictError                             two plugins claim one type, name or scheme
    │   └── UnknownPluginError         (LookupError)        no installed plugin has this layout or URL scheme
    ├── MissingDistributionError       (ImportError)        a distribution of this project is not installed; says how to
    ├── StorageError                   (OSError)            the storage failed
    │   ├── StorageFullError                                ... because it is full or over quota
    │   ├── ObjectNotFoundError        (FileNotFoundError)  ... because the object is not there
    │   ├── BucketNotFoundError        (FileNotFoundError)  ... because the bucket is not there
    │   ├── ConditionFailedError                            ... because a conditional put lost
    │   ├── StorageCredentialsError                         ... because the service knows no such credentials
    │   ├── StoragePermissionError     (PermissionError)    ... because the credentials do not allow it
    │   ├── StorageThrottledError                           ... because the service keeps asking to send less
    │   ├── StorageTimeoutError        (TimeoutError)       ... because no answer came in time
    │   ├── WrongRegionError                                ... because the bucket is in another region
    │   └── ClockSkewError                                  ... because the clock of this machine is wrong
    ├── NotSharedError                 (RuntimeError)       processes of a job do not see the same directory
    ├── SaveLostError                  (RuntimeError)       another save took over or removed this one's claim
    ├── AtomicityError                 (RuntimeError)       the storage cannot do atomically what was asked
    ├── BackgroundSaveError            (RuntimeError)       an earlier asynchronous save failed unnoticed
    ├── UploadError                    (RuntimeError)       committed steps of the near tier are not in the far one
    ├── OnlyStepError                  (ValueError)         a deletion would leave a directory without a valid step
    ├── CheckpointReferredError        (RuntimeError)       others have arrays in the checkpoint that is to be deleted
    ├── StepPinnedError                (RuntimeError)       a reader has pinned the step that is to be deleted
    ├── TargetUndefinedError           (RuntimeError)       ``load_into`` failed after it began to fill its target
    ├── CommitUnknownError             (RuntimeError)       whether the save committed cannot be known
    ├── RankFailedError                (RuntimeError)       another process of the job failed
    └── CoordinationTimeoutError       (TimeoutError)       ranks did not come before the deadline

Each says what was looked at, what was expected, what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    "InvalidLocationError",
    "MissingDistributionError",
    "NameCollisionError",
    "NotMappableError",
    "NotSharedError",
    "ObjectNotFoundError",
    "OnlyStepError",
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
]


class CheckpointError(Exception):
    """The root of every error that ckptcore raises on purpose.

    Secrets of URLs in its text, passwords and values of queries, are shown as ``***``.
    """

    def __str__(self) -> str:
        return redacted(super().__str__())

    def __repr__(self) -> str:
        return redacted(super().__repr__())

    def add_note(self, note: str, /) -> None:
        """Add a line that is printed below the error. Secrets of URLs are shown as ``***``."""
        super().add_note(redacted(note))


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing that can be loaded is at the location."""


class UncommittedCheckpointError(CheckpointNotFoundError):
    """A save began at the location and never committed; it is never loaded."""


class UnknownCheckpointableError(CheckpointNotFoundError):
    """A checkpoint of several checkpointables was saved without this name."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A save without ``overwrite`` would replace what is at the location."""


class DirectoryInUseError(CheckpointError, BlockingIOError):
    """Another job, or another part of this one, writes steps into the directory."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """Bytes of a checkpoint are not what was written.

    Attributes:
        key: the object (file) within the checkpoint, or None where it is not known.
        start, stop: the half-open range of bytes in that object that is wrong, or None.
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
    """A checksum is not the one that was recorded when the bytes were written.

    It is that of a block, which ``checkpoint.json`` has, or one that a format keeps in its own files: of a read chunk
    of an array, of an index of chunks, of a node of a database.
    """


class UnsupportedVersionError(CheckpointError, ValueError):
    """The checkpoint was written in a newer format than this ckptcore reads."""


class CompositeCheckpointError(CheckpointError, ValueError):
    """A checkpoint holds several checkpointables where one tree was asked for, or the other way round.

    Attributes:
        names: of the checkpointables; empty where it is one tree.
    """

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class TreeMismatchError(CheckpointError, ValueError):
    """The abstract tree and the stored one differ.

    Attributes:
        differences: one line for each difference, every one of them.
    """

    def __init__(self, message: str, differences: Sequence[str]) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class TransformError(CheckpointError, ValueError):
    """A transform does not fit what is stored, or failed on it. Nothing was changed."""


class UnknownPathError(CheckpointError, KeyError):
    """Nothing is at this path in an open checkpoint."""

    def __str__(self) -> str:
        """The message as it is; a `KeyError` would quote it."""
        return Exception.__str__(self)


class NotMappableError(CheckpointError, ValueError):
    """A stored array is not on a local disk as it is in memory, and cannot be mapped; read it by indexing."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """No handler describes this leaf, or the layout cannot store it. Nothing was written."""


class UnsupportedKeyError(CheckpointError, TypeError):
    """A container key is neither an int nor a str. Nothing was written."""


class NameCollisionError(CheckpointError, ValueError):
    """Two leaves would get the same name in the layout. Nothing was written."""


class InvalidLocationError(CheckpointError, ValueError):
    """A location or a key within it is not one that can be used."""


class PluginError(CheckpointError, RuntimeError):
    """A plugin broke its contract."""


class PluginConflictError(PluginError):
    """Two plugins claim the same type, layout name or URL scheme."""


class UnknownPluginError(PluginError, LookupError):
    """No installed plugin provides this layout or URL scheme."""


class MissingDistributionError(CheckpointError, ImportError):
    """A name of `ckptcore` is in a distribution that is not installed; the message has the ``pip install`` command."""


class StorageError(CheckpointError, OSError):
    """The storage failed; the cause is the error it gave."""


class StorageFullError(StorageError):
    """The storage is full, or the quota on it is used up."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """An object is not in the storage."""


class ConditionFailedError(StorageError):
    """A conditional put found the object in another state than its condition asks."""


class BucketNotFoundError(StorageError, FileNotFoundError):
    """The bucket that a location names is not there."""


class StorageCredentialsError(StorageError):
    """There are no credentials for the storage, or it does not know or no longer takes those that there are."""


class StoragePermissionError(StorageError, PermissionError):
    """The storage knows the credentials, and they do not allow what was asked."""


class StorageThrottledError(StorageError):
    """The storage asked to come slower, again and again until the deadline."""


class StorageTimeoutError(StorageError, TimeoutError):
    """The storage gave no answer in time; whether it did what was asked is not known."""


class WrongRegionError(StorageError):
    """The bucket is in another region than the one that was asked."""


class ClockSkewError(StorageError):
    """The storage refuses requests because their time, from the clock of this machine, is too far from its own."""


class NotSharedError(CheckpointError, RuntimeError):
    """This process does not see in a directory what the leader of its job made there. Nothing was saved."""


class SaveLostError(CheckpointError, RuntimeError):
    """Another save took over or removed this save's claim; this one did not commit."""


class AtomicityError(CheckpointError, RuntimeError):
    """The storage cannot do atomically what was asked. Nothing was changed."""


class BackgroundSaveError(CheckpointError, RuntimeError):
    """An earlier asynchronous save failed, and no caller retrieved its error, which is the cause."""


class UploadError(CheckpointError, RuntimeError):
    """Steps that are committed in the near tier of a run are not in the far one.

    Attributes:
        steps: which.
    """

    def __init__(self, message: str, steps: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.steps = tuple(steps)


class OnlyStepError(CheckpointError, ValueError):
    """A deletion would leave a directory of steps without a valid one. Nothing was deleted."""


class CheckpointReferredError(CheckpointError, RuntimeError):
    """Other checkpoints, saved with `ckptcore.Update`, refer to arrays in the one to delete. Nothing was deleted."""


class StepPinnedError(CheckpointError, RuntimeError):
    """A reader has pinned the step that is to be deleted. Nothing was deleted."""


class TargetUndefinedError(CheckpointError, RuntimeError):
    """``load_into`` failed after it began: the target holds a mix of old and new. The cause says why."""


class CommitUnknownError(CheckpointError, RuntimeError):
    """Whether the save committed cannot be known: look at the location before saving again."""


class RankFailedError(CheckpointError, RuntimeError):
    """Another process of the job failed, so this save or load failed everywhere."""


class CoordinationTimeoutError(CheckpointError, TimeoutError):
    """Some ranks did not come to an exchange before its deadline.

    Attributes:
        missing: the ranks that did not come.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
