"""``ckptcore ls``: lists the checkpoints and runs in a directory, and leftovers of failed saves."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import click

from ckptcore.context import Context
from ckptcore.model import JSON
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import UNSET, Unset, print_document, print_line, printable
from ckptcore_tools.cli.verify import problem_documents
from ckptcore_tools.formatting import format_count, format_layout, format_problems, format_size
from ckptcore_tools.locations import FileGivenError, child_location, describe_and_check, names_in
from ckptcore_tools.outline import count_arrays

State: TypeAlias = Literal[
    "committed", "foreign", "incomplete", "uncommitted", "leftover", "corrupt", "unreadable", "run"
]

_THREADS: Final = 8
_STYLES = {"committed": "green", "run": "green", "foreign": "cyan", "uncommitted": "yellow", "leftover": "yellow"}
_STATES = """\
\b
States:
  committed    a checkpoint of ckptcore
  foreign      a checkpoint of other software that an installed layout can read
  incomplete   a checkpoint with a file that is missing or has another size
  uncommitted  a save that is running, or failed
  leftover     a hidden directory of a save that is running, or failed; the next save removes it if it failed
  corrupt      a damaged checkpoint
  run          a directory with the steps of a run; `ckptcore steps` lists them
  unreadable   an entry that cannot be read here, such as a checkpoint of a newer version, or in an archive
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a directory: a checkpoint, a run, or a leftover of a save.

    Attributes:
        name, state: the name in the directory, and the state.
        layout: the layout; "composite" for several checkpointables.
        created: start of the save, ISO 8601 in UTC.
        arrays, nbytes: number of arrays, and their bytes. Arrays that share their bytes count once.
        error: why the checkpoint is incomplete, corrupt or unreadable.
        writer: the software that wrote the checkpoint, if the checkpoint can be read.
        checkpointables: names of the checkpointables, if there are several.
        problems: the files that are missing or have another size, as JSON.
        steps, newest: the number of steps of a run, and its newest step.
    """

    name: str
    state: State
    layout: str | None = None
    created: str | None = None
    arrays: int | None = None
    nbytes: int | None = None
    error: str | None = None
    writer: str | Unset = UNSET
    checkpointables: Sequence[str] | Unset = UNSET
    problems: Sequence[JSON] | Unset = UNSET
    steps: int | Unset = UNSET
    newest: int | Unset = UNSET


@checkpoint_command("ls", "List the checkpoints and runs in a directory.", epilog=_STATES)
@click.argument("directory", default=".")
def command(as_json: bool, directory: str) -> ExitCode:
    """List the checkpoints in DIRECTORY, with state, layout, size and time, and the runs, with their steps.

    DIRECTORY is a path or URL. Subdirectories are not searched further, and other files are left out. For the steps of
    a run, `ckptcore steps` shows more.
    """
    entries = _read_entries(directory)
    if as_json:
        print_document("ls", directory=directory, checkpoints=entries)
    else:
        _print(directory, entries)
    return ExitCode.OK


def _read_entries(directory: str) -> Sequence[Entry]:
    from ckptcore.commit.names import INTERNAL_DIRECTORY, is_hidden_name, is_leftover_name
    from ckptcore.commit.root import ROOT_KEY

    context = command_context()
    try:
        names = names_in(directory, context)
    except FileGivenError:
        if (entry := _read_entry(directory, directory, context)) is None:
            describe_and_check(directory, context)  # its error describes the file
        return [] if entry is None else [entry]
    if ROOT_KEY in names:
        # The directory is a checkpoint itself: list only it, as `ls` does for a file.
        entry = _read_entry(directory, directory, context)
        return [] if entry is None else [entry]

    def read_named(name: str) -> Entry | None:
        if is_hidden_name(name):
            return Entry(name, "leftover" if is_leftover_name(name) else "uncommitted")
        return _read_entry(child_location(directory, name), name, context)

    ordered = [name.rstrip("/") for name in sorted(names, key=_sort_key)]
    # Each entry needs a few small requests, each of which takes tens of milliseconds on remote storage.
    with ThreadPoolExecutor(_THREADS) as threads:
        entries = list(threads.map(read_named, [name for name in ordered if name != INTERNAL_DIRECTORY]))
    return [entry for entry in entries if entry is not None]


def _sort_key(entry: str) -> tuple[str, int, str]:
    """Return a sort key that orders steps by number: 9 before 10."""
    name = entry.rstrip("/")
    prefix = name.rstrip("0123456789")
    # Use only 20 digits, because converting a name of thousands of digits is slow or fails.
    return (prefix, int(name[len(prefix) :][:20] or -1), name)


def _read_entry(location: str, name: str, context: Context) -> Entry | None:
    """Return the entry of the checkpoint or run at a location. None if there is neither."""
    import ckptcore
    from ckptcore.commit.delete import concerns_one_entry
    from ckptcore.errors import (
        CheckpointNotFoundError,
        CorruptCheckpointError,
        StorageError,
        UncommittedCheckpointError,
    )

    try:
        checkpoint, files = describe_and_check(location, context)
    except UncommittedCheckpointError:
        return Entry(name, "uncommitted")
    except CheckpointNotFoundError:
        from ckptcore_tools.run_steps import find_run_at

        run = find_run_at(location, context)
        return None if run is None else Entry(name, "run", steps=run.steps, newest=run.newest)
    except CorruptCheckpointError as error:
        return Entry(name, "corrupt", error=str(error))
    except ckptcore.CheckpointError as error:
        if isinstance(error, StorageError) and not concerns_one_entry(error):
            raise  # the storage failed, not this checkpoint
        return Entry(name, "unreadable", error=str(error))
    checkpointables: Sequence[str] | Unset = UNSET
    layout = "composite"
    if not checkpoint.is_composite:
        trees = [checkpoint.tree]
        layout = format_layout(
            checkpoint.layout, checkpoint.tree, checkpoint.writer if checkpoint.save_id is None else None
        )
    else:
        trees = [metadata.tree for metadata in checkpoint.checkpointables.values()]
        checkpointables = list(checkpoint.checkpointables)
    state: State = "foreign" if checkpoint.save_id is None else "committed"
    return Entry(
        name,
        "incomplete" if files.problems else state,
        layout=layout,
        created=checkpoint.created,
        arrays=sum(map(count_arrays, trees)),
        nbytes=checkpoint.nbytes,
        error=format_problems(files.problems) if files.problems else None,
        writer=checkpoint.writer,
        checkpointables=checkpointables,
        problems=problem_documents(files.problems) or UNSET,
    )


def _print(directory: str, checkpoints: Sequence[Entry]) -> None:
    if not checkpoints:
        print_line(f"no checkpoints in {printable(directory)}")
        return
    names = [printable(checkpoint.name) for checkpoint in checkpoints]
    width = max(map(len, names))
    for name, checkpoint in zip(names, checkpoints, strict=True):
        details = ""
        if checkpoint.arrays is not None and checkpoint.nbytes is not None:
            members = checkpoint.checkpointables
            content = (
                format_count(checkpoint.arrays, "array")
                if members is UNSET
                else format_count(len(members), "checkpointable")
            )
            created = printable(checkpoint.created or "")
            layout = "" if checkpoint.layout == checkpoint.writer else checkpoint.layout  # shown at the end of the line
            details = f"{layout:<12}{format_size(checkpoint.nbytes):>9} {content:>18}  {created}"
            if checkpoint.state == "foreign" and checkpoint.writer:
                details = f"{details.rstrip()}  by {printable(str(checkpoint.writer))}"
            if checkpoint.error is not None:
                details = f"{details.rstrip()}  {printable(checkpoint.error)}"
        elif checkpoint.steps is not UNSET:
            details = f"{format_count(checkpoint.steps, 'step')}, the newest is {checkpoint.newest}"
        elif checkpoint.error is not None:
            details = printable(" ".join(checkpoint.error.split()))
        state = checkpoint.state
        print_line(name.ljust(width), "  ", (f"{state:<12}", _STYLES.get(state, "bold red")), details.rstrip())
