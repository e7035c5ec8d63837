"""Drawings of the outline of a tree: a line for each row, fitted to the width of a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size

from ckptcore.model import JSON, ArrayRecord, LeafRecord, TreeMetadata, column_summary, format_path, unreadable_error
from ckptcore_tools.cli.output import Cell, printable
from ckptcore_tools.formatting import format_count, format_size
from ckptcore_tools.outline import Outline
from ckptcore_tools.statistics import ArrayStatistics

StatisticsOf = Callable[[int], ArrayStatistics | None]
"""Returns the statistics of a leaf; None if it has none."""

_MAX_NAME_WIDTH: Final = 72
_MIN_NAME_WIDTH: Final = 40
"""Minimum width of names on a terminal that is wide enough. If a line does not fit, its details are shortened first."""

_DETAIL_WIDTH: Final = 28
"""Minimum width of details next to longer names: enough for the numbers of arrays and parameters."""

_MIN_TYPE_WIDTH: Final = 20
_SIZE_WIDTH: Final = 9
_NUMBERS: Final = ("min", "max", "mean", "std", "norm")
_NUMBER_WIDTH: Final = 10
_NUMBERS_WIDTH: Final = len(_NUMBERS) * _NUMBER_WIDTH
_MAX_VALUE_CHARACTERS: Final = 60
_MAX_NOTE_CHARACTERS: Final = 160
_MAX_NOTE_ELEMENTS: Final = 6
"""Number of list elements shown per note. Longer lists are shortened: a mesh can have thousands of devices."""


class TreeLine(NamedTuple):
    """A line of a drawn tree.

    Attributes:
        guide: the lines of the drawing, before the name.
        name: the key in the row above, or the part of it that this row adds.
        type: dtype and shape of an array, or kind of a value or container.
        size: size of an array, or of all arrays in a container. Empty for values, containers without arrays, and arrays
            that share the bytes of another one.
        detail: for a container, the number of arrays and parameters, or ``empty``. For an array, the counts of special
            elements, and the sharding or the path of an array with the same bytes. For a value, the value.
        numbers: minimum, maximum, mean, deviation and norm of the elements; empty if unknown.
    """

    guide: str
    name: str
    type: str
    size: str
    detail: str
    numbers: Sequence[float | None] = ()


def tree_lines(
    tree: TreeMetadata, outline: Outline, depth: int | None = None, statistics_of: StatisticsOf = lambda leaf: None
) -> Iterator[TreeLine]:
    """Yield a line for each row of the outline of a tree.

    Args:
        tree: the tree.
        outline: the outline of the tree, or of some of its leaves.
        depth: maximum number of rows that contain a row; deeper rows are left out. None: all rows.
        statistics_of: statistics of the elements.
    """
    leaf_lines = _LeafLines(tree, statistics_of)
    guides = _Guides(outline.stops)
    for row in outline.rows(depth):
        guide, name, leaf = guides.of(row), printable(outline.names[row]), outline.leaves[row]
        if leaf >= 0:
            yield leaf_lines.line(leaf, guide, name)
        else:
            kind = printable(outline.kinds.get(row, ""))
            size = format_size(outline.nbytes[row]) if outline.arrays[row] else ""
            yield TreeLine(guide, name, kind, size, _totals_text(outline, row, depth))


def _totals_text(outline: Outline, row: int, depth: int | None) -> str:
    if outline.stops[row] == row + 1:
        return "empty"
    text = ""
    if outline.arrays[row]:
        arrays = format_count(outline.arrays[row], "array")
        text = f"{arrays}, {format_count(outline.parameters[row], 'parameter')}"
    return f"{text} …".lstrip() if outline.depths[row] == depth else text


class _Guides:
    """The drawn lines before the names. Call `of` for the rows in order."""

    def __init__(self, stops: Sequence[int]) -> None:
        self._stops = stops
        self._open: list[tuple[int, str]] = []  # rows that contain the current row: stop, and guide of children

    def of(self, row: int) -> str:
        """Return the guide of a row."""
        stop = self._stops[row]
        while self._open and self._open[-1][0] <= row:
            self._open.pop()
        if not self._open:
            self._open.append((stop, ""))
            return ""
        above_stop, above = self._open[-1]
        is_last = stop == above_stop
        if stop > row + 1:
            self._open.append((stop, above + ("   " if is_last else "│  ")))
        return above + ("└─ " if is_last else "├─ ")


class _LeafLines:
    """Lines of leaves.

    Attributes:
        one_device: True if all arrays were on the same device. If so, the lines do not name the device.
    """

    def __init__(self, tree: TreeMetadata, statistics_of: StatisticsOf) -> None:
        devices = {
            _device(note) for record in tree.leaves if isinstance(record, ArrayRecord) for note in record.notes.values()
        }
        self._tree = tree
        self.one_device = len(devices - {None}) < 2
        self._statistics_of = statistics_of

    def line(self, leaf: int, guide: str, name: str) -> TreeLine:
        """Return the line of a leaf."""
        record = self._tree.leaves[leaf]
        if not isinstance(record, ArrayRecord):
            return TreeLine(guide, name, printable(record.kind), "", _value_text(record))
        type_text = str(record.spec) if record.kind == "array" else f"{printable(record.kind)} {record.spec}"
        target = self._tree.aliases.get(leaf)
        if target is None:
            size, detail = format_size(record.spec.nbytes), _sharding_text(record, self.one_device)
        else:
            size, detail = "", f"= {printable(format_path(self._tree.paths[target]))}"
        numbers_of_leaf = self._statistics_of(leaf)
        if numbers_of_leaf is None or not numbers_of_leaf.elements:
            return TreeLine(guide, name, type_text, size, detail)
        counts = (
            (numbers_of_leaf.nan, "NaN"),
            (numbers_of_leaf.infinite, "inf"),
            (numbers_of_leaf.zeros, "zero" if numbers_of_leaf.zeros == 1 else "zeros"),
        )
        details = [f"{number:,} {element}" for number, element in counts if number] + ([detail] if detail else [])
        numbers = (
            numbers_of_leaf.minimum,
            numbers_of_leaf.maximum,
            numbers_of_leaf.mean,
            numbers_of_leaf.deviation,
            numbers_of_leaf.norm,
        )
        return TreeLine(guide, name, type_text, size, ", ".join(details), numbers)


def _value_text(record: LeafRecord) -> str:
    assert not isinstance(record, ArrayRecord)
    if (error := unreadable_error(record)) is not None:
        return printable(str(error))
    value = column_summary(record) or json.dumps(record.value, ensure_ascii=False)
    if len(value) > _MAX_VALUE_CHARACTERS:
        value = value[: _MAX_VALUE_CHARACTERS - 1] + "…"
    return printable(value)


def format_lines(lines: Iterable[TreeLine], width: int | None) -> Iterator[Sequence[Cell]]:
    """Yield the lines of a tree as aligned text.

    Args:
        lines: the lines.
        width: width of the terminal in cells. Long names and types are shortened in the middle, and details at the end.
            Statistics that do not fit are on a line below their array. None: lines are as long as necessary.
    """
    lines = list(lines)
    has_numbers = any(line.numbers for line in lines)
    type_width = max(_width_of(line.type) for line in lines)
    name_width = min(_MAX_NAME_WIDTH, max(len(line.guide) + _width_of(line.name) for line in lines))
    is_wide = True
    if width is not None:
        type_width = min(type_width, max(_MIN_TYPE_WIDTH, width // 4))
        rest = 2 + type_width + 2 + _SIZE_WIDTH
        is_wide = name_width + rest + _NUMBERS_WIDTH <= width
        detail_width = 2 + min(_DETAIL_WIDTH, max(_width_of(line.detail) for line in lines))
        name_width = min(name_width, max(width - rest - detail_width, min(_MIN_NAME_WIDTH, width - rest)))
    if has_numbers and is_wide:
        heading = "".join(f"{name:>{_NUMBER_WIDTH}}" for name in _NUMBERS)
        yield [(f"{'':{name_width + 2 + type_width + 2}}{'size':>{_SIZE_WIDTH}}{heading}", "dim")]
    for line in lines:
        name, type_text, guide_width = line.name, line.type, len(line.guide)
        if width is not None:
            name = _shortened(name, max(1, name_width - guide_width))
            type_text = _shortened(type_text, type_width)
        amounts = f"  {line.size:>{_SIZE_WIDTH}}"
        if has_numbers and is_wide:
            numbers = [f"{'' if number is None else f'{number:.3g}':>{_NUMBER_WIDTH}}" for number in line.numbers]
            amounts += "".join(numbers) or " " * _NUMBERS_WIDTH
        detail = f"  {line.detail}" if line.detail else ""
        amounts = amounts if detail else amounts.rstrip()
        name += " " * (name_width - guide_width - _width_of(name))
        type_text += " " * (type_width - _width_of(type_text)) if amounts else ""
        yield _cropped([(line.guide, "dim"), name, "  ", (type_text, "cyan"), (amounts, "dim"), (detail, "dim")], width)
        if line.numbers and not is_wide:
            below = line.guide.replace("├─ ", "│  ").replace("└─ ", "   ")
            named = zip(_NUMBERS, line.numbers, strict=True)
            numbers = [f"{name} {number:.3g}" for name, number in named if number is not None]
            yield _cropped([(below, "dim"), f"  {'  '.join(numbers)}"], width)


def _width_of(text: str) -> int:
    """Return the number of cells of a terminal that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def _shortened(text: str, width: int) -> str:
    """Replace the middle of a text by ``…`` if it is wider than `width` cells."""
    if _width_of(text) <= width:
        return text
    last = (width - 1) // 2
    end = set_cell_size(text[::-1], last)[::-1] if last else ""
    return set_cell_size(text, width - 1 - last) + "…" + end


