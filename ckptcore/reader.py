"""CheckpointReader: the steps of a directory, for whoever reads them, also while another job writes."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from ckptcore.agreement import Agreement
from ckptcore.composites import Wanted, load_composite
from ckptcore.context import Context, default_context
from ckptcore.describing import (
    CheckpointablesMetadata,
    CheckpointMetadata,
    describe_checkpoint,
    describe_checkpointables,
)
from ckptcore.directories import read_directory_metadata
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    StorageError,
    TargetUndefinedError,
    UnknownCheckpointableError,
)
from ckptcore.events import Recording
from ckptcore.holds import Hold, StepHolds
from ckptcore.loading import load_into_target, load_value, recorded_load
from ckptcore.locations import LocationLike, Within, open_directory
from ckptcore.model.tree import JSON
from ckptcore.policies import StepInfo
from ckptcore.step_names import StepNames
from ckptcore.steps import StepDirectory

__all__ = ["CheckpointReader", "Loading", "SkippedStep"]

logger = logging.getLogger("ckptcore.steps")

T = TypeVar("T")

_POLL_SECONDS: Final = 1.0
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


class CheckpointReader:
    """The steps of a directory, to be read. Takes nothing from a job that writes there, and never sees half a step.

    What there is is found out once, and again by `reload` and by what waits for new steps. In a job of several processes
    every process makes one and calls the same methods in the same order; the leader looks for all.
    """

    def __init__(
        self, directory: LocationLike, *, step_names: StepNames | None = None, context: Context | None = None
    ) -> None:
        """Open a directory, which need not be there yet.

        Args:
            directory: a path or URL.
            step_names: how steps are named.
            context: options.

        Raises:
            StorageError: if it cannot be listed.
        """
        self._begin_reading(directory, step_names, context)
        self.reload()

    def _begin_reading(self, directory: LocationLike, step_names: StepNames | None, context: Context | None) -> None:
        self._context = context or default_context()
        self._steps = StepDirectory(directory, step_names or StepNames(), self._context)
        self._job = self._context.job()
        self._restored_step: int | None = None
        self._skipped_steps: tuple[SkippedStep, ...] = ()
        self._broken: set[int] = set()
        self._holds: StepHolds | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.directory!r}>"

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Let go of what is held. A reader holds nothing but what `pin` gave."""

    @property
    def directory(self) -> str:
        """The directory, as it was given."""
        return self._steps.display

    @property
    def latest(self) -> int | None:
        """The newest committed step; None if there is none. One small request, and no listing."""
        return self._steps.latest()

    @property
    def steps(self) -> tuple[int, ...]:
        """Every committed step, ascending."""
        return self._steps.steps()

    @property
    def restored_step(self) -> int | None:
        """The step that was loaded last; None before."""
        return self._restored_step

    @property
    def skipped_steps(self) -> tuple[SkippedStep, ...]:
        """The newer steps that the last load passed over because they were damaged or gone, the newest first."""
        return self._skipped_steps

    @property
    def root_metadata(self) -> dict[str, JSON]:
        """The metadata of the directory as a whole, that its Checkpointer was given.

        Raises:
            CorruptCheckpointError
        """
        return read_directory_metadata(self._steps.store)

    def reload(self) -> None:
        """List the directory again."""

        def find() -> JSON:
            names = self._steps.list_names()
            return {str(step): name for step, name in names.items() if not self._steps.is_hidden(step)}

        before = self._steps.changes()
        found: Any = self._agreement("list").lead("list", find)
        self._steps.replace({int(step): name for step, name in found.items()}, before)

    def step_info(self, step: int) -> StepInfo:
        """When a step was saved, and its metrics.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError
        """
        return self._steps.info(step)

    def metadata(self, step: int) -> CheckpointMetadata | CheckpointablesMetadata:
        """What a step says of itself; reads no array.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError
        """
        place = self._committed(step)
        try:
            return describe_checkpoint(place, self._context)
        except CompositeCheckpointError:
            return describe_checkpointables(place, self._context)

    def load(self, step: int | None = None, abstract: Any = None) -> Any:
        """Load a step that was saved as one tree.

        Args:
            step: which; None: the newest that is valid. Damaged ones are passed over and told in `skipped_steps`.
            abstract: as for `ckptcore.load`.

        Raises:
            CheckpointNotFoundError: if there is no step, or not this one.
            CorruptCheckpointError: if it is damaged; with ``step=None``, if every one is.
            What `ckptcore.load` does.
        """
        run = functools.partial(self._load_value, abstract)
        return self._load(step, Loading(run))

    def _load_value(self, abstract: object, place: Within, recording: Recording) -> Any:
        return load_value(place, abstract, self._context, recording)

    def load_into(self, target: Any, *, step: int | None = None) -> Any:
        """Load a step that was saved as one tree into what is there, as `ckptcore.load_into` does; returns the target.

        Raises:
            What `load` does.
            TargetUndefinedError: if it failed after the target was changed, here or in another process, and no older step could
                be loaded into it.
        """

        def into(place: Within, recording: Recording) -> Any:
            load_into_target(place, target, self._context, recording)
            return target

        return self._load(step, Loading(into, "the target"))

    def load_checkpointables(self, step: int | None = None, wanted: Wanted = None) -> dict[str, Any]:
        """Load a step that was saved as several checkpointables.

        Args:
            step: which; None: the newest that is valid. Damaged ones are passed over and told in `skipped_steps`.
            wanted: as for `ckptcore.load_checkpointables`: None for all, names, or names with what each is restored into or like.

        Raises:
            What `load` and `ckptcore.load_checkpointables` do.
        """

        def run(place: Within, recording: Recording) -> dict[str, Any]:
            return load_composite(place, wanted, self._context, recording)

        changes = "what is restored in place" if isinstance(wanted, Mapping) else None
        return self._load(step, Loading(run, changes))

    @contextmanager
    def pin(self, step: int) -> Iterator[None]:
        """Keep a step from being deleted by the job that writes here, until the block ends or this process dies.

        Raises:
            CheckpointNotFoundError: if the step is not there.
            StorageError: if nothing can be written beside the steps.
        """
        with self._pinned(step):
            yield

    def _pinned(self, step: int) -> Hold:
        if self._holds is None:
            context = self._context
            store = open_directory(self._steps.directory, context.registry, durable=False, config=context.storage)
            self._holds = StepHolds(store, self.directory)
        pin = self._holds.pin(self._steps.name(step))
        try:
            # What is there is looked at only now: before, it could have been deleted.
            if not self._steps.look_again(step):
                raise CheckpointNotFoundError(self._steps.missing(step))
        except BaseException:
            pin.close()
            raise
        return pin

    def wait_for_new_step(
        self, after: int | None = None, *, timeout: float | None = None, poll_seconds: float = _POLL_SECONDS
    ) -> int | None:
        """Wait until there is a newer step.

        Args:
            after: newer than which; None: than the newest that is known now.
            timeout: how long to wait, in seconds; None: for ever.
            poll_seconds: how often to look.

        Returns:
            The newest step, or None if none came in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        known: int | None = after
        if after is None:
            known = self._agreement("known").lead("known", self._steps.latest)

        def look() -> tuple[int | None, bool]:
            latest = self._steps.latest()
            is_newer = latest is not None and (known is None or latest > known)
            return latest if is_newer else None, deadline is not None and time.monotonic() >= deadline

        while True:
            self.reload()
            # Who leads looks at the clock, too: nobody may wait for others that have given up.
            newer, is_over = self._agreement("newer").lead("newer", look)
            if newer is not None or is_over:
                return newer
            time.sleep(poll_seconds if deadline is None else max(0.0, min(poll_seconds, deadline - time.monotonic())))

    def new_steps(
        self, after: int | None = None, *, timeout: float | None = None, poll_seconds: float = _POLL_SECONDS
    ) -> Iterator[int]:
        """Every step as it comes, ascending, for a job that evaluates each.

        A step can be deleted before it is asked for, and is left out then; `pin` the one that is worked on.

        Args:
            after: newer than which; None: all that are there, too.
            timeout: end after so many seconds without a new step; None: never.
            poll_seconds: how often to look.
        """
        last = -1 if after is None else after
        while self.wait_for_new_step(last, timeout=timeout, poll_seconds=poll_seconds) is not None:
            newer = self._agreement("newer").lead("newer", functools.partial(self._newer, last))
            for step in newer:
                last = step
                if self._agreement("there").lead("there", functools.partial(self._steps.look_again, step)):
                    yield step

    def _newer(self, last: int) -> Sequence[int]:
        return sorted(itertools.takewhile(lambda step: step > last, self._steps.newest_first()))

    # --- how a step is loaded -----------------------------------------------------------------------------------------

    def _agreement(self, what: str) -> Agreement:
        return Agreement(self._job, self._context.exchange_key(f"{self.directory}/{what}"))

    def _committed(self, step: int) -> Within:
        if not self._steps.is_committed(step):
            raise CheckpointNotFoundError(self._steps.missing(step))
        return self._steps.place(step)

    def _load(self, step: int | None, loading: Loading[T]) -> T:
        if step is not None:
            self._committed(step)
            loaded = self._attempt(step, loading)
            self._restored_step, self._skipped_steps = step, ()
            self._broken.discard(step)
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
                    self._restored_step = step
                    self._skipped_steps = tuple([skip for skip in passed.skipped if skip.step > step])
                    self._broken.discard(step)
                    return loaded[0]
                step, is_moving = self._next(passed)
            if not (passed.all_gone and is_moving):
                break
            self.reload()  # others have deleted what was known here, and have saved something newer before
        self._skipped_steps = tuple(passed.skipped)
        raise passed.failure(self.directory) from passed.last

    def _next(self, passed: _Passed) -> tuple[int | None, bool]:
        """The newest step that was not tried; if there is none, whether another listing may show one."""
        tried = {skip.step for skip in passed.skipped}

        def choose() -> tuple[int | None, bool]:
            step = next((step for step in self._steps.newest_first() if step not in tried), None)
            # Nothing is listed before anything was: a reader may have been made before the run.
            return step, bool(tried) or bool(self._steps.candidates()) or not passed.listed

        chosen: tuple[int | None, bool] = self._agreement("choose").lead("choose", choose)
        passed.listed = True
        return chosen

    def _try(self, step: int, loading: Loading[T], passed: _Passed) -> tuple[T] | None:
        """Load a step; None if it is damaged or gone for any of the processes."""
        loaded: tuple[T] | None = None
        agreement = self._agreement(f"load-{step}")
        # Who cannot load it tells the others, and does not fail for it.
        try:
            with agreement.stage("load") as stage:
                try:
                    loaded = (self._attempt(step, loading),)
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
                f"{changed} holds what is left of a step by now, and step {step} in {self.directory} cannot be loaded into it: "
                f"{error}"
            ) from error
        outcome: Any = agreement.lead("outcome", functools.partial(_outcome, stage.payloads))
        if outcome is None:
            return loaded
        reason, is_gone = outcome
        logger.warning("step %d in %s cannot be loaded, the one before it is tried: %s", step, self.directory, reason)
        passed.skipped.append(SkippedStep(step, reason))
        passed.all_gone = passed.all_gone and is_gone
        passed.changed = passed.changed or (loaded is not None and loading.changes is not None)
        if not is_gone:
            self._broken.add(step)
        return None

    def _attempt(self, step: int, loading: Loading[T]) -> T:
        place = self._steps.place(step)
        with self._pinned_to_load(step), recorded_load(place, self._context, step=step) as recording:
            return loading.run(place, recording)

    def _pinned_to_load(self, step: int) -> Hold | nullcontext[None]:
        """A pin for the time of a load; none where nothing can be written."""
        try:
            return self._pinned(step)
        except StorageError as error:
            logger.debug("step %d in %s is loaded without a pin: %s", step, self.directory, error)
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
