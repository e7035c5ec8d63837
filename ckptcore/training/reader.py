"""CheckpointReader: the steps of a directory, for whoever reads them, also while another job writes."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from ckptcore.commit.location import LocationLike, Place
from ckptcore.context import Context, default_context
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.loading.composites import Abstracts, CompositeLoad, Everything, Wanted
from ckptcore.loading.describe import CheckpointMetadata, describe_checkpoint
from ckptcore.loading.load_requests import EXACT, LoadReport, LoadRequest, Matching
from ckptcore.loading.targets import load_into_target, load_value
from ckptcore.model.tree import JSON
from ckptcore.policies import StepInfo
from ckptcore.protocols import Transforms
from ckptcore.redaction import redacted
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNames, step_number
from ckptcore.training.restoring import Loading, SkippedStep, StepLoader
from ckptcore.training.steps import StepDirectory, read_directory_metadata
from ckptcore.training.tiered_steps import TieredSteps

if TYPE_CHECKING:
    from ckptcore.select import Selection

__all__ = ["CheckpointReader"]

T = TypeVar("T")

_POLL_SECONDS: Final = 1.0


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
        self._begin_reading((directory,), step_names, context)
        self.reload()

    def _begin_reading(
        self, tiers: Sequence[LocationLike], step_names: StepNames | None, context: Context | None
    ) -> None:
        """Look at nothing yet. Of the tiers the nearest comes first, and the last is the directory of the run."""
        if step_names is not None and not isinstance(step_names, StepNames):
            raise TypeError(
                f"step_names={step_names!r}: expected StepNames, such as StepNames.of('step_00000010') or "
                "StepNames(StepNameFormat('step_', width=8))"
            )
        self._context = context or default_context()
        names = step_names or StepNames()
        self._copies = TieredSteps([StepDirectory(directory, names, self._context) for directory in tiers])
        self._steps = self._copies.tiers[0]
        self._job = runtime_of(self._context).job()
        # Asked for each time: a subclass may agree and list in its own way.
        self._loader = StepLoader(
            self._copies,
            self._context,
            agree=lambda what: self._agreement(what),
            reload=lambda: self.reload(),
            place=lambda step, tier: self._place(step, tier),
        )

    def __repr__(self) -> str:
        return redacted(f"<{type(self).__name__} {self.directory!r}>")

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
        return self._copies.tiers[-1].display

    @property
    def latest(self) -> int | None:
        """The newest committed step; None if there is none. One small request, and no listing."""
        return self._copies.latest()

    @property
    def steps(self) -> tuple[int, ...]:
        """Every committed step, ascending.

        In a job of several processes the leader deletes, and others hear of that when they `reload`.
        """
        return self._copies.steps()

    @property
    def restored_step(self) -> int | None:
        """The step that was loaded last; None before."""
        return self._loader.restored_step

    @property
    def skipped_steps(self) -> tuple[SkippedStep, ...]:
        """The newer steps that the last load passed over because they were damaged or gone, the newest first."""
        return self._loader.skipped_steps

    @property
    def root_metadata(self) -> dict[str, JSON]:
        """The metadata of the directory as a whole, that its Checkpointer was given.

        Raises:
            CorruptCheckpointError
        """
        return read_directory_metadata(self._copies.tiers[-1].store)

    def reload(self) -> None:
        """List the directory again."""
        before = [tier.changes() for tier in self._copies.tiers]
        found = self._find_names(self._agreement("list"))
        for tier, names, since in zip(self._copies.tiers, found, before, strict=True):
            tier.replace(names, since)

    def _find_names(self, agreement: Agreement) -> Sequence[Mapping[int, str]]:
        """By tier, the names of steps, as the leader lists them."""

        def find() -> JSON:
            return [{str(step): name for step, name in self._list_names(tier).items()} for tier in self._copies.tiers]

        found: Any = agreement.lead("list", find)
        return [{int(step): name for step, name in names.items()} for names in found]

    def _list_names(self, tier: StepDirectory) -> Mapping[int, str]:
        """On the leader: the names in a tier, by step, without those that are being deleted."""
        return {step: name for step, name in tier.list_names().items() if not tier.is_hidden(step)}

    def step_info(self, step: int) -> StepInfo:
        """When a step was saved, and its metrics.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError
        """
        step = step_number(step)
        return self._copies.nearest(step).info(step)

    def metadata(self, step: int) -> CheckpointMetadata:
        """Read the metadata of a step, as `ckptcore.metadata` does; reads no array.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError
        """
        step = step_number(step)
        return describe_checkpoint(self._copies.nearest(step).place(step), self._context)

    def load(
        self,
        step: int | None = None,
        abstract: Any = None,
        *,
        select: Selection | None = None,
        transforms: Transforms = (),
        matching: Matching = EXACT,
        report: LoadReport | None = None,
    ) -> Any:
        """Load a step that was saved as one tree.

        Args:
            step: which; None: the newest that is valid. Damaged ones are passed over and told in `skipped_steps`.
            abstract, select, transforms, matching, report: as for `ckptcore.load`.

        Raises:
            CheckpointNotFoundError: if there is no step, or not this one.
            CorruptCheckpointError: if it is damaged; with ``step=None``, if every one is.
            What `ckptcore.load` does.
        """
        request = LoadRequest(select=select, transforms=transforms, matching=matching, report=report)
        return self._load(step, Loading(functools.partial(self._load_value, abstract, request)))

    def _load_value(self, abstract: object, request: LoadRequest, place: Place, recording: Recording) -> Any:
        return load_value(place, abstract, self._context, recording, request)

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
        """Load a step that was saved as one tree into what is there, as `ckptcore.load_into` does; returns the target.

        Args:
            step: as for `load`.
            target, select, transforms, matching, report: as for `ckptcore.load_into`.

        Raises:
            What `load` does.
            TargetUndefinedError: if it failed after the target was changed, here or in another process, and no older step could
                be loaded into it.
        """
        request = LoadRequest(select=select, transforms=transforms, matching=matching, report=report)

        def into(place: Place, recording: Recording) -> Any:
            load_into_target(place, target, self._context, recording, request)
            return target

        return self._load(step, Loading(into, "the target"))

    def load_checkpointables(
        self,
        step: int | None = None,
        abstract: Abstracts = None,
        *,
        into: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        """Load a step that was saved as several objects.

        Args:
            step: the step; None: the newest valid one. Damaged steps are skipped and listed in `skipped_steps`. If no
                objects are named either, steps that lack an object are skipped, too.
            abstract: objects to build anew, as for `ckptcore.load_checkpointables`.
            into: objects to restore in place, by name.

        Raises:
            What `load` and `ckptcore.load_checkpointables` do.
        """

        # A run must not resume without a part of its state: who names the step takes what is left of it.
        wanted = Wanted(abstract, into)
        asked = Everything.SAVED if wanted.names is None and step is None else wanted

        def run(place: Place, recording: Recording) -> dict[str, Any]:
            return CompositeLoad(place, asked, self._context, recording).run()

        changes = "what is restored in place" if into else None
        return self._load(step, Loading(run, changes))

    @contextmanager
    def pin(self, step: int) -> Iterator[None]:
        """Keep a step from being deleted by the job that writes here, until the block ends or this process dies.

        Raises:
            CheckpointNotFoundError: if the step is not there.
            StorageError: if nothing can be written beside the steps.
        """
        step = step_number(step)
        with ExitStack() as pins:
            for tier in self._copies.tiers_of(step) or [0]:
                pins.enter_context(self._loader.pin(step, tier))
            yield

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
            known = self._agreement("known").lead("known", self._copies.latest)

        def look() -> tuple[int | None, bool]:
            latest = self._copies.latest()
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
                if self._agreement("there").lead("there", functools.partial(self._copies.look_again, step)):
                    yield step

    def _newer(self, last: int) -> Sequence[int]:
        return sorted(itertools.takewhile(lambda step: step > last, self._copies.newest_first()))

    def _load(self, step: int | None, loading: Loading[T]) -> T:
        if step is None:
            self.reload()  # another job may have saved since
        return self._loader.load(step, loading)

    def _place(self, step: int, tier: int) -> Place:
        """Where a step is read in a tier."""
        return self._copies.tiers[tier].place(step)

    def _agreement(self, what: str) -> Agreement:
        return Agreement(self._job, runtime_of(self._context).exchange_key(f"{self.directory}/{what}", job=self._job))
