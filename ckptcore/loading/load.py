"""Loads of one tree: open, plan, read, build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

from ckptcore.commit.location import AnyLocation, shown_location
from ckptcore.context import Context
from ckptcore.errors import TreeMismatchError
from ckptcore.events import Recording, logger_named
from ckptcore.loading.reading import TreeRead, plan_leaf_reads, read_tree
from ckptcore.matching.options import EXACT, LeafChange, LoadReport, Matched, Matching
from ckptcore.model.tree import format_path, leaf_paths
from ckptcore.opening.checkpoint import Checkpoint, Source, check_additional
from ckptcore.opening.open_checkpoints import tree_attempts
from ckptcore.progress import ByteProgress, ProgressCallback
from ckptcore.protocols import ReadStrategy, ReadThrough, Transforms
from ckptcore.runtime import Runtime, refuse_in_signal_handler, runtime_of

if TYPE_CHECKING:
    from ckptcore.loading.joint import CollectiveAttempt, CollectiveRead
    from ckptcore.select import Selection

T = TypeVar("T")

logger = logger_named("ckptcore.loading")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Options of a load.

    Attributes:
        select: the stored leaves to load; None: all leaves.
        transforms: changes of the stored tree, applied before it is matched.
        matching: the allowed differences between the abstract tree and the stored tree.
        report: filled when the load has succeeded; None: no report.
        strategy: the strategy of the load; None: the Context selects it.
        framework: the framework of arrays that are loaded without an abstract tree; None: NumPy.
    """

    select: Selection | None = None
    transforms: Transforms = ()
    matching: Matching = EXACT
    report: LoadReport | None = None
    strategy: ReadStrategy[Load[Any]] | None = None
    framework: str | None = None

    def __post_init__(self) -> None:
        """Check the types; selections and transforms are checked where they are used.

        Raises:
            TypeError: names the option and its type.
        """
        if not isinstance(self.matching, Matching):
            raise TypeError(f'matching={self.matching!r}: expected a ckptcore.Matching, such as Matching(cast="safe")')
        if self.report is not None and not isinstance(self.report, LoadReport):
            raise TypeError(f"report={self.report!r}: expected a ckptcore.results.LoadReport, which the load fills")


DEFAULT_REQUEST: Final = LoadRequest()
"""Default options: load all leaves, matched as `EXACT` states."""


@dataclass(frozen=True, slots=True)
class LoadAs(Generic[T]):
    """Options for the load of one of several checkpointables. See `ckptcore.load`.

    Attributes:
        like: its abstract tree, or the object to restore in place; None: the saved value.
        select, transforms, matching, report: see `ckptcore.load`, or `ckptcore.load_into` if an object is restored in
            place. For trees only, not for the files of objects.
        framework: see `ckptcore.load`; requires ``like=None``.
    """

    like: T
    _: KW_ONLY
    select: Selection | None = None
    transforms: Transforms = ()
    matching: Matching = EXACT
    report: LoadReport | None = None
    framework: str | None = None

    @property
    def request(self) -> LoadRequest:
        """The options, without `like`."""
        return LoadRequest(
            select=self.select,
            transforms=self.transforms,
            matching=self.matching,
            report=self.report,
            framework=self.framework,
        )


class LoadTarget(Protocol[T]):
    """The target of a load: matches leaves of a checkpoint, and builds the result.

    Each attempt of the load matches and builds again.
    """

    def match(self, load: Load[T], checkpoint: Checkpoint) -> Matched:
        """Find the stored leaf for each leaf of the result. Reads no array, and changes nothing.

        Raises:
            TreeMismatchError: the leaves do not match, or the checkpoint has files and the target needs a tree.
        """
        ...

    def begin(self, load: Load[T], first: TreeRead) -> None:
        """Read and restore the objects that may refuse their state, before all others.

        Only called if the target has such objects.

        Raises:
            TreeMismatchError: an object refused its state.
        """
        raise AssertionError(f"{type(self).__name__} refuses nothing")

    def build(self, load: Load[T], reading: TreeRead) -> T:
        """Build the result from the leaves that were read."""
        ...


