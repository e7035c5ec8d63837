"""Coordinators of a torch.distributed job over its key-value store. They use no collectives and no devices."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch.distributed as dist

from ckptcore.errors import CoordinationTimeoutError, PluginError
from ckptcore_torch.store_handshakes import (
    StoreHandshake,
    WatchedStore,
    handshakes,
    run_watched,
)

T = TypeVar("T")

_WITHOUT_STORE: Final = ("fake", "mpi")
"""Backends whose store does not keep values (torch 2.13.0, ``distributed_c10d.py``: ``init_process_group``)."""

_COPIED_BYTES: Final = 1 << 16
"""Up to this size in all, each rank gets its own copy of a broadcast payload."""


_REPORT_SECONDS: Final = 5.0
"""Maximum time in seconds that a report of the awaited ranks takes, if the store does not answer."""


class StoreCoordinator:
    """Coordinator over a `torch.distributed.Store` that every process of the job can reach.

    The store can be the store of the job. The coordinator waits on connections of its own, because
    ``torch.distributed.TCPStore`` allows only one thread of a process to wait at a time on each connection.
    It polls stores that cannot be cloned. It ignores keys of an earlier run of the job. If the store fails, an
    exchange raises an error immediately. If the store does not answer a request, the exchange raises an
    error after the timeout. Thread-safe.

    Attributes:
        rank: rank of this process.
        size: number of processes.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout_seconds: float = 600.0,
        handshake: StoreHandshake | None = None,
    ) -> None:
        """Create the coordinator. Does no I/O.

        Args:
            store: a `torch.distributed.Store` that every process of the job can reach.
            rank, size: rank of this process and number of processes.
            timeout_seconds: maximum time that an exchange waits for other ranks, and for the answer
                to one request to the store.
            handshake: handshake of this process with the leader; None for the handshake that all
                coordinators over this store share.
        """
        # Any, because the type annotations of torch say str for values, which are bytes.
        self._unprefixed: Final[Any] = store
        self.rank: Final = rank
        self.size: Final = size
        self._timeout_seconds: Final = timeout_seconds
        self._handshake: Final = handshake or handshakes().of(store, _with_prefix(store), rank, size)
        self._awaited: Final[dict[str, Mapping[int, str]]] = {}  # names by rank, by key of a running exchange

    @classmethod
    def of_job(cls, *, timeout_seconds: float = 600.0) -> StoreCoordinator:
        """Return a new coordinator of the initialized process group, with its own timeout.

        Raises:
            PluginError: if there is no process group, or its backend has no store.
        """
        world = dist.group.WORLD
        if world is None:
            raise PluginError("torch.distributed is not initialized in this process: call init_process_group() first")
        backend = dist.get_backend(world)
        if backend in _WITHOUT_STORE:
            raise _without_store(backend, world.size())
        store = _store_of(world)
        rank, size = world.rank(), world.size()
        # Look up by the group: `get_group_store` can return a new store object on each call.
        handshake = handshakes().of(world, _with_prefix(store), rank, size)
        return cls(store, rank, size, timeout_seconds=timeout_seconds, handshake=handshake)

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> StoreCoordinator:
        """Return a coordinator of some ranks. See `ckptcore.protocols.GathersInGroups`."""
        rank, seconds = ranks.index(self.rank), self._timeout_seconds * deadlines
        return StoreCoordinator(self._unprefixed, rank, len(ranks), timeout_seconds=seconds, handshake=self._handshake)

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Gather payloads at the leader. See `ckptcore.protocols.Coordinator`.

        Only the leader waits for other ranks, and then removes their payloads. In its first
        exchange, every other rank also waits until the leader answers the handshake.
        """
        if self.size == 1:
            return [payload]
        return self._exchange(key, lambda store, prefix: self._gather(store, key, prefix, payload))

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Send the leader's payload to all. See `ckptcore.protocols.Coordinator`.

        The leader does not wait, with one exception: in its first broadcast, rank 0 of the job
        waits until all ranks have finished the handshake, unless it has waited for all ranks in a
        gather before. The ranks that receive the payload remove it.
        """
        if (payload is None) == (self.rank == 0):
            raise PluginError(f"broadcast {key!r}: the leader must pass a payload, and other ranks must not")
        if payload is None:
            return self._exchange(key, lambda store, prefix: self._receive(store, key, prefix))
        if self.size > 1:
            given = payload
            self._exchange(key, lambda store, prefix: self._send(store, prefix, given))
        return payload

    def awaited(self, key: str) -> Sequence[int]:
        """Return the ranks for which a running exchange waits. See `ckptcore.protocols.ReportsAwaited`."""
        names = self._awaited.get(key, {})

        def missing(store: WatchedStore) -> Sequence[int]:
            return [rank for rank, name in names.items() if not store.has(name)]

        try:
            ranks = run_watched(self._handshake.watched(key), key, self.rank, _REPORT_SECONDS, missing)
        except CoordinationTimeoutError:
            return ()
        return ranks if self._awaited.get(key) is names else ()

    def _exchange(self, key: str, exchange: Callable[[WatchedStore, str], T]) -> T:
        """Run an exchange with the key prefix of this run of the job."""
        timeout = self._timeout_seconds

        def run(store: WatchedStore) -> T:
            return exchange(store, f"{self._handshake.run_id(store, key, timeout)}/{key}")

        return run_watched(self._handshake.watched(key), key, self.rank, timeout, run)

    def _gather(self, store: WatchedStore, key: str, prefix: str, payload: bytes) -> Sequence[bytes] | None:
        if self.rank:
            store.set(f"{prefix}/{self.rank}", payload)
            return None
        names = {rank: f"{prefix}/{rank}" for rank in range(1, self.size)}
        try:
            self._wait(store, key, names)
        finally:
            # In a group of only some ranks, the other ranks may not have finished the handshake yet.
            if self.size == self._handshake.size:
                self._handshake.waited()
        gathered = [payload, *store.get_all([*names.values()])]
        for name in names.values():
            store.remove(name)
        return gathered

    def _send(self, store: WatchedStore, prefix: str, payload: bytes) -> None:
        """Set a name for each rank. A small payload is its value; a large one is stored once under ``payload``.

        Each rank waits for its own name, so that it can end its wait: see `WatchedStore.abandon`.
        """
        is_copied = len(payload) * (self.size - 1) <= _COPIED_BYTES
        value = _COPY + payload if is_copied else _SHARED
        if not is_copied:
            store.set(f"{prefix}/payload", payload)
        store.set_all({f"{prefix}/{rank}": value for rank in range(1, self.size)})
        self._handshake.wait_for_all(store, self._timeout_seconds)

    def _receive(self, store: WatchedStore, key: str, prefix: str) -> bytes:
        own, shared, counter = f"{prefix}/{self.rank}", f"{prefix}/payload", f"{prefix}/received"
        self._wait(store, key, {0: own})
        received = store.get(own)
        store.remove(own)
        if received != _SHARED:
            return received[len(_COPY) :]
        received = store.get(shared)
        if store.add(counter, 1) == self.size - 1:
            store.remove(shared)
            store.remove(counter)
        return received

    def _wait(self, store: WatchedStore, key: str, names: Mapping[int, str]) -> None:
        """Wait until each rank has set its name in the store."""
        self._awaited[key] = names
        try:
            if store.wait([*names.values()], self._timeout_seconds):
                return
            missing = [rank for rank, name in names.items() if not store.has(name)]
        finally:
            del self._awaited[key]
        if missing:
            raise CoordinationTimeoutError(
                f"{len(missing)} of {self.size} ranks did not reach the exchange {key!r} within "
                f"{self._timeout_seconds:g} s: {missing}; check their logs. If they were only late, set "
                "Context(job=JobOptions(coordinator=StoreCoordinator.of_job(timeout_seconds=...))) on every rank",
                missing,
            )


