"""Making a save durable: claim its location, write every part, and commit.

In a job of several processes every stage ends with an exchange: an error on one rank fails the save on all of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from ckptcore.commit.location import Location
from ckptcore.commit.occupants import Overwrite, is_leftover_name, read_root
from ckptcore.commit.root import ROOT_KEY, Claimed, Composite, Member, Role, Root, this_writer
from ckptcore.commit.root_json import encode_composite, encode_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CommitUnknownError, PluginError
from ckptcore.events import Recording
from ckptcore.io.background import SaveHandle
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import seen_by_all, sees_claim
from ckptcore.loading.opening import foreign_checkpoints
from ckptcore.loading.workers import WorkerOptions
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.transfer import Receipt
from ckptcore.model.tree import JSON
from ckptcore.planning import check_coverage
from ckptcore.protocols import About, Layout, MemberKind, StorageBackend, Transaction, WriteStore
from ckptcore.runtime import runtime_of
from ckptcore.saving.marking import mark_composite, mark_tree
from ckptcore.saving.parts import Captured, Part
from ckptcore.saving.worker_writes import HeldByWorkers
from ckptcore.timelines import timeline_to_json

if TYPE_CHECKING:
    from ckptcore.commit.sessions import PlannedSession
    from ckptcore.job.visibility import OnHosts
    from ckptcore.saving.updating import PlannedUpdate

__all__ = [
    "NOTHING_COMMITTED",
    "Described",
    "Recorder",
    "build_tree",
    "build_whole",
    "claim_for",
    "decode_written",
    "encode_written",
    "fail_before_claim",
    "fail_everywhere",
    "finish_part",
    "merge_objects",
    "persist",
    "put_root",
    "write_parts",
]

NOTHING_COMMITTED: Final = "nothing was committed"
"""What it means if a stage before the commit fails on any rank."""

logger = logging.getLogger("ckptcore.persisting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A save that was asked for and can go ahead: every rank has the same trees, and their layouts can store them.

    Attributes:
        location, overwrite, custom, metrics, progress: as asked.
        save_id: the save.
        created: when it began, ISO 8601 in UTC.
        parts: what this process writes.
        members: what the root lists, by name; None where the checkpoint is one tree.
        before_commit: called on the leader right before the commit; an error of it stops the save.
        agreement: with the other processes of the job.
        on_hosts: that it goes to a directory of each host; None: to one that all processes see.
        session: that it is a session of a partial save; None: a save of its own.
        update: that arrays of its tree are in other checkpoints; None: it has all of them.
        role: ``export`` for an export in the directory of its save. See `Root.role`.
    """

    location: Location
    overwrite: Overwrite
    custom: Mapping[str, JSON]
    metrics: Mapping[str, float]
    progress: Mapping[str, int]
    save_id: str
    created: str
    parts: Sequence[Part]
    members: Mapping[str, Member] | None
    before_commit: Callable[[], None] | None
    agreement: Agreement
    on_hosts: OnHosts | None = None
    session: PlannedSession | None = None
    update: PlannedUpdate | None = None
    role: Role = "checkpoint"

    @property
    def about(self) -> About:
        """What its layouts are told of it."""
        members: dict[str, MemberKind] = {
            member.directory(name, rank): member.kind
            for name, member in (self.members or {}).items()
            for rank in range(member.processes or 1)
        }
        return About(self.created, self.custom, self.metrics, members)


def fail_everywhere(agreement: Agreement, stage: str, error: BaseException) -> NoReturn:
    """Raise why this process cannot go on with a save, on the other ranks too: they wait for it to end this stage."""
    with agreement.stage(stage):
        raise error
    raise error  # the stage has raised it


def fail_before_claim(agreement: Agreement, error: BaseException) -> NoReturn:
    """Raise why this process cannot go on with a save that it has described; the other ranks hear it where they claim."""
    with agreement.stage("claim"), seen_by_all(agreement, "claimed", "", bool):
        raise error
    raise error  # the stage has raised it


