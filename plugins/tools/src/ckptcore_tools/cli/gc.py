"""``ckptcore gc``: deletes old steps of a run by a policy."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence

import click

from ckptcore.commit.locks import IfInUse
from ckptcore.context import Context
from ckptcore.policies import PreservationPolicy
from ckptcore.training.deletion import StepDeleter
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.cli.command import NAMED_HELP, TAKE_OVER_HELP, ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import Cell, Column, print_document, print_line, print_table, printable
from ckptcore_tools.cli.steps import step_names
from ckptcore_tools.formatting import format_age, format_count, format_metrics, format_size
from ckptcore_tools.policy_text import parse_preservation
from ckptcore_tools.retention import DeletionPlan, StepDecision, plan_deletions
from ckptcore_tools.run_steps import expect_steps, find_steps

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
Policies (separate several with commas; a step is kept if any of them keeps it):
  latest_n=3                    the newest 3 steps
  latest_duration=12h           steps of the last 12 hours
  every_n_steps=1000            multiples of 1000
  every_n_steps_closest=1000    the step nearest to each multiple of 1000
  every_n_seconds=1h            one step per hour
  custom_steps=100:200          steps 100 and 200
  best_n=2:loss:min             the 2 steps with the smallest loss, and steps without this metric
  preserve_all                  all steps; deletes only leftovers of failed saves
"""


