"""The collectives of a torch.distributed job, over process groups of their own: those of the program are not used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ckptcore.protocols import Channels
from ckptcore_torch.group_channels import DeviceChannels, HostChannels, Member, naming_peers
from ckptcore_torch.store_coordinator import store_of_job
from ckptcore_torch.transfers import CudaLane

__all__ = ["GlooCollectives", "NCCLCollectives", "collectives_of_job"]


class _StoreCollectives(ABC):
    """Collectives of the processes that share a store.

    Groups are made for each load, below a key of the store that no other has, and not registered with `torch.distributed`: nothing
    that the program sends mixes in, from whatever thread, and nothing is left behind.
    """

    def __init__(self, store: Any, rank: int, size: int, *, timeout_seconds: float = 600.0) -> None:
        """Connect nothing yet.

        Args:
            store: a `torch.distributed.Store` that every process of the job can reach.
            rank, size: which process of how many this is.
            timeout_seconds: how long a process waits for another.
        """
        self._store: Final[Any] = store
        self._rank: Final = rank
        self._size: Final = size
        self._timeout: Final = timedelta(seconds=timeout_seconds)

    @property
    def rank(self) -> int:
        """Which process this is."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._size

    def _members(self, key: str, groups: Sequence[Sequence[int]]) -> list[Member]:
        """Groups of these ranks, made in this order."""
        members = []
        for ranks in groups:
            # Keys of the store that only this group uses.
            store: Any = dist.PrefixStore(f"{key}/{','.join(map(str, ranks))}", self._store)  # type: ignore[attr-defined]  # it is exported at run time
            with naming_peers(ranks):
                members.append(Member(self._group(store, ranks.index(self._rank), len(ranks)), tuple(ranks)))
        return members

    @abstractmethod
    def _group(self, store: Any, number: int, size: int) -> Any:
        """A group of so many processes, of which this one has that number."""


class GlooCollectives(_StoreCollectives):
    """Sends host memory over gloo."""

    name = "torch.distributed over gloo"

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> Channels:
        """See `ckptcore.protocols.Collectives`; waits for the members of each group."""
        return HostChannels(self._members(key, groups))

    def _group(self, store: Any, number: int, size: int) -> Any:
        return dist.ProcessGroupGloo(store, number, size, self._timeout)


class NCCLCollectives(_StoreCollectives):
    """Sends over NCCL, between the current CUDA devices of the processes: host memory goes up to the device, and down again.

    Where a process is gone the watchdog of NCCL ends the others after the time that they wait for it, as it does in training.
    """

    name = "torch.distributed over NCCL"

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> Channels:
        """See `ckptcore.protocols.Collectives`; NCCL waits for the members of a group when it first sends."""
        device = torch.device("cuda", torch.cuda.current_device())
        return DeviceChannels(self._members(key, groups), self._rank, device, CudaLane(device), CudaLane(device))

    def _group(self, store: Any, number: int, size: int) -> Any:
        nccl: Any = dist.ProcessGroupNCCL  # only where torch was built with NCCL
        options = nccl.Options()
        options._timeout = self._timeout
        return nccl(store, number, size, options)


def collectives_of_job() -> GlooCollectives | NCCLCollectives | None:
    """Those of the job whose process group was initialized; None where none was, or one of one process.

    NCCL where the job has it and this process a CUDA device, else gloo, whatever the backend of the job. None too where neither
    is in this build of torch, and where the group has no store.
    """
    found = store_of_job()
    world = dist.group.WORLD
    if found is None or world is None:
        return None
    if "nccl" in str(dist.get_backend_config(world)) and dist.is_nccl_available() and torch.cuda.is_available():
        return NCCLCollectives(found, world.rank(), world.size())
    return GlooCollectives(found, world.rank(), world.size()) if dist.is_gloo_available() else None
