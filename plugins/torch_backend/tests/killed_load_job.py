"""A process of a collective load. The last rank sends itself a signal between two messages.

Arguments: ``RANK SIZE PORT SIGNAL DIRECTORY``. ``DIRECTORY/saved`` is a checkpoint whose load
takes several messages. A process that gets an error writes it to ``DIRECTORY/RANK.told``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch.distributed as dist
from ckptcore_torch.collectives import GlooCollectives
from ckptcore_torch.store_coordinator import StoreCoordinator, store_of_job

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions
from ckptcore.errors import CheckpointError
from ckptcore.model import HostArray, Pending
from ckptcore.protocols import Channels

_PATIENT_SECONDS: Final = 120
_MESSAGE_SECONDS: Final = {signal.SIGKILL: 600, signal.SIGSTOP: 5}
"""Timeout of messages. All ranks detect a killed process at once, so this timeout is long.

They detect a stopped process only by the timeout.
"""
_BRIEF_SECONDS: Final = 2


class BriefAfterMessages:
    """A coordinator with two timeouts: a long one for processes that start late on a busy machine, and
    a short one for exchanges after the messages of the load.
    """

    def __init__(self) -> None:
        self._patient = StoreCoordinator.of_job(timeout_seconds=_PATIENT_SECONDS)
        self._brief = StoreCoordinator.of_job(timeout_seconds=_BRIEF_SECONDS)
        self.rank, self.size = self._patient.rank, self._patient.size

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        return self._of(key).gather(key, payload)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        return self._of(key).broadcast(key, payload)

    def _of(self, key: str) -> StoreCoordinator:
        return self._brief if "/read-" in key else self._patient


class VanishingChannels:
    """Channels that send this process a signal before it receives the third message, while others are in flight."""

    def __init__(self, channels: Channels, which: int) -> None:
        self.depth, self.memory, self.close = channels.depth, channels.memory, channels.close
        self._channels, self._which, self._received = channels, which, 0

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        return VanishingMessage(self._channels.broadcast(group, sender, data), self.receive)

    def receive(self) -> None:
        """Count a message, and send the signal at the third."""
        self._received += 1
        if self._received == 3:
            os.kill(os.getpid(), self._which)


@dataclass
class VanishingMessage:
    """A message in flight. Calls a function before it waits for the result."""

    pending: Pending[None]
    receive: Callable[[], None]

    def result(self) -> None:
        self.receive()
        self.pending.result()


class VanishingCollectives(GlooCollectives):
    """Collectives of the process that sends itself a signal."""

    which = 0

    def connect(self, key: str, groups: Sequence[Sequence[int]]) -> Channels:
        return VanishingChannels(super().connect(key, groups), self.which)


def main(rank: int, size: int, port: int, which: int, directory: Path) -> None:
    """Load collectively, and write the error to a file."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    kind = VanishingCollectives if rank == size - 1 else GlooCollectives
    VanishingCollectives.which = which
    collectives = kind(store_of_job(), rank, size, timeout_seconds=_MESSAGE_SECONDS[signal.Signals(which)])
    try:
        context = Context(job=JobOptions(reads="broadcast", coordinator=BriefAfterMessages(), collectives=collectives))
        ckptcore.load(directory / "saved", context=context)
    except CheckpointError as error:
        (directory / f"{rank}.told").write_text(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("the load succeeded although a process failed")
    while rank == 0 and not all((directory / f"{other}.told").exists() for other in range(size - 1)):
        time.sleep(0.05)  # this process serves the store until all others have finished
    os._exit(0)  # skip the end of the group, which would wait for the failed process


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
