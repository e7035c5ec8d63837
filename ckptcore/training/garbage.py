"""Steps that retention gives up, and their deletion."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Final

from ckptcore.commit.delete import bases_beside, find_bases, referring_to
from ckptcore.commit.location import Location, Place, commit_method, resolve_location
from ckptcore.commit.locks import Lock
from ckptcore.commit.root import Base, new_save_id
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
from ckptcore.events import Recording
from ckptcore.io.background import BackgroundThreads
from ckptcore.loading.verify import has_its_sizes
from ckptcore.policies import PreservationPolicy, StepInfo, what_to_delete
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.training.steps import StepDirectory

__all__ = [
    "BegunDeletion",
    "Cleaner",
    "StepDeleter",
    "policy_infos",
    "readable_steps",
]

logger = logging.getLogger("ckptcore.garbage")

_MOST_UNHEARD: Final = 100
"""How many errors are kept to be told; all are logged."""


class Cleaner:
    """Does work in the background, one thing after the other, and keeps the errors until somebody takes them. Any thread may ask.

    The thread begins with the first work.
    """

    def __init__(self, directory: str) -> None:
        """Do nothing yet.

        Args:
            directory: what is cleaned, as the log calls it.
        """
        self._directory = directory
        self._lock = RLock()  # reentrant: without a thread, work runs while the lock is held
        self._refuses = False
        self._threads = BackgroundThreads(1, "ckptcore-clean")
        self._asked: list[Future[None]] = []

    def __len__(self) -> int:
        """How much of what was asked for is kept, because nobody has heard yet how it ended."""
        with self._lock:
            return len(self._asked)

    def begin(self, work: Callable[[], object]) -> None:
        """Do work after what was asked for before; nothing once it refuses: the next owner of the directory cleans what is left over."""
        with self._lock:
            if self._refuses:
                return
            self._asked = [*self._unheard(), self._threads.submit(partial(self._do, work))]

    def take_errors(self) -> Sequence[BaseException]:
        """Wait until all that was asked for before this call is done; what failed, each told once.

        Who is interrupted while it waits has taken nothing.
        """
        with self._lock:
            asked = list(self._asked)
        errors = [error for work in asked if (error := work.exception()) is not None]
        with self._lock:
            self._asked = [work for work in self._asked if work not in asked]
        return errors

    def refuse(self) -> None:
        """Take no more work."""
        with self._lock:
            self._refuses = True

    def close(self) -> None:
        """Take no more work, and return once what was asked for is done. Again is no error."""
        self.refuse()
        self._threads.join()

    def _unheard(self) -> list[Future[None]]:
        failed = [work for work in self._asked if work.done() and work.exception() is not None]
        running = [work for work in self._asked if not work.done()]
        return [*failed[:_MOST_UNHEARD], *running]

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            logger.warning("cleaning %s failed: %s", self._directory, error)
            raise


_NOT_ALLOWED: Final = frozenset({errno.EACCES, errno.EPERM})


def policy_infos(steps: StepDirectory, broken: Collection[int] = ()) -> Sequence[StepInfo]:
    """What a preservation policy decides over: committed steps of ours that can be read, ascending.

    What other software wrote, what is known to be broken, and what a newer version wrote is left alone, and counts for nothing.
    So are unreadable steps, and symbolic links.

    Args:
        steps: the directory.
        broken: steps that were found to be damaged.
    """
    infos = []
    committed = readable_steps(steps)
    steps.look_ahead(committed)
    for step in committed:
        if step in broken:
            continue
        try:
            if not steps.is_ours(step):
                continue
            summary = steps.summary(step)
            if summary is None or not summary.committed:
                continue  # a claim that was copied from storage that has claims
            infos.append(steps.info(step))
        except CheckpointNotFoundError:
            continue  # deleted since it was listed
        except CheckpointError as error:
            logger.warning("step %d in %s is left alone: its root cannot be read: %s", step, steps.display, error)
    return infos


def readable_steps(steps: StepDirectory) -> Sequence[int]:
    """Return every committed step, ascending. Steps for which the storage fails are logged and left out."""

    def is_committed(step: int) -> bool:
        try:
            return steps.is_committed(step)
        except StorageError as error:
            logger.warning("step %d in %s is left alone: it cannot be read: %s", step, steps.display, error)
            return False

    candidates = steps.candidates()
    there = steps.ask_each(candidates, is_committed)
    return [step for step, committed in zip(candidates, there, strict=True) if committed]


@dataclass(frozen=True, slots=True)
class BegunDeletion:
    """A step that is gone for this process already. One of both is to be called, once.

    Attributes:
        perform: removes its files.
        cancel: lets it stay.
    """

    perform: Callable[[], None]
    cancel: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a deletion was decided by.

    Attributes:
        since: `StepDirectory.changes` as it was then.
        keep: gives the steps that stay now.
    """

    since: int
    keep: Callable[[], Collection[int]]


