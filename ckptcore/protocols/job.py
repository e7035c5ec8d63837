"""Protocols of a job: coordinators, collectives, executors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ckptcore.model.arrays import HostArray, Shard
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import Pending, Receipt

__all__ = [
    "Channels",
    "Collectives",
    "Coordinator",
    "Executor",
    "GathersInGroups",
    "Rejoinable",
    "ReportsAwaited",
    "WantedLeaf",
    "WorkerCapture",
]

SaveT_contra = TypeVar("SaveT_contra", contravariant=True)
OpenedT_contra = TypeVar("OpenedT_contra", contravariant=True)


class Coordinator(Protocol):
    """Exchanges messages between the processes of a job. Thread-safe. Each exchange has a unique key.

    Every wait has a deadline. After it, `CoordinationTimeoutError` names the missing ranks.
    """

    @property
    def rank(self) -> int:
        """The rank of this process. Rank 0 is the leader."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Send a payload to the leader. Return all payloads in order of rank on the leader, None elsewhere."""
        ...

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Return the payload of the leader; other ranks pass None. After a timeout, a rank may repeat the call."""
        ...


@runtime_checkable
class Rejoinable(Protocol):
    """A `Coordinator` of one incarnation of its job. If a rank is restarted, all ranks join again.

    The hook `ckpt_coordinator` returns the same object within an incarnation, and another one after the process has
    joined again. Operations are counted from 0 for each object, so that restarted and other processes use the same
    numbers.
    """

    @property
    def incarnation(self) -> int:
        """The number of the incarnation, for messages: of the job, or of this process if the job has none."""
        ...


@runtime_checkable
class GathersInGroups(Protocol):
    """A `Coordinator` with groups of processes, so that a large job gathers in steps."""

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> Coordinator:
        """Return the coordinator of a group. Does not wait, and sends nothing.

        In the group, processes have the ranks 0, 1, ... in the given order, also in errors. The first one is the
        leader. Keys are unique among all exchanges of the job, in all groups.

        Args:
            ranks: the ranks of the group in this coordinator, each once, including the rank of this process.
            deadlines: the time that an exchange of the group waits, as a multiple of this coordinator's deadline.
        """
        ...


@runtime_checkable
class ReportsAwaited(Protocol):
    """A `Coordinator` that knows for which ranks a running exchange waits.

    The core logs them after ten seconds.
    """

    def awaited(self, key: str) -> Sequence[int]:
        """Return the ranks whose payloads are missing in an exchange in which this rank waits; empty if unknown.

        Called on another thread while the exchange runs, or right after it.

        Args:
            key: the key of the exchange.
        """
        ...


class Channels(Protocol):
    """Connections between the members of some groups of processes. Used by one thread at a time."""

    @property
    def depth(self) -> int:
        """The number of broadcasts that may run at once; at least 1."""
        ...

    def memory(self, nbytes: int) -> HostArray:
        """Return memory to broadcast from and into: ``uint8``, contiguous, writable, not initialised.

        The memory suits the devices, for example pinned memory. The caller may use it until the channels are closed.
        """
        ...

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Start to send `data` from one member of a group to all others.

        All members of a group call this in the same order, with the same sender and number of bytes. Processes with
        several groups in common also use the same order across these. `data` is part of `memory`, and must not be used
        before the result. Wait for results in the order of the calls.

        Args:
            group: the index of the group among those that were connected.
            sender: the rank that sends the bytes.
            data: ``uint8``; overwritten on all ranks but the sender.

        Raises:
            RankFailedError: another process failed, or is late. Raised by this call, or by the result.
        """
        ...

    def close(self) -> None:
        """Release the memory. No broadcast may be running. After a failed one, the next use connects again."""
        ...


