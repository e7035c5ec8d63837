"""Protocols of a job: coordinators, collectives, executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending
from ckptcore.protocols.strategy import ReadStrategy, SaveStrategy
from ckptcore.protocols.values import LeafHandler


class Coordinator(Protocol):
    """Exchanges messages between the processes of a job. Thread-safe. Each exchange has a unique key.

    Every wait has a deadline. After it, `CoordinationTimeoutError` names the missing ranks.
    """

    @property
    def rank(self) -> int:
        """The rank of this process. Rank 0 is the leader."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Send a payload to the leader. Return all payloads in order of rank on the leader, None elsewhere."""

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Return the payload of the leader; other ranks pass None. After a timeout, a rank may repeat the call."""


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


class Channels(Protocol):
    """Connections between the members of some groups of processes. Used by one thread at a time."""

    @property
    def depth(self) -> int:
        """The number of broadcasts that may run at once; at least 1."""

    def memory(self, nbytes: int) -> HostArray:
        """Return memory to broadcast from and into: ``uint8``, contiguous, writable, not initialised.

        The memory suits the devices, for example pinned memory. The caller may use it until the channels are closed.
        """

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

    def close(self) -> None:
        """Release the memory. No broadcast may be running. After a failed one, the next use connects again."""


class Collectives(Protocol):
    """Sends bytes between the processes of a job with the collectives of a framework, separate from the program's.

    May be used from any thread, but only by one at a time.
    """

    @property
    def name(self) -> str:
        """The name of the framework and its transport, for errors."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> Channels:
        """Connect the members of groups of ranks. May wait for the others.

        Args:
            key: equal on all ranks that connect now, and unique, so that messages are not mixed up with others.
            groups: the groups of this process, each sorted, with at least two members. Processes with several groups in
                common pass these in the same order.

        Raises:
            RankFailedError: another process failed, or is late.
        """


class Executor(Protocol):
    """Workers of a single controller, which hold elements of leaves: they copy, write and read these. Thread-safe.

    The controller plans and commits; no elements pass through it. In a checkpoint the controller is rank 0 and worker
    `n` is rank ``n + 1``, as if each were a process of a job. Derive an executor from
    ``ckptcore_jax.staged_executor.StagedExecutor``.
    """

    def leaves_to_save(self, handler: LeafHandler) -> LeafHandler:
        """Return a handler that describes leaves like another one. This process holds no boxes of those at workers."""

    def save_strategy(self, strategy: SaveStrategy[Any, Any]) -> SaveStrategy[Any, Any]:
        """Return a strategy that saves like another one, and lets workers write the leaves at them."""

    def read_strategy(self, strategy: ReadStrategy[Any] | None) -> ReadStrategy[Any]:
        """Return a strategy that loads like another one, and lets workers read the leaves at them.

        Args:
            strategy: the other strategy; None: the stages of the load run as usual.
        """
