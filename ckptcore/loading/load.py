"""Loads of one tree: open, plan, read, build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ckptcore.commit.location import AnyLocation
from ckptcore.context import Context
from ckptcore.events import Recording
from ckptcore.loading.checkpoint import Checkpoint, Source
from ckptcore.loading.load_requests import LeafChange, LoadReport, LoadRequest
from ckptcore.loading.matching import Matched
from ckptcore.loading.opening import tree_read
from ckptcore.loading.reading import Reading, perform, plan_reading
from ckptcore.loading.stored_trees import transformed
from ckptcore.model.tree import format_path, leaf_paths
from ckptcore.protocols import ReadStrategy, ReadThrough
from ckptcore.runtime import Runtime, runtime_of

if TYPE_CHECKING:
    from ckptcore.loading.collective.joint import CollectiveRead

__all__ = ["Load", "LoadAccount", "Target", "choose_strategy", "recorded_load"]

T = TypeVar("T")


class Target(Protocol[T]):
    """The result of a load: selects leaves of a checkpoint, and builds a value.

    If the checkpoint was replaced, the next attempt matches and builds again.
    """

    def match(self, load: Load[T], checkpoint: Checkpoint) -> Matched:
        """Find the stored leaf for each leaf of the value. Reads no array, and changes nothing.

        A target that needs a tree refuses a checkpoint of files.
        """
        ...

    def build(self, load: Load[T], reading: Reading) -> T:
        """Build the value of the leaves that were read."""
        ...


class Load(Generic[T]):
    """A load of one tree, in four stages: `open`, `plan`, `read` and `build`.

    `run` runs all of them, and runs them again if the checkpoint was replaced meanwhile.

    Attributes:
        location, target, context, recording, request: as given.
        runtime: of the context.
        attempts: the attempts to read the checkpoint.
        has_begun: True once `read` began, which changes a target that is filled in place.
    """

    def __init__(
        self, source: Source, target: Target[T], context: Context, recording: Recording, request: LoadRequest
    ) -> None:
        """Open nothing yet.

        Args:
            source: a location, or an open checkpoint.
            target: the result.
            context: options.
            recording: records the phases.
            request: the leaves to load, and the differences to allow.
        """
        self.location = source
        self.target = target
        self.context = context
        self.recording = recording
        self.request = request
        self.runtime = runtime_of(context)
        self.attempts = tree_read(source, context)
        self.has_begun = False
        self._read_through: ReadThrough | None = None
        self._account = None if request.report is None else LoadAccount(request.report)

    def run(self) -> T:
        """Load by the strategy of the request; without one as the context says: alone, or with all ranks of the job."""
        strategy: ReadStrategy | CollectiveRead | None = self.request.strategy
        if strategy is None:
            strategy = choose_strategy(self.context, self.runtime)
        made = self.run_here() if strategy is None else strategy.run(self)
        if self._account is not None:
            self._account.done()
        return made

    def run_here(self, read_through: ReadThrough | None = None) -> T:
        """Run all stages in this process alone; again if the checkpoint was replaced meanwhile.

        Args:
            read_through: reads boxes of stored arrays in place of the checkpoint; None: read the checkpoint.
        """
        self._read_through = read_through
        return self.attempts.retry_if_replaced(self._attempt)

    def _attempt(self, checkpoint: Checkpoint) -> T:
        if self._read_through is not None:
            checkpoint = checkpoint.reading_through(self._read_through)
        reading = self.plan(checkpoint)
        self.read(reading)
        return self.build(reading)

    def open(self) -> Checkpoint:
        """Begin an attempt: open the checkpoint. The result is of one save."""
        return self.attempts.open()

    def plan(self, checkpoint: Checkpoint) -> Reading:
        """Match the target with the stored tree, and plan the reads. Reads no array, and changes nothing."""
        if self.request.transforms:
            with self.recording.phase("open"):
                checkpoint = transformed(checkpoint, self.request.transforms, self.context)
        if self._account is not None:
            self._account.opened(checkpoint)
        matched = self.target.match(self, checkpoint)
        if self._account is not None:
            self._account.planned(matched)
        if matched.changes:
            from ckptcore.loading.differences import adjusted  # only if something differs

            checkpoint = adjusted(checkpoint, matched.changes, self.context)
        return plan_reading(checkpoint, matched, self.runtime.workers())

    def read(self, reading: Reading, read_planned: Callable[[Reading, Context], None] = perform) -> None:
        """Read and build the planned leaves.

        Args:
            reading: the plan.
            read_planned: runs it; by default in this process.
        """
        self.has_begun = True
        if not reading.units and reading.opened.is_files:
            return  # the target reads the files
        with self.recording.phase("read", reading.nbytes):
            read_planned(reading, self.context)

    def build(self, reading: Reading) -> T:
        """Build the value, after checking that no further checkpoint that was read has been replaced."""
        if reading.opened.derived is not None:
            from ckptcore.loading.derived import check_beside  # only for derived checkpoints

            check_beside(reading.opened)
        return self.target.build(self, reading)


def choose_strategy(context: Context, runtime: Runtime) -> CollectiveRead | None:
    """Return the strategy of a job's collective loads; None if this process loads alone."""
    if context.job.reads == "alone" or (job := runtime.job()).size == 1:
        return None
    from ckptcore.loading.collective.joint import CollectiveAttempt, CollectiveRead  # only jobs need it

    if context.job.reads == "all":
        return CollectiveRead(job, CollectiveAttempt)
    from ckptcore.loading.collective.shared import SharedAttempt  # a tenth of the time of the import of ckptcore

    return CollectiveRead(job, SharedAttempt)


