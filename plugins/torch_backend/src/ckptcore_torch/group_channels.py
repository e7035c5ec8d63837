"""Channels over process groups, which send bytes directly from host memory or through device memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ckptcore.errors import RankFailedError, converts_errors
from ckptcore.model import HostArray, Pending
from ckptcore_torch.transfers import DeviceEvent, SideStream


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
