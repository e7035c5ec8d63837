"""The union of sessions: the tree and the receipts of all of them, and what a further one may not write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptcore.errors import NameCollisionError, TreeMismatchError
from ckptcore.model.arrays import Box
from ckptcore.model.columns import ItemColumns
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import Receipt, WriteItem
from ckptcore.model.tree import format_path
from ckptcore.protocols import WritesSessions
from ckptcore.tree.merge import unite_trees

__all__ = ["SessionReceipts", "boxes_taken", "refuse_boxes", "unite_sessions"]

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class SessionReceipts:
    """What a session wrote.

    Attributes:
        first: the first of the ranks of its processes.
        tree: what is in it.
        receipts: of its processes, by rank; leaves have the numbers of `tree`.
    """

    first: int
    tree: TreeMetadata
    receipts: Sequence[Receipt]


def unite_sessions(
    sessions: Sequence[SessionReceipts], layout: WritesSessions
) -> tuple[TreeMetadata, Sequence[Receipt]]:
    """One tree with every leaf of all sessions, and the receipts of all their processes with the numbers of that.

    Args:
        sessions: at least one, in their order.
        layout: that all of them were written in.

    Raises:
        TreeMismatchError: if the trees cannot be united.
        NameCollisionError: if an array would have another name in the whole than was written.
        KeyError, IndexError, TypeError, ValueError: what the layout raises for a hostile state.
    """
    tree, numbers = _unite(sessions, layout)
    return tree, [
        replace(
            receipt,
            items=_renumbered(receipt.items, tree, leaves),
            state=layout.renumbered(receipt.state, leaves),
        )
        for session, leaves in zip(sessions, numbers, strict=True)
        for receipt in session.receipts
    ]


def boxes_taken(
    sessions: Sequence[SessionReceipts], tree: TreeMetadata, layout: WritesSessions
) -> Mapping[int, Sequence[Box]]:
    """By array of the tree of a further session, the boxes that sessions before it wrote; arrays that none has are left out.

    Args:
        sessions: those before it.
        tree: of the further one.
        layout: that all are written in.

    Raises:
        TreeMismatchError: if the trees cannot be united, or an array is there whole already.
        NameCollisionError: if an array would have another name in the whole.
    """
    if not sessions:
        return {}
    further = SessionReceipts(-1, tree, ())
    _, numbers = _unite([*sessions, further], layout)
    own = {whole: leaf for leaf, whole in enumerate(numbers[-1]) if leaf not in tree.aliases}
    taken: dict[int, list[Box]] = {}
    for session, leaves in zip(sessions, numbers, strict=False):
        for receipt in session.receipts:
            for item in receipt.items:
                leaf = own.get(leaves[item.leaf])
                if leaf is not None:
                    taken.setdefault(leaf, []).extend(item.boxes)
    complete = [leaf for leaf, boxes in taken.items() if sum([box.size for box in boxes]) == _size(tree, leaf)]
    if complete:
        raise _twice([f"{format_path(tree.paths[leaf])} ({tree.leaves[leaf].spec})" for leaf in complete])  # type: ignore[union-attr]  # arrays
    return taken


def refuse_boxes(tree: TreeMetadata, items: Sequence[WriteItem], taken: Mapping[int, Sequence[Box]]) -> None:
    """Refuse to write elements that an earlier session wrote.

    Args:
        tree: of this session.
        items: what this process is about to write.
        taken: by leaf, as `boxes_taken` gives it.

    Raises:
        TreeMismatchError
    """
    found = [
        f"{format_path(tree.paths[item.leaf])}, elements {list(common.start)} to {list(common.stop)}"
        for item in items
        for earlier in taken.get(item.leaf, ())
        for box in item.boxes
        if (common := box.intersect(earlier)) is not None
    ]
    if found:
        raise _twice(found)


def _twice(found: Sequence[str]) -> TreeMismatchError:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return TreeMismatchError(
        f"an earlier session of this partial save has {', '.join(found[:_SHOWN])}{more} already, and nothing is saved twice: give what "
        "is not there yet. Nothing was written",
        found,
    )


def _size(tree: TreeMetadata, leaf: int) -> int:
    record = tree.leaves[leaf]
    return record.spec.size if isinstance(record, ArrayRecord) else -1


def _unite(sessions: Sequence[SessionReceipts], layout: WritesSessions) -> tuple[TreeMetadata, Sequence[Sequence[int]]]:
    """The union, and by session for each leaf its number there; of tied ones that of the leaf under which they are stored."""
    trees = [session.tree for session in sessions]
    union = unite_trees(trees, [[number] for number in range(len(trees))], size=len(trees), savers="session")
    places = {path: number for number, path in enumerate(union.paths)}
    names = layout.names_written(union)
    numbers = []
    held_by: dict[int, tuple[int, ...]] = {}
    for session in sessions:
        tree = session.tree
        own = [places[path] for path in tree.paths]
        for leaf, ranks in tree.held_by.items():
            held_by[own[leaf]] = tuple([session.first + rank for rank in ranks])
        stored = [union.aliases.get(number, number) for number in own]
        apart = [leaf for leaf, target in tree.aliases.items() if stored[leaf] != stored[target]]
        if apart:
            told = [
                f"{format_path(tree.paths[leaf])} and {format_path(tree.paths[tree.aliases[leaf]])}" for leaf in apart
            ]
            raise TreeMismatchError(
                f"arrays share memory in one session and not in another: {'; '.join(told[:_SHOWN])}. Give them in one session. Nothing "
                "was written",
                told,
            )
        for leaf, name in layout.names_written(tree).items():
            if names[own[leaf]] != name:
                raise NameCollisionError(
                    f"{format_path(tree.paths[leaf])} is stored as {name!r} in its session, and would be {names[own[leaf]]!r} together "
                    "with what other sessions have: rename one of the keys, or save both in one session. Nothing was written"
                )
        numbers.append(stored)
    return replace(union, held_by=held_by), numbers


def _renumbered(items: Sequence[WriteItem], tree: TreeMetadata, leaves: Sequence[int]) -> Sequence[WriteItem]:
    columns = ItemColumns.of(tree.leaves, items)
    numbers = np.array([leaves[leaf] for leaf in columns.leaf.tolist()], np.int64)
    return ItemColumns(tree.leaves, numbers, columns.counts, columns.bounds)
