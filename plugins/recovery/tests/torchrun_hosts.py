"""A process of a job of torchrun: saves three steps until the job loses a host. A restarted one loads the newest step.

``torchrun ... torchrun_hosts.py DIRECTORY HOST`` writes the step that it saved or loaded into ``HOST.saved`` or
``HOST.loaded`` of the directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from plugins.recovery.tests.framework_jobs import open_run
from plugins.recovery.tests.torch_hosts import TORCH


def write(path: Path, step: int) -> None:
    """Write a step, so that a reader never sees an empty file."""
    temporary = path.with_suffix(".new")
    temporary.write_text(str(step))
    temporary.replace(path)


def main(directory: Path, host: str) -> None:
    """Save and be killed, or load and end."""
    dist.init_process_group("gloo")
    run, _ = open_run(directory, host)
    if run.latest is None:
        for number in (1, 2, 3):
            run.save(number, TORCH.state(number))
            run.wait()
        write(directory / f"{host}.saved", 3)
        while True:  # trains until another process of the job is lost
            dist.all_reduce(torch.ones(1))
    with run:
        loaded = TORCH.load(run)
        step = run.restored_step
        assert step is not None
        TORCH.expect(loaded, step)
        run.save(step + 1, TORCH.state(step + 1))
        run.wait()
    write(directory / f"{host}.loaded", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
