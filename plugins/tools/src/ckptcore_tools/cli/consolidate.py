"""``ckptcore consolidate``: a sharded checkpoint as one directory of safetensors."""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Literal

import click

from ckptcore.model import ArrayRecord
from ckptcore.model.sizes import count, size
from ckptcore_tools.cli.command import checkpoint_command
from ckptcore_tools.cli.console import print_document, print_line, printable
from ckptcore_tools.cli.documents import ConsolidateDocument
from ckptcore_tools.cli.exits import ExitCode
from ckptcore_tools.cli.options import command_context
from ckptcore_tools.cli.progress import byte_progress

__all__ = ["command"]

_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def _bytes(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Bytes, of a number with a unit or without: ``5GB`` are 5 * 10**9, ``5GiB`` are 5 * 2**30.

    Raises:
        click.BadParameter
    """
    found = _SIZE.fullmatch(text.strip())
    nbytes = 0
    if found is not None:
        nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].upper()])
    if nbytes < 1:
        raise click.BadParameter(f"{text!r} is no size; give a number of bytes above 0, such as 5GB, 500MB or 2GiB")
    return nbytes


def _metadata(context: click.Context, parameter: click.Parameter, entries: tuple[str, ...]) -> dict[str, str]:
    """Parse entries of the form ``NAME=TEXT``.

    Raises:
        click.BadParameter
    """
    for entry in entries:
        if not entry.partition("=")[0] or "=" not in entry:
            raise click.BadParameter(f"{entry!r} is no entry; give a name, '=' and a text, such as format=pt")
    return {name: text for name, _, text in (entry.partition("=") for entry in entries)}


@checkpoint_command("consolidate")
@click.argument("source")
@click.argument("destination")
@click.option("--subtree", default="", help="Only this part, such as model or state/model; names begin there.")
@click.option(
    "--max-file-size",
    callback=_bytes,
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="The most elements a file holds.",
)
@click.option("--stem", default="model", show_default=True, help="What the names of files begin with.")
@click.option(
    "--metadata",
    multiple=True,
    callback=_metadata,
    metavar="NAME=TEXT",
    help="An entry of the files' __metadata__; again for more.",
)
@click.option(
    "--tied",
    type=click.Choice(["each", "once"]),
    default="each",
    show_default=True,
    help="Store an array that has several names under each of them, or under the first.",
)
@click.option("--file", "files", multiple=True, help="A file that goes along, such as config.json; again for more.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DESTINATION, atomically.")
@click.option("--overwrite-non-atomic", is_flag=True, help="... also where a crash would leave neither.")
def command(
    as_json: bool,
    source: str,
    destination: str,
    subtree: str,
    max_file_size: int,
    stem: str,
    metadata: dict[str, str],
    tied: Literal["each", "once"],
    files: tuple[str, ...],
    overwrite: bool,
    overwrite_non_atomic: bool,
) -> ExitCode:
    """Write the checkpoint at SOURCE to DESTINATION as safetensors that Hugging Face tools open.

    SOURCE may be of any layout that is installed, of any number of shards; it is not changed. No array need fit into memory.
    """
    import ckptcore

    replace: bool | Literal["non-atomic"] = "non-atomic" if overwrite_non_atomic else overwrite
    try:
        layout = ckptcore.SafetensorsLayout(max_file_size, stem, metadata)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    context = command_context()
    with byte_progress("consolidating") as progress:
        ckptcore.copy(
            source,
            destination,
            layout=layout,
            subtree=subtree,
            tied=tied,
            files=files,
            overwrite=replace,
            progress=progress,
            context=context,
        )
    tree = ckptcore.metadata(destination, context=context).tree
    if tied == "each":
        tree = dataclasses.replace(tree, aliases={})
    written = layout.file_names(tree)
    document: ConsolidateDocument = {
        "schema": "ckptcore.consolidate/1",
        "source": source,
        "destination": destination,
        "subtree": subtree,
        "files": list(written),
        "arrays": sum(isinstance(leaf, ArrayRecord) for leaf in tree.leaves),
        "nbytes": tree.nbytes,
    }
    if as_json:
        print_document(document)
    else:
        held = f"{count(document['arrays'], 'array')} of {size(document['nbytes'])}"
        print_line(
            ("written", "bold green"),
            f": {held} to {printable(destination)} in {count(len(written), 'safetensors file')}",
        )
    return ExitCode.OK
