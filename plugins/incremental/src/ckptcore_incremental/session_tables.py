"""Stored receipts of the sessions of a partial save, and the union of all sessions.

Each session stores its receipts in a separate object until the checkpoint is finalized: a line of
JSON with the tree of the session, then the receipts of its processes as encoded by
`ckptcore.job.receipts`. Only ckptcore reads this object. Increase `_VERSION` whenever the encoding
of `ckptcore.job.receipts` changes.
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
from ckptcore.model.metadata import CHECKSUM_ALGORITHM, ArrayRecord, TreeMetadata, check_key
from ckptcore.model.transfer import ItemColumns, Receipt, WriteItem
from ckptcore.model.tree import format_path
from ckptcore.protocols import Layout, StorageBackend
from ckptcore.tree.merge import merge_trees

_VERSION: Final = 1
BEGIN_AGAIN: Final = "remove this partial save, with all its sessions, by ckptcore.delete and begin again"
"""The remedy for a partial save that cannot be read and has no copy."""

_SHOWN: Final = 20
"""Maximum number of arrays in an error message."""


def session_key(save_id: str, first: int) -> str:
    """Return the key of a session's table. `first` is the first rank of its processes."""
    return f"checkpoint.{save_id}.session-{first}"


def encode_session(tree: TreeMetadata, receipts: Sequence[Receipt]) -> bytes:
    """Encode the table of a session: its tree, and the receipts of its processes in the order of their ranks."""
    head = json.dumps({"version": _VERSION, "tree": tree.to_json()}, separators=(",", ":")).encode("ascii")
    return head + b"\n" + encode_receipts([tree] * len(receipts), receipts)


def describe_session(partial: PartialSave, data: bytes, receipts: Sequence[Receipt], created: str) -> Session:
    """Return the entry of a complete session for the session table of the partial save.

    Args:
        partial: the partial save, whose `owner` is the first rank of this session.
        data: the encoded table of the session.
        receipts: receipts of its processes.
        created: current time, ISO 8601 in UTC.
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
        store: storage of the sessions.
        partial: the partial save.

    Raises:
        CorruptCheckpointError: if a table is missing or damaged.
        UnsupportedVersionError: if another version of this package wrote it.
    """
    return [decode_session(_read_table(store, session), session) for session in partial.sessions]


def _read_table(store: StorageBackend, session: Session) -> bytes:
    try:
        data = store.get(session.key, 0, session.key_bytes + 1)
    except ObjectNotFoundError as error:
        what = "is missing, which lists the data that a session of this partial save wrote"
        raise _unusable(session, what) from error
    if len(data) != session.key_bytes or _checksum(data) != session.checksum:
        actual = f"{len(data)} bytes with {_checksum(data)}" if len(data) <= session.key_bytes else "more bytes"
        expected = f"{session.key_bytes} bytes with the checksum {session.checksum}"
        raise _unusable(session, f"is damaged: expected {expected}, found {actual}", stop=len(data))
    return data


def _unusable(session: Session, what: str, *, stop: int | None = None) -> CorruptCheckpointError:
    text = f"{session.key} {what}; restore it from a copy, or {BEGIN_AGAIN}"
    return CorruptCheckpointError(text, key=session.key, start=None if stop is None else 0, stop=stop)


