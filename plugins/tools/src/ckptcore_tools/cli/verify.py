"""``ckptcore verify``: whether every byte of a checkpoint is what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptcore.model import JSON
from ckptcore_tools.amounts import count, size
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import byte_progress, print_document, print_line, printable, to_json

if TYPE_CHECKING:
    from ckptcore.results import Problem, VerifyReport

__all__ = ["command", "problem_documents"]


@checkpoint_command("verify")
@click.argument("location")
def command(as_json: bool, location: str) -> ExitCode:
    """Read every byte of a checkpoint and check it against its checksum.

    Each problem names the object (file), the arrays in it and the range of bytes; with one the exit code is 1. A
    checkpoint that other software wrote has no checksums: that all of it can be read is checked, and is said so. Of a
    checkpoint of several checkpointables each one that is there is verified, and those that are not are named: deleted
    since, or lost.
    """
    import ckptcore

    with byte_progress("verifying") as progress:
        report = ckptcore.verify(location, progress=progress, context=command_context())
    if as_json:
        print_document(
            "verify", location=location, ok=report.ok, **{**to_json(report), "problems": problem_documents(report)}
        )
    else:
        _print(report)
    return ExitCode.OK if report.ok else ExitCode.FOUND


def problem_documents(report: VerifyReport) -> list[JSON]:
    """The problems of a checkpoint as JSON, in the order of its objects."""
    return [to_json(problem, key="object") for problem in _sorted(report)]


def _sorted(report: VerifyReport) -> list[Problem]:
    return sorted(report.problems, key=lambda problem: (problem.key or "", problem.start or 0))


def _print(report: VerifyReport) -> None:
    deleted = report.deleted
    for problem in _sorted(report):
        where = printable(problem.key or "checkpoint")
        if problem.start is not None and problem.stop is not None:
            where += f" bytes {problem.start}–{problem.stop}"
        print_line((where, "bold red"))
        print_line("  ", printable(problem.message))
        if problem.arrays:
            shown = ", ".join(map(printable, problem.arrays[:8]))
            more = len(problem.arrays) - 8
            print_line("  ", ("arrays ", "dim"), shown, f" and {more:,} more" if more > 0 else "")
    if deleted:
        others = f" and {len(deleted) - 8:,} more" if len(deleted) > 8 else ""
        print_line(
            ("not there ", "yellow"),
            ", ".join(map(printable, deleted[:8])),
            others,
            ": deleted since the save, or lost",
        )
    checked = f"{count(report.objects, 'object')}, {size(report.nbytes)} checked"
    if not report.ok:
        print_line((count(len(report.problems), "problem"), "bold red"), f": {checked}")
        return
    if not report.objects:
        print_line(
            ("readable", "bold green"),
            f": {size(report.nbytes)} of arrays. Other software wrote this and recorded no checksums for ckptcore: "
            "what its format does not check itself is not verified",
        )
        return
    print_line(("sound", "bold green"), f": {checked}")
    if report.unverified:
        unverified = ", ".join(map(printable, report.unverified[:8]))
        print_line(("no checksums are kept of ", "yellow"), unverified, ": read, and not verified")
