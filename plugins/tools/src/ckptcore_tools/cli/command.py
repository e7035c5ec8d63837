"""What all commands share: exit codes, errors, ``--json``, ``--debug`` and the options of storages."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Concatenate, Final, ParamSpec

import click

from ckptcore.context import Context, default_context
from ckptcore.errors import (
    BucketNotFoundError,
    CheckpointError,
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
from ckptcore.model.tree import JSON
from ckptcore_tools.cli.output import error_line, print_document

__all__ = ["EXIT_CODE_HELP", "ExitCode", "begin_context", "checkpoint_command", "command_context", "exit_code_of"]


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


_OPTION: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+-]*)\.([^=.]+)=(.*)", re.DOTALL)
_KEY: Final = "ckptcore.context"


def command_context() -> Context:
    """The Context of the command that runs on this thread; the default one where none says otherwise."""
    running = click.get_current_context(silent=True)
    found = None if running is None else running.meta.get(_KEY)
    return found if isinstance(found, Context) else default_context()


def begin_context(options: Sequence[str]) -> None:
    """Let the command that runs on this thread open storages with these options.

    Args:
        options: each as ``SCHEME.NAME=VALUE``. A value that is JSON is taken as such, any other as text.

    Raises:
        click.BadParameter: one is not written so.
    """
    if not options:
        return
    storage: dict[str, dict[str, JSON]] = {}
    for option in options:
        matched = _OPTION.fullmatch(option)
        if matched is None:
            raise click.BadParameter(
                f"{option!r}: give SCHEME.NAME=VALUE, such as s3.endpoint=http://127.0.0.1:9000", param_hint="--option"
            )
        storage.setdefault(matched[1].lower(), {})[matched[2]] = _value(matched[3])
    click.get_current_context().meta[_KEY] = Context(storage=storage)


def _value(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


P = ParamSpec("P")


def checkpoint_command(
    name: str, *, epilog: str | None = None
) -> Callable[[Callable[Concatenate[bool, P], ExitCode]], click.Command]:
    """Make a command of a function that takes ``as_json`` first and returns its exit code.

    A `CheckpointError` becomes one line on stderr (with ``--json`` also a document on stdout) and its exit code.
    """

    def decorate(function: Callable[Concatenate[bool, P], ExitCode]) -> click.Command:
        @click.command(name, epilog=epilog)
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
        @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
        @click.option(
            "--option",
            "options",
            multiple=True,
            metavar="SCHEME.NAME=VALUE",
            help="An option of a storage, such as s3.endpoint=URL; again for more. The environment is asked without it.",
        )
        @functools.wraps(function)
        def run(as_json: bool, debug: bool, options: tuple[str, ...], *args: P.args, **kwargs: P.kwargs) -> None:
            begin_context(options)
            code = _guarded(lambda: function(as_json, *args, **kwargs), as_json=as_json, debug=debug, options=options)
            click.get_current_context().exit(code)

        return run

    return decorate


def _guarded(body: Callable[[], ExitCode], *, as_json: bool, debug: bool, options: Sequence[str]) -> ExitCode:
    try:
        code = body()
        sys.stdout.flush()
        return code
    except (click.exceptions.Exit, click.ClickException):
        raise  # click's own: usage errors, and exits that were asked for
    except KeyboardInterrupt:
        error_line("interrupted")
        return ExitCode.INTERRUPTED
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            # The reader of our output has gone (`| head`): nothing is left to say, also not by Python's own last flush.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.BROKEN_PIPE
        code = exit_code_of(error)
        return _failed(error, code, _told(error), as_json=as_json, debug=debug)
    except ValueError as error:
        if not options:
            return _bug(error, as_json=as_json)
        # A storage that does not take an option says so when it is opened.
        return _failed(error, ExitCode.USAGE, f"--option: {error}", as_json=as_json, debug=debug)
    except Exception as error:  # noqa: BLE001  # told apart from "found differences", which is exit code 1, and never hidden
        return _bug(error, as_json=as_json)


def _bug(error: Exception, *, as_json: bool) -> ExitCode:
    message = f"{type(error).__name__}: {error}; this is a bug in ckptcore or in a plugin, please report it"
    return _failed(error, ExitCode.BUG, message, as_json=as_json, debug=True)


def _told(error: Exception) -> str:
    """What to say of an error. Where it names an argument of Python, the option that does the same stands beside it."""
    text = str(error) or type(error).__name__
    if isinstance(error, DirectoryInUseError):
        text = text.replace("pass if_in_use='take over'", "pass --take-over (in Python if_in_use='take over')")
    return text


def _failed(error: Exception, code: ExitCode, message: str, *, as_json: bool, debug: bool) -> ExitCode:
    if debug:
        traceback.print_exception(error)
    if as_json:
        print_document("error", error=type(error).__name__, message=message, exit_code=int(code))
    error_line(message)
    return code
