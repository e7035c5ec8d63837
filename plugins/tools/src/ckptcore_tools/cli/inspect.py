"""``ckptcore inspect``: what is in a checkpoint, without reading an array."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import click

import ckptcore
from ckptcore import CheckpointablesMetadata, CheckpointMetadata
from ckptcore.builtin.files_layout import FilesLayout
from ckptcore.events import Event
from ckptcore.model import ArrayRecord, Node, Skeleton, TreeMetadata, TreePath, format_path
from ckptcore.model.sizes import count, metrics_text, size
from ckptcore_tools.cli.command import checkpoint_command
from ckptcore_tools.cli.console import json_number, print_document, print_line, printable
from ckptcore_tools.cli.documents import (
    CheckpointablesDocument,
    ContainerDocument,
    EventDocument,
    InspectDocument,
    LeafDocument,
    ObjectDocument,
    TotalsDocument,
)
from ckptcore_tools.cli.exits import ExitCode
from ckptcore_tools.cli.keys import key_documents
from ckptcore_tools.cli.members import describe
from ckptcore_tools.cli.options import command_context
from ckptcore_tools.cli.treeview import tree_rows
from ckptcore_tools.timelines import format_timeline

__all__ = ["command"]

_WIDEST_NAME = 72


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
        print_document(_document(location, found))
        return ExitCode.OK
    _print_summary(location, found)
    print_line()
    if show_timeline:
        _print_timeline(found.timeline)
    elif isinstance(found, ckptcore.CheckpointMetadata):
        _print_content(found, depth, show_objects)
    else:
        for number, (name, one) in enumerate(found.checkpointables.items()):
            if number:
                print_line()
            print_line((printable(name), "bold"), "  ", (_told_of(found, name), "dim"))
            _print_content(one, depth, show_objects)
        for name, reason in found.unreadable.items():
            print_line((printable(name), "bold"), "  ", ("cannot be read", "yellow"), f": {printable(reason)}")
    return ExitCode.OK


def _document(
    location: str, found: CheckpointMetadata | CheckpointablesMetadata
) -> InspectDocument | CheckpointablesDocument:
    if not isinstance(found, ckptcore.CheckpointMetadata):
        document: CheckpointablesDocument = {
            "schema": "ckptcore.inspect_checkpointables/1",
            "location": location,
            "writer": found.writer,
            "created": found.created,
            "save_id": found.save_id,
            "custom": dict(found.custom),
            "metrics": _metrics(found.metrics),
            "checkpointables": [
                {
                    "name": name,
                    "kind": "files" if one.layout == FilesLayout.name else "tree",
                    "processes": found.processes.get(name),
                    "layout": one.layout,
                    "containers": list(_container_documents(one.tree.skeleton, ())),
                    "leaves": list(_leaf_documents(one.tree)),
                    "objects": _object_documents(one),
                    "totals": _totals(one),
                }
                for name, one in found.checkpointables.items()
            ],
            "deleted": list(found.deleted),
            "timeline": _event_documents(found.timeline),
        }
        if found.unreadable:
            document["unreadable"] = dict(found.unreadable)
        return document
    return {
        "schema": "ckptcore.inspect/1",
        "location": location,
        "layout": found.layout,
        "writer": found.writer,
        "created": found.created,
        "save_id": found.save_id,
        "custom": dict(found.custom),
        "containers": list(_container_documents(found.tree.skeleton, ())),
        "leaves": list(_leaf_documents(found.tree)),
        "objects": _object_documents(found),
        "totals": _totals(found),
        "metrics": _metrics(found.metrics),
        "timeline": _event_documents(found.timeline),
        "bases": list(found.bases),
    }


def _object_documents(found: CheckpointMetadata) -> list[ObjectDocument]:
    return [
        {"key": record.key, "size": record.size, "checksummed": bool(record.checksums)}
        for record in found.objects.values()
    ]


def _totals(found: CheckpointMetadata) -> TotalsDocument:
    arrays = sum(isinstance(record, ArrayRecord) for record in found.tree.leaves)
    return {
        "arrays": arrays,
        "values": len(found.tree.leaves) - arrays,
        "nbytes": found.tree.nbytes,
        "objects": len(found.objects),
        "object_bytes": sum(record.size for record in found.objects.values()),
    }


def _metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: json_number(value) for name, value in metrics.items()}


def _event_documents(timeline: Sequence[Event]) -> list[EventDocument]:
    return [
        {
            "phase": event.phase,
            "rank": event.rank,
            "began": event.began,
            "seconds": event.seconds,
            "nbytes": event.nbytes,
            "error": event.error,
        }
        for event in timeline
    ]


def _container_documents(node: Skeleton, path: TreePath) -> Iterator[ContainerDocument]:
    if not isinstance(node, Node):
        return
    yield {
        "path": format_path(path),
        "keys": key_documents(path),
        "kind": node.kind,
        "type": node.type,
        "children": len(node.children),
    }
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _container_documents(child, (*path, key))


def _leaf_documents(tree: TreeMetadata) -> Iterator[LeafDocument]:
    for number, (path, record) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
        target = tree.aliases.get(number)
        array = record if isinstance(record, ArrayRecord) else None
        document: LeafDocument = {
            "path": format_path(path),
            "keys": key_documents(path),
            "kind": record.kind,
            "dtype": array.spec.dtype if array else None,
            "shape": list(array.spec.shape) if array else None,
            "nbytes": array.spec.nbytes if array and target is None else 0,
            "shares": None if target is None else format_path(tree.paths[target]),
            "notes": dict(array.notes) if array else {},
        }
        if not isinstance(record, ArrayRecord):
            document["value"] = record.value
        yield document


def _print_summary(location: str, found: CheckpointMetadata | CheckpointablesMetadata) -> None:
    layout, deleted, bases = None, None, None
    if isinstance(found, ckptcore.CheckpointMetadata):
        layout, held = found.layout, _holds(found)
        bases = ", ".join(found.bases)
    else:
        held = f"{count(len(found.checkpointables), 'checkpointable')} of {size(found.nbytes)}"
        deleted = ", ".join(found.deleted)
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


def _told_of(found: CheckpointablesMetadata, name: str) -> str:
    """What is said of one of several checkpointables beside its name."""
    one = found.checkpointables[name]
    told = _holds(one) if one.layout == FilesLayout.name else f"{printable(one.layout)}, {_holds(one)}"
    processes = found.processes.get(name)
    if processes is None or processes == 1:
        return told
    return (
        f"{told}; of each of {count(processes, 'process', 'processes')}, the first is shown ({printable(name)}.rank_0)"
    )


def _print_timeline(timeline: Sequence[Event]) -> None:
    if not timeline:
        print_line(
            "no timeline: it is kept with what ckptcore saves as a whole, and not by older versions, by other software, or "
            "with one of several checkpointables"
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
