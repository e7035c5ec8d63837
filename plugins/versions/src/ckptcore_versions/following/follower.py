"""Follower: yields the newest version of a directory again and again, from a cache on a local disk."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from ckptcore.api.checkpoints import abstract
from ckptcore.commit.location import AnyLocation, Location, LocationLike
from ckptcore.commit.stored_root import LocationVersion
from ckptcore.context import Context, default_context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    StorageError,
    StorageFullError,
    UnsupportedVersionError,
)
from ckptcore.events import Recording, logger_named
from ckptcore.io.threads import IOThreads
from ckptcore.loading.load import Load, LoadRequest, files_instead, recorded_load
from ckptcore.loading.new_values import NewValue
from ckptcore.loading.selections import chosen_leaves
from ckptcore.model.arrays import Box
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.tree import JSON
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.open_checkpoints import ConsistentRead
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import as_integer, as_seconds
from ckptcore.step_names import StepNameFormat, StepNames
from ckptcore.training.path_directory import as_run_directory
from ckptcore.training.restoring import SkippedStep
from ckptcore.training.run_directory import RunDirectory, RunSteps, check_step_names, exchanges_of
from ckptcore_versions.following.cache import Cache
from ckptcore_versions.following.installing import Installer
from ckptcore_versions.following.local_files import FilePlan, plan_files
from ckptcore_versions.following.local_version import LocalVersion, open_from_base
from ckptcore_versions.following.preparing import Preparation, Prepared, all_boxes
from ckptcore_versions.following.version import Version
from ckptcore_versions.held_version import BaseVersion
from ckptcore_versions.version_directory import VERSION_NAMES

if TYPE_CHECKING:
    from ckptcore.select import Selection

logger = logger_named("ckptcore.versions")

FOLLOWED_NAMES: Final = replace(VERSION_NAMES, read=[*VERSION_NAMES.read, StepNameFormat("weight_v", width=None)])
"""The names of versions that a follower finds: ours, and those of slime and SGLang."""


def follow(
    location: LocationLike | RunDirectory,
    *,
    cache: LocationLike,
    like: Any = None,
    select: Selection | None = None,
    start: int | None = None,
    timeout: float | None = None,
    poll_seconds: float = 1.0,
    step_names: StepNames | None = None,
    context: Context | None = None,
) -> Follower:
    """Follow the versions in a directory: yield the newest one, and each time a newer one that is complete.

    A version is read into the cache and verified before it is yielded. Older versions that were not yielded by then are
    skipped. In a job of several processes, every process follows with a cache of its own, and all yield the same
    versions.

    Args:
        location: a path or URL of the directory of versions. It need not exist yet.
        cache: a directory on a local disk, for this follower alone. It needs space for three versions. A follower that
            starts again goes on from the newest version in it.
        like: a tree of arrays, or of abstract arrays, with their shardings. Only the boxes that this process needs for
            it are read and kept. None: whole arrays.
        select: the arrays to follow, such as those of an adapter; None: all.
        start: begin with this version, or the next one after it if it does not exist; None: the newest.
        timeout: end after this many seconds without a newer version; None: never.
        poll_seconds: seconds between listings. `Follower.wake` looks at once.
        step_names: the names of versions; None: those of this library, of slime and of SGLang.
        context: options. With ``durability="none"``, a version in the cache may be lost when the power fails.

    Raises:
        DirectoryInUseError: another follower uses the cache.
        InvalidLocationError: the location is a checkpoint, not a directory of versions, or the cache is not local.
        StorageError: the cache or the location cannot be used.
        ValueError: `poll_seconds` is not positive, or `timeout` is negative; or one of them is not finite.
        TypeError: an argument has a wrong type.
    """
    return Follower(
        location,
        cache=cache,
        request=LoadRequest(select=select),
        like=like,
        start=start,
        timeout=timeout,
        poll_seconds=poll_seconds,
        step_names=step_names or FOLLOWED_NAMES,
        context=context or default_context(),
    )


class Follower:
    """Yields versions: see `follow`. Iterate over it in one thread, and close it or use it in a ``with`` statement.

    If an error ends the iteration, such as a full disk, the last version is still there. A new iteration goes on after
    it.

    Attributes:
        skipped: the versions that could not be read since the last one that was yielded, each with the reason.
    """

    def __init__(
        self,
        location: LocationLike | RunDirectory,
        *,
        cache: LocationLike,
        request: LoadRequest,
        like: object,
        start: int | None,
        timeout: float | None,
        poll_seconds: float,
        step_names: StepNames,
        context: Context,
    ) -> None:
        """Open the cache. See `follow`."""
        self._poll_seconds = as_seconds("poll_seconds", poll_seconds)
        if not poll_seconds:
            raise ValueError(f"poll_seconds={poll_seconds!r}: expected more than 0 seconds")
        self.skipped: tuple[SkippedStep, ...] = ()
        self._request = request
        self._like = None if like is None else abstract(like, context=context)
        self._start = None if start is None else as_integer("start", start)
        self._timeout = None if timeout is None else as_seconds("timeout", timeout)
        self._context = context
        self._steps: RunSteps = as_run_directory(location).open(check_step_names(step_names), context)
        self._agree = exchanges_of(f"{self._steps.main.display}/follower", context, runtime_of(context).job())
        self._threads: IOThreads = runtime_of(context).io_threads
        self._last: int | None = None
        self._base: LocalVersion | None = None
        self._broken: dict[int, _Broken] = {}
        self._wake = threading.Event()
        self._looking = threading.RLock()
        self._is_closed = False
        self._installer = Installer(request, context)
        self._cache = Cache(cache, durable=context.durability == "full")

    def __repr__(self) -> str:
        return f"<Follower of {self._steps.main.display}, cache {self._cache.directory}>"

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End the iteration, from any thread, and release the cache. Versions that were yielded stay on the disk.

        Waits for a version that another thread prepares.
        """
        self._is_closed = True
        self._wake.set()
        with self._looking:
            self._cache.close()

    def wake(self) -> None:
        """Look for a newer version now, such as when a message says that there is one. May be called in any thread."""
        self._wake.set()

    def __iter__(self) -> Iterator[Version]:
        """Yield versions until the timeout, or until `close`.

        Raises:
            The errors of `next_version`.
        """
        while (version := self.next_version(self._timeout)) is not None:
            yield version

    @CheckpointError.offering("step_names")
    def next_version(self, timeout: float | None = None) -> Version | None:
        """Wait for a newer version, and prepare it. Return None after the timeout, or if the follower was closed.

        A version that is damaged, or whose chain is broken, is logged and skipped. If the storage fails after a version
        was yielded, a follower of one process waits and tries again.

        Args:
            timeout: seconds to wait for a newer version; 0 looks once; None: forever.

        Raises:
            StorageFullError: the disk of the cache is full. The version before is intact.
            StorageError: the storage fails, and there is no version yet, or the timeout is over, or the job has
                several processes.
            TreeMismatchError: `like` or `select` does not fit the version.
            RankFailedError: another process of the job failed.
        """
        deadline = None if timeout is None else time.monotonic() + as_seconds("timeout", timeout)
        while not self._is_closed:
            self._wake.clear()
            failure = None
            try:
                with self._looking:
                    version = None if self._is_closed else self._look()
            except StorageFullError:
                raise
            except StorageError as error:
                if self._last is None or runtime_of(self._context).job().size > 1:
                    raise
                logger.warning("%s: version %d stays in use: %s", self._steps.main.display, self._last, error)
                version, failure = None, error
            if version is not None or self._is_closed:
                return version
            rest = self._poll_seconds if deadline is None else min(self._poll_seconds, deadline - time.monotonic())
            # The leader checks the clock for all processes, so that all stop waiting together.
            if self._agree("wait").lead("over", functools.partial(_is_over, rest, deadline)):
                if failure is not None:
                    raise failure
                return None
            self._wake.wait(rest)
        return None

    def _look(self) -> Version | None:
        """List the versions, and prepare the best one that can be read."""
        self._steps.reload(self._agree("list"))
        for number in self._agree("choose").lead("choose", self._choose):
            version = self._try(number)
            if version is not None:
                return version
        return None

    def _choose(self) -> list[int]:
        """Return the versions to try, in order."""
        least = -1 if self._last is None else self._last
        if self._last is None and self._start is not None:
            least = self._start - 1
        numbers: list[int] = []
        for number in self._steps.newest_first():
            if number <= least:
                if self._last is not None and number < self._last and not numbers:
                    self._steps.main.warn_once(
                        "the newest version in %s is %d, and version %d stays in use: only higher ones are followed. "
                        "If a new run began there, start the follower again",
                        self._steps.main.display, number, self._last,
                    )  # fmt: skip
                break
            numbers.append(number)
        else:
            if self._last is not None and not numbers:
                self._steps.main.warn_once(
                    "%s has no versions any more, and version %d stays in use. If they are in another directory now, "
                    "follow that one",
                    self._steps.main.display, self._last,
                )  # fmt: skip
        if self._last is None and self._start is not None:
            numbers.reverse()
        return [number for number in numbers if number not in self._broken or self._broken[number].is_due()]

    def _try(self, number: int) -> Version | None:
        """Prepare a version. Return None if any process finds it damaged or deleted."""
        agreement = self._agree(f"follow-{number}")
        with ExitStack() as held:
            opened: tuple[Preparation, Checkpoint] | None = None
            with agreement.stage("prepare") as stage:
                try:
                    opened = self._prepare(number, held)
                except _UNREADABLE as error:
                    stage.payload = [str(error), isinstance(error, CheckpointNotFoundError)]
            reason: Any = agreement.lead("outcome", lambda: _first(stage.payloads))
            if reason is not None:
                self._skip(number, *reason)
                return None
            assert opened is not None  # otherwise there is a reason
            preparation, checkpoint = opened
            with agreement.stage("complete"):
                prepared = preparation.complete()
        return self._yielded(number, prepared, checkpoint)

    def _prepare(self, number: int, held: ExitStack) -> tuple[Preparation, Checkpoint]:
        """Prepare a version, with a pin on it until `held` is closed. The pin also keeps its bases.

        Raises:
            The errors of `_UNREADABLE`: this version cannot be read.
            StorageError, TreeMismatchError
        """
        copies = self._steps.copies(number)
        if not copies:
            raise CheckpointNotFoundError(self._steps.main.missing(number))
        held.enter_context(self._pinned(number, copies[0]))
        location = self._steps.copy_location(number, copies[0])
        name = self._steps.directories[copies[0]].name(number)
        with recorded_load(location, self._context, step=number) as recording:
            attempt = _Attempt(self._context, self._request, self._like, recording)
            try:
                return attempt.prepare(self._cache, number, name, location, self._find_base, held)
            except CorruptCheckpointError:
                base = self._base
                if base is None or (base.cached.version.digest and base.cached.is_intact(self._threads)):
                    raise
                # The files of the base are damaged, or it is a version of other software that was written again.
                return attempt.prepare(self._cache, number, name, location, lambda plan: None, held)

    def _find_base(self, plan: FilePlan | None) -> LocalVersion | None:
        """Return the newest local version, at first from the cache; None if it has other files than a plan."""
        if self._base is None and plan is not None:
            self._base = self._restored(plan)
        has_files = self._base is not None and (plan is None or self._base.plan.files == plan.files)
        return self._base if has_files else None

    def _pinned(self, number: int, copy: int) -> AbstractContextManager[object]:
        """Pin a version. Return an empty context if the directory is not writable."""
        directory = self._steps.directories[copy]
        try:
            return directory.pin(number)
        except StorageError as error:
            directory.warn_once(
                "versions in %s are read without a lease, so that they may be deleted meanwhile: %s",
                directory.display,
                error,
            )
            return nullcontext()

    def _restored(self, plan: FilePlan) -> LocalVersion | None:
        """Return the newest intact version in the cache that has the same files as a plan; None if there is none."""
        for cached in self._cache.versions():
            if plan.describes(cached.directory, {name: file.nbytes for name, file in cached.files.items()}):
                if cached.is_intact(self._threads):
                    return LocalVersion.open(cached, plan)
                logger.warning("%s is damaged, and is not used", cached.directory)
        return None

    def _skip(self, number: int, reason: str, is_gone: bool) -> None:
        """Note that a version cannot be read."""
        if is_gone:
            logger.info("version %d was deleted before it could be read: %s", number, reason)
            return
        broken = self._broken.setdefault(number, _Broken())
        broken.wait()
        if broken.tries == 1:
            served = "no version is" if self._last is None else f"version {self._last} stays"
            logger.warning("version %d cannot be read, %s in use: %s", number, served, reason)
        others = [skip for skip in self.skipped if skip.step != number]
        self.skipped = tuple(sorted([*others, SkippedStep(number, reason)], key=lambda skip: skip.step))

    def _yielded(self, number: int, prepared: Prepared, checkpoint: Checkpoint) -> Version:
        """Return a version that is complete on all processes, as the newest one."""
        before = self._base
        if self._last is None:  # another process yielded the base
            prepared = prepared._replace(changed=all_boxes(prepared.local.plan))
        version = Version(prepared, checkpoint, self._installer)
        self._installer.add(version)
        self._base, self._last = prepared.local, number
        self._broken.clear()
        self.skipped = ()
        kept = {local.cached.directory for local in (before, self._base) if local is not None}
        self._cache.keep_only(kept)
        return version


