"""``ckptcore inspect``: shows the content of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click

from ckptcore.builtin.files import FilesLayout
from ckptcore.events import Event
from ckptcore.model import (
    JSON,
    ArrayRecord,
    Attribute,
    Key,
    LeafRecord,
    Node,
    Skeleton,
    TreeMetadata,
    TreePath,
    format_path,
)
from ckptcore.results import CheckpointMetadata, Problem
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import UNSET, print_document, print_line, printable
from ckptcore_tools.cli.verify import problem_documents
from ckptcore_tools.formatting import format_count, format_metrics, format_problems, format_size
from ckptcore_tools.locations import describe_and_check
from ckptcore_tools.timelines import format_timeline

__all__ = ["TreeRow", "command", "tree_rows"]

_MAX_NAME_WIDTH = 72
_EVENT_FIELDS = ("phase", "rank", "began", "seconds", "nbytes", "error")
"""Fields of an event in the JSON document."""


@checkpoint_command("inspect", "Show the content of a checkpoint.")
@click.argument("location")
@click.option("--depth", type=click.IntRange(min=0), help="Levels of containers to show. Default: all.")
@click.option("--objects", "show_objects", is_flag=True, help="Also list the objects (files).")
@click.option(
    "--timeline", "show_timeline", is_flag=True, help="Show the phases of the save and their times, not the tree."
)
def command(as_json: bool, location: str, depth: int | None, show_objects: bool, show_timeline: bool) -> ExitCode:
    """Show the tree of a checkpoint (shapes, dtypes, shardings, sizes) and the software that wrote it.

    In a checkpoint of several checkpointables, each one is shown with its tree or its files. No array is read.
    --depth, --objects and --timeline apply to text only: JSON always contains everything.
    """
    found, files = describe_and_check(location, command_context())
    if as_json:
        _print_document(location, found, files.problems)
        return ExitCode.OK
    _print_summary(location, found)
    if files.problems:
        text = f"{format_problems(files.problems)}. Run `ckptcore verify {location}` to check every byte"
        print_line((f"  {'damaged':<11}", "bold red"), printable(text))
    print_line()
    if show_timeline:
        _print_timeline(found.timeline)
    elif not found.is_composite:
        _print_content(found, depth, show_objects)
    else:
        for number, (name, one) in enumerate(found.checkpointables.items()):
            if number:
                print_line()
            print_line((printable(name), "bold"), "  ", (_checkpointable_text(found, name), "dim"))
            _print_content(one, depth, show_objects)
        for name, reason in found.checkpointables.unreadable.items():
            print_line((printable(name), "bold"), "  ", ("cannot be read", "yellow"), f": {printable(reason)}")
    return ExitCode.OK


def _print_document(location: str, found: CheckpointMetadata, problems: Sequence[Problem]) -> None:
    members: dict[str, object] = {
        "location": location,
        "writer": found.writer,
        "created": found.created,
        "save_id": found.save_id,
        "custom": found.custom,
        "metrics": found.metrics,
        "timeline": [{name: getattr(event, name) for name in _EVENT_FIELDS} for event in found.timeline],
        "problems": problem_documents(problems),
    }
    if not found.is_composite:
        print_document("inspect", **members, **_content_document(found), bases=found.bases)
        return
    checkpointables = [
        {
            "name": name,
            "kind": "files" if one.layout == FilesLayout.name else "tree",
            "processes": found.checkpointables.processes.get(name),
            **_content_document(one),
        }
        for name, one in found.checkpointables.items()
    ]
    print_document(
        "inspect_checkpointables",
        **members,
        checkpointables=checkpointables,
        deleted=found.checkpointables.deleted,
        unreadable=found.checkpointables.unreadable or UNSET,
    )


def _content_document(found: CheckpointMetadata) -> dict[str, object]:
    """Return one tree, or the files of one object, as JSON. Files have no containers and no leaves."""
    return {
        "layout": found.layout,
        "containers": list(_container_documents(found.tree.skeleton, ())),
        "leaves": list(_leaf_documents(found.tree)),
        "objects": [
            {"key": record.key, "size": record.size, "checksummed": bool(record.checksums)}
            for record in found.objects.values()
        ],
        "totals": _totals(found),
    }


def _totals(found: CheckpointMetadata) -> dict[str, int]:
    arrays = sum(isinstance(record, ArrayRecord) for record in found.tree.leaves)
    return {
        "arrays": arrays,
        "values": len(found.tree.leaves) - arrays,
        "nbytes": found.tree.nbytes,
        "objects": len(found.objects),
        "object_bytes": sum(record.size for record in found.objects.values()),
    }


def _container_documents(node: Skeleton, path: TreePath) -> Iterator[dict[str, object]]:
    if not isinstance(node, Node):
        return
    yield {
        "path": format_path(path),
        "keys": path,
        "kind": node.kind,
        "type": node.type,
        "children": len(node.children),
    }
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _container_documents(child, (*path, key))


def _leaf_documents(tree: TreeMetadata) -> Iterator[dict[str, object]]:
    for number, (path, record) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
        target = tree.aliases.get(number)
        array = record if isinstance(record, ArrayRecord) else None
        document: dict[str, object] = {
            "path": format_path(path),
            "keys": path,
            "kind": record.kind,
            "dtype": array.spec.dtype if array else None,
            "shape": array.spec.shape if array else None,
            "nbytes": array.spec.nbytes if array and target is None else 0,
            "shares": None if target is None else format_path(tree.paths[target]),
            "notes": array.notes if array else {},
        }
        if not isinstance(record, ArrayRecord):
            document["value"] = record.value
        yield document


def _print_summary(location: str, found: CheckpointMetadata) -> None:
    layout, deleted, bases = None, None, None
    if not found.is_composite:
        layout, content = found.layout, _content_text(found)
        bases = ", ".join(found.bases)
    else:
        content = f"{format_count(len(found.checkpointables), 'checkpointable')} of {format_size(found.nbytes)}"
        deleted = ", ".join(found.checkpointables.deleted)
    print_line((printable(location), "bold"))
    for title, text in (
        ("layout", layout),
        ("written by", found.writer),
        ("created", found.created),
        ("save id", found.save_id),
        ("content", content),
        ("bases", bases),
        ("deleted", deleted),
        ("metrics", format_metrics(found.metrics)),
        ("custom", json.dumps(dict(found.custom), ensure_ascii=False) if found.custom else None),
    ):
        if text:
            print_line((f"  {title:<11}", "dim"), printable(text))


def _content_text(found: CheckpointMetadata) -> str:
    totals = _totals(found)
    if found.layout == FilesLayout.name:
        return f"{format_count(totals['objects'], 'file')} of {format_size(totals['object_bytes'])}"
    parts = []
    if totals["arrays"] or not totals["values"]:
        parts.append(f"{format_count(totals['arrays'], 'array')} of {format_size(totals['nbytes'])}")
    if totals["values"]:
        parts.append(format_count(totals["values"], "value"))
    if totals["objects"]:
        parts.append(f"in {format_count(totals['objects'], 'object')} of {format_size(totals['object_bytes'])}")
    return ", ".join(parts)


def _checkpointable_text(found: CheckpointMetadata, name: str) -> str:
    """Return the summary of one of several checkpointables."""
    one = found.checkpointables[name]
    text = _content_text(one) if one.layout == FilesLayout.name else f"{printable(one.layout)}, {_content_text(one)}"
    processes = found.checkpointables.processes.get(name)
    if processes is None or processes == 1:
        return text
    return f"{text}; saved by {processes:,} processes separately, showing {printable(name)}.rank_0"


def _print_timeline(timeline: Sequence[Event]) -> None:
    if not timeline:
        print_line(
            "no timeline: checkpoints of other software and of older versions have none, and for several "
            "checkpointables there is only one, of the whole checkpoint"
        )
        return
    for line in format_timeline(timeline).splitlines():
        print_line(line)


def _print_content(found: CheckpointMetadata, depth: int | None, show_objects: bool) -> None:
    """Print the tree, or the files of a checkpoint without a tree."""
    is_files = found.layout == FilesLayout.name
    if not is_files:
        _print_tree(found.tree, depth)
    if show_objects and not is_files:
        print_line()
    if show_objects or is_files:
        for record in found.objects.values():
            print_line(f"{format_size(record.size):>9}  ", printable(record.key))


def _print_tree(tree: TreeMetadata, depth: int | None) -> None:
    rows = list(tree_rows(tree, depth))
    name_width = min(_MAX_NAME_WIDTH, max(len(row.guide) + len(row.name) for row in rows))
    type_width = max(len(row.type) for row in rows)
    for row in rows:
        name = row.name.ljust(name_width - len(row.guide))
        rest = f"  {row.size:>9}  {row.detail}".rstrip()
        type_text = row.type.ljust(type_width) if rest else row.type
        print_line((row.guide, "dim"), name, "  ", (type_text, "cyan"), (rest, "dim"))


_MAX_VALUE_CHARACTERS = 60
_MAX_NOTE_CHARACTERS = 160
_MAX_NOTE_ELEMENTS = 6
"""Number of list elements shown per note. Longer lists are shortened: a mesh can have thousands of devices."""


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A line of a drawn tree.

    Attributes:
        guide: the lines of the drawing, before the name.
        name: the key in the parent container.
        type: dtype and shape of an array, kind of a value, or kind of a container.
        size: size of an array; empty for others.
        detail: sharding, path of an array with the same bytes, or the value.
    """

    guide: str
    name: str
    type: str
    size: str
    detail: str


