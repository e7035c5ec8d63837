"""``ckptcore verify``: compares every byte of a checkpoint with its checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptcore.model import JSON
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import UNSET, byte_progress, print_document, print_line, printable, to_json
from ckptcore_tools.formatting import format_count, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptcore.results import Problem, VerifyReport


@checkpoint_command("verify", "Verify the checksums of a checkpoint.")
@click.argument("location")
def command(as_json: bool, location: str) -> ExitCode:
    """Read every byte of a checkpoint and verify its checksums.

    Each problem names the object (file), its arrays and the range of bytes. If there is a problem, the exit code is 1.
    Formats of other software may have no checksums for some or all files. For such files, the command only checks that
    everything can be read, and says "complete" instead of "sound". If the checkpoint has several checkpointables, each
    of them is verified, and missing ones are listed.
    """
    import ckptcore

    with byte_progress("verifying") as progress:
        report = ckptcore.verify(location, progress=progress, context=command_context())
    if as_json:
        print_document(
            "verify",
            location=location,
            ok=report.ok,
            state=report.state,
            **{
                **to_json(report),
                "problems": problem_documents(report.problems),
                "unjudged": report.unjudged or UNSET,
                "left_out": report.left_out or UNSET,
            },
        )
    else:
        _print(report)
    return ExitCode.OK if report.ok else ExitCode.FOUND


def print_unused(unused: Mapping[str, Sequence[str]]) -> None:
    """Print the arrays that other software stored but does not load, one line per object."""
    for key, names in unused.items():
        shown = ", ".join(map(printable, names[:8]))
        more = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
        print_line(("not loaded ", "yellow"), printable(key), f": {shown}{more}" if names else "")


def problem_documents(problems: Sequence[Problem]) -> list[JSON]:
    """Return the problems of a checkpoint as JSON, sorted by object."""
    return [to_json(problem, key="object") for problem in _sorted(problems)]


def _sorted(problems: Sequence[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.key or "", problem.start or 0))


def _print(report: VerifyReport) -> None:
    deleted = report.deleted
    for problem in _sorted(report.problems):
        where = printable(problem.key or "checkpoint")
        if problem.start is not None and problem.stop is not None:
            where += f" bytes {problem.start}–{problem.stop}"
        print_line((where, "bold red"))
        print_line("  ", printable(problem.message))
        if problem.arrays:
            shown = ", ".join(map(printable, problem.arrays[:8]))
            more = len(problem.arrays) - 8
            print_line("  ", ("arrays ", "dim"), shown, f" and {more:,} more" if more > 0 else "")
    print_unused(report.unused)
    if deleted:
        others = f" and {len(deleted) - 8:,} more" if len(deleted) > 8 else ""
        print_line(("missing ", "yellow"), ", ".join(map(printable, deleted[:8])), others, ": deleted or lost")
    if report.unsupported:
        others = f" and {len(report.unsupported) - 8:,} more" if len(report.unsupported) > 8 else ""
        shown = ", ".join(map(printable, report.unsupported[:8]))
        print_line(("cannot be read ", "yellow"), shown, others, ": no installed plugin supports them")
    for name in report.left_out:
        print_line(("not a part ", "yellow"), printable(name), ": a copy in another layout would lose it")
    for statement in report.unjudged:
        print_line(("cannot judge ", "yellow"), printable(statement))
    nbytes = format_size(report.nbytes)
    checked = f"{format_count(report.objects, 'object')}, {nbytes}"
    if report.state == "damaged":
        print_line((format_count(len(report.problems), "problem"), "bold red"), f": {checked} checked")
    elif report.state == "sound":
        print_line(("sound", "bold green"), f": {checked} checked")
    elif report.unverified:
        others = f" and {len(report.unverified) - 8:,} more" if len(report.unverified) > 8 else ""
        unverified = ", ".join(map(printable, report.unverified[:8]))
        print_line(
            ("complete", "bold yellow"),
            f": {checked} read; no checksums for {unverified}{others}, so that a changed byte may not be found",
        )
    else:
        what = checked if report.objects else f"{nbytes} of arrays"
        print_line(
            ("complete", "bold yellow"),
            f": {what} read, as far as they can be judged here; damage that the format itself does not detect is not "
            "found",
        )
