"""Exit codes, error reports and the options that all commands have: ``--json``, ``--debug`` and ``--option``."""

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
from ckptcore.redaction import redacted
from ckptcore_tools.cli.output import error_line, print_document

NAMED_HELP: Final = "The name of one step, such as epoch-0010, if the steps have unusual names."
TAKE_OVER_HELP: Final = "If the lock of another job seems abandoned, wait until it expires and take it over."


class ExitCode(IntEnum):
    """Exit status of ``ckptcore``. The numbers do not change between releases."""

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
    0  success: no differences, no damage
    1  diff found differences; verify, steps --verify or copy found damage; steps --verify or copy could not read
       a step; a plugin failed to load
    2  wrong usage of the command
    3  no committed checkpoint at the location, or no such bucket
    4  the checkpoint is corrupt
    5  a required plugin is not installed, or the checkpoint contains something unsupported
    6  the storage failed, or another error
    7  the destination already exists
    8  another job owns the directory of steps
    9  no credentials for the storage, or it rejected them
   10  the storage denied permission
   11  the storage throttled the requests; try again later
   12  the storage timed out; try again
   70  a bug in ckptcore or in a plugin
  130  interrupted, or not confirmed
  141  the reader of the output closed the pipe
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
    (ObjectNotFoundError, ExitCode.CORRUPT),  # the checkpoint refers to a missing object
    (UnsupportedVersionError, ExitCode.UNSUPPORTED),
    (UnsupportedLeafError, ExitCode.UNSUPPORTED),
    (UnsupportedKeyError, ExitCode.UNSUPPORTED),
    (PluginError, ExitCode.UNSUPPORTED),
)


def exit_code_of(error: Exception) -> ExitCode:
    """Return the exit code for an error that ended a command."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)


_STORAGE_OPTION: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+-]*)\.([a-zA-Z_][\w-]*)=(.*)", re.DOTALL)
_CONTEXT_KEY: Final = "ckptcore.context"

_SHELL_REMEDIES: Final = (
    (re.compile(r"if_in_use='take over'"), "--take-over"),
    (re.compile(r"pass overwrite='(keep|with)-other-files' to (keep them \([^)]*\)|delete them too), or "), ""),
    (
        re.compile(r"ckptcore\.delete\((['\"])(.*?)\1, other_files=True\)"),
        r"ckptcore.delete(\1\2\1, other_files=True) in Python",
    ),
    (re.compile(r"overwrite='non-atomic'"), "--overwrite-non-atomic"),
    (re.compile(r"overwrite=True"), "--overwrite"),
    (re.compile(r"(step_names=|(?<= or ))StepNames\.of\((['\"])(.*?)\2\)"), r"--named \3"),
    (re.compile(r" To begin a new run here nevertheless, [^.]*"), ""),
    (re.compile(r"or \(\) for the whole tree"), "or leave out --subtree for the whole tree"),
    (re.compile(r"without layout and subtree(?=; or, if it)"), "with `ckptcore copy`"),
    (
        re.compile(r"pass leave_out=\[\.\.\.\] with the names of the files, or leave_out=\['\*'\]"),
        "pass --leave-out with each file",
    ),
    (re.compile(r"\bset head_dim\b"), "set --head-dim"),
    (re.compile(r"[:;.,] *reload\(\)[^.;]*"), ""),
    (
        re.compile(r"load the newest step of one with CheckpointReader\((['\"])(.*?)\1\)\.load\(\)"),
        r"list the steps of one with `ckptcore steps \2`",
    ),
    (
        re.compile(r"the newest with CheckpointReader\((['\"])(.*?)\1\)\.load\(\)"),
        r"list them with `ckptcore steps \2`",
    ),
)
"""Python remedies in error messages of the library, and the shell options and commands that replace them."""


def command_context() -> Context:
    """Return the Context of the command that runs on this thread. Default: `default_context`."""
    click_context = click.get_current_context(silent=True)
    context = None if click_context is None else click_context.meta.get(_CONTEXT_KEY)
    return context if isinstance(context, Context) else default_context()


def begin_context(options: Sequence[str]) -> None:
    """Set the storage options of the command that runs on this thread.

    Args:
        options: each as ``SCHEME.NAME=VALUE``. The value is parsed as JSON if possible, otherwise it is text.

    Raises:
        click.BadParameter: if an option does not have this form.
    """
    if not options:
        return
    storage: dict[str, dict[str, JSON]] = {}
    for number, option in enumerate(options, 1):
        matched = _STORAGE_OPTION.fullmatch(option)
        if matched is None:
            raise click.BadParameter(
                # Do not repeat the text, because it may contain a secret.
                f"number {number}: expected SCHEME.NAME=VALUE, such as s3.endpoint=http://127.0.0.1:9000",
                param_hint="--option",
            )
        storage.setdefault(matched[1].lower(), {})[matched[2]] = _json_or_text(matched[3])
    click.get_current_context().meta[_CONTEXT_KEY] = Context(storage=storage)


def _json_or_text(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


class _Command(click.Command):
    """A command whose usage errors hide secrets of URLs. Its arguments are locations, or names in a checkpoint."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(redacted(error.format_message()), error.ctx) from None
        for name in [parameter.name for parameter in self.params if isinstance(parameter, click.Argument)]:
            if name is not None and isinstance(value := ctx.params[name], str):
                ctx.params[name] = os.path.expanduser(value)  # as a shell does, unless the argument was quoted
        return rest


