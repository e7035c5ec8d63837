"""Scripts in jobs of torchrun, and in the same jobs whose processes have imported PyTorch when they start."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

_HOST: Final = "127.0.0.1"
_SECONDS_TO_END: Final = 30
"""From SIGTERM to SIGKILL, as of torchrun."""
_STREAMS: Final = ("stdout", "stderr")


@dataclass(frozen=True)
class FinishedJob:
    """Result of a job: the output of all processes, and the exit code of each, as in `subprocess.CompletedProcess`.

    Attributes:
        codes: exit codes by rank; the negative number of a signal that killed the process.
        stdout, stderr: output of all ranks, one after another.
    """

    codes: Sequence[int | None]
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        """0 if all processes succeeded, else 1."""
        return int(any(self.codes))


def run_script(
    size: int,
    script: str | Path,
    *arguments: str | Path,
    variables: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> FinishedJob:
    """Run a script in a job of `size` processes, as ``torchrun --standalone --nproc-per-node SIZE`` does.

    The processes are forked from a server that has imported the frameworks, so they start in a fraction of a second.
    Otherwise a job is like one of torchrun: its store is in this process, each process has the environment variables
    of torchrun and one thread, and if a process fails or is killed, the others are ended. Differences: there is no
    restart, the interpreters end without finalization, and strings have the same hashes on all ranks.

    Args:
        variables: environment variables in addition to those of this process and of torchrun.
        timeout: maximum seconds until all processes have ended.

    Raises:
        TimeoutError: if the job takes longer; contains the output.
    """
    store: Any = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # it is exported
    context = multiprocessing.get_context("forkserver")
    command = [os.path.abspath(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as output:
        processes = []
        for rank in range(size):
            environment = {**os.environ, **_variables(rank, size, store.port), **(variables or {})}
            names = (f"{output}/{rank}.stdout", f"{output}/{rank}.stderr")
            processes.append(context.Process(target=_run, args=(command, os.getcwd(), environment, names)))
        try:
            for process in processes:
                process.start()
            in_time = _wait(processes, timeout)
        finally:
            _end(processes)
        codes = [process.exitcode for process in processes]
        stdout, stderr = ("".join([_text(f"{output}/{rank}.{name}") for rank in range(size)]) for name in _STREAMS)
    if not in_time:
        raise TimeoutError(f"{command} ran longer than {timeout} seconds, and was ended with {codes}:\n{stderr}")
    return FinishedJob(codes, stdout, stderr)


def run_torchrun(
    size: int, script: str | Path, *arguments: str | Path, max_restarts: int = 0, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script in a job of torchrun itself, which takes seconds longer: each process imports PyTorch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return subprocess.run(
        [*command, "--max-restarts", str(max_restarts), str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    variables = {
        "MASTER_ADDR": _HOST, "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0,
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default", "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        "TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}


def _run(command: Sequence[str], directory: str, environment: Mapping[str, str], output: Sequence[str]) -> None:
    """Run a script in this process as the interpreter does, with its functions at exit."""
    os.setsid()  # so that its children can be ended, too
    for number, (name, stream) in enumerate(zip(output, (sys.stdout, sys.stderr), strict=True), 1):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what it writes before it is killed is read
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(command)
    sys.path.insert(0, os.path.dirname(command[0]))
    multiprocessing.set_start_method(None, force=True)  # its own processes start as those of other scripts
    torch.set_num_threads(1)  # PyTorch has read OMP_NUM_THREADS already
    threads: Any = threading
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:  # noqa: BLE001  # the exit code and stderr show it
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        threads._shutdown()
        atexit._run_exitfuncs()


def _wait(processes: Sequence[BaseProcess], timeout: float) -> bool:
    """Wait until all processes succeed or one fails. Return False if neither happens in time."""
    deadline = time.monotonic() + timeout
    while running := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            return True
        if not wait([process.sentinel for process in running], max(0, deadline - time.monotonic())):
            return False
    return True


def _end(processes: Sequence[BaseProcess]) -> None:
    """End the started processes that still run, and their children."""
    running = [process for process in processes if process.pid is not None and process.exitcode is None]
    for process in running:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + _SECONDS_TO_END
    for process in running:
        process.join(max(0, deadline - time.monotonic()))
        if process.exitcode is None:
            _signal(process, signal.SIGKILL)
            process.join()


def _signal(process: BaseProcess, number: int) -> None:
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # it has not called setsid yet, or has just ended
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _text(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace") if os.path.exists(file) else ""
