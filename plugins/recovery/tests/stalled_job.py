"""A script of torch.distributed: ``stalled_job.py HOW DIRECTORY``. In step 3 its last rank waits for a lock, once.

The other ranks wait for it in a collective. HOW: "report" ends each process once all ranks have reported the stall;
"restart" lets the watchdog end it, so that the launcher starts the job again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckptcore_recovery.watchdog import EndJob, Log, Watchdog, read_incidents

import ckptcore


def _end_once_reported(directory: Path) -> None:
    """End this process, with status 0, once all ranks know that all have reported."""
    size = dist.get_world_size()
    while True:
        incidents = [each for each in read_incidents(directory) if each.reports[0].stall.step == 3]
        if [len(each.reports) for each in incidents] == [size]:
            break
        time.sleep(0.05)
    (directory / f"rank-{dist.get_rank()}-knows").touch()
    while len(list(directory.glob("rank-*-knows"))) < size:
        time.sleep(0.05)
    os._exit(0)


def main() -> None:
    """Train for six steps."""
    how, directory = sys.argv[1], Path(sys.argv[2])
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    # Its own part of the store: otherwise gloo sometimes reads addresses of ended processes (torch 2.13.0).
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch_stores: Any = dist
    store = torch_stores.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    part = torch_stores.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=part, rank=rank, world_size=size)
    is_first = attempt == "0"
    if how == "report":
        threading.Thread(target=_end_once_reported, args=(directory,), daemon=True).start()
    policy, bound = ([EndJob(grace=20.0)], 5.0) if how == "restart" else ([Log()], 2.0)
    with Watchdog(directory, policy=policy, bounds={"step": bound if is_first else 600.0}) as watchdog:
        context = ckptcore.Context(observers=[watchdog])
        with ckptcore.Checkpointer(directory, context=context, if_in_use="take over") as run:
            state = {"w": torch.zeros(8)}
            first = 0 if run.latest is None else run.latest + 1
            if first:
                state = run.load(abstract=state)
            for step in range(first, 6):
                watchdog.step(step)
                if is_first and step == 3 and dist.get_rank() == dist.get_world_size() - 1:
                    lock = threading.Lock()
                    lock.acquire()
                    lock.acquire()
                gradient = torch.ones(8)
                dist.all_reduce(gradient)
                state["w"] += gradient
                run.save_blocking(step, state)
    print(f"rank {dist.get_rank()} trained from step {first} and has {float(state['w'][0])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
