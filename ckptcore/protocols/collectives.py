"""Collectives: the processes of a job sending each other elements of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending

__all__ = [
    "Channels",
    "Collectives",
]


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
