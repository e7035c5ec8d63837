"""Steps of a run: their states and roots, and the job that owns the directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptcore.commit.delete import concerns_one_entry
from ckptcore.commit.location import open_directory
from ckptcore.commit.root import ROOT_KEY, SaveOrder
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.stored_root import root_version
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    StorageError,
)
from ckptcore.events import readable_events
from ckptcore.inspection.completeness import FileCheck
from ckptcore.model import JSON
from ckptcore.opening.checkpoint import format_names
from ckptcore.opening.folders import FoundRun, find_run
from ckptcore.opening.open_checkpoints import ATTEMPTS, open_stored
from ckptcore.redaction import redacted_location
from ckptcore.results import Problem
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNames
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.formatting import format_problems
from ckptcore_tools.locations import child_location, describe_and_check, names_in
from ckptcore_tools.near_notes import read_near_note

StepState: TypeAlias = Literal["committed", "foreign", "incomplete", "uncommitted", "corrupt", "unreadable", "other"]

_THREADS: Final = 8
"""Concurrent requests. Each step needs one small request, which takes tens of milliseconds on remote storage."""


@dataclass(frozen=True, slots=True)
class StepStatus:
    """The state of a step.

    Attributes:
        step, name: the number, and the name of the directory.
        state: "committed": a checkpoint of ckptcore. "foreign": a checkpoint of other software. "incomplete": a file is
            missing or has another size than recorded. "uncommitted": a save of ckptcore that is running or was
            interrupted. "corrupt": its metadata is damaged. "unreadable": this process cannot read it, for example for
            lack of a permission. "other": neither a checkpoint that can be loaded nor a save of ckptcore.
        created: start of the save, ISO 8601 in UTC; None if unknown.
        nbytes: bytes of the objects; for checkpoints of other software, bytes of the arrays. None if unknown.
        metrics: the metrics saved with the step.
        pinned: True if a reader has pinned the step; None if unknown.
        error: why the step is incomplete, corrupt or unreadable.
        save_id: the id of the save; None if unknown.
        seconds: time from the start of the save to its commit, from the stored timeline; None if unknown.
        blocked_seconds: the part of `seconds` during which the save blocked its caller; None if unknown.
        problems: the files that are missing or have another size.
        order: the `SaveOrder` of the save, which decides between two copies of a step.
    """

    step: int
    name: str
    state: StepState
    created: str | None = None
    nbytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool | None = None
    error: str | None = None
    save_id: str | None = None
    seconds: float | None = None
    blocked_seconds: float | None = None
    problems: tuple[Problem, ...] = ()
    order: SaveOrder = field(default_factory=SaveOrder)

    def with_problems(self, problems: Sequence[Problem]) -> StepStatus:
        """Return the status of the step with these problems of its files. Without problems, return the same status."""
        if not problems:
            return self
        return replace(self, state="incomplete", problems=tuple(problems), error=format_problems(problems))


class RunOwner(NamedTuple):
    """The job that owns a directory of steps.

    Attributes:
        alive: True if the job is running. None if that is unknown until its lease expires, as on storage without locks.
        host, pid, since: the process, and the time when it became the owner, ISO 8601 in UTC; None if unknown.
        description: these facts as text, or the reason why they are unknown.
    """

    alive: bool | None
    host: str | None
    pid: int | None
    since: str | None
    description: str


def find_steps(directory: str, names: StepNames, context: Context) -> StepDirectory:
    """List the steps of a directory.

    Raises:
        CheckpointNotFoundError: if the directory does not exist.
        InvalidLocationError: if the directory is a checkpoint, or has checkpoints that cannot be read as steps.
    """
    if ROOT_KEY in names_in(directory, context):
        raise InvalidLocationError(
            f"{directory} is a checkpoint, not a directory of steps. Give its parent directory, or use "
            f"`ckptcore inspect {directory}`"
        )
    steps = StepDirectory(directory, names, context)
    since = steps.changes()
    steps.replace(steps.list_steps(), since)
    return steps


def find_run_at(directory: str, context: Context) -> FoundRun | None:
    """Return the steps of a directory; None if it is not the directory of a run.

    Raises:
        StorageError
    """
    return find_run(open_directory(directory, runtime_of(context).storages), context)


def find_runs(directory: str, context: Context) -> Mapping[str, FoundRun]:
    """Return the runs in a folder, by the names of their directories. Entries that cannot be read are left out.

    Raises:
        CheckpointNotFoundError: if the folder does not exist.
        StorageError
    """

    def find(name: str) -> FoundRun | None:
        try:
            return find_run_at(child_location(directory, name), context)
        except StorageError as error:
            if not concerns_one_entry(error):
                raise
            return None

    names = [name[:-1] for name in names_in(directory, context) if name[-1] == "/" and name[0] != "."]
    with ThreadPoolExecutor(_THREADS) as threads:
        runs = dict(zip(names, threads.map(find, names), strict=True))
    return {name: run for name, run in runs.items() if run is not None}


def expect_steps(steps: StepDirectory, directory: str, context: Context) -> None:
    """Refuse a folder that contains runs instead of steps.

    Raises:
        CheckpointNotFoundError: the message names some of the runs.
    """
    if steps.candidates() or steps.leftovers:
        return
    if runs := find_runs(directory, context):
        first = child_location(directory, next(iter(runs)))
        raise CheckpointNotFoundError(
            f"{directory} has no steps. It holds runs ({format_names(runs)}): give one of them, such as {first}, or "
            f"list them with `ckptcore ls {directory}`"
        )


def find_pinned(steps: StepDirectory) -> frozenset[str] | None:
    """Return the names of the steps that readers have pinned. None if the storage does not allow reading the pins."""
    try:
        return steps.commit_method().locks(steps.display).pinned()
    except StorageError:
        # Reading the pins also removes the pins of processes that have exited, which needs write permission.
        return None


def read_steps(steps: StepDirectory, chosen: Sequence[int], context: Context) -> Sequence[StepStatus]:
    """Read the roots of some steps concurrently, and check that their files exist with the recorded sizes.

    A step that this process may not read is "unreadable".

    Raises:
        StorageError: if the storage fails.
    """
    if not chosen:
        return ()

    def read(step: int) -> StepStatus:
        try:
            return _read_step(steps, context, check, step)
        except StorageError as error:
            if not concerns_one_entry(error):
                raise
            return StepStatus(step, steps.name(step), "unreadable", error=str(error))

    check = FileCheck(context)
    with ThreadPoolExecutor(min(_THREADS, len(chosen))) as threads:
        return list(threads.map(read, chosen))


def _read_step(steps: StepDirectory, context: Context, check: FileCheck, step: int) -> StepStatus:
    """Read a step. Read it again if it was committed, replaced or deleted in the meantime."""
    store = subdirectory(steps.store, steps.name(step))
    for _ in range(ATTEMPTS):
        version = root_version(store)
        status = _read_step_once(steps, context, check, step, version)
        if version is None and status.save_id is not None:
            continue  # a save has committed since the root was read
        # A root of one tree was read with one request, so it belongs to one save. Other metadata may mix two saves.
        is_one_tree = isinstance(version, bytes) and b'"members"' not in version
        if (is_one_tree and status.state == "committed") or root_version(store) == version:
            break
    return status


def _read_step_once(
    steps: StepDirectory, context: Context, check: FileCheck, step: int, version: bytes | str | None
) -> StepStatus:
    name = steps.name(step)
    store = subdirectory(steps.store, name)
    if isinstance(version, str):
        return StepStatus(step, name, "unreadable", error=version)
    try:
        if version is None:
            return _read_foreign_step(steps, context, check, step)
        summary = summarize_root(version)
        if not summary.committed:
            return StepStatus(step, name, "uncommitted", summary.created)
        files = check.check_root(steps.location(step), store, version, summary)
        return StepStatus(
            step, name, "committed", summary.created, files.nbytes, summary.metrics, None, None, summary.save_id,
            *_durations(summary.timeline), order=summary.order,
        ).with_problems(files.problems)  # fmt: skip
    except CheckpointNotFoundError:
        return StepStatus(step, name, "other")
    except CorruptCheckpointError as error:
        return StepStatus(step, name, "corrupt", error=str(error))
    except StorageError:
        raise
    except CheckpointError as error:
        return StepStatus(step, name, "unreadable", error=str(error))


def _read_foreign_step(steps: StepDirectory, context: Context, check: FileCheck, step: int) -> StepStatus:
    # Without chains, because the steps of a run can be one chain, each with the step before as its base.
    checkpoint, files = describe_and_check(steps.location(step), context, open_stored, check)
    # A save may have committed after the first search for the root.
    state: StepState = "foreign" if checkpoint.save_id is None else "committed"
    return StepStatus(
        step,
        steps.name(step),
        state,
        checkpoint.created,
        checkpoint.nbytes,
        checkpoint.metrics,
        save_id=checkpoint.save_id,
    ).with_problems(files.problems)


def _durations(timeline: JSON) -> tuple[float | None, float | None]:
    """Return the seconds of a save, and those during which its caller was blocked. None if they are unknown."""
    events = readable_events(timeline)
    if not events:
        return None, None
    seconds = max(event.ended for event in events) - min(event.began for event in events)
    # The timeline ends at the commit. If the call had not returned by then, the caller was blocked from start to end.
    blocked = max([event.seconds for event in events if event.phase == "blocking"], default=seconds)
    return seconds, blocked


def find_near(steps: StepDirectory) -> str | None:
    """Return the near directory of a run, which may have newer steps; None if it has none, or if that is unknown."""
    try:
        near = read_near_note(steps.store)
    except StorageError:
        return None
    return None if near is None else redacted_location(near)


def find_owner(steps: StepDirectory) -> RunOwner | None:
    """Return the job that owns a directory of steps. None if there is none."""
    try:
        owner = steps.commit_method().locks().owner()
    except StorageError as error:
        return RunOwner(None, None, None, None, f"unknown: {error}")
    if owner is None:
        return None
    holder = owner.holder
    return RunOwner(
        owner.is_alive,
        holder.host if holder else None,
        holder.pid if holder else None,
        holder.since if holder else None,
        owner.describe(),
    )