class StepDeleter:
    """Deletes steps of a directory that this process owns. One thread at a time deletes; any may ask.

    A step is no longer there for this process once its deletion began, and vanishes for all at once; its files are removed
    afterwards. What a killed process left of that is removed by `clean`.
    """

    def __init__(
        self,
        steps: StepDirectory,
        store: StorageBackend,
        owned: Lock,
        context: Context,
        *,
        looks_whole: Callable[[Place, Context], bool] = has_its_sizes,
    ) -> None:
        """Delete in a directory.

        Args:
            steps: which there are.
            store: the storage, opened at the directory, as durable as deletions are to be.
            owned: the ownership of the directory; checked before each deletion.
            context: options.
            looks_whole: whether a step at a place seems to be undamaged.
        """
        self._steps = steps
        self._looks_whole = looks_whole
        self._store = store
        self._commits = commit_method(store)
        self._owned = owned
        self._context = context
        self._locks = self._commits.locks(steps.display)
        self._lock = threading.Lock()
        self._written: set[int] = set()
        self._claims = threading.Lock()
        """That a claim is a dead one's, and that it goes, is one decision; nobody who saves waits for other deletions."""
        self._deciding = threading.Lock()
        """Whether another valid step stays, and that this one goes, is one decision."""
        self._referred: set[int] = set()  # steps that stayed because others refer to them
        self._whole: set[str] = set()
        """The saves whose files were found to have their sizes."""
        self._going: dict[int, threading.Event] = {}
        """The steps that are being deleted; set when that is over."""

    def spare(self, step: int) -> None:
        """Say that this process is about to write a step, so that a claim found there is not a dead one's."""
        with self._claims:
            self._written.add(step)

    def clean(self) -> None:
        """Remove what dead saves, deletions, readers left. Only the owner of the directory may: all else in it is dead.

        Raises:
            StorageError, SaveLostError
        """
        with Recording("delete", self._steps.display, self._context.observers).phase("clean"):
            self._clean()

    def _clean(self) -> None:
        with self._lock:
            self._owned.check()
            self._commits.sweep_names(self._steps.leftovers)
            self._locks.sweep()
        if not self._commits.claims_by_root:
            return
        # Claims: saves that never committed, and deletions that were begun. A run of many steps has few of them.
        candidates = self._steps.candidates()
        for step, is_claimed in zip(candidates, self._steps.ask_each(candidates, self._is_claimed), strict=True):
            if not is_claimed:
                continue
            with self._claims:
                if step in self._written or not self._is_claimed(step):
                    continue  # a save began there since, or ended
                logger.info(
                    "removing what a dead save or deletion left: %s in %s",
                    self._steps.name(step),
                    self._steps.display,
                )
                self._owned.check()
                try:
                    location = self._location(step)
                    location.commits.remove_unfinished(location, new_save_id(), runtime_of(self._context).conditions)
                except CheckpointExistsError as error:
                    logger.warning("step %d in %s stays: %s", step, self._steps.display, error)

    def _is_claimed(self, step: int) -> bool:
        """Return whether a step has a claim and no committed checkpoint. One small request.

        Returns False if the step cannot be read.
        """
        try:
            return self._commits.is_committed(self._steps.name(step)) is False
        except StorageError as error:
            logger.warning("step %d in %s is left alone: it cannot be read: %s", step, self._steps.display, error)
            return False

    def collect(
        self, policy: PreservationPolicy, *, keep: Callable[[], Collection[int]], broken: Collection[int]
    ) -> Sequence[int]:
        """Delete what a policy gives up; the steps that were deleted.

        Args:
            policy: which steps to keep.
            keep: gives the steps that stay whatever the policy says; asked right before each deletion.
            broken: steps that are damaged; they are left alone.

        Raises:
            StorageError: some steps cannot be deleted; all others are.
            SaveLostError: another job owns the directory; some may be deleted.
        """
        with Recording("delete", self._steps.display, self._context.observers).phase("clean"):
            since = self._steps.changes()
            doomed = list(what_to_delete(policy, policy_infos(self._steps, broken), time.time()))
            deleted: list[int] = []
            failed: list[StorageError] = []

            def is_deleted(step: int) -> bool:
                try:
                    return self._delete(step, broken, _Plan(since, keep))
                except CheckpointExistsError as error:  # another checkpoint is inside the step
                    logger.warning("step %d in %s stays: %s", step, self._steps.display, error)
                    return False
                except StorageError as error:
                    logger.warning("step %d in %s cannot be deleted: %s", step, self._steps.display, error)
                    failed.append(error)
                    return False

            while doomed:
                # What others refer to goes once these are gone.
                gone = [step for step in doomed if is_deleted(step)]
                deleted += gone
                doomed = [step for step in doomed if step in self._referred] if gone else []
            if failed:
                for other in failed[1:]:
                    failed[0].add_note(f"another step cannot be deleted: {other}")
                raise failed[0]
            return deleted

    def begin(
        self,
        step: int,
        *,
        broken: Collection[int],
        under_way: Callable[[], Collection[int]],
        elsewhere: Callable[[], bool] = bool,
    ) -> BegunDeletion:
        """Begin to delete one step that the user named; the result deletes it.

        Args:
            step: which.
            broken: steps that are damaged.
            under_way: gives the steps that this process is saving.
            elsewhere: whether another directory of the same run has another step that is valid; asked where this one has none.

        Raises:
            CheckpointNotFoundError: if it is not there, is being deleted already, or other software wrote it.
            OnlyStepError: if it is the only one that is valid.
            StepPinnedError: if a reader has pinned it, or it is being saved.
            CheckpointReferredError: if others have arrays in it.
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
                    f"step {step} in {self._steps.display} has arrays of {', '.join(names[:20])}: delete those first; "
                    "a copy by ckptcore.copy needs no base"
                )
            if step in under_way():
                raise StepPinnedError(f"step {step} in {self._steps.display} is being saved; delete it later")
            going = self._doom(step, broken, _Plan(self._steps.changes(), under_way), elsewhere)
            if going is None:
                raise OnlyStepError(
                    f"step {step} is the only valid one in {self._steps.display}, and deleting it would lose the run; "
                    "save another one first, or remove the directory with ckptcore.delete or your own tools"
                )
        except BaseException:
            intent.close()
            raise
        return BegunDeletion(
            perform=partial(self._vanish, step, intent, going), cancel=partial(self._relent, step, intent, going)
        )

    def _relent(self, step: int, intent: Lock, going: threading.Event) -> None:
        """Let a step stay that was to be deleted."""
        self._steps.show(step)
        self._going.pop(step, None)
        going.set()
        intent.close()

    def wait_until_gone(self, step: int) -> None:
        """Wait while a step is being deleted, so that it can be saved again."""
        with self._deciding:
            going = self._going.get(step)
        if going is not None:
            going.wait()

    def _delete(self, step: int, broken: Collection[int], plan: _Plan) -> bool:
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
            going = self._doom(step, broken, plan) if self._steps.is_committed(step) else None
            if going is not None:
                self._vanish(step, intent, going)
        return going is not None

    def _referrers(self, step: int) -> Sequence[str]:
        """The names of what refers to a step in the same directory, whoever saved it."""
        save_id = None
        try:
            summary = self._steps.summary(step)
            if summary is None:
                return ()
            save_id = summary.save_id
        except CheckpointNotFoundError:
            return ()
        except (CorruptCheckpointError, UnsupportedVersionError):
            pass  # which save it is cannot be known
        known = {}
        if self._commits.claims_by_root:
            # Elsewhere a root is a request, and a step that was committed stays as it was; who else overwrites it is not heard of.
            known = {self._steps.name(other): other for other in self._steps.candidates()}

        def bases_of(store: StorageBackend, name: str) -> Sequence[Base]:
            try:
                if name in known:
                    try:
                        found = self._steps.summary(known[name])
                        return () if found is None else found.bases
                    except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedVersionError):
                        pass  # `bases_beside` may still read the bases
                return bases_beside(store, name)
            except StorageError as error:
                if not isinstance(error, PermissionError) and error.errno not in _NOT_ALLOWED:
                    raise
                logger.warning("%s in %s is taken to refer to no step: %s", name, self._steps.display, error)
                return ()

        name = self._steps.name(step)
        beside = find_bases(self._store, runtime_of(self._context).io_threads, bases_of, without=name)
        return referring_to(name, save_id, beside)

    def has_another(self, step: int, broken: Collection[int]) -> bool:
        """Whether another step than this one is valid, as far as the sizes of its files tell.

        Args:
            step: which.
            broken: steps that are damaged.
        """
        others = (other for other in self._steps.newest_first() if other != step and other not in broken)
        return any(self._is_whole(other) for other in others)

    def _doom(
        self, step: int, broken: Collection[int], plan: _Plan, elsewhere: Callable[[], bool] = bool
    ) -> threading.Event | None:
        """Let a step be gone for this process; None if it must stay.

        It must where no other is valid, where it is being saved, and where it was saved since the plan was made.
        """
        with self._deciding:
            if step in plan.keep() or self._steps.changed_since(step, plan.since):
                return None
            if step not in broken and not self.has_another(step, broken) and not elsewhere():
                return None
            self._steps.hide(step)
            going = self._going[step] = threading.Event()
            return going

    def _is_whole(self, step: int) -> bool:
        """Whether every file of a step has the size that it was written with; one small request for each."""
        try:
            summary = self._steps.summary(step)
            if summary is None:
                return False  # other software wrote it: what it has cannot be known
            if summary.save_id not in self._whole:
                if not self._looks_whole(self._steps.place(step), self._context):
                    logger.warning(
                        "step %d in %s is damaged: a file of it is missing or cut off", step, self._steps.display
                    )
                    return False
                self._whole.add(summary.save_id)
        except CheckpointError as error:
            logger.warning("step %d in %s cannot be read: %s", step, self._steps.display, error)
            return False
        return True

    def _vanish(self, step: int, intent: Lock, going: threading.Event) -> None:
        recording = Recording("delete", str(self._steps.place(step)), self._context.observers, step=step)
        try:
            with intent, self._lock:
                self._owned.check()
                intent.check()
                location = self._location(step)
                location.commits.remove(location, new_save_id(), runtime_of(self._context).conditions)
                self._steps.forget([step])
        except BaseException as error:
            self._steps.distrust(step)
            recording.finish(error=error)
            raise
        finally:
            self._steps.show(step)
            self._going.pop(step, None)
            going.set()
        recording.finish()

    def _location(self, step: int) -> Location:
        place = self._steps.place(step)
        durable = self._context.durability == "full"
        return resolve_location(
            place, runtime_of(self._context).registry, durable=durable, config=self._context.storage
        )