class Load(Generic[T]):
    """A load of one tree, in five stages: `open`, `plan`, `begin`, `read` and `build`.

    `run` runs all stages, and repeats them if the checkpoint was replaced meanwhile.

    Attributes:
        location, target, context, recording, request: the arguments. A strategy may replace the target.
        read_planned: reads and builds planned leaves, in this process. A strategy may replace it.
        runtime: the runtime of the context.
        attempts: the attempts to read the checkpoint.
        has_begun: True once `read` began, which may change a target in place.
    """

    def __init__(
        self, source: Source, target: LoadTarget[T], context: Context, recording: Recording, request: LoadRequest
    ) -> None:
        """Keep the arguments. `open` opens the checkpoint.

        Args:
            source: a location, or an open checkpoint.
            target: matches leaves, and builds the result.
            context: options.
            recording: records the phases.
            request: the leaves to load, and the differences to allow.
        """
        self.location = source
        self.target = target
        self.read_planned: Callable[[TreeRead, Context], None] = read_tree
        self.context = context
        self.recording = recording
        self.request = request
        self.runtime = runtime_of(context)
        self.attempts = tree_attempts(source, context)
        self.has_begun = False
        self._read_through: ReadThrough | None = None
        self._planned: tuple[Checkpoint, Matched, int] | None = None  # for the report

    def run(self) -> T:
        """Load with the strategy of the request. If it is None, the Context selects a local or a collective load."""
        strategy = self.request.strategy or choose_strategy(self.context, self.runtime)
        if (workers := self.runtime.workers()) is not None:
            strategy = workers.read_strategy(strategy)
        with self.runtime.registry.thread_settings():
            result = self.run_here() if strategy is None else strategy.run(self)
        if self.request.report is not None and self._planned is not None:
            fill_report(self.request.report, *self._planned)
        return result

    def run_here(self, read_through: ReadThrough | None = None) -> T:
        """Run all stages in this process alone. Repeats them if the checkpoint was replaced meanwhile.

        Args:
            read_through: reads boxes of stored arrays instead of the checkpoint, such as from a cache.
        """
        self._read_through = read_through
        return self.attempts.retry_if_replaced(self._attempt)

    def _attempt(self, checkpoint: Checkpoint) -> T:
        if self._read_through is not None:
            checkpoint = checkpoint.reading_through(self._read_through)
        reading = self.plan(checkpoint)
        self.begin(reading)
        self.read(reading)
        return self.build(reading)

    def open(self) -> Checkpoint:
        """Begin an attempt: open the checkpoint. All metadata is from one save."""
        return self.attempts.open()

    def plan(self, checkpoint: Checkpoint) -> TreeRead:
        """Match the target with the stored tree, and plan the reads. Reads no array, and changes nothing."""
        if self.request.transforms:
            with self.recording.phase("open"):
                checkpoint = transformed(checkpoint, self.request.transforms, self.context)
        bytes_before = 0 if self.request.report is None else bytes_requested(checkpoint)
        matched = self.target.match(self, checkpoint)
        for message in matched.sparse:
            logger.warning("%s: %s", checkpoint.location.display, message)
        self._planned = checkpoint, matched, bytes_before
        if matched.changes:
            from ckptcore.matching.adjustments import adjusted  # only if arrays are adjusted

            checkpoint = adjusted(checkpoint, matched.changes, self.context)
        return plan_leaf_reads(checkpoint, matched, self.recording.progress)

    def begin(self, reading: TreeRead) -> None:
        """Read and restore the objects that may refuse their state, before all others.

        Examples are data loaders, schedulers, and modules with their own loading code. Each process reads the states of
        its own objects, also in a collective load.
        """
        if (first := reading.first) is not None:
            if first.progress is not None:
                first.progress.plan(first.nbytes + reading.nbytes)
            with self.recording.phase("read", first.nbytes):
                self.target.begin(self, first)

    def read(self, reading: TreeRead, read_planned: Callable[[TreeRead, Context], None] | None = None) -> None:
        """Read and build the planned leaves.

        Args:
            reading: the plan.
            read_planned: runs the plan; None: see `read_planned` of the load.
        """
        self.has_begun = True
        if not reading.leaf_reads and reading.checkpoint.is_files:
            return  # the target reads the files
        with self.recording.phase("read", nbytes := reading.nbytes):
            if reading.progress is not None:
                reading.progress.plan(nbytes)
            (read_planned or self.read_planned)(reading, self.context)

    def build(self, reading: TreeRead) -> T:
        """Build the result, after checking that no base or other additional checkpoint was replaced."""
        if reading.checkpoint.derived is not None:
            check_additional(reading.checkpoint)
        return self.target.build(self, reading)


