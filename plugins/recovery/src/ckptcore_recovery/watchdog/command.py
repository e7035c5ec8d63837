"""``ckptcore goodput``: how a run spent its time, over all its restarts. ``ckptcore stalls``: what stalled in it."""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter
from collections.abc import Mapping
from typing import Any

import click
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import Column, print_document, print_line, print_table, printable
from ckptcore_tools.locations import names_in

from ckptcore.errors import CheckpointNotFoundError
from ckptcore_recovery.watchdog.goodput import Goodput, IncarnationTime, goodput_of, seconds
from ckptcore_recovery.watchdog.goodput_text import (
    began_text,
    format_duration,
    format_share,
    part_rows,
    remarks,
    summary,
)
from ckptcore_recovery.watchdog.reports import StallReport, read_incidents
from ckptcore_recovery.watchdog.run_log import Note, read_run_log
from ckptcore_recovery.watchdog.save_interval import save_interval_of
from ckptcore_recovery.watchdog.time_account import SECOND

_PARTS = (Column("part"), Column("time", "right"), Column("share", "right"), Column(""))
_INCARNATIONS = (
    Column("incarnation", "right"),
    Column("began (UTC)"),
    Column("state"),
    Column("processes", "right"),
    Column("time", "right"),
    Column("productive", "right"),
    Column("steps", "right"),
    Column("last step", "right"),
    Column("saves", "right"),
)
_STYLES = {"finished": "green", "failed": "red", "running": "yellow"}


_STALLS = (
    Column("rank", "right"),
    Column("host"),
    Column("since (UTC)"),
    Column("phase"),
    Column("waits"),
    Column("process"),
    Column("idle"),
    Column("in"),
)


@checkpoint_command("goodput", "Show how a run spent its time.")
@click.argument("directory", default=".")
def command(as_json: bool, directory: str) -> ExitCode:
    """Show how the run in DIRECTORY spent its time, over all its restarts, and the save interval that loses least.

    DIRECTORY is a path or URL. A job writes the log that this command reads if it has a Watchdog or a RunLog.
    """
    context = command_context()
    names_in(directory, context)  # raises an error if it does not exist
    goodput = goodput_of(read_run_log(directory, context))
    if not goodput.incarnations:
        raise CheckpointNotFoundError(
            f"{directory} has no log of how its jobs spent their time: give the job a Watchdog or a RunLog of "
            "ckptcore_recovery.watchdog"
        )
    if as_json:
        print_document("goodput", **_document(directory, goodput))
    else:
        _print(goodput)
    return ExitCode.OK


def _print(goodput: Goodput) -> None:
    print_line(summary(goodput))
    print_line()
    print_table(_PARTS, part_rows(goodput))
    print_line()
    print_table(_INCARNATIONS, [_row(incarnation) for incarnation in goodput.incarnations])
    print_line()
    for line in remarks(goodput):
        print_line(line)
    notes = Counter(note.kind for one in goodput.incarnations for note in one.notes if _is_trouble(note))
    if notes:
        counts = ", ".join([f"{kind} {count}" for kind, count in sorted(notes.items())])
        print_line(f"Failed operations and stalls: {printable(counts)}. --json has them.")


def _is_trouble(note: Note) -> bool:
    return note.kind != "load" or note.text is not None


def _row(incarnation: IncarnationTime) -> tuple[str | tuple[str, str], ...]:
    time = sum(incarnation.parts.values())
    return (
        str(incarnation.number),
        began_text(incarnation),
        (incarnation.state, _STYLES[incarnation.state]),
        str(incarnation.processes),
        format_duration(seconds(time)),
        format_share(incarnation.parts["productive"] / time if time else 0.0),
        str(incarnation.steps),
        "" if incarnation.last_step is None else str(incarnation.last_step),
        str(incarnation.saves),
    )


def _document(directory: str, goodput: Goodput) -> Mapping[str, object]:
    interval = save_interval_of(goodput)
    return {
        "directory": directory,
        "goodput": goodput.share,
        "seconds": seconds(goodput.total),
        "parts": _seconds(goodput.parts),
        "groups": _seconds(goodput.groups),
        "failures": goodput.failures,
        "steps": goodput.steps,
        "saves": goodput.saves,
        "save_interval": None if interval is None else dataclasses.asdict(interval),
        "overlaps": goodput.overlaps,
        "incarnations": [
            {
                "number": incarnation.number,
                "began": _iso(incarnation.began),
                "state": incarnation.state,
                "processes": incarnation.processes,
                "steps": incarnation.steps,
                "last_step": incarnation.last_step,
                "saves": incarnation.saves,
                "parts": _seconds(incarnation.parts),
                "notes": [
                    {
                        "kind": note.kind,
                        "at": _iso(incarnation.began + note.at),
                        "step": note.step,
                        "seconds": None if note.took is None else seconds(note.took),
                        "text": note.text,
                    }
                    for note in incarnation.notes
                ],
            }
            for incarnation in goodput.incarnations
        ],
    }


def _seconds(times: Mapping[Any, int]) -> dict[str, float]:
    return {name: seconds(time) for name, time in times.items()}


def _iso(microseconds: int) -> str:
    epoch = datetime.datetime.fromtimestamp(0, datetime.UTC)
    return (epoch + datetime.timedelta(seconds=microseconds // SECOND)).isoformat()


@checkpoint_command("stalls", "Show what stalled in a run, and in which rank.")
@click.argument("directory", default=".")
def stalls_command(as_json: bool, directory: str) -> ExitCode:
    """Show the steps and operations of the run in DIRECTORY that took too long, and the ranks that held them up.

    DIRECTORY is a path or URL. The Watchdog of each process reports what stalls in it.
    """
    context = command_context()
    names_in(directory, context)  # raises an error if it does not exist
    incidents = read_incidents(directory, context)
    if as_json:
        print_document(
            "stalls",
            directory=directory,
            incidents=[
                {"suspects": incident.suspects, "reports": [dataclasses.asdict(report) for report in incident.reports]}
                for incident in incidents
            ],
        )
        return ExitCode.OK
    if not incidents:
        print_line("No stall was reported.")
    for number, incident in enumerate(incidents):
        if number:
            print_line()
        stall = incident.reports[0].stall
        suspects = ", ".join(map(str, incident.suspects))
        print_line(
            f"{printable(stall.what)} {'' if stall.step is None else stall.step}".rstrip()
            + (f": held up by rank {suspects}" if suspects else ": all ranks that reported wait for others")
        )
        print_table(_STALLS, [_stall_row(report) for report in incident.reports])
    return ExitCode.OK


def _stall_row(report: StallReport) -> tuple[str, ...]:
    return (
        str(report.rank),
        printable(report.host),
        f"{datetime.datetime.fromtimestamp(report.stall.began, datetime.UTC):%Y-%m-%d %H:%M:%S}",
        printable(report.stall.phase),
        "yes" if report.is_wait else "no",
        report.state,
        ", ".join(report.utilisation.idle),
        printable(report.frame),
    )
