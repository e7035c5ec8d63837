"""``ckptcore ls``: the checkpoints in a directory, and what is left there of saves that died."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import click

from ckptcore.context import Context
from ckptcore.model import ArrayRecord
from ckptcore_tools.amounts import count, size
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.locations import child_location, describe, names_in
from ckptcore_tools.cli.output import UNSET, Unset, print_document, print_line, printable

if TYPE_CHECKING:
    from ckptcore.results import CheckpointMetadata

__all__ = ["Listed", "command"]

State: TypeAlias = Literal["committed", "foreign", "uncommitted", "leftover", "corrupt", "unreadable"]

_THREADS: Final = 8
_STYLES = {"committed": "green", "foreign": "cyan", "uncommitted": "yellow", "leftover": "yellow"}
_STATES = """\
\b
States:
  committed    a checkpoint of ckptcore
  foreign      a checkpoint of other software, which an installed layout reads
  uncommitted  a save that is under way, or died
  leftover     a hidden directory in which a save is under way, or died; the next save removes it
  corrupt      a checkpoint that is damaged
  unreadable   a checkpoint that cannot be read here, such as one of a newer version
"""


@dataclass(frozen=True, slots=True)
class Listed:
    """Something in a directory: a checkpoint, or what a save left.

    Attributes:
        name, state: what it is.
        layout: "composite" where it holds several checkpointables.
        created: ISO 8601 in UTC.
        arrays, nbytes: how many, and their bytes.
        error: why it is corrupt or unreadable.
        writer: the software that wrote it, where it can be read.
        checkpointables: their names, where it holds several.
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


@checkpoint_command("ls", epilog=_STATES)
@click.argument("directory", default=".")
def command(as_json: bool, directory: str) -> ExitCode:
    """List the checkpoints in DIRECTORY: whether each is committed, its layout, size and age, and what other software wrote it.

    DIRECTORY is a path or URL; only what is directly in it is looked at, and what is no checkpoint is left out. Of the
    steps of a run `ckptcore steps` tells more.
    """
    found = _checkpoints(directory)
    if as_json:
        print_document("ls", directory=directory, checkpoints=found)
    else:
        _print(directory, found)
    return ExitCode.OK


def _checkpoints(directory: str) -> Sequence[Listed]:
    from ckptcore.commit.root import ROOT_KEY
    from ckptcore.commit.target import ADMINISTRATION, is_hidden_name, is_leftover_name

    context = command_context()
    names = names_in(directory, context)
    if ROOT_KEY in names:
        # It is a checkpoint itself: like `ls` of a file.
        return _listed(directory, directory, context)

    def look(name: str) -> Sequence[Listed]:
        if is_hidden_name(name):
            return [Listed(name, "leftover" if is_leftover_name(name) else "uncommitted")]
        return _listed(child_location(directory, name), name, context)

    entries = [entry.rstrip("/") for entry in sorted(names, key=_in_order)]
    # Each is some small requests, which a remote storage answers in tens of milliseconds.
    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(look, [name for name in entries if name != ADMINISTRATION]))
    return [document for documents in found for document in documents]


def _in_order(entry: str) -> tuple[str, int, str]:
    """Steps by their number: 9 before 10."""
    name = entry.rstrip("/")
    prefix = name.rstrip("0123456789")
    # A number of a thousand digits is no step.
    return (prefix, int(name[len(prefix) :][:20] or -1), name)


def _listed(location: str, name: str, context: Context) -> Sequence[Listed]:
    """The checkpoint at a location, or nothing if it is none."""
    import ckptcore
    from ckptcore.errors import (
        CheckpointNotFoundError,
        CorruptCheckpointError,
        StorageError,
        UncommittedCheckpointError,
    )

    try:
        found = describe(location, context)
    except UncommittedCheckpointError:
        return [Listed(name, "uncommitted")]
    except CheckpointNotFoundError:
        return ()
    except CorruptCheckpointError as error:
        return [Listed(name, "corrupt", error=str(error))]
    except StorageError:
        raise  # says nothing of this one
    except ckptcore.CheckpointError as error:
        return [Listed(name, "unreadable", error=str(error))]
    else:
        named: Sequence[str] | Unset = UNSET
        layout = "composite"
        if not found.is_composite:
            trees, layout = [found], found.layout
        else:
            trees, named = list(found.checkpointables.values()), list(found.checkpointables)
        return [
            Listed(
                name,
                "foreign" if found.save_id is None else "committed",
                layout=layout,
                created=found.created,
                arrays=sum(map(_arrays, trees)),
                nbytes=found.nbytes,
                writer=found.writer,
                checkpointables=named,
            )
        ]


def _arrays(found: CheckpointMetadata) -> int:
    return sum(isinstance(record, ArrayRecord) for record in found.tree.leaves)


def _print(directory: str, checkpoints: Sequence[Listed]) -> None:
    if not checkpoints:
        print_line(f"no checkpoints in {printable(directory)}")
        return
    names = [printable(checkpoint.name) for checkpoint in checkpoints]
    width = max(map(len, names))
    for name, checkpoint in zip(names, checkpoints, strict=True):
        details = ""
        if checkpoint.arrays is not None and checkpoint.nbytes is not None:
            named = checkpoint.checkpointables
            held = count(checkpoint.arrays, "array") if named is UNSET else count(len(named), "checkpointable")
            details = f"{checkpoint.layout:<12}{size(checkpoint.nbytes):>9} {held:>18}  {checkpoint.created or ''}"
            if checkpoint.state == "foreign" and checkpoint.writer:
                details = f"{details.rstrip()}  by {printable(str(checkpoint.writer))}"
        elif checkpoint.error is not None:
            details = printable(" ".join(checkpoint.error.split()))
        state = checkpoint.state
        print_line(name.ljust(width), "  ", (f"{state:<12}", _STYLES.get(state, "bold red")), details.rstrip())
