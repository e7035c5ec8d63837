"""The processes of a torch.distributed job agreeing through its key-value store: no collective, no device, any thread."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch.distributed as dist

from ckptcore.errors import CoordinationTimeoutError, PluginError
from ckptcore_torch.store_meetings import StoreMeeting, meetings
from ckptcore_torch.watched_stores import WatchedStore, watched

__all__ = ["GroupCoordinator", "StoreCoordinator", "StorelessCoordinator", "coordinator_of_job", "store_of_job"]

T = TypeVar("T")

_WITHOUT_STORE: Final = ("fake", "mpi")
"""Backends whose process groups have a store that keeps nothing (torch 2.13.0, ``distributed_c10d.py``: ``init_process_group``)."""
_FIRST_PAUSE_SECONDS: Final = 0.0005
_LONGEST_PAUSE_SECONDS: Final = 0.05


class StoreCoordinator:
    """Agrees through a `torch.distributed.Store` that every process of the job can reach.

    The store may be that of the job: ``torch.distributed.TCPStore`` lets one thread of a process wait at a time, so this
    never waits in the store and asks again instead. It may hold what a former life of the job left, which is not read; and it may
    fail or hang, which is told within the deadline.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, timeout_seconds: float = 600.0, meeting: StoreMeeting | None = None
    ) -> None:
        """Touch nothing yet.

        Args:
            store: a `torch.distributed.Store`: that of the job, or one of its own.
            rank, size: which process of how many this is.
            timeout_seconds: how long an exchange waits for the others.
            meeting: of this process with the leader; None: the one that all coordinators over this store have.
        """
        # Untyped, because torch says of its stores that they take and give text; they take and give bytes.
        self._given: Final[Any] = store
        self._store: Final[Any] = _own_part(store)
        self._rank: Final = rank
        self._size: Final = size
        self._timeout_seconds: Final = timeout_seconds
        self._meeting: Final = meeting or meetings().of(store, self._store, rank, size)

    @classmethod
    def of_job(cls, *, timeout_seconds: float = 600.0) -> StoreCoordinator:
        """The coordinator of the job whose process group was initialized, with a deadline of your choice.

        Raises:
            PluginError: if there is no process group, or its backend has no store.
        """
        world = dist.group.WORLD
        if world is None:
            raise PluginError(
                "this process is part of no job of torch.distributed: expected a call of init_process_group() before, found none"
            )
        backend = dist.get_backend(world)
        if backend in _WITHOUT_STORE:
            raise _without_store(backend, world.size())
        store = _store_of(world)
        rank, size = world.rank(), world.size()
        # The group stands for the life of the job: its store may be another object each time that it is asked for.
        meeting = meetings().of(world, _own_part(store), rank, size)
        return cls(store, rank, size, timeout_seconds=timeout_seconds, meeting=meeting)

    @property
    def rank(self) -> int:
        """Which process this is."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._size

    def within(self, ranks: Sequence[int], *, deadlines: int = 1) -> StoreCoordinator:
        """See `ckptcore.protocols.GathersInGroups`."""
        place, seconds = ranks.index(self._rank), self._timeout_seconds * deadlines
        return StoreCoordinator(self._given, place, len(ranks), timeout_seconds=seconds, meeting=self._meeting)

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """See `ckptcore.protocols.Coordinator`; only the leader waits, and removes what it got."""
        if self._size == 1:
            return [payload]
        return self._exchange(key, lambda store, place: self._gather(store, key, place, payload))

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """See `ckptcore.protocols.Coordinator`; the leader does not wait, and the last to come removes the payload."""
        if (payload is None) == (self._rank == 0):
            raise PluginError(f"broadcast {key!r}: the leader, and nobody else, gives the payload")
        if payload is None:
            return self._exchange(key, lambda store, place: self._receive(store, key, place))
        if self._size > 1:
            told = payload
            self._exchange(key, lambda store, place: self._tell(store, place, told))
        return payload

    def _exchange(self, key: str, exchange: Callable[[WatchedStore, str], T]) -> T:
        """Run an exchange under keys of this life of the job."""
        timeout = self._timeout_seconds

        def run(store: WatchedStore) -> T:
            return exchange(store, f"{self._meeting.life(store, key, timeout)}/{key}")

        return watched(self._store, key, self._rank, timeout, run)

    def _gather(self, store: WatchedStore, key: str, place: str, payload: bytes) -> Sequence[bytes] | None:
        if self._rank:
            store.set(f"{place}/{self._rank}", payload)
            return None
        names = {rank: f"{place}/{rank}" for rank in range(1, self._size)}
        try:
            self._wait(store, key, names)
        finally:
            if self._size == self._meeting.size:  # else it was a group of the job, and others may be to come
                self._meeting.waited()
        gathered = [payload, *[store.get(name) for name in names.values()]]
        for name in names.values():
            store.remove(name)
        return gathered

    def _tell(self, store: WatchedStore, place: str, payload: bytes) -> None:
        store.set(f"{place}/told", payload)
        self._meeting.wait_for_all(store, self._timeout_seconds)

    def _receive(self, store: WatchedStore, key: str, place: str) -> bytes:
        told, came = f"{place}/told", f"{place}/came"
        self._wait(store, key, {0: told})
        received = store.get(told)
        if store.add(came, 1) == self._size - 1:
            store.remove(told)
            store.remove(came)
        return received

    def _wait(self, store: WatchedStore, key: str, names: Mapping[int, str]) -> None:
        """Wait until the ranks have set their names."""
        deadline = time.monotonic() + self._timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        missing = dict(names)
        while True:
            missing = {rank: name for rank, name in missing.items() if not store.has(name)}
            if not missing:
                return
            if time.monotonic() >= deadline:
                raise CoordinationTimeoutError(
                    f"after {self._timeout_seconds:g} s of the exchange {key!r}, {len(missing)} of {self._size} ranks had not come: "
                    f"{list(missing)}; look at what they were doing",
                    list(missing),
                )
            store.pause(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class StorelessCoordinator:
    """Knows its rank, and cannot agree: of a process group without a store. A load of one process needs no more than that.

    Attributes:
        backend: of the group.
        rank, size: which process of how many this is.
    """

    backend: str
    rank: int
    size: int

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Refuse.

        Raises:
            PluginError
        """
        raise _without_store(self.backend, self.size)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Refuse.

        Raises:
            PluginError
        """
        raise _without_store(self.backend, self.size)


def coordinator_of_job() -> GroupCoordinator | StorelessCoordinator | None:
    """The coordinator of the job whose process group was initialized; None where none was, or one of one process.

    It is over the store through which the processes of the group met, whatever the backend of the group: nothing is sent
    by its collectives. Any thread.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return None
    backend = dist.get_backend(world)
    if backend in _WITHOUT_STORE:
        return StorelessCoordinator(backend, world.rank(), world.size())
    return _job_coordinators().of(world)


