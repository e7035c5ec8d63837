"""``ckptcore convert``: a checkpoint written again in another layout or place."""

from __future__ import annotations

from typing import Literal

import click

from ckptcore.model import ArrayRecord
from ckptcore.model.sizes import count, size
from ckptcore.protocols import Transform
from ckptcore_tools.cli.command import checkpoint_command
from ckptcore_tools.cli.console import print_document, print_line, printable
from ckptcore_tools.cli.documents import ConvertDocument
from ckptcore_tools.cli.exits import ExitCode
from ckptcore_tools.cli.members import describe
from ckptcore_tools.cli.options import command_context
from ckptcore_tools.cli.progress import byte_progress

__all__ = ["command"]


@checkpoint_command("convert")
@click.argument("source")
@click.argument("destination")
@click.option("--layout", default="safetensors", show_default=True, help="Its name; `ckptcore plugins` lists them.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DESTINATION, atomically.")
@click.option("--overwrite-non-atomic", is_flag=True, help="... also where a crash would leave neither.")
@click.option("--map", "map_name", help="Rename, stack and turn weights: llama-to-maxtext, or the other way round.")
@click.option("--head-dim", type=click.IntRange(min=2), help="Elements of a head, where the map needs them.")
@click.option("--rope-type", type=click.Choice(["default", "llama3.1"]), help="Of MaxText's configuration: likewise.")
@click.option("--prefix", default="", help="What the names of the map begin with in Hugging Face's checkpoint: bert.")
@click.option("--dequantize", metavar="DTYPE", help="Make numbers of quantised weights, such as bfloat16.")
def command(
    as_json: bool,
    source: str,
    destination: str,
    layout: str,
    overwrite: bool,
    overwrite_non_atomic: bool,
    map_name: str | None,
    head_dim: int | None,
    rope_type: Literal["default", "llama3.1"] | None,
    prefix: str,
    dequantize: str | None,
) -> ExitCode:
    """Write the checkpoint at SOURCE to DESTINATION in another layout.

    SOURCE may be of any layout that is installed, written by ckptcore or by other software; it is not changed. Of several
    checkpointables each is converted; files that objects wrote are copied.

    Maps: bert-to-scanned, llama-to-scanned (layers in one array, as Flax runs them by a scan), llama-to-maxtext and qwen-to-maxtext, from
    Hugging Face's names; scanned-to-bert, scanned-to-llama, maxtext-to-llama and maxtext-to-qwen back to these.

    Quantised weights of Hugging Face models are made numbers by what the config.json beside them says, before they are mapped.
    """
    import ckptcore

    replace: bool | Literal["non-atomic"] = "non-atomic" if overwrite_non_atomic else overwrite
    transforms: list[Transform] = []
    if map_name is None and (head_dim is not None or rope_type is not None or prefix):
        raise click.UsageError("--head-dim, --rope-type and --prefix are of a map: give --map, too.")
    if dequantize is not None:
        try:
            transforms.append(ckptcore.transforms.DequantizeAsConfigured(dequantize))
        except TypeError as error:
            raise click.UsageError(f"--dequantize: {error}") from error
    if map_name is not None:
        transforms += ckptcore.transforms.maps.find_map(map_name, head_dim, prefix, rope_type)
    context = command_context()
    with byte_progress("converting") as progress:
        ckptcore.copy(
            source,
            destination,
            layout=layout,
            overwrite=replace,
            progress=progress,
            context=context,
            transforms=transforms,
        )
    written = describe(destination, context)
    one_tree = isinstance(written, ckptcore.CheckpointMetadata)
    trees = {"": written} if isinstance(written, ckptcore.CheckpointMetadata) else written.checkpointables
    leaves = [leaf for one in trees.values() for leaf in one.tree.leaves]
    document: ConvertDocument = {
        "schema": "ckptcore.convert/1",
        "source": source,
        "destination": destination,
        "layout": layout,
        "arrays": sum(isinstance(leaf, ArrayRecord) for leaf in leaves),
        "nbytes": written.nbytes,
    }
    if not one_tree:
        document["checkpointables"] = list(trees)
    if as_json:
        print_document(document)
    else:
        held = f"{count(document['arrays'], 'array')} of {size(document['nbytes'])}"
        if not one_tree:
            held = f"{count(len(trees), 'checkpointable')} of {size(document['nbytes'])}"
        print_line(("written", "bold green"), f": {held} to {printable(destination)} as {document['layout']}")
    return ExitCode.OK
