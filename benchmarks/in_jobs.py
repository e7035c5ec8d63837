"""Comparisons in jobs of several processes: starting them, measuring in each, and joining the measurements."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.alternating import Case, Contender, Times, measure, timed_rows
from benchmarks.report import PageCache, Row


def torchrun(processes: int, module: str, *arguments: object) -> None:
    """Run a module in processes of torchrun, and wait for them.

    Raises:
        RuntimeError: if a process failed.
    """
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", module]
    end([start(*command, *map(str, arguments))])


def jax_job(processes: int, module: str, *arguments: object) -> None:
    """Run a module in processes of a job of JAX, and wait for them. Its last arguments are the port, size and rank.

    Raises:
        RuntimeError: if a process failed.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = ["-m", module, *map(str, arguments), str(port), str(processes)]
    end([start(*command, str(rank)) for rank in range(processes)])


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a Python process whose libraries use one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for processes.

    Raises:
        RuntimeError: one of them failed.
    """
    errors = [process.communicate()[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        if process.returncode:
            raise RuntimeError(error.decode(errors="replace")[-4000:])


def measure_rank(
    contenders: Sequence[Contender],
    rounds: int,
    results: Path,
    *,
    rank: int,
    barrier: Callable[[], object],
    writes: bool = False,
) -> None:
    """Measure contenders in one process of a job, and write the measurements for `joined_times`.

    Args:
        contenders: the same ones in the same order in all processes.
        rounds: timed rounds.
        results: a directory that all processes share.
        rank: the rank of this process.
        barrier: waits for all processes.
        writes: the contenders write files.
    """
    times = measure(Case("", contenders, writes=writes), rounds, barrier)
    records = {name: asdict(of_one) for name, of_one in times.items()}
    (results / f"{rank}.json").write_text(json.dumps(records), encoding="utf-8")


def joined_times(results: Path) -> Mapping[str, Times]:
    """Join the measurements of all processes. A round takes as long as the slowest process.

    CPU seconds and bytes read are the sums over the processes.
    """
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.iterdir())]
    joined = {}
    for name, first in ranks[0].items():
        columns = {column: list(zip(*[rank[name][column] for rank in ranks], strict=True)) for column in first}
        joined[name] = Times(
            [max(of_round) for of_round in columns["seconds"]],
            [sum(of_round) for of_round in columns["cpu"]],
            [sum(of_round) for of_round in columns["nbytes_read"]],
            [PageCache(**of_round[0]) for of_round in columns["page_caches"]],  # all processes share a machine
        )
    return joined


def joined_rows(name: str, results: Path, *, nbytes: int = 0, targets: Mapping[str, float]) -> Sequence[Row]:
    """Summarise a case of a job.

    Args:
        name: the name of the case.
        results: the directory with the measurements that the processes wrote.
        nbytes: bytes that all processes together save or load.
        targets: see `Contender.target`, by name of the contender.
    """
    times = joined_times(results)
    contenders = [Contender(of_one, lambda: None, target=targets.get(of_one)) for of_one in times]
    return timed_rows(Case(name, contenders, nbytes), times)
