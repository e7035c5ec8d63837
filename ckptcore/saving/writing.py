"""The stages of a save that claim its target, write every part and commit, and `PlainSave`, the usual strategy.

In a job of several processes every stage ends with an exchange: an error on one rank fails the save on all of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from ckptcore.commit.location import Location
from ckptcore.commit.root import Claim, Composite, Root
from ckptcore.commit.root_json import encode_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.commit.target import is_leftover_name, read_root
from ckptcore.errors import CheckpointError, CommitUnknownError
from ckptcore.io.background import SaveHandle
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.job.visibility import seen_by_all, sees_claim
from ckptcore.model.transfer import Receipt
from ckptcore.protocols import HeldWork, SaveCommit, StorageBackend, Transaction
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import NOTHING_COMMITTED, Save, SaveDraft, fail_before_claim, foreign_checkpoints
from ckptcore.saving.roots import build_root, finish_part, put_root, recorder_of

__all__ = ["PlainCommit", "PlainSave", "write_parts", "write_save"]

logger = logging.getLogger("ckptcore.saving")


def write_save(save: Save, handle: SaveHandle | None = None, at_workers: HeldWork[Save] | None = None) -> None:
    """Claim the target, write, and commit. On every rank; returns once the checkpoint is committed.

    Args:
        save: the save, with what its parts captured.
        handle: counts the bytes written.
        at_workers: what workers of this controller hold; None if they write none of the save.

    Raises:
        CheckpointError: nothing was committed, and the objects of this save are removed. An earlier checkpoint stays.
        CommitUnknownError: the save may be committed.
    """
    agreement = save.agreement
    try:
        commit = save.strategy.begin(save)
    except BaseException as error:  # noqa: BLE001  # sent to the other ranks, then raised
        fail_before_claim(agreement, error)
    try:
        with agreement.stage("claim", meaning=commit.meaning):
            commit.claim()
        try:
            with agreement.stage("write", meaning=commit.meaning) as stage:
                store = commit.store
                with save.recording.phase("write") as phase:
                    write_parts(save, store, handle, at_workers)
                    phase.nbytes = sum(
                        [record.size for part in save.parts for receipt in part.receipts for record in receipt.objects]
                    )
                if agreement.size > 1:
                    stage.payload = save.encode_receipts()
        except Exception as error:
            if agreement.rank == 0 or not stage.done or stage.failed:
                raise
            # The leader may have the receipts of this rank, and commit although this rank cannot know it.
            commit.settle(error)
            return
        try:
            with agreement.stage("commit", meaning=commit.commit_meaning) as end:
                commit.commit(stage.payloads)
        except Exception as error:
            if not end.done or 0 in end.failed:
                raise
            commit.settle(error)
        else:
            commit.settle(None)
    except BaseException as error:
        try:
            commit.abort()
        except CheckpointError as failure:
            # The error that stopped the save says more; the next save removes what is left.
            error.add_note(f"removing what was written failed too: {failure}")
        raise


def write_parts(
    save: Save, store: StorageBackend, handle: SaveHandle | None, at_workers: HeldWork[Save] | None
) -> None:
    """Write the plans of this process and its workers, keep the receipts, and finish the parts of this process."""
    if at_workers is None:
        _write_here(save, store, handle)
    else:
        writes = at_workers.write(save)
        try:
            _write_here(save, store, handle)
        except BaseException:
            with suppress(Exception):  # an abort removes what was written: no worker may write after it
                writes.result()
            raise
        there = writes.result()
        if handle is not None:
            handle.count(sum(record.size for part in there for receipt in part for record in receipt.objects))
        for part, receipts in zip(save.parts, there, strict=True):
            part.receipts = [*part.receipts, *receipts]
    for part in save.parts:
        if part.own:
            inside = subdirectory(store, part.directory)
            put_root(inside, finish_part(save.info, part, recorder_of(inside, save.context)))


def _write_here(save: Save, store: StorageBackend, handle: SaveHandle | None) -> None:
    """Write every part of this process."""
    threads, checksums = runtime_of(save.context).io_threads, save.context.io.checksums
    progress = handle.count if handle is not None else None
    for part in save.parts:
        inside = subdirectory(store, part.directory)
        recorder = ObjectRecorder(inside, threads, checksums=checksums, progress=progress)
        assert part.captured is not None  # captured before it is written
        state = part.captured.write(part, recorder)
        part.captured.close()
        part.receipts = [Receipt(part.plan.rank, part.plan.items, state, recorder.objects)]


@dataclass(frozen=True, slots=True)
class PlainSave:
    """Write everything that is given, and commit it at one location. See `ckptcore.protocols.SaveStrategy`."""

    takes_placeholders: ClassVar[bool] = False
    checks_target: ClassVar[bool] = False

    def prepare(self, draft: SaveDraft) -> Save:
        """Plan the parts."""
        try:
            return draft.plan(self)
        except BaseException as error:  # noqa: BLE001  # sent to the other ranks, then raised
            fail_before_claim(draft.save.agreement, error)

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of a save."""
        return PlainCommit(save)