class Collectives(Protocol):
    """Sends bytes between the processes of a job with the collectives of a framework, separate from the program's.

    May be used from any thread, but only by one at a time.
    """

    @property
    def name(self) -> str:
        """The name of the framework and its transport, for errors."""
        ...

    @property
    def rank(self) -> int:
        """The rank of this process."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> Channels:
        """Connect the members of groups of ranks. May wait for the others.

        Args:
            key: equal on all ranks that connect now, and unique, so that messages are not mixed up with others.
            groups: the groups of this process, each sorted, with at least two members. Processes with several groups in
                common pass these in the same order.

        Raises:
            RankFailedError: another process failed, or is late.
        """
        ...


class WantedLeaf(NamedTuple):
    """A leaf that workers read and build.

    Attributes:
        leaf: the number of the stored array in the tree; never an alias.
        abstract: the requested leaf.
        stored: the array that was saved.
    """

    leaf: int
    abstract: Any
    stored: ArrayRecord


class WorkerCapture(Protocol[SaveT_contra]):
    """Boxes that workers captured for one save. Thread-safe."""

    def wait(self) -> None:
        """Wait until the leaves may change.

        Raises:
            RankFailedError: a worker could not capture its boxes, or failed.
        """
        ...

    def write(self, save: SaveT_contra) -> Pending[Sequence[Sequence[Receipt]]]:
        """Start to write the boxes of all workers to a location that the controller has claimed.

        Args:
            save: the save that was passed to `Executor.capture`, or a further save of the same boxes.

        Returns:
            For each part of the save, the receipts of the workers. A result or an error arrives only after all workers
            have stopped writing, because the objects of a failed save are removed then.
        """
        ...

    def close(self) -> None:
        """Release the boxes. Closing again, or after a failure of a worker, is no error."""
        ...


class Executor(Protocol[SaveT_contra, OpenedT_contra]):
    """Copies, writes and reads elements on the workers of a single controller. Thread-safe.

    The controller plans and commits; no elements pass through it. In a checkpoint the controller is rank 0 and worker
    `n` is rank ``n + 1``, as if each were a process of a job.

    `SaveT_contra` is ``ckptcore.saving.requests.Save``, and `OpenedT_contra` is an open checkpoint,
    ``ckptcore.loading.checkpoint.Checkpoint``. Derive an executor from ``ckptcore_jax.staged_executor.StagedExecutor``,
    which writes and reads these with pickled stages.

    Every method that calls a worker raises `RankFailedError` with its name if the worker failed.
    """

    @property
    def workers(self) -> Sequence[str]:
        """Return the names of the workers, by number, for errors. They do not change."""
        ...

    def takes(self, leaf: Any) -> bool:
        """Return True if these workers hold the elements of a leaf to save. Never waits."""
        ...

    def makes(self, abstract: Any) -> bool:
        """Return True if these workers build the requested leaf. Never waits."""
        ...

    def identity(self, leaf: Any) -> Hashable | None:
        """Return the identity of a leaf that these workers hold or build. See `LeafHandler.identity`."""
        ...

    def shards(self, leaf: Any, worker: int) -> Sequence[Shard]:
        """Return the boxes that a worker holds, each once. Replicas are counted by worker, not by device.

        Raises:
            UnsupportedLeafError: the leaf has no elements, or some are not at these workers.
        """
        ...

    def capture(self, save: SaveT_contra, *, copied: bool) -> WorkerCapture[SaveT_contra]:
        """Start to capture the boxes that workers write for a save.

        Args:
            save: its parts have the plans of the workers.
            copied: True to copy the boxes, at the workers, to memory that no other code changes or frees. False if the
                leaves do not change until the save is committed.
        """
        ...

    def read_bytes(self, abstract: Any, stored: ArrayRecord) -> int:
        """Return the most bytes that one worker reads for a leaf.

        Raises:
            UnsupportedLeafError: the stored array cannot be loaded as requested.
        """
        ...

    def read(self, opened: OpenedT_contra, leaves: Sequence[WantedLeaf], context: Any) -> Sequence[object]:
        """Read the boxes that each worker needs, and build the leaves there. All workers read concurrently.

        Args:
            opened: the checkpoint. Workers open it themselves, and fail if they find another save.
            leaves: the leaves to build; the results have this order.
            context: the options of the controller, a `ckptcore.Context`.

        Raises:
            CheckpointError: the first error of a worker; further errors are its notes.
        """
        ...
