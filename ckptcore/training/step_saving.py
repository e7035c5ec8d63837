"""Saves of steps: their options, their order, the running saves, and the record of each commit."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Literal

from ckptcore.commit.root import SaveOrder
from ckptcore.commit.stored_root import Overwrite
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, StorageError
from ckptcore.events import logger_named
from ckptcore.io.background import SaveHandle
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.protocols import Coordinator, Layout, SaveStrategy, StepStrategy
from ckptcore.records import dataclass
from ckptcore.runtime import refuse_in_signal_handler
from ckptcore.saving.requests import OneTree, Save, SaveDestination, SaveDraft, SaveHooks, SaveNotes, SaveRequest
from ckptcore.saving.save import begin_save, perform_save
from ckptcore.training.run_directory import OwnedRun, SavedStep
from ckptcore.training.save_decisions import LastSave, SaveDecider
from ckptcore.training.steps import StepDirectory

logger = logger_named("ckptcore.training")


class StepSaves:
    """The background saves of a run in this process. One thread begins them. Any thread may call the other methods.

    Attributes:
        last_committed: the last committed step; None before the first commit.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._saves: list[tuple[int, SaveHandle]] = []
        self._beginning: int | None = None
        self.last_committed: int | None = None

    def __len__(self) -> int:
        """Return the number of saves that are running, have an unretrieved error, or ended after the last `add`."""
        with self._lock:
            return len(self._saves)

    @contextmanager
    def beginning(self, step: int) -> Iterator[None]:
        """Count a step as being saved inside the block: while its save begins, or while a blocking save runs."""
        self._beginning = step
        try:
            yield
        finally:
            self._beginning = None

    def add(self, step: int, handle: SaveHandle) -> None:
        """Add a running save. Remove ended saves, except those with an unretrieved error."""
        with self._lock:
            self._saves = [*((other, save) for other, save in self._saves if save.matters), (step, handle)]

    @property
    def are_under_way(self) -> bool:
        """True if a save is running in the background."""
        with self._lock:
            return any(not handle.done() for _, handle in self._saves)

    def under_way(self) -> set[int]:
        """Return the steps that are being saved."""
        beginning = self._beginning
        with self._lock:
            under_way = {step for step, handle in self._saves if not handle.done()}
        return under_way if beginning is None else under_way | {beginning}

    def take_errors(self) -> Sequence[BaseException]:
        """Wait for all running saves. Return the errors that were not retrieved from handles, each once.

        After an interrupt, the next call waits again.
        """
        with self._lock:
            saves = list(self._saves)
        errors: list[BaseException] = []
        for _, handle in saves:
            is_retrieved = not handle.matters
            error = handle.exception()
            if error is not None and not is_retrieved:
                errors.append(error)
        with self._lock:
            self._saves = [save for save in self._saves if save not in saves]
        return errors


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Options of all steps of a run.

    Attributes:
        layout: the layout of arrays.
        strategy: writes and commits each step; None: the strategy of the directory.
        when_busy: what an asynchronous save does while another is running.
        other_files: True to delete a step together with files in its directory that no save wrote.
    """

    layout: str | Layout
    strategy: StepStrategy[SaveStrategy[SaveDraft, Save]] | None
    when_busy: Literal["wait", "queue"]
    other_files: bool = False


@dataclass(frozen=True, slots=True)
class StepSaveRequest:
    """The checked arguments of `Checkpointer.save`."""

    step: int
    values: OneTree | Mapping[str, object]
    metrics: Mapping[str, float] | None
    metadata: Mapping[str, JSON] | None
    epoch: int | None
    force: bool
    overwrite: Overwrite


class SaveOrders:
    """Orders of the saves of a run's owner. A save has a higher order than the replaced step. Used on the leader.

    A run that was set back saves steps that exist already, perhaps only in another directory. Each of its saves has a
    higher order than every step with an equal or higher number that existed when this process began to own the run.
    """

    def __init__(self, directories: Sequence[StepDirectory]) -> None:
        """Create orders for a run with the given directories. Reads nothing yet."""
        self._directories = directories
        self._last = SaveOrder()
        self._counted: int | None = None
        """The orders of all steps from this number on were read. None: no order was read yet."""
        self._newest = -1  # the highest step that got an order from `next`; it may not be committed yet

    def next(self, step: int, owner: int) -> SaveOrder:
        """Return the order of a save of a step. Reads the roots of this step and later steps, each once.

        Args:
            step: the step.
            owner: the number of this owner.
        """
        self._last = max(self._last, SaveOrder(owner))
        if self._counted is None or step < self._counted:
            orders = [self._highest(directory, step) for directory in self._directories]
            if None not in orders:
                self._counted = step
            self._last = max([self._last, *[order for order in orders if order is not None]])
        newest = [steps[-1] for directory in self._directories if (steps := directory.candidates())]
        if step <= max([self._newest, *newest]):
            self._last = self._last.next
        self._newest = max(self._newest, step)
        return self._last

    def _highest(self, directory: StepDirectory, first: int) -> SaveOrder | None:
        """Return the highest order of the steps from `first` on, and of the step before. None if a root cannot be read.

        In that case, the number of the owner alone makes the order higher than the orders of earlier owners.
        """
        known = directory.candidates()
        until = len(known) if self._counted is None else bisect.bisect_left(known, self._counted)
        steps = known[max(0, bisect.bisect_left(known, first) - 1) : until]
        directory.look_ahead(steps)
        highest = SaveOrder()
        for step in steps:
            try:
                summary = directory.summary(step)
            except StorageError as error:
                directory.warn_once("the order of step %d in %s cannot be read: %s", step, directory.display, error)
                return None
            except CheckpointError:
                continue  # a deleted or damaged step, or a link: no load uses it
            if summary is not None:
                highest = max(highest, summary.order)
        return highest


class StepSaver:
    """Saves the steps of a run, on the training thread. Every rank calls the same methods with the same steps."""

    def __init__(
        self,
        run: OwnedRun,
        decider: SaveDecider,
        saves: StepSaves,
        options: StepOptions,
        context: Context,
        job: Coordinator,
        *,
        agree: Callable[[str], Agreement],
    ) -> None:
        """Create the saver of a run.

        Args:
            run: the run.
            decider: decides whether to save.
            saves: collects the running saves.
            options: the options of all steps.
            context: options of each save.
            job: the processes that save together.
            agree: begins an exchange between all processes; called on all ranks or on none.
        """
        self._run = run
        self._steps = run.steps.directories[0]
        self._directory = run.steps.main.display
        self._decider = decider
        self._saves = saves
        self._options = options
        self._context = context
        self._job = job
        self._agree = agree
        self._orders = SaveOrders(run.steps.directories)
        self._warned = False

    def _is_broken(self, step: int) -> bool:
        """Return True if a copy of a step is known to be damaged."""
        return any(step in directory.broken for directory in self._run.steps.directories)

    def wants(self, step: int, epoch: int | None, *, force: bool = False) -> bool:
        """Return True to save a step.

        Args:
            step, epoch: the step that could be saved.
            force: save regardless of the policy.

        Raises:
            ValueError: the step has no name, or the policy cannot decide.
        """
        refuse_in_signal_handler(f"the save of step {step}")
        self._steps.names.name(step)  # raises for numbers without a name
        wanted = self._decider.decide(
            step,
            epoch,
            saving=self._saves.are_under_way,
            force=force,
            job_size=self._job.size,
            agree=partial(self._agree, "decide"),
        )
        if not wanted and self._decider.was_skipped:
            logger.info("step %d is not saved: an earlier save to %s is running", step, self._directory)
        return wanted

    def begin(self, request: StepSaveRequest) -> SaveHandle | None:
        """Save a step in the background. Return None if the policy does not want it, or it is skipped.

        Raises:
            CheckpointExistsError: the step exists.
            The errors of `begin_save`.
        """
        if not self.wants(request.step, request.epoch, force=request.force):
            return None
        with self._begun(request) as save:
            handle = begin_save(save, self._context, when_busy=self._options.when_busy)
            self._saves.add(request.step, handle)
        return handle

    def perform(self, request: StepSaveRequest) -> bool:
        """Save a step. Return True once it is committed; False if the policy does not want it, or it is skipped.

        Raises:
            CheckpointExistsError: the step exists.
            The errors of `perform_save`.
        """
        if not self.wants(request.step, request.epoch, force=request.force):
            return False
        with self._begun(request) as save:
            perform_save(save, self._context)
        return True

    def _agreed_name(self, request: StepSaveRequest) -> str:
        """Return the name of the directory to save a step to. It is equal on every rank."""
        if request.overwrite or self._is_broken(request.step):
            # Processes may have listed at different times, so the leader chooses the name.
            return self._agree("name").lead("name", partial(self._steps.name, request.step))
        return self._steps.names.name(request.step)

    @contextmanager
    def _begun(self, request: StepSaveRequest) -> Iterator[SaveRequest]:
        """Record for policies that a save has begun, unless it fails to begin. Yield its request."""
        last = self._decider.last_save
        name = self._agreed_name(request)
        with self._saves.beginning(request.step):
            self._decider.begin(request.step, request.epoch)
            try:
                yield self._request(request, name, last)
            except BaseException:
                # In a job the save may have begun in other processes, and all policies must see the same last save.
                if self._job.size == 1:
                    self._decider.last_save = last
                raise

    def _request(self, request: StepSaveRequest, name: str, last: LastSave) -> SaveRequest:
        step = request.step
        target, chosen = self._run.target(step, name), self._options.strategy
        overwrite = request.overwrite
        # Replacing a damaged step need not be atomic. Otherwise `overwrite=True` is kept, because it must be atomic.
        if target.is_unusable or (self._options.other_files and overwrite in ("best-effort", "non-atomic")):
            overwrite = "with-other-files"
        return SaveRequest(
            destination=SaveDestination(
                target.location,
                overwrite,
                name=f"{self._directory}/{name}",  # hosts may have different paths of one directory
            ),
            values=request.values,
            layout=self._options.layout,
            strategy=target.strategy if chosen is None else chosen.for_step(step, name, target.strategy),
            notes=SaveNotes(custom=request.metadata, metrics=request.metrics or {}, step=step, epoch=request.epoch),
            hooks=SaveHooks(
                allowed=partial(self._allow, step, last.step, is_new=not request.overwrite),
                order=partial(self._orders.next, step, target.owner),
                before_commit=target.before_commit,
                # Only values: a reference to the request would keep the state in memory.
                committed=partial(self._saved, SavedStep(step, name, request.epoch, self._decider.preempted)),
            ),
        )

    def _allow(self, step: int, last: int | None, *, is_new: bool) -> None:
        """Refuse a step that exists. Runs on the leader. All processes raise its error."""
        self._warn_of_newer(step, last)
        self._run.allow(step, is_new=is_new)

    def _warn_of_newer(self, step: int, last: int | None) -> None:
        if not self._warned and (last is None or last < step):
            newest = next(self._run.steps.newest_first(), None)
            if newest is not None and newest > step and not self._is_broken(newest):
                self._warned = True
                logger.warning(
                    "step %d is saved below step %d of an earlier run in %s, and the next resume loads the later step; "
                    "delete the steps after the one that the run was set back to",
                    step, newest, self._directory,
                )  # fmt: skip

    def _saved(self, saved: SavedStep) -> None:
        """Add a committed step. Called on the thread of the save, before its handle is done."""
        self._decider.end()
        self._steps.broken.discard(saved.step)
        self._saves.last_committed = saved.step
        self._run.committed(saved)
