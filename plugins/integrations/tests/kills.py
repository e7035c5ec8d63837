"""A program that kills a save at its first, second, ... access to a file, and checks which checkpoint is left.

``kills.py LIBRARY WAY DIRECTORY [EVERY]`` kills at each access, or only at every n-th access. After each kill, it loads
the checkpoint. It prints the number of kills, and for each kill the loaded step, or "none".
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_ACCESSES: Final = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.link")


def kill_at(number: int, directory: Path) -> None:
    """Kill this process at the n-th access to a file in a directory."""
    left = [number]

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name in _ACCESSES and any(str(directory) in str(argument) for argument in arguments):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def torch_dcp(way: str) -> tuple[Callable[[Path, int], None], Callable[[Path], int]]:
    """Return two functions: one saves a step, the other loads it with both libraries."""
    import ckptcore_integrations.torch_dcp as dcp
    import torch
    import torch.distributed.checkpoint as original

    def save(location: Path, step: int) -> None:
        state = {"w": torch.full((1000,), float(step)), "step": step}
        if way == "save":
            dcp.save(state, checkpoint_id=location)
        elif way == "async_save":
            dcp.async_save(state, checkpoint_id=location).result()
        else:
            original.save(state, storage_writer=dcp.Writer(location))

    def load(location: Path) -> int:
        for library in (dcp, original):
            loaded = {"w": torch.zeros(1000), "step": 0}
            library.load(loaded, checkpoint_id=location)
            assert (loaded["w"] == loaded["step"]).all()
        return int(loaded["step"])

    return save, load


def orbax_v1(way: str) -> tuple[Callable[[Path, int], None], Callable[[Path], int]]:
    """Return two functions: one saves a step, the other loads it with both libraries."""
    import numpy as np
    from ckptcore_integrations import orbax_v1 as ours
    from orbax.checkpoint import v1 as original

    def save(location: Path, step: int) -> None:
        state = {"w": np.full(1000, step), "step": step}
        if way == "save":
            ours.save(location, state, overwrite=True)
        elif way == "save_async":
            ours.save_async(location, state, overwrite=True).result()
        else:
            with ours.training.Checkpointer(location) as checkpointer:
                checkpointer.save(step, state, overwrite=True)

    def load(location: Path) -> int:
        if way == "Checkpointer":
            with original.training.Checkpointer(location) as checkpointer:
                location = location / str(checkpointer.latest.step)
        for library in (ours, original):
            loaded = library.load(location)
            assert (loaded["w"] == loaded["step"]).all()
        return int(loaded["step"])

    return save, load


def forked(work: Callable[[], None]) -> int:
    """Call a function in a forked process. Return the status of the process, as `os.waitpid` does."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001  # ends the forked process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def found_at(location: Path, load: Callable[[Path], int]) -> str:
    """Return the step of the checkpoint at a location, or "none". A forked process loads the checkpoint."""
    reading, writing = os.pipe()

    def report() -> None:
        os.write(writing, (str(load(location)) if location.exists() else "none").encode())

    assert forked(report) == 0
    os.close(writing)
    with open(reading, encoding="utf-8") as output:
        return output.read()


def main() -> None:
    """Kill saves at one access after another, until a save ends before the access."""
    warnings.simplefilter("ignore")
    library, way, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    every = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    save, load = {"torch_dcp": torch_dcp, "orbax_v1": orbax_v1}[library](way)
    location = directory / "saved"
    steps = []
    for moment in range(1, 1000, every):
        assert forked(lambda: save(location, 1)) == 0

        def doomed(moment: int = moment) -> None:
            kill_at(moment, directory)
            save(location, 2)

        status = forked(doomed)
        steps.append(found_at(location, load))
        if status == 0:
            break
        assert status == signal.SIGKILL
    print(len(steps) - 1, *steps)


if __name__ == "__main__":
    main()
