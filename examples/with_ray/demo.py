"""The demo: a driver trains with workers, loses one during a save, and ends with the result of an undisturbed run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ckptcore_ray.jobs import RayJob, make_job

import ckptcore
from ckptcore.errors import RankFailedError
from examples.minilm.report import Report
from examples.with_ray.worker import Worker

SIZE = 2
SAVE_EVERY = 2


def main(steps: int) -> int:
    """Run the demo. Return the exit code: 1 if a claim is false.

    Args:
        steps: number of training steps.
    """
    report = Report()
    ray.init(num_cpus=SIZE, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory(prefix="ckptcore-demo-") as scratch:
            run_steps(report, Path(scratch), steps)
    finally:
        ray.shutdown()
    return report.finish()


def run_steps(report: Report, scratch: Path, steps: int) -> None:
    """Run all steps in a scratch directory."""
    middle = steps // 2 // SAVE_EVERY * SAVE_EVERY

    report.step("Train without an accident")
    workers = [start(rank, scratch / f"disk {rank}") for rank in range(SIZE)]
    with make_job("undisturbed", SIZE) as job:
        join(job, workers, scratch / "undisturbed")
        expected = train(workers, 0, steps)
        ray.get([worker.close.remote() for worker in workers])
    report.say(
        f"{SIZE} workers, {steps} steps, saved every {SAVE_EVERY}; the loss fell from {expected[0]:.1f} to "
        f"{expected[-1]:.1f}"
    )
    for worker in workers:
        ray.kill(worker)

    report.step("Train again, and kill a worker in the middle of a save")
    workers = [start(rank, scratch / f"another disk {rank}") for rank in range(SIZE)]
    with make_job("disturbed", SIZE) as job:
        join(job, workers, scratch / "run")
        losses = train(workers, 0, middle)
        train(workers, middle, middle + SAVE_EVERY - 1)  # lost by the accident
        saves = [worker.save.remote(middle + SAVE_EVERY - 1) for worker in workers[:-1]]
        report.say(f"the driver sees: {waiting(job)}")
        workers[-1].die.remote()
        began = time.monotonic()
        in_time = failed_with_the_worker(saves) and time.monotonic() - began < 60
        report.claim("the other worker gets an error, long before the deadline of 600 s", in_time)
        report.claim("the driver knows which rank failed", job.progress().ranks[-1].state == "failed")
        latest = ckptcore.CheckpointReader(scratch / "run").latest
        report.claim(f"the newest checkpoint is the one before: {latest}", latest == middle)

        report.step("Restart it with an empty disk, and resume")
        shutil.rmtree(scratch / f"another disk {SIZE - 1}")  # the machine is lost with its disk
        workers[-1] = start(SIZE - 1, scratch / "an empty disk")
        resumed = join(job, workers, scratch / "run")
        report.claim(f"every worker resumes from step {middle}", resumed == [middle] * SIZE)
        report.say(f"it is incarnation {job.progress().incarnation} of the job; messages of the old worker are ignored")
        losses += train(workers, middle, steps)
        report.claim(f"all {steps} losses equal those of the run without an accident", losses == expected)
        ray.get([worker.close.remote() for worker in workers])
    report.say(f"checkpoints at the end: {', '.join(map(str, ckptcore.CheckpointReader(scratch / 'run').steps))}")


def start(rank: int, disk: Path) -> Any:
    """Start a worker as an actor."""
    actor_class: Any = ray.remote(num_cpus=1)(Worker)
    return actor_class.remote(rank, disk)


def join(job: RayJob, workers: Sequence[Any], directory: Path) -> list[int]:
    """Make all workers join the job. Return the steps from which they resume."""
    steps: list[int] = ray.get([worker.join.remote(job.name, job.size, directory) for worker in workers])
    return steps


def train(workers: Sequence[Any], begin: int, end: int) -> list[float]:
    """Train the steps after `begin`, up to `end`, with saves. Return the loss of each step."""
    losses = []
    for step in range(begin + 1, end + 1):
        parts = ray.get([worker.gradient.remote() for worker in workers])
        losses.append(sum(loss for loss, _ in parts) / len(parts))
        mean = sum(gradient for _, gradient in parts) / len(parts)
        ray.get([worker.update.remote(mean) for worker in workers])
        if step % SAVE_EVERY == 0:
            ray.get([worker.save.remote(step) for worker in workers])  # committed on return
    return losses


def waiting(job: RayJob) -> str:
    """Wait until the leader waits for other ranks. Return a description."""
    while not (exchanges := job.progress().ranks[0].waiting):
        time.sleep(0.01)
    save, _, stage = exchanges[0].key.rpartition("/")
    name = Path(save.partition("#")[0]).name
    return f"rank 0 is in the stage {stage!r} of saving {name}, and waits for {list(exchanges[0].for_ranks)}"


def failed_with_the_worker(saves: Sequence[Any]) -> bool:
    """Return True if the saves fail because of the killed worker."""
    try:
        ray.get(list(saves))
    except RankFailedError as error:
        return "failed, so the exchange" in str(error)
    return False
