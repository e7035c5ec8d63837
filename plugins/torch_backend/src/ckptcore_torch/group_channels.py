"""Bytes between processes over process groups: from host memory as it is, or from pinned memory through the devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ckptcore.errors import RankFailedError
from ckptcore.model import HostArray, Pending
from ckptcore_torch.transfers import Lane, Moment

__all__ = ["DeviceChannels", "Group", "HostChannels", "Member", "Work", "naming_peers"]


class Work(Protocol):
    """A collective that was begun, as `torch.distributed.Work`."""

    def wait(self) -> bool:
        """Wait for it: on the CPU this thread does, on CUDA the current stream."""
        ...


class Group(Protocol):
    """What is used of a `torch.distributed.ProcessGroupGloo` or ``ProcessGroupNCCL``."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Begin to send a tensor from a member, by its number in the group, to all others."""
        ...

    def abort(self) -> None:
        """Close its connections, also where something is under way: the other members notice."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A group that this process is in.

    Attributes:
        group: of processes.
        ranks: its members, as the job numbers them, in their order in the group.
    """

    group: Group
    ranks: tuple[int, ...]

    def broadcast(self, tensor: torch.Tensor, sender: int) -> Work:
        """Begin to send a tensor from a rank of the job."""
        return self.group.broadcast(tensor, self.ranks.index(sender))


class HostChannels:
    """Sends host memory as it is, over groups that take it. A `ckptcore.protocols.Channels`."""

    depth = 2
    """A ``ProcessGroupGloo`` has two threads (torch 2.13.0, ``ProcessGroupGloo.hpp``: ``Options::threads``)."""

    def __init__(self, members: Sequence[Member]) -> None:
        """Over these groups."""
        self._members = list(members)

    def memory(self, nbytes: int) -> HostArray:
        """Any memory."""
        array: HostArray = torch.empty(nbytes, dtype=torch.uint8).numpy()
        return array

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Begin to send; a thread of the group does it."""
        member = self._members[group]
        with naming_peers(member.ranks):
            return _HostWork(member, member.broadcast(torch.from_numpy(data), sender))

    def close(self) -> None:
        """Let the groups go, with their connections: what is under way may keep a group alive, which others wait for."""
        for member in self._members:
            member.group.abort()
        self._members.clear()


@dataclass(frozen=True, slots=True)
class _HostWork:
    member: Member
    work: Work

    def result(self) -> None:
        """Wait for it."""
        with naming_peers(self.member.ranks):
            self.work.wait()


class DeviceChannels:
    """Sends over groups that take device memory only, as NCCL does: up to the device, across, and down again.

    Two lanes beside the caller's own work: in one a message goes up while the one before is sent, in the other one that was sent
    goes down. Messages are sent one after the other also where their groups differ: collectives of several groups at once may wait
    for each other on a device (NCCL, "Using multiple NCCL communicators concurrently").
    """

    depth = 3
    """One goes up, one is sent, one comes down."""

    def __init__(self, members: Sequence[Member], rank: int, device: torch.device, up: Lane, down: Lane) -> None:
        """Over these groups.

        Args:
            members: the groups.
            rank: of this process in the job.
            device: that the groups send from and into.
            up, down: lanes of the device.
        """
        self._members = list(members)
        self._rank = rank
        self._device = device
        self._up = up
        self._down = down
        self._sent: Moment | None = None

    def memory(self, nbytes: int) -> HostArray:
        """Pinned memory, that the device copies from and to by itself."""
        array: HostArray = self._up.staging(nbytes).numpy()
        return array

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Begin to send; the device does it."""
        member, host = self._members[group], torch.from_numpy(data)
        with naming_peers(member.ranks):
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
        """Let the groups go, with their connections."""
        self._members.clear()


@dataclass(frozen=True, slots=True)
class _DeviceWork:
    """A message under way; its device memory is kept until it has come down."""

    member: Member
    moment: Moment
    held: torch.Tensor

    def result(self) -> None:
        """Wait for it."""
        with naming_peers(self.member.ranks):
            self.moment.synchronize()


@contextmanager
def naming_peers(ranks: Sequence[int]) -> Iterator[None]:
    """Let an error of a process group say which processes to look at."""
    try:
        yield
    except RuntimeError as error:  # also torch.distributed.DistError, of which all its errors are
        raise RankFailedError(
            f"sending between the ranks {list(ranks)} failed: {error}; one of them is gone, or did not come in time: look at what "
            "they were doing, and start the job again"
        ) from error
