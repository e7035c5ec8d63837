"""What a directory of steps holds: every step, whether it can be loaded, its size, and who works there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeAlias

import click

from ckptcore.commit.location import resolve_location, subdirectory
from ckptcore.commit.mark import Mark, root_mark
from ckptcore.commit.occupants import parse_root, root_bytes
from ckptcore.commit.root import ROOT_KEY, Composite, Root, Summary
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.steps import StepHolds
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    StorageError,
)
from ckptcore.loading.describe import describe_either
from ckptcore.loading.members import present_members
from ckptcore.loading.opened import OpenedComposite
from ckptcore.loading.tries import ATTEMPTS
from ckptcore.protocols import StorageBackend
from ckptcore.step_names import StepNames
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.cli.locating import names_in

__all__ = ["Found", "StepState", "find_pinned", "find_steps", "look_at_steps", "step_names"]

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
        error: why it is corrupt or unreadable.
    """

    step: int
    name: str
    state: StepState
    created: str | None = None
    nbytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


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
        return StepHolds(store, display).pinned()
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
    found = describe_either(steps.place(step), context)
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
    location = resolve_location(steps.place(step), context.registry, durable=False, config=context.storage)
    composite = Composite(summary.save_id, summary.created, {}, summary.members or {})
    total = 0
    for directories in present_members(OpenedComposite.of_root(location, Mark(data), composite)).values():
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
