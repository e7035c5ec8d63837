"""Jobs of several processes for the tests of trainers, and FSDP of Accelerate on CPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptcore_integrations import added_files
from ckptcore_testing.servers import free_port

HERE = Path(__file__).parent


def environment() -> dict[str, str]:
    """Return the environment of a process that imports test modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}


def run_job(program: str, size: int, directory: Path, **variables: str) -> list[int]:
    """Run Python code in each process of a job, and return the exit statuses. No process may fail, except after a kill.

    If a process is killed, the others are killed as well, as a launcher does it. Errors are written to files in
    `directory`.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = {**environment(), "WORLD_SIZE": str(size), **address, **variables}
    processes = []
    for rank in range(size):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        with (directory / f"errors-{rank}").open("wb") as errors:
            program_of_rank = [sys.executable, "-c", program]
            processes.append(subprocess.Popen(program_of_rank, env={**job, **ranks}, stderr=errors))
    for process in processes:
        if process.wait() < 0:
            for other in processes:
                other.kill()
    statuses = [process.returncode for process in processes]
    said = [(directory / f"errors-{rank}").read_text()[-6000:] for rank in range(size)]
    assert -signal.SIGKILL in statuses or all(status <= 0 for status in statuses), "\n".join(said)
    return statuses


def kill_before_commit(earlier: Path, written: Path | None = None) -> None:
    """Kill this process right before a trainer's save commits, once the path `earlier` exists.

    No public event happens so late in a save. Before the kill, the paths of all files that are in the directory of
    `written` are written to the file `written`.
    """
    begin = added_files.SaveWithFiles.begin

    def begin_killed(self: Any, save: Any) -> Any:
        transaction = begin(self, save)
        commit = transaction.commit

        def kill_or_commit(payloads: Any) -> None:
            if earlier.exists():
                if written is not None:
                    written.write_text("\n".join(map(str, written.parent.rglob("*"))))
                os.kill(os.getpid(), signal.SIGKILL)
            commit(payloads)

        transaction.commit = kill_or_commit  # type: ignore[method-assign]
        return transaction

    added_files.SaveWithFiles.begin = begin_killed  # type: ignore[method-assign]


@contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """Make Accelerate use PyTorch's FSDP in a job of CPUs. Version 1.15 would silently use DistributedDataParallel.

    Replaces `AcceleratorState.__init__`. If the state of a job of CPUs gets an FSDP plugin, it then has
    `DistributedType.FSDP`, the plugin, and the device "cpu", like a state of several GPUs. Everything else in
    Accelerate and PyTorch is unchanged.
    """
    import torch
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    original = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP):
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            self.device = torch.device("cpu")  # FSDP 1 refuses cpu:0
            PartialState._shared_state.update(distributed_type=self.distributed_type, device=self.device)

    AcceleratorState.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        AcceleratorState.__init__ = original  # type: ignore[method-assign]