class GroupCoordinator(StoreCoordinator):
    """The coordinator of a process group, the same for as long as the group is: a `ckptcore.protocols.Rejoinable`.

    A program that ends its group and makes another one, with processes that it had before and others, goes on in that one.
    """

    def __init__(self, store: Any, rank: int, size: int, *, meeting: StoreMeeting, incarnation: int) -> None:
        """Touch nothing yet.

        Args:
            store, rank, size, meeting: as of `StoreCoordinator`.
            incarnation: see there.
        """
        super().__init__(store, rank, size, meeting=meeting)
        self._incarnation: Final = incarnation

    @property
    def incarnation(self) -> int:
        """Which one of the groups that this process was in and saved or loaded with, one after the other, from 1."""
        return self._incarnation


class _GroupCoordinators:
    """The coordinators of the groups of this process; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: MutableMapping[Any, GroupCoordinator] = weakref.WeakKeyDictionary()
        self._made = 0

    def of(self, group: Any) -> GroupCoordinator:
        with self._lock:
            found = self._known.get(group)
            if found is None:
                self._made += 1
                store, rank, size = _store_of(group), group.rank(), group.size()
                meeting = meetings().of(group, _own_part(store), rank, size)
                found = GroupCoordinator(store, rank, size, meeting=meeting, incarnation=self._made)
                self._known[group] = found
            return found


@functools.cache
def _job_coordinators() -> _GroupCoordinators:
    return _GroupCoordinators()


def _without_store(backend: str, size: int) -> PluginError:
    return PluginError(
        f"the process group of this job of {size} processes has the backend {backend!r}, which has no key-value store: expected "
        "another backend, or Context(job=JobOptions(coordinator=StoreCoordinator(store, rank, size))) with a store that all processes reach"
    )


def _own_part(store: Any) -> Any:
    return dist.PrefixStore("ckptcore", store)  # type: ignore[attr-defined]  # it is exported at run time


def store_of_job() -> Any:
    """The store through which the processes of the job met; None where there is no job of several, or its store keeps nothing."""
    world = dist.group.WORLD
    if world is None or world.size() == 1 or dist.get_backend(world) in _WITHOUT_STORE:
        return None
    return _store_of(world)


def _store_of(world: Any) -> Any:
    """The store of the default group; a group that is written in Python has none of its own (torch 2.13.0, ``get_group_store``)."""
    found = world.get_group_store() if hasattr(world, "get_group_store") else None  # older versions have no public way
    return dist.distributed_c10d._get_default_store() if found is None else found
