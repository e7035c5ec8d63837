"""Protocols of an operation and its job: strategies, commits and transactions; coordinators, collectives, executors.

A caller passes a strategy to `ckptcore.save`. `prepare` returns the save, `begin` returns the commit of that save, and
the core runs its stages: claim, write, commit. At the end of every stage, the processes of the job exchange their
errors. The strategy of a load decides how the stages of the load run, and from which source it reads stored arrays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending, ReadPlan
from ckptcore.protocols.layouts import Layout
from ckptcore.protocols.storage import StorageBackend
from ckptcore.protocols.values import LeafHandler

DraftT_contra = TypeVar("DraftT_contra", contravariant=True)
LoadT_contra = TypeVar("LoadT_contra", contravariant=True)
SaveT = TypeVar("SaveT")
StrategyT = TypeVar("StrategyT")
T_co = TypeVar("T_co", covariant=True)


class Transaction(Protocol):
    """The right to write one checkpoint at a location. It ends with `commit`, `leave` or `abort`.

    Saves, copies, updates and partial saves are transactions.
    """

    @property
    def store(self) -> StorageBackend:
        """The storage to write objects to. Objects count only after the commit."""

    def show_claim(self) -> None:
        """Make the claim visible to the other processes of the job, which wait for it before they write."""

    def expect_distinct(self, keys: Callable[[], Iterable[str]]) -> None:
        """Refuse keys that the storage cannot distinguish, or with names that are too long for the storage.

        Args:
            keys: returns keys of objects that will be written, or of directories. Not called if the storage accepts
                all keys.

        Raises:
            NameCollisionError: two keys are the same object or directory in the storage.
            InvalidLocationError: a name is too long.
        """

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """Turn the objects into a checkpoint, which is durable if the storage was opened durable.

        Args:
            root: the root; None for a checkpoint of other software, which has no root.
            parts: by key, objects to which the root refers in addition to the objects of the layout.

        Raises:
            CheckpointExistsError, SaveLostError: nothing was committed.
            CommitUnknownError: the commit may have happened.
        """

    def leave(self) -> None:
        """Release the claim and keep the objects for a later transaction, which resumes. Does nothing after the end."""

    def abort(self) -> None:
        """Remove all objects and release the claim. Does nothing after the end."""


class SaveCommit(Protocol):
    """The claim and the commit of one save. The core calls `claim`, `commit` and `settle` in this order, on every rank.

    An error of `claim` or `commit` fails the save on all ranks, because they run inside stages of the job.
    """

    @property
    def meaning(self) -> str:
        """The consequence of a failed claim or write on another rank, such as "nothing was committed"."""

    @property
    def commit_meaning(self) -> str:
        """The consequence of a failed commit on another rank; empty if unknown."""

    def claim(self) -> None:
        """Claim the target if this process claims for the job. Otherwise check that the claim is visible."""

    @property
    def store(self) -> StorageBackend:
        """The storage to write to, opened at the root of the checkpoint. First used in the stage "write"."""

    def commit(self, payloads: Sequence[object]) -> None:
        """Commit the objects of all processes.

        Args:
            payloads: on the leader, the encoded receipts of each rank, or None for the rank of a job that has only
                one process. Empty on other ranks.
        """

    def settle(self, error: Exception | None) -> None:
        """End a save whose commit may have happened.

        Args:
            error: None if every rank has committed. Otherwise the error of the stage "write" or "commit" on this rank.

        Raises:
            CommitUnknownError: this rank cannot confirm that the save is committed.
        """

    def abort(self) -> None:
        """Remove the objects of the save. Does nothing after a commit."""


class SaveStrategy(Protocol[DraftT_contra, SaveT]):
    """The content and the commit of a save. Immutable, so that several saves may share a strategy.

    Derive a strategy from `ckptcore.PlainSave`, and override `begin` to return a `SaveCommit` that wraps the commit of
    `PlainSave`.

    Attributes:
        takes_placeholders: True if the state may have placeholders. The strategy finds their leaves elsewhere.
        merges_keys: True if several saves of the strategy add keys to the same dicts.
        checks_target: True if `prepare` checks the location. Otherwise the core refuses an existing target unless
            ``overwrite=`` allows replacing it.
        layouts: the layouts of further saves, which write the same elements to other locations once this save is
            committed. `prepare` returns the further saves in `Save.further`. The core captures the elements once for
            all saves.
        signature: text that describes the further saves. The ranks of a job compare it; if it differs, the save is
            refused.
    """

    @property
    def takes_placeholders(self) -> bool: ...

    @property
    def merges_keys(self) -> bool: ...

    @property
    def checks_target(self) -> bool: ...

    @property
    def layouts(self) -> Sequence[str | Layout]: ...

    @property
    def signature(self) -> str: ...

    def prepare(self, draft: DraftT_contra) -> SaveT:
        """Return the save with the plans of its parts. Called on all ranks with equal trees.

        Writes nothing to the target.

        Args:
            draft: the target, the described trees and the content of the root.
        """

    def begin(self, save: SaveT) -> SaveCommit:
        """Return the commit of a save that `prepare` returned, or refuse the save. Does no I/O; can be called again."""

    def after_commit(self, save: SaveT, write: Callable[[SaveT], None]) -> None:
        """Write the further saves. Called on every rank, after the commit of the save.

        Args:
            save: the save.
            write: writes and commits a further save.
        """


class StepStrategy(Protocol[StrategyT]):
    """Strategies for the steps of a `Checkpointer`. Immutable.

    Attributes:
        layouts: layouts of further saves. The `Checkpointer` refuses unknown layouts.
    """

    @property
    def layouts(self) -> Sequence[str | Layout]: ...

    def check(self, steps: str | os.PathLike[str]) -> None:
        """Refuse settings that would fail at a step. Called when a `Checkpointer` is created.

        Args:
            steps: the directory of the run.
        """

    def for_step(self, step: int, name: str, strategy: StrategyT) -> StrategyT:
        """Return the strategy of a step. Called on every rank with equal arguments.

        Args:
            step: the number of the step.
            name: the name of the directory of the step.
            strategy: the strategy of the run directory. The result wraps it, or is the same object.
        """


ReadBoxes: TypeAlias = Callable[[ReadPlan, Sequence[HostArray]], Iterable[int]]
"""Fills C-contiguous buffers with the boxes of a plan. Yields the number of each box once it is complete."""


class ReadThrough(Protocol):
    """Reads boxes of stored arrays from another source than the checkpoint, such as a cache."""

    def __call__(
        self, content_id: str | None, plan: ReadPlan, buffers: Sequence[HostArray], read_stored: ReadBoxes
    ) -> Iterable[int]:
        """Fill buffers with the boxes of a plan. Yields the number of each box once it is complete.

        Args:
            content_id: identifies the stored tree. Every checkpointable of every save has a different id. None if
                other software wrote the checkpoint: its bytes may change, so they must not be cached.
            plan: the boxes, in the stored shape and dtype of their arrays.
            buffers: for each box, C-contiguous memory of its shape and the stored dtype.
            read_stored: reads boxes from the checkpoint and verifies them. Accepts any box of the plan's tree.
        """


class StagedLoad(Protocol[T_co]):
    """A load of one tree, as a strategy uses it."""

    def run_here(self, read_through: ReadThrough | None = None) -> T_co:
        """Run all stages in this process, and return the loaded value. Repeat them if the checkpoint was replaced.

        Args:
            read_through: reads boxes from another source; None: read the checkpoint.
        """


class ReadStrategy(Protocol[LoadT_contra]):
    """A way to run a load. Pass it as ``ckptcore.load(..., strategy=...)``. Thread-safe.

    `LoadT_contra` is ``ckptcore.loading.load.Load``, which is a `StagedLoad`.
    """

    def run(self, load: LoadT_contra) -> Any:
        """Run a load, and return the loaded value."""


class Coordinator(Protocol):
    """Exchanges messages between the processes of a job. Thread-safe. Each exchange has a unique key.

    Every wait has a deadline. After the deadline, `CoordinationTimeoutError` names the missing ranks.
    """

    @property
    def rank(self) -> int:
        """The rank of this process. Rank 0 is the leader."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Send a payload to the leader. Return all payloads in order of rank on the leader, and None on other ranks."""

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Return the payload of the leader; other ranks pass None. After a timeout, a rank may repeat the call."""


@runtime_checkable
class Rejoinable(Protocol):
    """A `Coordinator` of one incarnation of its job. If a rank is restarted, all ranks join again as a new incarnation.

    The hook `ckpt_coordinator` returns the same object within an incarnation, and another object after the process has
    joined again. Operations are counted from 0 for each object, so that restarted processes and other processes use the
    same numbers.
    """

    @property
    def incarnation(self) -> int:
        """The incarnation number of the job, or of this process if the job has none. Shown in messages."""


@runtime_checkable
class GathersInGroups(Protocol):
    """A `Coordinator` with groups of processes, through which a large job gathers in several steps."""

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> Coordinator:
        """Return the coordinator of a group. Does not wait, and sends nothing.

        In the group, and in its errors, processes have the ranks 0, 1, ... in the given order. The first process is the
        leader. Keys are unique among all exchanges of the job, in all groups.

        Args:
            ranks: the ranks of the group in this coordinator, each once, including the rank of this process.
            deadlines: the deadline of the group's exchanges, as a multiple of this coordinator's deadline.
        """


@runtime_checkable
class ReportsAwaited(Protocol):
    """A `Coordinator` that knows for which ranks a running exchange waits.

    If an exchange takes more than ten seconds, the core logs the awaited ranks.
    """

    def awaited(self, key: str) -> Sequence[int]:
        """Return the ranks whose payloads are missing in an exchange that this rank waits for; empty if unknown.

        Called on another thread while the exchange runs, or right after it. It must not block: if the service does not
        answer within some seconds, return nothing.

        Args:
            key: the key of the exchange.
        """


class Channels(Protocol):
    """Connections between the members of some groups of processes. Used by one thread at a time."""

    @property
    def depth(self) -> int:
        """The number of broadcasts that may run at the same time; at least 1."""

    def memory(self, nbytes: int) -> HostArray:
        """Return memory to broadcast from and into: ``uint8``, contiguous, writable, not initialised.

        The memory suits the devices, for example pinned memory. The caller may use it until the channels are closed.
        """

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Start to send `data` from one member of a group to all others.

        All members of a group make the same calls in the same order, with the same sender and number of bytes.
        Processes that share several groups also use the same order across the shared groups. `data` is a result of
        `memory` or a part of it, and must not be used before the result of the broadcast is available. Wait for results
        in the order of the calls.

        Args:
            group: the index of the group among the connected groups.
            sender: the rank that sends the bytes.
            data: ``uint8``; overwritten on all ranks but the sender.

        Raises:
            RankFailedError: another process failed, or is late. Raised by this call, or by the result.
        """

    def close(self) -> None:
        """Release the memory. No broadcast may be running. After a failed broadcast, the next use connects again."""


