"""Receipts of the sessions of a partial save, and the union of all sessions.

A table is an object of its own until the checkpoint is finalized: a line of JSON with the tree of the session, and
after it the receipts of its processes in the form in which they are sent in a job. Only ckptcore reads it. Its version
changes with each change of `ckptcore.job.receipts`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import xxhash

from ckptcore.commit.root import PartialSave, Session
from ckptcore.errors import (
    CorruptCheckpointError,
    InvalidLocationError,
    NameCollisionError,
    ObjectNotFoundError,
    TreeMismatchError,
    UnsupportedVersionError,
)
from ckptcore.job.receipts import decode_receipts, encode_receipts
from ckptcore.model.arrays import Box
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.objects import CHECKSUM_ALGORITHM, CHECKSUM_BYTES, check_key
from ckptcore.model.transfer import ItemColumns, Receipt, WriteItem
from ckptcore.model.tree import format_path
from ckptcore.protocols import Layout, StorageBackend
from ckptcore.tree.merge import unite_trees

__all__ = [
    "SessionReceipts",
    "boxes_taken",
    "decode_session",
    "describe_session",
    "encode_session",
    "read_sessions",
    "refuse_boxes",
    "session_key",
    "unite_sessions",
]

_VERSION: Final = 1


def session_key(save_id: str, first: int) -> str:
    """Return the key of the table of a session; `first` is the first rank of its processes."""
    return f"checkpoint.{save_id}.session-{first}"


def encode_session(tree: TreeMetadata, receipts: Sequence[Receipt]) -> bytes:
    """Encode the table of a session: its tree, and a receipt for each of its processes, by rank."""
    head = json.dumps({"version": _VERSION, "tree": tree.to_json()}, separators=(",", ":")).encode("ascii")
    return head + b"\n" + encode_receipts([tree] * len(receipts), receipts)


def describe_session(partial: PartialSave, data: bytes, receipts: Sequence[Receipt], created: str) -> Session:
    """Return the entry of a complete session in the session table of the partial save.

    Args:
        partial: the partial save, whose owner is the session.
        data: the table of the session.
        receipts: the receipts of its processes.
        created: the present time, ISO 8601 in UTC.
    """
    assert partial.owner is not None
    leaves = {leaf for receipt in receipts for leaf in ItemColumns.of((), receipt.items).leaf.tolist()}
    nbytes = sum([record.size for receipt in receipts for record in receipt.objects])
    return Session(
        partial.owner,
        len(receipts),
        created,
        len(leaves),
        nbytes,
        session_key(partial.save_id, partial.owner),
        len(data),
        _checksum(data),
    )


def read_sessions(store: StorageBackend, partial: PartialSave) -> Sequence[SessionReceipts]:
    """Read the tables of all complete sessions.

    Args:
        store: the store of the sessions.
        partial: the partial save.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError
    """
    return [decode_session(_read(store, session), session) for session in partial.sessions]


def _read(store: StorageBackend, session: Session) -> bytes:
    try:
        data = store.get(session.key, 0, session.key_bytes + 1)
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(
            f"{session.key}, which says what a session of a partial save wrote, is missing; delete the save and "
            "begin again",
            key=session.key,
        ) from error
    if len(data) != session.key_bytes or _checksum(data) != session.checksum:
        raise CorruptCheckpointError(
            f"{session.key} is damaged: expected {session.key_bytes} bytes with the checksum {session.checksum}, "
            f"found {len(data)} or more with {_checksum(data)}; delete the save and begin again",
            key=session.key, start=0, stop=len(data),
        )  # fmt: skip
    return data


def decode_session(data: bytes, session: Session) -> SessionReceipts:
    """Decode the table of a session. The bytes may be hostile.

    Args:
        data: the table.
        session: its entry in the partial save.

    Raises:
        CorruptCheckpointError: the bytes are no valid table.
        UnsupportedVersionError: another version of this package wrote them.
    """
    try:
        line, _, rest = data.partition(b"\n")
        head: dict[str, Any] = json.loads(line)
        if head["version"] != _VERSION:
            raise UnsupportedVersionError(
                f"{session.key} has the version {str(head['version'])[:40]}, and this ckptcore knows {_VERSION}: "
                "finalize with the version that saved the sessions"
            )
        tree = TreeMetadata.from_json(head["tree"])
        receipts = decode_receipts(itertools.repeat(tree, session.size), rest)
        for number, receipt in enumerate(receipts):
            _expect_sound(receipt, tree, session.first + number)
        if any(not 0 <= rank < session.size for ranks in tree.held_by.values() for rank in ranks):
            raise ValueError("leaves are held by ranks that the session does not have")
    except (CorruptCheckpointError, UnsupportedVersionError):
        raise
    except InvalidLocationError as error:
        raise CorruptCheckpointError(
            f"{session.key} names an object that cannot be: {error}", key=session.key
        ) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{session.key} cannot be read as what a session wrote: {error!r}; delete the save and begin again",
            key=session.key,
        ) from error
    return SessionReceipts(session.first, tree, receipts)


def _expect_sound(receipt: Receipt, tree: TreeMetadata, rank: int) -> None:
    """Refuse a receipt whose columns contradict each other, before memory of their size is allocated.

    Raises:
        ValueError, TypeError, InvalidLocationError
    """
    items = receipt.items
    assert isinstance(items, ItemColumns)  # they were decoded
    leaf, counts = items.leaf.tolist(), items.counts.tolist()
    if receipt.rank != rank or len(leaf) != len(counts):
        raise ValueError(f"a receipt of rank {receipt.rank!r}, expected {rank}")
    bounds = 0
    for number, count in zip(leaf, counts, strict=True):
        record = tree.leaves[number] if 0 <= number < len(tree.leaves) else None
        if not isinstance(record, ArrayRecord) or number in tree.aliases or count < 0:
            raise ValueError(f"{count} boxes of leaf {number}")
        bounds += 2 * len(record.spec.shape) * count
        if not record.spec.shape and count > len(counts):
            raise ValueError(f"{count} boxes of leaf {number}, which has no axes")
    if bounds != len(items.bounds):
        raise ValueError(f"{len(items.bounds)} bounds of boxes, expected {bounds}")
    if len(items.bounds) and int(np.min(items.bounds)) < 0:
        raise ValueError("a box begins before its array")
    for record in receipt.objects:
        check_key(record.key)
        if record.size < 0 or len(record.checksums) not in (0, record.blocks * CHECKSUM_BYTES):
            raise ValueError(f"{record.size} bytes and {len(record.checksums)} bytes of checksums for {record.key}")


def _checksum(data: bytes) -> str:
    return f"{CHECKSUM_ALGORITHM}:{xxhash.xxh3_64_hexdigest(data)}"


_SHOWN = 20


@dataclass(frozen=True, slots=True)
class SessionReceipts:
    """The tree and the receipts of a session.

    Attributes:
        first: the first rank of its processes.
        tree: the tree of the session.
        receipts: the receipts of its processes, by rank; leaves have the numbers of `tree`.
    """

    first: int
    tree: TreeMetadata
    receipts: Sequence[Receipt]


def unite_sessions(sessions: Sequence[SessionReceipts], layout: Layout) -> tuple[TreeMetadata, Sequence[Receipt]]:
    """Return one tree with the leaves of all sessions, and all receipts with the leaf numbers of that tree.

    Args:
        sessions: at least one, in their order.
        layout: the layout of all sessions.

    Raises:
        TreeMismatchError: the trees cannot be united.
        NameCollisionError: an array would have another name in the whole tree than in its session.
        KeyError, IndexError, TypeError, ValueError: what the layout raises for a hostile state.
    """
    tree, numbers = _unite(sessions, layout)
    return tree, [
        receipt._replace(
            items=_renumbered(receipt.items, tree, leaves),
            state=layout.renumbered(receipt.state, leaves),
        )
        for session, leaves in zip(sessions, numbers, strict=True)
        for receipt in session.receipts
    ]


def boxes_taken(sessions: Sequence[SessionReceipts], tree: TreeMetadata, layout: Layout) -> Mapping[int, Sequence[Box]]:
    """Return, by array of a further session, the boxes that earlier sessions wrote; arrays without any are left out.

    Args:
        sessions: the earlier sessions.
        tree: the tree of the further session.
        layout: the layout of all sessions.

    Raises:
        TreeMismatchError: the trees cannot be united, or an earlier session wrote all of an array.
        NameCollisionError: an array would have another name in the whole tree.
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
        tree: the tree of this session.
        items: the items that this process will write.
        taken: boxes by leaf, as from `boxes_taken`.

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
        f"an earlier session of this partial save has {', '.join(found[:_SHOWN])}{more} already, and nothing is "
        "saved twice: give what is not there yet. Nothing was written",
        found,
    )


