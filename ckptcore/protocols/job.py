"""Protocols of a job: coordinators, collectives, executors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from ckptcore.model.arrays import HostArray, Shard
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import Pending, Receipt

__all__ = [
    "Channels",
    "Collectives",
    "Coordinator",
    "Executor",
    "GathersInGroups",
    "HeldWork",
    "Rejoinable",
    "WantedLeaf",
]

SaveT_contra = TypeVar("SaveT_contra", contravariant=True)
OpenedT_contra = TypeVar("OpenedT_contra", contravariant=True)


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
class WantedLeaf:
    """A leaf that workers read and make.

    Attributes:
        leaf: the number of the stored array in the tree; never an alias.
        abstract: the requested leaf.
        stored: the array that was saved.
    """

    leaf: int
    abstract: Any
    stored: ArrayRecord


class HeldWork(Protocol[SaveT_contra]):
    """Elements that workers hold for one save. Any thread."""

    def wait(self) -> None:
        """Return once the leaves are not needed any more.

        Raises:
            RankFailedError: a worker could not take its elements, or is gone.
        """
        ...

    def write(self, save: SaveT_contra) -> Pending[Sequence[Sequence[Receipt]]]:
        """Begin to write what the workers hold into a location that the controller has claimed. All workers write at once.

        Args:
            save: the save that `Executor.hold` got, or a further save of the same boxes.

        Returns:
            The receipts of the workers, by part of the save. A result or an error comes only once no worker writes any more,
            because the objects of a failed save are removed then.
        """
        ...

    def close(self) -> None:
        """Release the elements. Closing again, or after a worker is gone, is no error."""
        ...


class Executor(Protocol[SaveT_contra, OpenedT_contra]):
    """Copies, writes and reads elements on the workers of a single controller. Any thread.

    The controller plans and commits; no elements pass through it. In a checkpoint the controller is rank 0 and worker `n` is
    rank ``n + 1``, as if each were a process of a job.

    `SaveT_contra` is ``ckptcore.saving.Save`` and `OpenedT_contra` an open checkpoint, ``ckptcore.loading.Checkpoint``. Derive
    an executor from ``ckptcore_jax.staged_executor.StagedExecutor``, which writes and reads them with pickled stages.

    Every method that calls a worker raises `RankFailedError` with the name of the worker if the worker is gone.
    """

    @property
    def workers(self) -> Sequence[str]:
        """Return the names of the workers, by number, for errors. They do not change."""
        ...

    def takes(self, leaf: Any) -> bool:
        """Return True if the elements of a leaf to save are at these workers. Never waits."""
        ...

    def makes(self, abstract: Any) -> bool:
        """Return True if these workers make the leaf that is requested. Never waits."""
        ...

    def identity(self, leaf: Any) -> Hashable | None:
        """Return the identity of a leaf that it takes or makes. See `LeafHandler.identity`."""
        ...

    def shards(self, leaf: Any, worker: int) -> Sequence[Shard]:
        """Return the boxes that a worker holds, each once. The replicas of a box are workers.

        Raises:
            UnsupportedLeafError: the leaf has no elements, or they are not all at these workers.
        """
        ...

    def hold(self, save: SaveT_contra, *, copied: bool) -> HeldWork[SaveT_contra]:
        """Begin to hold the boxes that workers write for a save.

        Args:
            save: its parts have the plans of the workers.
            copied: True to copy the boxes, at the workers, to memory that nobody changes or frees. False if the leaves do not
                change until the save is committed.
        """
        ...

    def read_bytes(self, abstract: Any, stored: ArrayRecord) -> int:
        """Return the most bytes that one worker reads for a leaf.

        Raises:
            UnsupportedLeafError: the stored array cannot become what is requested.
        """
        ...

    def read(self, opened: OpenedT_contra, leaves: Sequence[WantedLeaf], context: Any) -> Sequence[object]:
        """Read the boxes that each worker needs, and make the leaves of them there. All workers read at once.

        Args:
            opened: the checkpoint. Workers open it themselves, and fail if they find another save.
            leaves: the leaves to make; the results are in this order.
            context: the options of the controller, a `ckptcore.Context`.

        Raises:
            CheckpointError: the first error of a worker; further errors are notes of it.
        """
        ...
