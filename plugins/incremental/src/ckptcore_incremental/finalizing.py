"""Finalizing a partial save: what its sessions wrote becomes one committed checkpoint."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckptcore.commit.location import Location, LocationLike, resolve_location
from ckptcore.commit.root import PARTIAL_KEY, PartialSave
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.target import remove_debris, root_bytes
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    TreeMismatchError,
)
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ItemColumns, Receipt, WritePlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning.partition import WrittenBoxes, makes_up
from ckptcore.protocols import Layout, StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import SavePart
from ckptcore.saving.requests import NOTHING_COMMITTED, CommitInfo, check_custom
from ckptcore.saving.roots import complete_tree, encode, finish_part, recorder_of
from ckptcore_incremental.session_tables import read_sessions, session_key, unite_sessions
from ckptcore_incremental.sessions import expect_same_layout, expect_sessions

__all__ = ["finalize_sessions"]

_SHOWN = 20

logger = logging.getLogger("ckptcore.saving")


def finalize_sessions(
    location: LocationLike,
    layout: str | Layout | None,
    custom: Mapping[str, JSON] | None,
    context: Context,
    wait: Callable[[], None],
) -> None:
    """Commit the sessions of a partial save as one checkpoint. Every rank calls this; the leader does the work.

    Args:
        location: the path or URL of the partial save.
        layout: its layout; None: that of the sessions.
        custom: metadata of the user's.
        context: options.
        wait: waits for the sessions of this process. An error of a session on one rank is an error on all ranks.
    """
    key = runtime_of(context).exchange_key(location)  # before anything can fail: every rank counts it
    job = runtime_of(context).job()
    recording = Recording("save", str(location), context.observers, rank=job.rank)
    try:
        agreement = Agreement(job, key, recording)
        with agreement.stage("sessions", meaning=NOTHING_COMMITTED):
            wait()
        with agreement.stage("finalize", meaning=NOTHING_COMMITTED):
            checked = check_custom(custom)
            chosen = None if layout is None else runtime_of(context).registry.layout(layout)
            if agreement.rank == 0:
                durable = context.durability == "full"
                resolved = resolve_location(
                    location, runtime_of(context).registry, durable=durable, config=context.storage
                )
                _finalize(resolved, chosen, checked, context, recording)
    except BaseException as error:
        recording.finish(error=error)
        raise
    recording.finish()


def _finalize(
    location: Location,
    layout: Layout | None,
    custom: Mapping[str, JSON],
    context: Context,
    recording: Recording,
) -> None:
    examined = functools.partial(_examine, location, layout, context)
    try:
        with recording.phase("claim"):
            partial, claim, (layout, tree, receipts) = location.commits.resume_sessions(
                location, examined, runtime_of(context).conditions
            )
    except CheckpointNotFoundError:
        if _remove_tables_of_committed(location):
            return  # a process that finalized it was killed right after the commit
        raise
    recording.save_id = partial.save_id
    try:
        with recording.phase("commit"):
            tables = [session.key for session in partial.sessions]
            remove_debris(claim.store, {record.key for one in receipts for record in one.objects} | set(tables))
            info = CommitInfo(save_id=partial.save_id, created=partial.created, custom=custom)
            part = SavePart("", layout, WritePlan(tree, (), 0, 1, partial.save_id), receipts=receipts)
            with _reported_as_damage(location):
                root = finish_part(info, part, recorder_of(claim.store, context))
            claim.commit(*encode(complete_tree(info, layout, root, claim.store, context, recording)))
    except BaseException:
        claim.leave()
        raise
    _remove_tables(location, partial)


def _examine(
    location: Location, layout: Layout | None, context: Context, partial: PartialSave, store: StorageBackend
) -> tuple[Layout, TreeMetadata, Sequence[Receipt]]:
    """Return the layout, the tree and the receipts of all sessions, if they can be finalized. Writes nothing.

    Raises:
        CheckpointNotFoundError: no session is complete.
        TreeMismatchError: arrays are not whole.
        CheckpointError: the layout is another one, or cannot store this.
        CorruptCheckpointError: the tables of the sessions cannot be read.
    """
    layout = runtime_of(context).registry.layout(partial.layout) if layout is None else layout
    expect_sessions(layout)
    expect_same_layout(location, partial, layout)
    if not partial.sessions:
        raise CheckpointNotFoundError(
            f"no session of the partial save to {location.display} is complete: save with ckptcore.partial(...).save "
            "first, or remove it with ckptcore.delete"
        )
    sessions = read_sessions(store, partial)
    with _reported_as_damage(location):
        tree, receipts = unite_sessions(sessions, layout)
    _expect_whole(tree, receipts)
    layout.check(tree, partial.ranks)
    return layout, tree, receipts


@contextmanager
def _reported_as_damage(location: Location) -> Iterator[None]:
    """Report errors that hostile receipts cause in a layout as damage: these receipts come from the storage, not from a job.

    Raises:
        CorruptCheckpointError
    """
    try:
        yield
    except CheckpointError:
        raise
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
        AssertionError,
    ) as error:
        raise CorruptCheckpointError(
            f"what the sessions at {location.display} say that they wrote cannot be put together: {error!r}; delete "
            "the partial save and begin again"
        ) from error


def _expect_whole(tree: TreeMetadata, receipts: Sequence[Receipt]) -> None:
    """Make sure that the sessions wrote every element of every array.

    Raises:
        TreeMismatchError: names the incomplete arrays.
    """
    written = WrittenBoxes(tree.leaves, [ItemColumns.of(tree.leaves, receipt.items) for receipt in receipts])
    lacking = []
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord) or leaf in tree.aliases:
            continue
        starts, stops = written.bounds(leaf)
        if makes_up(record.spec.shape, starts, stops):
            continue
        there = int((stops - starts).prod(axis=1).sum())
        if there < record.spec.size:  # else the check before the commit says what is wrong
            lacking.append(
                f"{format_path(tree.paths[leaf])} ({record.spec}) has {there} of its {record.spec.size} elements"
            )
    if lacking:
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        raise TreeMismatchError(
            f"arrays are not whole yet: {'; '.join(lacking[:_SHOWN])}{more}. Save the rest in a further session, "
            "then finalize again",
            lacking,
        )


def _remove_tables(location: Location, partial: PartialSave) -> None:
    """Remove the tables of the sessions; the root of the checkpoint replaces them."""
    try:
        location.store.delete([*[session.key for session in partial.sessions], PARTIAL_KEY])
    except StorageError as error:
        logger.warning("%s is committed, but what sessions left cannot be removed: %s", location.display, error)


def _remove_tables_of_committed(location: Location) -> bool:
    """Remove the tables of sessions next to a committed root. Return whether any existed."""
    data = root_bytes(location.store)
    if data is None:
        return False
    summary = summarize_root(data)
    if not summary.committed:
        return False  # of sessions that are not complete
    prefix = session_key(summary.save_id, 0).removesuffix("0")
    left = [key for key in location.store.list_names() if key.startswith(prefix) or key == PARTIAL_KEY]
    location.store.delete(left)
    return bool(left)
