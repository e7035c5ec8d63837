"""A program that kills workers and drivers of Ray Train at random moments of saves.

Run it as ``killed_ray.py DIRECTORY SEED KILLS``.

Ray starts the processes, so this program cannot fork them as `random_kills` does. One worker or both are killed at
their n-th call of the operating system after the first save, and Ray restarts the workers. After some kills, the driver
and all processes that it has started are killed as well. Each new group of workers first checks the files. The last
line of output is a summary in JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray.train.torch
import torch
import torch.distributed as dist
from ckptcore_integrations.ray_train import resume, save_and_report
from killed_jobs import numbers
from random_kills import PR_SET_CHILD_SUBREAPER, Ledger, LostError, Process, digest, end_all, forked, leftovers
from torch.distributed.tensor import Shard, distribute_tensor

import ckptcore
from ckptcore.context import JobOptions, SingleProcess

SIZE = 2


class Journal:
    """A file to which workers append records. It remains when the workers are killed."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "journal"

    def lines(self) -> list[str]:
        """Return the lines so far."""
        return self.path.read_text().splitlines() if self.path.exists() else []

    def open(self) -> int:
        """Return a descriptor that appends to the file."""
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def kills(self) -> int:
        """Return the number of kills of workers."""
        return sum(line.startswith("kill ") for line in self.lines())

    def begun(self) -> int:
        """Return the highest step whose save has begun."""
        return max((int(line.split()[1]) for line in self.lines() if line.startswith("begin ")), default=0)

    def calls(self) -> int:
        """Return the number of calls for one save, which rank 0 counted in the first group of workers."""
        return max((int(line.split()[2]) for line in self.lines() if line.startswith("calls 0 ")), default=0)


def found_in(directory: Path) -> Mapping[int, str]:
    """Load all committed checkpoints. Directories of Ray without a checkpoint are ignored."""
    digests, alone = {}, ckptcore.Context(job=JobOptions(coordinator=SingleProcess()))
    for path in (directory / "run").glob("checkpoint_*[0-9]"):
        if (path / "checkpoint.json").exists():
            assert ckptcore.verify(path, context=alone).ok
            loaded = ckptcore.load(path / "state", context=alone)
            assert loaded["step"] == int(path.name.removeprefix("checkpoint_"))
            digests[loaded["step"]] = digest({name: np.asarray(loaded[name]) for name in ("large", "small")})
    return digests


def check(directory: Path) -> None:
    """Compare the files with the records of workers.

    Raises:
        LostError: a checkpoint is lost or damaged.
    """
    ledger = Ledger()
    for line in Journal(directory).lines():
        ledger.read(line)
    ledger.check(found_in(directory), keeps=1)


def worker(config: dict[str, Any]) -> None:
    """Run a worker. Write a file if a checkpoint is lost, because Ray would only restart the workers."""
    try:
        save(Path(config["directory"]), config["seed"], config["kills"])
    except (LostError, AssertionError):
        Path(config["directory"], "lost").write_text(traceback.format_exc())
        raise


def save(directory: Path, seed: int, kills: int) -> None:
    """Save until this process is killed. The last group of workers saves three times, and ends."""
    journal, rank = Journal(directory), dist.get_rank()
    known = [0, 0]
    if rank == 0:
        check(directory)
        known = [journal.kills(), journal.begun()]
    dist.broadcast_object_list(known)
    number, begun = known
    chance = random.Random(f"{seed}/{number}")
    victims = chance.choice([(0,), (1,), (0, 1)])
    moments = [chance.randint(1, 2 * max(1, journal.calls())) for _ in range(SIZE)]
    moment = moments[rank] if rank in victims and number else None
    process = Process(rank, number, -1, journal.open(), moment, directory / "run")
    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    step = resume(into={}) or 0  # restores no objects, and returns only the step
    # Ray may have lost the newest reports. Saving a step again removes the leftovers of its killed save.
    first, last = max(step + 1, begun), number >= kills
    while True:
        step += 1
        arrays = numbers(process.attempt, step)
        large, small = map(torch.from_numpy, arrays.values())
        state = {"large": distribute_tensor(large, mesh, [Shard(0)]), "small": small, "step": step}
        process.begin(step, digest(arrays))
        save_and_report(step, {"state": state}, {"step": step})
        process.saved(step)
        if step == first:
            dist.barrier()
            process.settled()
            dist.barrier()
            if rank == victims[0] and not last:
                os.write(process.output, f"kill {rank}\n".encode())
        elif step == first + 1 and number == 0:
            process.ended()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        elif step > first and last:
            return


def drive(directory: Path, seed: int, kills: int) -> None:
    """Train with Ray until a number of workers were killed."""
    ray.init(num_cpus=SIZE + 1, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    ray.train.torch.TorchTrainer(
        worker,
        train_loop_config={"directory": str(directory), "seed": seed, "kills": kills},
        scaling_config=ray.train.ScalingConfig(num_workers=SIZE),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(directory),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    ray.shutdown()


def main() -> None:
    """Start and kill drivers until enough workers were killed. The last driver is not killed."""
    warnings.simplefilter("ignore")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    directory, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    journal, chance, drivers = Journal(directory), random.Random(seed), 0
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    while True:
        more = chance.randint(3, 12)
        enough = journal.kills() + more
        driver = forked(lambda: drive(directory, seed, kills), directory / "errors", 3600)
        while os.waitid(os.P_PID, driver, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and (
            journal.kills() < enough or enough > kills
        ):
            if (directory / "lost").exists():
                break
            time.sleep(0.05)
        ended = os.waitid(os.P_PID, driver, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            time.sleep(chance.uniform(0.0, 0.3))
            drivers += 1
        end_all()
        if (directory / "lost").exists():
            raise LostError(f"seed {seed}: {(directory / 'lost').read_text()}")
        check(directory)
        if ended is not None:
            break
    if ended.si_status:
        raise RuntimeError((directory / "errors").read_text()[-6000:])
    if left := leftovers(directory / "run"):
        raise LostError(f"there are still {left}")
    counts = {"kills": journal.kills(), "drivers": drivers}
    print(json.dumps({"job": "ray", **counts, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
