"""Where output goes: text and JSON to stdout, errors and progress to stderr."""

from __future__ import annotations

import errno
import functools
import json
import math
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

__all__ = ["error_line", "json_number", "print_document", "print_line", "printable"]


class _Output(Console):
    """Lets it be seen that the reader of a pipe has gone; rich would end the program, with the exit code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "the reader of the output has gone")


def print_line(*parts: str | tuple[str, str]) -> None:
    """Print a line to stdout: plain parts, and parts with a style where that is a terminal.

    Nothing is read as markup, wrapped or cut: a line in a pipe is a line.
    """
    console = _output(sys.stdout)
    if console.is_terminal:
        console.print(Text.assemble(*parts), soft_wrap=True)
    else:
        sys.stdout.write("".join(part if isinstance(part, str) else part[0] for part in parts) + "\n")


@functools.lru_cache(maxsize=1)
def _output(stream: TextIO) -> _Output:
    return _Output(file=stream, highlight=False, markup=False, emoji=False)


def print_document(document: Mapping[str, Any]) -> None:
    """Print the one JSON document of a command to stdout."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def json_number(number: float) -> float | str:
    """A number for a JSON document: JSON has no ``nan``, ``inf`` and ``-inf``, which are text there."""
    return number if math.isfinite(number) else str(number)


def error_line(message: str) -> None:
    """Print one line to stderr, whatever line breaks the message has."""
    flat = " ".join(part.strip() for part in message.splitlines() if part.strip())
    sys.stderr.write(f"ckptcore: error: {printable(flat)}\n")


def printable(text: str) -> str:
    """Text that came out of a checkpoint, without what could steer a terminal: an escape becomes ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
