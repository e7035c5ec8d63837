"""Collectives of a torch.distributed job, over separate process groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ckptcore.protocols import Channels
from ckptcore_torch.group_channels import DeviceChannels, HostChannels, JoinedGroup, named_rank_errors
from ckptcore_torch.store_coordinator import store_of_job
from ckptcore_torch.transfers import CudaSideStream


class _StoreCollectives(ABC):
    """Collectives between processes that share a store.

    Each load creates separate process groups, under a unique key of the store and without
    registration in `torch.distributed`. Therefore their messages do not mix with messages of the
    program from other threads, and no state remains after the load.
    """

    def __init__(self, store: Any, rank: int, size: int, *, timeout_seconds: float = 600.0) -> None:
        """Do no I/O.

        Args:
            store: a `torch.distributed.Store` that every process of the job can reach.
            rank, size: rank of this process and number of processes.
            timeout_seconds: maximum time that an operation waits for another process.
        """
        self._store: Final[Any] = store
        self._rank: Final = rank
        self._size: Final = size
        self._timeout: Final = timedelta(seconds=timeout_seconds)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._size

    def _join_groups(self, key: str, groups: Sequence[Sequence[int]]) -> list[JoinedGroup]:
        """Create the groups of these ranks, in this order."""
        joined = []
        for ranks in groups:
            # A unique prefix for this group. PrefixStore is exported only at run time.
            store: Any = dist.PrefixStore(f"{key}/{','.join(map(str, ranks))}", self._store)  # type: ignore[attr-defined]
            with named_rank_errors(ranks):
                joined.append(JoinedGroup(self._group(store, ranks.index(self._rank), len(ranks)), tuple(ranks)))
        return joined

    @abstractmethod
    def _group(self, store: Any, number: int, size: int) -> Any:
        """Create a process group of `size` processes, in which this process has the rank `number`."""


class GlooCollectives(_StoreCollectives):
    """Sends host memory with gloo."""

    name = "torch.distributed over gloo"

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> Channels:
        """Connect the groups, and wait for their members. See `ckptcore.protocols.Collectives`."""
        return HostChannels(self._join_groups(key, groups))

    def _group(self, store: Any, number: int, size: int) -> Any:
        return dist.ProcessGroupGloo(store, number, size, self._timeout)


class NCCLCollectives(_StoreCollectives):
    """Sends with NCCL between the current CUDA devices of the processes, through device memory.

    If a process fails, the NCCL watchdog ends the others after the timeout, as in training.
    """

    name = "torch.distributed over NCCL"

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> Channels:
        """Connect the groups.

        NCCL waits for the members at the first broadcast. See `ckptcore.protocols.Collectives`.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        return DeviceChannels(
            self._join_groups(key, groups), self._rank, device, CudaSideStream(device), CudaSideStream(device)
        )

    def _group(self, store: Any, number: int, size: int) -> Any:
        nccl: Any = dist.ProcessGroupNCCL  # missing in builds without NCCL
        options = nccl.Options()
        options._timeout = self._timeout
        return nccl(store, number, size, options)


def collectives_of_job() -> GlooCollectives | NCCLCollectives | None:
    """Return the collectives of the initialized process group.

    They use NCCL if the backend of the group includes NCCL and this process has a CUDA device.
    Otherwise they use gloo, even if the group does not. Return None if no group is initialized, if
    the group has only one process or no store, or if gloo is needed and this build of torch lacks
    it.
    """
    found = store_of_job()
    world = dist.group.WORLD
    if found is None or world is None:
        return None
    if "nccl" in str(dist.get_backend_config(world)) and dist.is_nccl_available() and torch.cuda.is_available():
        return NCCLCollectives(found, world.rank(), world.size())
    return GlooCollectives(found, world.rank(), world.size()) if dist.is_gloo_available() else None
