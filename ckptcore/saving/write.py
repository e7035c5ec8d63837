"""The stages of a save: claim its target, write every part, and commit.

In a job of several processes every stage ends with an exchange: an error on one rank fails the save on all of them.
"""

from __future__ import annotations

from contextlib import suppress

from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import CheckpointError
from ckptcore.io.background import SaveHandle
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.model.transfer import Receipt
from ckptcore.protocols import HeldWork, StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.saving.prepared import Save, fail_before_claim
from ckptcore.saving.roots import finish_part, put_root, recorder_of

__all__ = ["write_parts", "write_save"]


def write_save(save: Save, handle: SaveHandle | None = None, at_workers: HeldWork[Save] | None = None) -> None:
    """Claim the target, write, and commit. On every rank; returns once the checkpoint is committed.

    Args:
        save: the save, with what its parts captured.
        handle: counts the bytes written.
        at_workers: what workers of this controller hold, and write.

    Raises:
        CheckpointError: nothing was committed, and the objects of this save are removed. An earlier checkpoint stays.
        CommitUnknownError: if that cannot be known.
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
    """Write what this process and its workers write of every part, and keep the receipts; finish the parts of this process."""
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
    """Write what this process writes of every part."""
    threads, checksums = runtime_of(save.context).io_threads, save.context.io.checksums
    progress = handle.count if handle is not None else None
    for part in save.parts:
        inside = subdirectory(store, part.directory)
        recorder = ObjectRecorder(inside, threads, checksums=checksums, progress=progress)
        assert part.captured is not None  # captured before it is written
        state = part.captured.write(part, recorder)
        part.captured.close()
        part.receipts = [Receipt(part.plan.rank, part.plan.items, state, recorder.objects)]