def files_instead(checkpoint: Checkpoint) -> TreeMismatchError:
    """Return the error for files where a tree is expected."""
    return TreeMismatchError(
        f"{checkpoint.location.display} has files of an object instead of a tree: use load_checkpointables with an "
        "object like the one that was saved, or load() without other arguments to get the files as bytes",
        ["files are stored, a tree is requested"],
    )


def transformed(checkpoint: Checkpoint, transforms: Transforms, context: Context) -> Checkpoint:
    """Apply transforms to a checkpoint. Returns the same checkpoint if there are none. Reads no array.

    Raises:
        TransformError: a transform does not match the stored tree.
        TreeMismatchError: files are stored.
    """
    if not transforms:
        return checkpoint
    if checkpoint.is_files:
        raise files_instead(checkpoint)
    from ckptcore.distributions import import_name  # only transforms need it

    apply_transforms: Any = import_name("apply_transforms", purpose="a load with transforms")
    changed: Checkpoint = apply_transforms(checkpoint, transforms, context)
    return changed


def choose_strategy(context: Context, runtime: Runtime, *, is_stage: bool = False) -> CollectiveRead | None:
    """Return the strategy of collective loads in the job of a Context; None if this process loads alone.

    The strategy imports ckptcore-collective if processes read for each other. It fails on all ranks if one rank lacks
    this distribution.

    Args:
        context, runtime: options, and the runtime of the Context.
        is_stage: see `CollectiveRead`.
    """
    reads = context.job.reads
    if reads == "alone" or (job := runtime.job()).size == 1:
        return None
    from ckptcore.loading.joint import CollectiveAttempt, CollectiveRead  # only jobs of several processes

    def find_attempt() -> type[CollectiveAttempt[Any]]:
        if reads == "all":
            return CollectiveAttempt
        from ckptcore.distributions import import_name  # only shared reads need it

        attempt = import_name("SharedAttempt", purpose=f"JobOptions(reads={reads!r})")
        return cast("type[CollectiveAttempt[Any]]", attempt)

    return CollectiveRead(job, find_attempt, is_stage=is_stage)


@contextmanager
def recorded_load(
    location: AnyLocation, context: Context, *, step: int | None = None, report: ProgressCallback | None = None
) -> Iterator[Recording]:
    """Record a load until the end of the with block, and report its progress to a function."""
    refuse_in_signal_handler(f"the load of {location}")
    progress = None if report is None else ByteProgress(report)
    rank = runtime_of(context).job().rank
    recording = Recording("load", shown_location(location), context.observers, step=step, rank=rank, progress=progress)
    try:
        yield recording
    except BaseException as error:
        recording.finish(error=error)
        raise
    recording.finish()
    if progress is not None:
        progress.end()


def fill_report(report: LoadReport, checkpoint: Checkpoint, matched: Matched, bytes_before: int) -> None:
    """Fill the report of a load.

    Args:
        report: the report of the caller.
        checkpoint: the checkpoint, after transforms.
        matched: the leaves that were loaded.
        bytes_before: the result of `bytes_requested` at the start of the attempt that succeeded.
    """
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
    report.ignored = [format_path(checkpoint.tree.paths[number]) for number in matched.ignored]
    report.bytes_read = bytes_requested(checkpoint) - bytes_before


def bytes_requested(checkpoint: Checkpoint) -> int:
    """Return the bytes requested from storages so far, including those of the sources of a derived checkpoint."""
    if checkpoint.derived is not None:
        return sum(map(bytes_requested, checkpoint.derived.sources))
    return checkpoint.store.bytes_read + checkpoint.store.bytes_got
