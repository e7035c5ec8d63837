"""``ckptcore gc``: deletes old steps of a run by a policy."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import click

from ckptcore.commit.delete import find_bases, referring_to
from ckptcore.commit.location import commit_method
from ckptcore.commit.locks import IfInUse
from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.policies import PreservationPolicy, explain, what_to_delete
from ckptcore.runtime import runtime_of
from ckptcore.training.garbage import StepDeleter, policy_infos, readable_steps
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.amounts import age, count, metrics_text, size
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import Cell, Column, print_document, print_line, print_table, printable
from ckptcore_tools.cli.steps import Found, StepState, find_pinned, find_steps, look_at_steps, step_names
from ckptcore_tools.policy_text import parse_preservation

__all__ = ["Fate", "Plan", "command", "plan_collection"]

_LEFT_ALONE: Mapping[StepState, str] = {
    "committed": "saved at this moment",
    "foreign": "left alone: written by other software",
    "uncommitted": "left alone: no save that committed",
    "corrupt": "left alone: damaged",
    "unreadable": "left alone: cannot be read here",
    "other": "left alone: no checkpoint",
}


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a step.

    Attributes:
        found: the step; its size is known only if it goes.
        goes: whether it is deleted.
        reasons: why.
    """

    found: Found
    goes: bool
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a directory of steps.

    Attributes:
        fates: of each step, ascending.
        leftovers: what dead saves and deletions left. What is of a living save stays, which shows when it is deleted.
        broken: steps that no policy counts.
    """

    fates: Sequence[Fate]
    leftovers: Sequence[str]
    broken: frozenset[int] = field(default=frozenset())

    @property
    def doomed(self) -> frozenset[int]:
        """The steps that are deleted."""
        return frozenset([fate.found.step for fate in self.fates if fate.goes])


def plan_collection(steps: StepDirectory, policy: PreservationPolicy, now: float, context: Context) -> Plan:
    """Decide about every step; changes nothing.

    Args:
        steps: the directory, as it was just listed.
        policy: which steps to keep.
        now: seconds since the epoch, UTC.
        context: options.

    Raises:
        StorageError
    """
    broken = _claims(steps)
    infos = {info.step: info for info in policy_infos(steps, broken)}
    doomed = set(what_to_delete(policy, list(infos.values()), now))
    pinned = find_pinned(steps.store, steps.display) or frozenset()
    referring = _referring(steps, doomed, context)
    reasons = explain(policy, list(infos.values()), now)
    read = [step for step in steps.candidates() if step in doomed or step not in infos]
    looked_at = {found.step: found for found in look_at_steps(steps, read, context)}
    fates: list[Fate] = []
    leftovers = list(steps.leftovers)
    for step in steps.candidates():
        found = looked_at.get(step) or Found(step, steps.name(step), "committed")
        if step not in infos:
            # Where directories are renamed to commit them, a claim was put there by hand.
            if found.state == "uncommitted" and commit_method(steps.store).claims_by_root:
                leftovers.append(found.name)
            else:
                fates.append(Fate(found, goes=False, reasons=(_LEFT_ALONE[found.state],)))
            continue
        summary = steps.summary(step)
        created = summary.created if summary is not None else None
        found = Found(step, found.name, "committed", created, found.nbytes, infos[step].metrics)
        if step in doomed and found.name in pinned:
            fates.append(Fate(found, goes=False, reasons=("pinned by a reader",)))
        elif step in referring:
            fates.append(Fate(found, goes=False, reasons=(f"has arrays of {', '.join(referring[step])}",)))
        elif step in doomed:
            fates.append(Fate(found, goes=True, reasons=()))
        else:
            fates.append(Fate(found, goes=False, reasons=reasons[step]))
    return Plan(fates, leftovers, broken)


def _referring(steps: StepDirectory, doomed: Collection[int], context: Context) -> Mapping[int, Sequence[str]]:
    """By step that a policy gives up, the names of what stays and has arrays in it."""
    if not doomed:
        return {}
    bases = find_bases(steps.store, runtime_of(context).io_threads)
    saves = {step: summary.save_id for step in doomed if (summary := steps.summary(step)) is not None}
    going = dict(saves)
    while True:
        names = {steps.name(step) for step in going}
        staying = {name: of for name, of in bases.items() if name not in names}
        kept = [step for step, save_id in going.items() if referring_to(steps.name(step), save_id, staying)]
        if not kept:
            break
        for step in kept:
            del going[step]
    return {step: referring_to(steps.name(step), saves[step], staying) for step in saves if step not in going}


def _claims(steps: StepDirectory) -> frozenset[int]:
    """Steps whose root is a claim, though the storage says that they are committed: they were copied from another storage."""
    claims = set()
    committed = readable_steps(steps)
    steps.look_ahead(committed)
    for step in committed:
        try:
            summary = steps.summary(step)
        except CheckpointError:
            continue  # of these `policy_infos` says the same
        if summary is not None and not summary.committed:
            claims.add(step)
    return frozenset(claims)


_COLUMNS = (
    Column("step", "right"),
    Column("name"),
    Column("age", "right"),
    Column("size", "right"),
    Column("metrics"),
    Column("action"),
    Column("why"),
)
_POLICIES = """\
\b
Policies; several stand between commas, and a step is kept if any of them keeps it:
  latest_n=3                    the newest 3
  latest_duration=12h           those that are no older than 12 hours
  every_n_steps=1000            multiples of 1000
  every_n_steps_closest=1000    the nearest to each multiple
  every_n_seconds=1h            one an hour
  custom_steps=100:200          these
  best_n=2:loss:min             the 2 with the least loss, and those without one
  preserve_all                  all; only what dead saves left is deleted