def persist(
    described: Described,
    captured: Sequence[Captured],
    context: Context,
    recording: Recording,
    handle: SaveHandle | None = None,
    at_workers: HeldByWorkers | None = None,
) -> None:
    """Claim the location, write, and commit. On every rank; returns once the checkpoint is committed.

    Args:
        described: the save.
        captured: what each of its parts holds.
        context: options.
        recording: is told the phases.
        handle: counts the bytes written.
        at_workers: what workers of this controller hold, and write.

    Raises:
        CheckpointError: why it is not committed; then nothing of it is left, and what was there before still is.
        CommitUnknownError: if that cannot be told.
    """
    agreement = described.agreement
    claimed = Claimed(described.save_id, described.created)
    look = functools.partial(sees_claim, claimed, described.location)
    claim = None
    may_write = False
    try:
        with (
            agreement.stage("claim", meaning=NOTHING_COMMITTED),
            seen_by_all(agreement, "claimed", described.location.absolute, look),
        ):
            if agreement.rank == 0:
                with recording.phase("claim"):
                    claim = claim_for(described, claimed, context)
                    if agreement.size > 1 or at_workers is not None:
                        claim.show_claim()
        if claim is not None:
            store = claim.store
        else:
            store = described.location.commits.store_of(
                described.location, described.save_id, runtime_of(context).conditions
            )
        may_write = True
        try:
            with agreement.stage("write", meaning=NOTHING_COMMITTED) as stage:
                with recording.phase("write") as phase:
                    written = write_parts(described, captured, store, context, handle, at_workers)
                    phase.nbytes = sum(
                        record.size for part in written for receipt in part for record in receipt.objects
                    )
                common = [receipts for part, receipts in zip(described.parts, written, strict=True) if not part.own]
                if agreement.size > 1:
                    told = [receipt for (receipt,) in common]  # a job has no workers
                    stage.payload = encode_written(described, told)
        except Exception as error:
            if agreement.rank == 0 or not stage.done or stage.failed:
                raise
            # The leader may have this rank's receipts and go on without it hearing of that.
            _look_whether_committed(described, error)
            return
        try:
            with agreement.stage("commit") as end:
                if claim is not None:
                    parts = [part for part in described.parts if not part.own]
                    receipts = common if agreement.size == 1 else decode_written(described, stage.payloads)
                    with recording.phase("commit"):
                        claim.commit(*build_whole(described, claim.store, parts, receipts, context, recording))
        except Exception as error:
            if not end.done or 0 in end.failed:
                raise
            if agreement.rank == 0:
                logger.warning(
                    "%s is saved, but perhaps not all ranks know: %s: %s",
                    described.location.display, type(error).__name__, error,
                )  # fmt: skip
            else:
                _look_whether_committed(described, error)
    except BaseException as error:
        try:
            if claim is not None:
                claim.abort()
            elif may_write and agreement.rank != 0:
                _remove_abandoned(described)
        except CheckpointError as failure:
            # The error that stopped the save says more; the next save removes what is left.
            error.add_note(f"removing what was written failed too: {failure}")
        raise


def claim_for(described: Described, claimed: Claimed, context: Context) -> Transaction:
    """Begin the transaction of a save. See `CommitMethod.begin`."""
    return described.location.commits.begin(
        described.location, claimed, described.overwrite, runtime_of(context).conditions, foreign_checkpoints(context)
    )


def _remove_abandoned(described: Described) -> None:
    """Remove what this process wrote after the leader gave the save up, and removed what there was until then."""
    parent = described.location.parent
    root = read_root(described.location.store)
    if root is not None and not isinstance(root, Claimed) and root.save_id == described.save_id:
        return  # what the hidden directory holds may be what this save replaced
    names = [name.removesuffix("/") for name in parent.list_names() if name.endswith("/")]
    ours = [name for name in names if is_leftover_name(name) and f".{described.save_id}." in name]
    described.location.commits.sweep_names(ours)  # it stays where the leader still holds it


def _look_whether_committed(described: Described, error: Exception) -> None:
    """The exchange at the end of the commit, or before it, failed: only the root tells whether it happened."""
    try:
        root = read_root(described.location.store)
    except CheckpointError as unreadable:
        raise CommitUnknownError(
            f"whether the save to {described.location.display} committed is not known: {error}, and its root cannot be "
            f"read: {unreadable}"
        ) from error
    if root is None or isinstance(root, Claimed) or root.save_id != described.save_id:
        raise CommitUnknownError(
            f"the save to {described.location.display} is not committed, or not yet: {error}; look again before saving"
        ) from error


def write_parts(
    described: Described,
    captured: Sequence[Captured],
    store: StorageBackend,
    context: Context,
    handle: SaveHandle | None,
    at_workers: HeldByWorkers | None,
) -> list[Sequence[Receipt]]:
    """Write what this process and its workers write of every part; those that are its own it makes whole. Receipts by part."""
    if at_workers is None:
        receipts: list[Sequence[Receipt]] = [[one] for one in _write_here(described, captured, store, context, handle)]
    else:
        claimed = Claimed(described.save_id, described.created)
        writes = at_workers.begin_writing(described.location, claimed, described.parts, WorkerOptions.of(context))
        try:
            here = _write_here(described, captured, store, context, handle)
        except BaseException:
            writes.settle()  # what is aborted is removed, and nobody may write any more by then
            raise
        there = writes.receipts()
        if handle is not None:
            handle.count(sum(record.size for part in there for receipt in part for record in receipt.objects))
        receipts = [[own, *others] for own, others in zip(here, there, strict=True)]
    for part, of_part in zip(described.parts, receipts, strict=True):
        if part.own:
            inside = subdirectory(store, part.directory)
            put_root(inside, finish_part(described, part, of_part, _recorder(inside, context)))
    return receipts


def _write_here(
    described: Described,
    captured: Sequence[Captured],
    store: StorageBackend,
    context: Context,
    handle: SaveHandle | None,
) -> Sequence[Receipt]:
    """Write what this process writes of every part."""
    progress = handle.count if handle is not None else None
    receipts = []
    for part, held in zip(described.parts, captured, strict=True):
        inside = subdirectory(store, part.directory)
        recorder = ObjectRecorder(
            inside, runtime_of(context).io_threads, checksums=context.io.checksums, progress=progress
        )
        state = held.write(part, recorder)
        held.close()
        receipts.append(Receipt(part.plan.rank, part.plan.items, state, recorder.objects))
    return receipts


