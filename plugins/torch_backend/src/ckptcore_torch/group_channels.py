"""Bytes between processes over process groups: directly from host memory, or through devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ckptcore.errors import RankFailedError
from ckptcore.model import HostArray, Pending
from ckptcore_torch.transfers import DeviceEvent, Lane

__all__ = ["DeviceChannels", "Group", "HostChannels", "Member", "Work", "named_rank_errors"]


class Work(Protocol):
    """A running collective: `torch.distributed.Work`."""

    def wait(self) -> bool:
        """Wait for it: blocks this thread on the CPU, or the current stream on CUDA."""
        ...


class Group(Protocol):
    """The methods of `torch.distributed.ProcessGroupGloo` and ``ProcessGroupNCCL`` in use."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Begin to send a tensor from a member, by its number in the group, to all others."""
        ...

    def abort(self) -> None:
        """Close the connections, also during a transfer. The other members get errors."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A group with this process.

    Attributes:
        group: the process group.
        ranks: ranks of its members in the job, in the order of the group.
    """

    group: Group
    ranks: tuple[int, ...]

    def broadcast(self, tensor: torch.Tensor, sender: int) -> Work:
        """Begin to send a tensor from a rank of the job."""
        return self.group.broadcast(tensor, self.ranks.index(sender))


class HostChannels:
    """Sends host memory directly, over groups that support it. A `ckptcore.protocols.Channels`."""

    depth = 2
    """Number of threads of a ``ProcessGroupGloo`` (torch 2.13.0, ``ProcessGroupGloo.hpp``: ``Options::threads``)."""

    def __init__(self, members: Sequence[Member]) -> None:
        """Use these groups."""
        self._members = list(members)

    def memory(self, nbytes: int) -> HostArray:
        """Allocate memory."""
        array: HostArray = torch.empty(nbytes, dtype=torch.uint8).numpy()
        return array

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Begin to send, on a thread of the group."""
        member = self._members[group]
        with named_rank_errors(member.ranks):
            return _HostWork(member, member.broadcast(torch.from_numpy(data), sender))

    def close(self) -> None:
        """Abort the groups explicitly: a running transfer can keep a group alive, for which others wait."""
        for member in self._members:
            member.group.abort()
        self._members.clear()


@dataclass(frozen=True, slots=True)
class _HostWork:
    member: Member
    work: Work

    def result(self) -> None:
        """Wait for it."""
        with named_rank_errors(self.member.ranks):
            self.work.wait()


class DeviceChannels:
    """Sends over groups that accept only device memory, such as NCCL: to the device, across, and back to the host.

    Two lanes run besides the caller's own work. One copies a message to the device while the
    previous one is sent, and the other copies received messages to the host. Messages of different
    groups are also sent one after the other, because concurrent collectives of several groups can
    deadlock on a device (NCCL, "Using multiple NCCL communicators concurrently").
    """

    depth = 3
    """One message each is copied to the device, sent, and copied to the host."""

    def __init__(self, members: Sequence[Member], rank: int, device: torch.device, up: Lane, down: Lane) -> None:
        """Use these groups.

        Args:
            members: the groups.
            rank: of this process in the job.
            device: device of the groups.
            up, down: lanes of the device.
        """
        self._members = list(members)
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
        """Begin to send, on the device."""
        member, host = self._members[group], torch.from_numpy(data)
        with named_rank_errors(member.ranks):
            with self._up.entered():
                held = torch.empty(data.nbytes, dtype=torch.uint8, device=self._device)
                if sender == self._rank:
                    held.copy_(host, non_blocking=True)
                if self._sent is not None:
                    self._up.wait_for(self._sent)
                work = member.broadcast(held, sender)
            with self._down.entered():
                work.wait()
                self._sent = self._down.mark()
                if sender != self._rank:
                    host.copy_(held, non_blocking=True)
            return _DeviceWork(member, self._down.mark(), held)

    def close(self) -> None:
        """Drop the groups, with their connections."""
        self._members.clear()


@dataclass(frozen=True, slots=True)
class _DeviceWork:
    """A running message. Keeps its device memory until the copy to the host is done."""

    member: Member
    event: DeviceEvent
    held: torch.Tensor

    def result(self) -> None:
        """Wait for it."""
        with named_rank_errors(self.member.ranks):
            self.event.synchronize()


@contextmanager
def named_rank_errors(ranks: Sequence[int]) -> Iterator[None]:
    """Convert an error of a process group to one that names the ranks."""
    try:
        yield
    except RuntimeError as error:  # includes torch.distributed.DistError, the base of all its errors
        raise RankFailedError(
            f"sending between the ranks {list(ranks)} failed: {error}; one of them failed or "
            "timed out: check their logs, and restart the job"
        ) from error
