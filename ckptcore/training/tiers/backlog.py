"""Which of the steps that wait to be uploaded goes next, and which need not go: a pure decision."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckptcore.policies import PreservationPolicy, StepInfo, what_to_delete

__all__ = ["NextUpload", "given_up", "next_upload"]


@dataclass(frozen=True, slots=True)
class NextUpload:
    """What to do with the steps that wait.

    Attributes:
        step: the one to upload; None if none is worth it.
        superseded: those that the far tier would delete at once.
    """

    step: int | None
    superseded: tuple[int, ...]


def next_upload(
    waiting: Sequence[StepInfo],
    far: Sequence[StepInfo],
    policy: PreservationPolicy,
    now: float,
    *,
    keep: Collection[int] = (),
) -> NextUpload:
    """The newest step of those that wait, and those that the far tier's policy would give up as soon as all were there.

    An uploader that keeps up has one step waiting, and so uploads in order. One that has fallen behind makes the newest safe first.

    Args:
        waiting: the steps that wait.
        far: the steps that the far tier has.
        policy: which steps the far tier keeps.
        now: seconds since the epoch, UTC.
        keep: steps that it keeps whatever its policy says.
    """
    all_of_them = {info.step: info for info in (*far, *waiting)}
    doomed = what_to_delete(policy, list(all_of_them.values()), now)
    steps = [info.step for info in waiting]
    superseded = tuple(sorted(set(doomed).intersection(steps).difference(keep)))
    return NextUpload(max((step for step in steps if step not in superseded), default=None), superseded)


def given_up(waiting: Collection[int], most: int) -> tuple[int, ...]:
    """The steps, the oldest, that must not wait any longer where at most so many may."""
    return tuple(sorted(waiting)[: max(0, len(waiting) - most)])
