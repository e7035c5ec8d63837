"""Context: the options of saves and loads, in groups. Immutable data; `ckptcore.runtime` has the running state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, Final, Literal, TypeAlias, get_args

from ckptcore.builtin import SingleProcess
from ckptcore.events import Observer
from ckptcore.model.tree import JSON
from ckptcore.planning.partition import ReplicaOptions
from ckptcore.plugins import Handler
from ckptcore.protocols import Collectives, Coordinator, Executor
from ckptcore.records import dataclass

__all__ = [
    "Context",
    "IOOptions",
    "JobOptions",
    "MemoryOptions",
    "PluginOptions",
    "ReadGroups",
    "Reads",
    "ReplicaOptions",
    "SingleProcess",
    "WithoutConditions",
    "default_context",
]


WithoutConditions: TypeAlias = Literal["refuse", "marker"]
"""Behaviour of a save on a storage that refuses conditional puts, or ignores their conditions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IOOptions:
    """Options of reading and writing bytes.

    Attributes:
        checksums: True to compute and record checksums in saves.
        verify: True to verify checksums in loads.
        threads: number of threads that move bytes; None: a number that suits the machine.
        without_conditions: behaviour of saves on a storage that has neither real directories nor conditional puts.
            ``"refuse"``: raise AtomicityError. ``"marker"``: read before and after each put instead. This is safe as
            long as only one process at a time saves to a location.
        bases: checkpoints that an update may refer to, in saves and loads. ``"siblings"``: checkpoints in the same
            directory as the update. ``"anywhere"``: checkpoints in the same storage. With ``"anywhere"``, a checkpoint
            from an untrusted source can make a load read other objects of that storage, but cannot run code.
    """

    checksums: bool = True
    verify: bool = True
    threads: int | None = None
    without_conditions: WithoutConditions = "refuse"
    bases: Literal["siblings", "anywhere"] = "siblings"

    def __post_init__(self) -> None:
        _expect("IOOptions", "without_conditions", self.without_conditions, get_args(WithoutConditions))
        _expect("IOOptions", "bases", self.bases, ("siblings", "anywhere"))
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"IOOptions(threads={self.threads}): give at least 1, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Bounds on host memory, in bytes.

    Attributes:
        save_bytes: maximum size of data that an asynchronous save has copied and not yet written; None: the whole
            state. With a bound, `save_async` returns once the last part, of at most this size, is copied. An array that
            exceeds the bound is copied alone.
        load_bytes: maximum size of data that a load reads before it builds leaves from the data; None: all data. An
            array that exceeds the bound is read alone.
        exchange_bytes: maximum size of data in transit between the processes of a shared load. A single element that is
            larger is sent nevertheless.
        keep_staging: True to keep the memory into which an asynchronous save copied the state, for the next save.
    """

    save_bytes: int | None = None
    load_bytes: int | None = None
    exchange_bytes: int = 256 << 20
    keep_staging: bool = True

    def __post_init__(self) -> None:
        for name in ("save_bytes", "load_bytes", "exchange_bytes"):
            value = getattr(self, name)
            is_bounded = name == "exchange_bytes"
            if (value is None and is_bounded) or (value is not None and value <= 0):
                more = "" if is_bounded else ", or None for no bound"
                raise ValueError(f"MemoryOptions({name}={value}): give a number of bytes above 0{more}")


@dataclass(frozen=True, slots=True)
class ReadGroups:
    """Groups of processes that share reads: one process reads data that several members request, and sends it to them.

    Attributes:
        groups: the ranks of each group. A rank is in at most one group. A rank without a group reads for itself.
    """

    groups: tuple[tuple[int, ...], ...]

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """Accept any sequences of ranks."""
        sorted_groups = tuple([tuple(sorted(group)) for group in groups])
        ranks = [rank for group in sorted_groups for rank in group]
        if len(set(ranks)) != len(ranks) or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ValueError(f"ReadGroups({groups!r}): give each rank once, in one group, as an int of 0 or more")
        object.__setattr__(self, "groups", sorted_groups)


Reads: TypeAlias = Literal["all", "alone", "broadcast", "per_node"] | ReadGroups
"""The processes that read: every process for itself ("all"), this process without the others ("alone"), one process of
the job ("broadcast"), one process of each host ("per_node"), or one process of each group (`ReadGroups`)."""

_READS: Final = ("all", "alone", "broadcast", "per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The job that saves and loads together, and how its processes share the work.

    Attributes:
        coordinator: the coordinator of the job; None: the coordinator of the job that this process belongs to.
            `SingleProcess()`: this process saves and loads without the other processes of its job.
        executor: the workers that hold the elements of leaves, if this process is their single controller; None: the
            workers that a plugin finds, or this process itself. Not for a job of several processes.
        collectives: sends data that one process has read to other processes; None: the collectives of the framework.
        reads: which processes read data that several processes need. ``"all"``: every process. ``"broadcast"``: one
            process, which sends it to the others. ``"per_node"``: one process of each host, for that host.
            `ReadGroups`: one process of each group. ``"alone"``: this process loads without the other processes. With
            ``"broadcast"``, ``"per_node"`` and `ReadGroups`, every process of the job must load the same checkpoints,
            and a load returns when all processes have loaded.
        replicas: how processes that hold the same elements share the work of writing them.
    """

    coordinator: Coordinator | None = None
    executor: Executor | None = None
    collectives: Collectives | None = None
    reads: Reads = "all"
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)

    def __post_init__(self) -> None:
        if not isinstance(self.reads, ReadGroups) and self.reads not in _READS:
            raise ValueError(
                f"JobOptions(reads={self.reads!r}): expected one of {', '.join(map(repr, _READS))}, or ReadGroups"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """Plugins and handlers in addition to the installed plugins.

    Attributes:
        extra: additional plugins.
        handlers: handlers by type. They take precedence over the handlers of plugins.
    """

    extra: Sequence[object] = ()
    handlers: Mapping[type, Handler] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Options of saves and loads. Reuse a Context: its threads and staging memory are kept for the next operation.

    Attributes:
        durability: ``"full"``: a committed checkpoint survives a power failure. ``"none"``: it survives the end of the
            process, but may be missing or damaged after a power failure.
        io: checksums, threads, conditional puts, and bases.
        memory: bounds on host memory.
        job: the job that saves and loads together.
        plugins: plugins and handlers in addition to the installed plugins.
        storage: options of storages, by URL scheme. They may contain secrets, so ``repr`` omits them.
        when_busy: behaviour of `save_async` while another save runs. ``"wait"``: block until it ends. ``"queue"``: copy
            now and write later. At most one save is queued; another call blocks until the running save ends.
        observers: functions that are called with the events of saves, loads, deletions and uploads; see
            `ckptcore.events`.
    """

    durability: Literal["full", "none"] = "full"
    io: IOOptions = field(default_factory=IOOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    job: JobOptions = field(default_factory=JobOptions)
    plugins: PluginOptions = field(default_factory=PluginOptions)
    storage: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict, repr=False)
    when_busy: Literal["wait", "queue"] = "wait"
    observers: Sequence[Observer] = ()

    def __reduce__(self) -> tuple[Callable[..., Context], tuple[object, ...]]:
        """Pickle or copy the options, without the threads and memory that belong to this object."""
        if self is default_context():
            return default_context, ()
        return _of_options, (type(self), {option.name: getattr(self, option.name) for option in fields(self)})

    def of_another_process(self) -> Context:
        """Return the options for another process, without the observers and the job of this process."""
        if self is default_context():
            return self
        job = replace(self.job, executor=None, collectives=None)
        if job.coordinator is not None:
            job = replace(job, coordinator=SingleProcess(), reads="all")
        return replace(self, job=job, observers=())

    def __deepcopy__(self, memo: object) -> Context:
        """Return the Context itself, because its options do not change and a coordinator cannot be copied."""
        return self

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
                raise TypeError(
                    f"Context({name}={getattr(self, name)!r}): expected ckptcore.context.{group.__name__}(...)"
                )


def _of_options(kind: Callable[..., Context], options: Mapping[str, Any]) -> Context:
    return kind(**options)


def _expect(owner: str, name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{owner}({name}={value!r}): expected one of {', '.join(map(repr, allowed))}")


@functools.cache
def default_context() -> Context:
    """Return the Context of calls that pass no Context."""
    return Context()
