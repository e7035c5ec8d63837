"""A table on the terminal: columns with a heading, as wide as what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptcore_tools.cli.console import print_line

__all__ = ["Cell", "Column", "print_table"]

Cell: TypeAlias = str | tuple[str, str]
"""A text, or a text with a style."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        heading: what stands above it.
        side: where its texts begin or end.
    """

    heading: str
    side: Literal["left", "right"] = "left"


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """Print rows below the headings of their columns; a column in which nothing stands is left out."""
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
