"""Write a save and commit it: claim, write the parts, build the root, commit. `PlainSave` is the usual strategy.

In a job of several processes every stage ends with an exchange: an error on one rank fails the save on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, Protocol

from ckptcore.commit.location import Location
from ckptcore.commit.names import is_leftover_name
from ckptcore.commit.root import ROOT_KEY, Base, Claim, CompositeRoot, References, Root, this_writer
from ckptcore.commit.root_json import encode_root
from ckptcore.commit.stored_root import read_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CommitUnknownError, PluginError
from ckptcore.events import Recording, logger_named, timeline_to_json
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.io.snapshot import CountedSnapshot
from ckptcore.io.threads import SIZES, Sizes, sizes_of
from ckptcore.model.metadata import ObjectRecord
from ckptcore.model.transfer import Receipt, Segment
from ckptcore.planning import check_coverage
from ckptcore.protocols import (
    BaseReference,
    CheckpointInfo,
    Layout,
    SaveCommit,
    StorageAddress,
    StorageBackend,
    Transaction,
    WriteStore,
)
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import (
    NOTHING_COMMITTED,
    CommitInfo,
    Save,
    SaveDraft,
    SavePart,
    TreeCaptured,
    failing_before_claim,
    foreign_finder,
)

logger = logger_named("ckptcore.saving")


def write_save(save: Save, claimed: Callable[[], None] | None = None) -> None:
    """Claim the target, write, and commit. Return once the checkpoint is committed. Every rank calls this.

    Args:
        save: the save, with captured parts.
        claimed: called once the target is claimed.

    Raises:
        CheckpointError: nothing was committed, and the objects of this save are removed. An earlier checkpoint remains,
            unless ``overwrite`` allowed the save to replace it without an atomic operation.
        CommitUnknownError: the save may be committed.
    """
    agreement = save.agreement
    with failing_before_claim(agreement):
        commit = save.strategy.begin(save)
    try:
        with agreement.stage("claim", meaning=commit.meaning):
            commit.claim()
        if claimed is not None:
            claimed()
        try:
            with agreement.stage("write", meaning=commit.meaning) as stage:
                store = commit.store
                # The commit syncs the directories on the leader.
                deferred = store.defer_names("") if agreement.rank else nullcontext()
                with save.recording.phase("write") as phase, deferred:
                    write_parts(save, store)
                    if save.receive_elsewhere is not None:
                        save.receive_elsewhere(save)
                    phase.nbytes = sum(
                        [record.size for part in save.parts for receipt in part.receipts for record in receipt.objects]
                    )
                if agreement.size > 1:
                    stage.payload = save.encode_receipts()
        except Exception as error:
            if agreement.rank == 0 or not stage.done or stage.failed:
                raise
            # The leader may have received the receipts of this rank. It may then commit, and this rank is not notified.
            commit.settle(error)
            return
        try:
            with agreement.stage("commit", meaning=commit.commit_meaning) as end:
                commit.commit(stage.payloads)
        except Exception as error:
            if not end.done or 0 in end.failed:
                raise
            # The leader has committed. Errors of other ranks, and of the exchange after the commit, do not undo it.
            commit.settle(error)
        else:
            commit.settle(None)
    except BaseException as error:
        try:
            commit.abort()
        except CheckpointError as failure:
            # Report the error that stopped the save; the next save removes the objects that are left.
            error.add_note(f"removing the objects of the save failed too: {failure}")
        raise


def write_parts(save: Save, store: StorageBackend) -> None:
    """Write every part of this process, store the receipts, and finish the parts that only this process saves."""
    progress = save.recording.progress
    for part in save.parts:
        inside, captured, moved = subdirectory(store, part.directory), part.captured, None
        assert captured is not None  # captured before it is written
        counted = captured
        if progress is not None and isinstance(captured, TreeCaptured):  # files are not counted
            counted, moved = TreeCaptured(CountedSnapshot(captured.snapshot, progress)), progress.move
        recorder = recorder_of(inside, save.context, moved, sizes_of(part.plan))
        state = counted.write(part, recorder)
        captured.close()  # frees the copies of this part before the next part is written
        part.receipts = [Receipt(part.plan.rank, part.plan.items, state, recorder.objects)]
        if part.own:
            put_root(inside, finish_part(save.info, part, recorder_of(inside, save.context)))


@dataclass(frozen=True, slots=True)
class PlainSave:
    """Write the whole state, and commit it at one location. See `ckptcore.protocols.SaveStrategy`."""

    takes_placeholders: ClassVar[bool] = False
    merges_keys: ClassVar[bool] = False
    checks_target: ClassVar[bool] = False
    layouts: ClassVar[Sequence[str | Layout]] = ()
    signature: ClassVar[str] = ""
    adds_files: ClassVar[bool] = False
    """True if the strategy writes files next to checkpointables. The leader then lists these files for the root."""

    def prepare(self, draft: SaveDraft) -> Save:
        """Plan the parts."""
        with failing_before_claim(draft.save.agreement):
            return draft.plan(self)

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of a save."""
        return PlainCommit(save)

    def after_commit(self, save: Save, write: Callable[[Save], None]) -> None:
        """Write no further saves."""


