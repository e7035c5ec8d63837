"""What one process writes in a dry run, and what the leader adds: the code of layouts, on plans without elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from ckptcore.builtin.files import FilesLayout
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.location import Location
from ckptcore.commit.root import Composite, Root, this_writer
from ckptcore.commit.root_json import encode_composite, encode_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.commit.target import refuse_inside, refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.io.requests import SIZES
from ckptcore.job.visibility import sees_claim
from ckptcore.model.transfer import Receipt, WriteItem
from ckptcore.protocols import (
    CheckpointInfo,
    HostBytes,
    Layout,
    StorageBackend,
    Transaction,
    WriteForecast,
)
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import FilesDescription, SavePart
from ckptcore.saving.requests import Save
from ckptcore.saving.roots import finish_part, put_root
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore_tools.dry_run.plans import MemoryPlan, RequestCounts
from ckptcore_tools.dry_run.storages import (
    CountingDirectories,
    CountingObjects,
    NoElementsError,
    SizeOnlySnapshot,
    SizeRecorder,
)

__all__ = ["Leading", "StorageKind", "WrittenCheckpoint", "WrittenProcess", "run_commit", "run_writes"]

StorageKind: TypeAlias = Literal["directories", "objects"]
"""Whether the storage that is played has real directories."""

_NAME: Final = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCheckpoint:
    """What a process wrote of one checkpoint.

    Attributes:
        receipts: of the parts that the processes write together.
        sizes: by key within the checkpoint, the bytes of its objects.
        at_most: the keys of those that may be smaller.
        about: the keys of those that make what it alone wrote a whole.
        array_bytes, boxes: of arrays.
        requests: what it asked.
    """

    receipts: Sequence[Receipt]
    sizes: Mapping[str, int]
    at_most: frozenset[str]
    about: frozenset[str]
    array_bytes: int
    boxes: int
    requests: RequestCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenProcess:
    """What a process wrote of a save: its checkpoint, then its exports.

    Attributes:
        checkpoints: of each.
        memory: that it took.
        untold: checkpointables whose files nobody knows yet.
    """

    checkpoints: Sequence[WrittenCheckpoint]
    memory: MemoryPlan
    untold: Sequence[str]


@dataclass(frozen=True, slots=True)
class Leading:
    """What the leader goes on with, of one checkpoint.

    Attributes:
        save: the checkpoint.
        storage: with what the leader wrote.
        claim: of the leader.
    """

    save: Save
    storage: CountingObjects
    claim: Transaction


@dataclass(frozen=True, slots=True)
class _Written:
    checkpoint: WrittenCheckpoint
    leading: Leading | None
    buffer_bytes: int


def run_writes(save: Save, kind: StorageKind, context: Context) -> tuple[WrittenProcess, Sequence[Leading]]:
    """Play what this process writes of a save and of its exports.

    Args:
        save: what was asked for, with leaves of `ckptcore_tools.dry_run.leaves`.
        kind: of storage.
        context: options.

    Returns:
        What it wrote; and on the leader what it goes on with, for each checkpoint.

    Raises:
        UnsupportedLeafError: if workers of a single controller hold arrays.
        PluginError: if a layout cannot do without elements and does not say what it would write.
    """
    if save.uses_workers:
        raise UnsupportedLeafError(
            "arrays are at workers of this single controller, and what those write is not planned; plan abstract "
            "arrays instead, with plan(..., processes=N) with as many processes as there are workers"
        )
    host_bytes: list[Sequence[HostBytes]] = []
    untold = []
    for part in save.parts:
        source = part.source
        assert source is not None  # nothing was captured
        if isinstance(source, FilesDescription):
            untold.append(source.name)
            host_bytes.append(())
        else:
            assert isinstance(source, TreeDescription)  # only saves into directories of hosts have other arrays
            host_bytes.append([_host_bytes(source, item) for item in part.plan.items])
    of_part = {id(part): taken for part, taken in zip(save.parts, host_bytes, strict=True)}
    snapshots = [SizeOnlySnapshot(part.plan, of_part[id(part)]) for part in save.parts]
    further = [(one, part, part.shared) for one in save.further for part in one.parts if part.shared is not None]
    exported = [[of_part[id(shared.part)][number] for number in shared.items] for _, _, shared in further]
    shares = [SizeOnlySnapshot(part.plan, taken) for (_, part, _), taken in zip(further, exported, strict=True)]
    written = [_run_checkpoint(save, snapshots, kind, context)]
    written += [
        _run_checkpoint(one, [share], kind, context) for (one, _, _), share in zip(further, shares, strict=True)
    ]
    memory = _memory(
        save.agreement.rank,
        [taken for of_one in host_bytes for taken in of_one],
        [taken for of_export in exported for taken in of_export],
        [*snapshots, *shares],
        max(one.buffer_bytes for one in written),
        context,
    )
    process = WrittenProcess(checkpoints=[one.checkpoint for one in written], memory=memory, untold=untold)
    return process, [one.leading for one in written if one.leading is not None]


def _host_bytes(source: TreeDescription, item: WriteItem) -> HostBytes:
    """Return the host memory that an item takes in a save."""
    leaf, handler = source.leaf(item.leaf)
    return handler.host_bytes(leaf, item.boxes)


def _run_checkpoint(save: Save, snapshots: Sequence[SizeOnlySnapshot], kind: StorageKind, context: Context) -> _Written:
    rank = save.agreement.rank
    storage = CountingDirectories() if kind == "directories" else CountingObjects()
    location = Location(save.target.location.display, storage, _NAME)
    claimed = save.info.claimed
    conditions = Conditions()  # they are tried out, as by the first save of a process
    refuse_inside(location)  # as the save looks before it claims
    refuse_to_replace(location, False)
    claim = location.commits.begin(location, claimed, False, conditions)
    if save.agreement.size > 1:
        claim.show_claim()
    store = claim.store
    if rank:  # the leader has done that
        storage.forget()
        sees_claim(claimed, location)
        store = location.commits.store_of(location, claimed.save_id, conditions)
    receipts = []
    at_most: set[str] = set()
    exact: set[str] = set()
    buffer_bytes = 0
    for part, snapshot in zip(save.parts, snapshots, strict=True):
        if part.layout.name == "files":
            continue
        inside = subdirectory(store, part.directory)
        receipt, forecast = _write(part, snapshot, inside, context)
        part.receipts = [receipt]
        prefix = f"{part.directory}/" if part.directory else ""
        at_most.update([f"{prefix}{key}" for key in forecast.at_most])
        exact.update([f"{prefix}{record.key}" for record in receipt.objects])
        buffer_bytes = max(buffer_bytes, forecast.buffer_bytes)
        if part.own:
            recorder = SizeRecorder(inside, checksums=context.io.checksums)
            put_root(inside, finish_part(save.info, part, recorder))
        else:
            receipts.append(receipt)
    items = [item for part in save.parts for item in part.plan.items]
    sizes = {key.partition("/")[2]: size for key, size in storage.sizes.items()}
    checkpoint = WrittenCheckpoint(
        receipts=receipts,
        sizes=sizes,
        about=frozenset(sizes.keys() - exact),
        at_most=frozenset(at_most),
        array_bytes=sum([item.nbytes for item in items]),
        boxes=sum([len(item.boxes) for item in items]),
        requests=storage.requests,
    )
    return _Written(checkpoint, None if rank else Leading(save, storage, claim), buffer_bytes)


def _write(
    part: SavePart, snapshot: SizeOnlySnapshot, store: StorageBackend, context: Context
) -> tuple[Receipt, WriteForecast]:
    recorder = SizeRecorder(store, checksums=context.io.checksums)
    forecast = part.layout.forecast(snapshot, recorder)
    if forecast is None:
        try:
            forecast = WriteForecast(part.layout.write(snapshot, recorder))
        except NoElementsError as error:
            raise PluginError(
                f"the layout {part.layout.name} cannot be planned: its write() takes elements before it passes "
                "segments to the store. Implement ckptcore.protocols.Layout.forecast()"
            ) from error
    return Receipt(part.plan.rank, part.plan.items, forecast.state, recorder.objects), forecast


def _memory(
    rank: int,
    saved: Sequence[HostBytes],
    exported: Sequence[HostBytes],
    snapshots: Sequence[SizeOnlySnapshot],
    buffer_bytes: int,
    context: Context,
) -> MemoryPlan:
    """What a process holds.

    Snapshots tell what one thread would hold that writes; several may hold one more array, which is taken to be the
    largest. Each thread may gather what it writes in memory of its own.
    """
    viewed = sum([taken.viewed for taken in saved])
    copied = sum([taken.copied for taken in saved])
    array_bytes = sum([item.nbytes for snapshot in snapshots for item in snapshot.plan.items])
    pieces = -(-array_bytes // SIZES.write) if array_bytes >= SIZES.inline else 0
    buffers = buffer_bytes + min(pieces, runtime_of(context).io_threads.count) * SIZES.write
    ahead = max([snapshot.viewed_peak for snapshot in snapshots], default=0)
    kept = sum([taken.viewed for taken in exported])  # until the exports are written
    blocking = min(viewed, ahead + max([taken.viewed for taken in saved], default=0) + kept)
    limit = context.memory.save_bytes
    asynchronous = copied
    if limit is not None:
        largest = max([taken.copied for taken in saved], default=0)
        held = max([snapshot.held_by_writer for snapshot in snapshots], default=0)
        asynchronous = min(copied, max(limit, largest) + held)
        copied += sum([taken.copied for taken in exported])  # their first copy is gone by then
    return MemoryPlan(
        rank=rank,
        viewed=viewed,
        copied=copied,
        blocking_peak=blocking + buffers,
        async_peak=asynchronous + buffers,
    )


def run_commit(save: Save, claim: Transaction, receipts: Sequence[Sequence[Receipt]], context: Context) -> None:
    """Commit a checkpoint on the leader.

    Args:
        save: the checkpoint.
        claim: of the leader.
        receipts: by rank, of each part that the processes write together.
        context: options.
    """
    info = save.info
    parts = [part for part in save.parts if not part.own]
    whole: Root | None = None
    for number, part in enumerate(parts):
        inside = subdirectory(claim.store, part.directory)
        recorder = SizeRecorder(inside, checksums=context.io.checksums)
        part.receipts = [of_rank[number] for of_rank in receipts]
        root = finish_part(info, part, recorder)
        if info.members is None:
            whole = root
        else:
            put_root(inside, root)
    if whole is not None:
        _write_metadata_files(parts[0].layout, info.checkpoint_info, claim, context)
        data, tables = encode_root(replace(whole, custom=info.custom))
    else:
        layouts = {part.layout.name: part.layout for part in save.parts if part.layout.name != FilesLayout.name}
        for layout in layouts.values():
            _write_metadata_files(layout, info.checkpoint_info, claim, context)
        composite = Composite(
            save_id=info.save_id,
            created=info.created,
            writer=this_writer(),
            members=info.members or {},
            custom=info.custom,
        )
        data, tables = encode_composite(composite)
    claim.commit(data, tables)


def _write_metadata_files(layout: Layout, info: CheckpointInfo, claim: Transaction, context: Context) -> None:
    layout.write_metadata_files(info, SizeRecorder(claim.store, checksums=context.io.checksums))
