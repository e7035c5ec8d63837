"""Deletion of steps by a preservation policy or the user, and removal of the files that killed processes left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import Final

from ckptcore.commit.delete import bases_in, find_bases, forget_bases, referring_to
from ckptcore.commit.location import AnyLocation, Location, resolve_location
from ckptcore.commit.locks import Lock
from ckptcore.commit.root import Base
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReferredError,
    CorruptCheckpointError,
    OnlyStepError,
    StepPinnedError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.events import Recording, RunningPhase, logger_named
from ckptcore.inspection.completeness import has_expected_sizes
from ckptcore.io.threads import BackgroundThreads
from ckptcore.policies import PreservationPolicy, StepInfo, what_to_delete
from ckptcore.protocols import StorageBackend
from ckptcore.records import dataclass
from ckptcore.runtime import runtime_of
from ckptcore.training.steps import StepDirectory

logger = logger_named("ckptcore.training")

_MAX_ERRORS: Final = 100
"""Maximum number of stored errors. Every error is logged."""


class DeletionQueue:
    """Runs deletions on a background thread, one after another, and stores their errors until they are taken.

    Thread-safe. The background thread starts with the first deletion.
    """

    def __init__(self, directory: str, *, daemon: bool = False) -> None:
        """Create an empty queue.

        Args:
            directory: the directory of steps, for the log.
            daemon: True if the interpreter does not wait for the deletions at exit.
        """
        self._directory = directory
        self._lock = RLock()  # reentrant: if no thread can be started, `submit` runs the work here, with the lock held
        self._refuses = False
        self._threads = BackgroundThreads(1, "ckptcore-clean", daemon=daemon)
        self._futures: list[Future[None]] = []

    def __len__(self) -> int:
        """Return the number of deletions that are waiting, running or failed, or ended after the last `begin`."""
        with self._lock:
            return len(self._futures)

    def begin(self, work: Callable[[], object]) -> None:
        """Queue a deletion. Does nothing after `refuse`: the next owner of the directory deletes the step."""
        with self._lock:
            if self._refuses:
                return
            failed = [future for future in self._futures if future.done() and future.exception() is not None]
            running = [future for future in self._futures if not future.done()]
            self._futures = [*failed[:_MAX_ERRORS], *running, self._threads.submit(partial(self._do, work))]

    def take_errors(self, seconds: float | None = None) -> Sequence[BaseException]:
        """Wait for the deletions that were queued before this call. Return each error once.

        If this call is interrupted, the next call returns the errors.

        Args:
            seconds: the longest time to wait; None: no limit. If deletions take longer, the result has an error.
        """
        with self._lock:
            queued = list(self._futures)
        _, running = wait(queued, seconds)
        errors = [error for future in queued if future not in running and (error := future.exception()) is not None]
        if running:
            errors.append(
                StorageError(
                    f"{self._directory}: {len(running)} deletion(s) of steps did not end, because the storage does not "
                    "answer. Open the directory again, and delete those steps that it still has"
                )
            )
        with self._lock:
            self._futures = [future for future in self._futures if future not in queued]
        return errors

    def refuse(self) -> None:
        """Accept no more deletions."""
        with self._lock:
            self._refuses = True

    def close(self, seconds: float | None = None) -> None:
        """Accept no more deletions, and wait for the queued deletions. Further calls do nothing.

        Args:
            seconds: the longest time to wait; None: no limit.
        """
        self.refuse()
        self._threads.join(seconds)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            logger.warning("deletion in %s failed: %s", self._directory, error)
            raise


def policy_infos(steps: StepDirectory, broken: Collection[int] = ()) -> Sequence[StepInfo]:
    """Return the steps that a preservation policy decides about, in ascending order.

    The result has only committed steps that ckptcore wrote and that can be read. Other steps are ignored and never
    deleted: damaged steps, steps of other software or of a newer version, symbolic links, and checkpoints that were not
    saved as steps but have similar names.

    Args:
        steps: the directory.
        broken: steps to ignore because they are damaged.
    """
    infos = []
    committed = _readable_steps(steps)
    steps.look_ahead(committed)
    for step in committed:
        if step in broken:
            continue
        try:
            if not steps.is_ours(step):
                continue
            summary = steps.summary(step)
            if summary is None or not summary.committed:
                continue  # an uncommitted claim of an object store, which was copied to this file system
            if steps.is_adopted(step) and summary.progress.get("step") != step:
                continue  # the user saved it under a name of their own, and not as a step
            infos.append(steps.info(step))
        except CheckpointNotFoundError:
            continue  # deleted since it was listed
        except CheckpointError as error:
            steps.warn_once("step %d in %s is left alone: its root cannot be read: %s", step, steps.display, error)
    return infos


def _readable_steps(steps: StepDirectory) -> Sequence[int]:
    """Return every committed step, ascending. A step whose request fails is logged and left out."""

    def is_committed(step: int) -> bool:
        try:
            return steps.is_committed(step)
        except StorageError as error:
            steps.leave_alone(step, error)
            return False

    candidates = steps.candidates()
    answers = steps.map_ordered(candidates, is_committed)
    return [step for step, committed in zip(candidates, answers, strict=True) if committed]


@dataclass(frozen=True, slots=True)
class PendingDeletion:
    """A deletion that has begun: the step is hidden from this process. Call `perform` or `cancel`, once.

    Attributes:
        perform: delete the step.
        cancel: keep the step.
    """

    perform: Callable[[], None]
    cancel: Callable[[], None]


class StepDeleter:
    """Deletes steps of a directory that this process owns. Thread-safe. One deletion runs at a time.

    A step is hidden from this process when its deletion begins. It disappears for all processes at the same moment, and
    then its files are removed. `clean` removes the files of killed processes.
    """

    def __init__(
        self,
        steps: StepDirectory,
        store: StorageBackend,
        owned: Lock,
        context: Context,
        *,
        looks_complete: Callable[[AnyLocation, Context], bool] = has_expected_sizes,
        other_files: bool = False,
    ) -> None:
        """Create the deleter of a directory.

        Args:
            steps: the steps of the directory.
            store: the storage, opened at the directory for writing.
            owned: the lock of the owner; checked before each deletion.
            context: options.
            looks_complete: returns True if the files of a step seem complete.
            other_files: True to delete steps with files that no save wrote.
        """
        self._steps = steps
        self._other_files = other_files
        self._looks_complete = looks_complete
        self._store = store
        self._commits = steps.commit_method(store)
        self._owned = owned
        self._context = context
        self._locks = self._commits.locks(steps.display)
        self._lock = threading.Lock()
        self._claims = threading.Lock()
        """Held while the claim of a failed save is removed. Not `_lock`, because saves must not wait for deletions."""
        self._saved: set[int] = set()  # by this process
        self._deciding = threading.Lock()
        """Held while a deletion checks that another valid step exists and hides its own step."""
        self._referred: set[int] = set()  # steps that were not deleted because other checkpoints refer to them
        self._updates: set[int] = set()  # steps that refer to other checkpoints, and are being deleted
        self._refused: dict[int, Sequence[str]] = {}
        """For each step that a policy could not delete because of other files in its directory: all its files."""
        self._whole: set[str] = set()
        """The save ids of steps whose files have the right sizes."""
        self._deleting: dict[int, threading.Event] = {}
        """For each step that is being deleted: an event that is set at the end of the deletion."""

    def keep_claim(self, step: int) -> None:
        """Do not remove the claim of a step in `clean`, because this process is about to save the step."""
        with self._claims:
            self._saved.add(step)

    def clean(self) -> None:
        """Remove the files of failed saves and deletions, and expired locks. Only for the owner of the directory.

        Raises:
            StorageError: the storage failed.
            SaveLostError: another job owns the directory.
        """
        with self._recorded_clean():
            with self._lock:
                self._owned.check_without_room()
                self._commits.sweep_names(self._steps.leftovers)
                self._locks.sweep()
            if self._commits.claims_by_root:
                self._remove_claims()

    def _recorded_clean(self) -> RunningPhase:
        return Recording("delete", self._steps.display, self._context.observers, spans=False).phase("clean")

    def _remove_claims(self) -> None:
        """Remove the claims of failed saves and deletions, with their objects."""
        candidates = self._steps.candidates()
        for step, is_claimed in zip(candidates, self._steps.map_ordered(candidates, self._is_claimed), strict=True):
            if not is_claimed:
                continue
            with self._claims:
                if step in self._saved or not self._is_claimed(step):
                    continue  # a save of this step began or ended meanwhile
                logger.info("removing a failed save or deletion: %s in %s", self._steps.name(step), self._steps.display)
                self._owned.check_without_room()
                try:
                    location = self._location(step)
                    location.commit_method.remove_unfinished(location)
                except CheckpointExistsError as error:
                    logger.warning("step %d in %s stays: %s", step, self._steps.display, error)

    def _is_claimed(self, step: int) -> bool:
        """Return True if a step has a claim instead of a checkpoint; False if it cannot be read.

        Takes one small request.
        """
        try:
            return self._commits.is_committed(self._steps.name(step)) is False
        except StorageError as error:
            self._steps.leave_alone(step, error)
            return False

    def collect(
        self, policy: PreservationPolicy, *, keep: Callable[[], Collection[int]], broken: Collection[int]
    ) -> Sequence[int]:
        """Delete the steps that a policy does not keep. Return them. Steps that other steps refer to stay.

        Args:
            policy: the policy.
            keep: returns steps that must not be deleted; called right before each deletion.
            broken: damaged steps, which the policy does not see.

        Raises:
            StorageError: some steps cannot be deleted. All others were deleted.
            SaveLostError: another job owns the directory. Some steps may have been deleted.
        """
        with self._recorded_clean():
            since = self._steps.changes()
            doomed = list(what_to_delete(policy, policy_infos(self._steps, broken), time.time()))
            # Steps that refer to others come first, the newest of them first, because most bases are older.
            doomed.sort(key=lambda step: -step if self._base_names(step) else 1)
            deleted: list[int] = []
            failed: list[StorageError] = []

            def is_deleted(step: int) -> bool:
                try:
                    return not self._is_refused(step) and self._delete(step, keep, since)
                except CheckpointExistsError as error:  # its directory has another checkpoint, or other files
                    self._refused[step] = self._listing(step)
                    self._steps.warn_once("step %d in %s stays: %s", step, self._steps.display, error)
                    return False
                except StorageError as error:
                    logger.warning("step %d in %s cannot be deleted: %s", step, self._steps.display, error)
                    failed.append(error)
                    return False

            needed: set[str] = set()  # names of the bases of steps that stay
            while doomed:
                newly: list[int] = []
                waiting: set[str] = set()  # names of the bases of steps that may be deleted in the next round
                for step in doomed:
                    name = self._steps.name(step)
                    if name not in needed and name not in waiting and is_deleted(step):
                        newly.append(step)
                        continue
                    may_follow = name not in needed and (name in waiting or step in self._referred)
                    (waiting if may_follow else needed).update(self._base_names(step))
                deleted += newly
                # Each round may delete the last step that refers to a base, so the bases are tried again.
                again = [step for step in doomed if step in self._referred or self._steps.name(step) in waiting]
                doomed = again if newly else []
            if failed:
                for other in failed[1:]:
                    failed[0].add_note(f"another step cannot be deleted: {other}")
                raise failed[0]
            return deleted

    def _base_names(self, step: int) -> Sequence[str]:
        """Return the names of the checkpoints that a step refers to; none if its root cannot be read."""
        try:
            summary = self._steps.summary(step)
        except CheckpointError:
            return ()
        return () if summary is None else [base.path for base in summary.bases]

    def _is_refused(self, step: int) -> bool:
        """Return True if other files prevented the deletion of a step, and its files are the same as then.

        Lists the directory of the step only if its deletion was prevented before.
        """
        refused = self._refused.get(step)
        if refused is None or refused == self._listing(step):
            return refused is not None
        del self._refused[step]
        return False

    def _listing(self, step: int) -> Sequence[str]:
        return sorted(subdirectory(self._store, self._steps.name(step)).list())

    def begin(
        self,
        step: int,
        *,
        under_way: Callable[[], Collection[int]],
        elsewhere: Callable[[], bool] = bool,
    ) -> PendingDeletion:
        """Begin to delete a step that the user named. Call `perform` of the result to delete its files.

        Args:
            step: the step.
            under_way: returns the steps that this process is saving.
            elsewhere: returns True if another directory of the run has another valid step. Called only if this
                directory has no other valid step.

        Raises:
            CheckpointNotFoundError: the step does not exist, is being deleted, or was written by other software.
            OnlyStepError: it is the only valid step.
            StepPinnedError: a reader has pinned it, or it is being saved.
            CheckpointReferredError: other checkpoints refer to it.
        """
        if not self._steps.is_committed(step):
            raise CheckpointNotFoundError(self._steps.missing(step))
        if not self._steps.is_ours(step):
            raise CheckpointNotFoundError(
                f"step {step} in {self._steps.display} was not written by ckptcore and is left alone; remove it with "
                "your own tools"
            )
        intent = self._locks.intend_deletion(self._steps.name(step))
        if intent is None:
            raise StepPinnedError(f"step {step} in {self._steps.display} is pinned by a reader; delete it later")
        try:
            if names := self._referrers(step):
                raise CheckpointReferredError(
                    f"step {step} in {self._steps.display} cannot be deleted, because {', '.join(names[:20])} refer to "
                    "its arrays: delete them first, or replace them with copies (ckptcore.copy), which need no base"
                )
            if step in under_way():
                raise StepPinnedError(f"step {step} in {self._steps.display} is being saved; delete it later")
            ended = self._hide(step, under_way, self._steps.changes(), elsewhere)
            if ended is None:
                raise OnlyStepError(
                    f"step {step} is the only valid one in {self._steps.display}, and deleting it would lose the run; "
                    "save another one first, or remove the directory with your own tools"
                )
        except BaseException:
            intent.close()
            raise
        return PendingDeletion(
            perform=partial(self._remove, step, intent, ended), cancel=partial(self._cancel, step, intent, ended)
        )

    def _cancel(self, step: int, intent: Lock, ended: threading.Event) -> None:
        self._show(step, ended)
        intent.close()

    def wait_until_gone(self, step: int) -> None:
        """Wait while a step is being deleted, so that it can be saved again."""
        with self._deciding:
            ended = self._deleting.get(step)
        if ended is not None:
            ended.wait()

    def _delete(self, step: int, keep: Callable[[], Collection[int]], since: int) -> bool:
        """Delete a step, unless it is pinned, other checkpoints refer to it, or it must stay (see `_hide`).

        Return True if it was deleted.
        """
        intent = self._locks.intend_deletion(self._steps.name(step))
        if intent is None:
            logger.info("step %d in %s stays: a reader has pinned it", step, self._steps.display)
            return False
        with intent:
            self._referred.discard(step)
            if self._steps.is_committed(step) and (names := self._referrers(step)):
                self._referred.add(step)
                logger.info("step %d in %s stays: %s refer to it", step, self._steps.display, ", ".join(names))
                return False
            ended = self._hide(step, keep, since) if self._steps.is_committed(step) else None
            if ended is not None:
                self._remove(step, intent, ended)
        return ended is not None

    def _referrers(self, step: int) -> Sequence[str]:
        """Return the names of the checkpoints of any job in the same directory that refer to a step."""
        save_id = None
        try:
            summary = self._steps.summary(step)
            if summary is None:
                return ()
            save_id = summary.save_id
        except CheckpointNotFoundError:
            return ()
        except (CorruptCheckpointError, UnsupportedVersionError):
            pass  # its save id is unknown
        known = {}
        if self._commits.claims_by_root:
            # On object stores reading a root costs a request. Committed steps do not change, so cached roots are used;
            # overwrites by other jobs are not detected.
            known = {self._steps.name(other): other for other in self._steps.candidates()}

        def bases_of(store: StorageBackend, name: str) -> Sequence[Base]:
            if name in known:
                try:
                    root = self._steps.summary(known[name])
                    return () if root is None else root.bases
                except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedVersionError):
                    pass  # `bases_in` may still read the bases
            return bases_in(store, name)

        name = self._steps.name(step)
        threads = runtime_of(self._context).io_threads
        bases = find_bases(self._store, threads, bases_of, without=name, warn=self._steps.warn_once)
        return referring_to(name, save_id, bases)

    def has_another(self, step: int) -> bool:
        """Return True if another step is valid, judging by the sizes of its files."""
        broken = self._steps.broken
        others = (other for other in self._steps.newest_first() if other != step and other not in broken)
        return any(self._is_whole(other) for other in others)

    def _hide(
        self, step: int, keep: Callable[[], Collection[int]], since: int, elsewhere: Callable[[], bool] = bool
    ) -> threading.Event | None:
        """Hide a step from this process. Return the event that is set when its deletion ends; None if it must stay.

        A step must stay if `keep` returns it, or if this process changed it after the decision to delete it. `since`
        is the result of `StepDirectory.changes` at that decision. An undamaged step also stays if no other step is
        valid, in this directory or `elsewhere`.
        """
        with self._deciding:
            if step in keep() or self._steps.changed_since(step, since):
                return None
            if step not in self._steps.broken and not self.has_another(step) and not elsewhere():
                return None
            with suppress(CheckpointError):  # a damaged step
                if (summary := self._steps.summary(step)) is not None and summary.bases:
                    self._updates.add(step)
            self._steps.hide(step)
            ended = self._deleting[step] = threading.Event()
            return ended

    def _show(self, step: int, ended: threading.Event) -> None:
        self._steps.show(step)
        self._deleting.pop(step, None)
        ended.set()

    def _is_whole(self, step: int) -> bool:
        """Return True if every file of a step has the right size. Takes one small request for each file."""
        try:
            summary = self._steps.summary(step)
            if summary is None:
                return False  # other software wrote it, so the sizes are unknown
            if summary.save_id not in self._whole:
                if not self._looks_complete(self._steps.location(step), self._context):
                    self._steps.warn_once(
                        "step %d in %s is damaged: a file is missing or truncated", step, self._steps.display
                    )
                    return False
                self._whole.add(summary.save_id)
        except CheckpointError as error:
            self._steps.warn_once("step %d in %s cannot be read: %s", step, self._steps.display, error)
            return False
        return True

    def _remove(self, step: int, intent: Lock, ended: threading.Event) -> None:
        recording = Recording("delete", str(self._steps.location(step)), self._context.observers, step=step)
        try:
            with intent, self._lock:
                self._owned.check_without_room()  # a full disk must not prevent the deletion
                intent.check()
                location = self._location(step)
                try:
                    location.commit_method.remove(location, other_files=self._other_files)
                except CheckpointNotFoundError:
                    self._steps.expect_present()
                    if location.commit_method.is_committed(location.name):
                        raise  # its file system was not mounted for a moment
                    # Another process deleted it.
                self._steps.forget([step])
                if step in self._updates:
                    forget_bases(location)
                    self._updates.discard(step)
        except BaseException as error:
            self._steps.distrust(step)
            recording.finish(error=error)
            raise
        finally:
            self._show(step, ended)
        recording.finish()

    def _location(self, step: int) -> Location:
        return resolve_location(self._steps.location(step), runtime_of(self._context).storages, to_write=True)