def decode_session(data: bytes, session: Session) -> SessionReceipts:
    """Decode and validate the table of a session. The bytes can be hostile.

    Args:
        data: the encoded table.
        session: its entry in the session table.

    Raises:
        CorruptCheckpointError: if the bytes are not a valid table.
        UnsupportedVersionError: if another version of this package wrote them.
    """
    try:
        line, _, rest = data.partition(b"\n")
        head: dict[str, Any] = json.loads(line)
        if head["version"] != _VERSION:
            raise UnsupportedVersionError(
                f"{session.key} has the format version {str(head['version'])[:40]}, but this ckptcore supports only "
                f"{_VERSION}: finalize with the version of ckptcore that saved the sessions"
            )
        tree = TreeMetadata.from_json(head["tree"])
        receipts = decode_receipts(itertools.repeat(tree, session.size), rest)
        for number, receipt in enumerate(receipts):
            _validate_receipt(receipt, tree, session.first + number)
        if any(not 0 <= rank < session.size for ranks in tree.held_by.values() for rank in ranks):
            raise ValueError("leaves belong to ranks that the session does not have")
    except (CorruptCheckpointError, UnsupportedVersionError):
        raise
    except InvalidLocationError as error:
        raise _unusable(session, f"has an invalid object name: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise _unusable(session, f"is not a valid table of a session: {error!r}") from error
    return SessionReceipts(session.first, tree, receipts)


def _validate_receipt(receipt: Receipt, tree: TreeMetadata, rank: int) -> None:
    """Check that the columns of a receipt are consistent, before memory of their size is allocated.

    Raises:
        ValueError, TypeError: if the columns are inconsistent.
        InvalidLocationError: if the key of an object is invalid.
    """
    items = receipt.items
    assert isinstance(items, ItemColumns)  # `decode_receipts` returns columns
    leaf, counts = items.leaf.tolist(), items.counts.tolist()
    if receipt.rank != rank or len(leaf) != len(counts):
        raise ValueError(f"a receipt of rank {receipt.rank!r}, expected {rank}")
    bounds = 0
    for number, count in zip(leaf, counts, strict=True):
        record = tree.leaves[number] if 0 <= number < len(tree.leaves) else None
        if not isinstance(record, ArrayRecord) or number in tree.aliases or count < 0:
            raise ValueError(f"{count} boxes of leaf {number}")
        bounds += 2 * len(record.spec.shape) * count
        # Boxes without axes have no bounds, so only this limits their number.
        if not record.spec.shape and count > len(counts):
            raise ValueError(f"{count} boxes of leaf {number}, which has no axes")
    if bounds != len(items.bounds):
        raise ValueError(f"{len(items.bounds)} bounds of boxes, expected {bounds}")
    if len(items.bounds) and int(np.min(items.bounds)) < 0:
        raise ValueError("a box has a negative bound")
    for record in receipt.objects:
        check_key(record.key)
        if record.size < 0 or not record.block_bytes:
            raise ValueError(f"{record.size} bytes and {len(record.checksums)} bytes of checksums for {record.key}")


def _checksum(data: bytes) -> str:
    return f"{CHECKSUM_ALGORITHM}:{xxhash.xxh3_64_hexdigest(data)}"


@dataclass(frozen=True, slots=True)
class SessionReceipts:
    """Tree and receipts of a session.

    Attributes:
        first: first rank of its processes.
        tree: tree of the session.
        receipts: receipts of its processes, in the order of their ranks, with leaf numbers of
            `tree`.
    """

    first: int
    tree: TreeMetadata
    receipts: Sequence[Receipt]


def merge_sessions(sessions: Sequence[SessionReceipts], layout: Layout) -> tuple[TreeMetadata, Sequence[Receipt]]:
    """Return one tree with the leaves of all sessions, and all receipts with leaf numbers of that tree.

    Args:
        sessions: at least one, in the order in which they were completed.
        layout: layout of all sessions.

    Raises:
        TreeMismatchError: if the trees cannot be merged.
        NameCollisionError: if an array would have another name in the merged tree than in its
            session.
        KeyError, IndexError, TypeError, ValueError: raised by the layout for an invalid receipt
            state.
    """
    tree, numbers = _merge_trees(sessions, layout)
    return tree, [
        receipt._replace(
            items=_renumber_items(receipt.items, tree, leaves),
            state=layout.renumbered(receipt.state, leaves),
        )
        for session, leaves in zip(sessions, numbers, strict=True)
        for receipt in session.receipts
    ]


def written_boxes(
    sessions: Sequence[SessionReceipts], tree: TreeMetadata, layout: Layout
) -> Mapping[int, Sequence[Box]]:
    """Return the boxes that earlier sessions wrote, for each leaf of a new session. Omits leaves without such boxes.

    Args:
        sessions: the earlier sessions.
        tree: tree of the new session.
        layout: layout of all sessions.

    Raises:
        TreeMismatchError: if the trees cannot be merged, or if earlier sessions wrote all
            elements of an array of the new session.
        NameCollisionError: if an array would have another name in the merged tree.
    """
    if not sessions:
        return {}
    new = SessionReceipts(-1, tree, ())  # its ranks do not matter for the numbers of leaves
    _, numbers = _merge_trees([*sessions, new], layout)
    own = {merged: leaf for leaf, merged in enumerate(numbers[-1]) if leaf not in tree.aliases}
    written: dict[int, list[Box]] = {}
    for session, leaves in zip(sessions, numbers[:-1], strict=True):
        for receipt in session.receipts:
            for item in receipt.items:
                leaf = own.get(leaves[item.leaf])
                if leaf is not None:
                    written.setdefault(leaf, []).extend(item.boxes)
    complete = []
    for leaf, boxes in written.items():
        record = tree.leaves[leaf]
        if isinstance(record, ArrayRecord) and sum([box.size for box in boxes]) == record.spec.size:
            complete.append(f"{format_path(tree.paths[leaf])} ({record.spec})")
    if complete:
        raise _already_saved(complete)
    return written


def expect_unwritten(tree: TreeMetadata, items: Sequence[WriteItem], written: Mapping[int, Sequence[Box]]) -> None:
    """Check that no earlier session wrote elements that this process is going to write.

    Args:
        tree: tree of this session.
        items: the items that this process is going to write.
        written: result of `written_boxes`.

    Raises:
        TreeMismatchError: if an earlier session wrote some of them.
    """
    overlaps = [
        f"{format_path(tree.paths[item.leaf])}, elements {list(common.start)} to {list(common.stop)}"
        for item in items
        for earlier in written.get(item.leaf, ())
        for box in item.boxes
        if (common := box.intersect(earlier)) is not None
    ]
    if overlaps:
        raise _already_saved(overlaps)


def _already_saved(overlaps: Sequence[str]) -> TreeMismatchError:
    more = f" and {len(overlaps) - _SHOWN} more" if len(overlaps) > _SHOWN else ""
    return TreeMismatchError(
        f"an earlier session of this partial save already saved {', '.join(overlaps[:_SHOWN])}{more}: save only what "
        "is still missing. Nothing was written",
        overlaps,
    )


def _merge_trees(sessions: Sequence[SessionReceipts], layout: Layout) -> tuple[TreeMetadata, Sequence[Sequence[int]]]:
    """Merge the trees of the sessions.

    Returns:
        The merged tree, and for each session the number of each of its leaves in the merged tree. A
            tied leaf has the number of the leaf that is stored.
    """
    trees = [session.tree for session in sessions]
    union = merge_trees(trees, [[number] for number in range(len(trees))], size=len(trees), savers="session")
    number_of = {path: number for number, path in enumerate(union.paths)}
    names = layout.names_written(union)
    numbers = []
    held_by: dict[int, tuple[int, ...]] = {}
    for session in sessions:
        tree = session.tree
        own = [number_of[path] for path in tree.paths]
        for leaf, ranks in tree.held_by.items():
            held_by[own[leaf]] = tuple([session.first + rank for rank in ranks])
        stored = [union.aliases.get(number, number) for number in own]
        untied = [
            f"{format_path(tree.paths[leaf])} and {format_path(tree.paths[target])}"
            for leaf, target in tree.aliases.items()
            if stored[leaf] != stored[target]
        ]
        if untied:
            raise TreeMismatchError(
                f"arrays share memory in one session but not in another: {'; '.join(untied[:_SHOWN])}. Save them in "
                "one session. Nothing was written",
                untied,
            )
        for leaf, name in layout.names_written(tree).items():
            if names[own[leaf]] != name:
                raise NameCollisionError(
                    f"{format_path(tree.paths[leaf])} is stored as {name!r} in its session, but would be named "
                    f"{names[own[leaf]]!r} in the tree of all sessions: rename one of the keys, or save both in one "
                    "session. Nothing was written"
                )
        numbers.append(stored)
    return replace(union, held_by=held_by), numbers


def _renumber_items(items: Sequence[WriteItem], tree: TreeMetadata, leaves: Sequence[int]) -> Sequence[WriteItem]:
    columns = ItemColumns.of(tree.leaves, items)
    numbers = np.array([leaves[leaf] for leaf in columns.leaf.tolist()], np.int64)
    return ItemColumns(tree.leaves, numbers, columns.counts, columns.bounds)