def _size(tree: TreeMetadata, leaf: int) -> int:
    record = tree.leaves[leaf]
    return record.spec.size if isinstance(record, ArrayRecord) else -1


def _unite(sessions: Sequence[SessionReceipts], layout: Layout) -> tuple[TreeMetadata, Sequence[Sequence[int]]]:
    """Return the union of the trees and, by session, the number of each leaf in it; for tied leaves that of the stored one."""
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
                f"arrays share memory in one session and not in another: {'; '.join(told[:_SHOWN])}. Give them in "
                "one session. Nothing was written",
                told,
            )
        for leaf, name in layout.names_written(tree).items():
            if names[own[leaf]] != name:
                raise NameCollisionError(
                    f"{format_path(tree.paths[leaf])} is stored as {name!r} in its session, and would be "
                    f"{names[own[leaf]]!r} together with what other sessions have: rename one of the keys, or save "
                    "both in one session. Nothing was written"
                )
        numbers.append(stored)
    return replace(union, held_by=held_by), numbers


def _renumbered(items: Sequence[WriteItem], tree: TreeMetadata, leaves: Sequence[int]) -> Sequence[WriteItem]:
    columns = ItemColumns.of(tree.leaves, items)
    numbers = np.array([leaves[leaf] for leaf in columns.leaf.tolist()], np.int64)
    return ItemColumns(tree.leaves, numbers, columns.counts, columns.bounds)