def tree_rows(tree: TreeMetadata, depth: int | None) -> Iterator[TreeRow]:
    """Yield the rows of a tree, down to `depth` levels of containers. None: all levels."""
    yield from _rows(_LeafCursor(tree), tree.skeleton, "", "", "<root>", depth)


class _LeafCursor:
    """Returns the leaves of a tree in order.

    Attributes:
        tree: the tree.
        next: the number of the next leaf.
        one_device: True if all arrays were on the same device. The rows then do not name it.
    """

    def __init__(self, tree: TreeMetadata) -> None:
        self.tree = tree
        self.next = 0
        devices = {
            _device(note) for record in tree.leaves if isinstance(record, ArrayRecord) for note in record.notes.values()
        }
        self.one_device = len(devices - {None}) < 2

    def take(self) -> tuple[int, LeafRecord]:
        number = self.next
        self.next += 1
        return number, self.tree.leaves[number]


def _rows(
    leaves: _LeafCursor, node: Skeleton, guide: str, child_guide: str, name: str, depth: int | None
) -> Iterator[TreeRow]:
    if not isinstance(node, Node):
        yield _leaf_row(leaves, *leaves.take(), guide, name)
        return
    kind = node.kind if node.type is None else printable(node.type)
    if depth == 0:
        first = leaves.next
        leaves.next = first + _leaf_count(node)
        nbytes = _nbytes(leaves.tree, range(first, leaves.next))
        yield TreeRow(
            guide, name, kind, format_size(nbytes), f"… {format_count(leaves.next - first, 'leaf', 'leaves')}"
        )
        return
    yield TreeRow(guide, name, kind, "", "" if node.children else "empty")
    for number, (key, child) in enumerate(zip(node.keys, node.children, strict=True)):
        last = number == len(node.keys) - 1
        yield from _rows(
            leaves,
            child,
            child_guide + ("└─ " if last else "├─ "),
            child_guide + ("   " if last else "│  "),
            _key_text(key),
            None if depth is None else depth - 1,
        )


