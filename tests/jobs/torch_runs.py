"""Programs of torch.distributed for tests of runs: each process has its own storage and clock."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from ckptcore_testing.faults import FaultPlan, FlipBitAt, Step
from ckptcore_testing.faulty_storage import with_faults
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptcore
from ckptcore import Checkpointer
from ckptcore.builtin.local import open_local
from ckptcore.hookspecs import hookimpl
from ckptcore.policies import AnySave, FixedInterval, LatestN, PreemptionCheckpointing, TimeInterval
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from tests.jobs.processes import Place
from tests.jobs.torch_program import run as run_torch

run: Final = run_torch
LAYOUT: Final = "dcp"
"""A layout in which each process has its own file."""


class Sight(FaultPlan):
    """The view of the shared storage in this process. It records requests, and can damage the bytes that are read.

    Attributes:
        flipped: prefixes of keys. Reads of these objects return a flipped bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flipped: tuple[str, ...] = ()

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """See `FaultPlan`."""
        step = super().begin(name, keys, offset, nbytes)
        faults = [FlipBitAt(step.operation.number)] if any(key.startswith(self.flipped) for key in keys) else []
        return Step(self, step.operation, faults)

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Return the opener of local directories as ``seen://`` URLs."""
        return {"seen": self._open}

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return with_faults(open_local(url.replace("seen://", "file://", 1), options), self)


class Rank:
    """One process of the job: its state, its view of the storage, and the shared directories."""

    def __init__(self, place: Place) -> None:
        self.number = place.rank
        self.directory = place.directory
        self.sight = Sight()
        self.context = ckptcore.Context(
            plugins=ckptcore.context.PluginOptions(extra=(self.sight,)),
            durability="none",
            io=ckptcore.context.IOOptions(threads=2),
        )
        self._mesh = init_device_mesh("cpu", (place.size,))

    def open(self, name: str, **options: Any) -> Checkpointer:
        """Open a run in the directory with this name."""
        return Checkpointer(f"seen://{self.directory}/{name}", layout=LAYOUT, context=self.context, **options)

    def state(self, step: int) -> dict[str, Any]:
        """Return a state. Every value in it depends on the step."""
        return {
            "rows": distribute_tensor(torch.full((13, 4), float(step)), self._mesh, [Shard(0)]),
            "copied": torch.full((3,), step),
            "step": step,
        }

    def parts(self, step: int) -> dict[str, Any]:
        """Return a state with an additional part that only this process has."""
        return {
            "model": self.state(step),
            "mine": ckptcore.PerProcess({"step": np.full(3, step), "rank": self.number}),
        }

    def expect(self, state: Mapping[str, Any], step: int) -> None:
        """Assert that a state belongs to a step."""
        rows = state["rows"]
        assert isinstance(rows, DTensor) and rows.shape == (13, 4)
        assert bool((rows.to_local() == step).all()) and bool((state["copied"] == step).all()), step
        assert state["step"] == step

    def expect_parts(self, parts: Mapping[str, Any], step: int) -> None:
        """Assert that the parts belong to a step and to this process."""
        self.expect(parts["model"], step)
        assert (parts["mine"]["step"] == step).all() and parts["mine"]["rank"] == self.number

    def together(self) -> None:
        """Wait for all ranks."""
        dist.barrier()


def fall_back(rank: Rank) -> Any:
    """Damage four of five steps in different ways, and load the remaining step.

    The damage is in a root, a file that one process reads, a file of a shared array, or the reads of one process.
    """
    with rank.open("damaged") as run:
        for step in range(1, 6):
            run.save_checkpointables(step, rank.parts(step))
    rank.together()
    if rank.number == 0:
        for key in ("5/checkpoint.json", "4/mine.rank_1/__0_0.distcp", "3/model/__2_0.distcp"):
            _overwrite(rank.directory / "damaged" / key)
    rank.together()
    rank.sight.flipped = ("2/",) if rank.number == 2 else ()
    told: dict[str, Any] = {}
    with rank.open("damaged") as run:
        loaded = run.load_checkpointables(abstract=rank.parts(0))
        assert run.restored_step is not None
        rank.expect_parts(loaded, run.restored_step)
        told["restored"] = run.restored_step
        told["skipped"] = [[skip.step, skip.reason] for skip in run.skipped_steps]
        rank.sight.flipped = ()
        for step in (2, 4):  # all ranks replace a step that is damaged on one rank
            run.save_checkpointables(step, rank.parts(step))
        run.wait()
        rank.expect_parts(run.load_checkpointables(abstract=rank.parts(0)), 4)
        told["again"] = [run.restored_step, [skip.step for skip in run.skipped_steps]]
    return told


