"""Context: the options of saves and loads, in groups. Immutable data; `ckptcore.runtime` has the running state."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from ckptcore.events import Observer
from ckptcore.model.tree import JSON
from ckptcore.planning.replicas import READS, ReadGroups, Reads, ReplicaOptions
from ckptcore.plugins import Handler
from ckptcore.protocols import Collectives, Coordinator, Executor

__all__ = [
    "Context",
    "IOOptions",
    "JobOptions",
    "MemoryOptions",
    "PluginOptions",
    "ReadGroups",
    "ReplicaOptions",
    "WithoutConditions",
    "default_context",
]


WithoutConditions: TypeAlias = Literal["refuse", "marker"]
"""What a save does on storage whose puts cannot be conditional, or ignore conditions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IOOptions:
    """Options of reading and writing bytes.

    Attributes:
        checksums: True to compute and record checksums in saves.
        verify: True to verify checksums in loads.
        threads: number of threads that move bytes; None: chosen for the machine.
        without_conditions: behaviour of saves on storage that has neither real directories nor conditional puts.
            ``"refuse"``: raise AtomicityError. ``"marker"``: read before and after each put instead, which keeps
            checkpoints whole as long as one process at a time saves to a location.
        bases: checkpoints that an updated copy may refer to, in a save and in a load. ``"beside"``: those in the same
            directory. ``"anywhere"``: those in the same storage. Checkpoints from untrusted sources can then make a
            load read other objects of that storage, but cannot run code.
    """

    checksums: bool = True
    verify: bool = True
    threads: int | None = None
    without_conditions: WithoutConditions = "refuse"
    bases: Literal["beside", "anywhere"] = "beside"

    def __post_init__(self) -> None:
        _expect("IOOptions", "without_conditions", self.without_conditions, get_args(WithoutConditions))
        _expect("IOOptions", "bases", self.bases, ("beside", "anywhere"))
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"IOOptions(threads={self.threads}): give at least 1, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Bounds on host memory, in bytes.

    Attributes:
        save_bytes: the most that an asynchronous save holds copied and not yet written; None: the whole state. With a
            bound, `save_async` blocks while it writes all but the last such part. One array may exceed it, alone.
        load_bytes: the most that a load reads ahead of the arrays it has built; None: all of it. One array may exceed
            it.
        exchange_bytes: the most that a load which is shared holds of what is on its way between processes; one element
            may exceed it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The job that saves and loads together, and how its processes share the work.

    Attributes:
        coordinator: the job; None: the one that this process is part of.
        executor: the workers that hold the elements of leaves, if this process is their single controller; None: those
            that a plugin finds, or this process itself. Not for a job of several processes.
        collectives: sends data that one process has read to others; None: those of the framework that runs the job.
        reads: the processes that read data which several processes want. ``"all"``: each for itself. ``"broadcast"``:
            one, which sends it to the others. ``"per_node"``: one on each host, for the processes of that host.
            `ReadGroups`: one of each group. In these cases every process of the job loads the same checkpoints, and a
            load returns when all have loaded. ``"alone"``: this process loads without the others.
        replicas: how processes that hold the same elements share the work of writing them.
    """

    coordinator: Coordinator | None = None
    executor: Executor[Any, Any] | None = None
    collectives: Collectives | None = None
    reads: Reads = "all"
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)

    def __post_init__(self) -> None:
        if not isinstance(self.reads, ReadGroups) and self.reads not in READS:
            raise ValueError(
                f"JobOptions(reads={self.reads!r}): expected one of {', '.join(map(repr, READS))}, or ReadGroups"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """Plugins and handlers besides those that are installed.

    Attributes:
        extra: plugins besides the installed ones.
        handlers: handlers by type; they precede those of all plugins.
    """

    extra: Sequence[object] = ()
    handlers: Mapping[type, Handler] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Options for saves and loads. Reuse a Context: its threads and staging memory are kept for the next operation.

    Attributes:
        durability: ``"full"``: a committed checkpoint survives a power failure. ``"none"``: it survives the end of the
            process, but may be missing or damaged after a power failure.
        io: checksums, threads, and conditions of storages.
        memory: bounds on host memory.
        job: the job that saves and loads together.
        plugins: plugins and handlers besides the installed ones.
        storage: options of storages, by URL scheme. They may be secrets, and are not part of the representation.
        when_busy: behaviour of `save_async` while another save runs. ``"wait"``: wait until it ends. ``"queue"``: copy
            now and write later; at most one save waits in this way, and a third waits for the first.
        observers: called with events of saves and loads; see `ckptcore.events`.
    """

    durability: Literal["full", "none"] = "full"
    io: IOOptions = field(default_factory=IOOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    job: JobOptions = field(default_factory=JobOptions)
    plugins: PluginOptions = field(default_factory=PluginOptions)
    storage: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict, repr=False)
    when_busy: Literal["wait", "queue"] = "wait"
    observers: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        _expect("Context", "durability", self.durability, ("full", "none"))
        _expect("Context", "when_busy", self.when_busy, ("wait", "queue"))
        for name, group in (
            ("io", IOOptions),
            ("memory", MemoryOptions),
            ("job", JobOptions),
            ("plugins", PluginOptions),
        ):
            if not isinstance(getattr(self, name), group):
                raise TypeError(f"Context({name}={getattr(self, name)!r}): expected {group.__name__}(...)")


def _expect(owner: str, name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{owner}({name}={value!r}): expected one of {', '.join(map(repr, allowed))}")


@functools.cache
def default_context() -> Context:
    """The Context of calls that give none."""
    return Context()
