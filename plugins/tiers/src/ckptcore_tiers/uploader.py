"""`Uploader`: copies committed steps from the near directory to the far one on a background thread."""

from __future__ import annotations

import atexit
import functools
import logging
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ckptcore.commit.delete import concerns_one_entry
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptCheckpointError,
    InsufficientMemoryError,
    SaveLostError,
    StorageError,
    UnsupportedVersionError,
    UploadError,
)
from ckptcore.events import Observer, Recording, logger_named
from ckptcore.io.threads import reset_in_children
from ckptcore.policies import PreservationPolicy, SaveContext, StepInfo, what_to_delete
from ckptcore.results import Progress
from ckptcore.training.path_directory import OwnedDirectory
from ckptcore.training.save_decisions import LastSave
from ckptcore.training.steps import StepDirectory
from ckptcore_tiers.host_sending import StepSender, StepUpload
from ckptcore_tiers.near_tier import Deadline, NearTier
from ckptcore_tiers.status import UploadState, UploadStatus

logger = logger_named("ckptcore.tiers")

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_EXIT_SECONDS: Final = 5.0
"""Maximum time in seconds that the exit of the program waits for the uploader's thread, after `_stop_thread` began."""

_LOOK_SECONDS: Final = 1.0
"""While uploads are running, this often a thread looks if the main thread has ended."""

_UNREADABLE: Final = (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedVersionError)
"""Errors of a missing, damaged or unsupported copy."""

_PASSING: Final = (StorageError, SaveLostError, CommitUnknownError, InsufficientMemoryError)
"""Errors after which an upload is retried. Other errors would recur, such as a name that the far directory refuses."""