def _leaf_row(leaves: _LeafCursor, number: int, record: LeafRecord, guide: str, name: str) -> TreeRow:
    if not isinstance(record, ArrayRecord):
        value = json.dumps(record.value, ensure_ascii=False)
        if len(value) > _MAX_VALUE_CHARACTERS:
            value = value[: _MAX_VALUE_CHARACTERS - 1] + "…"
        return TreeRow(guide, name, printable(record.kind), "", printable(value))
    type_text = str(record.spec) if record.kind == "array" else f"{printable(record.kind)} {record.spec}"
    if (target := leaves.tree.aliases.get(number)) is not None:
        return TreeRow(guide, name, type_text, "", f"= {printable(format_path(leaves.tree.paths[target]))}")
    return TreeRow(guide, name, type_text, format_size(record.spec.nbytes), _sharding_text(record, leaves.one_device))


def _sharding_text(record: ArrayRecord, one_device: bool) -> str:
    parts = []
    if record.cuts is not None:
        parts.append("in " + "×".join(str(len(axis) + 1) for axis in record.cuts) + " parts")
    for key, note in record.notes.items():
        if one_device and _device(note) is not None:
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


def _key_text(key: Key) -> str:
    if isinstance(key, Attribute):
        return f".{printable(key.name)}"
    return f"[{key}]" if isinstance(key, int) else printable(key) if key else "''"


def _leaf_count(node: Skeleton) -> int:
    return sum(_leaf_count(child) for child in node.children) if isinstance(node, Node) else 1


def _nbytes(tree: TreeMetadata, leaves: range) -> int:
    records = ((number, tree.leaves[number]) for number in leaves if number not in tree.aliases)
    return sum(record.spec.nbytes for _, record in records if isinstance(record, ArrayRecord))