class PlainCommit:
    """The commit of a save. The leader claims the location for all ranks. See `ckptcore.protocols.SaveCommit`."""

    meaning = NOTHING_COMMITTED
    commit_meaning = ""

    def __init__(self, save: Save) -> None:
        """Create the commit of a save. Claims nothing yet."""
        self._save = save
        self._claim: Transaction | None = None
        self._claimed_store: StorageBackend | None = None

    def claim(self) -> None:
        """Claim the location on the leader. On other ranks, check that the claim is visible."""
        location, agreement = self._save.target.location, self._save.agreement
        if agreement.size == 1:
            self._begin_transaction()
            return
        from ckptcore.job.visibility import seen_by_all, sees_claim  # needed only in a job

        is_visible = functools.partial(sees_claim, self._save.info.claimed, location)
        with seen_by_all(agreement, "claimed", location.absolute, is_visible):
            if agreement.rank == 0:
                self._begin_transaction()

    def _begin_transaction(self) -> None:
        save, target = self._save, self._save.target
        self._expect_bases()
        find_foreign = foreign_finder(save.context)
        with save.recording.phase("claim"):
            method = target.location.commit_method
            self._claim = method.begin(target.location, save.info.claimed, target.overwrite, find_foreign)
            self._claim.expect_distinct(functools.partial(_known_keys, save))
            if save.has_other_writers:
                self._claim.show_claim()

    def _expect_bases(self) -> None:
        """Check, on the leader, that the bases of layouts of differences exist: otherwise nothing could be loaded.

        Raises:
            CheckpointError
            PluginError: a layout was written for an earlier protocol, where `differences` was a boolean.
        """
        save = self._save
        for part in save.parts:
            reference = None if part.is_files else part.layout.capabilities.differences
            if reference is None:
                continue
            if not isinstance(reference, BaseReference):
                raise PluginError(
                    f"the layout {part.layout.name!r} has {reference!r} as capability `differences`: expected a "
                    f"`BaseReference`, or None: update it, or pass another layout. {NOTHING_COMMITTED.capitalize()}"
                )
            from ckptcore.opening.bases import expect_base  # only layouts of differences need it

            expect_base(save.target.location, reference, save.context)

    @property
    def store(self) -> StorageBackend:
        """The storage of the claim."""
        if self._claim is not None:
            return self._claim.store
        if self._claimed_store is None:
            location = self._save.target.location
            self._claimed_store = location.commit_method.store_of(location, self._save.info.save_id, is_new=True)
        return self._claimed_store

    def commit(self, payloads: Sequence[object]) -> None:
        """On the leader, build the root and commit it. Does nothing on other ranks."""
        if self._claim is None:
            return
        save = self._save
        if save.agreement.size > 1:
            save.take_receipts(payloads)
        with save.recording.phase("commit"):
            root = build_root(save.info, save.parts, self._claim.store, save.context, save.recording)
            if isinstance(root, CompositeRoot) and isinstance(save.strategy, PlainSave) and save.strategy.adds_files:
                root = replace(root, files=_files_beside(root, self._claim.store))
            if save.target.before_commit is not None:
                save.target.before_commit()
            self._claim.commit(*encode_root(self._completed(root)))

    def _completed(self, root: Root | CompositeRoot) -> Root | CompositeRoot:
        """Return the root to commit. Strategies override it."""
        return root

    def settle(self, error: Exception | None) -> None:
        """Handle an error that may not have prevented the commit. Do nothing without an error.

        The leader has committed, and logs a warning. Other ranks check that the save is committed.
        """
        location = self._save.target.location
        if error is None:
            return
        if self._claim is not None:
            logger.warning(
                "%s is saved, but other ranks may not have received the result: %s: %s",
                location.display,
                type(error).__name__,
                error,
            )
        else:
            _expect_committed(location, self._save.info.save_id, error)

    def abort(self) -> None:
        """Remove the objects of the save. On other ranks, remove objects written after the leader's removal."""
        if self._claim is not None:
            self._claim.abort()
        elif self._claimed_store is not None:
            _remove_abandoned(self._save.target.location, self._save.info.save_id)


