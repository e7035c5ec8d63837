"""StepLoader: loads a given step of a run, or the newest step that every process of the job can load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from ckptcore.commit.location import AnyLocation
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PartialLoadError,
    RankFailedError,
    StorageError,
    TargetUndefinedError,
    UnknownCheckpointableError,
)
from ckptcore.events import Recording, logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.loading.joint import take_step
from ckptcore.loading.load import recorded_load
from ckptcore.model.tree import JSON
from ckptcore.other_libraries import hint_of_step
from ckptcore.saving.requests import as_integer
from ckptcore.training.run_directory import RunSteps

logger = logger_named("ckptcore.training")

T = TypeVar("T")

_LISTINGS: Final = 20
"""Maximum number of listings by one load, which lists again if all listed steps were deleted meanwhile."""


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that a load skipped.

    Attributes:
        step: its number.
        reason: why it could not be loaded.
    """

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepLoad(Generic[T]):
    """A function that loads a step.

    Attributes:
        run: loads the step at a location.
        changes: what `run` changes in place, in words; None if nothing.
    """

    run: Callable[[AnyLocation, Recording], T]
    changes: str | None = None


class _StepCopy(NamedTuple):
    """A copy of a step in one of the directories of a run.

    Attributes:
        step: the number of the step.
        directory: the number of the directory.
    """

    step: int
    directory: int


@dataclass(slots=True)
class _SkippedCopies:
    """The copies that a load has skipped so far.

    Attributes:
        reasons: the reason for each copy, in the order in which they were tried.
        last: the last error in this process; None if only other processes failed.
        changed: True if a failed load changed the target, so that the target does not have the state of any step.
        all_gone: True if all copies tried so far were deleted; False if a copy was damaged.
        listed: True once steps were listed.
    """

    reasons: dict[_StepCopy, str] = field(default_factory=dict)
    last: Exception | None = None
    changed: bool = False
    all_gone: bool = True
    listed: bool = False

    @property
    def skipped(self) -> Sequence[SkippedStep]:
        """The skipped steps, each once, in the order in which they were tried."""
        by_step: dict[int, list[str]] = {}
        for copy, reason in self.reasons.items():
            by_step.setdefault(copy.step, []).append(reason)
        return [SkippedStep(step, "; and ".join(reasons)) for step, reasons in by_step.items()]

    def failure(self, directory: str) -> CheckpointError:
        """Return the error to raise if no copy is left."""
        if not self.reasons:
            return CheckpointNotFoundError(
                f"there is no committed step in {directory}: check the path of the run, or save a step first"
            )
        reasons = "; ".join(f"step {skip.step}: {skip.reason}" for skip in self.skipped)
        message = f"none of the steps in {directory} can be loaded: {reasons}"
        if self.changed:
            return TargetUndefinedError(message)
        return CheckpointNotFoundError(message) if self.all_gone else CorruptCheckpointError(message)


