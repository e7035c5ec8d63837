"""The exit codes of the command line, and which error leads to which."""

from __future__ import annotations

from enum import IntEnum

from ckptcore.errors import (
    BucketNotFoundError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryInUseError,
    ObjectNotFoundError,
    PluginError,
    StorageCredentialsError,
    StoragePermissionError,
    StorageThrottledError,
    StorageTimeoutError,
    UnsupportedKeyError,
    UnsupportedLeafError,
    UnsupportedVersionError,
)

__all__ = ["EXIT_CODE_HELP", "ExitCode", "exit_code_of"]


class ExitCode(IntEnum):
    """What the exit status of ``ckptcore`` means. The numbers are kept from release to release."""

    OK = 0
    FOUND = 1
    USAGE = 2
    NOT_FOUND = 3
    CORRUPT = 4
    UNSUPPORTED = 5
    FAILED = 6
    EXISTS = 7
    IN_USE = 8
    CREDENTIALS = 9
    PERMISSION = 10
    THROTTLED = 11
    TIMEOUT = 12
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


EXIT_CODE_HELP = """\
\b
Exit codes:
    0  done; nothing differs, nothing is wrong
    1  diff found differences; verify, steps --verify or copy found a damaged checkpoint; a plugin failed to load
    2  the command was not called correctly
    3  there is no checkpoint at the location, or only one whose save never committed; there is no such bucket
    4  the checkpoint is corrupt
    5  a plugin that is needed is not installed, or the checkpoint holds what cannot be handled
    6  the storage or something else failed
    7  something stands at the destination already
    8  another job owns the directory of steps
    9  there are no credentials for the storage, or it does not take them
   10  the storage does not allow what was asked
   11  the storage asked to come slower; try again later
   12  the storage gave no answer in time; try again
   70  a bug in ckptcore or in a plugin
  130  interrupted, or not confirmed
"""

_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (CheckpointNotFoundError, ExitCode.NOT_FOUND),
    (BucketNotFoundError, ExitCode.NOT_FOUND),
    (CheckpointExistsError, ExitCode.EXISTS),
    (DirectoryInUseError, ExitCode.IN_USE),
    (CorruptCheckpointError, ExitCode.CORRUPT),
    (StorageCredentialsError, ExitCode.CREDENTIALS),
    (StoragePermissionError, ExitCode.PERMISSION),
    (StorageThrottledError, ExitCode.THROTTLED),
    (StorageTimeoutError, ExitCode.TIMEOUT),
    (ObjectNotFoundError, ExitCode.CORRUPT),  # the root was there and names what is not
    (UnsupportedVersionError, ExitCode.UNSUPPORTED),
    (UnsupportedLeafError, ExitCode.UNSUPPORTED),
    (UnsupportedKeyError, ExitCode.UNSUPPORTED),
    (PluginError, ExitCode.UNSUPPORTED),
)


def exit_code_of(error: Exception) -> ExitCode:
    """The exit code for an error that ended a command."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)
