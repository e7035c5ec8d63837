"""Loading a step of a directory: one that is named, or the newest that every process of the job can load."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from ckptcore.agreement import Agreement
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    TargetUndefinedError,
    UnknownCheckpointableError,
)
from ckptcore.events import Recording
from ckptcore.holds import Hold, StepHolds
from ckptcore.loading import recorded_load
from ckptcore.locations import Within, open_directory
from ckptcore.model.tree import JSON
from ckptcore.step_names import step_number
from ckptcore.steps import StepDirectory

__all__ = ["Loading", "SkippedStep", "StepLoader"]

logger = logging.getLogger("ckptcore.steps")

T = TypeVar("T")

_LISTINGS: Final = 20
"""How often a load looks for newer steps, where those that it knew were deleted before it came to them."""


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that a load passed over.

    Attributes:
        step: its number.
        reason: why it could not be loaded.
    """

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Loading(Generic[T]):
    """How a step is loaded.

    Attributes:
        run: loads the step at a place.
        changes: what it fills or restores in place, in words; None if nothing.
    """

    run: Callable[[Within, Recording], T]
    changes: str | None = None


@dataclass(slots=True)
class _Passed:
    """What a load has passed over so far.

    Attributes:
        skipped: the steps, in the order in which they were tried.
        last: why the last failed in this process; None if it failed in others.
        changed: whether what was to be restored in place is changed, and holds no whole step.
        all_gone: whether all were deleted, as against damaged.
        listed: whether it was looked at all.
    """

    skipped: list[SkippedStep] = field(default_factory=list)
    last: Exception | None = None
    changed: bool = False
    all_gone: bool = True
    listed: bool = False

    def failure(self, directory: str) -> CheckpointError:
        """What to raise where nothing is left to try."""
        if not self.skipped:
            return CheckpointNotFoundError(f"there is no committed step in {directory}; save one first")
        told = "; ".join(f"step {skip.step}: {skip.reason}" for skip in self.skipped)
        message = f"none of the steps in {directory} can be loaded: {told}"
        if self.changed:
            return TargetUndefinedError(message)
        return CheckpointNotFoundError(message) if self.all_gone else CorruptCheckpointError(message)


