"""Coordinators: the processes of a job agreeing, and sending each other elements of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending

__all__ = ["Channels", "Collectives", "Coordinator", "GathersInGroups", "Rejoinable"]


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


class Channels(Protocol):
    """The way between the members of some groups of processes. One thread at a time."""

    @property
    def depth(self) -> int:
        """How many broadcasts may be under way at once; at least 1."""
        ...

    def memory(self, nbytes: int) -> HostArray:
        """Memory to broadcast from and into, of so many bytes: ``uint8``, contiguous, writable, not initialised.

        It is the caller's until the channels are closed: what suits the devices, such as pinned memory.
        """
        ...

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Begin to send `data` from one member of a group to all others.

        All members of a group call this in the same order, with the same sender and as many bytes, and so do all that have several
        groups in common. `data` is part of `memory`; it must not be touched before the result is there. The result is waited for in
        the order in which broadcasts were begun.

        Args:
            group: its place among the groups that were connected.
            sender: the rank that has the bytes.
            data: ``uint8``; on all but the sender it is overwritten.

        Raises:
            RankFailedError: here or in the result, where another process is gone, or does not come within the deadline.
        """
        ...

    def close(self) -> None:
        """Let go of memory. Nothing may be under way, unless a broadcast failed: then the way is given up, and made anew next time."""
        ...


class Collectives(Protocol):
    """How a framework sends bytes between the processes of a job: over its own collectives, beside those of the program.

    Safe off the main thread; one thread at a time.
    """

    @property
    def name(self) -> str:
        """Of the framework and what it sends over, for errors."""
        ...

    @property
    def rank(self) -> int:
        """Which process this is."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> Channels:
        """A way between the members of groups of ranks. May wait for the others.

        Args:
            key: the same on all ranks that connect now, and never used again: what is sent elsewhere meanwhile does not mix in.
            groups: those that this process is a member of, each with two members or more, sorted. All processes that have several in
                common give them in the same order.

        Raises:
            RankFailedError: if another process is gone, or does not come within the deadline.
        """
        ...
