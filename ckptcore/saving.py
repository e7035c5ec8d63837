"""Saving: describe, claim, snapshot, persist, commit. Each stage's input can only be had from the stage before.

In a job of several processes every stage ends with an exchange: an error on one rank fails the save on all of them.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import xxhash

from ckptcore.agreement import Agreement
from ckptcore.background import SaveHandle
from ckptcore.commit import Claim, Overwrite, claim_location, claimed_store, read_root, refuse_to_replace
from ckptcore.context import Context
from ckptcore.engine.recorder import ObjectRecorder
from ckptcore.errors import (
    CheckpointError,
    CommitUnknownError,
    CoordinationTimeoutError,
    PluginError,
    UnsupportedLeafError,
)
from ckptcore.flattening import Flat, flatten
from ckptcore.locations import Location, LocationLike, resolve_location
from ckptcore.model.arrays import ArraySpec, Box, HostArray, Shard
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.transfer import Pending, Receipt, WriteItem, WritePlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning import check_coverage, plan_write
from ckptcore.protocols import HostMemory, Layout, LeafHandler, Snapshot, StorageBackend
from ckptcore.root import Root, encode_root, new_save_id

__all__ = ["Described", "describe", "fail_everywhere", "persist", "start_copy", "start_view"]


@dataclass(frozen=True, slots=True)
class Described:
    """A save that was asked for and can go ahead: every rank has the same tree, and the layout can store it.

    Attributes:
        location, layout, overwrite, custom: as asked.
        plan: what this process writes, with the tree of the whole job and the save id.
        created: when the save began, ISO 8601 in UTC.
        agreement: with the other processes of the job.
    """

    location: Location
    layout: Layout
    overwrite: Overwrite
    custom: Mapping[str, JSON]
    plan: WritePlan
    created: str
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class _Leaves:
    """The leaves that a plan's items stand for; let go of once the snapshot is taken."""

    leaves: Sequence[object]
    handlers: Sequence[LeafHandler | None]


def describe(
    location: LocationLike,
    state: object,
    *,
    layout: str | Layout,
    overwrite: Overwrite,
    custom: Mapping[str, JSON] | None,
    context: Context,
) -> tuple[Described, _Leaves]:
    """Look at what is to be saved and where, and refuse what cannot be. Writes nothing.

    Raises:
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError, CheckpointExistsError, InvalidLocationError
        BackgroundSaveError: an earlier save failed unnoticed, here; in a job the other ranks hear of it.
    """
    agreement = Agreement(context.job(), context.exchange_key(location))
    with agreement.stage("describe") as stage:
        context.saves.raise_unnoticed()
        chosen = context.registry.layout(layout)
        metadata = _check_custom(custom)
        resolved = resolve_location(
            location, context.registry, durable=context.durability == "full", config=context.storage
        )
        flat = flatten(state, context.registry)
        tree, shards = _describe_leaves(flat, agreement.rank, agreement.size)
        chosen.check(tree, agreement.size)
        if agreement.rank == 0:
            refuse_to_replace(resolved, overwrite)
        stage.payload = _digest(tree) if agreement.size > 1 else None
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    digests = stage.payloads
    common = agreement.lead("save", lambda: _same_tree(digests, new_save_id(), created))
    plan = plan_write(tree, shards, rank=agreement.rank, size=agreement.size, save_id=common["save_id"])
    described = Described(resolved, chosen, overwrite, metadata, plan, common["created"], agreement)
    return described, _Leaves(flat.leaves, flat.handlers)