_COPY: Final = b"c"
_SHARED: Final = b"s"


@dataclass(frozen=True, slots=True)
class StorelessCoordinator:
    """Coordinator of a process group without a store. Every exchange raises an error.

    Loads that each process does alone still work, because they need only the rank.

    Attributes:
        backend: backend of the group.
        rank, size: rank of this process and number of processes.
    """

    backend: str
    rank: int
    size: int

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Raise an error.

        Raises:
            PluginError: always, because there is no store.
        """
        raise _without_store(self.backend, self.size)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Raise an error.

        Raises:
            PluginError: always, because there is no store.
        """
        raise _without_store(self.backend, self.size)


def coordinator_of_job() -> GroupCoordinator | StorelessCoordinator | None:
    """Return the coordinator of the initialized process group. Thread-safe.

    The coordinator uses the store of the group. If the backend of the group has no store, every
    exchange of the coordinator raises an error. Return None if no group is initialized, or if the
    group has only one process.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return None
    backend = dist.get_backend(world)
    if backend in _WITHOUT_STORE:
        return StorelessCoordinator(backend, world.rank(), world.size())
    return _job_coordinators().of(world)


class GroupCoordinator(StoreCoordinator):
    """Coordinator of a process group, which has only one such object. A `ckptcore.protocols.Rejoinable`.

    A program can destroy its group and create another one with some of the same processes. Saves
    and loads then use the new group.
    """

    def __init__(self, store: Any, rank: int, size: int, *, handshake: StoreHandshake, incarnation: int) -> None:
        """Create the coordinator. Does no I/O.

        Args:
            store, rank, size, handshake: see `StoreCoordinator`.
            incarnation: number of the group in this process.
        """
        super().__init__(store, rank, size, handshake=handshake)
        self.incarnation: Final = incarnation
        """Number of this group among the groups that this process has used, from 1."""


class _GroupCoordinators:
    """Coordinators of the groups of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: MutableMapping[Any, GroupCoordinator] = weakref.WeakKeyDictionary()
        self._count = 0

    def of(self, group: Any) -> GroupCoordinator:
        with self._lock:
            coordinator = self._known.get(group)
            if coordinator is None:
                self._count += 1
                store, rank, size = _store_of(group), group.rank(), group.size()
                handshake = handshakes().of(group, _with_prefix(store), rank, size)
                coordinator = GroupCoordinator(store, rank, size, handshake=handshake, incarnation=self._count)
                self._known[group] = coordinator
            return coordinator


@functools.cache
def _job_coordinators() -> _GroupCoordinators:
    return _GroupCoordinators()


def _without_store(backend: str, size: int) -> PluginError:
    return PluginError(
        f"the process group of this job of {size} processes has the backend {backend!r}, which "
        "has no key-value store: use another backend, or "
        "Context(job=JobOptions(coordinator=StoreCoordinator(store, rank, size))) with a "
        "store that all processes can reach"
    )


def _with_prefix(store: Any) -> Any:
    return dist.PrefixStore("ckptcore", store)  # type: ignore[attr-defined]  # exported only at run time


def store_of_job() -> Any:
    """Return the store of the initialized process group.

    Return None if no group is initialized, or if it has only one process or no usable store.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or dist.get_backend(world) in _WITHOUT_STORE:
        return None
    return _store_of(world)


def _store_of(world: Any) -> Any:
    """Return the store of a process group, or the default store if torch does not return it."""
    # Older versions of torch lack the method. It returns None for a group that is implemented in
    # Python (torch 2.13.0).
    store = world.get_group_store() if hasattr(world, "get_group_store") else None
    return dist.distributed_c10d._get_default_store() if store is None else store
