"""What every command shares: ``--json``, ``--debug``, ``--option``, and errors as one line and an exit code."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

import click

from ckptcore.errors import CheckpointError, DirectoryInUseError
from ckptcore_tools.cli.console import error_line, print_document
from ckptcore_tools.cli.exits import ExitCode, exit_code_of
from ckptcore_tools.cli.options import begin_context

__all__ = ["checkpoint_command"]

P = ParamSpec("P")


def checkpoint_command(
    name: str, *, epilog: str | None = None
) -> Callable[[Callable[Concatenate[bool, P], ExitCode]], click.Command]:
    """Make a command of a function that takes ``as_json`` first and returns its exit code.

    A `CheckpointError` becomes one line on stderr (with ``--json`` also an `ErrorDocument` on stdout) and its exit code.
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
        print_document(
            {
                "schema": "ckptcore.error/1",
                "error": type(error).__name__,
                "message": message,
                "exit_code": int(code),
            }
        )
    error_line(message)
    return code