def _overwrite(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


class Clock:
    """A clock of this process that a test advances."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def decide_by_clocks(rank: Rank) -> Any:
    """Stop the clock of rank 1, and set the clock of rank 2 years ahead. Then set the clock of rank 0 back by a day."""
    true_time = time.time
    clock = Clock(true_time() + [0.0, -1e7, 1e8][rank.number])
    pace = [1.0, 0.0, 1000.0][rank.number]
    is_leader = rank.number == 0

    def decisions(run: Checkpointer, steps: Sequence[int]) -> list[int]:
        saved = []
        for step in steps:
            clock.now += pace
            if run.save(step, rank.state(step)) is not None:
                saved.append(step)
        return saved

    time.time = clock
    try:
        with rank.open("timed", save_policy=TimeInterval(3)) as run:
            told = [decisions(run, range(1, 11))]
        with rank.open("timed", save_policy=TimeInterval(7200)) as run:
            told.append(decisions(run, range(11, 14)))
            clock.now += 7200 if is_leader else 0
            told.append(decisions(run, range(14, 17)))
        clock.now -= 86400 if is_leader else 0
        with rank.open("timed", save_policy=TimeInterval(7200)) as run:
            told.append(decisions(run, range(17, 20)))
            run.wait()
            told.append(list(run.steps))
    finally:
        time.time = true_time
    return told


def be_preempted(rank: Rank) -> Any:
    """Send SIGTERM from rank 2 to rank 1 after step 3 was saved, and stop all ranks at the same step."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    policy = AnySave([FixedInterval(2), PreemptionCheckpointing()])
    try:
        ours = signal.getsignal(signal.SIGTERM)
        with rank.open("preempted", save_policy=policy) as run:
            for step in itertools.count(1):
                saved = run.save(step, rank.state(step)) is not None
                if run.preempted:
                    break
                if step == 3 and rank.number == 2:
                    os.kill(processes[1], signal.SIGTERM)
            told: dict[str, Any] = {
                "end": step,
                "saved": saved,
                "heard": len(heard),
                "listens": signal.getsignal(signal.SIGTERM) != ours,
            }
        assert signal.getsignal(signal.SIGTERM) == ours
        with rank.open("preempted", save_policy=policy) as run:  # as the next job does
            rank.expect(run.load(None, rank.state(0)), step)
            assert not run.preempted
            told["steps"] = list(run.steps)
        return told
    finally:
        signal.signal(signal.SIGTERM, before)


def count_requests(rank: Rank) -> Any:
    """Return the storage requests of a process for a save with a deletion, for a list, and for a deletion."""
    operations = rank.sight.operations
    with rank.open("counted") as run:
        for step in range(1, 4):
            run.save(step, rank.state(step))
    told: dict[str, Any] = {}

    def count(what: str, work: Callable[[], object]) -> None:
        rank.together()
        begin = len(operations)
        work()
        rank.together()
        told[what] = Counter(operation.name for operation in operations[begin:])

    run = rank.open("counted", preservation_policy=LatestN(2))

    def save() -> None:
        for step in range(4, 8):
            run.save(step, rank.state(step))
        run.wait()

    def list_again() -> None:
        run.reload()
        told["steps"] = [list(run.steps), run.latest]

    def delete() -> None:
        run.delete(7)
        run.wait()
        told["left"] = [list(run.steps), run.latest]

    with run:
        for work in (save, list_again, delete, list_again):
            count(work.__name__, work)
    return told


_CASES: Final[Sequence[Callable[[Rank], Any]]] = (fall_back, decide_by_clocks, be_preempted, count_requests)


def run_steps(place: Place) -> Any:
    """Run all cases one after another. Return their results by name."""
    rank = Rank(place)
    return {case.__name__: case(rank) for case in _CASES}


TASKS: Final[Mapping[str, Callable[[Place], Any]]] = {"run_steps": run_steps}
"""Tasks by name."""
