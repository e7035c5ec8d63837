"""A job of NumPy with steps in memory, as a program: each process is a host. A test kills them at any moment."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from ckptcore_recovery.peers import PeerMemory
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE
from ckptcore_torch.store_coordinator import StoreCoordinator
from torch._C._distributed_c10d import TCPStore

from ckptcore import Checkpointer, Context, ShardedArray
from ckptcore.context import JobOptions
from ckptcore.model import HostArray
from ckptcore.policies import SpecificSteps

JOB: Final = "numpy-hosts"
_SHAPE: Final = (240, 5000)


class Process(NamedTuple):
    """A process of a job.

    Attributes:
        directory: the directory of the test.
        host: the name of its host.
        rank, size: its rank, and the number of processes.
        port: the port of the job's store on 127.0.0.1.
        layout: the layout of steps.
        copies: the copies of each step on other hosts.
    """

    directory: Path
    host: str
    rank: int
    size: int
    port: int
    layout: str
    copies: int

    @property
    def output(self) -> Path:
        """The file with the lines that the process wrote."""
        return self.directory / f"{self.port}-{self.rank}.out"


def array(step: int) -> HostArray:
    """Return the whole array of a step."""
    return np.random.default_rng(step).integers(0, 1 << 31, _SHAPE, np.int64).astype(np.float32)


def rows(process: Process) -> slice:
    """Return the rows of a process."""
    return slice(_SHAPE[0] * process.rank // process.size, _SHAPE[0] * (process.rank + 1) // process.size)


def state(process: Process, step: int) -> dict[str, object]:
    """Return the state of a process at a step."""
    mine = rows(process)
    cuts = [[_SHAPE[0] * rank // process.size for rank in range(1, process.size)], []]
    part = ShardedArray.part(np.ascontiguousarray(array(step)[mine]), (mine.start, 0), _SHAPE, cuts=cuts)
    return {"w": part, "step": step}


def run(process: Process) -> None:
    """Run a process until it is killed, and write its errors to a file."""
    with process.output.open("w") as output:
        try:
            os.environ[DIRECTORY_VARIABLE] = str(process.directory / process.host)
            _train(process, lambda line: print(line, file=output, flush=True))
        except BaseException:  # noqa: BLE001  # the test reads it; another process may have been killed
            output.write(traceback.format_exc())
            output.flush()
            os._exit(1)


def _train(process: Process, say: object) -> None:
    assert callable(say)
    store = TCPStore("127.0.0.1", process.port, process.size, process.rank == 0, wait_for_workers=False)
    coordinator = StoreCoordinator(store, process.rank, process.size, timeout_seconds=60)
    memory = PeerMemory(
        process.directory / "far",
        job=JOB,
        memory_bytes=1 << 28,
        copies=process.copies,
        upload_policy=SpecificSteps([]),
    )
    context = Context(job=JobOptions(coordinator=coordinator))
    checkpointer = Checkpointer(memory, layout=process.layout, context=context)
    step = checkpointer.latest
    if step is not None:
        loaded = checkpointer.load_into(state(process, 0))
        step = checkpointer.restored_step
        assert step is not None
        assert loaded["step"] == step
        (shard,) = loaded["w"].shards
        assert shard.elements is not None
        np.testing.assert_array_equal(shard.elements, array(step)[rows(process)])
    memory.wait_for_copies()  # from now on, hosts can be lost again
    say(f"loaded {step}")
    for number in range((step or 0) + 1, sys.maxsize):
        checkpointer.save(number, state(process, number))
        checkpointer.wait()
        say(f"saved {number}")
