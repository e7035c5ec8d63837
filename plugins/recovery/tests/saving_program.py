"""A program that saves steps in memory, on a host of its own, and then waits, is killed, or ends.

``python -m plugins.recovery.tests.saving_program DIRECTORY JOB STEPS END``: ``END`` is ``wait`` (until standard input
ends), ``die``, ``close``, or ``leave`` (end without waiting for anything). Prints the newest step that it found.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
from ckptcore_recovery.peers import PeerMemory

from ckptcore import Checkpointer
from ckptcore.policies import LatestN, SpecificSteps


def main(directory: Path, job: str, steps: int, end: str) -> None:
    """Save steps."""
    memory = PeerMemory(
        directory / "far", job=job, memory_bytes=1 << 26, copies=0, upload_policy=SpecificSteps([1]),
        preservation_policy=LatestN(3),
    )  # fmt: skip
    run = Checkpointer(memory, if_in_use="take over")
    first = run.latest or 0
    for step in range(first + 1, first + steps + 1):
        run.save(step, {"w": np.full((300, 700), step, np.float32), "step": step})
        if end != "leave":
            run.wait()
    if end != "leave":
        memory.wait_for_uploads()
    print(first, flush=True)
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "wait":
        sys.stdin.read()
    if end != "leave":
        run.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