def _describe_leaves(flat: Flat, rank: int, size: int) -> tuple[TreeMetadata, dict[int, Sequence[Shard]]]:
    records: list[LeafRecord] = []
    refused: dict[int, UnsupportedLeafError] = {}
    aliases: dict[int, int] = {}
    first: dict[tuple[int, Hashable], int] = {}
    shards: dict[int, Sequence[Shard]] = {}
    for number, (leaf, handler) in enumerate(zip(flat.leaves, flat.handlers, strict=True)):
        assert handler is not None  # placeholders are for loading only
        try:
            record = handler.describe(leaf)
            records.append(record)
            if isinstance(record, ArrayRecord):
                identity = handler.identity(leaf)
                if identity is not None:
                    original = first.setdefault((id(handler), identity), number)
                    if original != number and _same_array(records[original], record):
                        aliases[number] = original
                        continue
                shards[number] = handler.shards(leaf, rank, size)
        except UnsupportedLeafError as error:
            refused[number] = error
            if len(records) == number:
                records.append(ArrayRecord(ArraySpec((), "bool")))
    if refused:
        paths = list(flat.paths())
        lines = [f"{format_path(paths[number])}: {error}" for number, error in refused.items()]
        more = f"; and {len(lines) - 20} more" if len(lines) > 20 else ""
        raise UnsupportedLeafError("; ".join(lines[:20]) + more + ". Nothing was written") from next(
            iter(refused.values())
        )
    return TreeMetadata(flat.skeleton, tuple(records), aliases), shards


def _same_array(first: LeafRecord, second: ArrayRecord) -> bool:
    return isinstance(first, ArrayRecord) and first.spec == second.spec and first.kind == second.kind


def start_view(plan: WritePlan, leaves: _Leaves) -> Callable[[int], Sequence[Pending[HostArray]]]:
    """Begins the transfer of an item for a blocking save: it may alias the leaf."""

    def start(number: int) -> Sequence[Pending[HostArray]]:
        item = plan.items[number]
        handler = leaves.handlers[item.leaf]
        assert handler is not None
        return handler.view_on_host(leaves.leaves[item.leaf], item.boxes)

    return start


def start_copy(plan: WritePlan, leaves: _Leaves, memory: HostMemory) -> Callable[[int], Sequence[Pending[HostArray]]]:
    """Begins the transfer of an item for an asynchronous save: into memory that nobody can change."""

    def start(number: int) -> Sequence[Pending[HostArray]]:
        item = plan.items[number]
        handler = leaves.handlers[item.leaf]
        assert handler is not None
        return handler.copy_to_host(leaves.leaves[item.leaf], item.boxes, memory)

    return start


def fail_everywhere(described: Described, error: BaseException) -> NoReturn:
    """Raise why this process cannot go on with a save, on the other ranks too: they wait for it to claim the location."""
    with described.agreement.stage("claim"):
        raise error
    raise error  # the stage has raised it


def persist(described: Described, snapshot: Snapshot, context: Context, handle: SaveHandle | None = None) -> None:
    """Claim the location, write, and commit. On every rank; returns once the checkpoint is committed.

    Raises:
        CheckpointError: why it is not; then nothing of it is left, and what was there before still is.
    """
    agreement = described.agreement
    claim = None
    try:
        with agreement.stage("claim"):
            if agreement.rank == 0:
                claim = claim_location(
                    described.location, described.plan.save_id, described.created, described.overwrite
                )
        store = claim.store if claim is not None else claimed_store(described.location, described.plan.save_id)
        try:
            with agreement.stage("write") as stage:
                receipt = _write(described, snapshot, store, context, handle)
                stage.payload = _encode_receipt(receipt)
        except CoordinationTimeoutError as error:
            if agreement.rank == 0:
                raise
            # The leader may have this rank's receipt and go on without it hearing of that.
            _look_whether_committed(described, error)
            return
        receipts = (
            [receipt]
            if agreement.size == 1
            else [_decode_receipt(payload, described.plan.tree) for payload in stage.payloads]
        )
        try:
            with agreement.stage("commit"):
                if claim is not None:
                    _commit(described, claim, receipts, context)
        except CoordinationTimeoutError as error:
            _look_whether_committed(described, error)
    except BaseException as error:
        if claim is not None:
            try:
                claim.abort()
            except CheckpointError as failure:
                # The error that stopped the save says more; the next save removes what is left.
                error.add_note(f"removing what was written failed too: {failure}")
        raise


