"""Overwrites a checkpoint again and again, and is killed at the first, second, ... access to a file of the save.

``torch_dcp_kills.py WAY DIRECTORY`` prints the number of kills, and what was found after each: the step, or "none".
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ckptcore_integrations.torch_dcp as dcp
import torch
import torch.distributed.checkpoint as original
from torch_dcp_job import kill_at


def save(way: str, location: Path, step: int) -> None:
    """Save a state in one of the ways."""
    state = {"w": torch.full((1000,), float(step)), "step": step}
    if way == "save":
        dcp.save(state, checkpoint_id=location)
    elif way == "async_save":
        dcp.async_save(state, checkpoint_id=location).result()
    else:
        original.save(state, storage_writer=dcp.Writer(location))


def forked(work: Callable[[], None]) -> int:
    """Run work in a forked process, and return its signal or exit status, as `os.waitpid` does."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001  # ends the forked process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def report(location: Path) -> None:
    """Print what is found at a location. PyTorch loads it, too."""
    if not location.exists():
        print("none", flush=True)
        return
    for library in (dcp, original):
        found = {"w": torch.zeros(1000), "step": 0}
        library.load(found, checkpoint_id=location)
        assert (found["w"] == found["step"]).all()
    print(found["step"], flush=True)


def main() -> None:
    """Kill a save at every moment, until one is not reached."""
    warnings.simplefilter("ignore")
    way, directory = sys.argv[1], Path(sys.argv[2])
    location = directory / "saved"
    found = []
    for moment in range(1, 1000):
        assert forked(lambda: save(way, location, 1)) == 0

        def doomed(moment: int = moment) -> None:
            kill_at(moment, directory)
            save(way, location, 2)

        status = forked(doomed)
        reading, writing = os.pipe()
        stdout = os.dup(1)
        os.dup2(writing, 1)
        assert forked(lambda: report(location)) == 0
        os.dup2(stdout, 1)
        os.close(writing)
        with open(reading, encoding="utf-8") as output:
            found.append(output.read().strip())
        if status == 0:
            break
        assert status == signal.SIGKILL
    print(len(found) - 1, *found)


if __name__ == "__main__":
    main()
