"""``ckptcore ls``: the checkpoints in a directory, and what is left there of saves that died."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import click

from ckptcore.context import Context
from ckptcore.model import ArrayRecord
from ckptcore.model.sizes import count, size
from ckptcore_tools.cli.command import checkpoint_command
from ckptcore_tools.cli.console import print_document, print_line, printable
from ckptcore_tools.cli.documents import ListDocument, ListedDocument
from ckptcore_tools.cli.exits import ExitCode
from ckptcore_tools.cli.locating import child_location, names_in
from ckptcore_tools.cli.members import describe
from ckptcore_tools.cli.options import command_context

if TYPE_CHECKING:
    from ckptcore import CheckpointMetadata

__all__ = ["command"]

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


@checkpoint_command("ls", epilog=_STATES)
@click.argument("directory", default=".")
def command(as_json: bool, directory: str) -> ExitCode:
    """List the checkpoints in DIRECTORY: whether each is committed, its layout, size and age, and what other software wrote it.

    DIRECTORY is a path or URL; only what is directly in it is looked at, and what is no checkpoint is left out. Of the steps of
    a run `ckptcore steps` tells more.
    """
    document: ListDocument = {
        "schema": "ckptcore.ls/1",
        "directory": directory,
        "checkpoints": list(_checkpoints(directory)),
    }
    if as_json:
        print_document(document)
    else:
        _print(document)
    return ExitCode.OK


def _checkpoints(directory: str) -> Sequence[ListedDocument]:
    from ckptcore.commit.hidden_names import is_hidden_name, is_leftover_name
    from ckptcore.commit.holding import ADMINISTRATION
    from ckptcore.commit.root import ROOT_KEY

    context = command_context()
    names = names_in(directory, context)
    if ROOT_KEY in names:
        # It is a checkpoint itself: like `ls` of a file.
        return _listed(directory, directory, context)

    def look(name: str) -> Sequence[ListedDocument]:
        if is_hidden_name(name):
            return [_document(name, "leftover" if is_leftover_name(name) else "uncommitted")]
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


def _listed(location: str, name: str, context: Context) -> Sequence[ListedDocument]:
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
        return [_document(name, "uncommitted")]
    except CheckpointNotFoundError:
        return ()
    except CorruptCheckpointError as error:
        return [_document(name, "corrupt", str(error))]
    except StorageError:
        raise  # says nothing of this one
    except ckptcore.CheckpointError as error:
        return [_document(name, "unreadable", str(error))]
    else:
        document = _document(name, "foreign" if found.save_id is None else "committed")
        if isinstance(found, ckptcore.CheckpointMetadata):
            document["layout"] = found.layout
            document["arrays"] = _arrays(found)
        else:
            document["layout"] = "composite"
            document["arrays"] = sum(map(_arrays, found.checkpointables.values()))
            document["checkpointables"] = list(found.checkpointables)
        document["writer"] = found.writer
        document["created"] = found.created
        document["nbytes"] = found.nbytes
        return [document]


def _arrays(found: CheckpointMetadata) -> int:
    return sum(isinstance(record, ArrayRecord) for record in found.tree.leaves)


def _document(name: str, state: State, error: str | None = None) -> ListedDocument:
    return {
        "name": name,
        "state": state,
        "layout": None,
        "created": None,
        "arrays": None,
        "nbytes": None,
        "error": error,
    }


def _print(document: ListDocument) -> None:
    checkpoints = document["checkpoints"]
    if not checkpoints:
        print_line(f"no checkpoints in {printable(document['directory'])}")
        return
    names = [printable(checkpoint["name"]) for checkpoint in checkpoints]
    width = max(map(len, names))
    for name, checkpoint in zip(names, checkpoints, strict=True):
        details = ""
        if checkpoint["arrays"] is not None and checkpoint["nbytes"] is not None:
            named = checkpoint.get("checkpointables")
            held = count(checkpoint["arrays"], "array") if named is None else count(len(named), "checkpointable")
            details = (
                f"{checkpoint['layout']:<12}{size(checkpoint['nbytes']):>9} {held:>18}  {checkpoint['created'] or ''}"
            )
            if checkpoint["state"] == "foreign" and checkpoint.get("writer"):
                details = f"{details.rstrip()}  by {printable(checkpoint['writer'])}"
        elif checkpoint["error"] is not None:
            details = printable(" ".join(checkpoint["error"].split()))
        state = checkpoint["state"]
        print_line(name.ljust(width), "  ", (f"{state:<12}", _STYLES.get(state, "bold red")), details.rstrip())
