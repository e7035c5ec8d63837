"""``ckptcore inspect``: what is in a checkpoint, without reading an array."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ckptcore.cli.amounts import count, size
from ckptcore.cli.command import checkpoint_command
from ckptcore.cli.console import print_document, print_line, printable
from ckptcore.cli.documents import ContainerDocument, InspectDocument, LeafDocument
from ckptcore.cli.exits import ExitCode
from ckptcore.cli.keys import key_documents
from ckptcore.cli.treeview import tree_rows
from ckptcore.model import ArrayRecord, Node, Skeleton, TreeMetadata, TreePath, format_path

if TYPE_CHECKING:
    from ckptcore import CheckpointMetadata

__all__ = ["command"]

_WIDEST_NAME = 72


@checkpoint_command("inspect")
@click.argument("location")
@click.option("--depth", type=click.IntRange(min=0), help="Show so many levels of containers; all by default.")
@click.option("--objects", "show_objects", is_flag=True, help="List the objects (files) too.")
def command(as_json: bool, location: str, depth: int | None, show_objects: bool) -> ExitCode:
    """Show the tree of a checkpoint: shapes, dtypes, shardings, sizes; and who wrote it.

    No array is read. --depth and --objects are for the text: JSON always has everything.
    """
    import ckptcore

    found = ckptcore.metadata(location)
    if as_json:
        print_document(_document(location, found))
        return ExitCode.OK
    _print_summary(location, found)
    print_line()
    _print_tree(found.tree, depth)
    if show_objects:
        print_line()
        for record in found.objects.values():
            print_line(f"{size(record.size):>9}  ", printable(record.key))
    return ExitCode.OK


def _document(location: str, found: CheckpointMetadata) -> InspectDocument:
    arrays = sum(isinstance(record, ArrayRecord) for record in found.tree.leaves)
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
        "objects": [
            {"key": record.key, "size": record.size, "checksummed": bool(record.checksums)}
            for record in found.objects.values()
        ],
        "totals": {
            "arrays": arrays,
            "values": len(found.tree.leaves) - arrays,
            "nbytes": found.tree.nbytes,
            "objects": len(found.objects),
            "object_bytes": sum(record.size for record in found.objects.values()),
        },
    }


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


def _print_summary(location: str, found: CheckpointMetadata) -> None:
    tree = found.tree
    arrays = sum(isinstance(record, ArrayRecord) for record in tree.leaves)
    held = f"{count(arrays, 'array')} of {size(tree.nbytes)}"
    if len(tree.leaves) > arrays:
        held += f", {count(len(tree.leaves) - arrays, 'value')}"
    if found.objects:
        total = sum(record.size for record in found.objects.values())
        held += f", in {count(len(found.objects), 'object')} of {size(total)}"
    print_line((printable(location), "bold"))
    for title, text in (
        ("layout", found.layout),
        ("written by", found.writer),
        ("created", found.created),
        ("save id", found.save_id),
        ("holds", held),
        ("custom", json.dumps(dict(found.custom), ensure_ascii=False) if found.custom else None),
    ):
        if text:
            print_line((f"  {title:<11}", "dim"), printable(text))


def _print_tree(tree: TreeMetadata, depth: int | None) -> None:
    rows = list(tree_rows(tree, depth))
    name_width = min(_WIDEST_NAME, max(len(row.guide) + len(row.name) for row in rows))
    what_width = max(len(row.what) for row in rows)
    for row in rows:
        name = row.name.ljust(name_width - len(row.guide))
        rest = f"  {row.size:>9}  {row.detail}".rstrip()
        what = row.what.ljust(what_width) if rest else row.what
        print_line((row.guide, "dim"), name, "  ", (what, "cyan"), (rest, "dim"))
