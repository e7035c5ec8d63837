"""CheckpointReader: reads the steps of a directory, also while another job writes there."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from ckptcore.commit.location import AnyLocation, LocationLike, expanded_location
from ckptcore.context import Context, default_context
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, PartialLoadError
from ckptcore.events import Recording
from ckptcore.inspection.describe import CheckpointMetadata, describe_checkpoint
from ckptcore.job.agreement import Agreement
from ckptcore.loading.composites import Abstracts, CompositeLoad, CompositeRequest
from ckptcore.loading.in_place import load_into_target
from ckptcore.loading.load import LoadRequest, choose_strategy
from ckptcore.loading.targets import load_value
from ckptcore.matching.options import EXACT, LoadReport, Matching
from ckptcore.model.tree import JSON
from ckptcore.other_libraries import ExplainsAttributes, explains_arguments, hint_of_step
from ckptcore.policies import BestN, StepInfo
from ckptcore.protocols import Transforms
from ckptcore.redaction import redacted
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import as_integer
from ckptcore.step_names import StepNames
from ckptcore.training.path_directory import as_run_directory, read_directory_metadata
from ckptcore.training.restoring import SkippedStep, StepLoad, StepLoader
from ckptcore.training.run_directory import RunDirectory, RunSteps, check_step_names, exchanges_of
from ckptcore.training.steps import StepDirectory

if TYPE_CHECKING:
    from ckptcore.select import Selection

T = TypeVar("T")

_POLL_SECONDS: Final = 1.0


class StepReader(ExplainsAttributes):
    """The methods for reading a run that `CheckpointReader` and `Checkpointer` share."""

    def __init__(
        self,
        steps: RunSteps,
        context: Context,
        agree: Callable[[str], Agreement],
        *,
        before_newest: Callable[[], None] | None = None,
        loaded: Callable[[int], None] | None = None,
    ) -> None:
        """Create a reader. Reads nothing yet.

        Args:
            steps: the steps of the run.
            context: options.
            agree: begins an exchange between the processes of the job; called on all ranks or on none.
            before_newest: called on all ranks before a load chooses the newest step.
            loaded: called on all ranks with each loaded step.
        """
        self._context = context
        self._steps = steps
        self._agree = agree
        self._before_newest = before_newest
        self._loaded = loaded
        self._loader = StepLoader(steps, context, agree=agree, reload=self.reload)

    def __repr__(self) -> str:
        return redacted(f"<{type(self).__name__} {self.directory!r}>")

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Do nothing, because a reader has nothing to release."""

    @property
    def directory(self) -> str:
        """The directory as users see it: without secrets, and with ``~`` expanded."""
        return self._steps.main.display

    @property
    def latest(self) -> int | None:
        """The newest committed step; None if there is none.

        Does not list the directory. Takes at most one small request in most cases.

        Raises:
            StorageError: a newer step cannot be read, so the newest step is unknown.
        """
        return self._steps.latest()

    @property
    def steps(self) -> tuple[int, ...]:
        """Every committed step, ascending.

        In a job of several processes the leader deletes; other processes see deletions after `reload`.
        """
        return self._steps.steps()

    @property
    def restored_step(self) -> int | None:
        """The step that was loaded last; None before the first load."""
        return self._loader.restored_step

    @property
    def skipped_steps(self) -> tuple[SkippedStep, ...]:
        """The newer steps that the last load skipped because they were damaged or deleted, newest first."""
        return self._loader.skipped_steps

    @property
    def root_metadata(self) -> dict[str, JSON]:
        """The metadata that was stored with the directory as a whole: see `Checkpointer`.

        Raises:
            CorruptCheckpointError: the metadata is damaged.
        """
        return read_directory_metadata(self._steps.main.store)

    def reload(self) -> None:
        """List the directory again."""
        self._steps.reload(self._agree("list"))

    def step_info(self, step: int) -> StepInfo:
        """Return the creation time and the metrics of a step.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError
            TypeError, ValueError: `step` is not an integer of at most 64 bits.
        """
        step = as_integer("step", step, hint=hint_of_step(step))
        return self._directory_of(step).info(step)

    def best(self, metric: str, mode: Literal["min", "max"]) -> int:
        """Return the step with the best value of a metric, as for `ckptcore.policies.BestN`; the leader chooses it.

        Steps that are damaged, were deleted, or lack the metric are left out. In a job all processes call it.

        Args:
            metric: the name of a metric that was passed to ``save``.
            mode: ``"min"`` if low values are better, ``"max"`` if high values are.

        Raises:
            CheckpointNotFoundError: no step has this metric.
            ValueError: `mode` is invalid.
        """
        policy = BestN(1, metric, mode, keep_unmeasured=False)

        def choose() -> int:
            infos: list[StepInfo] = []
            for step in self.steps:
                with suppress(CheckpointNotFoundError, CorruptCheckpointError):
                    infos.append(self.step_info(step))
            for step in policy.keep(infos, 0.0):
                return step
            known = sorted({name for info in infos for name in info.metrics})
            raise CheckpointNotFoundError(
                f"no step in {self.directory} has the metric {metric!r}; metrics of its steps: "
                f"{', '.join(map(repr, known)) or 'none'}. Pass metrics={{{metric!r}: value}} when you save a step"
            )

        return self._agree("best").lead("best", choose)

    def metadata(self, step: int) -> CheckpointMetadata:
        """Read the metadata of a step without its arrays. See `ckptcore.metadata`.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError
            TypeError, ValueError: `step` is not an integer of at most 64 bits.
        """
        step = as_integer("step", step, hint=hint_of_step(step))
        return describe_checkpoint(self._directory_of(step).location(step), self._context)

    @explains_arguments
    def load(
        self,
        step: int | None = None,
        abstract: Any = None,
        *,
        framework: str | None = None,
        select: Selection | None = None,
        transforms: Transforms = (),
        matching: Matching = EXACT,
        report: LoadReport | None = None,
    ) -> Any:
        """Load a step that was saved as one tree.

        Args:
            step: the step; None: the newest valid step. Damaged steps are skipped and listed in `skipped_steps`.
            abstract, framework, select, transforms, matching, report: as for `ckptcore.load`.

        Raises:
            CheckpointNotFoundError: there is no step, or the step does not exist.
            CorruptCheckpointError: it is damaged; with ``step=None``, all steps are damaged.
            TypeError, ValueError: `step` is not an integer of at most 64 bits.
            The errors of `ckptcore.load`.
        """
        request = LoadRequest(
            select=select, transforms=transforms, matching=matching, report=report, framework=framework
        )

        def run(location: AnyLocation, recording: Recording) -> Any:
            return load_value(location, abstract, self._context, recording, self._in_stage(request))

        return self._load(step, StepLoad(run))

    @explains_arguments
    def load_into(
        self,
        target: Any,
        *,
        step: int | None = None,
        select: Selection | None = None,
        transforms: Transforms = (),
        matching: Matching = EXACT,
        report: LoadReport | None = None,
    ) -> Any:
        """Load a step that was saved as one tree into a target, and return the target. See `ckptcore.load_into`.

        Args:
            step: as for `load`.
            target, select, transforms, matching, report: as for `ckptcore.load_into`.

        Raises:
            The errors of `load`.
            TargetUndefinedError: the load failed after the target was changed, here or in another process, and no older
                step could be loaded into it.
        """
        request = LoadRequest(select=select, transforms=transforms, matching=matching, report=report)

        def run(location: AnyLocation, recording: Recording) -> Any:
            return load_into_target(location, target, self._context, recording, self._in_stage(request))

        return self._load(step, StepLoad(run, "the target"))

    @explains_arguments
    def load_checkpointables(
        self,
        step: int | None = None,
        abstract: Abstracts = None,
        *,
        into: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        """Load a step that was saved as several objects.

        Args:
            step: the step; None: the newest valid step. Damaged steps are skipped and listed in `skipped_steps`. If
                `abstract` and `into` name no objects, steps that lack an object are also skipped.
            abstract: new objects to build, as for `ckptcore.load_checkpointables`.
            into: objects to restore in place, by name.

        Raises:
            The errors of `load` and `ckptcore.load_checkpointables`.
        """

        # A run must not resume without a part of its state, unless the caller names the step.
        wanted = CompositeRequest(abstract, into, absent="error" if step is None else "skip")

        def run(location: AnyLocation, recording: Recording) -> dict[str, Any]:
            return CompositeLoad(location, wanted, self._context, recording).run()

        changes = "the state of the objects in into=" if into else None
        return self._load(step, StepLoad(run, changes))

    @contextmanager
    def pin(self, step: int) -> Iterator[None]:
        """Prevent the job that writes here from deleting a step, until the block or this process ends.

        Raises:
            CheckpointNotFoundError: the step does not exist.
            StorageError: the pin cannot be written to the directory.
            TypeError, ValueError: `step` is not an integer of at most 64 bits.
        """
        step = as_integer("step", step, hint=hint_of_step(step))
        with ExitStack() as pins:
            for number in self._steps.copies(step) or [0]:
                # For a step without a copy, `pin` raises CheckpointNotFoundError.
                pins.enter_context(self._steps.directories[number].pin(step))
            yield

    def _directory_of(self, step: int) -> StepDirectory:
        """Return the directory with the best copy of a step.

        Raises:
            CheckpointNotFoundError: the step does not exist.
        """
        copies = self._steps.copies(step)
        if not copies:
            raise CheckpointNotFoundError(self._steps.main.missing(step))
        return self._steps.directories[copies[0]]

    def wait_for_new_step(
        self, after: int | None = None, *, timeout: float | None = None, poll_seconds: float = _POLL_SECONDS
    ) -> int | None:
        """Wait for a newer step.

        Args:
            after: wait for a step after the given step; None: after the newest known step.
            timeout: seconds to wait; None: forever.
            poll_seconds: seconds between listings.

        Returns:
            The newest step; None after the timeout.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        known: int | None = after
        if after is None:
            known = self._agree("known").lead("known", self._newest_readable)

        def look() -> tuple[int | None, bool]:
            latest = self._newest_readable()
            is_newer = latest is not None and (known is None or latest > known)
            return latest if is_newer else None, deadline is not None and time.monotonic() >= deadline

        while True:
            self.reload()
            # The leader checks the clock for all processes, so that all stop waiting together.
            newer, is_over = self._agree("newer").lead("newer", look)
            if newer is not None or is_over:
                return newer
            time.sleep(poll_seconds if deadline is None else max(0.0, min(poll_seconds, deadline - time.monotonic())))

    def new_steps(
        self, after: int | None = None, *, timeout: float | None = None, poll_seconds: float = _POLL_SECONDS
    ) -> Iterator[int]:
        """Yield every new step, ascending, for a job that evaluates each.

        Steps that are deleted before they are yielded are left out. `pin` a step while you evaluate it.

        Args:
            after: yield only steps after the given step; None: all steps, including existing ones.
            timeout: end after this many seconds without a new step; None: never.
            poll_seconds: seconds between listings.
        """
        last = -1 if after is None else after
        while self.wait_for_new_step(last, timeout=timeout, poll_seconds=poll_seconds) is not None:
            newer = self._agree("newer").lead("newer", functools.partial(self._newer, last))
            for step in newer:
                last = step
                if self._agree("there").lead("there", functools.partial(self._steps.recheck, step)):
                    yield step

    def _newest_readable(self) -> int | None:
        return next(self._steps.newest_first(), None)

    def _newer(self, last: int) -> Sequence[int]:
        return sorted(itertools.takewhile(lambda step: step > last, self._steps.newest_first()))

    def _in_stage(self, request: LoadRequest) -> LoadRequest:
        """Return a request for a load in a stage of `StepLoader`."""
        return replace(request, strategy=choose_strategy(self._context, runtime_of(self._context), is_stage=True))

    def _load(self, step: int | None, loading: StepLoad[T]) -> T:
        if step is None and self._before_newest is not None:
            self._before_newest()
        try:
            loaded = self._loader.load(step, loading)
        except PartialLoadError:
            self._note_loaded()
            raise
        self._note_loaded()
        return loaded

    def _note_loaded(self) -> None:
        if self._loaded is not None and self.restored_step is not None:
            self._loaded(self.restored_step)


class CheckpointReader(StepReader):
    """Reads the steps of a directory. Does not disturb a job that writes there, and never sees a part of a step.

    Steps are listed once, and again by `reload`, by loads of the newest step, and by methods that wait for new steps.
    In a job of several processes every process creates a reader, and calls the same methods in the same order. Only the
    leader lists the directory.
    """

    @explains_arguments
    def __init__(
        self,
        directory: LocationLike | RunDirectory,
        *,
        step_names: StepNames | None = None,
        context: Context | None = None,
    ) -> None:
        """Open a directory. It need not exist yet.

        Args:
            directory: a path or URL, or a `RunDirectory`.
            step_names: the names of step directories. None: the names of `StepNames()`.
            context: options.

        Raises:
            StorageError: it cannot be listed.
            InvalidLocationError: it is a checkpoint, not a directory of steps. Or it has checkpoints, but no steps,
                because their names do not match `step_names`.
        """
        names, context = check_step_names(step_names), context or default_context()
        if isinstance(directory, str | os.PathLike) and "://" not in os.fspath(directory):
            lasting: object = os.path.abspath(expanded_location(directory))  # the working directory may change
        else:
            lasting = directory
        self._options = {"directory": lasting, "step_names": step_names}
        self._context_of_copies = context.of_another_process()
        steps = as_run_directory(directory).open(names, context)
        agree = exchanges_of(steps.main.display, context, runtime_of(context).job())
        # Another job may have saved since the last listing.
        super().__init__(steps, context, agree, before_newest=self.reload)
        self.reload()

    def __reduce__(self) -> tuple[Callable[..., CheckpointReader], tuple[object, ...]]:
        """Pickle the path and the options, without observers and the job. A copy lists the directory again."""
        return _reader_of, ({**self._options, "context": self._context_of_copies},)


def _reader_of(options: Mapping[str, Any]) -> CheckpointReader:
    return CheckpointReader(**options)
