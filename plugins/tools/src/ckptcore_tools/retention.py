"""Retention of the steps of a run: which steps a policy keeps, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptcore.commit.contents import find_other_files
from ckptcore.commit.delete import find_bases, referring_to
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.opening.checkpoint import format_names
from ckptcore.policies import PreservationPolicy, explain, what_to_delete
from ckptcore.runtime import runtime_of
from ckptcore.training.deletion import policy_infos
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.run_steps import StepState, StepStatus, find_pinned, read_steps

_KEPT_BECAUSE: Mapping[StepState, str] = {
    "committed": "committed a moment ago",
    "foreign": "written by other software",
    "incomplete": "a file is missing or has another size",
    "uncommitted": "not committed",
    "corrupt": "damaged",
    "unreadable": "cannot be read here",
    "other": "not a checkpoint",
}
"""The reasons why `gc` keeps steps that policies do not count, by state."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The decision to keep or delete a step.

    Attributes:
        status: the step.
        delete: True to delete the step.
        reasons: reasons to keep it.
    """

    status: StepStatus
    delete: bool
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """Decisions about a directory of steps.

    Attributes:
        decisions: one per step, ascending. Uncommitted steps in object stores are leftovers instead.
        leftovers: leftovers of saves and deletions. The list can include temporary files of running saves, which the
            deletion recognises and keeps.
        broken: steps that cannot be loaded, such as those with a missing file, and steps of other software. Policies do
            not count them. Otherwise a policy could keep them and delete steps that can be loaded.
    """

    decisions: Sequence[StepDecision]
    leftovers: Sequence[str]
    broken: frozenset[int] = field(default=frozenset())

    @property
    def steps_to_delete(self) -> frozenset[int]:
        """The steps to delete."""
        return frozenset([decision.status.step for decision in self.decisions if decision.delete])


def plan_deletions(
    steps: StepDirectory, policy: PreservationPolicy, now: float, context: Context, *, other_files: bool = False
) -> DeletionPlan:
    """Decide about every step from its root and the sizes of its files. Changes nothing.

    Args:
        steps: the directory, just listed.
        policy: the policy that decides which steps to keep.
        now: seconds since the epoch, UTC.
        context: options.
        other_files: True to delete steps with files that no save wrote, too.

    Raises:
        StorageError: if the storage fails.
    """
    statuses = {status.step: status for status in read_steps(steps, steps.candidates(), context)}
    broken = frozenset([step for step, status in statuses.items() if status.state != "committed"])
    infos = {info.step: info for info in policy_infos(steps, broken)}
    expired = set(what_to_delete(policy, list(infos.values()), now))
    pinned = find_pinned(steps) or frozenset()
    users = _users_of_bases(steps, expired, context)
    reasons = explain(policy, list(infos.values()), now)
    decisions: list[StepDecision] = []
    leftovers = list(steps.leftovers)
    for step, status in statuses.items():
        if step not in infos:
            # Only object stores write a claim in place of the root. File systems commit by rename.
            if status.state == "uncommitted" and steps.commit_method().claims_by_root:
                leftovers.append(status.name)
            else:
                decisions.append(StepDecision(status, delete=False, reasons=(_KEPT_BECAUSE[status.state],)))
            continue
        if step in expired and status.name in pinned:
            decisions.append(StepDecision(status, delete=False, reasons=("pinned by a reader",)))
        elif step in users:
            decisions.append(StepDecision(status, delete=False, reasons=(f"base of {', '.join(users[step])}",)))
        elif step in expired:
            others = [] if other_files else find_other_files(subdirectory(steps.store, status.name))
            kept = (f"has files that no save wrote: {format_names(others)}",) if others else ()
            decisions.append(StepDecision(status, delete=not others, reasons=kept))
        else:
            decisions.append(StepDecision(status, delete=False, reasons=reasons[step]))
    return DeletionPlan(decisions, leftovers, broken)


def _users_of_bases(steps: StepDirectory, expired: Collection[int], context: Context) -> Mapping[int, Sequence[str]]:
    """Return the expired steps that must stay because they are bases, with the names of the steps that use them."""
    if not expired:
        return {}
    bases = find_bases(steps.store, runtime_of(context).io_threads)
    save_ids = {step: summary.save_id for step in expired if (summary := steps.summary(step)) is not None}
    deletable = dict(save_ids)
    # A base that stays may itself have a base, which then stays too: repeat until nothing changes.
    while True:
        names = {steps.name(step) for step in deletable}
        staying = {name: of for name, of in bases.items() if name not in names}
        used = [step for step, save_id in deletable.items() if referring_to(steps.name(step), save_id, staying)]
        if not used:
            break
        for step in used:
            del deletable[step]
    return {step: referring_to(steps.name(step), save_ids[step], staying) for step in save_ids if step not in deletable}