class Collectives(Protocol):
    """Sends bytes between the processes of a job with the collectives of a framework.

    The messages are separate from the messages of the program. May be used from any thread, by one thread at a time.
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
            key: equal on all ranks that connect now, and unique, so that messages of different connections are not
                mixed up.
            groups: the groups of this process, each sorted, with at least two members. Processes that share several
                groups pass the shared groups in the same order.

        Raises:
            RankFailedError: another process failed, or is late.
        """


class Executor(Protocol):
    """The workers of a single controller, which hold, copy, write and read elements of leaves. Thread-safe.

    The controller plans and commits; no elements pass through the controller. In a checkpoint the controller is rank 0
    and worker `n` is rank ``n + 1``, as if each were a process of a job. Derive an executor from
    ``ckptcore_jax.staged_executor.StagedExecutor``.
    """

    def leaves_to_save(self, handler: LeafHandler) -> LeafHandler:
        """Return a handler like `handler`, in which this process holds no boxes of the leaves that workers hold."""

    def save_strategy(self, strategy: SaveStrategy[Any, Any]) -> SaveStrategy[Any, Any]:
        """Return a strategy that saves like `strategy`, and lets workers write the leaves that they hold."""

    def read_strategy(self, strategy: ReadStrategy[Any] | None) -> ReadStrategy[Any]:
        """Return a strategy that loads like `strategy`, and lets workers read the leaves that they hold.

        Args:
            strategy: the strategy to follow; None: the stages of the load run as usual.
        """
