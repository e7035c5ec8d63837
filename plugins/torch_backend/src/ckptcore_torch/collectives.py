"""Collectives of a torch.distributed job, over separate process groups, and channels that send bytes over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from ckptcore.errors import RankFailedError, converts_errors
from ckptcore.model import HostArray, Pending
from ckptcore.protocols import Channels
from ckptcore_torch.store_coordinator import store_of_job
from ckptcore_torch.transfers import CudaSideStream, DeviceEvent, SideStream


class CollectiveWork(Protocol):
    """A running collective, such as a `torch.distributed.Work`."""

    def wait(self) -> bool:
        """Wait for the collective: on the CPU in this thread, on CUDA in the current stream."""
        ...


class ProcessGroup(Protocol):
    """The methods that `torch.distributed.ProcessGroupGloo` and ``ProcessGroupNCCL`` have in common."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveWork:
        """Start a broadcast from the member with the rank `root` in the group."""
        ...

    def abort(self) -> None:
        """Close the connections, also during a transfer. Transfers of the other members then fail."""
        ...


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A process group that this process has joined.

    Attributes:
        group: the process group.
        ranks: job ranks of its members, in the order of the group.
    """

    group: ProcessGroup
    ranks: tuple[int, ...]

    def broadcast(self, tensor: torch.Tensor, sender: int) -> CollectiveWork:
        """Start a broadcast from a rank of the job."""
        return self.group.broadcast(tensor, self.ranks.index(sender))


class HostChannels:
    """Sends host memory directly, for process groups that support it. A `ckptcore.protocols.Channels`."""

    depth = 2
    """One broadcast for each of gloo's two threads (torch 2.13.0, ``ProcessGroupGloo.hpp``: ``Options::threads``)."""

    def __init__(self, groups: Sequence[JoinedGroup]) -> None:
        """Take ownership of these groups."""
        self._groups = list(groups)

    def memory(self, nbytes: int) -> HostArray:
        """Allocate memory."""
        array: HostArray = torch.empty(nbytes, dtype=torch.uint8).numpy()
        return array

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Start a broadcast, which runs on a thread of the process group."""
        joined = self._groups[group]
        with named_rank_errors(joined.ranks):
            return _HostBroadcast(joined, joined.broadcast(torch.from_numpy(data), sender))

    def close(self) -> None:
        """Abort the groups."""
        # Dropping the references is not enough, because a running transfer can keep a group alive.
        for joined in self._groups:
            joined.group.abort()
        self._groups.clear()


@dataclass(frozen=True, slots=True)
class _HostBroadcast:
    joined: JoinedGroup
    work: CollectiveWork

    def result(self) -> None:
        """Wait for the broadcast."""
        with named_rank_errors(self.joined.ranks):
            self.work.wait()


class DeviceChannels:
    """Sends through device memory, for process groups that accept only that, such as NCCL.

    It uses two streams in addition to the caller's own. One copies a message to the device while
    the previous message is sent. The other copies received messages to the host. Messages of
    different groups are also sent one after another, because concurrent collectives of several
    groups can deadlock on a device (NCCL, "Using multiple NCCL communicators concurrently").
    """

    depth = 3
    """Three messages run concurrently: one is copied to the device, one is sent, one is copied to the host."""

    def __init__(
        self, groups: Sequence[JoinedGroup], rank: int, device: torch.device, up: SideStream, down: SideStream
    ) -> None:
        """Take ownership of these groups.

        Args:
            groups: the groups.
            rank: rank of this process in the job.
            device: device of the groups.
            up, down: streams for copies to and from the device.
        """
        self._groups = list(groups)
        self._rank = rank
        self._device = device
        self._up = up
        self._down = down
        self._sent: DeviceEvent | None = None

    def memory(self, nbytes: int) -> HostArray:
        """Allocate pinned memory, which the device copies asynchronously."""
        array: HostArray = self._up.staging(nbytes).numpy()
        return array

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Start a broadcast on the device."""
        joined, host = self._groups[group], torch.from_numpy(data)
        with named_rank_errors(joined.ranks):
            with self._up.entered():
                message = torch.empty(data.nbytes, dtype=torch.uint8, device=self._device)
                if sender == self._rank:
                    message.copy_(host, non_blocking=True)
                if self._sent is not None:
                    self._up.wait_for(self._sent)
                work = joined.broadcast(message, sender)
            with self._down.entered():
                work.wait()
                self._sent = self._down.mark()
                if sender != self._rank:
                    host.copy_(message, non_blocking=True)
            return _DeviceBroadcast(joined, self._down.mark(), message)

    def close(self) -> None:
        """Drop the groups and their connections."""
        self._groups.clear()


@dataclass(frozen=True, slots=True)
class _DeviceBroadcast:
    """A running broadcast. Keeps the device memory of the message until the copy to the host is done."""

    joined: JoinedGroup
    event: DeviceEvent
    message: torch.Tensor

    def result(self) -> None:
        """Wait for the broadcast and the copy to the host."""
        with named_rank_errors(self.joined.ranks):
            self.event.synchronize()


@converts_errors
def named_rank_errors(ranks: Sequence[int]) -> Iterator[None]:
    """Convert an error of a process group to a RankFailedError that names the ranks."""
    try:
        yield
    except RuntimeError as error:  # includes torch.distributed.DistError, the base of all its errors
        raise RankFailedError(
            f"sending between the ranks {list(ranks)} failed: {error}; one of them failed or "
            "timed out: check their logs, and restart the job"
        ) from error


class _StoreCollectives(ABC):
    """Collectives between processes that share a store.

    Each load creates separate process groups, under a unique key of the store and without
    registration in `torch.distributed`. Therefore their messages do not mix with messages of the
    program from other threads, and no state remains after the load.
    """

    def __init__(self, store: Any, rank: int, size: int, *, timeout_seconds: float = 600.0) -> None:
        """Create the collectives. Does no I/O.

        Args:
            store: a `torch.distributed.Store` that every process of the job can reach.
            rank, size: rank of this process and number of processes.
            timeout_seconds: maximum time that an operation waits for another process.
        """
        self._store: Final[Any] = store
        self.rank: Final = rank
        self.size: Final = size
        self._timeout: Final = timedelta(seconds=timeout_seconds)

    def _join_groups(self, key: str, groups: Sequence[Sequence[int]]) -> list[JoinedGroup]:
        """Create the groups of these ranks, in this order."""
        joined = []
        for ranks in groups:
            # A unique prefix for this group. PrefixStore is exported only at run time.
            store: Any = dist.PrefixStore(f"{key}/{','.join(map(str, ranks))}", self._store)  # type: ignore[attr-defined]
            with named_rank_errors(ranks):
                joined.append(JoinedGroup(self._group(store, ranks.index(self.rank), len(ranks)), tuple(ranks)))
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
            self._join_groups(key, groups), self.rank, device, CudaSideStream(device), CudaSideStream(device)
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
    store = store_of_job()
    world = dist.group.WORLD
    if store is None or world is None:
        return None
    if "nccl" in str(dist.get_backend_config(world)) and dist.is_nccl_available() and torch.cuda.is_available():
        return NCCLCollectives(store, world.rank(), world.size())
    return GlooCollectives(store, world.rank(), world.size()) if dist.is_gloo_available() else None
