"""Finalizing a partial save: commit of all sessions as one checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from ckptcore.commit.location import Location, LocationLike, resolve_location, shown_location
from ckptcore.commit.root import PARTIAL_KEY, PartialSave
from ckptcore.commit.root_json import encode_root, summarize_root
from ckptcore.commit.stored_root import root_bytes
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    TreeMismatchError,
    converts_errors,
)
from ckptcore.events import Recording, logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ItemColumns, Receipt, WritePlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning.partition import WrittenBoxes, covers_exactly
from ckptcore.protocols import Layout, StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import NOTHING_COMMITTED, CommitInfo, SavePart, check_custom
from ckptcore.saving.writing import complete_tree, finish_part, recorder_of
from ckptcore_incremental.session_claims import remove_unneeded, resume_sessions
from ckptcore_incremental.session_tables import BEGIN_AGAIN, merge_sessions, read_sessions, session_key
from ckptcore_incremental.sessions import expect_same_layout, expect_session_support

_SHOWN: Final = 20
"""Maximum number of arrays in an error message."""

logger = logger_named("ckptcore.saving")


def finalize_sessions(
    location: LocationLike,
    layout: str | Layout | None,
    custom: Mapping[str, JSON] | None,
    context: Context,
    wait: Callable[[], None],
) -> None:
    """Commit the sessions of a partial save as one checkpoint. Every rank must call this; the leader does the work.

    Args:
        location: path or URL of the partial save.
        layout: its layout; None for the layout of the sessions.
        custom: user metadata.
        context: options.
        wait: waits for the sessions of this process. If a session failed on one rank, every rank
            raises an error.
    """
    # Compute the key first: it counts the operations at this location, and every rank must count
    # this one, even if a later step fails on some ranks.
    key = runtime_of(context).exchange_key(location)
    job = runtime_of(context).job()
    recording = Recording("save", shown_location(location), context.observers, rank=job.rank)
    try:
        agreement = Agreement(job, key, recording)
        with agreement.stage("sessions", meaning=NOTHING_COMMITTED):
            wait()
        with agreement.stage("finalize", meaning=NOTHING_COMMITTED):
            checked = check_custom(custom)
            chosen = None if layout is None else runtime_of(context).registry.layout(layout)
            if agreement.rank == 0:
                resolved = resolve_location(location, runtime_of(context).storages, to_write=True)
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
    validate = functools.partial(_validate_sessions, location, layout, context)
    try:
        with recording.phase("claim"):
            partial, claim, (layout, tree, receipts) = resume_sessions(location, validate)
    except CheckpointNotFoundError:
        if _remove_tables_of_committed(location):
            return  # another process committed the checkpoint, and was killed before it removed the tables
        raise
    recording.save_id = partial.save_id
    try:
        with recording.phase("commit"):
            tables = [session.key for session in partial.sessions]
            objects = {record.key for receipt in receipts for record in receipt.objects}
            remove_unneeded(claim.store, objects | set(tables))
            info = CommitInfo(save_id=partial.save_id, created=partial.created, custom=custom)
            part = SavePart("", layout, WritePlan(tree, (), 0, 1, partial.save_id), receipts=receipts)
            with _errors_as_corruption(location):
                root = finish_part(info, part, recorder_of(claim.store, context))
            claim.commit(*encode_root(complete_tree(info, layout, root, claim.store, context, recording)))
    except BaseException:
        claim.leave()
        raise
    _remove_tables(location, partial)


def _validate_sessions(
    location: Location, layout: Layout | None, context: Context, partial: PartialSave, store: StorageBackend
) -> tuple[Layout, TreeMetadata, Sequence[Receipt]]:
    """Check that the sessions can be finalized. Return the layout, the merged tree and all receipts. Writes nothing.

    Raises:
        CheckpointNotFoundError: if no session is complete.
        TreeMismatchError: if arrays are incomplete.
        CheckpointError: if the layout differs from that of the sessions, or cannot store the tree.
        CorruptCheckpointError: if the tables of the sessions cannot be read.
        UnsupportedVersionError: if another version of ckptcore wrote them.
    """
    layout = runtime_of(context).registry.layout(partial.layout) if layout is None else layout
    expect_session_support(layout)
    expect_same_layout(location, partial, layout)
    if not partial.sessions:
        raise CheckpointNotFoundError(
            f"the partial save {location.display} has no complete session: save with ckptcore.partial(...).save "
            "first, or remove it with ckptcore.delete"
        )
    sessions = read_sessions(store, partial)
    with _errors_as_corruption(location):
        tree, receipts = merge_sessions(sessions, layout)
    _expect_complete_arrays(tree, receipts)
    layout.check(tree, partial.ranks)
    return layout, tree, receipts


@converts_errors
def _errors_as_corruption(location: Location) -> Iterator[None]:
    """Convert errors that a layout raises for hostile receipts.

    Unlike the receipts of a running save, these receipts were read from the storage.

    Raises:
        CorruptCheckpointError: in place of such an error.
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
            f"{location.display}: the tables of its sessions are inconsistent: {error!r}; restore them from a copy, "
            f"or {BEGIN_AGAIN}"
        ) from error


def _expect_complete_arrays(tree: TreeMetadata, receipts: Sequence[Receipt]) -> None:
    """Check that the sessions wrote every element of every array.

    Raises:
        TreeMismatchError: names the incomplete arrays.
    """
    written = WrittenBoxes(tree.leaves, [ItemColumns.of(tree.leaves, receipt.items) for receipt in receipts])
    lacking = []
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord) or leaf in tree.aliases:
            continue
        starts, stops = written.bounds(leaf)
        if covers_exactly(record.spec.shape, starts, stops):
            continue
        written_elements = int((stops - starts).prod(axis=1).sum())
        if written_elements < record.spec.size:  # otherwise boxes overlap: the check before the commit reports it
            lacking.append(
                f"{format_path(tree.paths[leaf])} ({record.spec}) has {written_elements} of its {record.spec.size} "
                "elements"
            )
    if lacking:
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        raise TreeMismatchError(
            f"arrays are incomplete: {'; '.join(lacking[:_SHOWN])}{more}. Save the missing elements in another "
            "session, then finalize again",
            lacking,
        )


def _remove_tables(location: Location, partial: PartialSave) -> None:
    """Remove the tables of the sessions, which the root of the checkpoint replaces."""
    try:
        location.store.delete([*[session.key for session in partial.sessions], PARTIAL_KEY])
    except StorageError as error:
        logger.warning("%s is committed, but the tables of its sessions cannot be removed: %s", location.display, error)


def _remove_tables_of_committed(location: Location) -> bool:
    """Remove the tables of sessions of a committed checkpoint. Return True if any existed."""
    data = root_bytes(location.store)
    if data is None:
        return False
    summary = summarize_root(data)
    if not summary.committed:
        return False  # the tables belong to a save that is not committed
    prefix = session_key(summary.save_id, 0).removesuffix("0")
    left = [key for key in location.store.list_names() if key.startswith(prefix) or key == PARTIAL_KEY]
    location.store.delete(left)
    return bool(left)
