"""``ckptcore copy``: a checkpoint, or the steps of a run, at another place as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import click

from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, StorageError, UncommittedCheckpointError
from ckptcore.model.sizes import count, size
from ckptcore.step_names import StepNames
from ckptcore_tools.cli.command import checkpoint_command
from ckptcore_tools.cli.console import print_document, print_line, printable
from ckptcore_tools.cli.documents import CopiedDocument, CopiedStepDocument, CopyDocument, CopyStepsDocument
from ckptcore_tools.cli.exits import ExitCode
from ckptcore_tools.cli.locating import names_in
from ckptcore_tools.cli.options import command_context
from ckptcore_tools.cli.progress import byte_progress

if TYPE_CHECKING:
    from ckptcore.commit.occupants import Overwrite
    from ckptcore.commit.ownership import IfInUse
    from ckptcore_tools.copies import CopyReport, StepsCopyReport
    from ckptcore_tools.copies.copying import CopyVerification

__all__ = ["command"]


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
def command(
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

    SOURCE may also be a directory of steps: each one is copied to a directory of its name in DESTINATION. Bytes are compared with
    their checksums on the way. Nothing at DESTINATION is a checkpoint before all of it is there. A copy that was interrupted goes on
    when it is called again; what is there already, of this copy or of one that is complete, is not sent again.
    """
    from ckptcore_tools.cli.survey import step_names

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
    from ckptcore.loading.describe import describe_either

    try:
        entries = names_in(source, context)
    except (CheckpointNotFoundError, StorageError):
        return False  # which the copy tells better
    if not names.find([entry[:-1] for entry in entries if entry.endswith("/")]):
        return False
    try:
        describe_either(source, context)
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
    document: CopyDocument = {
        "schema": "ckptcore.copy/1",
        "source": source,
        "destination": destination,
        "copied": _document(report),
    }
    if as_json:
        print_document(document)
        return ExitCode.OK
    held = f"{count(report.objects, 'object')} of {size(report.nbytes)}"
    print_line(("copied", "bold green"), f": {held} to {printable(destination)}{_of_sent(report)}")
    _print_unverified(report.unverified)
    return ExitCode.OK


def _document(report: CopyReport) -> CopiedDocument:
    return {
        "objects": report.objects,
        "nbytes": report.nbytes,
        "sent": report.sent_bytes,
        "kept": report.kept_bytes,
        "read_back": report.read_back_bytes,
        "requests": report.requests,
        "unverified": list(report.unverified),
    }


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
    document: CopyStepsDocument = {
        "schema": "ckptcore.copy_steps/1",
        "source": source,
        "destination": destination,
        "steps": _step_documents(report),
    }
    if as_json:
        print_document(document)
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


def _step_documents(report: StepsCopyReport) -> list[CopiedStepDocument]:
    documents: list[CopiedStepDocument] = [
        {"step": step, "state": "copied", "copied": _document(one), "error": None} for step, one in report.steps.items()
    ]
    documents.extend({"step": step, "state": "left", "copied": None, "error": None} for step in report.left)
    documents.extend({"step": step, "state": "gone", "copied": None, "error": None} for step in report.gone)
    documents.extend(
        {"step": step, "state": "damaged", "copied": None, "error": error} for step, error in report.damaged.items()
    )
    return sorted(documents, key=lambda document: document["step"])


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
