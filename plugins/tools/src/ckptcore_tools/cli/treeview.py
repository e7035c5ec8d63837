"""The saved tree as lines of text: a container or a leaf each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptcore.model import JSON, ArrayRecord, Attribute, Key, LeafRecord, Node, Skeleton, TreeMetadata, format_path
from ckptcore.model.sizes import count, size
from ckptcore_tools.cli.console import printable

__all__ = ["TreeRow", "tree_rows"]

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