class StepLoader:
    """Loads steps of a directory, each pinned meanwhile, and remembers what it passed over.

    Attributes:
        restored_step: the step that was loaded last; None before.
        skipped_steps: the newer steps that the last load passed over, the newest first.
        broken: the steps that were found to be damaged, and not replaced since.
    """

    def __init__(
        self,
        steps: StepDirectory,
        context: Context,
        *,
        agree: Callable[[str], Agreement],
        reload: Callable[[], None],
    ) -> None:
        """Load nothing yet.

        Args:
            steps: the directory.
            context: options.
            agree: begins an exchange between the processes of the job; called on all or none.
            reload: lists the directory again, on all or none.
        """
        self._steps = steps
        self._context = context
        self._agree = agree
        self._reload = reload
        self._holds: StepHolds | None = None
        self.restored_step: int | None = None
        self.skipped_steps: tuple[SkippedStep, ...] = ()
        self.broken: set[int] = set()

    def pin(self, step: int) -> Hold:
        """Keep a step from being deleted until the result is closed.

        Raises:
            CheckpointNotFoundError: if the step is not there.
            StorageError: if nothing can be written beside the steps.
        """
        if self._holds is None:
            context = self._context
            store = open_directory(self._steps.directory, context.registry, durable=False, config=context.storage)
            self._holds = StepHolds(store, self._steps.display)
        if not self._steps.is_committed(step):
            raise CheckpointNotFoundError(self._steps.missing(step))  # before anything is written beside the steps
        pin = self._holds.pin(self._steps.name(step))
        try:
            # What is there is looked at only now: before, it could have been deleted.
            if not self._steps.look_again(step):
                raise CheckpointNotFoundError(self._steps.missing(step))
        except BaseException:
            pin.close()
            raise
        return pin

    def load(self, step: int | None, loading: Loading[T]) -> T:
        """Load a step, or with None the newest that is not damaged.

        Raises:
            CheckpointNotFoundError: if there is none.
            CorruptCheckpointError: if it is damaged, or all are.
            TargetUndefinedError: if something was changed in place and no step could be loaded into it.
        """
        if step is not None:
            step = step_number(step, hint="; what is to be loaded is given as abstract= or wanted=")
            agreement = self._agree(f"load-{step}")
            with agreement.stage("load"):
                loaded = self._attempt(step, loading, agreement.part("begin"))
            self.restored_step, self.skipped_steps = step, ()
            self.broken.discard(step)
            return loaded
        return self._load_newest(loading)

    def _load_newest(self, loading: Loading[T]) -> T:
        """Load the newest step that every process can load."""
        passed = _Passed()
        for _ in range(_LISTINGS):
            step, is_moving = self._next(passed)
            while step is not None:
                loaded = self._try(step, loading, passed)
                if loaded is not None:
                    self.restored_step = step
                    self.skipped_steps = tuple([skip for skip in passed.skipped if skip.step > step])
                    self.broken.discard(step)
                    return loaded[0]
                step, is_moving = self._next(passed)
            if not (passed.all_gone and is_moving):
                break
            self._reload()  # others have deleted what was known here, and have saved something newer before
        self.skipped_steps = tuple(passed.skipped)
        raise passed.failure(self._steps.display) from passed.last

    def _next(self, passed: _Passed) -> tuple[int | None, bool]:
        """The newest step that was not tried; if there is none, whether another listing may show one."""
        tried = {skip.step for skip in passed.skipped}

        def choose() -> tuple[int | None, bool]:
            step = next((step for step in self._steps.newest_first() if step not in tried), None)
            # Nothing is listed before anything was: a reader may have been made before the run.
            return step, bool(tried) or bool(self._steps.candidates()) or not passed.listed

        chosen: tuple[int | None, bool] = self._agree("choose").lead("choose", choose)
        passed.listed = True
        return chosen

    def _try(self, step: int, loading: Loading[T], passed: _Passed) -> tuple[T] | None:
        """Load a step; None if it is damaged or gone for any of the processes."""
        loaded: tuple[T] | None = None
        agreement = self._agree(f"load-{step}")
        # Who cannot load it tells the others, and does not fail for it.
        try:
            with agreement.stage("load") as stage:
                try:
                    loaded = (self._attempt(step, loading, agreement.part("begin")),)
                except (CorruptCheckpointError, CheckpointNotFoundError, TargetUndefinedError) as error:
                    if not _is_damage(error):
                        raise
                    passed.last = error
                    passed.changed = passed.changed or isinstance(error, TargetUndefinedError)
                    stage.payload = [str(error), isinstance(error, CheckpointNotFoundError)]
        except CheckpointError as error:
            # Refused here, or in another process: but something before has changed what was to be restored.
            changed = loading.changes if passed.changed or loaded is not None else None
            if changed is None or isinstance(error, TargetUndefinedError):
                raise
            raise TargetUndefinedError(
                f"{changed} holds what is left of a step by now, and step {step} in {self._steps.display} cannot be loaded into it: "
                f"{error}"
            ) from error
        outcome: Any = agreement.lead("outcome", functools.partial(_outcome, stage.payloads))
        if outcome is None:
            return loaded
        reason, is_gone = outcome
        logger.warning(
            "step %d in %s cannot be loaded, the one before it is tried: %s", step, self._steps.display, reason
        )
        passed.skipped.append(SkippedStep(step, reason))
        passed.all_gone = passed.all_gone and is_gone
        passed.changed = passed.changed or (loaded is not None and loading.changes is not None)
        if not is_gone:
            self.broken.add(step)
        return None

    def _attempt(self, step: int, loading: Loading[T], agreement: Agreement) -> T:
        """Load a step. Where processes read for each other, all begin or none does: `agreement` is for that."""
        place = self._steps.place(step)
        with ExitStack() as held:

            def begin() -> JSON:
                if not self._steps.is_committed(step):
                    raise CheckpointNotFoundError(self._steps.missing(step))
                held.enter_context(self._pinned_to_load(step))
                return None

            if self._context.reads == "all":
                begin()
            else:
                from ckptcore.joint_steps import take_step  # only who shares needs it

                take_step(agreement, "pin", begin, stands=lambda: True)
            with recorded_load(place, self._context, step=step) as recording:
                return loading.run(place, recording)

    def _pinned_to_load(self, step: int) -> Hold | nullcontext[None]:
        """A pin for the time of a load; none where nothing can be written."""
        try:
            return self.pin(step)
        except StorageError as error:
            logger.debug("step %d in %s is loaded without a pin: %s", step, self._steps.display, error)
            return nullcontext()


def _is_damage(error: BaseException) -> bool:
    """Whether an error says that what is stored is damaged or gone, and not that it was asked for wrongly."""
    if isinstance(error, TargetUndefinedError):
        return error.__cause__ is not None and _is_damage(error.__cause__)
    if isinstance(error, UnknownCheckpointableError):
        return False
    return isinstance(error, CorruptCheckpointError | CheckpointNotFoundError)


def _outcome(payloads: Sequence[Any]) -> JSON:
    """What processes said of a load: the first reason and whether the step is gone for all that failed; None: none did."""
    failed = [payload for payload in payloads if payload is not None]
    return [failed[0][0], all(is_gone for _, is_gone in failed)] if failed else None
