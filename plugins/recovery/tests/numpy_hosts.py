"""A job of NumPy with steps in memory, as a program: each process is a host. A test kills them at any moment."""

from __future__ import annotations

import itertools
import os
import random
import runpy
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from ckptcore_recovery.peers import ErasureCode, PeerMemory, messages
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE

from ckptcore import Checkpointer, Context, ShardedArray
from ckptcore.context import JobOptions
from ckptcore.model import HostArray
from ckptcore.policies import SpecificSteps
from plugins.recovery.tests.networks import enter
from plugins.recovery.tests.socket_job import join_job, serve_job

JOB: Final = "numpy-hosts"
_SHAPE: Final = (48, 60_000)
_SECONDS: Final = 120.0


class Moment(NamedTuple):
    """A moment in the work of a process: before it sends a message to a memory server.

    Attributes:
        message: the number of the message, from 1.
        after: the event after which messages are counted: "start" or "loaded".
        stops: True if the process stops there until it is killed.
    """

    message: int
    after: str
    stops: bool


class Process(NamedTuple):
    """A process of a job.

    Attributes:
        control: the file at which rank 0 serves the job.
        far: the directory of the run.
        memory: the directory for the memory of its host.
        namespace: the network namespace of its host; None: that of the test.
        address: the address of its host.
        rank, size: its rank, and the number of processes.
        layout: the layout of steps.
        copies: the copies of each step on other hosts, or the parity fragments.
        needed: the fragments that are needed to read an object; 1 for copies.
        latency: the longest delay of a message, in seconds.
        moment: when to report that a failure may happen; None: never.
        seed: decides about the delays.
        clock_jumps: True if the wall clocks of this process and of the server that it starts jump.
    """

    control: Path
    far: Path
    memory: Path
    namespace: Path | None
    address: str
    rank: int
    size: int
    layout: str
    copies: int
    needed: int
    latency: float
    moment: Moment | None
    seed: int
    clock_jumps: bool


def _rows(process: Process) -> tuple[int, int]:
    return _SHAPE[0] * process.rank // process.size, _SHAPE[0] * (process.rank + 1) // process.size


def part(process: Process, step: int) -> HostArray:
    """Return the rows of a process at a step. All elements of all steps differ from their neighbours."""
    start, stop = _rows(process)
    numbers = np.arange(start * _SHAPE[1], stop * _SHAPE[1], dtype=np.uint32)
    return (numbers * np.uint32(2_654_435_761) + np.uint32(step * 40_503 % (1 << 32))).reshape(-1, _SHAPE[1])


def state(process: Process, step: int) -> dict[str, object]:
    """Return the state of a process at a step: an array in parts, a small one that all processes have, and the step."""
    start, _ = _rows(process)
    cuts = [[_SHAPE[0] * rank // process.size for rank in range(1, process.size)], []]
    return {
        "w": ShardedArray.part(part(process, step), (start, 0), _SHAPE, cuts=cuts),
        "bias": np.full(100, step, np.int64),
        "step": step,
    }


def run(process: Process, events: Pipe) -> None:
    """Run a process until it is killed, and send what happens.

    Events are ("start", rank), ("loaded", step), ("saved", step), ("moment", message) and ("failed", error).
    """
    lock = threading.Lock()
    counted = threading.Event()

    def say(kind: str, value: object) -> None:
        with lock:
            events.send((kind, value))
        if process.moment is not None and kind == process.moment.after:
            counted.set()

    try:
        if process.namespace is not None:
            enter(process.namespace)
        if process.clock_jumps:
            clock = Path(__file__).with_name("jumping_clock")
            os.environ["PYTHONPATH"] = f"{clock}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            runpy.run_path(str(clock / "sitecustomize.py"))
        _delay_messages(process, say, counted)
        say("start", process.rank)
        _train(process, say)
    except BaseException:  # noqa: BLE001  # the test reads it; another process may have been killed
        say("failed", traceback.format_exc())
        threading.Event().wait()  # until it is killed, as by a launcher


def _delay_messages(process: Process, say: Callable[[str, object], None], counted: threading.Event) -> None:
    """Add latency to each message that this process sends, and report the moment.

    Args:
        process: the process.
        say: sends an event.
        counted: set once messages are counted.
    """
    delays = random.Random(process.seed)
    numbers = itertools.count(1)
    send = messages.Connection.send

    def delayed(self: messages.Connection, header: messages.Header, payload: memoryview | bytes = b"") -> None:
        if process.latency:
            time.sleep(delays.uniform(0.0, process.latency))
        if process.moment is not None and counted.is_set() and next(numbers) == process.moment.message:
            say("moment", process.moment.message)
            if process.moment.stops:
                threading.Event().wait()
        send(self, header, payload)

    messages.Connection.send = delayed  # type: ignore[method-assign]


def _train(process: Process, say: Callable[[str, object], None]) -> None:
    if process.rank == 0:
        coordinator = serve_job(process.control, process.size)
    else:
        deadline = time.monotonic() + _SECONDS
        while not process.control.exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        coordinator = join_job(process.control, process.rank, process.size)
    os.environ[DIRECTORY_VARIABLE] = str(process.memory)
    memory = PeerMemory(
        process.far,
        job=JOB,
        interface=process.address,
        memory_bytes=1 << 28,
        copies=process.copies,
        erasure_code=None if process.needed == 1 else ErasureCode(process.needed, process.copies),
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
        np.testing.assert_array_equal(shard.elements, part(process, step))
        np.testing.assert_array_equal(loaded["bias"], np.full(100, step))
    memory.wait_for_copies()  # from now on, hosts can be lost again
    say("loaded", step or 0)
    for number in itertools.count((step or 0) + 1):
        checkpointer.save(number, state(process, number))
        checkpointer.wait()
        say("saved", number)
