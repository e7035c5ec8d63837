"""``ckptcore inspect``: what is in a checkpoint."""

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
from ckptcore.results import CheckpointMetadata
from ckptcore_tools.amounts import count, metrics_text, size
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.locations import describe
from ckptcore_tools.cli.output import UNSET, print_document, print_line, printable
from ckptcore_tools.timelines import format_timeline

__all__ = ["TreeRow", "command", "tree_rows"]

_WIDEST_NAME = 72
_EVENT = ("phase", "rank", "began", "seconds", "nbytes", "error")
"""Fields of an event that a document has."""


@checkpoint_command("inspect")
@click.argument("location")
@click.option("--depth", type=click.IntRange(min=0), help="Show so many levels of containers; all by default.")
@click.option("--objects", "show_objects", is_flag=True, help="List the objects (files) too.")
@click.option(
    "--timeline", "show_timeline", is_flag=True, help="Show what the save did, and how long, in place of the tree."
)
def command(as_json: bool, location: str, depth: int | None, show_objects: bool, show_timeline: bool) -> ExitCode:
    """Show the tree of a checkpoint: shapes, dtypes, shardings, sizes; and who wrote it.

    Of several checkpointables each one is shown, with its tree or its files. No array is read. --depth, --objects and
    --timeline are for the text: JSON always has everything.
    """
    found = describe(location, command_context())
    if as_json:
        _print_document(location, found)
        return ExitCode.OK
    _print_summary(location, found)
    print_line()
    if show_timeline:
        _print_timeline(found.timeline)
    elif not found.is_composite:
        _print_content(found, depth, show_objects)
    else:
        for number, (name, one) in enumerate(found.checkpointables.items()):
            if number:
                print_line()
            print_line((printable(name), "bold"), "  ", (_told_of(found, name), "dim"))
            _print_content(one, depth, show_objects)
        for name, reason in found.checkpointables.unreadable.items():
            print_line((printable(name), "bold"), "  ", ("cannot be read", "yellow"), f": {printable(reason)}")
    return ExitCode.OK


def _print_document(location: str, found: CheckpointMetadata) -> None:
    members: dict[str, object] = {
        "location": location,
        "writer": found.writer,
        "created": found.created,
        "save_id": found.save_id,
        "custom": found.custom,
        "metrics": found.metrics,
        "timeline": [{name: getattr(event, name) for name in _EVENT} for event in found.timeline],
    }
    if not found.is_composite:
        print_document("inspect", **members, **_part(found), bases=found.bases)
        return
    parts = [
        {
            "name": name,
            "kind": "files" if one.layout == FilesLayout.name else "tree",
            "processes": found.checkpointables.processes.get(name),
            **_part(one),
        }
        for name, one in found.checkpointables.items()
    ]
    print_document(
        "inspect_checkpointables",
        **members,
        checkpointables=parts,
        deleted=found.checkpointables.deleted,
        unreadable=found.checkpointables.unreadable or UNSET,
    )


def _part(found: CheckpointMetadata) -> dict[str, object]:
    """One tree, or the files of one object; files have no containers and no leaves."""
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
        layout, held = found.layout, _holds(found)
        bases = ", ".join(found.bases)
    else:
        held = f"{count(len(found.checkpointables), 'checkpointable')} of {size(found.nbytes)}"
        deleted = ", ".join(found.checkpointables.deleted)
    print_line((printable(location), "bold"))
    for title, text in (
        ("layout", layout),
        ("written by", found.writer),
        ("created", found.created),
        ("save id", found.save_id),
        ("holds", held),
        ("refers to", bases),
        ("deleted", deleted),
        ("metrics", metrics_text(found.metrics)),
        ("custom", json.dumps(dict(found.custom), ensure_ascii=False) if found.custom else None),
    ):
        if text:
            print_line((f"  {title:<11}", "dim"), printable(text))


def _holds(found: CheckpointMetadata) -> str:
    totals = _totals(found)
    if found.layout == FilesLayout.name:
        return f"{count(totals['objects'], 'file')} of {size(totals['object_bytes'])}"
    held = []
    if totals["arrays"] or not totals["values"]:
        held.append(f"{count(totals['arrays'], 'array')} of {size(totals['nbytes'])}")
    if totals["values"]:
        held.append(count(totals["values"], "value"))
    if totals["objects"]:
        held.append(f"in {count(totals['objects'], 'object')} of {size(totals['object_bytes'])}")
    return ", ".join(held)


def _told_of(found: CheckpointMetadata, name: str) -> str:
    """What is said of one of several checkpointables beside its name."""
    one = found.checkpointables[name]
    told = _holds(one) if one.layout == FilesLayout.name else f"{printable(one.layout)}, {_holds(one)}"
    processes = found.checkpointables.processes.get(name)
    if processes is None or processes == 1:
        return told
    return (
        f"{told}; of each of {count(processes, 'process', 'processes')}, the first is shown ({printable(name)}.rank_0)"
    )


def _print_timeline(timeline: Sequence[Event]) -> None:
    if not timeline:
        print_line(
            "no timeline: it is kept with what ckptcore saves as a whole, and not by older versions, by other "
            "software, or with one of several checkpointables"
        )
        return
    for line in format_timeline(timeline).splitlines():
        print_line(line)