def _look_whether_committed(described: Described, error: CoordinationTimeoutError) -> None:
    """The others did not come to the end of the commit: only the root tells whether it happened."""
    try:
        root = read_root(described.location.store)
    except CheckpointError as unreadable:
        raise CommitUnknownError(
            f"whether the save to {described.location.display} committed is not known: {error}, and its root cannot be "
            f"read: {unreadable}"
        ) from error
    if not isinstance(root, Root) or root.save_id != described.plan.save_id:
        raise CommitUnknownError(
            f"the save to {described.location.display} is not committed, or not yet: {error}; look again before saving"
        ) from error


def _write(
    described: Described,
    snapshot: Snapshot,
    store: StorageBackend,
    context: Context,
    handle: SaveHandle | None,
) -> Receipt:
    progress = handle.count if handle is not None else None
    recorder = ObjectRecorder(store, context.io_threads, checksums=context.checksums, progress=progress)
    state = described.layout.write(snapshot, recorder)
    return Receipt(described.plan.rank, described.plan.items, state, recorder.objects)


def _commit(described: Described, claim: Claim, receipts: Sequence[Receipt], context: Context) -> None:
    tree = described.plan.tree
    check_coverage(tree, receipts)
    recorder = ObjectRecorder(claim.store, context.io_threads, checksums=context.checksums)
    state = described.layout.finish(tree, receipts, recorder)
    objects: dict[str, ObjectRecord] = {}
    for record in [*(record for receipt in receipts for record in receipt.objects), *recorder.objects]:
        if objects.setdefault(record.key, record) is not record:
            raise PluginError(
                f"the layout {described.layout.name} wrote {record.key} twice, perhaps from several processes; "
                "the save is not committed"
            )
    root = Root(
        save_id=described.plan.save_id,
        created=described.created,
        writer=_writer(),
        layout=described.layout.name,
        state=state,
        tree=tree,
        objects=objects,
        custom=described.custom,
    )
    claim.commit(*encode_root(root))


@functools.cache
def _writer() -> Mapping[str, str]:
    import importlib.metadata  # costs more to import than the rest of this module

    return {"ckptcore": importlib.metadata.version("ckptcore")}


def _check_custom(custom: Mapping[str, JSON] | None) -> Mapping[str, JSON]:
    if custom is None:
        return {}
    try:
        decoded: dict[str, JSON] = json.loads(json.dumps(dict(custom), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metadata= must be JSON, with str keys and finite numbers: {error}. Nothing was written"
        ) from error
    if decoded != _lists(custom):
        raise ValueError("metadata= must be JSON, with str keys; it would come back changed. Nothing was written")
    return decoded


def _lists(value: Any) -> Any:
    """JSON with its tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _lists(child) for key, child in value.items()}
    return [_lists(child) for child in value] if isinstance(value, list | tuple) else value


def _digest(tree: TreeMetadata) -> JSON:
    return xxhash.xxh3_128_hexdigest(json.dumps(tree.to_json(), sort_keys=True).encode())


def _same_tree(digests: Sequence[JSON], save_id: str, created: str) -> dict[str, str]:
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise CheckpointError(
            f"the ranks {different} describe another tree than rank 0 (other keys, shapes, dtypes or values); "
            "every rank must save the same tree. Nothing was written"
        )
    return {"save_id": save_id, "created": created}


def _encode_receipt(receipt: Receipt) -> JSON:
    return {
        "rank": receipt.rank,
        "items": [[item.leaf, [[box.start, box.stop] for box in item.boxes]] for item in receipt.items],
        "state": receipt.state,
        "objects": [[record.key, record.size, record.checksums.hex()] for record in receipt.objects],
    }


def _decode_receipt(payload: Any, tree: TreeMetadata) -> Receipt:
    """A receipt of another process of this job."""
    items = []
    for leaf, boxes in payload["items"]:
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # plans have no other items
        items.append(WriteItem(leaf, record.spec, tuple([Box(tuple(start), tuple(stop)) for start, stop in boxes])))
    objects = tuple([ObjectRecord(key, size, bytes.fromhex(checksums)) for key, size, checksums in payload["objects"]])
    return Receipt(payload["rank"], tuple(items), payload["state"], objects)
