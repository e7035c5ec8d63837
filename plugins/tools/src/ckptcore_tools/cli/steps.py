"""``ckptcore steps``: lists the steps of a run, and the job that owns the directory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import click

import ckptcore
from ckptcore.commit.location import commit_method, resolve_location
from ckptcore.commit.root import ROOT_KEY, CompositeRoot, Root, RootSummary
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.commit.target import LocationVersion, parse_root, root_bytes, root_version
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    StorageError,
)
from ckptcore.loading.checkpoint import CompositeCheckpoint
from ckptcore.loading.describe import describe_checkpoint
from ckptcore.loading.opening import ATTEMPTS, present_members
from ckptcore.model import JSON
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNames
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.cli.command import NAMED_HELP, ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import (
    UNSET,
    Cell,
    Column,
    Unset,
    byte_progress,
    print_document,
    print_line,
    print_table,
    printable,
)
from ckptcore_tools.cli.verify import problem_documents
from ckptcore_tools.formatting import format_age, format_count, format_metrics, format_size
from ckptcore_tools.locations import child_location, names_in

__all__ = ["StepState", "StepStatus", "command", "find_pinned", "find_steps", "read_steps", "step_names"]

StepState: TypeAlias = Literal["committed", "foreign", "uncommitted", "corrupt", "unreadable", "other"]

_THREADS: Final = 8
"""Concurrent requests. Each step takes a small request, which a remote storage answers in tens of milliseconds."""


@dataclass(frozen=True, slots=True)
class StepStatus:
    """The state of a step.

    Attributes:
        step, name: the number, and the name of the directory.
        state: the state. "other": neither a checkpoint that can be loaded nor a save of ckptcore.
        created: start of the save, ISO 8601 in UTC; None if unknown.
        nbytes: bytes of the objects; for checkpoints of other software, bytes of the arrays. None if unreadable.
        metrics: the metrics saved with the step.
        pinned: True if a reader has pinned the step; None if unknown.
        error: why the step is corrupt or unreadable, or the first problem found by verification.
        sound, unverified, problems: result of the verification: True if there is no problem, the objects without
            checksums, and the problems as JSON.
    """

    step: int
    name: str
    state: StepState
    created: str | None = None
    nbytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool | None = None
    error: str | None = None
    sound: bool | Unset = UNSET
    unverified: Sequence[str] | Unset = UNSET
    problems: Sequence[JSON] | Unset = UNSET


def step_names(example: str | None) -> StepNames:
    """Return the usual names of steps, or the names that follow an example.

    Raises:
        click.BadParameter: if the example cannot be the name of a step.
    """
    if example is None:
        return StepNames()
    try:
        return StepNames.of(example)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--named") from error


def find_steps(directory: str, names: StepNames, context: Context) -> StepDirectory:
    """List the steps of a directory.

    Raises:
        CheckpointNotFoundError: if the directory does not exist.
        InvalidLocationError: if the directory is a checkpoint.
    """
    if ROOT_KEY in names_in(directory, context):
        raise InvalidLocationError(
            f"{directory} is a checkpoint, not a directory of steps. Give its parent directory, or use "
            f"`ckptcore inspect {directory}`"
        )
    steps = StepDirectory(directory, names, context)
    since = steps.changes()
    steps.replace(steps.list_names(), since)
    return steps


def find_pinned(store: StorageBackend, display: str) -> frozenset[str] | None:
    """Return the names of the steps that readers have pinned. None if the storage does not allow to read them."""
    try:
        return commit_method(store).locks(display).pinned()
    except StorageError:
        # Reading the pins also removes the pins of processes that have exited, which needs write permission.
        return None


def read_steps(steps: StepDirectory, chosen: Sequence[int], context: Context) -> Sequence[StepStatus]:
    """Read the roots of some steps concurrently.

    Raises:
        StorageError: if the storage fails.
    """
    if not chosen:
        return ()
    with ThreadPoolExecutor(min(_THREADS, len(chosen))) as threads:
        return list(threads.map(partial(_read_step, steps, context), chosen))


def _read_step(steps: StepDirectory, context: Context, step: int) -> StepStatus:
    """Read a step. Read it again if it was committed, replaced or deleted in the meantime."""
    store = subdirectory(steps.store, steps.name(step))
    for _ in range(ATTEMPTS):
        version = root_version(store)
        status = _read_step_once(steps, context, step, version)
        if status.state == "committed" or root_version(store) == version:
            break
    return status


def _read_step_once(steps: StepDirectory, context: Context, step: int, version: bytes | str | None) -> StepStatus:
    name = steps.name(step)
    store = subdirectory(steps.store, name)
    if isinstance(version, str):
        return StepStatus(step, name, "unreadable", error=version)
    try:
        if version is None:
            return _read_foreign_step(steps, context, step)
        summary = summarize_root(version)
        if not summary.committed:
            return StepStatus(step, name, "uncommitted", summary.created)
        if summary.members:
            nbytes = _composite_bytes(steps, step, version, summary, context)
        else:
            nbytes = _object_bytes(store, version, summary)
        return StepStatus(step, name, "committed", summary.created, nbytes, summary.metrics)
    except CheckpointNotFoundError:
        return StepStatus(step, name, "other")
    except CorruptCheckpointError as error:
        return StepStatus(step, name, "corrupt", error=str(error))
    except StorageError:
        raise
    except CheckpointError as error:
        return StepStatus(step, name, "unreadable", error=str(error))


def _read_foreign_step(steps: StepDirectory, context: Context, step: int) -> StepStatus:
    found = describe_checkpoint(steps.location(step), context)
    # A save may have committed since the root was looked for.
    state: StepState = "foreign" if found.save_id is None else "committed"
    return StepStatus(step, steps.name(step), state, found.created, found.nbytes, found.metrics)


def _object_bytes(store: StorageBackend, data: bytes, summary: RootSummary) -> int:
    """Return the bytes of the objects of one tree, or of the files of one checkpointable."""
    if summary.nbytes is not None:
        return summary.nbytes
    root = parse_root(store, data)
    return sum(record.size for record in root.objects.values()) if isinstance(root, Root) else 0


def _composite_bytes(steps: StepDirectory, step: int, data: bytes, summary: RootSummary, context: Context) -> int:
    """Return the bytes of the objects of all checkpointables and processes.

    Raises:
        CorruptCheckpointError: if a root cannot be read. Names its directory.
    """
    location = resolve_location(steps.location(step), runtime_of(context).storages)
    composite = CompositeRoot(
        save_id=summary.save_id, created=summary.created, writer={}, members=summary.members or {}
    )
    total = 0
    for directories in present_members(
        CompositeCheckpoint.of_root(location, LocationVersion(data), composite)
    ).values():
        for directory in directories:
            store = subdirectory(location.store, directory)
            root = root_bytes(store)
            if root is None:
                continue  # deleted
            try:
                total += _object_bytes(store, root, summarize_root(root))
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(f"{directory}: {error}", key=error.key) from error
    return total


_STYLES = {"committed": "green", "foreign": "cyan", "uncommitted": "yellow", "other": "dim"}
_COLUMNS = (
    Column("step", "right"),
    Column("name"),
    Column("state"),
    Column("size", "right"),
    Column("age", "right"),
    Column("bytes"),
    Column("metrics"),
    Column("notes"),
)
_STATES = """\
\b
States:
  committed    a checkpoint of ckptcore
  foreign      a checkpoint of other software that an installed layout can read
  uncommitted  a save that is running, or failed
  corrupt      a damaged checkpoint
  unreadable   a checkpoint that cannot be read here, such as one of a newer version
  other        not a checkpoint; saves, loads and policies ignore it