class Uploader:
    """Uploads the committed steps of a run that owns both directories. Thread-safe.

    One background thread uploads. If the far directory fails, an upload is retried until the run
    ends, after pauses of up to a minute. A step with a damaged near copy, or one that the far
    directory can never take, is not retried. Saves do not wait for uploads: `committed` only queues
    a step.

    At exit, the interpreter waits for uploads as `close` does, and then prints which steps were not
    uploaded. It does not wait if the program ends by an error, because a launcher may restart it, or if
    hosts have separate near directories, because other hosts may have ended.
    """

    def __init__(
        self,
        options: NearTier,
        near: StepDirectory,
        far: OwnedDirectory,
        send: StepSender,
        *,
        kept: Callable[[], Collection[int]],
        uploaded: Callable[[], None],
        waits_at_exit: bool,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Create the uploader without I/O. Uploads begin with `resume` or `committed`.

        Args:
            options: options of the near tier.
            near: steps of the near directory.
            far: the far directory.
            send: copies a step.
            kept: returns the steps that the run saved or loaded last, which are not deleted from
                the far directory.
            uploaded: called on the uploader's thread when steps may no longer wait, so that their
                near copies can be deleted.
            waits_at_exit: True to complete uploads if the program ends without `close` and without an error.
            observers: receive an event for each upload.
        """
        self._options = options
        self._near = near
        self._far = far
        self._send = send
        self._kept = kept
        self._uploaded = uploaded
        self._waits_at_exit = waits_at_exit and options.close_seconds != 0
        self._observers = observers
        self._state = UploadState()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_clean = False
        self._closed: set[int] = set()  # steps whose last error concerned only that step; retried after all others
        self._at_exit = functools.partial(_stop_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Stop uploading, because a forked child owns neither directory."""
        self._changed = threading.Condition()
        self._state = UploadState(stopped=True)
        self._thread = None

    def resume(self) -> None:
        """Queue the steps that an earlier run did not upload.

        Queues a step that exists only in the near directory if the upload policy chooses it. Always
        queues a step whose far copy is damaged, or from an earlier save than its near copy.
        """
        candidates = self._far.steps.candidates()
        states = self._far.steps.map_ordered(candidates, self._far.steps.is_committed_or_why)
        # A step that cannot be read, such as one in an archive, may be complete in the far directory.
        in_far = {step for step, is_there in zip(candidates, states, strict=True) if is_there is not False}
        newest = max(in_far, default=None)
        if newest is not None:
            self._state.last_chosen = self._last_save(self._far.steps, newest)
        in_near = self._near.steps()
        self._far.steps.look_ahead([step for step in in_near if step in in_far])
        for step in in_near:
            try:
                differs = step in in_far and self._differs(step)
                if step not in in_far or differs:
                    self._queue_if_chosen(step, self._last_save(self._near, step), preempted=False, replaces=differs)
            except (*_UNREADABLE, StorageError) as error:
                if not _concerns_one_step(error):
                    raise
                logger.warning("step %d in %s is not uploaded: %s", step, self._near.display, error)

        if not self.pending():
            self._is_clean = True
            self._far.deleter.clean()

    def _last_save(self, steps: StepDirectory, step: int) -> LastSave:
        """Return the facts about a step that an upload policy uses. Unknown fields are None."""
        try:
            summary = steps.summary(step)
            epoch = None if summary is None else summary.progress.get("epoch")
            return LastSave(step, epoch, steps.info(step).created)
        except (*_UNREADABLE, StorageError) as error:
            if not _concerns_one_step(error):
                raise
            return LastSave(step)

    def _differs(self, step: int) -> bool:
        """Return True if the near copy is from a later save, or if the far copy is missing or corrupt."""
        try:
            far = self._far.steps.summary(step)
        except (CheckpointNotFoundError, CorruptCheckpointError):
            return True
        near = self._near.summary(step)
        if far is None or near is None or far.save_id == near.save_id:
            return False
        return near.order > far.order

    def committed(self, step: int, epoch: int | None, *, preempted: bool) -> None:
        """Queue a step that was committed in the near directory.

        Queues it if the upload policy chooses it, or if the far directory has a step with this
        number. Sends no request to the far directory.

        Args:
            step: number of the step.
            epoch: epoch of the step.
            preempted: True if this process will be preempted.
        """
        in_far = step in self._far.steps.candidates()
        self._queue_if_chosen(step, LastSave(step, epoch, time.time()), preempted=preempted, replaces=in_far)

    def _queue_if_chosen(self, step: int, saved: LastSave, *, preempted: bool, replaces: bool) -> None:
        with self._changed:
            last = self._state.last_chosen
            context = SaveContext(
                step=step,
                now=saved.began or time.time(),
                epoch=saved.epoch,
                last_step=last.step,
                last_epoch=last.epoch,
                last_save_began=last.began,
                preempted=preempted,
            )
            if self._state.stopped or not (replaces or self._options.upload_policy.should_save(context)):
                return
            self._state.last_chosen = saved
            self._state.wait_for(step)
            # Never drop the running upload: a run that saves faster than it uploads would not
            # complete any.
            others = self._state.waiting - {self._state.current}
            dropped = sorted(others)[: max(0, len(others) - self._options.max_waiting)]
            self._state.waiting.difference_update(dropped)
            self._start_thread()
            fails = f"; the far tier fails: {self._state.error}" if self._state.error else ""
        for other in dropped:
            reason = f"more steps wait than NearTier(max_waiting={self._options.max_waiting}) allows{fails}"
            self._skip(other, reason, logging.WARNING)

    def _start_thread(self) -> bool:
        """Start the thread if it is needed. Return False if the system has no more threads; the next call retries."""
        if self._thread is not None or not self._state.waiting or self._state.stopped:
            return True
        thread = threading.Thread(target=self._run, name="ckptcore-upload", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._state.error = f"{type(error).__name__}: {error}"
            logger.warning("cannot upload steps to %s, retrying with the next step: %s", self._far.steps.display, error)
            return False
        self._thread = thread
        if self._waits_at_exit:
            with suppress(RuntimeError):  # the system has no more threads; the exit will not wait for uploads
                threading.Thread(target=self._delay_exit, name="ckptcore-upload-exit", daemon=False).start()
        return True

    def pending(self) -> frozenset[int]:
        """Return steps whose near files are still needed."""
        with self._changed:
            return self._state.pending

    @property
    def status(self) -> UploadStatus:
        """Progress of the uploads."""
        with self._changed:
            return self._state.status()

    def cancel(self, step: int) -> None:
        """Cancel the upload of a step. Return once none of its transfers is running."""
        with self._changed:
            self._state.cancel(step)
            self._changed.wait_for(lambda: self._state.current != step)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no step waits or is being uploaded, or the uploader is stopped.

        Args:
            timeout: maximum time in seconds; None for no limit.

        Raises:
            UploadError: if steps still wait, or if steps could not be uploaded and this was not
                reported yet.
        """
        with self._changed:
            if self._start_thread():
                self._changed.wait_for(self._is_idle, timeout)
        self.raise_unreported(waiting=True)

    def _is_idle(self) -> bool:
        return self._state.is_idle

    def raise_unreported(self, *, waiting: bool = False) -> None:
        """Raise an error for the steps that could not be uploaded. Each is reported only once.

        Args:
            waiting: True to include steps that still wait.

        Raises:
            UploadError: if there are such steps.
        """
        with self._changed:
            error = self._state.take_error(waiting=waiting, near=self._near.display, far=self._far.steps.display)
        if error is not None:
            raise error

    def close(self, until: Deadline) -> None:
        """Wait until a deadline, then stop. The next run resumes an interrupted upload.

        Raises:
            UploadError: see `wait`. With ``close_seconds=0``, waiting steps are not an error.
        """
        waits = self._options.close_seconds != 0
        try:
            with self._changed:
                if waits and self._start_thread():
                    self._changed.wait_for(self._is_idle, until.left())
        finally:
            self.stop(until)
        self.raise_unreported(waiting=waits)

    def stop(self, until: Deadline) -> None:
        """Interrupt the running upload and wait for the thread. Further calls do nothing.

        If the far directory does not answer until the deadline, the thread ends without committing
        anything, because the lock of the directory is released.
        """
        self._stop_thread(until.left_to_stop())
        atexit.unregister(self._at_exit)

    def _delay_exit(self) -> None:
        """Return when no upload is running, or `close_seconds` after the main thread has ended; at once if it failed.

        The interpreter waits for this thread before it ends. The uploader's thread is a daemon, because a request may
        never return.
        """
        with self._changed:
            main = threading.main_thread()
            while main.is_alive() and not self._has_ended():
                self._changed.wait(_LOOK_SECONDS)
            # The interpreter sets this for an error that nothing caught. The next run uploads.
            if getattr(sys, "last_value", None) is None:
                self._changed.wait_for(self._has_ended, self._options.close_seconds)

    def _has_ended(self) -> bool:
        return self._thread is None or self._state.stopped

    def _stop_thread(self, seconds: float | None) -> None:
        """Stop, and wait at most `seconds` for the thread; None for no limit."""
        with self._changed:
            self._state.stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    # --- on the uploader's thread -----------------------------------------------------------------

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while self._has_work():
            try:
                self._upload_next()
                pause = _FIRST_PAUSE_SECONDS
                continue
            except SaveLostError as error:
                if self._state.stopped:
                    return  # the lock was released without waiting for this thread
                self._fail_all(error)
            except Exception as error:  # noqa: BLE001  # retried, and shown in the status; policies can raise anything
                with self._changed:
                    is_new, self._state.error = self._state.error is None, f"{type(error).__name__}: {error}"
                logger.log(
                    logging.WARNING if is_new else logging.INFO,
                    "cannot upload a step to %s, retrying in about %.0f s: %s",
                    self._far.steps.display, pause, error,
                )  # fmt: skip
            with self._changed:
                self._changed.wait_for(self._is_idle, pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _has_work(self) -> bool:
        """Return True if a step waits and must be uploaded. If not, the thread ends; the next step starts a new one."""
        with self._changed:
            if self._state.waiting and not self._state.stopped:
                return True
            self._thread = None
            self._changed.notify_all()
            return False

    def _upload_next(self) -> None:
        """Upload the next step.

        Raises:
            CheckpointError: if the far directory failed. The step still waits.
        """
        far = self._far.infos()
        chosen = _next_upload(
            self._waiting_infos(), far, self._far.policy, time.time(), keep=self._kept_far(), last=self._closed
        )
        with self._changed:
            superseded = self._state.waiting.intersection(chosen.superseded)
            self._state.waiting -= superseded
            step = chosen.step if chosen.step in self._state.waiting and not self._state.stopped else None
            self._state.current = step
            self._changed.notify_all()
        for other in sorted(superseded):
            self._skip(other, f"{self._far.steps.display} keeps {self._far.policy}, and would delete it immediately")
        if step is not None:
            try:
                self._upload(step)
            finally:
                with self._changed:
                    self._state.current = self._state.progress = None
                    self._state.cancelled.discard(step)
                    self._changed.notify_all()
        self._uploaded()
        if step is not None:
            self._far.collect(keep=self._kept_far)
        if not self._is_clean and not self.pending():
            # Clean only now, because the objects of an interrupted upload are needed to resume it.
            self._far.deleter.clean()
            self._is_clean = True

    def _kept_far(self) -> frozenset[int]:
        """Return the steps that the far directory keeps regardless of the policy.

        They include the last step that the upload policy chose and the last uploaded step. After a
        rollback, steps with higher numbers can belong to older saves. Without this method, the policy
        would keep the older saves instead.
        """
        with self._changed:
            last = (self._state.last_chosen.step, *self._state.uploaded[-1:])
            return frozenset(self._kept()).union([step for step in last if step is not None])

    def _waiting_infos(self) -> Sequence[StepInfo]:
        """Return the facts about waiting steps that the far directory's policy uses. Records failed steps."""
        with self._changed:
            waiting = sorted(self._state.waiting)
        infos = []
        for step in waiting:
            try:
                infos.append(self._near.info(step))
            except _UNREADABLE as error:
                self._fail(step, error)
        return infos

    def _upload(self, step: int) -> None:
        recording = Recording("upload", str(self._far.steps.location(step)), self._observers, step=step)
        try:
            recording.save_id = getattr(self._near.summary(step), "save_id", None)
            nbytes = self._send_if_missing(step)
        except CancelledError:
            recording.finish(
                error=UploadError("the upload was stopped; the next upload of this step resumes it", [step])
            )
        except _PASSING as error:
            recording.finish(error=error)
            if _concerns_one_step(error):
                self._closed.add(step)
            raise
        except Exception as error:  # noqa: BLE001  # reported by `wait` and `close`; other steps are still uploaded
            recording.finish(error=error)
            self._fail(step, error)
        else:
            recording.finish(nbytes)
            self._closed.discard(step)
            with self._changed:
                self._state.succeed(step)

    def _send_if_missing(self, step: int) -> int:
        """Copy a step to the far directory, unless it or a later save of it exists there. Return the bytes sent."""
        self._far.lock.check()
        steps = self._far.steps
        replaces = steps.recheck(step)
        if replaces and step not in self._far.steps.broken and not self._differs(step):
            logger.info("step %d or a later save of it is already in %s", step, steps.display)
            return 0
        name = steps.name(step)
        self._far.deleter.keep_claim(step)
        is_cancelled = functools.partial(self._is_cancelled, step)
        sent = self._send(
            StepUpload(step, name, replaces, self._note_progress, is_cancelled, before_commit=self._far.lock.check)
        )
        steps.add(step, name)
        self._far.steps.broken.discard(step)
        return sent

    def _note_progress(self, done: int, total: int) -> None:
        self._state.progress = Progress(done, total)  # a single assignment needs no lock

    def _is_cancelled(self, step: int) -> bool:
        return self._state.stopped or step in self._state.cancelled

    def _skip(self, step: int, reason: str, level: int = logging.INFO) -> None:
        """Record, log and report as an event why a step will not be uploaded."""
        with self._changed:
            self._state.skip(step, reason)
        logger.log(level, "step %d is not uploaded to %s: %s", step, self._far.steps.display, reason)
        recording = Recording("upload", str(self._far.steps.location(step)), self._observers, step=step)
        recording.finish(error=UploadError(reason, [step]))

    def _fail(self, step: int, error: BaseException) -> None:
        """Record and log that a step cannot be uploaded. `wait` and `close` raise the error."""
        logger.warning("step %d cannot be uploaded to %s: %s", step, self._far.steps.display, error)
        with self._changed:
            self._state.fail(step, error)

    def _fail_all(self, error: SaveLostError) -> None:
        """Fail all waiting steps, because another job now owns the far directory."""
        for step in sorted(self.pending()):
            self._fail(step, error)
        with self._changed:
            self._state.error = str(error)
            self._changed.notify_all()


def _concerns_one_step(error: CheckpointError) -> bool:
    """Return True if an error concerns one step, and not the storage as a whole or the network."""
    return isinstance(error, _UNREADABLE) or (isinstance(error, StorageError) and concerns_one_entry(error))


def _stop_at_exit(reference: weakref.ref[Uploader]) -> None:
    uploader = reference()
    if uploader is None:
        return
    uploader._stop_thread(_EXIT_SECONDS)
    try:
        uploader.raise_unreported(waiting=uploader._waits_at_exit)
    except UploadError as error:
        print(f"ckptcore: {error}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class _NextUpload:
    """Choice of the next upload.

    Attributes:
        step: the step to upload; None if there is none.
        superseded: waiting steps that the far directory would delete immediately.
    """

    step: int | None
    superseded: tuple[int, ...]


def _next_upload(
    waiting: Sequence[StepInfo],
    far: Sequence[StepInfo],
    policy: PreservationPolicy,
    now: float,
    *,
    keep: Collection[int] = (),
    last: Collection[int] = (),
) -> _NextUpload:
    """Choose the newest waiting step that the far policy keeps, and list the waiting steps that it would delete.

    The policy is applied as if all waiting steps were uploaded. An uploader that keeps up has only
    one waiting step, and uploads in order. If it falls behind, it uploads the newest step first.

    Args:
        waiting: the waiting steps.
        far: steps in the far directory.
        policy: preservation policy of the far directory.
        now: current time, in seconds since the Unix epoch.
        keep: steps that the far directory keeps regardless of its policy.
        last: steps to upload after all others.
    """
    infos = {info.step: info for info in (*far, *waiting)}
    deleted = what_to_delete(policy, list(infos.values()), now)
    steps = [info.step for info in waiting]
    superseded = tuple(sorted(set(deleted).intersection(steps).difference(keep)))
    left = [step for step in steps if step not in superseded]
    return _NextUpload(max(left, key=lambda step: (step not in last, step), default=None), superseded)
