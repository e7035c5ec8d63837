"""``ckptcore steps``: the steps of a run, and the job that owns them."""

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
from ckptcore.commit.root import ROOT_KEY, Composite, Root, Summary
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.commit.target import Mark, parse_root, root_bytes, root_mark
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
from ckptcore_tools.amounts import age, count, metrics_text, size
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.locations import child_location, names_in
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

__all__ = ["Found", "StepState", "command", "find_pinned", "find_steps", "look_at_steps", "step_names"]

StepState: TypeAlias = Literal["committed", "foreign", "uncommitted", "corrupt", "unreadable", "other"]

_THREADS: Final = 8
"""Requests at a time: each step is a small one, which a remote storage answers in tens of milliseconds."""


@dataclass(frozen=True, slots=True)
class Found:
    """What stands under the name of a step.

    Attributes:
        step, name: its number, and the name of its directory.
        state: what it is. "other": nothing that can be loaded, and no save of ckptcore.
        created: when its save began, ISO 8601 in UTC; None where that is not known.
        nbytes: bytes of its objects; of other software's, those of its arrays. None where it cannot be read.
        metrics: the measurements that were saved with it.
        pinned: by a reader; None where that cannot be found out.
        error: why it is corrupt or unreadable, or the first problem that verifying it found.
        sound, unverified, problems: what verifying it found: whether nothing is wrong, the objects without checksums,
            and the problems as JSON.
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
    """How steps are named: in the usual ways, and as in an example.

    Raises:
        click.BadParameter: if no step can be named so.
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
        CheckpointNotFoundError: if there is no such directory.
        InvalidLocationError: if it is a checkpoint itself.
    """
    if ROOT_KEY in names_in(directory, context):
        raise InvalidLocationError(
            f"{directory} is a checkpoint and no directory of steps; name the directory that it is in, or use inspect"
        )
    steps = StepDirectory(directory, names, context)
    since = steps.changes()
    steps.replace(steps.list_names(), since)
    return steps


def find_pinned(store: StorageBackend, display: str) -> frozenset[str] | None:
    """The names of the steps that readers have pinned; None where that cannot be found out."""
    try:
        return commit_method(store).locks(display).pinned()
    except StorageError:
        return None  # what readers died of may not be removed by everybody who may read


def look_at_steps(steps: StepDirectory, chosen: Sequence[int], context: Context) -> Sequence[Found]:
    """Read the roots of some steps, several at a time.

    Raises:
        StorageError
    """
    if not chosen:
        return ()
    with ThreadPoolExecutor(min(_THREADS, len(chosen))) as threads:
        return list(threads.map(partial(_look, steps, context), chosen))


def _look(steps: StepDirectory, context: Context, step: int) -> Found:
    """Look at a step. Look again if it was committed, replaced or deleted in between."""
    store = subdirectory(steps.store, steps.name(step))
    for _ in range(ATTEMPTS):
        mark = root_mark(store)
        found = _look_once(steps, context, step, mark)
        if found.state == "committed" or root_mark(store) == mark:
            break
    return found


def _look_once(steps: StepDirectory, context: Context, step: int, data: bytes | str | None) -> Found:
    """Look at a step of which this is the mark."""
    name = steps.name(step)
    store = subdirectory(steps.store, name)
    if isinstance(data, str):
        return Found(step, name, "unreadable", error=data)
    try:
        if data is None:
            return _look_at_foreign(steps, context, step)
        summary = summarize_root(data)
        if not summary.committed:
            return Found(step, name, "uncommitted", summary.created)
        nbytes = (
            _bytes_of_members(steps, step, data, summary, context) if summary.members else _bytes(store, data, summary)
        )
        return Found(step, name, "committed", summary.created, nbytes, summary.metrics)
    except CheckpointNotFoundError:
        return Found(step, name, "other")
    except CorruptCheckpointError as error:
        return Found(step, name, "corrupt", error=str(error))
    except StorageError:
        raise
    except CheckpointError as error:
        return Found(step, name, "unreadable", error=str(error))


def _look_at_foreign(steps: StepDirectory, context: Context, step: int) -> Found:
    found = describe_checkpoint(steps.place(step), context)
    # Between the two looks a save may have committed.
    state: StepState = "foreign" if found.save_id is None else "committed"
    return Found(step, steps.name(step), state, found.created, found.nbytes, found.metrics)


def _bytes(store: StorageBackend, data: bytes, summary: Summary) -> int:
    """Bytes of the objects of one tree, or of what one object wrote."""
    if summary.nbytes is not None:
        return summary.nbytes
    root = parse_root(store, data)
    return sum(record.size for record in root.objects.values()) if isinstance(root, Root) else 0


def _bytes_of_members(steps: StepDirectory, step: int, data: bytes, summary: Summary, context: Context) -> int:
    """Bytes of the objects of every checkpointable, of every process.

    Raises:
        CorruptCheckpointError: names the one whose root cannot be read.
    """
    location = resolve_location(steps.place(step), runtime_of(context).registry, durable=False, config=context.storage)
    composite = Composite(summary.save_id, summary.created, {}, summary.members or {})
    total = 0
    for directories in present_members(CompositeCheckpoint.of_root(location, Mark(data), composite)).values():
        for directory in directories:
            inside = subdirectory(location.store, directory)
            found = root_bytes(inside)
            if found is None:
                continue  # deleted
            try:
                total += _bytes(inside, found, summarize_root(found))
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
  foreign      a checkpoint of other software, which an installed layout reads
  uncommitted  a save that is under way, or died
  corrupt      a checkpoint that is damaged
  unreadable   a checkpoint that cannot be read here, such as one of a newer version
  other        nothing that can be loaded; saves, loads and policies pass it over
"""