def _cropped(parts: Sequence[Cell], width: int | None) -> Sequence[Cell]:
    """Cut a line at the end, so that it is not wider than a terminal."""
    if width is None:
        return parts
    kept: list[Cell] = []
    left = width
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        needed = _width_of(text)
        if needed > left:
            text = set_cell_size(text, left - 1) + "…" if left else ""
        kept.append((text, style) if style else text)
        left = max(0, left - needed)
    return kept


def _sharding_text(record: ArrayRecord, one_device: bool) -> str:
    parts = []
    if record.cuts is not None:
        parts.append("in " + "×".join(str(len(axis) + 1) for axis in record.cuts) + " parts")
    for key, note in record.notes.items():
        if key == "framework" or (one_device and _device(note) is not None):
            continue
        text = f"{key}: {_compact(note).removeprefix('(').removesuffix(')')}"
        parts.append(text if len(text) <= _MAX_NOTE_CHARACTERS else text[: _MAX_NOTE_CHARACTERS - 1] + "…")
    return printable(", ".join(parts))


def _device(note: JSON) -> str | None:
    """Return the device of an array, if the note is ``{"type": ..., "device": name}``."""
    if not isinstance(note, Mapping) or note.keys() != {"type", "device"}:
        return None
    device = note["device"]
    return device if isinstance(device, str) else None


def _compact(note: JSON) -> str:
    """Return short text of JSON, without the name "type": ``(NamedSharding mesh=(data=4) spec=(data, -))``."""
    if note is None:
        return "-"
    if isinstance(note, str):
        return note
    if isinstance(note, Mapping):
        members = (_compact(member) if key == "type" else f"{key}={_compact(member)}" for key, member in note.items())
        return f"({' '.join(members)})"
    if isinstance(note, Sequence):
        if len(note) <= _MAX_NOTE_ELEMENTS:
            return f"({', '.join(map(_compact, note))})"
        return f"({', '.join(map(_compact, note[: _MAX_NOTE_ELEMENTS - 2]))}, … {len(note):,} in all)"
    return json.dumps(note)
