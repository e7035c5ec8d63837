"""Coordinators: the processes of a job agreeing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = [
    "Coordinator",
    "GathersInGroups",
    "Rejoinable",
]


class Coordinator(Protocol):
    """The processes of a job agreeing. Safe off the main thread; keys are unique per exchange.

    Every wait has a deadline; past it `CoordinationTimeoutError` names the ranks that did not come.
    """

    @property
    def rank(self) -> int:
        """Which process this is; 0 leads."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Give a payload to the leader: there all of them in order of rank, elsewhere None."""
        ...

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Get the leader's payload; the others pass None. Who waited in vain, until the deadline, may wait again under the same key."""
        ...


@runtime_checkable
class Rejoinable(Protocol):
    """What a `Coordinator` is too that belongs to one incarnation of its job: when a rank was started anew, all join again.

    The hook `ckpt_coordinator` gives the same object as long as the process is in that incarnation, and another one after it
    joined again. Operations are counted for each such object from 0 on, so that a process that went on and one that is new count alike.
    """

    @property
    def incarnation(self) -> int:
        """Which one it belongs to: of the job's, or where nobody counts those, of the ones that this process was in. For a person."""
        ...


@runtime_checkable
class GathersInGroups(Protocol):
    """A coordinator through which some of the processes can agree among themselves, so that a large job need not tell the leader all
    at once.
    """

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> Coordinator:
        """The coordinator of a group of processes, in one of them; touches nothing yet, and waits for nobody.

        In the group, processes have the ranks 0, 1, ... in the order given: the first one leads, and the ranks of an error are those
        of the group. Keys are unique among all exchanges of the job, whatever group they are of.

        Args:
            ranks: those of the group in this one, each once, this process among them.
            deadlines: how many deadlines of this coordinator an exchange of the group waits.
        """
        ...
