"""Recovery from steps in memory, compared with other ways: from the kill of a job to its first new step.

A job of torch with gloo has one process on each host. One host is lost: its process and its memory. The launcher ends
the other processes, and starts as many again, forked from a process that has imported all libraries. All contenders
load the same bytes: the state is sharded over the processes. The phases are:

- detection: from the kill until the last new process runs. A real launcher takes longer.
- agreement: until all processes have a process group, and know what to load from where.
- transfer: the bytes are moved.
- building: the rest, until all processes have finished a step.

Each contender has its best configuration. ckptcore verifies all bytes. DCP and torchft verify nothing. Files on disk
are in the page cache, because they were written before. torchft keeps a second, healthy replica group of as many
processes, which send from their own memory; its address is known without its manager. lm-resiliency writes what
survived to files when its processes get SIGTERM, and reads them in new processes; here these files are in memory, and
hosts share them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ckptcore_testing.servers import free_port

from benchmarks import recovery_processes as processes
from benchmarks.alternating import Case, Contender, compare
from benchmarks.recovery_processes import ARRAYS, COLUMNS, JOB, Member
from benchmarks.report import Row
from benchmarks.setting import Setting

_SIZES: Final = (2, 4, 8, 16)
_BYTES: Final = 1 << 29
_SECONDS: Final = 120.0
_PHASES: Final = ("detection", "agreement", "transfer", "building")


def rows(setting: Setting) -> Iterator[Row]:
    """Kill jobs of several sizes."""
    sizes = [size for size in _SIZES if size <= setting.count(_SIZES[-1], least=2)]
    with tempfile.TemporaryDirectory(prefix="ckptcore-bench-", dir="/dev/shm") as memory:
        for size in sizes:
            yield from _killed(setting, Path(memory), size)


def _contenders() -> Iterator[str]:
    """Yield the contenders that are installed."""
    yield from (processes.MEMORY, processes.DISK, processes.DCP)
    for name, is_there in (
        (processes.TORCHFT, processes.HAS_TORCHFT),
        (processes.LM_RESILIENCY, processes.HAS_LM_RESILIENCY),
    ):
        if is_there:
            yield name
        else:
            print(f"recovery: {name} is not installed, and is left out: call make bench-recovery", file=sys.stderr)


class Forker:
    """Forks processes from one that has imported the libraries."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        """Start it with a command before it, such as that of a network namespace."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-W", "ignore", "-m", "benchmarks.recovery_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],
        )

        self._imported: set[str] = {"__main__"}

    def _ask(self, request: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(request, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def fork(self, member: Member) -> int:
        """Fork a process. Return its id."""
        return self._ask(processes.request_of(member))

    def wait(self, ids: Sequence[int]) -> None:
        """Wait until processes have ended."""
        self._ask(json.dumps(["wait", list(ids)]))

    def imports(self, modules: Sequence[str]) -> None:
        """Import modules, so that processes which are forked later need not."""
        self._ask(json.dumps(["import", [name for name in modules if name not in self._imported]]))
        self._imported.update(modules)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@dataclass(slots=True)
class _Recovery:
    """What one recovery took."""

    seconds: Mapping[str, float]
    messages: tuple[int, int]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(slots=True)
class _KilledJob:
    """A job of one contender.

    Attributes:
        results: one for each recovery.
    """

    forker: Forker
    name: str
    size: int
    rows: int
    directory: Path
    memory: Path
    results: list[_Recovery] = field(default_factory=list)
    _running: list[int] = field(default_factory=list)
    _holding: list[int] = field(default_factory=list)
    _spares: int = 0

    def _members(self, task: str) -> list[Member]:
        hosts = [f"host-{rank}" for rank in range(self.size - 1)] + [f"spare-{self._spares}"]
        port = free_port()
        return [
            Member(self.name, task, str(self.directory), str(self.memory / host), rank, self.size, port, self.rows)
            for rank, host in enumerate(hosts)
        ]

    def _start(self, task: str) -> tuple[list[int], list[Member]]:
        members = self._members(task)
        for member in members:
            member.output.unlink(missing_ok=True)
        return [self.forker.fork(member) for member in members], members

    def prepare(self) -> None:
        """Start the job, and save a step."""
        self.directory.mkdir(exist_ok=True)
        self.memory.mkdir(exist_ok=True)
        if self.name == processes.TORCHFT:
            self._holding, members = self._start("hold")
            _results(members)
        self._running, members = self._start("prepare")
        _results(members)

    def recover(self) -> _Recovery:
        """Lose the last host, end the others, and start the job again."""
        killed = time.monotonic()
        self._lose_host()
        others = signal.SIGTERM if self.name == processes.LM_RESILIENCY else signal.SIGKILL
        for process in self._running[:-1]:
            os.kill(process, others)
        self.forker.wait(self._running)
        self._running, members = self._start("recover")
        results = _results(members)
        self.forker.imports(results[0]["modules"])
        return _recovery(killed, results)

    def _lose_host(self) -> None:
        os.kill(self._running[-1], signal.SIGKILL)
        server = self.memory / f"spare-{self._spares}" / JOB / "server.json"
        if server.exists():
            os.kill(json.loads(server.read_bytes())["pid"], signal.SIGKILL)
        self._spares += 1

    def clear(self, result: _Recovery) -> None:
        """Keep a result, and end all processes."""
        self.results.append(result)
        self.end()
        for lost in self.memory.glob("spare-*"):
            if lost.name != f"spare-{self._spares}":
                shutil.rmtree(lost)
        shutil.rmtree(self.memory / "files", ignore_errors=True)

    def end(self) -> None:
        """End all processes."""
        for process in [*self._running, *self._holding]:
            os.kill(process, signal.SIGKILL)
        self.forker.wait([*self._running, *self._holding])
        self._running, self._holding = [], []

    def close(self) -> None:
        """End all processes and servers, and free the memory."""
        self.end()
        for server in self.memory.glob(f"*/{JOB}/server.json"):
            os.kill(json.loads(server.read_bytes())["pid"], signal.SIGKILL)
        shutil.rmtree(self.memory, ignore_errors=True)

    def note(self) -> str:
        """Return the medians of the phases."""
        medians = [statistics.median([result.seconds[phase] for result in self.results]) for phase in _PHASES]
        return ", ".join([f"{phase} {seconds:.3f} s" for phase, seconds in zip(_PHASES, medians, strict=True)])


def _results(members: Sequence[Member]) -> Sequence[Mapping[str, Any]]:
    """Wait for the results of processes.

    Raises:
        RuntimeError: a process failed.
    """
    results: list[Mapping[str, Any]] = []
    deadline = time.monotonic() + _SECONDS
    for member in members:
        while not member.output.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{member} has no result after {_SECONDS:.0f} s")
            time.sleep(0.005)
        result = json.loads(member.output.read_text(encoding="utf-8"))
        if "error" in result:
            raise RuntimeError(f"{member}: {result['error']}")
        results.append(result)
    return results


def _recovery(killed: float, results: Sequence[Mapping[str, Any]]) -> _Recovery:
    """Join the marks of all processes: a phase ends when the last process has ended it."""
    first, agreed, loaded, stepped = [
        max(column) for column in zip(*[result["marks"] for result in results], strict=True)
    ]
    transfer = max(result["transfer"] for result in results)
    ends = (killed, first, agreed, agreed + min(transfer, loaded - agreed), stepped)
    seconds = {phase: stop - start for phase, start, stop in zip(_PHASES, ends, ends[1:], strict=False)}
    return _Recovery(seconds, _most_messages(results))


def _most_messages(results: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the requests and the bytes of the host with most of them, over all processes."""
    sums: dict[str, list[int]] = {}
    for result in results:
        for place, counts in result["messages"].items():
            sums[place] = [own + more for own, more in zip(sums.get(place, [0, 0]), counts, strict=True)]
    return max([counts[0] for counts in sums.values()], default=0), max(
        [counts[1] for counts in sums.values()], default=0
    )


def _killed(setting: Setting, memory: Path, size: int) -> Iterator[Row]:
    rows_of_array = max(size, setting.count(_BYTES) // (ARRAYS * COLUMNS * 4) // size * size)
    forker = Forker()
    jobs = {
        name: _KilledJob(
            forker, name, size, rows_of_array, setting.directory / f"{number}-{size}", memory / f"{number}-{size}"
        )
        for number, name in enumerate(_contenders())
    }
    try:
        contenders = [
            Contender(
                name,
                job.recover,
                job.prepare,
                job.clear,
                lambda result: float(result.total),
                None if name in (processes.MEMORY, processes.DISK) else 1.0,
            )
            for name, job in jobs.items()
        ]
        nbytes = rows_of_array * ARRAYS * COLUMNS * 4
        case = Case(f"recovery: {size} processes, {nbytes >> 20} MiB", contenders, memory=nbytes)
        for row in compare(case, setting.rounds):
            yield replace(row, cpu=None, note=jobs[row.contender].note())
        messages, moved = [
            statistics.median(column)
            for column in zip(*[result.messages for result in jobs[processes.MEMORY].results], strict=True)
        ]
        yield Row(f"recovery: restart of {size} hosts", "messages of a host, at most", messages, "messages")
        yield Row(f"recovery: restart of {size} hosts", "bytes of a host, at most", moved, "B")
    finally:
        for job in jobs.values():
            job.close()
        forker.close()
        for job in jobs.values():
            shutil.rmtree(job.directory, ignore_errors=True)