_UNREADABLE: Final = (
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    UnsupportedVersionError,
)
"""Errors that concern one version, so that a follower tries another one."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt to prepare a version.

    Attributes:
        context, request, like: the options of the follower.
        recording: records the phases.
    """

    context: Context
    request: LoadRequest
    like: object
    recording: Recording

    def prepare(
        self,
        cache: Cache,
        number: int,
        name: str,
        location: AnyLocation,
        find_base: Callable[[FilePlan | None], LocalVersion | None],
        held: ExitStack,
    ) -> tuple[Preparation, Checkpoint]:
        """Prepare a version from a local base and the deltas since, or from the storage alone.

        Args:
            cache: where to prepare it.
            number, name, location: the version.
            find_base: returns a local version with the files of a plan, or with any files; None if there is none.
            held: discards what was prepared, unless it is completed before.
        """

        def opener(at: Location, version: LocationVersion, context: Context) -> Checkpoint:
            return open_from_base(
                at, version, context, lambda link: find_base(None if link.root is None else self.plan(link)), self.plan
            )

        def run(checkpoint: Checkpoint) -> tuple[Preparation, Checkpoint]:
            root, plan = checkpoint.version.root, self.plan(checkpoint)
            version = BaseVersion(
                name,
                "" if checkpoint.root is None else checkpoint.root.save_id,
                hashlib.sha256(root).hexdigest() if isinstance(root, bytes) else "",
                number,
            )
            preparation = Preparation(cache, checkpoint, version, plan, self.context)
            with ExitStack() as incomplete, self.recording.phase("read", plan.nbytes):
                incomplete.callback(preparation.discard)  # before another attempt, which needs the space
                preparation.run(find_base(plan))
                held.push(incomplete.pop_all())
            return preparation, checkpoint

        return ConsistentRead(location, self.context, opener).retry_if_replaced(run)

    def plan(self, checkpoint: Checkpoint) -> FilePlan:
        """Return the files of a version: of the boxes that this process needs."""
        if checkpoint.is_files:
            raise files_instead(checkpoint)
        tree = checkpoint.tree
        boxes: dict[int, dict[Box, None]] = {}
        if self.like is not None:
            load = Load(checkpoint, NewValue(self.like), self.context, self.recording, self.request)
            for leaf_read in load.plan(checkpoint).leaf_reads:
                boxes.setdefault(leaf_read.leaf, {}).update(dict.fromkeys(leaf_read.boxes))
        else:
            select = self.request.select
            chosen: Iterable[int] = range(len(tree.leaves))
            if select is not None:
                chosen = chosen_leaves(checkpoint, select, self.context).intersection(chosen)
            for leaf in chosen:
                record = tree.leaves[leaf]
                if isinstance(record, ArrayRecord):
                    boxes[tree.aliases.get(leaf, leaf)] = {Box.whole(record.spec.shape): None}
        return plan_files(tree, {leaf: list(of_leaf) for leaf, of_leaf in sorted(boxes.items())})


@dataclass(slots=True)
class _Broken:
    """A version that cannot be read. It may be restored, so it is tried again, after more and more listings.

    Attributes:
        tries: the number of attempts to read it.
        listings: the number of listings until the next attempt.
    """

    tries: int = 0
    listings: int = 0

    def wait(self) -> None:
        """Note a failed attempt."""
        self.listings = 2**self.tries
        self.tries = min(self.tries + 1, 10)

    def is_due(self) -> bool:
        """Count a listing. Return True if the version should be tried again."""
        self.listings -= 1
        return self.listings < 0


def _is_over(rest: float, deadline: float | None) -> bool:
    return deadline is not None and rest <= 0


def _first(payloads: Sequence[Any]) -> JSON:
    """Return the first reason why a process could not read a version; None if there is none."""
    return next((payload for payload in payloads if payload is not None), None)
