"""Output of commands: text and JSON on stdout, errors and progress on stderr."""

from __future__ import annotations

import codecs
import dataclasses
import errno
import functools
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, TextIO, TypeAlias

from rich.console import Console
from rich.segment import Segment, Segments

from ckptcore.model import Attribute
from ckptcore.progress import ProgressCallback, show_bar
from ckptcore.redaction import redacted

_LINES_AT_ONCE: Final = 1000


_SUBSTITUTES: Final = {"├": "|", "└": "`", "│": "|", "─": "-", "…": "...", "–": "-", "×": "x"}
"""Replacements for characters of our output that a terminal or file cannot encode."""


def prepare_streams() -> None:
    """Prepare stdout and stderr for any text and any destination, at the start of the program.

    Characters that the encoding of a stream lacks, as with ASCII or Latin-1, are replaced or escaped. A stream that
    the parent process closed is replaced by one that discards everything.
    """
    codecs.register_error("ckptcore.output", _substitute)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open until the program ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ckptcore.output")


def _substitute(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that cannot be encoded. An error handler of `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = "".join([_SUBSTITUTES.get(character, character) for character in error.object[error.start : error.end]])
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


class _Output(Console):
    """A console that raises an error if the reader of the pipe has exited. Rich itself would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "the reader of the output closed the pipe")


def print_line(*parts: str | tuple[str, str]) -> None:
    """Print a line to stdout, from parts of text or of ``(text, style)``. Styles are used on terminals only.

    The text is not interpreted as markup, and is not wrapped or truncated.
    """
    print_lines([parts])


def print_lines(lines: Iterable[Sequence[Cell]]) -> None:
    """Print lines to stdout, faster than `print_line`. On a terminal, 100,000 lines take about a second."""
    console = _output(sys.stdout)
    if not console.is_terminal:
        sys.stdout.writelines(["".join(map(_text, line)) + "\n" for line in lines])
        return
    remaining = iter(lines)
    while some := list(itertools.islice(remaining, _LINES_AT_ONCE)):
        segments = [Segment(_text(part), console.get_style(_style(part))) for line in some for part in (*line, "\n")]
        console.print(Segments(segments), soft_wrap=True, end="")


def terminal_width() -> int | None:
    """Return the width of the terminal in cells. None if stdout is not a terminal."""
    console = _output(sys.stdout)
    return console.width if console.is_terminal else None


@functools.lru_cache(maxsize=1)
def _output(stream: TextIO) -> _Output:
    return _Output(file=stream, highlight=False, markup=False, emoji=False)


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
"""The value of a field that is left out of a JSON document."""


def to_json(value: object, **names: str) -> Any:
    """Convert a dataclass, a named tuple, or any member of a document to JSON.

    Members that are `UNSET` are left out. Numbers that JSON cannot represent become text: "nan", "inf", "-inf".

    Args:
        value: the value to convert.
        names: names to use in the document, by field name. Other fields keep their names.
    """
    if isinstance(value, Attribute):
        return {"attr": value.name}  # distinguishes an attribute from a text key of a mapping
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return to_json({names.get(field.name, field.name): getattr(value, field.name) for field in fields})
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_json({names.get(name, name): member for name, member in value._asdict().items()})
    if isinstance(value, Mapping):
        return {name: to_json(member) for name, member in value.items() if member is not UNSET}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(member) for member in value]
    return json_number(value) if isinstance(value, float) else value


def print_document(kind: str, **members: object) -> None:
    """Print the JSON document of a command to stdout.

    Args:
        kind: the type of the document. The member ``schema`` is this type with a version. Later releases may add
            members to a version, but not remove or change them.
        members: the members of the document; sizes in bytes, times in ISO 8601 (UTC). Dataclasses are converted, and
            secrets of URLs are hidden.
    """
    shown = {name: redacted(member) if isinstance(member, str) else member for name, member in members.items()}
    document = {"schema": f"ckptcore.{kind}/1", **to_json(shown)}
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def json_number(number: float) -> float | str:
    """Return a number for a JSON document. ``nan``, ``inf`` and ``-inf`` become text, because JSON lacks them."""
    return number if math.isfinite(number) else str(number)


def error_line(message: str) -> None:
    """Print an error to stderr as one line. Line breaks become spaces."""
    flat = " ".join(part.strip() for part in message.splitlines() if part.strip())
    sys.stderr.write(f"ckptcore: error: {printable(flat)}\n")


def printable(text: str) -> str:
    """Escape control characters, because text from a checkpoint could control the terminal.

    Secrets of URLs are hidden.
    """
    text = redacted(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


Cell: TypeAlias = str | tuple[str, str]
"""A text, or a text and its style."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        heading: the heading.
        side: the alignment of the cells.
    """

    heading: str
    side: Literal["left", "right"] = "left"


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table with headings. Empty columns are left out."""
    used = [number for number in range(len(columns)) if any(_text(row[number]) for row in rows)]
    widths = {number: max(len(columns[number].heading), *(len(_text(row[number])) for row in rows)) for number in used}
    headings: list[Cell] = [(column.heading, "dim") for column in columns]
    for row in (headings, *rows):
        parts: list[Cell] = []
        for number in used:
            text, style = _text(row[number]), _style(row[number])
            space = " " * (widths[number] - len(text))
            left = columns[number].side == "left"
            parts += [(text, style) if style else text, space] if left else [space, (text, style) if style else text]
            parts.append("  ")
        while parts and not _text(parts[-1]).strip():
            parts.pop()
        print_line(*parts)


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _style(cell: Cell) -> str:
    return "" if isinstance(cell, str) else cell[1]


def byte_progress(title: str) -> AbstractContextManager[ProgressCallback]:
    """Show a progress bar in a context. Yield the function to call with the bytes done and the total bytes."""
    return show_bar(title, leave=False)