def _print_content(found: CheckpointMetadata, depth: int | None, show_objects: bool) -> None:
    """The tree, or the files where there is none."""
    is_files = found.layout == FilesLayout.name
    if not is_files:
        _print_tree(found.tree, depth)
    if show_objects and not is_files:
        print_line()
    if show_objects or is_files:
        for record in found.objects.values():
            print_line(f"{size(record.size):>9}  ", printable(record.key))


def _print_tree(tree: TreeMetadata, depth: int | None) -> None:
    rows = list(tree_rows(tree, depth))
    name_width = min(_WIDEST_NAME, max(len(row.guide) + len(row.name) for row in rows))
    what_width = max(len(row.what) for row in rows)
    for row in rows:
        name = row.name.ljust(name_width - len(row.guide))
        rest = f"  {row.size:>9}  {row.detail}".rstrip()
        what = row.what.ljust(what_width) if rest else row.what
        print_line((row.guide, "dim"), name, "  ", (what, "cyan"), (rest, "dim"))


_VALUE_CHARACTERS = 60
_NOTE_CHARACTERS = 160
_LISTED = 6
"""So many elements of a list in a note are shown, of a longer one fewer: a mesh can have thousands of devices."""


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A line of a drawn tree.

    Attributes:
        guide: the lines that lead to it.
        name: its key in the container it is in.
        what: its type: a dtype and shape, a kind of value, a kind of container.
        size: bytes of an array; else empty.
        detail: how it was sharded, what it shares bytes with, a value.
    """

    guide: str
    name: str
    what: str
    size: str
    detail: str


def tree_rows(tree: TreeMetadata, depth: int | None) -> Iterator[TreeRow]:
    """The rows of a tree, down to so many levels of containers; None for all."""
    yield from _rows(_Numbered(tree), tree.skeleton, "", "", "<root>", depth)


class _Numbered:
    """Gives the leaves of a tree, one after the other, in the order in which the skeleton has them.

    Attributes:
        tree: the tree.
        next: the number of the next leaf.
        one_device: whether all arrays that were on one device were on the same: then that is not said of each.
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


def _rows(leaves: _Numbered, node: Skeleton, guide: str, below: str, name: str, depth: int | None) -> Iterator[TreeRow]:
    if not isinstance(node, Node):
        yield _leaf_row(leaves, *leaves.take(), guide, name)
        return
    kind = node.kind if node.type is None else printable(node.type)
    if depth == 0:
        first = leaves.next
        leaves.next = first + _leaf_count(node)
        nbytes = _nbytes(leaves.tree, range(first, leaves.next))
        yield TreeRow(guide, name, kind, size(nbytes), f"… {count(leaves.next - first, 'leaf', 'leaves')}")
        return
    yield TreeRow(guide, name, kind, "", "" if node.children else "empty")
    for number, (key, child) in enumerate(zip(node.keys, node.children, strict=True)):
        last = number == len(node.keys) - 1
        yield from _rows(
            leaves,
            child,
            below + ("└─ " if last else "├─ "),
            below + ("   " if last else "│  "),
            _key_text(key),
            None if depth is None else depth - 1,
        )


def _leaf_row(leaves: _Numbered, number: int, record: LeafRecord, guide: str, name: str) -> TreeRow:
    if not isinstance(record, ArrayRecord):
        value = json.dumps(record.value, ensure_ascii=False)
        if len(value) > _VALUE_CHARACTERS:
            value = value[: _VALUE_CHARACTERS - 1] + "…"
        return TreeRow(guide, name, printable(record.kind), "", printable(value))
    what = str(record.spec) if record.kind == "array" else f"{printable(record.kind)} {record.spec}"
    if (target := leaves.tree.aliases.get(number)) is not None:
        return TreeRow(guide, name, what, "", f"= {printable(format_path(leaves.tree.paths[target]))}")
    return TreeRow(guide, name, what, size(record.spec.nbytes), _how_it_lies(record, leaves.one_device))


def _how_it_lies(record: ArrayRecord, one_device: bool) -> str:
    parts = []
    if record.cuts is not None:
        parts.append("in " + "×".join(str(len(axis) + 1) for axis in record.cuts) + " parts")
    for key, note in record.notes.items():
        if one_device and _device(note) is not None:
            continue
        text = f"{key}: {_compact(note).removeprefix('(').removesuffix(')')}"
        parts.append(text if len(text) <= _NOTE_CHARACTERS else text[: _NOTE_CHARACTERS - 1] + "…")
    return printable(", ".join(parts))


def _device(note: JSON) -> str | None:
    """The one device that an array was on, if that is what the note says: ``{"type": ..., "device": name}``."""
    if not isinstance(note, Mapping) or note.keys() != {"type", "device"}:
        return None
    device = note["device"]
    return device if isinstance(device, str) else None


def _compact(note: JSON) -> str:
    """JSON as briefly as can be: ``(NamedSharding mesh=(data=4) spec=(data, -))``; a "type" goes without its name."""
    if note is None:
        return "-"
    if isinstance(note, str):
        return note
    if isinstance(note, Mapping):
        members = (_compact(member) if key == "type" else f"{key}={_compact(member)}" for key, member in note.items())
        return f"({' '.join(members)})"
    if isinstance(note, Sequence):
        if len(note) <= _LISTED:
            return f"({', '.join(map(_compact, note))})"
        return f"({', '.join(map(_compact, note[: _LISTED - 2]))}, … {len(note):,} in all)"
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