P = ParamSpec("P")


def checkpoint_command(
    name: str, short_help: str, *, epilog: str | None = None
) -> Callable[[Callable[Concatenate[bool, P], ExitCode]], click.Command]:
    """Turn a function into a command. The function takes ``as_json`` first and returns the exit code.

    A `CheckpointError` becomes one line on stderr and the exit code of its type; with ``--json`` it is also a document
    on stdout.
    """

    def decorate(function: Callable[Concatenate[bool, P], ExitCode]) -> click.Command:
        @click.command(name, cls=_Command, short_help=short_help, epilog=epilog)
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
        @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
        @click.option(
            "--option",
            "options",
            multiple=True,
            metavar="SCHEME.NAME=VALUE",
            help="A storage option, such as s3.endpoint=URL. Repeatable. Default: environment variables.",
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
        raise  # click handles its own usage errors and exits
    except KeyboardInterrupt:
        error_line("interrupted")
        return ExitCode.INTERRUPTED
    except (CheckpointError, OSError) as error:
        if not isinstance(error, CheckpointError):
            discard_unwritable_output()
            if error.errno == errno.EPIPE:  # the reader of the pipe has exited, as in `| head`
                return ExitCode.BROKEN_PIPE
        code = exit_code_of(error)
        text = str(error) if isinstance(error, CheckpointError) else system_text(error)
        message = shell_text(text or type(error).__name__)
        return _report_failure(error, code, message, as_json=as_json, debug=debug)
    except ValueError as error:
        if not options:
            return _report_bug(error, as_json=as_json)
        # Storages raise ValueError for unknown options when they are opened.
        return _report_failure(error, ExitCode.USAGE, f"--option: {error}", as_json=as_json, debug=debug)
    except Exception as error:  # noqa: BLE001  # otherwise Python would exit with 1, the code for differences
        return _report_bug(error, as_json=as_json)


_OF_OUTPUT: Final = frozenset({errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC})
"""Error numbers of failed writes."""


def system_text(error: OSError) -> str:
    """Return the text of a system error. If a write failed, it was to stdout, because storages raise StorageError."""
    is_output = not error.filename and error.errno in _OF_OUTPUT
    return f"cannot write the output to stdout: {error.strerror or error}" if is_output else str(error)


def discard_unwritable_output() -> None:
    """Redirect stdout to /dev/null if it cannot be written to, because Python flushes it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_bug(error: Exception, *, as_json: bool) -> ExitCode:
    message = f"{type(error).__name__}: {error}. This is a bug in ckptcore or in a plugin, please report it"
    return _report_failure(error, ExitCode.BUG, message, as_json=as_json, debug=True)


def shell_text(text: str) -> str:
    """Return the message of an error, with shell options and commands in place of Python remedies."""
    for python, shell in _SHELL_REMEDIES:
        text = python.sub(shell, text)
    return text


def _report_failure(error: Exception, code: ExitCode, message: str, *, as_json: bool, debug: bool) -> ExitCode:
    if debug:
        sys.stderr.write(redacted("".join(traceback.format_exception(error))))
    error_line(message)  # first, because stdout may be full
    if as_json:
        print_document("error", error=type(error).__name__, message=message, exit_code=int(code))
    return code
