"""Retention of the steps of a run: which steps a policy keeps, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptcore.commit.delete import find_bases, referring_to
from ckptcore.commit.location import commit_method
from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.policies import PreservationPolicy, explain, what_to_delete
from ckptcore.runtime import runtime_of
from ckptcore.training.garbage import policy_infos, readable_steps
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.run_steps import StepState, StepStatus, find_pinned, read_steps

__all__ = ["DeletionPlan", "StepDecision", "plan_deletions"]

_KEPT_BECAUSE: Mapping[StepState, str] = {
    "committed": "committed a moment ago",
    "foreign": "written by other software",
    "incomplete": "a file is missing",
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
        status: the step. Its size may be unknown if it is kept.
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
        decisions: one per step, ascending.
        leftovers: leftovers of saves and deletions. The list can include leftovers of running saves. The
            deletion recognises and keeps these.
        broken: steps whose root is a claim although they count as committed. Policies do not count them.
    """

    decisions: Sequence[StepDecision]
    leftovers: Sequence[str]
    broken: frozenset[int] = field(default=frozenset())

    @property
    def steps_to_delete(self) -> frozenset[int]:
        """The steps to delete."""
        return frozenset([decision.status.step for decision in self.decisions if decision.delete])


def plan_deletions(steps: StepDirectory, policy: PreservationPolicy, now: float, context: Context) -> DeletionPlan:
    """Decide about every step. Changes nothing.

    Args:
        steps: the directory, just listed.
        policy: the policy that decides which steps to keep.
        now: seconds since the epoch, UTC.
        context: options.

    Raises:
        StorageError: if the storage fails.
    """
    broken = _claimed_steps(steps)
    infos = {info.step: info for info in policy_infos(steps, broken)}
    expired = set(what_to_delete(policy, list(infos.values()), now))
    pinned = find_pinned(steps.store, steps.display) or frozenset()
    users = _users_of_bases(steps, expired, context)
    reasons = explain(policy, list(infos.values()), now)
    to_read = [step for step in steps.candidates() if step in expired or step not in infos]
    statuses = {status.step: status for status in read_steps(steps, to_read, context)}
    decisions: list[StepDecision] = []
    leftovers = list(steps.leftovers)
    for step in steps.candidates():
        status = statuses.get(step) or StepStatus(step, steps.name(step), "committed")
        if step not in infos:
            # Only object stores have a claim as root. File systems commit by rename.
            if status.state == "uncommitted" and commit_method(steps.store).claims_by_root:
                leftovers.append(status.name)
            else:
                decisions.append(StepDecision(status, delete=False, reasons=(_KEPT_BECAUSE[status.state],)))
            continue
        summary = steps.summary(step)
        created = summary.created if summary is not None else None
        status = StepStatus(step, status.name, "committed", created, status.nbytes, infos[step].metrics)
        if step in expired and status.name in pinned:
            decisions.append(StepDecision(status, delete=False, reasons=("pinned by a reader",)))
        elif step in users:
            decisions.append(StepDecision(status, delete=False, reasons=(f"base of {', '.join(users[step])}",)))
        elif step in expired:
            decisions.append(StepDecision(status, delete=True, reasons=()))
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


def _claimed_steps(steps: StepDirectory) -> frozenset[int]:
    """Return steps that count as committed but have a claim as root.

    On file systems every directory with a root counts as committed. If its root is a claim, the directory was copied
    from an object store.
    """
    claims = set()
    committed = readable_steps(steps)
    steps.look_ahead(committed)
    for step in committed:
        try:
            summary = steps.summary(step)
        except CheckpointError:
            continue  # `policy_infos` reports these
        if summary is not None and not summary.committed:
            claims.add(step)
    return frozenset(claims)
