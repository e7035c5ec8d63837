"""Coordinators: the processes of a job agreeing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = [
    "Coordinator",
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
        """Which one of the job's it belongs to."""
        ...
