"""``ckptcore copy``, ``convert`` and ``consolidate``: a checkpoint, or the steps of a run, in another place."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, Literal

import click

from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, StorageError, UncommittedCheckpointError
from ckptcore.model import JSON, ArrayRecord
from ckptcore.step_names import StepNames
from ckptcore_tools.amounts import count, size
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.locations import describe, names_in
from ckptcore_tools.cli.output import UNSET, byte_progress, print_document, print_line, printable, to_json

if TYPE_CHECKING:
    from ckptcore.commit.locks import IfInUse
    from ckptcore.commit.target import Overwrite
    from ckptcore.protocols import Transform
    from ckptcore_tools.copies import CopyReport, StepsCopyReport
    from ckptcore_tools.copies.copying import CopyVerification

__all__ = ["consolidate_command", "convert_command", "copy_command"]


def _steps(context: click.Context, parameter: click.Parameter, text: str | None) -> frozenset[int] | None:
    """Numbers between commas.

    Raises:
        click.BadParameter
    """
    if text is None:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isascii() and number.isdigit() and len(number) < 20 for number in numbers):
        raise click.BadParameter(f"{text!r}: give the numbers of steps between commas, such as 1000,2000")
    return frozenset(map(int, numbers))


@checkpoint_command("copy")
@click.argument("source")
@click.argument("destination")
@click.option("--steps", callback=_steps, metavar="N,N", help="Of a directory of steps only these; all by default.")
@click.option("--verify", is_flag=True, help="Read all that is at DESTINATION, and compare it.")
@click.option("--overwrite", is_flag=True, help="Replace checkpoints at DESTINATION, atomically.")
@click.option("--overwrite-non-atomic", is_flag=True, help="... also where a crash would leave neither.")
@click.option(
    "--take-over", is_flag=True, help="If a job seems to own DESTINATION, wait for a sign of life; go on if none comes."
)
@click.option("--named", metavar="EXAMPLE", help="How steps are named, if in no usual way: epoch-0010.")
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
    """Copy the checkpoint at SOURCE to DESTINATION, byte by byte, between any two storages.

    SOURCE may also be a directory of steps: each one is copied to a directory of its name in DESTINATION. Bytes are
    compared with their checksums on the way. Nothing at DESTINATION is a checkpoint before all of it is there. A copy
    that was interrupted goes on when it is called again; what is there already, of this copy or of one that is
    complete, is not sent again.
    """
    from ckptcore_tools.cli.steps import step_names

    context = command_context()
    replace: Overwrite = "non-atomic" if overwrite_non_atomic else overwrite
    how: CopyVerification = "read-back" if verify else "passing"
    names = step_names(named)
    if steps is None and not _is_run(source, names, context):
        return _copy(as_json, source, destination, replace, how, context)
    return _copy_run(
        as_json, source, destination, steps, names, replace, how, "take over" if take_over else "error", context
    )


def _is_run(source: str, names: StepNames, context: Context) -> bool:
    """Whether a directory is one of steps, and no checkpoint."""
    from ckptcore.loading.describe import describe_checkpoint

    try:
        entries = names_in(source, context)
    except (CheckpointNotFoundError, StorageError):
        return False  # which the copy tells better
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
        print_document("copy", source=source, destination=destination, copied=_copied(report))
        return ExitCode.OK
    held = f"{count(report.objects, 'object')} of {size(report.nbytes)}"
    print_line(("copied", "bold green"), f": {held} to {printable(destination)}{_of_sent(report)}")
    _print_unverified(report.unverified)
    return ExitCode.OK


def _copied(report: CopyReport) -> JSON:
    found: JSON = to_json(report, sent_bytes="sent", kept_bytes="kept", read_back_bytes="read_back")
    return found


def _of_sent(report: CopyReport) -> str:
    if not report.kept_bytes:
        return ""
    return f"; {size(report.kept_bytes)} were there already, {size(report.sent_bytes)} were sent"


def _print_unverified(keys: Collection[str]) -> None:
    if keys:
        shown = ", ".join(map(printable, sorted(keys)[:8])) + (f" and {len(keys) - 8:,} more" if len(keys) > 8 else "")
        print_line(("no checksums are kept of ", "yellow"), shown, ": copied as they were read")


def _copy_run(
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

    with byte_progress("copying") as bar:
        progress = _OfSteps(bar)
        report = ckptcore.copy_steps(
            source,
            destination,
            steps=steps,
            names=names,
            overwrite=overwrite,
            verify=verify,
            if_in_use=if_in_use,
            progress=progress.moved,
            context=context,
        )
    if as_json:
        print_document("copy_steps", source=source, destination=destination, steps=_step_documents(report))
    else:
        _print_steps(report, destination)
    return ExitCode.FOUND if report.damaged else ExitCode.OK


class _OfSteps:
    """Sums up the progress of steps, which come one after the other."""

    def __init__(self, bar: Callable[[int, int], None]) -> None:
        self._bar = bar
        self._before = 0
        self._last: tuple[int, int] | None = None

    def moved(self, step: int, done: int, total: int) -> None:
        """Tell the bar of bytes of a step."""
        if self._last is not None and self._last[0] != step:
            self._before += self._last[1]
        self._last = step, total
        self._bar(self._before + done, self._before + total)


def _step_documents(report: StepsCopyReport) -> list[Mapping[str, JSON]]:
    """Every step with what became of it, ascending."""
    states = {
        **{step: ("copied", _copied(one), None) for step, one in report.steps.items()},
        **{step: ("left", None, None) for step in report.left},
        **{step: ("gone", None, None) for step in report.gone},
        **{step: ("damaged", None, error) for step, error in report.damaged.items()},
    }
    return [
        {"step": step, "state": state, "copied": copied, "error": error}
        for step, (state, copied, error) in sorted(states.items())
    ]


def _print_steps(report: StepsCopyReport, destination: str) -> None:
    for step, one in report.steps.items():
        print_line(f"step {step}", "  ", (size(one.nbytes), "cyan"), "" if one.sent_bytes else "  was there already")
    for step in report.left:
        print_line(
            f"step {step}", "  ", ("left alone", "yellow"), ": of other software, and something is there already"
        )
    for step in report.gone:
        print_line(f"step {step}", "  ", ("gone", "yellow"), ": it was deleted meanwhile")
    for step, error in report.damaged.items():
        print_line(f"step {step}", "  ", ("damaged", "bold red"), f": {printable(' '.join(error.split()))}")
    held = f"{count(len(report.steps), 'step')}, {size(report.nbytes)} to {printable(destination)}"
    print_line(("copied", "bold green"), f": {held}; {size(report.sent_bytes)} were sent")
    _print_unverified({key for one in report.steps.values() for key in one.unverified})


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
) -> ExitCode:
    """Write the checkpoint at SOURCE to DESTINATION in another layout.

    SOURCE may be of any layout that is installed, written by ckptcore or by other software; it is not changed. Of
    several checkpointables each is converted; files that objects wrote are copied.

    Maps: bert-to-scanned, llama-to-scanned (layers in one array, as Flax runs them by a scan), llama-to-maxtext and
    qwen-to-maxtext, from Hugging Face's names; scanned-to-bert, scanned-to-llama, maxtext-to-llama and maxtext-to-qwen
    back to these.

    Quantised weights of Hugging Face models are made numbers by what the config.json beside them says, before they are
    mapped.
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
    one_tree = not written.is_composite
    trees = {"": written} if one_tree else written.checkpointables
    leaves = [leaf for one in trees.values() for leaf in one.tree.leaves]
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
        held = count(arrays, "array") if one_tree else count(len(trees), "checkpointable")
        place = printable(destination)
        print_line(("written", "bold green"), f": {held} of {size(written.nbytes)} to {place} as {layout}")
    return ExitCode.OK


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
def consolidate_command(
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

    SOURCE may be of any layout that is installed, of any number of shards; it is not changed. No array need fit into
    memory.
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
        held = f"{count(arrays, 'array')} of {size(tree.nbytes)}"
        print_line(
            ("written", "bold green"),
            f": {held} to {printable(destination)} in {count(len(written), 'safetensors file')}",
        )
    return ExitCode.OK
