"""``ckptcore copy``, ``convert`` and ``consolidate``: write a checkpoint or the steps of a run to another location."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, Literal

import click

from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointNotFoundError,
    InvalidLocationError,
    StorageError,
    TransformError,
    TreeMismatchError,
    UncommittedCheckpointError,
)
from ckptcore.inspection.describe import describe_checkpoint
from ckptcore.model import JSON, ArrayRecord
from ckptcore.step_names import StepNames
from ckptcore_tools.cli.command import (
    NAMED_HELP,
    TAKE_OVER_HELP,
    ExitCode,
    checkpoint_command,
    command_context,
    shell_text,
)
from ckptcore_tools.cli.output import UNSET, byte_progress, print_document, print_line, printable, to_json
from ckptcore_tools.formatting import format_count, format_size
from ckptcore_tools.locations import names_in
from ckptcore_tools.subtrees import find_optimizers

if TYPE_CHECKING:
    from ckptcore.commit.locks import IfInUse
    from ckptcore.commit.stored_root import Overwrite
    from ckptcore.protocols import Transform
    from ckptcore_tools.copies import CopyReport, StepsCopyReport
    from ckptcore_tools.copies.copying import CopyVerification


_OVERWRITE_HELP: Final = "Replace the checkpoint at DESTINATION atomically."
_LEAVE_OUT_HELP: Final = "A file of other software, or a pattern, that need not be copied. Repeatable."
_NON_ATOMIC_HELP: Final = "Replace it even if not atomically: after a crash, both checkpoints may be lost."


def _parse_steps(context: click.Context, parameter: click.Parameter, text: str | None) -> frozenset[int] | None:
    """Parse numbers separated by commas.

    Raises:
        click.BadParameter: if the text has another form.
    """
    if text is None:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isascii() and number.isdigit() and len(number) < 20 for number in numbers):
        raise click.BadParameter(f"{text!r}: expected step numbers separated by commas, such as 1000,2000")
    return frozenset(map(int, numbers))


@checkpoint_command("copy", "Copy a checkpoint, or the steps of a run, byte for byte.")
@click.argument("source")
@click.argument("destination")
@click.option("--steps", callback=_parse_steps, metavar="N,N", help="Steps of a run to copy. Default: all.")
@click.option("--verify", is_flag=True, help="Read the copy back and compare it.")
@click.option("--overwrite", is_flag=True, help=_OVERWRITE_HELP)
@click.option("--overwrite-non-atomic", is_flag=True, help=_NON_ATOMIC_HELP)
@click.option("--take-over", is_flag=True, help=TAKE_OVER_HELP)
@click.option("--named", metavar="EXAMPLE", help=NAMED_HELP)
def copy_command(
    as_json: bool,
    source: str,
    destination: str,
    steps: frozenset[int] | None,
    verify: bool,
    overwrite: bool,
    overwrite_non_atomic: bool,
    take_over: bool,
    named: str | None,
) -> ExitCode:
    """Copy the checkpoint at SOURCE to DESTINATION byte for byte, between any two storages.

    SOURCE can also be a directory of steps: each step is copied to a directory with the same name in DESTINATION. Bytes
    are compared with their checksums. The copy is committed when it is complete. To resume an interrupted copy, run the
    command again: complete objects are not sent again.
    """
    from ckptcore_tools.cli.steps import step_names

    context = command_context()
    replace: Overwrite = "non-atomic" if overwrite_non_atomic else overwrite
    verification: CopyVerification = "read-back" if verify else "passing"
    names = step_names(named)
    if steps is None and not _is_run(source, names, context):
        return _copy(as_json, source, destination, replace, verification, context)
    if_in_use: IfInUse = "take over" if take_over else "error"
    return _copy_steps(as_json, source, destination, steps, names, replace, verification, if_in_use, context)


def _is_run(source: str, names: StepNames, context: Context) -> bool:
    """Return True if a directory contains steps and is not a checkpoint."""
    try:
        entries = names_in(source, context)
    except (CheckpointNotFoundError, InvalidLocationError, StorageError):
        return False  # the copy reports a better error
    if not names.find([entry[:-1] for entry in entries if entry.endswith("/")]):
        return False
    try:
        describe_checkpoint(source, context)
    except UncommittedCheckpointError:
        return False
    except CheckpointNotFoundError:
        return True
    return False


def _copy(
    as_json: bool,
    source: str,
    destination: str,
    overwrite: Overwrite,
    verify: CopyVerification,
    context: Context,
) -> ExitCode:
    import ckptcore

    with byte_progress("copying") as progress:
        report = ckptcore.copy(
            source, destination, overwrite=overwrite, verify=verify, progress=progress, context=context
        )
    if as_json:
        print_document("copy", source=source, destination=destination, copied=_report_document(report))
        return ExitCode.OK
    content = f"{format_count(report.objects, 'object')} of {format_size(report.nbytes)}"
    resumed = ""
    if report.kept_bytes:
        resumed = f"; {format_size(report.kept_bytes)} already existed, {format_size(report.sent_bytes)} sent"
    print_line(("copied", "bold green"), f": {content} to {printable(destination)}{resumed}")
    _print_unverified(report.unverified)
    return ExitCode.OK


def _report_document(report: CopyReport) -> JSON:
    document: JSON = to_json(report, sent_bytes="sent", kept_bytes="kept", read_back_bytes="read_back")
    return document


def _print_unverified(keys: Collection[str]) -> None:
    if keys:
        shown = ", ".join(map(printable, sorted(keys)[:8])) + (f" and {len(keys) - 8:,} more" if len(keys) > 8 else "")
        print_line(("no checksums for ", "yellow"), shown, ": copied without verification")


def _copy_steps(
    as_json: bool,
    source: str,
    destination: str,
    steps: frozenset[int] | None,
    names: StepNames,
    overwrite: Overwrite,
    verify: CopyVerification,
    if_in_use: IfInUse,
    context: Context,
) -> ExitCode:
    import ckptcore

    with byte_progress("copying") as progress:
        report = ckptcore.copy_steps(
            source,
            destination,
            steps=steps,
            step_names=names,
            overwrite=overwrite,
            verify=verify,
            if_in_use=if_in_use,
            progress=progress,
            context=context,
        )
    if as_json:
        left_out = report.left_out or UNSET
        print_document(
            "copy_steps", source=source, destination=destination, steps=_step_documents(report), left_out=left_out
        )
    else:
        _print_steps(report, destination)
    return ExitCode.FOUND if report.damaged or report.failed else ExitCode.OK


def _step_documents(report: StepsCopyReport) -> list[Mapping[str, JSON]]:
    """Return the result of every step as JSON, ascending."""
    states = {
        **{step: ("copied", _report_document(step_report), None) for step, step_report in report.steps.items()},
        **dict.fromkeys(report.skipped, ("left", None, None)),
        **dict.fromkeys(report.deleted_at_source, ("gone", None, None)),
        **{step: ("damaged", None, shell_text(error)) for step, error in report.damaged.items()},
        **{step: ("failed", None, shell_text(error)) for step, error in report.failed.items()},
    }
    return [
        {"step": step, "state": state, "copied": copied, "error": error}
        for step, (state, copied, error) in sorted(states.items())
    ]


def _print_steps(report: StepsCopyReport, destination: str) -> None:
    for step, copied in report.steps.items():
        print_line(
            f"step {step}", "  ", (format_size(copied.nbytes), "cyan"), "" if copied.sent_bytes else "  already exists"
        )
    for step in report.skipped:
        reason = ": written by other software, and its directory exists at the destination"
        print_line(f"step {step}", "  ", ("skipped", "yellow"), reason)
    for step in report.deleted_at_source:
        print_line(f"step {step}", "  ", ("skipped", "yellow"), ": deleted at the source during the copy")
    for name in report.left_out:
        print_line(printable(name), "  ", ("left out", "yellow"), ": no step")
    for state, errors in (("damaged", report.damaged), ("failed", report.failed)):
        for step, error in errors.items():
            print_line(f"step {step}", "  ", (state, "bold red"), f": {printable(' '.join(shell_text(error).split()))}")
    content = f"{format_count(len(report.steps), 'step')}, {format_size(report.nbytes)} to {printable(destination)}"
    print_line(("copied", "bold green"), f": {content}; {format_size(report.sent_bytes)} sent")
    _print_unverified({key for copied in report.steps.values() for key in copied.unverified})


@checkpoint_command("convert", "Convert a checkpoint to another layout.")
@click.argument("source")
@click.argument("destination")
@click.option("--layout", default="safetensors", show_default=True, help="A layout. `ckptcore plugins` lists them.")
@click.option("--overwrite", is_flag=True, help=_OVERWRITE_HELP)
@click.option("--overwrite-non-atomic", is_flag=True, help=_NON_ATOMIC_HELP)
@click.option("--map", "map_name", help="Rename, stack and transpose the weights of a model family; see above.")
@click.option("--head-dim", type=click.IntRange(min=2), help="Elements per attention head, if the map needs it.")
@click.option("--rope-type", type=click.Choice(["default", "llama3.1"]), help="rope_type of MaxText's configuration.")
@click.option("--prefix", default="", help="Prefix of the weights' names in Hugging Face's checkpoint, such as bert.")
@click.option("--dequantize", metavar="DTYPE", help="Convert quantised weights to a dtype, such as bfloat16.")
@click.option("--leave-out", multiple=True, metavar="FILE", help=_LEAVE_OUT_HELP)
def convert_command(
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
    leave_out: tuple[str, ...],
) -> ExitCode:
    """Convert the checkpoint at SOURCE to another layout and write it to DESTINATION.

    SOURCE can have any installed layout, and can be written by ckptcore or by other software. It is not changed. If it
    has several checkpointables, each tree is converted, and files are copied.

    Maps from Hugging Face's names: bert-to-scanned, llama-to-scanned (all layers in one array, for a scan in Flax),
    llama-to-maxtext, qwen-to-maxtext. Maps back: scanned-to-bert, scanned-to-llama, maxtext-to-llama, maxtext-to-qwen.

    --dequantize reads the quantisation from the config.json of the Hugging Face model, and applies before --map.
    """
    import ckptcore

    replace: bool | Literal["non-atomic"] = "non-atomic" if overwrite_non_atomic else overwrite
    transforms = _transforms(map_name, head_dim, prefix, rope_type, dequantize)
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
            leave_out=leave_out,
        )
    written = describe_checkpoint(destination, context)
    one_tree = not written.is_composite
    trees = {"": written} if one_tree else written.checkpointables
    leaves = [leaf for metadata in trees.values() for leaf in metadata.tree.leaves]
    arrays = sum(isinstance(leaf, ArrayRecord) for leaf in leaves)
    if as_json:
        print_document(
            "convert",
            source=source,
            destination=destination,
            layout=layout,
            arrays=arrays,
            nbytes=written.nbytes,
            checkpointables=UNSET if one_tree else list(trees),
        )
    else:
        content = format_count(arrays, "array") if one_tree else format_count(len(trees), "checkpointable")
        summary = f": {content} of {format_size(written.nbytes)} to {printable(destination)} as {layout}"
        print_line(("written", "bold green"), summary)
    return ExitCode.OK


def _transforms(
    map_name: str | None,
    head_dim: int | None,
    prefix: str,
    rope_type: Literal["default", "llama3.1"] | None,
    dequantize: str | None,
) -> list[Transform]:
    """Return the transforms for the options of `convert_command`."""
    import ckptcore

    transforms: list[Transform] = []
    if map_name is None and (head_dim is not None or rope_type is not None or prefix):
        raise click.UsageError("--head-dim, --rope-type and --prefix need --map.")
    if dequantize is not None:
        try:
            transforms.append(ckptcore.transforms.DequantizeAsConfigured(dequantize))
        except TypeError as error:
            raise click.UsageError(f"--dequantize: {dequantize!r} is not a dtype of NumPy or ml_dtypes") from error
    if map_name is not None:
        try:
            transforms += ckptcore.transforms.maps.find_map(map_name, head_dim, prefix, rope_type)
        except TransformError as error:
            text = str(error).replace("head_dim", "--head-dim").replace("rope_type", "--rope-type")
            raise TransformError(f"--map: {text}") from error
    return transforms


_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def _parse_size(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Parse a size in bytes, with or without a unit: ``5GB`` is 5 * 10**9, ``5GiB`` is 5 * 2**30.

    Raises:
        click.BadParameter: if the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    nbytes = 0
    if match is not None:
        nbytes = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()])
    if nbytes < 1:
        raise click.BadParameter(f"{text!r}: expected a size of at least one byte, such as 5GB, 500MB or 2GiB")
    return nbytes


def _parse_metadata(context: click.Context, parameter: click.Parameter, entries: tuple[str, ...]) -> dict[str, str]:
    """Parse entries of the form ``NAME=TEXT``.

    Raises:
        click.BadParameter: if an entry has another form.
    """
    for entry in entries:
        if not entry.partition("=")[0] or "=" not in entry:
            raise click.BadParameter(f"{entry!r}: expected NAME=TEXT, such as format=pt")
    return {name: text for name, _, text in (entry.partition("=") for entry in entries)}


@checkpoint_command("consolidate", "Write safetensors files for Hugging Face tools.")
@click.argument("source")
@click.argument("destination")
@click.option(
    "--subtree",
    help="The part to write, such as model or state/model. Names are relative to it. Empty: everything. Required if "
    "there is an optimizer.",
)
@click.option(
    "--max-file-size",
    callback=_parse_size,
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Largest size of the arrays in a file.",
)
@click.option("--stem", default="model", show_default=True, help="Start of the file names.")
@click.option(
    "--metadata",
    multiple=True,
    callback=_parse_metadata,
    metavar="NAME=TEXT",
    help="An entry of __metadata__ in the files. Repeatable.",
)
@click.option(
    "--tied",
    type=click.Choice(["each", "once"]),
    default="each",
    show_default=True,
    help="Store a tied array under each of its names, or once under the first.",
)
@click.option("--file", "files", multiple=True, help="A file to add, such as config.json. Repeatable.")
@click.option("--leave-out", multiple=True, metavar="FILE", help=_LEAVE_OUT_HELP)
@click.option("--overwrite", is_flag=True, help=_OVERWRITE_HELP)
@click.option("--overwrite-non-atomic", is_flag=True, help=_NON_ATOMIC_HELP)
def consolidate_command(
    as_json: bool,
    source: str,
    destination: str,
    subtree: str | None,
    max_file_size: int,
    stem: str,
    metadata: dict[str, str],
    tied: Literal["each", "once"],
    files: tuple[str, ...],
    leave_out: tuple[str, ...],
    overwrite: bool,
    overwrite_non_atomic: bool,
) -> ExitCode:
    """Write the checkpoint at SOURCE to DESTINATION as safetensors files for Hugging Face tools.

    SOURCE can have any installed layout and any number of shards. It is not changed. Arrays can be larger than memory.
    """
    import ckptcore

    replace: bool | Literal["non-atomic"] = "non-atomic" if overwrite_non_atomic else overwrite
    try:
        layout = ckptcore.SafetensorsLayout(max_file_size, stem, metadata)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    context = command_context()
    if subtree is None:
        subtree = _everything(source, destination, context)
    with byte_progress("consolidating") as progress:
        ckptcore.copy(
            source,
            destination,
            layout=layout,
            subtree=subtree,
            tied=tied,
            files=files,
            leave_out=leave_out,
            overwrite=replace,
            progress=progress,
            context=context,
        )
    tree = ckptcore.metadata(destination, context=context).tree
    if tied == "each":
        tree = dataclasses.replace(tree, aliases={})
    written = layout.file_names(tree)
    arrays = sum(isinstance(leaf, ArrayRecord) for leaf in tree.leaves)
    if as_json:
        print_document(
            "consolidate",
            source=source,
            destination=destination,
            subtree=subtree,
            files=list(written),
            arrays=arrays,
            nbytes=tree.nbytes,
        )
    else:
        content = f"{format_count(arrays, 'array')} of {format_size(tree.nbytes)}"
        files_text = format_count(len(written), "safetensors file")
        print_line(("written", "bold green"), f": {content} to {printable(destination)} in {files_text}")
    return ExitCode.OK


def _everything(source: str, destination: str, context: Context) -> str:
    """Return the empty subtree.

    Raises:
        TreeMismatchError: if there is an optimizer. Hugging Face tools would load its state as weights.
    """
    checkpoint = describe_checkpoint(source, context)
    parts = None if checkpoint.is_composite else find_optimizers(checkpoint.tree)
    if parts is None:
        return ""
    command = shlex.join(["ckptcore", "consolidate", source, destination, "--subtree"])
    ways = [f"`{command} {shlex.quote(name)}`" for name in parts.others]
    if not ways:
        ways = [f"in Python, ckptcore.copy(..., layout='safetensors', transforms={parts.transforms})"]
    raise TreeMismatchError(
        f"{source} has {parts}, which Hugging Face tools would take for weights. Write the weights alone: "
        f"{', or '.join(ways)}; or everything: `{command} ''`",
        [f"{name} is the state of an optimizer" for name in parts.optimizers],
    )
