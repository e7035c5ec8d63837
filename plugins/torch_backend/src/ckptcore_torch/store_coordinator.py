"""The processes of a torch.distributed job agreeing through its key-value store: no collective, no device, any thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from ckptcore.errors import CoordinationTimeoutError, PluginError

__all__ = ["StoreCoordinator", "StorelessCoordinator", "coordinator_of_job"]

_WITHOUT_STORE: Final = ("fake", "mpi")
"""Backends whose process groups have a store that keeps nothing (torch 2.13.0, ``distributed_c10d.py``: ``init_process_group``)."""
_FIRST_PAUSE_SECONDS: Final = 0.0005
_LONGEST_PAUSE_SECONDS: Final = 0.05


class StoreCoordinator:
    """Agrees through a `torch.distributed.Store` that every process of the job can reach.

    The store may be that of the job: ``torch.distributed.TCPStore`` lets one thread of a process wait at a time, so this
    never waits in the store and asks again instead.
    """

    def __init__(self, store: Any, rank: int, size: int, *, timeout_seconds: float = 600.0) -> None:
        """Touch nothing yet.

        Args:
            store: a `torch.distributed.Store`: that of the job, or one of its own.
            rank, size: which process of how many this is.
            timeout_seconds: how long an exchange waits for the others.
        """
        # Untyped, because torch says of its stores that they take and give text; they take and give bytes.
        self._store: Final[Any] = dist.PrefixStore("ckptcore", store)  # type: ignore[attr-defined]  # it is exported at run time
        self._rank: Final = rank
        self._size: Final = size
        self._timeout_seconds: Final = timeout_seconds

    @property
    def rank(self) -> int:
        """Which process this is."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._size

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """See `ckptcore.protocols.Coordinator`; only the leader waits, and removes what it got."""
        if self._rank:
            self._store.set(f"{key}/{self._rank}", payload)
            return None
        keys = {rank: f"{key}/{rank}" for rank in range(1, self._size)}
        self._wait(key, keys)
        gathered = [payload, *[bytes(self._store.get(name)) for name in keys.values()]]
        for name in keys.values():
            self._store.delete_key(name)
        return gathered

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """See `ckptcore.protocols.Coordinator`; the leader does not wait, and the last to come removes the payload."""
        if (payload is None) == (self._rank == 0):
            raise PluginError(f"broadcast {key!r}: the leader, and nobody else, gives the payload")
        told, came = f"{key}/told", f"{key}/came"
        if payload is not None:
            if self._size > 1:
                self._store.set(told, payload)
            return payload
        self._wait(key, {0: told})
        received = bytes(self._store.get(told))
        if self._store.add(came, 1) == self._size - 1:
            self._store.delete_key(told)
            self._store.delete_key(came)
        return received

    def _wait(self, key: str, names: dict[int, str]) -> None:
        """Wait until the ranks have set their names."""
        deadline = time.monotonic() + self._timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        missing = dict(names)
        while True:
            missing = {rank: name for rank, name in missing.items() if not self._store.check([name])}
            if not missing:
                return
            if time.monotonic() >= deadline:
                raise CoordinationTimeoutError(
                    f"after {self._timeout_seconds:g} s of the exchange {key!r}, {len(missing)} of {self._size} ranks had not come: "
                    f"{list(missing)}; look at what they were doing",
                    list(missing),
                )
            time.sleep(pause)
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
        raise self._refusal()

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Refuse.

        Raises:
            PluginError
        """
        raise self._refusal()

    def _refusal(self) -> PluginError:
        return PluginError(
            f"the process group of this job of {self.size} processes has the backend {self.backend!r}, which has no key-value "
            "store: expected another backend, or Context(coordinator=StoreCoordinator(store, rank, size)) with a store that all "
            "processes reach"
        )


def coordinator_of_job() -> StoreCoordinator | StorelessCoordinator | None:
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
    return StoreCoordinator(_store_of(world), world.rank(), world.size())


def _store_of(group: Any) -> Any:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_default_store()  # older versions have no public way
