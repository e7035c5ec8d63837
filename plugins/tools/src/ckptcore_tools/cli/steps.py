"""``ckptcore steps``: lists the steps of a run, and the job that owns the directory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import click

import ckptcore
from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import JSON
from ckptcore.step_names import StepNames
from ckptcore_tools.cli.command import NAMED_HELP, ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import (
    UNSET,
    Cell,
    Column,
    Unset,
    byte_progress,
    print_document,
    print_line,
    print_table,
    printable,
    to_json,
)
from ckptcore_tools.cli.verify import problem_documents
from ckptcore_tools.formatting import format_age, format_count, format_metrics, format_size
from ckptcore_tools.locations import child_location
from ckptcore_tools.run_steps import (
    RunOwner,
    StepStatus,
    expect_steps,
    find_near,
    find_owner,
    find_pinned,
    find_steps,
    read_steps,
)


class StepCheck(NamedTuple):
    """The result of verifying a step.

    Attributes:
        sound: True if every byte matches its checksum, False if the step is damaged. None if unknown: some bytes have
            no checksums, or this process cannot read the step. In the second case there is an `error`.
        unverified: the objects without checksums; UNSET if the step could not be read.
        problems: the problems as JSON; UNSET if the step could not be read.
        error: the first problem; None if there is none.
    """

    sound: bool | None
    unverified: Sequence[str] | Unset = UNSET
    problems: Sequence[JSON] | Unset = UNSET
    error: str | None = None


def step_names(example: str | None) -> StepNames:
    """Return the usual naming of steps, or the naming of an example.

    Raises:
        click.BadParameter: if the example cannot be the name of a step.
    """
    if example is None:
        return StepNames()
    try:
        return StepNames.of(example)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--named") from error


_STYLES = {"committed": "green", "foreign": "cyan", "uncommitted": "yellow", "other": "dim"}
_COLUMNS = (
    Column("step", "right"),
    Column("name"),
    Column("state"),
    Column("size", "right"),
    Column("age", "right"),
    Column("bytes"),
    Column("metrics"),
    Column("notes"),
)
_STATES = """\
\b
States:
  committed    a checkpoint of ckptcore
  foreign      a checkpoint of other software that an installed layout can read
  incomplete   a checkpoint with a file that is missing or has another size
  uncommitted  a save that is running, or failed
  corrupt      a damaged checkpoint
  unreadable   a checkpoint that cannot be read here, such as one of a newer version, or in an archive
  other        not a checkpoint; saves, loads and policies ignore it
"""


@checkpoint_command("steps", "List the steps of a run.", epilog=_STATES)
@click.argument("directory", default=".")
@click.option(
    "--last", type=click.IntRange(min=1), metavar="N", help="Show only the newest N steps, and read no others."
)
@click.option("--verify", is_flag=True, help="Verify every byte. Exit with 1 if a step is damaged or cannot be read.")
@click.option("--named", metavar="EXAMPLE", help=NAMED_HELP)
def command(as_json: bool, directory: str, last: int | None, verify: bool, named: str | None) -> ExitCode:
    """List the steps in DIRECTORY with state, size, age and metrics, the owner, and leftovers of failed saves.

    DIRECTORY is a path or URL. Nothing is changed, and a job can save there at the same time. The size counts all files
    of a step except its root. If no step can be read, the exit status is 6.
    """
    context = command_context()
    steps = find_steps(directory, step_names(named), context)
    expect_steps(steps, directory, context)
    candidates = steps.candidates()
    chosen = candidates if last is None else candidates[-last:]
    pinned = find_pinned(steps)
    statuses = [
        replace(status, pinned=None if pinned is None else status.name in pinned)
        for status in read_steps(steps, chosen, context)
    ]
    checks: Mapping[int, StepCheck] = {}
    if verify:
        checks = {
            status.step: _check(directory, status, f"step {status.step} ({number} of {len(statuses)})")
            for number, status in enumerate(statuses, 1)
            if status.state not in ("uncommitted", "other")
        }
        statuses = [
            replace(status, error=status.error or checks[status.step].error) if status.step in checks else status
            for status in statuses
        ]
    owner, near, older = find_owner(steps), find_near(steps), len(candidates) - len(chosen)
    if as_json:
        print_document(
            "steps",
            directory=directory,
            owner=owner,
            near=near,
            steps=[_document(status, checks.get(status.step)) for status in statuses],
            older=older,
            leftovers=list(steps.leftovers),
        )
    else:
        _print(statuses, checks, owner, near, older, steps.leftovers, directory)
    if statuses and all(status.state == "unreadable" for status in statuses):
        return ExitCode.FAILED
    return ExitCode.OK if all(check.error is None for check in checks.values()) else ExitCode.FOUND


def _check(directory: str, status: StepStatus, title: str) -> StepCheck:
    """Verify a step."""
    try:
        with byte_progress(title) as progress:
            report = ckptcore.verify(
                child_location(directory, status.name), progress=progress, context=command_context()
            )
    except CorruptCheckpointError as error:
        return StepCheck(False, error=str(error))
    except ckptcore.CheckpointError as error:
        return StepCheck(None, error=str(error))
    problems: Any = problem_documents(report.problems)
    sound = {"sound": True, "damaged": False}.get(report.state)
    return StepCheck(sound, report.unverified, problems, problems[0]["message"] if problems else None)


def _document(status: StepStatus, check: StepCheck | None) -> Mapping[str, object]:
    # Leave out the save order, which only serves to compare copies of a step.
    document = {**to_json(status), "order": UNSET, "problems": problem_documents(status.problems) or UNSET}
    return document if check is None else {**document, **to_json(check), "error": status.error}


def _print(
    steps: Sequence[StepStatus],
    checks: Mapping[int, StepCheck],
    owner: RunOwner | None,
    near: str | None,
    older: int,
    leftovers: Sequence[str],
    directory: str,
) -> None:
    if steps:
        now = time.time()
        print_table(_COLUMNS, [_row(step, checks.get(step.step), now) for step in steps])
        print_line()
    print_line(_summary(steps, older, directory))
    print_line((f"{'owner':<9} ", "dim"), "none" if owner is None else printable(owner.description))
    if near is not None:
        print_line((f"{'near':<9} ", "dim"), printable(near), (", which may have newer steps; list it there", "dim"))
    for name in leftovers:
        print_line((f"{'leftover':<9} ", "dim"), printable(name), (", of a save that is running or failed", "dim"))


def _row(step: StepStatus, check: StepCheck | None, now: float) -> Sequence[Cell]:
    notes = ["pinned"] if step.pinned else []
    if step.error is not None:
        notes.append(printable(" ".join(step.error.split())))
    checked: Cell = ""
    if check is not None and check.sound is not None:
        checked = ("sound", "green") if check.sound else ("damaged", "bold red")
    elif check is not None:
        checked = ("complete" if check.error is None else "unknown", "yellow")
    return (
        str(step.step),
        printable(step.name),
        (step.state, _STYLES.get(step.state, "bold red")),
        "" if step.nbytes is None else format_size(step.nbytes),
        "" if step.created is None else printable(format_age(step.created, now)),
        checked,
        printable(format_metrics(step.metrics)),
        ("; ".join(notes), "" if step.error is None else "red"),
    )


def _summary(steps: Sequence[StepStatus], older: int, directory: str) -> str:
    if not steps:
        return f"no steps in {printable(directory)}"
    text = f"{format_count(len(steps), 'step')}, {format_size(sum(step.nbytes or 0 for step in steps))}"
    return f"{text}; {format_count(older, 'older step')} not shown" if older else text
