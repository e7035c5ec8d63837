"""Saving: prepare, capture, persist, export. Each stage's input can only be had from the stage before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.events import Recording
from ckptcore.io.background import SaveHandle
from ckptcore.io.memory import StagingMemory
from ckptcore.io.requests import requests_of
from ckptcore.io.snapshot import BoundedSnapshot
from ckptcore.job.agreement import Agreement
from ckptcore.runtime import runtime_of
from ckptcore.saving.capturing import Copies, Holding
from ckptcore.saving.exporting import PreparedExport, write_exports
from ckptcore.saving.persisting import NOTHING_COMMITTED, Described, fail_before_claim, fail_everywhere, persist
from ckptcore.saving.preparing import PreparedSave, prepare_save
from ckptcore.saving.save_requests import SaveRequest

__all__ = ["begin_save", "perform_save"]


def perform_save(request: SaveRequest, context: Context) -> None:
    """Save and return once it is committed; arrays are copied only block by block, as they are written.

    Raises:
        CheckpointError: why it is not.
    """
    key = runtime_of(context).exchange_key(request.agreed)  # before anything can fail: every rank counts every save
    with _recorded(request, context) as recording, recording.phase("blocking"):
        agreement = Agreement(runtime_of(context).job(), key, recording)
        with recording.phase("describe"):
            save = prepare_save(request, context, recording, agreement)
        holding = Holding()
        try:
            try:
                with recording.phase("wait_for_previous"):
                    runtime_of(context).saves.wait()
                holding.view(save)
            except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
                fail_before_claim(agreement, error)
            _write(request.committed, save.described, save.exports, holding, context, recording)
        finally:
            holding.close()


def begin_save(request: SaveRequest, context: Context) -> SaveHandle:
    """Begin to save and return once the save owns its memory; it goes on in the background.

    Raises:
        CheckpointError: why it cannot begin; what comes later is told by the handle.
    """
    key = runtime_of(context).exchange_key(request.agreed)  # before anything can fail: every rank counts every save
    with _recorded(request, context, goes_on=True) as recording, recording.phase("blocking"):
        agreement = Agreement(runtime_of(context).job(), key, recording)
        try:
            with recording.phase("wait_for_previous"):
                if (request.when_busy or context.when_busy) == "wait":
                    runtime_of(context).saves.wait()
                else:
                    runtime_of(context).saves.wait_for_room()
        except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
            fail_everywhere(agreement, "describe", error)
        with recording.phase("describe"):
            save = prepare_save(request, context, recording, agreement)
        handle = SaveHandle(save.described.location.display, save.nbytes)
        memory = StagingMemory(runtime_of(context).staging, runtime_of(context).io_threads)
        holding = Holding()
        to_copy: Sequence[BoundedSnapshot] = ()
        copies: Copies | None = None
        try:
            if context.memory.save_bytes is not None:
                to_copy = holding.copy_bounded(save, memory, context.memory.save_bytes)
            elif _is_uploaded_early(save):
                copies = holding.begin_copies(save, memory)
            else:
                with recording.phase("copy") as phase:
                    holding.begin_copies(save, memory).wait()
                    phase.nbytes = memory.copied_bytes
        except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
            holding.close()
            memory.close()
            fail_before_claim(agreement, error)
        # The writer waits for copies that this thread makes: it cannot run on this thread, before them.
        inline = not to_copy
        _go_on(request.committed, save.described, save.exports, holding, memory, handle, context, recording, inline)
        if to_copy:
            _copy_while_written(to_copy, memory, handle, recording)
        if copies is not None:
            _copy_while_uploaded(copies, memory, handle, recording)
        return handle


@contextmanager
def _recorded(request: SaveRequest, context: Context, *, goes_on: bool = False) -> Iterator[Recording]:
    """Record an operation; one that goes on in the background is over later, unless it failed to begin."""
    recording = Recording(
        "save", str(request.location), context.observers, step=request.step, rank=runtime_of(context).job().rank
    )
    try:
        yield recording
    except BaseException as error:
        recording.finish(error=error)
        raise
    if not goes_on:
        recording.finish()


def _write(
    committed: Callable[[], None] | None,
    described: Described,
    exports: Sequence[PreparedExport],
    holding: Holding,
    context: Context,
    recording: Recording,
    handle: SaveHandle | None = None,
) -> None:
    """Write and commit the checkpoint, let it be known, then write its exports."""
    try:
        if described.session is not None:
            from ckptcore.saving.session_persisting import persist_session  # only who saves in sessions needs it

            persist_session(described, described.session, holding.parts, context, recording, handle)
        elif described.update is not None and described.agreement.rank == 0:
            with ExitStack() as pinned:
                try:
                    pinned.enter_context(described.update.pinned(runtime_of(context).conditions))
                except BaseException as error:  # noqa: BLE001  # sent to the other ranks, then raised
                    fail_before_claim(described.agreement, error)
                persist(described, holding.parts, context, recording, handle, holding.at_workers)
        elif described.on_hosts is None:
            persist(described, holding.parts, context, recording, handle, holding.at_workers)
        else:
            from ckptcore.saving.host_persisting import persist_on_hosts  # only who has hosts needs it

            persist_on_hosts(described, holding.parts, context, recording, handle, described.on_hosts)
    except BaseException as error:
        recording.finish(error=error)
        raise
    if handle is not None or exports:  # which are operations of their own
        recording.finish(None if handle is None else handle.progress.written)
    if committed is not None:
        committed()
    write_exports(exports, holding.exports, context, described.location.display, handle, holding.at_workers)


def _go_on(
    committed: Callable[[], None] | None,
    described: Described,
    exports: Sequence[PreparedExport],
    holding: Holding,
    memory: StagingMemory,
    handle: SaveHandle,
    context: Context,
    recording: Recording,
    inline: bool,
) -> None:
    """Write in the background what is held; of the request nothing is kept, because it has the state."""

    saves = [described, *(export.described for export in exports)]
    # The leader commits; ranks may be threads of one process.
    locations = [save.location.identity for save in saves] if described.agreement.rank == 0 else []

    def work() -> None:
        try:
            _write(committed, described, exports, holding, context, recording, handle)
        finally:
            holding.close()
            memory.close()
            if not context.memory.keep_staging:
                runtime_of(context).staging.release_unused()

    try:
        runtime_of(context).saves.run(handle, work, locations, inline=inline)
    except RuntimeError as error:
        holding.close()
        memory.close()
        failed = CheckpointError(
            f"cannot save to {described.location.display} in the background with MemoryOptions(save_bytes=...): {error}. Call "
            f"save, or allow a copy of the whole state. {NOTHING_COMMITTED.capitalize()}"
        )
        failed.__cause__ = error
        fail_before_claim(described.agreement, failed)


def _is_uploaded_early(save: PreparedSave) -> bool:
    """Whether it pays to write what is copied while the rest is still being copied.

    A storage that is far takes longer than the copies, and waits for requests rather than for memory. Beside a disk both would
    share the processors, and the caller would wait longer. What workers hold they write when they have been waited for.
    """
    return save.executor is None and requests_of(save.described.location.store).concurrency > 1


def _copy_while_uploaded(copies: Copies, memory: StagingMemory, handle: SaveHandle, recording: Recording) -> None:
    """Wait for copies that the writer in the background takes as they come."""
    try:
        with recording.phase("copy") as phase:
            copies.wait()
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
