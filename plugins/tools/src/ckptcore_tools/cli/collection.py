"""What garbage collection would do in a directory of steps, and why, before it does it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptcore.commit.referrers import find_bases, referring_to
from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.policies import PreservationPolicy, explain, what_to_delete
from ckptcore.protocols import AtomicDirectories
from ckptcore.training.garbage import policy_infos, readable_steps
from ckptcore.training.steps import StepDirectory
from ckptcore_tools.cli.survey import Found, StepState, find_pinned, look_at_steps

__all__ = ["Fate", "Plan", "plan_collection"]

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
            if found.state == "uncommitted" and not isinstance(steps.store, AtomicDirectories):
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
    bases = find_bases(steps.store, context.io_threads)
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
