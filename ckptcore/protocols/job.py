"""Protocols of a job: coordinators, collectives, executors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ckptcore.model.arrays import Box, HostArray, Shard
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import Pending

__all__ = [
    "Channels",
    "Collectives",
    "Coordinator",
    "Executor",
    "Fetched",
    "GathersInGroups",
    "Held",
    "LeafBoxes",
    "ReadStage",
    "Rejoinable",
    "WantedLeaf",
    "WriteStage",
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


@dataclass(frozen=True, slots=True)
class LeafBoxes:
    """Boxes of a leaf that a worker holds.

    Attributes:
        leaf: as the controller knows it; its elements are at the workers.
        boxes: without overlap.
    """

    leaf: Any
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class WantedLeaf:
    """A leaf that is to be made at the workers.

    Attributes:
        abstract: what is asked for.
        stored: the array that was saved.
    """

    abstract: Any
    stored: ArrayRecord


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a read brought.

    Attributes:
        reports: by worker, the bytes that its stage gave.
        leaves: the leaves that were asked for, in order; of no use where a report says that a stage failed.
    """

    reports: Mapping[int, bytes]
    leaves: Sequence[object]


class Held(Protocol):
    """Elements that a worker holds for one save. Any thread."""

    def wait(self) -> None:
        """Return once nothing of the leaves is needed any more.

        Raises:
            RankFailedError: if the worker could not take them, or is gone.
        """
        ...

    def close(self) -> None:
        """Let go of the elements; again is no error, nor is a worker that is gone."""
        ...


class WriteStage(Protocol):
    """What a worker does to write what it holds. Can be pickled, has no elements in it, and raises nothing."""

    def __call__(self, arrays: Sequence[Sequence[HostArray]]) -> bytes:
        """Write.

        Args:
            arrays: for each leaf that is held, the elements of its boxes in their order; any strides. Nobody changes them
                meanwhile.

        Returns:
            A report for the controller: small, and of no concern to the executor.
        """
        ...


class ReadStage(Protocol):
    """What a worker does to read boxes. Can be pickled, and raises nothing."""

    def __call__(self) -> tuple[bytes, Sequence[Sequence[HostArray]]]:
        """Read.

        Returns:
            A report for the controller, and for each leaf the elements of its boxes in the order in which `Executor.wanted` gave them:
            C-contiguous, of the stored dtype, nobody else's. Fewer than that where the stage failed, which its report says.
        """
        ...


class Executor(Protocol):
    """Runs stages of saves and loads where the elements of leaves are: on the workers of a single controller.

    The controller plans and commits. What it sends a worker is a stage, and what it gets is a report; elements never come to it. In
    one checkpoint the controller is rank 0 and the worker `n` is rank ``n + 1``, as if each were a process of a job. Any thread.

    Every method that talks to a worker raises `RankFailedError`, or has its result raise it, if the worker is gone, or did not do
    what it was asked; the error names the worker.
    """

    @property
    def workers(self) -> Sequence[str]:
        """What each worker is called in errors, by its number. It does not change."""
        ...

    def takes(self, leaf: Any) -> bool:
        """Whether the elements of a leaf that is saved are at these workers and not here. Never waits."""
        ...

    def makes(self, abstract: Any) -> bool:
        """Whether what an abstract leaf asks for is to be at these workers and not here. Never waits."""
        ...

    def identity(self, leaf: Any) -> Hashable | None:
        """As `LeafHandler.identity`, of a leaf that it takes or makes; without a look at elements."""
        ...

    def shards(self, leaf: Any, worker: int) -> Sequence[Shard]:
        """The boxes that a worker holds, each once; the replicas of a box are workers.

        Raises:
            UnsupportedLeafError: if the leaf has no elements, or they are not all at these workers.
        """
        ...

    def copy(self, worker: int, leaves: Sequence[LeafBoxes]) -> Held:
        """For asynchronous saves: begin to copy boxes, at the worker, to where nobody can change or free them."""
        ...

    def view(self, worker: int, leaves: Sequence[LeafBoxes]) -> Held:
        """For blocking saves: hold boxes, as they are if that can be."""
        ...

    def write(self, worker: int, stage: WriteStage, held: Held) -> Pending[bytes]:
        """Begin to run a stage at a worker, on what it holds. Does not wait, so that workers write at the same time.

        Returns:
            What the stage returns. A result comes only once the worker writes no more, also where it failed.
        """
        ...

    def wanted(self, abstract: Any, stored: ArrayRecord, worker: int) -> Sequence[Box]:
        """As `LeafHandler.wanted`, of a worker: the boxes that it needs for its part of a leaf.

        Raises:
            UnsupportedLeafError: if the stored array cannot become what is asked for.
        """
        ...

    def read(self, stages: Mapping[int, ReadStage], leaves: Sequence[WantedLeaf]) -> Fetched:
        """Run a stage at each of some workers, and make leaves of what they read, there. Returns when all are done.

        Args:
            stages: by worker. A worker of which `wanted` gives no box of any of the leaves has none.
            leaves: what to make.
        """
        ...