"""


@checkpoint_command("gc", epilog=_POLICIES)
@click.argument("directory")
@click.option("--policy", "policy_text", required=True, metavar="POLICY", help="Which steps to keep; see below.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted and why the rest stays; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before deleting.")
@click.option(
    "--take-over", is_flag=True, help="If a job seems to own DIRECTORY, wait for a sign of life; go on if none comes."
)
@click.option("--named", metavar="EXAMPLE", help="How steps are named, if in no usual way: epoch-0010.")
def command(
    as_json: bool, directory: str, policy_text: str, dry_run: bool, yes: bool, take_over: bool, named: str | None
) -> ExitCode:
    """Delete the steps in DIRECTORY that a policy does not keep, and what dead saves left.

    The newest step always stays, and so does one that a reader has pinned, that other software wrote or that cannot be
    read. Who deletes must own the directory: while a job saves there, only --dry-run works.
    """
    policy = _policy(policy_text)
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise click.UsageError(
            "nobody can be asked here; pass --yes to delete, or --dry-run to see what would be deleted"
        )
    context = command_context()
    steps = find_steps(directory, step_names(named), context)
    if_in_use: IfInUse = "take over" if take_over else "error"
    deleted: Sequence[int] = ()
    if dry_run:
        plan = plan_collection(steps, policy, time.time(), context)
    elif yes:
        plan, deleted = _collect(steps, policy, None, if_in_use, context)
    else:
        plan = plan_collection(steps, policy, time.time(), context)
        _print_plan(plan)
        if not plan.doomed and not plan.leftovers:
            print_line(_summary(plan, "nothing to delete"))
            return ExitCode.OK
        if not take_over and commit_method(steps.store).locks().owner() is not None:
            commit_method(steps.open_to_write()).locks(
                directory
            ).own().close()  # fails if it is in use, before the question
        print_line(_summary(plan, "to delete"))
        if not _is_confirmed():
            print_line("nothing was deleted")
            return ExitCode.INTERRUPTED
        _, deleted = _collect(steps, policy, plan.doomed, if_in_use, context)
    if as_json:
        print_document(
            "gc",
            directory=directory,
            policy=policy_text,
            dry_run=dry_run,
            steps=[_document(fate) for fate in plan.fates],
            leftovers=list(plan.leftovers),
            deleted=list(deleted),
        )
        return ExitCode.OK
    if dry_run or yes:
        _print_plan(plan)
    print_line(_summary(plan, "would delete") if dry_run else _result(plan, deleted))
    return ExitCode.OK


def _policy(text: str) -> PreservationPolicy:
    try:
        return parse_preservation(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--policy") from error


def _collect(
    steps: StepDirectory,
    policy: PreservationPolicy,
    agreed: Collection[int] | None,
    if_in_use: IfInUse,
    context: Context,
) -> tuple[Plan, Sequence[int]]:
    """Own the directory, look again, and delete; of the steps only those that were agreed upon, unless None was asked.

    Raises:
        DirectoryInUseError: if another job owns it.
        StorageError, SaveLostError: some may be deleted.
    """
    store = steps.open_to_write()
    with commit_method(store).locks(steps.display).own(if_in_use) as owned:
        since = steps.changes()
        steps.replace(steps.list_names(), since)
        plan = plan_collection(steps, policy, time.time(), context)
        doomed = plan.doomed if agreed is None else plan.doomed & frozenset(agreed)
        keep = frozenset(steps.candidates()) - doomed
        deleter = StepDeleter(steps, store, owned, context)
        deleter.clean()
        return plan, deleter.collect(policy, keep=lambda: keep, broken=plan.broken)


def _is_confirmed() -> bool:
    try:
        return click.confirm("Delete?", err=True)
    except click.Abort:  # Ctrl-C, or the end of what can be typed
        raise KeyboardInterrupt from None


def _document(fate: Fate) -> Mapping[str, object]:
    found = fate.found
    return {
        "step": found.step,
        "name": found.name,
        "action": "delete" if fate.goes else "keep",
        "reasons": list(fate.reasons),
        "created": found.created,
        "metrics": found.metrics,
        "nbytes": found.nbytes if fate.goes else None,
    }


def _print_plan(plan: Plan) -> None:
    now = time.time()
    if plan.fates:
        print_table(_COLUMNS, [_row(fate, now) for fate in plan.fates])
        print_line()
    for name in plan.leftovers:
        print_line((f"{'leftover':<9} ", "dim"), printable(name), (", deleted unless its save is alive", "dim"))


def _row(fate: Fate, now: float) -> Sequence[Cell]:
    found = fate.found
    return (
        str(found.step),
        printable(found.name),
        "" if found.created is None else printable(age(found.created, now)),
        "" if found.nbytes is None or not fate.goes else size(found.nbytes),
        printable(metrics_text(found.metrics)),
        ("delete", "bold red") if fate.goes else ("keep", "green"),
        printable("; ".join(fate.reasons)),
    )


def _summary(plan: Plan, verb: str) -> str:
    """What is to happen, in a line."""
    if not plan.doomed and not plan.leftovers:
        return f"nothing to delete: {count(len(plan.fates), 'step')} kept"
    nbytes = sum(fate.found.nbytes or 0 for fate in plan.fates if fate.goes)
    text = f"{verb}: {len(plan.doomed):,} of {count(len(plan.fates), 'step')}, {size(nbytes)}"
    return text + (f"; {count(len(plan.leftovers), 'leftover')}" if plan.leftovers else "")


def _result(plan: Plan, deleted: Collection[int]) -> str:
    """What happened, in a line."""
    gone = [fate.found for fate in plan.fates if fate.found.step in deleted]
    text = (
        f"deleted: {len(deleted):,} of {count(len(plan.fates), 'step')}, {size(sum(one.nbytes or 0 for one in gone))}"
    )
    stayed = sorted(plan.doomed - frozenset(deleted))
    if stayed:
        text += f"; {', '.join(map(str, stayed))} stayed: pinned by now, or kept by what was saved meanwhile"
    return text
