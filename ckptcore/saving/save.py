"""Save: prepare, capture, write and commit, then write further saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.events import Recording
from ckptcore.io.background import SaveHandle
from ckptcore.io.memory import StagingMemory
from ckptcore.io.requests import requests_of
from ckptcore.io.snapshot import BoundedSnapshot
from ckptcore.job.agreement import Agreement
from ckptcore.protocols import FurtherSaves
from ckptcore.runtime import runtime_of
from ckptcore.saving.capturing import Copy, Holding
from ckptcore.saving.prepared import NOTHING_COMMITTED, Save, fail_before_claim, fail_everywhere
from ckptcore.saving.preparing import prepare_save
from ckptcore.saving.save_requests import SaveRequest
from ckptcore.saving.write import write_save

__all__ = ["begin_save", "perform_save"]


def perform_save(request: SaveRequest, context: Context) -> None:
    """Save and return once it is committed; arrays are copied only block by block, as they are written.

    Raises:
        CheckpointError: why it is not.
    """
    runtime = runtime_of(context)
    key = runtime.exchange_key(request.destination.agreed)  # before anything can fail: every rank counts every save
    with _recorded(request, context) as recording, recording.phase("blocking"):
        agreement = Agreement(runtime.job(), key, recording)
        with recording.phase("describe"):
            save = prepare_save(request, context, recording, agreement)
        holding = Holding(save)
        try:
            try:
                with recording.phase("wait_for_previous"):
                    runtime.saves.wait()
                holding.view()
            except BaseException as error:  # noqa: BLE001  # sent to the other ranks, then raised
                fail_before_claim(agreement, error)
            _write(save, holding, request.hooks.committed)
        finally:
            holding.close()


def begin_save(
    request: SaveRequest, context: Context, *, when_busy: Literal["wait", "queue"] | None = None
) -> SaveHandle:
    """Begin to save and return once the save owns its memory; it goes on in the background.

    Args:
        request: the save.
        context: options.
        when_busy: what it does while another save runs; None: as the Context says.

    Raises:
        CheckpointError: why it cannot begin; the handle raises later errors.
    """
    runtime = runtime_of(context)
    key = runtime.exchange_key(request.destination.agreed)  # before anything can fail: every rank counts every save
    with _recorded(request, context, goes_on=True) as recording, recording.phase("blocking"):
        agreement = Agreement(runtime.job(), key, recording)
        try:
            with recording.phase("wait_for_previous"):
                if (when_busy or context.when_busy) == "wait":
                    runtime.saves.wait()
                else:
                    runtime.saves.wait_for_room()
        except BaseException as error:  # noqa: BLE001  # sent to the other ranks, then raised
            fail_everywhere(agreement, "describe", error)
        with recording.phase("describe"):
            save = prepare_save(request, context, recording, agreement)
        handle = SaveHandle(save.target.location.display, save.nbytes)
        memory = StagingMemory(runtime.staging, runtime.io_threads)
        holding = Holding(save)
        to_copy: Sequence[BoundedSnapshot] = ()
        copies: Sequence[Copy] | None = None
        try:
            if context.memory.save_bytes is not None:
                to_copy = holding.copy_bounded(memory, context.memory.save_bytes)
            elif _is_uploaded_early(save):
                copies = holding.begin_copies(memory)
            else:
                with recording.phase("copy") as phase:
                    for copy in holding.begin_copies(memory):
                        copy.wait()
                    phase.nbytes = memory.copied_bytes
        except BaseException as error:  # noqa: BLE001  # sent to the other ranks, then raised
            holding.close()
            memory.close()
            fail_before_claim(agreement, error)
        # The writer waits for copies that this thread makes: it cannot run on this thread, before them.
        inline = not to_copy
        _go_on(save, holding, request.hooks.committed, memory, handle, inline=inline)
        if to_copy:
            _copy_while_written(to_copy, memory, handle, recording)
        if copies is not None:
            _copy_while_uploaded(copies, memory, handle, recording)
        return handle


@contextmanager
def _recorded(request: SaveRequest, context: Context, *, goes_on: bool = False) -> Iterator[Recording]:
    """Record an operation; one that goes on in the background is over later, unless it failed to begin."""
    place, rank = str(request.destination.place), runtime_of(context).job().rank
    recording = Recording("save", place, context.observers, step=request.notes.step, rank=rank)
    try:
        yield recording
    except BaseException as error:
        recording.finish(error=error)
        raise
    if not goes_on:
        recording.finish()


def _write(
    save: Save, holding: Holding, committed: Callable[[], None] | None, handle: SaveHandle | None = None
) -> None:
    """Write and commit the checkpoint, call `committed`, then write the further saves."""
    recording = save.recording
    try:
        write_save(save, handle, holding.at_workers)
    except BaseException as error:
        recording.finish(error=error)
        raise
    if handle is not None or save.further:  # which are operations of their own
        recording.finish(None if handle is None else handle.progress.written)
    if committed is not None:
        committed()
    if isinstance(save.strategy, FurtherSaves):
        save.strategy.after_commit(save, partial(write_save, handle=handle, at_workers=holding.at_workers))


def _go_on(
    save: Save,
    holding: Holding,
    committed: Callable[[], None] | None,
    memory: StagingMemory,
    handle: SaveHandle,
    *,
    inline: bool,
) -> None:
    """Write in the background what is held. The request is not kept, because it has the state."""
    runtime = runtime_of(save.context)
    saves = [save, *save.further]
    # The leader commits; ranks may be threads of one process.
    locations = [one.target.location.identity for one in saves] if save.agreement.rank == 0 else []

    def work() -> None:
        try:
            _write(save, holding, committed, handle)
        finally:
            holding.close()
            memory.close()
            if not save.context.memory.keep_staging:
                runtime.staging.release_unused()

    try:
        runtime.saves.run(handle, work, locations, inline=inline)
    except RuntimeError as error:
        holding.close()
        memory.close()
        failed = CheckpointError(
            f"cannot save to {save.target.location.display} in the background with MemoryOptions(save_bytes=...): {error}. Call "
            f"save, or allow a copy of the whole state. {NOTHING_COMMITTED.capitalize()}"
        )
        failed.__cause__ = error
        fail_before_claim(save.agreement, failed)


def _is_uploaded_early(save: Save) -> bool:
    """True if the copies are written while others are still being made.

    A remote storage takes longer than the copies, and waits for requests rather than for memory. With a disk both would
    share the processors, and the caller would wait longer. Workers write only after all of them have copied.
    """
    return not save.uses_workers and requests_of(save.target.location.store).concurrency > 1


def _copy_while_uploaded(
    copies: Sequence[Copy], memory: StagingMemory, handle: SaveHandle, recording: Recording
) -> None:
    """Wait for copies that the writer in the background takes as they come."""
    try:
        with recording.phase("copy") as phase:
            for copy in copies:
                copy.wait()
            phase.nbytes = memory.copied_bytes
    except BaseException:
        memory.give_up()  # the caller may change the state from here on: what is not copied must never be
        handle.exception()  # the writer ends with an error too, which is told here and need not be again
        raise


def _copy_while_written(
    to_copy: Sequence[BoundedSnapshot], memory: StagingMemory, handle: SaveHandle, recording: Recording
) -> None:
    """Copy what the writer in the background takes, so that little is held copied at a time."""
    try:
        with recording.phase("copy") as phase:
            for number, snapshot in enumerate(to_copy):
                if number:
                    to_copy[number - 1].wait_until_written()
                snapshot.copy_all()
            phase.nbytes = memory.copied_bytes
    except BaseException as error:
        for snapshot in to_copy:
            snapshot.fail(error)
        handle.exception()  # the writer ends with the same error, which is told here and need not be again
        raise
