"""``ckptcore verify``: whether every byte of a checkpoint is what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptcore.model.sizes import count, size
from ckptcore_tools.cli.command import checkpoint_command
from ckptcore_tools.cli.console import print_document, print_line, printable
from ckptcore_tools.cli.documents import ProblemDocument, VerifyDocument
from ckptcore_tools.cli.exits import ExitCode
from ckptcore_tools.cli.options import command_context
from ckptcore_tools.cli.progress import byte_progress

if TYPE_CHECKING:
    from ckptcore import VerifyReport

__all__ = ["command", "problem_documents"]


@checkpoint_command("verify")
@click.argument("location")
def command(as_json: bool, location: str) -> ExitCode:
    """Read every byte of a checkpoint and check it against its checksum.

    Each problem names the object (file), the arrays in it and the range of bytes; with one the exit code is 1. A checkpoint
    that other software wrote has no checksums: that all of it can be read is checked, and is said so. Of a checkpoint of several
    checkpointables each one that is there is verified, and those that are not are named: deleted since, or lost.
    """
    import ckptcore

    with byte_progress("verifying") as progress:
        report = ckptcore.verify(location, progress=progress, context=command_context())
    document: VerifyDocument = {
        "schema": "ckptcore.verify/1",
        "location": location,
        "ok": report.ok,
        "objects": report.objects,
        "nbytes": report.nbytes,
        "unverified": list(report.unverified),
        "deleted": list(report.deleted),
        "problems": problem_documents(report),
    }
    if as_json:
        print_document(document)
    else:
        _print(document)
    return ExitCode.OK if report.ok else ExitCode.FOUND


def problem_documents(report: VerifyReport) -> list[ProblemDocument]:
    """What is wrong with a checkpoint, in the order of its objects."""
    return [
        {
            "object": problem.key,
            "start": problem.start,
            "stop": problem.stop,
            "arrays": list(problem.arrays),
            "message": problem.message,
        }
        for problem in sorted(report.problems, key=lambda problem: (problem.key or "", problem.start or 0))
    ]


def _print(document: VerifyDocument) -> None:
    deleted = document["deleted"]
    for problem in document["problems"]:
        where = printable(problem["object"] or "checkpoint")
        if problem["start"] is not None and problem["stop"] is not None:
            where += f" bytes {problem['start']}–{problem['stop']}"
        print_line((where, "bold red"))
        print_line("  ", printable(problem["message"]))
        if problem["arrays"]:
            shown = ", ".join(map(printable, problem["arrays"][:8]))
            more = len(problem["arrays"]) - 8
            print_line("  ", ("arrays ", "dim"), shown, f" and {more:,} more" if more > 0 else "")
    if deleted:
        others = f" and {len(deleted) - 8:,} more" if len(deleted) > 8 else ""
        print_line(
            ("not there ", "yellow"),
            ", ".join(map(printable, deleted[:8])),
            others,
            ": deleted since the save, or lost",
        )
    checked = f"{count(document['objects'], 'object')}, {size(document['nbytes'])} checked"
    if not document["ok"]:
        print_line((count(len(document["problems"]), "problem"), "bold red"), f": {checked}")
        return
    if not document["objects"]:
        print_line(
            ("readable", "bold green"),
            f": {size(document['nbytes'])} of arrays. Other software wrote this and recorded no checksums for ckptcore: what its "
            "format does not check itself is not verified",
        )
        return
    print_line(("sound", "bold green"), f": {checked}")
    if document["unverified"]:
        unverified = ", ".join(map(printable, document["unverified"][:8]))
        print_line(("no checksums are kept of ", "yellow"), unverified, ": read, and not verified")
