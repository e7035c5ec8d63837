"""Dry runs of the writes of one process, and of the commit. They run the code of layouts without elements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptcore.commit.location import Location
from ckptcore.commit.root import CompositeRoot, Root, this_writer
from ckptcore.commit.root_json import encode_root
from ckptcore.commit.stored_root import refuse_inside, refuse_to_replace
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.io.threads import SIZES, sizes_of
from ckptcore.job.visibility import sees_claim
from ckptcore.model.transfer import Receipt
from ckptcore.model.tree import JSON
from ckptcore.protocols import CheckpointInfo, HostBytes, Layout, Snapshot, StorageBackend, Transaction, WriteStore
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import FilesDescription
from ckptcore.saving.requests import Save, SavePart
from ckptcore.saving.writing import finish_part, put_root
from ckptcore_tools.dry_run.plans import MemoryPlan, RequestCounts
from ckptcore_tools.dry_run.storages import (
    CountingDirectories,
    CountingObjects,
    NoElementsError,
    SizeOnlySnapshot,
    SizeRecorder,
)

StorageKind: TypeAlias = Literal["directories", "objects"]
"""The kind of storage that is simulated: a file system, or an object store."""

_NAME: Final = "checkpoint"


class WriteForecast(NamedTuple):
    """The forecast of a write.

    Attributes:
        state: the result of `Layout.write`, with its largest possible size.
        at_most: keys of objects that may be smaller than forecast, or may not be written.
        buffer_bytes: peak host memory of the write in addition to the arrays of its snapshot, in bytes.
    """

    state: JSON
    at_most: frozenset[str] = frozenset()
    buffer_bytes: int = 0


@runtime_checkable
class ForecastingLayout(Protocol):
    """A layout whose `write` needs elements, because it encodes them before it passes objects to the store.

    For other layouts, a dry run calls `write` itself, and records the lengths of the segments that it passes.
    """

    def forecast(self, snapshot: Snapshot, store: WriteStore) -> tuple[JSON, frozenset[str], int]:
        """Call the methods of `store` as `write` does, with the largest possible sizes, but without elements.

        Args:
            snapshot: has only a plan. Taking elements from it fails.
            store: records lengths. It opens and closes segments, and ignores that opening fails for lack of elements.

        Returns:
            The fields of `WriteForecast`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCheckpoint:
    """The simulated writes of one process to one checkpoint.

    Attributes:
        receipts: receipts of the parts that all processes write together.
        sizes: sizes of the objects by key within the checkpoint, in bytes.
        at_most: keys of objects that may be smaller.
        about: keys of metadata objects, whose sizes are estimates.
        array_bytes, boxes: bytes and number of boxes of arrays.
        requests: the requests.
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
    """The simulated writes of one process.

    Attributes:
        checkpoints: the writes to the checkpoint, and to each export.
        memory: the memory that the save needs.
        unplanned: checkpointables whose files are unknown.
    """

    checkpoints: Sequence[WrittenCheckpoint]
    memory: MemoryPlan
    unplanned: Sequence[str]


@dataclass(frozen=True, slots=True)
class LeaderState:
    """State of the leader between the writes and the commit of one checkpoint.

    Attributes:
        save: the save or export that writes the checkpoint.
        storage: the storage, with the objects of the leader.
        claim: the leader's transaction.
    """

    save: Save
    storage: CountingObjects
    claim: Transaction


@dataclass(frozen=True, slots=True)
class _Written:
    checkpoint: WrittenCheckpoint
    leading: LeaderState | None
    buffer_bytes: int


def run_writes(save: Save, kind: StorageKind, context: Context) -> tuple[WrittenProcess, Sequence[LeaderState]]:
    """Simulate the writes of this process, for a save and its exports.

    Args:
        save: the save, prepared with the leaf handlers of `ckptcore_tools.dry_run.leaves`.
        kind: the kind of storage.
        context: options.

    Returns:
        The writes of this process, and on the leader its state for each checkpoint.

    Raises:
        UnsupportedLeafError: if arrays belong to workers of a single controller.
        PluginError: if a layout needs elements and is no `ForecastingLayout`.
    """
    if save.agreement.size == 1 and save.has_other_writers:
        raise UnsupportedLeafError(
            "cannot plan a save of arrays that belong to workers of a single controller. Plan abstract arrays with "
            "plan(..., processes=N), where N is the number of workers"
        )
    saves = [save, *save.further]
    host_bytes = [[_host_bytes(part) for part in each_save.parts] for each_save in saves]
    snapshots = [
        [SizeOnlySnapshot(part.plan, nbytes) for part, nbytes in zip(each_save.parts, of_parts, strict=True)]
        for each_save, of_parts in zip(saves, host_bytes, strict=True)
    ]
    written = [
        _run_checkpoint(each_save, of_parts, kind, context)
        for each_save, of_parts in zip(saves, snapshots, strict=True)
    ]
    memory = _memory(
        save.agreement.rank,
        [nbytes for items in host_bytes[0] for nbytes in items],
        [nbytes for of_parts in host_bytes[1:] for items in of_parts for nbytes in items],
        [snapshot for of_parts in snapshots for snapshot in of_parts],
        max(result.buffer_bytes for result in written),
        context,
    )
    unplanned = [part.source.name for part in save.parts if isinstance(part.source, FilesDescription)]
    process = WrittenProcess(checkpoints=[result.checkpoint for result in written], memory=memory, unplanned=unplanned)
    return process, [result.leading for result in written if result.leading is not None]


def _host_bytes(part: SavePart) -> Sequence[HostBytes]:
    """Return the host memory that a save needs for each item of a part; empty for files, whose sizes are unknown."""
    source = part.source
    assert source is not None  # only capturing a part drops its source, and a dry run captures nothing
    if isinstance(source, FilesDescription):
        return ()
    taken = [source.boxes(item.leaf, item.boxes) for item in part.plan.items]
    return [handler.host_bytes(leaf, boxes) for leaf, handler, boxes in taken]


def _run_checkpoint(save: Save, snapshots: Sequence[SizeOnlySnapshot], kind: StorageKind, context: Context) -> _Written:
    rank = save.agreement.rank
    storage = CountingDirectories() if kind == "directories" else CountingObjects()
    # A new Location has no record of its storage, so the plan includes the test of conditional puts, which the first
    # save of a process makes.
    location = Location(save.target.location.display, storage, _NAME)
    claimed = save.info.claimed
    refuse_inside(location)  # the checks of a save before it claims the location
    refuse_to_replace(location, False)
    claim = location.commit_method.begin(location, claimed, False)
    if save.agreement.size > 1:
        claim.show_claim()
    store = claim.store
    if rank:  # only the leader makes the requests above; other ranks read its claim
        storage.forget()
        sees_claim(claimed, location)
        store = location.commit_method.store_of(location, claimed.save_id)
    receipts = []
    at_most: set[str] = set()
    exact: set[str] = set()
    buffer_bytes = 0
    for part, snapshot in zip(save.parts, snapshots, strict=True):
        if part.is_files:
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
    return _Written(checkpoint, None if rank else LeaderState(save, storage, claim), buffer_bytes)


def _write(
    part: SavePart, snapshot: SizeOnlySnapshot, store: StorageBackend, context: Context
) -> tuple[Receipt, WriteForecast]:
    recorder = SizeRecorder(store, checksums=context.io.checksums, sizes=sizes_of(part.plan))
    layout = part.layout
    try:
        if isinstance(layout, ForecastingLayout):
            forecast = WriteForecast(*layout.forecast(snapshot, recorder))
        else:
            forecast = WriteForecast(layout.write(snapshot, recorder))
    except NoElementsError as error:
        raise PluginError(
            f"the layout {layout.name} cannot be planned: it takes elements before it passes segments to the store. "
            f"Implement {__package__}.ForecastingLayout.forecast()"
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
    """Estimate the memory of a process.

    The snapshots record the memory for one writing thread. With several threads one more array can be in memory; this
    estimate assumes the largest one. Each thread can have its own write buffer.
    """
    viewed = sum([nbytes.viewed for nbytes in saved])
    copied = sum([nbytes.copied for nbytes in saved])
    array_bytes = sum([item.nbytes for snapshot in snapshots for item in snapshot.plan.items])
    writes = -(-array_bytes // SIZES.write) if array_bytes >= SIZES.inline else 0
    buffers = buffer_bytes + min(writes, runtime_of(context).io_threads.count) * SIZES.write
    ahead = max([snapshot.viewed_peak for snapshot in snapshots], default=0)
    exported_views = sum([nbytes.viewed for nbytes in exported])  # kept until the exports are written
    blocking = min(viewed, ahead + max([nbytes.viewed for nbytes in saved], default=0) + exported_views)
    limit = context.memory.save_bytes
    asynchronous = copied
    if limit is not None:
        largest = max([nbytes.copied for nbytes in saved], default=0)
        taken = max([snapshot.taken_peak for snapshot in snapshots], default=0)
        asynchronous = min(copied, max(limit, largest) + taken)
        copied += sum([nbytes.copied for nbytes in exported])  # exports are copied again: the first copy was freed
    return MemoryPlan(
        rank=rank,
        viewed=viewed,
        copied=copied,
        blocking_peak=blocking + buffers,
        async_peak=asynchronous + buffers,
    )


def run_commit(save: Save, claim: Transaction, receipts: Sequence[Sequence[Receipt]], context: Context) -> None:
    """Simulate the commit of a checkpoint on the leader.

    Args:
        save: the save or export that writes the checkpoint.
        claim: the leader's transaction.
        receipts: by rank, the receipts of each part that the processes write together.
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
        layouts = {part.layout.name: part.layout for part in save.parts}
        written = [_write_metadata_files(layout, info.checkpoint_info, claim, context) for layout in layouts.values()]
        composite = CompositeRoot(
            save_id=info.save_id,
            created=info.created,
            writer=this_writer(),
            members=info.members or {},
            files=tuple(itertools.chain(*written)),
            custom=info.custom,
        )
        data, tables = encode_root(composite)
    claim.commit(data, tables)


def _write_metadata_files(layout: Layout, info: CheckpointInfo, claim: Transaction, context: Context) -> Sequence[str]:
    """Write the metadata files of a layout. Return their keys."""
    recorder = SizeRecorder(claim.store, checksums=context.io.checksums)
    layout.write_metadata_files(info, recorder)
    return [record.key for record in recorder.objects]