@checkpoint_command("gc", "Delete old steps of a run, and leftovers of failed saves.", epilog=_POLICIES)
@click.argument("directory")
@click.option("--policy", "policy_text", required=True, metavar="POLICY", help="The steps to keep; see below.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and why the rest is kept. Delete nothing.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@click.option("--other-files", is_flag=True, help="Delete also steps with files that no save wrote.")
@click.option("--take-over", is_flag=True, help=TAKE_OVER_HELP)
@click.option("--named", metavar="EXAMPLE", help=NAMED_HELP)
def command(
    as_json: bool,
    directory: str,
    policy_text: str,
    dry_run: bool,
    yes: bool,
    other_files: bool,
    take_over: bool,
    named: str | None,
) -> ExitCode:
    """Delete the steps in DIRECTORY that a policy does not keep, and leftovers of failed saves.

    The newest step is always kept. Also kept are steps that a reader has pinned, steps of other software, steps that
    cannot be read, steps with a missing or changed file, and steps with files that no save wrote. Policies count only
    the steps that can be loaded. While a job saves to the directory, only --dry-run works.
    """
    policy = _parse_policy(policy_text)
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise click.UsageError(
            "cannot ask for confirmation: no terminal. Pass --yes to delete, or --dry-run to see what would be deleted"
        )
    context = command_context()
    steps = find_steps(directory, step_names(named), context)
    expect_steps(steps, directory, context)
    if_in_use: IfInUse = "take over" if take_over else "error"
    deleted: Sequence[int] = ()
    if dry_run:
        plan = plan_deletions(steps, policy, time.time(), context, other_files=other_files)
    elif yes:
        plan, deleted = _delete_steps(steps, policy, None, if_in_use, context, other_files=other_files)
    else:
        plan = plan_deletions(steps, policy, time.time(), context, other_files=other_files)
        _print_plan(plan)
        if not plan.steps_to_delete and not plan.leftovers:
            print_line(_summary(plan, "nothing to delete"))
            return ExitCode.OK
        if not take_over and steps.commit_method().locks().owner() is not None:
            # If the directory is in use, fail before asking for confirmation.
            steps.commit_method(steps.open_to_write()).locks(directory).own().close()
        print_line(_summary(plan, "to delete"))
        if not _is_confirmed():
            print_line("nothing was deleted")
            return ExitCode.INTERRUPTED
        _, deleted = _delete_steps(steps, policy, plan.steps_to_delete, if_in_use, context, other_files=other_files)
    if as_json:
        print_document(
            "gc",
            directory=directory,
            policy=policy_text,
            dry_run=dry_run,
            steps=[_document(decision) for decision in plan.decisions],
            leftovers=list(plan.leftovers),
            deleted=list(deleted),
        )
        return ExitCode.OK
    if dry_run or yes:
        _print_plan(plan)
    print_line(_summary(plan, "would delete") if dry_run else _result(plan, deleted))
    return ExitCode.OK


def _parse_policy(text: str) -> PreservationPolicy:
    try:
        return parse_preservation(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--policy") from error


def _delete_steps(
    steps: StepDirectory,
    policy: PreservationPolicy,
    confirmed: Collection[int] | None,
    if_in_use: IfInUse,
    context: Context,
    *,
    other_files: bool,
) -> tuple[DeletionPlan, Sequence[int]]:
    """Lock the directory, plan again, and delete. Return the new plan and the steps that were deleted.

    Args:
        steps: the directory.
        policy: the policy that decides which steps to keep.
        confirmed: delete only these steps. None: delete all steps that the policy does not keep.
        if_in_use: whether to take over the lock.
        context: options.
        other_files: True to delete steps with files that no save wrote, too.

    Raises:
        DirectoryInUseError: if another job owns the directory.
        StorageError, SaveLostError: if a deletion fails. Some steps may be deleted.
    """
    store = steps.open_to_write()
    with steps.commit_method(store).locks(steps.display).own(if_in_use) as owned:
        since = steps.changes()
        steps.replace(steps.list_names(), since)
        plan = plan_deletions(steps, policy, time.time(), context, other_files=other_files)
        chosen = plan.steps_to_delete if confirmed is None else plan.steps_to_delete & frozenset(confirmed)
        keep = frozenset(steps.candidates()) - chosen
        deleter = StepDeleter(steps, store, owned, context, other_files=other_files)
        deleter.clean()
        return plan, deleter.collect(policy, keep=lambda: keep, broken=plan.broken)


def _is_confirmed() -> bool:
    try:
        return click.confirm("Delete?", err=True)
    except click.Abort:  # Ctrl-C, or end of input
        raise KeyboardInterrupt from None


def _document(decision: StepDecision) -> Mapping[str, object]:
    status = decision.status
    return {
        "step": status.step,
        "name": status.name,
        "action": "delete" if decision.delete else "keep",
        "reasons": list(decision.reasons),
        "created": status.created,
        "metrics": status.metrics,
        "nbytes": status.nbytes if decision.delete else None,
    }


def _print_plan(plan: DeletionPlan) -> None:
    now = time.time()
    if plan.decisions:
        print_table(_COLUMNS, [_row(decision, now) for decision in plan.decisions])
        print_line()
    for name in plan.leftovers:
        print_line((f"{'leftover':<9} ", "dim"), printable(name), (", deleted unless its save is still running", "dim"))


def _row(decision: StepDecision, now: float) -> Sequence[Cell]:
    status = decision.status
    return (
        str(status.step),
        printable(status.name),
        "" if status.created is None else printable(format_age(status.created, now)),
        "" if status.nbytes is None or not decision.delete else format_size(status.nbytes),
        printable(format_metrics(status.metrics)),
        ("delete", "bold red") if decision.delete else ("keep", "green"),
        printable("; ".join(decision.reasons)),
    )


def _summary(plan: DeletionPlan, verb: str) -> str:
    """Return the plan as one line."""
    to_delete = [decision.status for decision in plan.decisions if decision.delete]
    if not to_delete and not plan.leftovers:
        return f"nothing to delete: {format_count(len(plan.decisions), 'step')} kept"
    nbytes = sum(status.nbytes or 0 for status in to_delete)
    text = f"{verb}: {len(to_delete):,} of {format_count(len(plan.decisions), 'step')}, {format_size(nbytes)}"
    return text + (f"; {format_count(len(plan.leftovers), 'leftover')}" if plan.leftovers else "")


def _result(plan: DeletionPlan, deleted: Collection[int]) -> str:
    """Return the result as one line."""
    nbytes = sum(decision.status.nbytes or 0 for decision in plan.decisions if decision.status.step in deleted)
    text = f"deleted: {len(deleted):,} of {format_count(len(plan.decisions), 'step')}, {format_size(nbytes)}"
    kept = sorted(plan.steps_to_delete - frozenset(deleted))
    if kept:
        text += f"; kept {', '.join(map(str, kept))}: pinned or needed by a newer save in the meantime"
    return text