@contextmanager
def recorded_load(location: AnyLocation, context: Context, *, step: int | None = None) -> Iterator[Recording]:
    """Record a load until the end of the block."""
    recording = Recording("load", str(location), context.observers, step=step, rank=runtime_of(context).job().rank)
    try:
        yield recording
    except BaseException as error:
        recording.finish(error=error)
        raise
    recording.finish()


class LoadAccount:
    """Record of what a load planned. Fills a report once the load has succeeded."""

    def __init__(self, report: LoadReport | None) -> None:
        """`report` belongs to the caller; None: nothing is recorded."""
        self._report = report
        self._opened: tuple[Checkpoint, int] | None = None
        self._matched: Matched | None = None

    def opened(self, checkpoint: Checkpoint) -> None:
        """Record an attempt before it reads; replaces the record of an earlier one."""
        if self._report is not None:
            self._opened = checkpoint, _bytes_read(checkpoint)

    def planned(self, matched: Matched) -> None:
        """Record the leaves that the attempt loads."""
        self._matched = matched

    def done(self) -> None:
        """Fill the report."""
        report, matched = self._report, self._matched
        if report is None or matched is None or self._opened is None:
            return
        checkpoint, bytes_before = self._opened
        stored = checkpoint.tree.paths
        paths = [format_path(path) for path in leaf_paths(matched.skeleton)]
        defaulted = set(matched.defaulted)
        restored: list[str] = []
        skipped: list[str] = []
        changed: dict[str, LeafChange] = {}
        for position, (path, number, handler) in enumerate(zip(paths, matched.numbers, matched.handlers, strict=True)):
            if position in defaulted:
                continue
            if number is not None and number in matched.changes:
                changed[path] = matched.changes[number]
            else:
                (skipped if handler is None else restored).append(path)
        report.restored, report.changed, report.skipped = restored, changed, skipped
        report.defaulted = [paths[position] for position in matched.defaulted]
        report.ignored = [format_path(stored[number]) for number in matched.ignored]
        report.bytes_read = _bytes_read(checkpoint) - bytes_before


def _bytes_read(checkpoint: Checkpoint) -> int:
    """Return the bytes requested from storages so far, also of further checkpoints that arrays are computed from."""
    if checkpoint.derived is not None:
        return sum(map(_bytes_read, checkpoint.derived.sources))
    return checkpoint.store.bytes_read + checkpoint.store.bytes_got