class PlainCommit:
    """The commit of a save whose location the leader claims for all ranks. See `ckptcore.protocols.SaveCommit`."""

    meaning = NOTHING_COMMITTED
    commit_meaning = ""

    def __init__(self, save: Save) -> None:
        """Claim nothing yet."""
        self._save = save
        self._claim: Transaction | None = None
        self._followed: StorageBackend | None = None

    def claim(self) -> None:
        """Claim the location on the leader; see the claim on the other ranks."""
        location, agreement = self._save.target.location, self._save.agreement
        look = functools.partial(sees_claim, self._save.info.claimed, location)
        with seen_by_all(agreement, "claimed", location.absolute, look):
            if agreement.rank == 0:
                self._take_claim()

    def _take_claim(self) -> None:
        save, target = self._save, self._save.target
        is_foreign = foreign_checkpoints(save.context)
        with save.recording.phase("claim"):
            commits = target.location.commits
            self._claim = commits.begin(target.location, save.info.claimed, target.overwrite, is_foreign)
            if save.agreement.size > 1 or save.uses_workers:
                self._claim.show_claim()

    @property
    def store(self) -> StorageBackend:
        """The storage of the claim."""
        if self._claim is not None:
            return self._claim.store
        if self._followed is None:
            location = self._save.target.location
            self._followed = location.commits.store_of(location, self._save.info.save_id)
        return self._followed

    def commit(self, payloads: Sequence[object]) -> None:
        """Build the root and commit it, on the leader."""
        if self._claim is None:
            return
        save = self._save
        if save.agreement.size > 1:
            save.take_receipts(payloads)
        with save.recording.phase("commit"):
            root = build_root(save.info, save.parts, self._claim.store, save.context, save.recording)
            if save.target.before_commit is not None:
                save.target.before_commit()
            self._claim.commit(*encode_root(self._completed(root)))

    def _completed(self, root: Root | Composite) -> Root | Composite:
        """Return the root to commit."""
        return root

    def settle(self, error: Exception | None) -> None:
        """Warn on the leader, which has committed. Look for the save on the other ranks."""
        location = self._save.target.location
        if error is None:
            return
        if self._claim is not None:
            logger.warning(
                "%s is saved, but perhaps not all ranks know: %s: %s", location.display, type(error).__name__, error
            )
        else:
            _expect_committed(location, self._save.info.save_id, error)

    def abort(self) -> None:
        """Remove what the save wrote; on other ranks, what they wrote after the leader removed everything."""
        if self._claim is not None:
            self._claim.abort()
        elif self._followed is not None:
            _remove_abandoned(self._save.target.location, self._save.info.save_id)


def _expect_committed(location: Location, save_id: str, error: Exception) -> None:
    """Check in the root that a save was committed, after the exchange at its end failed."""
    try:
        root = read_root(location.store)
    except CheckpointError as unreadable:
        raise CommitUnknownError(
            f"whether the save to {location.display} committed is not known: {error}, and its root cannot be "
            f"read: {unreadable}"
        ) from error
    if root is None or isinstance(root, Claim) or root.save_id != save_id:
        raise CommitUnknownError(
            f"the save to {location.display} is not committed, or not yet: {error}; look again before saving"
        ) from error


def _remove_abandoned(location: Location, save_id: str) -> None:
    """Remove what this process wrote after the leader aborted the save."""
    root = read_root(location.store)
    if root is not None and not isinstance(root, Claim) and root.save_id == save_id:
        return  # the hidden directory may hold what this save replaced
    names = [name.removesuffix("/") for name in location.parent.list_names() if name.endswith("/")]
    ours = [name for name in names if is_leftover_name(name) and f".{save_id}." in name]
    location.commits.sweep_names(ours)  # a directory that the leader still locks stays