def _known_keys(save: Save) -> Iterator[str]:
    """Yield the keys that the names of checkpointables and arrays determine, which are known before the save writes."""
    yield ROOT_KEY
    yield from save.info.checkpoint_info.members
    for part in save.parts:
        prefix = f"{part.directory}/" if part.directory else ""
        for name in part.layout.names_in_keys(part.plan):
            yield prefix + name


def _expect_committed(location: Location, save_id: str, error: Exception) -> None:
    """Check that the root has the save id. Called if the exchange after the commit failed."""
    try:
        root = read_root(location.store)
    except CheckpointError as unreadable:
        outcome = f"the save may be committed: {error}. Its root cannot be read: {unreadable}"
    else:
        if root is not None and not isinstance(root, Claim) and root.save_id == save_id:
            return
        outcome = f"the save failed, or is not committed yet: {error}"
    raise CommitUnknownError(f"{location.display}: {outcome}. Read the checkpoint again before you save") from error


def _remove_abandoned(location: Location, save_id: str) -> None:
    """Remove the objects that this process wrote after the leader aborted the save."""
    root = read_root(location.store)
    if root is not None and not isinstance(root, Claim) and root.save_id == save_id:
        return  # the hidden directory may contain the checkpoint that this save replaced
    names = [name.removesuffix("/") for name in location.parent.list_names() if name.endswith("/")]
    ours = [name for name in names if is_leftover_name(name) and f".{save_id}." in name]
    location.commit_method.sweep_names(ours)  # skips a directory that the leader still locks


class _MetadataStore:
    """A `WriteStore` for metadata files of a layout. Refuses reserved and existing keys before they are written."""

    def __init__(self, layout: str, recorder: ObjectRecorder, taken: Collection[str]) -> None:
        self._layout = layout
        self._recorder = recorder
        self._taken = taken

    @property
    def address(self) -> StorageAddress | None:
        """See `WriteStore`."""
        return self._recorder.address

    def put(self, key: str, data: bytes) -> None:
        """See `WriteStore`."""
        self._recorder.put(self._checked(key), data)

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """See `WriteStore`."""
        self._recorder.write(self._checked(key), segments)

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """See `WriteStore`."""
        self._recorder.write_many((self._checked(key), segments) for key, segments in objects)

    def _checked(self, key: str) -> str:
        above = key.partition("/")[0]
        if above.startswith("checkpoint.") or key in self._taken or above in self._taken:
            raise PluginError(
                f"the layout {self._layout} may not write the metadata file {key}: it must be a new object outside "
                "the directories of checkpointables, and names that begin with 'checkpoint.' are reserved. The save "
                "is not committed"
            )
        return key


def _write_metadata(
    layouts: Iterable[Layout], info: CheckpointInfo, store: StorageBackend, context: Context, taken: Iterable[str]
) -> Mapping[str, ObjectRecord]:
    """Write the metadata files of layouts into the directory of a checkpoint. Return their records by key.

    Args:
        layouts: the layouts. If several have the same name, only one of them writes.
        info: the checkpoint.
        store: the storage of the claim.
        context: the options.
        taken: the keys of existing objects and directories of the checkpoint.
    """
    names, written = set(taken), dict[str, ObjectRecord]()
    for layout in {layout.name: layout for layout in layouts}.values():
        recorder = recorder_of(store, context)
        layout.write_metadata_files(info, _MetadataStore(layout.name, recorder, names))
        records = {record.key: record for record in recorder.objects}
        written.update(records)
        names.update(records)
    return written


def _files_beside(root: CompositeRoot, store: StorageBackend) -> tuple[str, ...]:
    """Return the keys of the files that the processes of a save wrote next to its checkpointables."""
    files: list[str] = []
    for name in store.list_names():
        if not root.has_directory(name) and name != ROOT_KEY:
            files += store.list(name.removesuffix("/")) if name.endswith("/") else [name]
    return tuple(files)


class Recorder(WriteStore, Protocol):
    """A `WriteStore` that records the objects that a layout wrote."""

    @property
    def objects(self) -> Sequence[ObjectRecord]:
        """The complete objects."""
        ...