"""


@checkpoint_command("steps", "List the steps of a run.", epilog=_STATES)
@click.argument("directory", default=".")
@click.option(
    "--last", type=click.IntRange(min=1), metavar="N", help="Show only the newest N steps, and read no others."
)
@click.option("--verify", is_flag=True, help="Verify every byte of each step. If a step is damaged, exit with 1.")
@click.option("--named", metavar="EXAMPLE", help=NAMED_HELP)
def command(as_json: bool, directory: str, last: int | None, verify: bool, named: str | None) -> ExitCode:
    """List the steps in DIRECTORY with state, size, age and metrics, the owner, and leftovers of failed saves.

    DIRECTORY is a path or URL. Nothing is changed, and a job can save there at the same time. The size counts all files
    of a step except its root.
    """
    context = command_context()
    steps = find_steps(directory, step_names(named), context)
    candidates = steps.candidates()
    chosen = candidates if last is None else candidates[-last:]
    pinned = find_pinned(steps.store, directory)
    statuses = [
        replace(status, pinned=None if pinned is None else status.name in pinned)
        for status in read_steps(steps, chosen, context)
    ]
    if verify:
        statuses = [
            _verify(directory, status, f"step {status.step} ({number} of {len(statuses)})")
            for number, status in enumerate(statuses, 1)
        ]
    owner, older = _owner(steps.store), len(candidates) - len(chosen)
    if as_json:
        print_document(
            "steps", directory=directory, owner=owner, steps=statuses, older=older, leftovers=list(steps.leftovers)
        )
    else:
        _print(statuses, owner, older, steps.leftovers, directory)
    return ExitCode.FOUND if any(status.sound is False for status in statuses) else ExitCode.OK


def _verify(directory: str, status: StepStatus, title: str) -> StepStatus:
    """Verify a step if it is a committed checkpoint."""
    if status.state in ("uncommitted", "other"):
        return status
    try:
        with byte_progress(title) as progress:
            report = ckptcore.verify(
                child_location(directory, status.name), progress=progress, context=command_context()
            )
    except ckptcore.CheckpointError as error:
        return replace(status, sound=False, error=status.error or str(error))
    problems: Any = problem_documents(report)
    message = problems[0]["message"] if problems and status.error is None else status.error
    return replace(status, error=message, sound=report.ok, unverified=report.unverified, problems=problems)


def _owner(store: StorageBackend) -> Mapping[str, JSON] | None:
    try:
        owner = commit_method(store).locks().owner()
    except StorageError as error:
        return {"alive": None, "host": None, "pid": None, "since": None, "description": f"unknown: {error}"}
    if owner is None:
        return None
    holder = owner.holder
    return {
        "alive": owner.is_alive,
        "host": holder.host if holder else None,
        "pid": holder.pid if holder else None,
        "since": holder.since if holder else None,
        "description": owner.describe(),
    }


def _print(
    steps: Sequence[StepStatus], owner: Mapping[str, JSON] | None, older: int, leftovers: Sequence[str], directory: str
) -> None:
    if steps:
        now = time.time()
        print_table(_COLUMNS, [_row(step, now) for step in steps])
        print_line()
    print_line(_summary(steps, older, directory))
    print_line((f"{'owner':<9} ", "dim"), "none" if owner is None else printable(str(owner["description"])))
    for name in leftovers:
        print_line((f"{'leftover':<9} ", "dim"), printable(name), (", of a save that is running or failed", "dim"))


def _row(step: StepStatus, now: float) -> Sequence[Cell]:
    notes = ["pinned"] if step.pinned else []
    if step.error is not None:
        notes.append(printable(" ".join(step.error.split())))
    checked: Cell = ""
    if step.sound is True:
        checked = ("read", "yellow") if step.unverified else ("sound", "green")
    elif step.sound is False:
        checked = ("damaged", "bold red")
    return (
        str(step.step),
        printable(step.name),
        (step.state, _STYLES.get(step.state, "bold red")),
        "" if step.nbytes is None else format_size(step.nbytes),
        "" if step.created is None else printable(format_age(step.created, now)),
        checked,
        printable(format_metrics(step.metrics)),
        ("; ".join(notes), "" if step.error is None else "red"),
    )


def _summary(steps: Sequence[StepStatus], older: int, directory: str) -> str:
    if not steps:
        return f"no steps in {printable(directory)}"
    text = f"{format_count(len(steps), 'step')}, {format_size(sum(step.nbytes or 0 for step in steps))}"
    return f"{text}; {format_count(older, 'older step')} not shown" if older else text
