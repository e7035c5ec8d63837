"""``ckptcore steps``: the steps of a run, and who works on them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

import ckptcore
from ckptcore.commit.looking import look_at_owner
from ckptcore.errors import StorageError
from ckptcore.model.sizes import age, count, metrics_text, size
from ckptcore.protocols import StorageBackend
from ckptcore_tools.cli.command import checkpoint_command
from ckptcore_tools.cli.console import json_number, print_document, print_line, printable
from ckptcore_tools.cli.documents import OwnerDocument, StepDocument, StepsDocument
from ckptcore_tools.cli.exits import ExitCode
from ckptcore_tools.cli.locating import child_location
from ckptcore_tools.cli.options import command_context
from ckptcore_tools.cli.progress import byte_progress
from ckptcore_tools.cli.survey import Found, find_pinned, find_steps, look_at_steps, step_names
from ckptcore_tools.cli.table import Cell, Column, print_table
from ckptcore_tools.cli.verify import problem_documents

__all__ = ["command"]

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
  foreign      a checkpoint of other software, which an installed layout reads
  uncommitted  a save that is under way, or died
  corrupt      a checkpoint that is damaged
  unreadable   a checkpoint that cannot be read here, such as one of a newer version
  other        nothing that can be loaded; saves, loads and policies pass it over
"""


@checkpoint_command("steps", epilog=_STATES)
@click.argument("directory", default=".")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the newest N; the others are not read.")
@click.option(
    "--verify", is_flag=True, help="Read every byte of each step and check it; the exit code is 1 if one fails."
)
@click.option("--named", metavar="EXAMPLE", help="How steps are named, if in no usual way: epoch-0010.")
def command(as_json: bool, directory: str, last: int | None, verify: bool, named: str | None) -> ExitCode:
    """List the steps in DIRECTORY: state, size, age and metrics of each; who owns it, and what dead saves left.

    DIRECTORY is a path or URL. No checkpoint in it is changed, and a job may go on saving there. The size is that of all files
    of a step but its root.
    """
    context = command_context()
    steps = find_steps(directory, step_names(named), context)
    candidates = steps.candidates()
    chosen = candidates if last is None else candidates[-last:]
    pinned = find_pinned(steps.store, directory)
    documents = [
        _document(found, None if pinned is None else found.name in pinned)
        for found in look_at_steps(steps, chosen, context)
    ]
    if verify:
        for number, one in enumerate(documents):
            _verify(directory, one, f"step {one['step']} ({number + 1} of {len(documents)})")
    document: StepsDocument = {
        "schema": "ckptcore.training/1",
        "directory": directory,
        "owner": _owner(steps.store),
        "steps": documents,
        "older": len(candidates) - len(chosen),
        "leftovers": list(steps.leftovers),
    }
    if as_json:
        print_document(document)
    else:
        _print(document)
    return ExitCode.FOUND if any(one.get("sound") is False for one in documents) else ExitCode.OK


def _document(found: Found, pinned: bool | None) -> StepDocument:
    return {
        "step": found.step,
        "name": found.name,
        "state": found.state,
        "created": found.created,
        "nbytes": found.nbytes,
        "metrics": {name: json_number(value) for name, value in found.metrics.items()},
        "pinned": pinned,
        "error": found.error,
    }


def _verify(directory: str, document: StepDocument, title: str) -> None:
    """Add what verifying a step finds; an uncommitted one, and what is no checkpoint, has nothing to verify."""
    if document["state"] in ("uncommitted", "other"):
        return
    try:
        with byte_progress(title) as progress:
            report = ckptcore.verify(
                child_location(directory, document["name"]), progress=progress, context=command_context()
            )
    except ckptcore.CheckpointError as error:
        document["sound"] = False
        document["error"] = document["error"] or str(error)
        return
    document["sound"] = report.ok
    document["unverified"] = list(report.unverified)
    document["problems"] = problem_documents(report)
    if report.problems and document["error"] is None:
        document["error"] = document["problems"][0]["message"]


def _owner(store: StorageBackend) -> OwnerDocument | None:
    try:
        owner = look_at_owner(store)
    except StorageError as error:
        return {"alive": None, "host": None, "pid": None, "since": None, "description": f"not known: {error}"}
    if owner is None:
        return None
    holder = owner.holder
    return {
        "alive": owner.is_alive,
        "host": holder.host if holder else None,
        "pid": holder.pid if holder else None,
        "since": holder.since if holder else None,
        "description": owner.describe(),
    }


def _print(document: StepsDocument) -> None:
    steps = document["steps"]
    if steps:
        now = time.time()
        print_table(_COLUMNS, [_row(step, now) for step in steps])
        print_line()
    print_line(_summary(document))
    owner = document["owner"]
    print_line((f"{'owner':<9} ", "dim"), "nobody" if owner is None else printable(owner["description"]))
    for name in document["leftovers"]:
        print_line((f"{'leftover':<9} ", "dim"), printable(name), (", of a save that is under way or died", "dim"))


def _row(step: StepDocument, now: float) -> Sequence[Cell]:
    notes = ["pinned"] if step["pinned"] else []
    if step["error"] is not None:
        notes.append(printable(" ".join(step["error"].split())))
    checked: Cell = ""
    if "sound" in step:
        checked = ("damaged", "bold red")
        if step["sound"]:
            checked = ("read", "yellow") if step.get("unverified") else ("sound", "green")
    return (
        str(step["step"]),
        printable(step["name"]),
        (step["state"], _STYLES.get(step["state"], "bold red")),
        "" if step["nbytes"] is None else size(step["nbytes"]),
        "" if step["created"] is None else printable(age(step["created"], now)),
        checked,
        printable(metrics_text(step["metrics"])),
        ("; ".join(notes), "" if step["error"] is None else "red"),
    )


def _summary(document: StepsDocument) -> str:
    steps = document["steps"]
    if not steps:
        return f"no steps in {printable(document['directory'])}"
    total = size(sum(step["nbytes"] or 0 for step in steps))
    text = f"{count(len(steps), 'step')}, {total}"
    if document["older"]:
        text += f"; {count(document['older'], 'older one')} not shown"
    return text