def recorder_of(
    store: StorageBackend, context: Context, progress: Callable[[int], None] | None = None, sizes: Sizes = SIZES
) -> ObjectRecorder:
    """Return a recorder over a storage. `progress` is called with the bytes of arrays in each write."""
    threads, checksums = runtime_of(context).io_threads, context.io.checksums
    return ObjectRecorder(store, threads, checksums=checksums, progress=progress, sizes=sizes)


def put_root(store: StorageBackend, root: Root) -> None:
    """Write the root of one of several checkpointables."""
    data, tables = encode_root(root)
    for key, table in tables.items():
        store.put(key, table)
    store.put(ROOT_KEY, data)


def finish_part(info: CommitInfo, part: SavePart, recorder: Recorder) -> Root:
    """Check that the receipts cover the arrays, finish the part with its layout, and return its root.

    Raises:
        CorruptCheckpointError: the boxes that were written leave a gap or overlap.
        PluginError: two processes wrote one object, or the layout has a base without the capability `differences`.
    """
    tree = part.plan.tree
    check_coverage(tree, part.receipts)
    name, index = ("", None) if part.is_files else (part.layout.name, part.layout.index_name)
    state = part.receipts[0].state if part.is_files else part.layout.finish(tree, part.receipts, recorder)
    writer = "the object" if part.is_files else f"the layout {name}"
    objects = merge_objects(writer, part.receipts, recorder.objects)
    base = None if part.is_files else part.layout.base(tree, state)
    if base is not None and part.layout.capabilities.differences is None:
        raise PluginError(
            f"the layout {name} wrote differences from {base.name!r}, but does not have the capability `differences`: "
            f"report this to its author, and pass another layout. {NOTHING_COMMITTED.capitalize()}"
        )
    return Root(
        save_id=info.save_id,
        created=info.created,
        writer=this_writer(),
        layout=name,
        state=state,
        tree=tree,
        # The index is replaced after the root, so the root must not state its size and checksums.
        objects={key: record for key, record in objects.items() if key != index},
        role=info.role if info.members is None else "member",
        references=References() if base is None else References((Base(base.name, base.save_id),)),
        index=index or "",
    )


def merge_objects(
    writer: str, receipts: Sequence[Receipt], finished: Sequence[ObjectRecord]
) -> dict[str, ObjectRecord]:
    """Return all objects of a tree by key.

    Args:
        writer: the writer of the objects, for errors.
        receipts: the receipts of all processes.
        finished: the objects that `Layout.finish` wrote.

    Raises:
        PluginError: an object was written twice.
    """
    objects: dict[str, ObjectRecord] = {}
    for record in chain(*[receipt.objects for receipt in receipts], finished):
        if objects.setdefault(record.key, record) is not record:
            raise PluginError(
                f"{writer} wrote {record.key} twice, perhaps from several processes; the save is not committed"
            )
    return objects


def build_root(
    info: CommitInfo, parts: Sequence[SavePart], store: StorageBackend, context: Context, recording: Recording
) -> Root | CompositeRoot:
    """Finish every part that the processes wrote together, and return the root of the checkpoint.

    Only the leader calls this.

    Args:
        info: the content of the root besides trees and objects.
        parts: the parts, with the receipts of all ranks.
        store: the storage of the claim.
        context: the options.
        recording: provides the events of the timeline.
    """
    for part in parts:
        if part.own:
            continue
        inside = subdirectory(store, part.directory)
        root = finish_part(info, part, recorder_of(inside, context))
        if info.members is None:
            return complete_tree(info, part.layout, root, store, context, recording)
        put_root(inside, root)
    described = info.checkpoint_info
    layouts = [part.layout for part in parts if part.directory in described.members]
    files = tuple(_write_metadata(layouts, described, store, context, described.members))
    return CompositeRoot(
        save_id=info.save_id,
        created=info.created,
        writer=this_writer(),
        order=info.order,
        members=info.members or {},
        files=files,
        default=info.default,
        custom=info.custom,
        metrics=info.metrics,
        timeline=timeline_to_json(recording.events),
        progress=info.progress,
    )


def complete_tree(
    info: CommitInfo, layout: Layout, root: Root, store: StorageBackend, context: Context, recording: Recording
) -> Root:
    """Write the metadata files of a checkpoint that is one tree, and return its root with `info`."""
    written = _write_metadata([layout], info.checkpoint_info, store, context, root.objects)
    return replace(
        root,
        objects={**root.objects, **written},
        order=info.order,
        custom=info.custom,
        metrics=info.metrics,
        timeline=timeline_to_json(recording.events),
        progress=info.progress,
    )
