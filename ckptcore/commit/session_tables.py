"""Session tables: what a session of a partial save wrote, in an object of its own, until the checkpoint is finalized.

A line of JSON with the tree of the session, and after it the receipts of its processes as they are told in a job. The object is of
ckptcore alone, and goes when the checkpoint is committed; the version in it is another one with each change of `ckptcore.commit.receipts`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import xxhash

from ckptcore.builtin.keys import check_key
from ckptcore.commit.receipts import decode_receipts, encode_receipts
from ckptcore.commit.root import PartialSave, Session
from ckptcore.commit.session_unions import SessionReceipts
from ckptcore.errors import CorruptCheckpointError, InvalidLocationError, ObjectNotFoundError, UnsupportedVersionError
from ckptcore.model.columns import ItemColumns
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.objects import CHECKSUM_ALGORITHM, CHECKSUM_BYTES
from ckptcore.model.transfer import Receipt
from ckptcore.protocols import StorageBackend

__all__ = ["decode_session", "describe_session", "encode_session", "read_sessions", "session_key"]

_VERSION: Final = 1


def session_key(save_id: str, first: int) -> str:
    """The object that says what a session wrote; `first` is the first rank of its processes."""
    return f"checkpoint.{save_id}.session-{first}"


def encode_session(tree: TreeMetadata, receipts: Sequence[Receipt]) -> bytes:
    """The bytes of what a session wrote: a receipt for each of its processes, by rank."""
    head = json.dumps({"version": _VERSION, "tree": tree.to_json()}, separators=(",", ":")).encode("ascii")
    return head + b"\n" + encode_receipts([tree] * len(receipts), receipts)


def describe_session(partial: PartialSave, data: bytes, receipts: Sequence[Receipt], created: str) -> Session:
    """What the place of the root says of a session that is complete.

    Args:
        partial: has the session as its owner.
        data: its table.
        receipts: of its processes.
        created: now, ISO 8601 in UTC.
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
    """What all complete sessions wrote.

    Args:
        store: where they wrote it.
        partial: what stands in the place of the root.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError
    """
    return [decode_session(_read(store, session), session) for session in partial.sessions]


def _read(store: StorageBackend, session: Session) -> bytes:
    try:
        data = store.get(session.key, 0, session.key_bytes + 1)
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(
            f"{session.key}, which says what a session of a partial save wrote, is missing; delete the save and begin again",
            key=session.key,
        ) from error
    if len(data) != session.key_bytes or _checksum(data) != session.checksum:
        raise CorruptCheckpointError(
            f"{session.key} is damaged: expected {session.key_bytes} bytes with the checksum {session.checksum}, found {len(data)} or "
            f"more with {_checksum(data)}; delete the save and begin again",
            key=session.key, start=0, stop=len(data),
        )  # fmt: skip
    return data


def decode_session(data: bytes, session: Session) -> SessionReceipts:
    """What a session wrote; the bytes may be hostile.

    Args:
        data: its table.
        session: what the place of the root says of it.

    Raises:
        CorruptCheckpointError: if they are none.
        UnsupportedVersionError: if another version of this package wrote them.
    """
    try:
        line, _, rest = data.partition(b"\n")
        head: dict[str, Any] = json.loads(line)
        if head["version"] != _VERSION:
            raise UnsupportedVersionError(
                f"{session.key} has the version {str(head['version'])[:40]}, and this ckptcore knows {_VERSION}: finalize with the version "
                "that saved the sessions"
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
    """Refuse a receipt whose columns do not fit each other, before anything is made as large as they say.

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
