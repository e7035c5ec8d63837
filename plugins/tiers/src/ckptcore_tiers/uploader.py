"""Uploader: copies committed steps from the near directory to the far one, on a thread of its own, while the run lasts."""

from __future__ import annotations

import atexit
import functools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Final

from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveLostError,
    UnsupportedVersionError,
    UploadError,
)
from ckptcore.events import Observer, Recording
from ckptcore.io.background import Progress
from ckptcore.io.threads import reset_in_children
from ckptcore.policies import PreservationPolicy, SaveContext, StepInfo, what_to_delete
from ckptcore.training.path_directory import OwnedDirectory
from ckptcore.training.save_decisions import Past
from ckptcore.training.steps import StepDirectory
from ckptcore_tiers.near_tier import NearTier
from ckptcore_tiers.sending import Send
from ckptcore_tiers.status import UploadState, UploadStatus

__all__ = ["Uploader"]

logger = logging.getLogger("ckptcore.tiers")

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_EXIT_SECONDS: Final = 5.0
"""How long the exit of the program waits for the transfer of a piece."""

_UNREADABLE: Final = (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedVersionError)
"""Errors of a near copy that is missing or damaged. A retry would not help."""


class Uploader:
    """Uploads the committed steps of a run that owns both tiers. Any thread may ask; one thread uploads.

    Uploads that fail because of the far tier are retried as long as the run lasts, after pauses that grow to a minute.
    Only `wait` waits for them. A step whose near copy is damaged is not retried.
    """

    def __init__(
        self,
        options: NearTier,
        near: StepDirectory,
        far: OwnedDirectory,
        send: Send,
        *,
        kept: Callable[[], Collection[int]],
        uploaded: Callable[[], None],
        observers: Sequence[Observer] = (),
    ) -> None:
        """Upload nothing yet.

        Args:
            options: of the near tier.
            near: the steps there.
            far: where they go.
            send: copies a step.
            kept: gives the steps that the run has saved or loaded last, which stay in the far tier, too.
            uploaded: called, on the thread of the uploader, when a step no longer waits.
            observers: are told each upload.
        """
        self._options = options
        self._near = near
        self._far = far
        self._send = send
        self._kept = kept
        self._uploaded = uploaded
        self._observers = observers
        self._state = UploadState()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_clean = False
        self._at_exit = functools.partial(_stop_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Stop uploading: a forked child owns neither tier."""
        self._changed = threading.Condition()
        self._state = UploadState(stopped=True)
        self._thread = None

    def resume(self) -> None:
        """Queue the steps that are near and not far, if the upload policy chooses them."""
        in_far = set(self._far.steps.steps())
        newest = max(in_far, default=None)
        if newest is not None:
            self._state.last_chosen = self._past(self._far.steps, newest)
        for step in self._near.steps():
            try:
                differs = step in in_far and self._differs(step)
                if step not in in_far or differs:
                    self._choose(step, self._past(self._near, step), preempted=False, replaces=differs)
            except _UNREADABLE as error:
                logger.warning("step %d in %s is not uploaded: %s", step, self._near.display, error)

        if not self.pending():
            self._is_clean = True
            self._far.deleter.clean()

    def _past(self, steps: StepDirectory, step: int) -> Past:
        """Return what an upload policy needs to know of a step. Unreadable fields are None."""
        try:
            summary = steps.summary(step)
            epoch = None if summary is None else summary.progress.get("epoch")
            return Past(step, epoch, steps.info(step).created)
        except _UNREADABLE:
            return Past(step)

    def _differs(self, step: int) -> bool:
        """Return whether the near copy is another, later save than the far one."""
        try:
            far = self._far.steps.summary(step)
        except (CheckpointNotFoundError, CorruptCheckpointError):
            return True
        near = self._near.summary(step)
        if far is None or near is None or far.save_id == near.save_id:
            return False
        return self._near.info(step).created > self._far.steps.info(step).created

    def committed(self, step: int, epoch: int | None, *, preempted: bool) -> None:
        """Queue a step that was committed near, if the upload policy chooses it. Sends no request to the far tier.

        Args:
            step: which.
            epoch: the epoch that it is in.
            preempted: whether this process is to be preempted.
        """
        in_far = step in self._far.steps.candidates()
        self._choose(step, Past(step, epoch, time.time()), preempted=preempted, replaces=in_far)

    def _choose(self, step: int, saved: Past, *, preempted: bool, replaces: bool) -> None:
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
            # What is being sent goes on: else a run that saves faster than it uploads would never end an upload.
            others = self._state.waiting - {self._state.current}
            old = _given_up(others, self._options.most_waiting)
            self._state.waiting.difference_update(old)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckptcore-upload", daemon=True)
                self._thread.start()
            fails = f"; the far tier fails: {self._state.error}" if self._state.error else ""
        for other in old:
            reason = f"NearTier(most_waiting={self._options.most_waiting}) lets no more steps wait{fails}"
            self._skip(other, reason, logging.WARNING)

    def pending(self) -> frozenset[int]:
        """Return the steps whose near files are still needed."""
        with self._changed:
            return self._state.pending

    @property
    def status(self) -> UploadStatus:
        """The progress of the uploads."""
        with self._changed:
            return self._state.status()

    def cancel(self, step: int) -> None:
        """Cancel the upload of a step. Returns once no transfer of it is running."""
        with self._changed:
            self._state.cancel(step)
            self._changed.wait_for(lambda: self._state.current != step)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no step waits or is being uploaded.

        Args:
            timeout: how long at most, in seconds; None: for ever.

        Raises:
            UploadError: if some wait still, or could not be uploaded and nobody was told.
        """
        with self._changed:
            self._changed.wait_for(self._is_idle, timeout)
        self.raise_unheard(waiting=True)

    def _is_idle(self) -> bool:
        return self._state.is_idle

    def raise_unheard(self, *, waiting: bool = False) -> None:
        """Raise an error for the steps that cannot be uploaded, once for each.

        Args:
            waiting: tell of those that still wait, too.

        Raises:
            UploadError
        """
        with self._changed:
            error = self._state.take_error(waiting=waiting, near=self._near.display, far=self._far.steps.display)
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait as long as the options say, then stop. The next run resumes an interrupted upload.

        Raises:
            UploadError: as `wait`; nothing is said of steps that wait where the options leave them to the next run.
        """
        seconds = self._options.close_seconds
        try:
            with self._changed:
                if seconds != 0:
                    self._changed.wait_for(self._is_idle, seconds)
        finally:
            self.stop()
        self.raise_unheard(waiting=seconds != 0)

    def stop(self) -> None:
        """Stop after the current piece. Further calls do nothing."""
        self._tell_to_stop(None)
        atexit.unregister(self._at_exit)

    def _tell_to_stop(self, seconds: float | None) -> None:
        with self._changed:
            self._state.stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    # --- on the thread of the uploader --------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while self._has_work():
            try:
                self._upload_next()
                pause = _FIRST_PAUSE_SECONDS
                continue
            except SaveLostError as error:
                self._lose(error)
            except Exception as error:  # noqa: BLE001  # tried again, and told to whoever waits; also what a policy raises
                with self._changed:
                    is_new, self._state.error = self._state.error is None, f"{type(error).__name__}: {error}"
                logger.log(
                    logging.WARNING if is_new else logging.INFO,
                    "%s does not take a step now; it is tried again in about %.0f s: %s",
                    self._far.steps.display, pause, error,
                )  # fmt: skip
            with self._changed:
                self._changed.wait_for(self._is_idle, pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _has_work(self) -> bool:
        """Return whether a step waits. If not, the thread ends, and the next step starts another one."""
        with self._changed:
            if self._state.waiting and not self._state.stopped:
                return True
            self._thread = None
            return False

    def _upload_next(self) -> None:
        """Upload the next step.

        Raises:
            CheckpointError: the far tier failed; the step waits.
        """
        far = self._far.infos()
        chosen = _next_upload(self._waiting_infos(), far, self._far.policy, time.time(), keep=self._kept_far())
        with self._changed:
            superseded = self._state.waiting.intersection(chosen.superseded)
            self._state.waiting -= superseded
            step = chosen.step if chosen.step in self._state.waiting and not self._state.stopped else None
            self._state.current = step
            self._changed.notify_all()
        for other in sorted(superseded):
            self._skip(other, f"{self._far.steps.display} keeps {self._far.policy}, and would delete it at once")
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
            # Only now: what an upload that died has left is gone on with.
            self._far.deleter.clean()
            self._is_clean = True

    def _kept_far(self) -> frozenset[int]:
        """Return the steps that stay far whatever the policy says. The newest by number may be older than the run."""
        with self._changed:
            last = (self._state.last_chosen.step, *self._state.uploaded[-1:])
            return frozenset(self._kept()).union([step for step in last if step is not None])

    def _waiting_infos(self) -> Sequence[StepInfo]:
        """Return what the far policy needs to know of the steps that wait."""
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
        recording = Recording("upload", str(self._far.steps.place(step)), self._observers, step=step)
        try:
            recording.save_id = getattr(self._near.summary(step), "save_id", None)
            nbytes = self._bring(step)
        except CancelledError:
            recording.finish(error=UploadError("it was stopped; the next upload of the step goes on from here", [step]))
        except _UNREADABLE as error:
            recording.finish(error=error)
            self._fail(step, error)
        except CheckpointError as error:
            recording.finish(error=error)
            raise
        except Exception as error:  # noqa: BLE001  # told to whoever waits; the other steps are uploaded all the same
            recording.finish(error=error)
            self._fail(step, error)
        else:
            recording.finish(nbytes)
            with self._changed:
                self._state.succeed(step)

    def _bring(self, step: int) -> int:
        """Copy a step to the far tier, unless it is there. Return the bytes sent."""
        self._far.hold.check()
        steps = self._far.steps
        replaces = steps.look_again(step)
        if replaces and step not in self._far.steps.broken and not self._differs(step):
            logger.info("step %d is in %s already, or a later save of it is", step, steps.display)
            return 0
        name = steps.name(step)
        self._far.deleter.spare(step)
        sent = self._send(
            step,
            name,
            replaces=replaces,
            progress=self._note_progress,
            is_stopped=functools.partial(self._is_off, step),
            before_commit=self._far.hold.check,
        )
        steps.add(step, name)
        self._far.steps.broken.discard(step)
        return sent

    def _note_progress(self, done: int, total: int) -> None:
        self._state.progress = Progress(done, total)  # one assignment: no lock for each piece

    def _is_off(self, step: int) -> bool:
        return self._state.stopped or step in self._state.cancelled

    def _skip(self, step: int, reason: str, level: int = logging.INFO) -> None:
        """Record why a step is not uploaded."""
        with self._changed:
            self._state.skip(step, reason)
        logger.log(level, "step %d is not uploaded to %s: %s", step, self._far.steps.display, reason)
        recording = Recording("upload", str(self._far.steps.place(step)), self._observers, step=step)
        recording.finish(error=UploadError(reason, [step]))

    def _fail(self, step: int, error: BaseException) -> None:
        """Record that a step cannot be uploaded. `wait` and `close` raise the error."""
        logger.warning("step %d cannot be uploaded to %s: %s", step, self._far.steps.display, error)
        with self._changed:
            self._state.fail(step, error)

    def _lose(self, error: SaveLostError) -> None:
        """Fail all steps that wait: another job owns the far tier now."""
        for step in sorted(self.pending()):
            self._fail(step, error)
        with self._changed:
            self._state.error = str(error)
            self._changed.notify_all()


def _stop_at_exit(found: weakref.ref[Uploader]) -> None:
    uploader = found()
    if uploader is not None:
        uploader._tell_to_stop(_EXIT_SECONDS)


@dataclass(frozen=True, slots=True)
class _NextUpload:
    """What to do next.

    Attributes:
        step: the one to upload; None if none is worth it.
        superseded: those that the far tier would delete at once.
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
) -> _NextUpload:
    """Return the newest step that waits, and those that the far policy would delete as soon as all were uploaded.

    An uploader that keeps up has one step waiting, and so uploads in order. One that has fallen behind makes the newest
    safe first.

    Args:
        waiting: the steps that wait.
        far: the steps that the far tier has.
        policy: which steps the far tier keeps.
        now: seconds since the epoch, UTC.
        keep: steps that it keeps whatever its policy says.
    """
    all_of_them = {info.step: info for info in (*far, *waiting)}
    doomed = what_to_delete(policy, list(all_of_them.values()), now)
    steps = [info.step for info in waiting]
    superseded = tuple(sorted(set(doomed).intersection(steps).difference(keep)))
    return _NextUpload(max((step for step in steps if step not in superseded), default=None), superseded)


def _given_up(waiting: Collection[int], most: int) -> tuple[int, ...]:
    """Return the oldest steps, beyond the number that may wait."""
    return tuple(sorted(waiting)[: max(0, len(waiting) - most)])