@checkpoint_command("steps", epilog=_STATES)
@click.argument("directory", default=".")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the newest N; the others are not read.")
@click.option(
    "--verify", is_flag=True, help="Read every byte of each step and check it; the exit code is 1 if one fails."
)
@click.option("--named", metavar="EXAMPLE", help="How steps are named, if in no usual way: epoch-0010.")
def command(as_json: bool, directory: str, last: int | None, verify: bool, named: str | None) -> ExitCode:
    """List the steps in DIRECTORY: state, size, age and metrics of each; who owns it, and what dead saves left.

    DIRECTORY is a path or URL. No checkpoint in it is changed, and a job may go on saving there. The size is that of
    all files of a step but its root.
    """
    context = command_context()
    steps = find_steps(directory, step_names(named), context)
    candidates = steps.candidates()
    chosen = candidates if last is None else candidates[-last:]
    pinned = find_pinned(steps.store, directory)
    found = [
        replace(one, pinned=None if pinned is None else one.name in pinned)
        for one in look_at_steps(steps, chosen, context)
    ]
    if verify:
        found = [
            _verified(directory, one, f"step {one.step} ({number} of {len(found)})")
            for number, one in enumerate(found, 1)
        ]
    owner, older = _owner(steps.store), len(candidates) - len(chosen)
    if as_json:
        print_document(
            "steps", directory=directory, owner=owner, steps=found, older=older, leftovers=list(steps.leftovers)
        )
    else:
        _print(found, owner, older, steps.leftovers, directory)
    return ExitCode.FOUND if any(one.sound is False for one in found) else ExitCode.OK


def _verified(directory: str, found: Found, title: str) -> Found:
    """Verify a step; an uncommitted one, and what is no checkpoint, is left as it is."""
    if found.state in ("uncommitted", "other"):
        return found
    try:
        with byte_progress(title) as progress:
            report = ckptcore.verify(
                child_location(directory, found.name), progress=progress, context=command_context()
            )
    except ckptcore.CheckpointError as error:
        return replace(found, sound=False, error=found.error or str(error))
    problems: Any = problem_documents(report)
    message = problems[0]["message"] if problems and found.error is None else found.error
    return replace(found, error=message, sound=report.ok, unverified=report.unverified, problems=problems)


def _owner(store: StorageBackend) -> Mapping[str, JSON] | None:
    try:
        owner = commit_method(store).locks().owner()
    except StorageError as error:
        return {"alive": None, "host": None, "pid": None, "since": None, "description": f"not known: {error}"}
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
    steps: Sequence[Found], owner: Mapping[str, JSON] | None, older: int, leftovers: Sequence[str], directory: str
) -> None:
    if steps:
        now = time.time()
        print_table(_COLUMNS, [_row(step, now) for step in steps])
        print_line()
    print_line(_summary(steps, older, directory))
    print_line((f"{'owner':<9} ", "dim"), "nobody" if owner is None else printable(str(owner["description"])))
    for name in leftovers:
        print_line((f"{'leftover':<9} ", "dim"), printable(name), (", of a save that is under way or died", "dim"))


def _row(step: Found, now: float) -> Sequence[Cell]:
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
        "" if step.nbytes is None else size(step.nbytes),
        "" if step.created is None else printable(age(step.created, now)),
        checked,
        printable(metrics_text(step.metrics)),
        ("; ".join(notes), "" if step.error is None else "red"),
    )


def _summary(steps: Sequence[Found], older: int, directory: str) -> str:
    if not steps:
        return f"no steps in {printable(directory)}"
    text = f"{count(len(steps), 'step')}, {size(sum(step.nbytes or 0 for step in steps))}"
    return f"{text}; {count(older, 'older one')} not shown" if older else text
