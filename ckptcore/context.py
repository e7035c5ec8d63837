"""Context: the options of saves and loads, and what they share: plugins, threads, staging memory, saves under way."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ckptcore.commit.conditions import WITHOUT_CONDITIONS, Conditions, WithoutConditions
from ckptcore.events import Observer
from ckptcore.io.background import BackgroundSaves
from ckptcore.io.memory import StagingPool
from ckptcore.io.threads import IOThreads
from ckptcore.job.exchanges import exchange_counts
from ckptcore.model.tree import JSON
from ckptcore.planning.read_groups import READS, ReadGroups, Reads
from ckptcore.planning.replicas import ReplicaOptions
from ckptcore.plugins import Handler, Plugins, installed_plugins
from ckptcore.protocols import Collectives, Coordinator, Executor, Rejoinable

if TYPE_CHECKING:
    from ckptcore.commit.root import KnownRoots

__all__ = ["Context", "MemoryOptions", "default_context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Bounds on host memory, in bytes.

    Attributes:
        save_bytes: the most that an asynchronous save holds copied and not yet written; None: the whole state. With a
            bound, `save_async` blocks while it writes all but the last such part. One array may exceed it, alone.
        load_bytes: the most that a load reads ahead of the arrays it has built; None: all of it. One array may exceed it.
        exchange_bytes: the most that a load which is shared holds of what is on its way between processes; one element may exceed it.
        keep_staging: whether the memory that an asynchronous save copied into is kept for the next one.
    """

    save_bytes: int | None = None
    load_bytes: int | None = None
    exchange_bytes: int = 256 << 20
    keep_staging: bool = True

    def __post_init__(self) -> None:
        for name in ("save_bytes", "load_bytes", "exchange_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"MemoryOptions({name}={value}): give a number of bytes above 0, or None for no bound")
        if self.exchange_bytes is None:
            raise ValueError("MemoryOptions(exchange_bytes=None): give a number of bytes above 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Options for saves and loads. A Context is worth keeping: it holds threads and staging memory for reuse.

    Attributes:
        durability: ``"full"``: a committed checkpoint survives a loss of power. ``"none"``: it survives the death of the
            process, and after a loss of power may be missing or damaged.
        checksums: whether saves compute and record checksums.
        verify: whether loads check them.
        threads: how many threads move bytes; None: as many as suit the machine.
        memory: bounds on host memory.
        replicas: how processes of a job that hold the same elements share the work of writing them.
        reads: who reads what several processes of a job want of a checkpoint that they load. ``"all"``: each for itself.
            ``"broadcast"``: one of them, and sends it to the others. ``"per_node"``: one on each host, for those there.
            `ReadGroups`: one of each group. In these cases every process of the job loads the same checkpoints, and a
            load returns when all have loaded. ``"alone"``: this process loads without the others.
        when_busy: what `save_async` does while another save runs: ``"wait"`` for it, or copy at once and ``"queue"`` behind it;
            one waits so at most, and a third waits for the first.
        without_conditions: what a save does on storage without real directories whose puts cannot be conditional, or ignore conditions.
            ``"refuse"``: it raises AtomicityError. ``"marker"``: it looks before and after each put instead, which keeps a checkpoint
            whole as long as one process at a time saves to a location.
        bases: which checkpoints an updated copy may refer to, in a save and in a load: those ``"beside"`` it, in the same directory;
            or ``"anywhere"`` in the same storage. What a checkpoint from a stranger refers to is read, and nothing in it runs.
        handlers: by type, handlers that come before those of all plugins.
        plugins: plugins beside the installed ones.
        storage: options of storages, by URL scheme. They may be secrets, and are not shown.
        coordinator: the job that saves and loads together; None: the one that this process is part of.
        executor: the workers that hold the elements of leaves, where this process is their single controller; None: those that a
            plugin knows of, or else everything is done here. Not in a job of several processes.
        collectives: over which processes send each other what one has read; None: those of the framework that runs the job.
        observers: are told the phases of saves and loads; see `ckptcore.events`.
        saves: the asynchronous saves under way; not to be given.
    """

    durability: Literal["full", "none"] = "full"
    checksums: bool = True
    verify: bool = True
    threads: int | None = None
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)
    reads: Reads = "all"
    when_busy: Literal["wait", "queue"] = "wait"
    without_conditions: WithoutConditions = "refuse"
    bases: Literal["beside", "anywhere"] = "beside"
    handlers: Mapping[type, Handler] = field(default_factory=dict)
    plugins: Sequence[object] = ()
    storage: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict, repr=False)
    coordinator: Coordinator | None = None
    executor: Executor | None = None
    collectives: Collectives | None = None
    observers: Sequence[Observer] = ()
    saves: BackgroundSaves = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("durability", ("full", "none")),
            ("when_busy", ("wait", "queue")),
            ("without_conditions", WITHOUT_CONDITIONS),
            ("bases", ("beside", "anywhere")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Context({name}={getattr(self, name)!r}): expected one of {', '.join(map(repr, allowed))}"
                )
        if not isinstance(self.reads, ReadGroups) and self.reads not in READS:
            raise ValueError(
                f"Context(reads={self.reads!r}): expected one of {', '.join(map(repr, READS))}, or ReadGroups"
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"Context(threads={self.threads}): give at least 1, or None")
        # Made now, because two threads that ask for it first must get the same.
        object.__setattr__(self, "saves", BackgroundSaves())

    @cached_property
    def registry(self) -> Plugins:
        """The plugins in force."""
        return installed_plugins().having(self.plugins, self.handlers)

    @cached_property
    def io_threads(self) -> IOThreads:
        """The threads that move bytes."""
        return IOThreads(self.threads)

    @cached_property
    def conditions(self) -> Conditions:
        """What is known of the conditions of storages."""
        return Conditions(self.without_conditions)

    @cached_property
    def staging(self) -> StagingPool:
        """The memory that asynchronous saves copy into."""
        return StagingPool()

    @cached_property
    def known_roots(self) -> KnownRoots:
        """The roots of checkpoints that were opened last."""
        from ckptcore.commit.root import KnownRoots  # only who opens checkpoints to read parts of them needs it

        return KnownRoots()

    def exchange_key(self, location: object, *, job: Coordinator | None = None) -> str:
        """A key for the exchanges of an operation: the same on every rank that began as many at this location in this job.

        Args:
            location: where, with what is done there.
            job: whose exchanges they are, where that is not this process's job of now; None: it is.
        """
        found = self.coordinator
        if found is None:
            joined = self.registry.coordinator() if job is None else job
            found = joined if isinstance(joined, Rejoinable) else None
        return exchange_counts().key(found, str(location))

    def job(self) -> Coordinator:
        """The coordinator to agree through."""
        return self.coordinator or self.registry.coordinator()

    def workers(self) -> Executor | None:
        """The workers that hold the elements of leaves; None where this process controls none.

        Raises:
            ValueError: if an executor was given, and this process is one of several of a job.
        """
        size = self.job().size
        if self.executor is None:
            return self.registry.executor() if size == 1 else None
        if size > 1:
            raise ValueError(
                f"Context(executor={type(self.executor).__name__}(...)) is for a single controller, and this process is one of {size} "
                "of a job: leave the executor out, or give the Context of the controller a coordinator of one process"
            )
        return self.executor


@functools.cache
def default_context() -> Context:
    """The Context of calls that give none."""
    return Context()