class StepLoader:
    """Loads steps of a run. A step is pinned while it is loaded, in a shared directory by the leader for all processes.

    Attributes:
        restored_step: the last loaded step; None before the first load.
        skipped_steps: the newer steps that the last load skipped, newest first.
    """

    def __init__(
        self, steps: RunSteps, context: Context, *, agree: Callable[[str], Agreement], reload: Callable[[], None]
    ) -> None:
        """Create a loader.

        Args:
            steps: the steps of the run.
            context: options.
            agree: begins an exchange between the processes of the job; called on all ranks or on none.
            reload: lists the steps again; called on all ranks or on none.
        """
        self._steps = steps
        self._directories = steps.directories
        self._context = context
        self._agree = agree
        self._reload = reload
        self.restored_step: int | None = None
        self.skipped_steps: tuple[SkippedStep, ...] = ()

    def load(self, step: int | None, loading: StepLoad[T]) -> T:
        """Load a step; None: the newest step that is not damaged. Of several copies, load the best valid copy.

        Raises:
            CheckpointNotFoundError: there is no such step.
            CorruptCheckpointError: the step is damaged, or all steps are.
            TargetUndefinedError: the target was changed, and no step could be loaded into it.
        """
        if step is not None:
            step = as_integer("step", step, hint=hint_of_step(step))
            loaded = self._load_named(step, loading)
            self.restored_step, self.skipped_steps = step, ()
            return loaded
        return self._load_newest(loading)

    def _load_named(self, step: int, loading: StepLoad[T]) -> T:
        """Load a step. If no copy can be loaded, raise the error of the last copy."""
        skipped = _SkippedCopies()
        *better, last = self._copies_of(step)
        for number in better:
            loaded = self._try(_StepCopy(step, number), loading, skipped)
            if loaded is not None:
                return loaded[0]
        agreement = self._agree(f"load-{step}")
        has_loaded = False
        try:
            with ExitStack() as pinned, ExitStack() as recorded, agreement.stage("load"):
                copy = _StepCopy(step, last)
                self._pin_together(copy, agreement.part("begin"), pinned)
                value = self._attempt(copy, loading, recorded)
                has_loaded = True
        except CheckpointError as error:
            for skip in skipped.skipped:
                error.add_note(f"another copy: {skip.reason}")
            is_changed = skipped.changed or (has_loaded and loading.changes is not None)
            if is_changed and not isinstance(error, TargetUndefinedError):
                raise _left_undefined(loading.changes, step, self._display(last), error) from error
            raise
        self._directories[last].broken.discard(step)
        return value

    def _copies_of(self, step: int) -> Sequence[int]:
        """Return the numbers of the directories from which to load a step, at least one. The leader chooses them."""
        count = len(self._directories)
        if count == 1:
            return [0]
        copies: list[int] = self._agree("copies").lead("copies", lambda: list(self._steps.copies(step)))
        return copies or [count - 1]

    def _display(self, number: int) -> str:
        return self._directories[number].display

    def _load_newest(self, loading: StepLoad[T]) -> T:
        """Load the newest step that every process can load."""
        skipped = _SkippedCopies()
        for _ in range(_LISTINGS):
            while True:
                with ExitStack() as pinned:
                    copy, is_moving = self._next(skipped, pinned)
                    loaded = None if copy is None else self._try(copy, loading, skipped, pinned)
                if copy is None:
                    break
                if loaded is not None:
                    self.restored_step = copy.step
                    self.skipped_steps = tuple([skip for skip in skipped.skipped if skip.step > copy.step])
                    return loaded[0]
            if not (skipped.all_gone and is_moving):
                break
            self._reload()  # another process has deleted the known steps and saved newer steps
        self.skipped_steps = tuple(skipped.skipped)
        raise skipped.failure(self._steps.main.display) from skipped.last

    def _next(self, skipped: _SkippedCopies, pinned: ExitStack) -> tuple[_StepCopy | None, bool]:
        """Choose and pin the best untried copy of the newest step. The leader skips those that were deleted meanwhile.

        Returns:
            The copy, and True if another listing may show more steps.
        """
        tried = skipped.reasons.keys()

        def choose() -> tuple[_StepCopy | None, str | None, list[tuple[_StepCopy, str]], bool]:
            chosen, pin, gone = None, None, []
            for copy in self._untried(tried):
                try:
                    pin = self._pin_to_load(copy, pinned)
                except CheckpointNotFoundError as error:
                    skipped.last = error
                    gone.append((copy, str(error)))
                    continue
                chosen = copy
                break
            # Without candidates, list again once: the reader may have been created before the first step was saved.
            return chosen, pin, gone, bool(tried) or bool(self._steps.candidates()) or not skipped.listed

        agreement = self._agree("choose")
        chosen, pin, gone, is_moving = agreement.lead("choose", choose)
        for copy, reason in gone:
            self._skip(_StepCopy(*copy), reason, skipped)
        skipped.listed = True
        if chosen is None:
            return None, is_moving
        if agreement.rank != 0:
            self._pin_on_host(_StepCopy(*chosen), pin, pinned)
        return _StepCopy(*chosen), is_moving

    def _untried(self, tried: Collection[_StepCopy]) -> Iterator[_StepCopy]:
        for step in reversed(self._steps.candidates()):  # raises the error of a newer step rather than skipping it
            for number in self._steps.copies(step):
                if _StepCopy(step, number) not in tried:
                    yield _StepCopy(step, number)

    def _try(
        self, copy: _StepCopy, loading: StepLoad[T], skipped: _SkippedCopies, pinned: ExitStack | None = None
    ) -> tuple[T] | None:
        """Load a copy of a step. Return None if any process finds it damaged or deleted.

        Args:
            copy: the copy.
            loading: loads it.
            skipped: gets it, if it is damaged or deleted.
            pinned: has the pin of a copy that the leader chose; None: pin it.
        """
        directory = self._directories[copy.directory]
        loaded: tuple[T] | None = None
        damage: Exception | None = None
        agreement = self._agree(f"load-{copy.step}")
        # A process that cannot load this copy reports its error to the other processes, and does not raise it.
        try:
            with ExitStack() as own, ExitStack() as recorded:
                with agreement.stage("load") as stage:
                    stage.decide = lambda: _outcome(stage.payloads)
                    try:
                        if pinned is None:
                            self._pin_together(copy, agreement.part("begin"), own)
                        loaded = (self._attempt(copy, loading, recorded),)
                    except (CorruptCheckpointError, CheckpointNotFoundError, TargetUndefinedError) as error:
                        if not _is_damage(error):
                            raise
                        skipped.last = damage = error
                        skipped.changed = skipped.changed or isinstance(error, TargetUndefinedError)
                        stage.payload = [str(error), isinstance(error, CheckpointNotFoundError)]
                if stage.decision is not None:
                    raise damage or RankFailedError(stage.decision[0])  # only for the events of this attempt
        except CheckpointError as error:
            if stage.decision is None:
                # An error that is not damage, here or in another process. The load of an earlier copy may have changed
                # the target.
                changed = loading.changes if skipped.changed or loaded is not None else None
                if changed is None or isinstance(error, TargetUndefinedError):
                    raise
                raise _left_undefined(changed, copy.step, self._display(copy.directory), error) from error
        if stage.decision is None:
            directory.broken.discard(copy.step)
            return loaded
        reason, is_gone = stage.decision
        self._skip(copy, reason, skipped)
        skipped.all_gone = skipped.all_gone and is_gone
        skipped.changed = skipped.changed or (loaded is not None and loading.changes is not None)
        if not is_gone:
            directory.broken.add(copy.step)
        return None

    def _skip(self, copy: _StepCopy, reason: str, skipped: _SkippedCopies) -> None:
        """Log and note that a copy cannot be loaded."""
        self._directories[copy.directory].warn_once(
            "step %d in %s cannot be loaded, trying %s: %s",
            copy.step,
            self._display(copy.directory),
            "the step before it"
            if copy.directory + 1 == len(self._directories)
            else "another copy, or the step before it",
            reason,
        )
        skipped.reasons[copy] = reason

    def _pin_together(self, copy: _StepCopy, agreement: Agreement, pinned: ExitStack) -> None:
        """Pin a step in an exchange: either all processes of `agreement` begin to load it, or none.

        Args:
            copy: the copy of the step.
            agreement: the exchange.
            pinned: gets the pin. It is closed when all processes have ended.
        """
        steps = self._directories[copy.directory]

        def begin() -> JSON:
            if not steps.is_committed(copy.step):
                raise CheckpointNotFoundError(steps.missing(copy.step))
            return self._pin_to_load(copy, pinned) if agreement.rank == 0 else None

        decided = take_step(agreement, "pin", begin, is_current=lambda: True, decide=lambda messages: messages[0])
        assert decided is not None, "the attempt is current"
        if agreement.rank != 0:
            self._pin_on_host(copy, decided[0], pinned)

    def _attempt(self, copy: _StepCopy, loading: StepLoad[T], recorded: ExitStack) -> T:
        """Load a copy of a step, which is pinned.

        Args:
            copy: the copy.
            loading: loads it.
            recorded: ends the recording; closed when all processes know whether the load succeeded.
        """
        steps, step = self._directories[copy.directory], copy.step
        location = self._steps.copy_location(step, copy.directory)
        recording = recorded.enter_context(recorded_load(location, self._context, step=step))
        try:
            return loading.run(location, recording)
        except PartialLoadError:
            self.restored_step = copy.step
            raise
        except (CorruptCheckpointError, CheckpointNotFoundError):
            steps.expect_present()  # files of a file system that is not mounted are not missing
            raise

    def _pin_to_load(self, copy: _StepCopy, pinned: ExitStack) -> str | None:
        """Pin a step for a load. Return the key of the pin; None if the directory is not writable."""
        try:
            return pinned.enter_context(self._directories[copy.directory].pin(copy.step)).key
        except StorageError as error:
            logger.debug("step %d in %s is loaded without a pin: %s", copy.step, self._display(copy.directory), error)
            return None

    def _pin_on_host(self, copy: _StepCopy, pin: str | None, pinned: ExitStack) -> None:
        """Pin a step unless the pin of the leader is in this directory, too.

        A shared directory has one pin. A path on the disks of several hosts has one on each of them. An error is logged
        and not raised: the other processes already wait in the load, which also reports that the step was deleted.

        Args:
            copy: the copy of the step.
            pin: the key of the leader's pin; None if it has none.
            pinned: gets the pin.
        """
        steps = self._directories[copy.directory]
        with suppress(Exception):
            if pin is not None and steps.has_pin(pin):
                return
        try:
            pinned.enter_context(steps.pin(copy.step))
        except Exception as error:  # noqa: BLE001  # see above
            logger.debug("step %d in %s is loaded without a pin: %s", copy.step, steps.display, error)


def _left_undefined(changes: str | None, step: int, directory: str, error: CheckpointError) -> TargetUndefinedError:
    return TargetUndefinedError(
        f"{changes} was partly overwritten, and step {step} in {directory} cannot be loaded into it: {error}"
    )


def _is_damage(error: BaseException) -> bool:
    """Return True if an error means that a step is damaged or missing. Return False if the request was wrong."""
    if isinstance(error, TargetUndefinedError):
        return error.__cause__ is not None and _is_damage(error.__cause__)
    if isinstance(error, UnknownCheckpointableError):
        return False
    return isinstance(error, CorruptCheckpointError | CheckpointNotFoundError)


def _outcome(payloads: Sequence[Any]) -> JSON:
    """Return the first error, and True if every failed process found the step deleted; None if no process failed."""
    failed = [payload for payload in payloads if payload is not None]
    return [failed[0][0], all(is_gone for _, is_gone in failed)] if failed else None
