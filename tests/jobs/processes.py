"""Jobs of real processes. Each process runs a task of a program, and returns its result as JSON."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ckptcore_testing.servers import free_port

_PATIENCE_SECONDS: Final = 240


@dataclass(frozen=True)
class Place:
    """The place of a process in its job, and the arguments of its task.

    Attributes:
        rank, size: the rank of the process, and the number of processes.
        devices: the number of devices of the process.
        port: the port on 127.0.0.1 at which the processes connect.
        directory: the directory of the test.
        layouts: the layouts of the saves.
    """

    rank: int
    size: int
    devices: int
    port: int
    directory: Path
    layouts: Sequence[str]


class Program(Protocol):
    """A module that each process of a job runs."""

    TASKS: Mapping[str, Callable[[Place], Any]]
    """Tasks by name. Each returns JSON."""

    def run(self, task: Callable[[Place], Any], place: Place) -> Any:
        """Begin the job, do the task, and end the job."""
        ...


def run_job(
    program: str, task: str, directory: Path, *, size: int, devices: int = 1, layouts: Sequence[str] = ()
) -> list[Any]:
    """Run a task of a program in a job of `size` processes. Return their results by rank.

    The processes are forked from a server that has imported the frameworks, but has not initialized them.
    """
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch:
        processes = []
        for rank in range(size):
            place = Place(rank, size, devices, port, directory, layouts)
            processes.append(context.Process(target=_process, args=(program, task, place, f"{scratch}/{rank}")))
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(timeout=_PATIENCE_SECONDS)
            said = [_last_words(Path(f"{scratch}/{rank}.errors")) for rank in range(size)]
            codes = [process.exitcode for process in processes]
            assert codes == [0] * size, f"{program}.{task} ended with {codes}:\n" + "\n".join(said)
            return [json.loads(Path(f"{scratch}/{rank}.json").read_text()) for rank in range(size)]
        finally:
            for process in processes:
                process.kill()


def _process(program: str, task: str, place: Place, result: str) -> None:
    with open(f"{result}.errors", "wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        module: Any = importlib.import_module(program)
        answer = module.run(module.TASKS[task], place)
    except BaseException:  # noqa: BLE001  # the parent reports it
        traceback.print_exc()
        os._exit(1)  # a normal exit may wait for other processes
    Path(f"{result}.json").write_text(json.dumps(answer))


def _last_words(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")[-5000:] if file.exists() else ""
