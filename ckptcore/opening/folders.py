"""Checkpoints and runs inside directories that are not checkpoints themselves, for messages and listings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from ckptcore.commit.location import Location
from ckptcore.commit.root import ROOT_KEY
from ckptcore.commit.root_json import HEAD_BYTES, read_head
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
    UncommittedCheckpointError,
)
from ckptcore.io.reader import ObjectReader
from ckptcore.protocols import StorageBackend
from ckptcore.records import NamedTuple
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNames

_ENTRIES_TRIED: Final = 20
"""Maximum number of subdirectories that are examined."""

_STEPS_TRIED: Final = 3
"""Maximum number of steps of a run whose roots are read. Several are read, because the newest may be unfinished."""

_SHOWN: Final = 5


class FoundRun(NamedTuple):
    """A directory of steps.

    Attributes:
        steps: the number of steps, including unfinished steps.
        newest: the newest step that is a checkpoint.
        name: the name of the directory of `newest`.
    """

    steps: int
    newest: int
    name: str


def find_steps(names: Iterable[str]) -> Mapping[int, str]:
    """Return the steps among the names in a directory: the name of each by its number, in ascending order."""
    return StepNames().find([name[:-1] for name in names if name[-1] == "/" and name[0] != "."])


def find_run(store: StorageBackend, context: Context) -> FoundRun | None:
    """Return the steps of a directory; None if none of its newest steps is a checkpoint.

    Lists the directory, and reads the heads of a few checkpoints.

    Raises:
        StorageError
    """
    steps = find_steps(store.list_names())
    for step, name in sorted(steps.items(), reverse=True)[:_STEPS_TRIED]:
        if _is_checkpoint(subdirectory(store, name), context):
            return FoundRun(len(steps), step, name)
    return None


def has_own_checkpoint(store: StorageBackend, names: Collection[str]) -> bool:
    """Return True if one of the first directories has a root of ckptcore with the role ``checkpoint``.

    The root may be committed or not.
    """
    directories = [name.removesuffix("/") for name in names if name.endswith("/")]
    return any(_is_own(store, name) for name in directories[:_ENTRIES_TRIED])


def held_in(location: Location, names: Sequence[str], context: Context) -> str:
    """Describe the checkpoints and runs in a folder, and how to load them, for a message; empty if there are none.

    Args:
        location: the folder.
        names: the names in it.
        context: provides the layouts.
    """
    checkpoints: list[str] = []
    runs: dict[str, FoundRun] = {}
    directories = [name[:-1] for name in names if name[-1] == "/" and name[0] != "."]
    for name in directories[:_ENTRIES_TRIED]:
        inside = subdirectory(location.store, name)
        try:
            if _is_checkpoint(inside, context):
                checkpoints.append(name)
            elif run := find_run(inside, context):
                runs[name] = run
        except StorageError:
            continue  # a directory that cannot be read does not hide the others
    within = location.display.rstrip("/")
    more = len(directories) > _ENTRIES_TRIED
    sentences = []
    if checkpoints:
        shown = _shown(checkpoints, more=more)
        sentences.append(
            f"separate checkpoints ({shown}): load one by its own location, such as {within}/{checkpoints[0]}"
        )
    if runs:
        counts = [f"{name} with {run.steps} step{'' if run.steps == 1 else 's'}" for name, run in runs.items()]
        first, shown = next(iter(runs)), _shown(counts, more=more)
        sentences.append(
            f"runs ({shown}): load the newest step of one with CheckpointReader({f'{within}/{first}'!r}).load()"
        )
    return " It also holds ".join(f"{text}." for text in sentences).removesuffix(".")


def _shown(names: Sequence[str], *, more: bool) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if more or len(names) > _SHOWN else "")


def _is_own(store: StorageBackend, name: str) -> bool:
    try:
        head = read_head(store.get(f"{name}/{ROOT_KEY}", 0, HEAD_BYTES))
    except (ObjectNotFoundError, InvalidLocationError):
        return False
    return head is not None and head.role == "checkpoint"


def _is_checkpoint(store: StorageBackend, context: Context) -> bool:
    """Return True for a committed checkpoint of any software, including a damaged one."""
    try:
        head = read_head(store.get(ROOT_KEY, 0, HEAD_BYTES))
        return head is None or head.state == "committed"
    except (ObjectNotFoundError, InvalidLocationError):
        pass
    reader = ObjectReader(store, {}, runtime_of(context).io_threads, verify=context.io.verify)
    for layout in runtime_of(context).registry.layouts():
        try:
            if layout.inspect(reader, None) is not None or layout.inspect_composite(reader) is not None:
                return True
        except StorageError:
            raise
        except (CheckpointNotFoundError, UncommittedCheckpointError):
            continue
        except CheckpointError:
            return True
    return False