def put_root(store: StorageBackend, root: Root) -> None:
    """Put the root of a part that is one of several checkpointables."""
    data, tables = encode_root(root)
    for key, table in tables.items():
        store.put(key, table)
    store.put(ROOT_KEY, data)


class Recorder(WriteStore, Protocol):
    """What a layout writes through, that knows what it wrote."""

    @property
    def objects(self) -> Sequence[ObjectRecord]:
        """The objects that are complete."""
        ...


def finish_part(described: Described, part: Part, receipts: Sequence[Receipt], recorder: Recorder) -> Root:
    """Make what processes wrote of a part one whole; its root.

    Raises:
        CorruptCheckpointError: if what the processes wrote does not make up the arrays.
        PluginError: if two wrote one object.
    """
    tree = part.plan.tree
    check_coverage(tree, receipts)
    state = part.layout.finish(tree, receipts, recorder)
    return Root(
        save_id=described.save_id,
        created=described.created,
        writer=this_writer(),
        layout=part.layout.name,
        state=state,
        tree=replace(tree, aliases={**tree.aliases, **part.shared}) if part.shared else tree,
        objects=merge_objects(part.layout.name, receipts, recorder.objects),
        role=described.role if described.members is None else "member",
    )


def _recorder(store: StorageBackend, context: Context) -> ObjectRecorder:
    return ObjectRecorder(store, runtime_of(context).io_threads, checksums=context.io.checksums)


def merge_objects(
    layout: str, receipts: Sequence[Receipt], finished: Sequence[ObjectRecord]
) -> dict[str, ObjectRecord]:
    """By key, all objects of a tree.

    Args:
        layout: the name of the layout that wrote them.
        receipts: of the processes.
        finished: what the leader wrote when all had written.

    Raises:
        PluginError: two are one object.
    """
    objects: dict[str, ObjectRecord] = {}
    for records in (*[receipt.objects for receipt in receipts], finished):
        for record in records:
            if objects.setdefault(record.key, record) is not record:
                raise PluginError(
                    f"the layout {layout} wrote {record.key} twice, perhaps from several processes; the save is not committed"
                )
    return objects


def build_whole(
    described: Described,
    store: StorageBackend,
    parts: Sequence[Part],
    receipts: Sequence[Sequence[Receipt]],
    context: Context,
    recording: Recording,
) -> tuple[bytes, Mapping[str, bytes]]:
    """Finish the parts on the leader and build the root, for `Transaction.commit`. Receipts are by part, then by rank."""
    whole: Root | None = None
    for number, part in enumerate(parts):
        inside = subdirectory(store, part.directory)
        root = finish_part(described, part, receipts[number], _recorder(inside, context))
        if described.members is None:
            whole = root
        else:
            put_root(inside, root)
    if whole is not None:
        return build_tree(described, store, parts[0].layout, whole, context, recording)
    mark_composite([part.layout for part in described.parts if not part.copies], described.about, store, context)
    timeline = timeline_to_json(recording.events)
    if described.before_commit is not None:
        described.before_commit()
    composite = Composite(
        save_id=described.save_id,
        created=described.created,
        writer=this_writer(),
        members=described.members or {},
        custom=described.custom,
        metrics=described.metrics,
        timeline=timeline,
        progress=described.progress,
    )
    return encode_composite(composite)


def build_tree(
    described: Described, store: StorageBackend, layout: Layout, root: Root, context: Context, recording: Recording
) -> tuple[bytes, Mapping[str, bytes]]:
    """Complete the root of one tree on the leader, for `Transaction.commit`."""
    root = mark_tree(layout, root, described.about, store, context)
    timeline = timeline_to_json(recording.events)
    if described.before_commit is not None:
        described.before_commit()
    if described.update is not None:
        described.update.expect_bases()
        root = replace(root, tree=described.update.tree, references=described.update.references)
    root = replace(
        root,
        custom=described.custom,
        metrics=described.metrics,
        timeline=timeline,
        progress=described.progress,
    )
    return encode_root(root)


def _common_trees(described: Described) -> list[TreeMetadata]:
    """The trees that all processes write together."""
    return [part.plan.tree for part in described.parts if not part.own]


def encode_written(described: Described, receipts: Sequence[Receipt]) -> bytes:
    """What this process tells the leader of what it wrote: its receipts, by part."""
    from ckptcore.commit.receipts import encode_receipts  # only a job needs it

    return encode_receipts(_common_trees(described), receipts)


def decode_written(described: Described, payloads: Sequence[object]) -> list[list[Receipt]]:
    """By part and rank, what the processes of this job wrote."""
    from ckptcore.commit.receipts import decode_receipts  # only a job needs it

    trees = _common_trees(described)
    by_rank = [decode_receipts(trees, data) for data in payloads if isinstance(data, bytes)]
    return [[of_rank[number] for of_rank in by_rank] for number in range(len(trees))]
