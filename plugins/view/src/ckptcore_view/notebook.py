"""HTML of single objects for notebooks. It has no scripts, because notebooks remove them. No array is read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from html import escape
from typing import Final

from ckptcore_tools.differences import Difference, Differences
from ckptcore_tools.formatting import format_count, format_metrics, format_size
from ckptcore_tools.outline import Outline, outline_of

from ckptcore.model import ArrayRecord, TreeMetadata, column_summary, format_path
from ckptcore.results import CheckpointMetadata, OpenCheckpoint, StoredArray, StoredTree

_MAX_ROWS: Final = 1_000
_OPEN_ROWS: Final = 30
"""Containers with more rows are closed at first."""

_MAX_CHARACTERS: Final = 200


def to_html(value: object) -> str:
    """Return HTML for an open checkpoint or a part of it, for metadata, or for differences; otherwise its `repr`."""
    match value:
        case OpenCheckpoint() if not value.is_closed:
            return _metadata(value.metadata)
        case StoredTree() if not isinstance(value, OpenCheckpoint):
            keys = [[str(key)] for key in itertools.islice(value, _MAX_ROWS)]
            return _heading(repr(value)) + _table(["key"], keys) + _more(len(value) - len(keys))
        case StoredArray():
            return _array(value)
        case CheckpointMetadata():
            return _metadata(value)
        case Differences():
            return _differences(value)
        case _:
            return _heading(repr(value))


def _metadata(metadata: CheckpointMetadata) -> str:
    facts = [
        ("written by", metadata.writer),
        ("created", metadata.created),
        ("size", format_size(metadata.nbytes)),
        ("metrics", format_metrics(metadata.metrics)),
    ]
    if not metadata.is_composite:
        return _heading("Checkpoint") + _facts([("layout", metadata.layout), *facts]) + _tree(metadata.tree)
    parts = [f"{_heading(name)}{_tree(part.tree)}" for name, part in metadata.checkpointables.items()]
    return _heading("Checkpoint of several checkpointables") + _facts(facts) + "".join(parts)


def _array(array: StoredArray) -> str:
    facts = [
        ("type", f"{array.dtype.name}[{', '.join(map(str, array.shape))}]"),
        ("elements", f"{array.size:,}"),
        ("size", format_size(array.nbytes)),
    ]
    return _heading(format_path(array.path)) + _facts(facts)


def _differences(differences: Differences) -> str:
    text = format_count(len(differences), "difference") if differences else "no difference"
    compared = f"{format_count(differences.leaves, 'leaf', 'leaves')}, {format_size(differences.nbytes)}"
    facts = [("A", differences.a), ("B", differences.b), ("compared", compared)]
    headings = ["path", "what differs", "A", "B", "elements", "largest error", "norm"]
    rows = [_difference_row(row) for row in differences[:_MAX_ROWS]]
    return (
        _heading(text) + _facts(facts) + (_table(headings, rows) if rows else "") + _more(len(differences) - len(rows))
    )


def _difference_row(row: Difference) -> Sequence[str]:
    path = f"{row.checkpointable}: {row.path}" if row.checkpointable else row.path
    sides = ["" if side is None else str(side)[:_MAX_CHARACTERS] for side in (row.a, row.b)]
    distance = row.distance
    if distance is None:
        return [path, row.kind.replace("_", " "), *sides, "", "", ""]
    differing = f"{distance.differing:,} of {row.elements:,}" if row.elements else ""
    numbers = ["" if number is None else f"{number:.6g}" for number in (distance.largest, distance.norm)]
    return [path, row.kind, *sides, differing, *numbers]


def _tree(tree: TreeMetadata) -> str:
    """Return nested lists. Containers with many rows are closed at first."""
    outline = outline_of(tree)
    shown = min(len(outline), _MAX_ROWS)
    return _rows(outline, tree, 0, shown) + _more(len(outline) - shown)


def _rows(outline: Outline, tree: TreeMetadata, first: int, stop: int) -> str:
    parts: list[str] = []
    row = first
    while row < stop:
        line, end = _line(outline, tree, row), min(outline.stops[row], stop)
        if end > row + 1:
            is_open = " open" if end - row <= _OPEN_ROWS or row == 0 else ""
            inner = _rows(outline, tree, row + 1, end)
            parts.append(
                f"<details{is_open}><summary>{line}</summary><div style='margin-left: 20px'>{inner}</div></details>"
            )
        else:
            parts.append(f"<div style='margin-left: 16px'>{line}</div>")
        row = end
    return "".join(parts)


def _line(outline: Outline, tree: TreeMetadata, row: int) -> str:
    leaf = outline.leaves[row]
    name = f"<code>{escape(outline.names[row])}</code>"
    if leaf < 0:
        totals = [format_count(outline.parameters[row], "parameter"), format_size(outline.nbytes[row])]
        return f"{name} {_muted(', '.join(totals) if outline.arrays[row] else outline.kinds.get(row, ''))}"
    record = tree.leaves[leaf]
    if not isinstance(record, ArrayRecord):
        value = column_summary(record) or json.dumps(record.value)
        return f"{name} {_muted(f'{record.kind} {value}'[:_MAX_CHARACTERS])}"
    if leaf in tree.aliases:
        return f"{name} {_muted(f'= {format_path(tree.paths[tree.aliases[leaf]])}')}"
    return f"{name} {_muted(f'{record.spec}, {format_size(record.spec.nbytes)}')}"


def _heading(text: str) -> str:
    return f"<div style='font-weight: 600'>{escape(text)}</div>"


def _muted(text: str) -> str:
    return f"<span style='opacity: 0.75'>{escape(text)}</span>"


def _facts(facts: Sequence[tuple[str, str | None]]) -> str:
    return f"<div>{' · '.join([f'{_muted(name)} {escape(text)}' for name, text in facts if text])}</div>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join([f"<th>{escape(heading)}</th>" for heading in headings])
    body = "".join([f"<tr>{''.join([f'<td>{escape(cell)}</td>' for cell in row])}</tr>" for row in rows])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _more(count: int) -> str:
    return f"<div>{_muted(f'and {count:,} more; `ckptcore view` shows all')}</div>" if count > 0 else ""
