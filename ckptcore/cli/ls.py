"""``ckptcore ls``: the checkpoints in a directory, and what is left there of saves that died."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import click

from ckptcore.cli.amounts import count, size
from ckptcore.cli.command import checkpoint_command
from ckptcore.cli.console import print_document, print_line, printable
from ckptcore.cli.documents import ListDocument, ListedDocument
from ckptcore.cli.exits import ExitCode
from ckptcore.model import ArrayRecord

__all__ = ["command"]

State: TypeAlias = Literal["committed", "foreign", "uncommitted", "leftover", "corrupt", "unreadable"]

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
    """List the checkpoints in DIRECTORY: whether each is committed, its layout, size and age.

    DIRECTORY is a path or URL; only what is directly in it is looked at, and what is no checkpoint is left out.
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


def _checkpoints(directory: str) -> Iterator[ListedDocument]:
    from ckptcore.commit import is_hidden_name
    from ckptcore.root import ROOT_KEY

    names = _names_in(directory)
    if ROOT_KEY in names:
        # It is a checkpoint itself: like `ls` of a file.
        yield from _listed(directory, directory)
        return
    for entry in names:
        name = entry.rstrip("/")
        if is_hidden_name(name):
            yield _document(name, "leftover")
        else:
            yield from _listed(_child(directory, name), name)


def _child(directory: str, name: str) -> str:
    if directory[:7].lower() == "file://":
        return (
            f"{directory.rstrip('/')}/{urllib.parse.quote(name, errors='surrogateescape')}"  # its escapes are decoded
        )
    return os.path.join(directory, name)


def _listed(location: str, name: str) -> Iterator[ListedDocument]:
    """The checkpoint at a location, or nothing if it is none."""
    import ckptcore
    from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, UncommittedCheckpointError

    try:
        found = ckptcore.metadata(location)
    except UncommittedCheckpointError:
        yield _document(name, "uncommitted")
    except CheckpointNotFoundError:
        return
    except CorruptCheckpointError as error:
        yield _document(name, "corrupt", str(error))
    except ckptcore.CheckpointError as error:
        yield _document(name, "unreadable", str(error))
    else:
        document = _document(name, "foreign" if found.save_id is None else "committed")
        document["layout"] = found.layout
        document["created"] = found.created
        document["arrays"] = sum(isinstance(record, ArrayRecord) for record in found.tree.leaves)
        document["nbytes"] = found.nbytes
        yield document


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


def _names_in(directory: str) -> Sequence[str]:
    """The names in a directory; those of directories end in ``/``.

    Raises:
        CheckpointNotFoundError: if there is no such directory.
    """
    from ckptcore.errors import CheckpointNotFoundError, InvalidLocationError
    from ckptcore.locations import resolve_location
    from ckptcore.plugins import installed_plugins
    from ckptcore.protocols import StorageOptions

    scheme, separator, _ = directory.partition("://")
    opener = installed_plugins().storage(scheme.lower() if separator else "file")
    names = opener(directory, StorageOptions()).list_names()
    if names:
        return names
    try:
        location = resolve_location(directory, installed_plugins(), durable=False, config={})
    except InvalidLocationError:
        return names  # the root of a storage, which is always there
    if f"{location.name}/" not in location.parent.list_names():
        raise CheckpointNotFoundError(f"there is no directory {directory}; check the path")
    return names


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
            details = (
                f"{checkpoint['layout']:<12}{size(checkpoint['nbytes']):>9} {count(checkpoint['arrays'], 'array'):>13}"
                f"  {checkpoint['created'] or ''}"
            )
        elif checkpoint["error"] is not None:
            details = printable(" ".join(checkpoint["error"].split()))
        state = checkpoint["state"]
        print_line(name.ljust(width), "  ", (f"{state:<12}", _STYLES.get(state, "bold red")), details.rstrip())
