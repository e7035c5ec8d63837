"""Save: prepare, capture, write and commit, then write further saves."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from ckptcore.commit.location import Location, resolve_location, shown_location
from ckptcore.commit.root import Root, SaveOrder, check_name, new_save_id
from ckptcore.commit.stored_root import next_order, read_root, refuse_inside, refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedVersionError
from ckptcore.events import Recording
from ckptcore.io.background import SaveHandle
from ckptcore.io.memory import StagingMemory
from ckptcore.io.snapshot import BoundedSnapshot, CopiedSnapshot, StateBoxes, StateCopy, StateElements, ViewedSnapshot
from ckptcore.io.threads import requests_of
from ckptcore.job.agreement import Agreement
from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending, WritePlan
from ckptcore.progress import ByteProgress
from ckptcore.protocols import Layout
from ckptcore.runtime import refuse_in_signal_handler, runtime_of
from ckptcore.saving.descriptions import FilesDescription, PartDescription, describe_part
from ckptcore.saving.requests import (
    NOTHING_COMMITTED,
    CommitInfo,
    CommitTarget,
    OneTree,
    Save,
    SaveDraft,
    SaveRequest,
    TreeCaptured,
    failing_before_claim,
    failing_everywhere,
    foreign_finder,
    save_created,
)
from ckptcore.saving.writing import write_save

if TYPE_CHECKING:
    from ckptcore.saving.common_trees import CommonTrees


def perform_save(request: SaveRequest, context: Context) -> None:
    """Save, and return once the checkpoint is committed. Arrays are copied block by block, only while they are written.

    Raises:
        CheckpointError: the save failed.
    """
    progress = None if request.hooks.progress is None else ByteProgress(request.hooks.progress)
    with _recorded(request, context, progress) as (recording, agreement):
        with recording.phase("describe"):
            save = prepare_save(request, context, recording, agreement)
        capture = _Capture(save)
        try:
            with failing_before_claim(agreement):
                with recording.phase("wait_for_previous"):
                    runtime_of(context).saves.wait()
                if progress is not None:
                    progress.plan(save.nbytes)
                capture.view()
            _write(save, request.hooks.committed)
        finally:
            capture.close()
    if progress is not None:
        progress.end()


def begin_save(
    request: SaveRequest, context: Context, *, when_busy: Literal["wait", "queue"] | None = None
) -> SaveHandle:
    """Start a save, and return once the state may change. The save is written in the background.

    Args:
        request: the save.
        context: the options.
        when_busy: the behaviour while another save runs; None: the option of the context.

    Raises:
        CheckpointError: the save cannot start. The handle raises later errors.
    """
    runtime, progress = runtime_of(context), ByteProgress(request.hooks.progress)
    with _recorded(request, context, progress, in_background=True) as (recording, agreement):
        with failing_everywhere(agreement, "describe"), recording.phase("wait_for_previous"):
            if (when_busy or context.when_busy) == "wait":
                runtime.saves.wait()
            else:
                runtime.saves.wait_for_room()
        with recording.phase("describe"):
            save = prepare_save(request, context, recording, agreement)
        handle = SaveHandle(save.target.location.display, progress)
        memory = StagingMemory(runtime.staging, runtime.io_threads)
        capture, limit = _Capture(save), context.memory.save_bytes
        with failing_before_claim(agreement):
            try:
                progress.plan(save.nbytes)
                copies_first = limit is None and not _writes_while_copying(save)
                copies = capture.copy(memory, limit)
                if copies_first:
                    _finish_copies(copies, memory, recording)
            except BaseException:
                capture.close()
                memory.close()
                raise
        # This thread makes bounded copies, and the writer waits for them: the writer cannot run on this thread.
        inline = limit is None or not copies
        _write_in_background(save, capture, request.hooks.committed, memory, handle, inline=inline)
        if not copies_first:
            try:
                _finish_copies(copies, memory, recording)
            except BaseException as error:
                # The caller may change the state from here on, so the writer must not get arrays that are not copied.
                memory.cancel()
                for copy in copies:
                    copy.fail(error)
                handle.exception()  # marks the error of the writer as retrieved, so that it is not reported twice
                raise
        return handle


def prepare_save(request: SaveRequest, context: Context, recording: Recording, agreement: Agreement) -> Save:
    """Describe the values and the target of a save, and refuse values that cannot be saved. Every rank calls this.

    Writes nothing.

    Raises:
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: the values cannot be saved.
        CheckpointExistsError, InvalidLocationError: the target must not be replaced, or is not a valid location.
        ValueError, TypeError: invalid metadata, metrics, step, epoch or strategy.
        BackgroundSaveError: the error of an earlier save of this process was not retrieved. In a job, the save then
            fails on every rank.
    """
    runtime, size, strategy = runtime_of(context), agreement.size, request.strategy
    common: CommonTrees | None = None

    def decide() -> dict[str, Any]:
        """Choose the id and the time of the save, and find trees that differ between ranks. On the leader."""
        return {
            "own_names": target.keeps_others,
            "different": {} if common is None else common.compare(stage.payloads),
            "save_id": new_save_id(),
            "created": save_created(),
            "order": list(order),
        }

    with agreement.stage("describe", meaning=NOTHING_COMMITTED) as stage:
        stage.decide = decide
        runtime.saves.raise_unnoticed()
        info = request.notes.info()
        recording.step = info.progress.get("step")
        overwrite = request.destination.overwrite
        location = resolve_location(request.destination.location, runtime.storages, to_write=True)
        target = CommitTarget(location, overwrite, request.hooks.before_commit)
        descriptions = _describe_parts(request, context, agreement)
        if size > 1:
            from ckptcore.saving.common_trees import CommonTrees  # needed only in a job

            common = CommonTrees(descriptions, agreement, context)
        if not isinstance(request.values, OneTree):
            info = info._replace(members={description.name: description.member(size) for description in descriptions})
        order = SaveOrder()
        if agreement.rank == 0:
            _refuse_target(request, target, info, context)
            if request.hooks.order is not None:
                order = request.hooks.order()
            elif overwrite:
                order = next_order(target.location, overwrite)
        if common is not None:
            stage.payload = common.payload(info.members, strategy)

    decided = stage.decision
    recording.save_id = decided["save_id"]
    if common is not None:
        trees = common.merge(decided["different"], stage.payloads)
        descriptions = [trees.get(description.name, description) for description in descriptions]
    if decided["own_names"] and info.members is None:  # unique object names: the directory keeps its other files
        (tree,) = descriptions
        descriptions = [tree._replace(layout=tree.layout.with_own_names(decided["save_id"]) or tree.layout)]
    info = info._replace(save_id=decided["save_id"], created=decided["created"], order=SaveOrder(*decided["order"]))
    save = Save(target, info, (), strategy, agreement, recording, context)
    if (workers := runtime.workers()) is not None:
        strategy = workers.save_strategy(strategy)
    return strategy.prepare(SaveDraft(save, descriptions))


def _describe_parts(request: SaveRequest, context: Context, agreement: Agreement) -> Sequence[PartDescription]:
    """Describe the values, in the order of the request."""
    registry = runtime_of(context).registry
    if (workers := runtime_of(context).workers()) is not None:
        registry = registry.wrapping(workers.leaves_to_save)
    layout, placeholders = registry.layout(request.layout), request.strategy.takes_placeholders
    if isinstance(request.values, OneTree):
        values: Mapping[str, object] = {"": request.values.state}
    elif placeholders:
        raise ValueError(f"strategy={request.strategy!r} is for one tree, not for checkpointables. Nothing was written")
    else:
        values = dict(request.values)
        for name in values:
            check_name(name)
    replicas = None
    if agreement.size > 1:
        from ckptcore.saving.common_trees import share_replicas  # needed only in a job

        replicas = context.job.replicas if share_replicas(layout, request.strategy, registry) else None
    # Every process of a job uses the same order, because `state_dict` may be collective.
    by_name = {
        name: describe_part(
            name,
            values[name],
            layout,
            registry,
            rank=agreement.rank,
            size=agreement.size,
            replicas=replicas,
            placeholders=placeholders,
            merged=request.strategy.merges_keys,
        )
        for name in sorted(values)
    }
    return [by_name[name] for name in values]


def _refuse_target(request: SaveRequest, target: CommitTarget, info: CommitInfo, context: Context) -> None:
    """Refuse a location with a checkpoint that may not be replaced. Only the leader calls this."""
    if request.hooks.allowed is not None:
        request.hooks.allowed()
    refuse_inside(target.location)
    target.location.commit_method.refuse_place(target.location)
    if not request.strategy.checks_target:
        refuse_to_replace(target.location, target.overwrite, foreign_finder(context))
    if target.keeps_others:
        _refuse_fixed_names(target.location, runtime_of(context).registry.layout(request.layout), info)


def _refuse_fixed_names(location: Location, layout: Layout, info: CommitInfo) -> None:
    """Refuse a save that would replace a file with a fixed name in a directory that keeps its other files.

    Checks only the names that are known before the save writes. The commit checks all names.

    Raises:
        CheckpointExistsError
    """
    names = {name.removesuffix("/") for name in location.store.list_names()}
    taken = sorted(names & info.checkpoint_info.members.keys())
    if info.members is None and layout.with_own_names("tag") is None:
        with suppress(CorruptCheckpointError, UnsupportedVersionError):
            root = read_root(location.store)
            taken = sorted(root.objects)[:1] if isinstance(root, Root) and root.layout == layout.name else []
    if taken:
        from ckptcore.commit.overwriting import fixed_names  # only errors need it

        raise fixed_names(location.display, taken)


@contextmanager
def _recorded(
    request: SaveRequest, context: Context, progress: ByteProgress | None, *, in_background: bool = False
) -> Iterator[tuple[Recording, Agreement]]:
    """Record a save, and begin its exchanges. A background save that has started ends its recording itself."""
    refuse_in_signal_handler(f"the save to {request.destination.location}")
    runtime = runtime_of(context)
    # The key counts saves. Take it before anything can fail, so that the counts of all ranks stay equal.
    key = runtime.exchange_key(request.destination.exchange_name)
    location, job = shown_location(request.destination.location), runtime.job()
    step = request.notes.step
    recording = Recording("save", location, context.observers, step=step, rank=job.rank, progress=progress)
    try:
        with recording.phase("blocking"):
            yield recording, Agreement(job, key, recording)
    except BaseException as error:
        recording.finish(error=error)
        raise
    if not in_background:
        recording.finish()


def _writes_while_copying(save: Save) -> bool:
    """Return True if arrays are written while others are still being copied.

    True for remote storage: its writes wait for requests rather than for memory, and take longer than the copies. False
    for a disk: its writes would compete with the copies for the processors, and the caller would wait longer.
    """
    return requests_of(save.target.location.store).concurrency > 1


def _finish_copies(copies: Sequence[StateCopy], memory: StagingMemory, recording: Recording) -> None:
    """Wait for copies. This thread makes bounded copies, while the writer in the background writes them."""
    with recording.phase("copy") as phase:
        for copy in copies:
            copy.wait()
        phase.nbytes = memory.copied_bytes


def _write(save: Save, committed: Callable[[], None] | None, *, claimed: Callable[[], None] | None = None) -> None:
    """Write and commit the checkpoint, call `committed`, then write the further saves.

    A save in the background passes `claimed`, which is called once the location is claimed.
    """
    recording = save.recording
    try:
        write_save(save, claimed)
    except BaseException as error:
        recording.finish(error=error)
        raise
    if claimed is not None or save.further:  # further saves are separate operations
        recording.finish(sum([event.nbytes or 0 for event in recording.events if event.phase == "write"]))
    if committed is not None:
        committed()
    if save.further:
        save.strategy.after_commit(save, write_save)


def _write_in_background(
    save: Save,
    capture: _Capture,
    committed: Callable[[], None] | None,
    memory: StagingMemory,
    handle: SaveHandle,
    *,
    inline: bool,
) -> None:
    """Write the captured arrays in the background. Keeps no reference to the request, which refers to the state."""
    runtime = runtime_of(save.context)
    saves = [save, *save.further]
    # Only the leader, which commits, queues at the locations: ranks may be threads of one process, and would wait for
    # each other there.
    locations = [each.target.location.identity for each in saves] if save.agreement.rank == 0 else []
    # Import the modules of the commit on this thread: a process that is forked while another thread imports a module
    # inherits the unfinished import, and hangs if it imports the module too.
    for each in saves:
        _ = each.target.location.commit_method
    if save.agreement.size > 1:
        importlib.import_module("ckptcore.job.receipts")
        importlib.import_module("ckptcore.job.visibility")

    def work() -> None:
        try:
            _write(save, committed, claimed=handle._claimed.set)
        finally:
            capture.close()
            memory.close()
            if not save.context.memory.keep_staging:
                runtime.staging.release_unused()

    try:
        runtime.saves.run(handle, work, locations, inline=inline)
    except RuntimeError as error:
        capture.close()
        memory.close()
        with failing_before_claim(save.agreement):
            raise CheckpointError(
                f"cannot save to {save.target.location.display} in the background with MemoryOptions(save_bytes=...): "
                f"{error}. Call save, or leave out save_bytes, so that the whole state is copied. "
                f"{NOTHING_COMMITTED.capitalize()}"
            ) from error


def _view(boxes: StateBoxes) -> Sequence[Pending[HostArray]]:
    return boxes.handler.view_on_host(boxes.leaf, boxes.boxes)


class _Capture:
    """The copies of a state for a save and its further saves, or views in a blocking save."""

    def __init__(self, save: Save) -> None:
        """Prepare to capture the parts of a save. `view` or `copy` captures them."""
        self._save = save
        self._copies: list[StateCopy] = []
        self._elements: list[StateElements] = []

    def view(self) -> None:
        """Capture arrays without a copy, for a save that blocks until it is committed."""
        shared = StateElements(_view) if self._save.further else None

        def viewed(plan: WritePlan, boxes: Sequence[StateBoxes]) -> TreeCaptured:
            if shared is None:
                return TreeCaptured(ViewedSnapshot(plan, lambda item: _view(boxes[item])))
            start, release, unreleased = shared.use(boxes)
            return TreeCaptured(ViewedSnapshot(plan, start, release), unreleased=unreleased)

        self._capture(viewed, copied=False)
        for copy in self._copies:
            copy.wait()

    def copy(self, memory: StagingMemory, limit: int | None) -> Sequence[StateCopy]:
        """Start to copy every array.

        Args:
            memory: the memory of the copies.
            limit: maximum size of the copies in this process at a time, in bytes; None: no limit. With a limit, further
                saves copy again, because the first copy is freed by then.

        Returns:
            The copies, for `_finish_copies`. Once they are finished, the state may change.
        """

        def new_elements() -> StateElements:
            elements = StateElements(
                lambda boxes: boxes.handler.copy_to_host(boxes.leaf, boxes.boxes, memory), memory.release
            )
            self._elements.append(elements)
            return elements

        shared = new_elements()
        earlier: BoundedSnapshot | None = None

        def copied(plan: WritePlan, boxes: Sequence[StateBoxes]) -> TreeCaptured:
            nonlocal earlier
            start, release, unreleased = (shared if limit is None else new_elements()).use(boxes)
            if limit is None:
                copy: CopiedSnapshot | BoundedSnapshot = CopiedSnapshot(plan, start, release)
            else:
                copy = earlier = BoundedSnapshot(plan, start, release, limit, earlier)
            self._copies.append(copy)
            return TreeCaptured(copy, copy, unreleased)

        self._capture(copied, copied=True)
        return self._copies[:]

    def close(self) -> None:
        """Release everything. The traceback of an error would otherwise keep the parts in memory.

        Does not wait for copies: the caller closes their memory.
        """
        for elements in self._elements:
            elements.close()
        for save in (self._save, *self._save.further):
            for part in save.parts:
                part.close()
        for copy in self._copies:
            copy.end_writing()
        self._copies.clear()

    def _capture(self, capture: Callable[[WritePlan, Sequence[StateBoxes]], TreeCaptured], *, copied: bool) -> None:
        """Capture every part, then drop the references to the state.

        They are kept until the last part is captured: `StateElements` identifies leaves by `id`, and Python may reuse
        the id of a freed object.
        """
        if self._save.capture_elsewhere is not None:
            self._copies.append(self._save.capture_elsewhere(copied))
        parts = [part for save in (self._save, *self._save.further) for part in save.parts]
        for part in parts:
            source = part.source
            assert source is not None  # captured once
            if isinstance(source, FilesDescription):
                part.captured = source.capture()
            else:
                part.captured = capture(part.plan, [source.boxes(item.leaf, item.boxes) for item in part.plan.items])
        for part in parts:
            part.source = None
